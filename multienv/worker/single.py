"""One env, whose replies carry exactly what it returned."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import gymnasium

from multienv.wire.actions import INT, action_decoder
from multienv.wire.memory import BUSY, Block
from multienv.wire.messages import (
    ANCHORED,
    FAILED,
    INTEGER,
    REQUEST,
    STEP,
    TAG_AT,
    Call,
    CaptureState,
    Description,
    GetAttribute,
    HasAttribute,
    Method,
    Render,
    Reset,
    RestoreState,
    SetAttribute,
    pack_value,
)
from multienv.wire.observations import Placement, packer
from multienv.worker import generators, states
from multienv.worker.failures import failure_of, not_sent, wrong_result
from multienv.worker.states import Beginning
from multienv.worker.tenant import Handle, Tenant, call_by_name, is_method, packed


class SingleEnv(Tenant):
    """Holds one env.

    Args:
        env: The env, built.
        inline_limit: Up to so many bytes an observation travels in the reply; -1: always.
        allocate: Gives the memory for larger ones.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], *, inline_limit: int, allocate: Callable[[int], Block]) -> None:
        """Take the env in."""
        self._env = env
        placement = self._placement = Placement.of(env.observation_space, inline_limit)
        self.block = allocate(placement.block_size) if placement.block_size else None
        self._pack = packer(env.observation_space, placement, self.block)
        self._step: Callable[[Any], Any] | None = None
        self._begun: Beginning | None = None  # the last reset

    def describe(self) -> Description:
        """The env's spaces and what else a gymnasium.Env tells of itself."""
        env = self._env
        return Description(
            observation_space=env.observation_space,
            action_space=env.action_space,
            metadata=dict(env.metadata or {}),
            spec=env.spec,
            render_mode=env.render_mode,
            pid=os.getpid(),
        )

    def compile(self, words: Any, handle: Handle) -> Handle:
        """See :class:`Tenant`."""
        env, pack = self._env, self._pack
        step = self._step = env.step
        decode, unpack_integer, header = action_decoder(env.action_space), INTEGER.unpack_from, REQUEST.size

        def handle_any(seq: int, kind: int, frame: bytes) -> bytes:
            if kind != STEP:
                return handle(seq, kind, frame)
            words[BUSY] = seq + 1
            try:
                result = step(unpack_integer(frame, header)[0] if frame[TAG_AT] == INT else decode(frame))
                try:
                    observation, reward, terminated, truncated, info = result
                except (TypeError, ValueError):
                    raise wrong_result("step", "observation, reward, terminated, truncated, info", result) from None
                try:
                    reply = pack(seq, observation, reward, terminated, truncated, info, 0)
                except Exception as error:
                    raise not_sent("step", error, terminated=terminated, truncated=truncated, info=info) from error
            except Exception as error:
                reply = pack_value(seq, failure_of(error), FAILED)
            words[BUSY] = 0
            return reply

        return handle_any

    def is_compiled(self) -> bool:
        """Some envs set their ``step`` anew, one for each phase: looked at here, so that steps need not."""
        with contextlib.suppress(Exception):  # foreign code
            return self._env.step == self._step
        return True

    def move(self, allocate: Callable[[int], Block]) -> Block | None:
        """See :class:`Tenant`."""
        old = self.block
        if old is not None:
            self.block = allocate(old.size)
            self.block.view[:] = old.view
        self._pack = packer(self._env.observation_space, self._placement, self.block)
        return old

    def close(self) -> None:
        """Close the env."""
        self._env.close()

    def reset(self, seq: int, message: Reset) -> bytes:
        """Begin an episode."""
        env = self._env
        self._begun = message.seed, message.options
        if message.generators is not None:
            generators.restore(env, message.generators)
        state = generators.capture(env) if message.anchor else None
        result = env.reset(seed=message.seed, options=message.options)
        try:
            observation, info = result
        except (TypeError, ValueError):
            raise wrong_result("reset", "observation, info", result) from None
        try:
            if message.anchor:
                # A falsy info arrives as {} also without an anchor.
                return self._pack(seq, observation, 0.0, False, False, (info or {}, state), ANCHORED)
            return self._pack(seq, observation, 0.0, False, False, info, 0)
        except Exception as error:
            raise not_sent("reset", error, info=info) from error

    def capture_state(self, seq: int, message: CaptureState) -> bytes:
        """What a new process needs to go on from here."""
        # Options have come through a pickle, of the kind that takes anything.
        data: bytes = cloudpickle.dumps((self._begun, message.step, states.capture(self._env)))
        return data

    def restore_state(self, message: RestoreState) -> None:
        """Go on from there."""
        self._begun, step, state = pickle.loads(message.state)
        if step:
            step = (INTEGER.unpack_from(step, REQUEST.size)[0] if step[TAG_AT] == INT else self._decode(step),)
        states.warm_up(self._env, self._begun, step)
        states.restore(self._env, state)

    def _decode(self, step: bytes) -> Any:
        return action_decoder(self._env.action_space)(step)

    def call(self, seq: int, message: Call) -> bytes:
        """Call a method, or read an attribute that is not callable."""
        return packed(seq, call_by_name(self._env, message), message.name)

    def get(self, seq: int, message: GetAttribute) -> bytes:
        """Read an attribute of the env or of one of its wrappers."""
        value = self._env.get_wrapper_attr(message.name)
        return packed(seq, Method() if is_method(value) else value, message.name)

    def has(self, seq: int, message: HasAttribute) -> bytes:
        """Tell whether there is such an attribute."""
        return pack_value(seq, self._env.has_wrapper_attr(message.name))

    def set(self, seq: int, message: SetAttribute) -> bytes:
        """Write an attribute."""
        self._env.set_wrapper_attr(message.name, message.value)
        return pack_value(seq, None)

    def render(self, seq: int, message: Render) -> bytes:
        """Draw the env."""
        return packed(seq, self._env.render(), "render")
