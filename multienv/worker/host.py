"""The dispatcher: one request frame in, one reply frame out.

The same host runs in a worker process and in the trainer itself (the serial backend), so there is no
second loop to drift. It knows nothing of pipes and processes, and leaves the envs to its tenant.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cloudpickle
import gymnasium

from multienv.wire.memory import BUSY, REPLAYING, RESETTING, SLOT, WORDS, Block
from multienv.wire.messages import (
    FAILED,
    KIND_AT,
    LARGE_EVIDENCE,
    REQUEST,
    STEP,
    STEPPED,
    Branch,
    Call,
    CaptureState,
    Close,
    GetAttribute,
    HasAttribute,
    Initialize,
    Render,
    Replay,
    Reset,
    RestoreState,
    SetAttribute,
    Sparing,
    TellApart,
    evidence_of,
    pack_value,
    unpack_message,
)
from multienv.worker import generators
from multienv.worker.entropy import Entropy
from multienv.worker.failures import failure_of
from multienv.worker.group import EnvGroup
from multienv.worker.registrations import adopt, register
from multienv.worker.single import SingleEnv
from multienv.worker.state_hooks import register_all
from multienv.worker.tenant import Handle, Tenant, Words, packed

_unpack = REQUEST.unpack_from


class Host:
    """Answers requests, those that concern envs through its tenant.

    Attributes:
        handle: Number, kind and frame of a request → the frame of its reply.
        closing: It has been asked to close.
        replies: The pipe that it answers on; -1 for none.

    Args:
        env_fn: What builds the env, or the list of what builds a group's, where it need not travel (fork, serial).
        words: The control words, to mark what is being executed; a plain list in the serial twin.
        on_initialize: Called before the env is built, with the message: where a process finds its place.
        allocate: Gives the memory for observations, once the spaces are known.
        arena: Gives the memory that several hosts share, for the observations of all their envs.
        on_branch: Has the process fork itself after the request of this number, to be kept under this token; says what
            is in the way, or nothing.
    """

    def __init__(
        self,
        *,
        env_fn: Any = None,
        words: Words | None = None,
        on_initialize: Callable[[Initialize], None] = lambda message: None,
        allocate: Callable[[int], Block] = Block.private,
        arena: Callable[[int], Block] = Block.private,
        on_branch: Callable[[int, int], str] = lambda seq, token: "the trainer's own process",
    ) -> None:
        """Hold no env yet: it is built by the first request."""
        self.closing = False
        self.replies = -1
        self.handle: Handle = self._handle
        self._allocate = allocate
        self._arena = arena
        self._env_fn = env_fn
        self._words: Any = [0] * WORDS if words is None else words
        self._on_initialize = on_initialize
        self._on_branch = on_branch
        self._tenant: Tenant | None = None
        self._entropy: Entropy | None = None

    @property
    def block(self) -> Block | None:
        """The memory that observations are written to, if they do not travel in the replies."""
        return None if self._tenant is None else self._tenant.block

    def answer(self, frame: bytes) -> bytes:
        """Answer one request."""
        _, seq, kind, _ = _unpack(frame)
        return self.handle(seq, kind, frame)

    def _handle(self, seq: int, kind: int, frame: bytes) -> bytes:
        """Answer one request that is not a step. Only what ends a process (SystemExit, …) is raised."""
        self._words[BUSY] = seq + 1
        try:
            assert kind != STEP
            message = unpack_message(frame)
            handler = _OF_TENANT.get(type(message))
            if handler is None:
                reply = _OF_HOST[type(message)](self, seq, message)
            else:
                reply = handler(self._require(), seq, message)
        except Exception as error:
            reply = pack_value(seq, failure_of(error), FAILED)
        tenant = self._tenant
        if tenant is not None and not tenant.is_compiled():
            self.handle = tenant.compile(self._words, self._handle)
        self._words[BUSY] = 0
        return reply

    def answer_on(self, replies: int) -> None:
        """By this pipe."""
        self.replies = replies
        if isinstance(self._tenant, EnvGroup):
            self._tenant.replies = replies

    def remember(self, seq: int) -> None:
        """The process is about to fork: the copy may be moved long after this request."""
        if self._tenant is not None:
            self._tenant.remember(seq)

    def move(self, words: Words, allocate: Callable[[int], Block]) -> None:
        """To other control words and other memory, with the observations that lie there."""
        self._words, self._allocate = words, allocate
        tenant = self._tenant
        if tenant is None:
            return
        old = tenant.move(allocate)
        self.handle = tenant.compile(words, self._handle)
        if old is not None:
            old.close()

    # --- one method per message ---------------------------------------------------------------

    def _initialize(self, seq: int, message: Initialize) -> bytes:
        self._on_initialize(message)
        if message.seeds is not None:
            generators.seed_process(message.seeds)
            self._entropy = Entropy(message.seeds[2], self._place_of(message))
            self._entropy.install()
        env_fn = self._env_fn if message.env_fn is None else cloudpickle.loads(message.env_fn)
        assert env_fn is not None
        if message.setting is not None:
            adopt(message.setting.registrations, message.setting.overrides)
        register_all(message.state_hooks)
        registrations = None if message.setting is None else message.setting.registrations
        if message.group is None:
            self._tenant = SingleEnv(
                built(env_fn, registrations), inline_limit=message.inline_limit, allocate=self._allocate
            )
        else:
            envs: list[gymnasium.Env[Any, Any]] = []
            for one in env_fn:
                self._words[SLOT] = len(envs) + 1
                try:
                    envs.append(built(one, registrations))
                except Exception as error:
                    return pack_value(seq, replace(failure_of(error), slot=len(envs)), FAILED)
            self._words[SLOT] = 0
            self._tenant = EnvGroup(envs, message.group, self._arena, lambda slot: built(env_fn[slot], registrations))
            self._tenant.replies = self.replies
        self.handle = self._tenant.compile(self._words, self._handle)
        return packed(seq, self._tenant.describe(), "its constructor (spaces, metadata, spec)")

    def _place_of(self, message: Initialize) -> Callable[[], int]:
        """What tells which env of the batch is being called, from 1 on."""
        if message.group is None:
            return lambda: 1
        first = message.group.first

        def place() -> int:
            slot = self._words[SLOT] % RESETTING
            return first + slot if slot else 0

        return place

    def _spare(self, seq: int, message: Sparing) -> bytes:
        tenant = self._require()
        assert isinstance(tenant, EnvGroup)
        return tenant.spare(seq, message, lambda asked: _OF_TENANT[type(asked)](tenant, seq, asked))

    def _tell_apart(self, seq: int, message: TellApart) -> bytes:
        tenant = self._require()
        assert isinstance(tenant, EnvGroup)
        return tenant.tell_apart(seq)

    def _branch(self, seq: int, message: Branch) -> bytes:
        return pack_value(seq, self._on_branch(seq, message.token))

    def _replay(self, seq: int, message: Replay) -> bytes:
        words = self._words
        evidence, last = [], b""
        for index, frame in enumerate(message.frames):
            words[REPLAYING] = index + 1
            reply = self.answer(frame)
            words[BUSY] = seq + 1
            evidence.append(evidence_of(reply))
            if len(reply) > LARGE_EVIDENCE and reply[KIND_AT] == STEPPED:
                last = reply
            elif reply[KIND_AT] == STEPPED:
                last = b""
        words[REPLAYING] = 0
        return pack_value(seq, (evidence, last))

    def _close(self, seq: int, message: Close) -> bytes:
        self.closing = True
        self.close_env()
        return pack_value(seq, None)

    # --- the tenant ---------------------------------------------------------------------------

    def close_env(self) -> None:
        """Close what it holds, once."""
        tenant, self._tenant = self._tenant, None
        try:
            if tenant is not None:
                tenant.close()
        finally:
            if self._entropy is not None:
                self._entropy.remove()

    def _require(self) -> Tenant:
        if self._tenant is None:
            raise RuntimeError("There is no env: it was not built, or is closed.")
        return self._tenant


def built(env_fn: Callable[[], Any], registrations: bytes | None) -> gymnasium.Env[Any, Any]:
    """The env; what the trainer has registered is registered here if it turns out to be needed."""
    try:
        env = env_fn()
    except gymnasium.error.UnregisteredEnv:
        if registrations is None:
            raise
        register(registrations)  # the trainer may know it
        env = env_fn()
    if not isinstance(env, gymnasium.Env):
        raise TypeError(f"env_fn returned {env!r:.200}, which is not a gymnasium.Env. Return an env, already built.")
    return env


def _timed(call: Callable[[], bytes]) -> tuple[float, bytes]:
    """The seconds it has taken the processor, and what it returned."""
    began = time.thread_time()
    value = call()
    return time.thread_time() - began, value


_OF_HOST: dict[type, Callable[[Host, int, Any], bytes]] = {
    Initialize: Host._initialize,
    Sparing: Host._spare,
    TellApart: Host._tell_apart,
    Branch: Host._branch,
    Replay: Host._replay,
    Close: Host._close,
}
_OF_TENANT: dict[type, Callable[[Tenant, int, Any], bytes]] = {
    Reset: lambda tenant, seq, message: tenant.reset(seq, message),
    Call: lambda tenant, seq, message: tenant.call(seq, message),
    GetAttribute: lambda tenant, seq, message: tenant.get(seq, message),
    HasAttribute: lambda tenant, seq, message: tenant.has(seq, message),
    SetAttribute: lambda tenant, seq, message: tenant.set(seq, message),
    Render: lambda tenant, seq, message: tenant.render(seq, message),
    CaptureState: lambda tenant, seq, message: pack_value(seq, _timed(lambda: tenant.capture_state(seq, message))),
    RestoreState: lambda tenant, seq, message: pack_value(seq, tenant.restore_state(message)),
}
