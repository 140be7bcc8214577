"""The dispatcher: one request frame in, one reply frame out.

The same host runs in a worker process and in the trainer itself (the serial backend), so there is no
second loop to drift. It knows nothing of pipes and processes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import traceback
from collections.abc import Callable, MutableSequence
from typing import Any

import cloudpickle
import gymnasium

from multienv.wire.actions import INT, action_decoder
from multienv.wire.memory import BUSY, REPLAYING, Block
from multienv.wire.messages import (
    ANCHORED,
    FAILED,
    INTEGER,
    KIND_AT,
    LARGE_EVIDENCE,
    REQUEST,
    STEP,
    STEPPED,
    TAG_AT,
    Branch,
    Call,
    Close,
    Description,
    Failure,
    GetAttribute,
    HasAttribute,
    Initialize,
    Render,
    Replay,
    Reset,
    SetAttribute,
    evidence_of,
    pack_value,
    unpack_message,
)
from multienv.wire.observations import Pack, Placement, packer
from multienv.worker import generators

_unpack = REQUEST.unpack_from


class ResultNotPicklable(Exception):  # noqa: N818 - travels as a flag of Failure, never seen by users
    """What the env returned cannot travel."""


class Host:
    """Holds one env and answers requests for it.

    Attributes:
        handle: Number, kind and frame of a request → the frame of its reply.
        closing: It has been asked to close.

    Args:
        env_fn: The function that builds the env, where it need not travel (fork, serial).
        words: The control words, to mark what is being executed; a plain list in the serial twin.
        on_initialize: Called before the env is built, with the message: where a process finds its place.
        allocate: Gives the memory for observations, once the spaces are known.
        on_branch: Has the process fork itself after the request of this number, to be kept under this token; says what
            is in the way, or nothing.
    """

    def __init__(
        self,
        *,
        env_fn: Callable[[], gymnasium.Env[Any, Any]] | None = None,
        words: MutableSequence[int] | memoryview | None = None,
        on_initialize: Callable[[Initialize], None] = lambda message: None,
        allocate: Callable[[int], Block] = Block.private,
        on_branch: Callable[[int, int], str] = lambda seq, token: "the trainer's own process",
    ) -> None:
        """Hold no env yet: it is built by the first request."""
        self.closing = False
        self.handle: Callable[[int, int, bytes], bytes] = self._handle
        self.block: Block | None = None
        self._allocate = allocate
        self._env_fn = env_fn
        self._words: Any = [0, 0] if words is None else words
        self._on_initialize = on_initialize
        self._on_branch = on_branch
        self._env: gymnasium.Env[Any, Any] | None = None
        self._pack: Pack | None = None
        self._placement = Placement(None, inline=True)
        self._step: Callable[[Any], Any] | None = None

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
            reply = _HANDLERS[type(message)](self, seq, message)
        except Exception as error:
            reply = pack_value(seq, failure_of(error), FAILED)
        self._look_up_step()
        self._words[BUSY] = 0
        return reply

    def _look_up_step(self) -> None:
        """Some envs set their ``step`` anew, one for each phase: here, so that steps need not look."""
        env, pack = self._env, self._pack
        with contextlib.suppress(Exception):  # foreign code
            if env is not None and pack is not None and env.step != self._step:
                self.handle = self._compile(env, pack)

    def _compile(self, env: gymnasium.Env[Any, Any], pack: Pack) -> Callable[[int, int, bytes], bytes]:
        """The same for steps too: one function, because each call, and each object it touches, counts here."""
        step = self._step = env.step
        decode, unpack_integer = action_decoder(env.action_space), INTEGER.unpack_from
        words, handle, header = self._words, self._handle, REQUEST.size

        def handle_any(seq: int, kind: int, frame: bytes) -> bytes:
            if kind != STEP:
                return handle(seq, kind, frame)
            words[BUSY] = seq + 1
            try:
                result = step(unpack_integer(frame, header)[0] if frame[TAG_AT] == INT else decode(frame))
                try:
                    observation, reward, terminated, truncated, info = result
                except (TypeError, ValueError):
                    raise _wrong_result("step", "observation, reward, terminated, truncated, info", result) from None
                try:
                    reply = pack(seq, observation, reward, terminated, truncated, info, 0)
                except Exception as error:
                    raise _not_sent("step", error, terminated=terminated, truncated=truncated, info=info) from error
            except Exception as error:
                reply = pack_value(seq, failure_of(error), FAILED)
            words[BUSY] = 0
            return reply

        return handle_any

    def move(self, words: MutableSequence[int] | memoryview, allocate: Callable[[int], Block]) -> None:
        """To other control words and other memory, with the observations that lie there."""
        self._words, self._allocate = words, allocate
        env, old = self._env, self.block
        if env is None:
            return
        if old is not None:
            self.block = allocate(old.size)
            self.block.view[:] = old.view
        self._pack = packer(env.observation_space, self._placement, self.block)
        self.handle = self._compile(env, self._pack)
        if old is not None:
            old.close()

    # --- one method per message ---------------------------------------------------------------

    def _initialize(self, seq: int, message: Initialize) -> bytes:
        self._on_initialize(message)
        if message.seeds is not None:
            generators.seed_process(message.seeds)
        env_fn = self._env_fn if message.env_fn is None else cloudpickle.loads(message.env_fn)
        assert env_fn is not None
        if message.setting is not None:
            gymnasium.registry.update({spec.id: spec for spec in cloudpickle.loads(message.setting.overrides)})
        try:
            env = env_fn()
        except gymnasium.error.UnregisteredEnv:
            if message.setting is None:
                raise
            register(message.setting.registrations)  # the trainer may know it
            env = env_fn()
        if not isinstance(env, gymnasium.Env):
            raise TypeError(
                f"env_fn returned {env!r:.200}, which is not a gymnasium.Env. Return an env, already built."
            )
        self._env = env
        placement = self._placement = Placement.of(env.observation_space, message.inline_limit)
        self.block = self._allocate(placement.block_size) if placement.block_size else None
        self._pack = packer(env.observation_space, placement, self.block)
        self.handle = self._compile(env, self._pack)
        description = Description(
            observation_space=env.observation_space,
            action_space=env.action_space,
            metadata=dict(env.metadata or {}),
            spec=env.spec,
            render_mode=env.render_mode,
            pid=os.getpid(),
        )
        return self._value(seq, description, "its constructor (spaces, metadata, spec)")

    def _reset(self, seq: int, message: Reset) -> bytes:
        env = self._require()
        assert self._pack is not None
        if message.generators is not None:
            generators.restore(env, message.generators)
        state = generators.capture(env) if message.anchor else None
        result = env.reset(seed=message.seed, options=message.options)
        try:
            observation, info = result
        except (TypeError, ValueError):
            raise _wrong_result("reset", "observation, info", result) from None
        try:
            if message.anchor:
                # A falsy info arrives as {} also without an anchor.
                return self._pack(seq, observation, 0.0, False, False, (info or {}, state), ANCHORED)
            return self._pack(seq, observation, 0.0, False, False, info, 0)
        except Exception as error:
            raise _not_sent("reset", error, info=info) from error

    def _call(self, seq: int, message: Call) -> bytes:
        name, *inside = message.name.split(".")
        attribute = self._require().get_wrapper_attr(name)
        for name in inside:
            attribute = getattr(attribute, name)
        value = attribute(*message.args, **message.kwargs) if callable(attribute) else attribute
        return self._value(seq, value, message.name)

    def _get(self, seq: int, message: GetAttribute) -> bytes:
        return self._value(seq, self._require().get_wrapper_attr(message.name), message.name)

    def _has(self, seq: int, message: HasAttribute) -> bytes:
        return pack_value(seq, self._require().has_wrapper_attr(message.name))

    def _set(self, seq: int, message: SetAttribute) -> bytes:
        self._require().set_wrapper_attr(message.name, message.value)
        return pack_value(seq, None)

    def _render(self, seq: int, message: Render) -> bytes:
        return self._value(seq, self._require().render(), "render")

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

    # --- the env ------------------------------------------------------------------------------

    def close_env(self) -> None:
        """Close the env, once."""
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _require(self) -> gymnasium.Env[Any, Any]:
        if self._env is None:
            raise RuntimeError("There is no env: it was not built, or is closed.")
        return self._env

    def _value(self, seq: int, value: Any, name: str) -> bytes:
        try:
            return pack_value(seq, value)
        except Exception as error:
            raise _not_picklable(name, error) from error


def register(registrations: bytes) -> None:
    """Register the envs that the trainer knows and this process does not.

    First their packages are imported: they may register their envs themselves, and would do so again.
    """
    unknown = [spec for spec in cloudpickle.loads(registrations) if spec.id not in gymnasium.registry]
    for package in {spec.entry_point.partition(".")[0].partition(":")[0] for spec in unknown if _named(spec)}:
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    for spec in unknown:
        gymnasium.registry.setdefault(spec.id, spec)


def _named(spec: gymnasium.envs.registration.EnvSpec) -> bool:
    return isinstance(spec.entry_point, str)


_HANDLERS: dict[type, Callable[[Host, int, Any], bytes]] = {
    Initialize: Host._initialize,
    Reset: Host._reset,
    Call: Host._call,
    GetAttribute: Host._get,
    HasAttribute: Host._has,
    SetAttribute: Host._set,
    Render: Host._render,
    Branch: Host._branch,
    Replay: Host._replay,
    Close: Host._close,
}


def _wrong_result(what: str, wanted: str, result: Any) -> Exception:
    return TypeError(
        f"env.{what}() returned {type(result).__name__} {result!r:.200}; gymnasium's API wants ({wanted}). "
        "Wrap an env of the old gym API, or mend the env."
    )


def _not_sent(what: str, error: Exception, **parts: Any) -> Exception:
    """The fault of a part that is not even true or false, an array for instance; or else of pickling."""
    for name, part in parts.items():
        try:
            bool(part)
        except Exception as fault:
            wanted = "a dict" if name == "info" else "a bool"
            return TypeError(
                f"env.{what}() returned {type(part).__name__} {_text_of(part):.200} as {name}; gymnasium's API wants "
                f"{wanted}. It is neither true nor false: {_text_of(fault)}"
            )
    return _not_picklable(what, error)


def _not_picklable(what: str, error: Exception) -> Exception:
    return ResultNotPicklable(
        f"What the env returned from {what}() cannot be sent to the trainer: {type(error).__name__}: {error}. "
        "Keep objects that cannot be pickled (locks, files, handles) out of observations and infos."
    )


def failure_of(error: BaseException) -> Failure:
    """The exception in a form that travels whatever it is made of."""
    return Failure(
        type_name=f"{type(error).__module__}.{type(error).__qualname__}",
        text=_text_of(error),
        traceback="".join(traceback.format_exception(error)),
        exception=_travelling(error),
        result_not_picklable=isinstance(error, ResultNotPicklable),
    )


def _text_of(value: object) -> str:
    try:
        return str(value)
    except Exception:  # foreign code
        return "<its text cannot be had>"


def _travelling(error: BaseException) -> bytes | None:
    """Type, arguments and attributes, pickled; ``None`` where they cannot be.

    Not the exception itself: to unpickle it would call its constructor, which may want other arguments.
    """
    for state in (vars(error), {}):
        try:
            data: bytes = cloudpickle.dumps((type(error), error.args, state))
            pickle.loads(data)
        except Exception:  # noqa: S112 - pickling runs foreign code, in both directions
            continue
        return data
    return None
