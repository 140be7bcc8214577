"""What is asked of each env of a group, besides steps and resets."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium

from multienv.wire.memory import RESETTING, SLOT
from multienv.wire.messages import (
    APART,
    Call,
    Failure,
    GetAttribute,
    HasAttribute,
    Message,
    Render,
    SetAttribute,
    Sparing,
    dumps,
    pack_value,
    unpack_message,
)
from multienv.worker import entropy
from multienv.worker.eavesdropping import listening
from multienv.worker.failures import failure_of, not_picklable
from multienv.worker.tenant import Tenant, call_by_name


class GroupCalls(Tenant):
    """Calls all envs of a group, one after the other; what one raises keeps none of the others from being called.

    Attributes:
        replies: The pipe that the worker answers on; -1 for none.
    """

    replies = -1
    _envs: list[gymnasium.Env[Any, Any]]
    _steps: list[Callable[[Any], Any]]
    _build: Callable[[int], gymnasium.Env[Any, Any]]
    _abandoned: list[gymnasium.Env[Any, Any]]
    _words: Any  # the control words
    _spared: tuple[int, ...] | None = None
    # Infos, failures and state that went with the last reply.
    _told: tuple[list[tuple[int, Any]], dict[int, Failure], bytes | None] = [], {}, None

    @abstractmethod
    def _framed(self, seq: int, extras: dict[str, Any], state: bytes | None) -> bytes:
        """The reply to a step or a reset."""

    def tell_apart(self, seq: int) -> bytes:
        """The last reply again, with the infos pickled one by one."""
        infos, failures, state = self._told
        apart, failures = [], dict(failures)
        for slot, info in infos:
            self._words[SLOT] = slot + 1
            try:
                apart.append((slot, dumps(info)))
            except Exception as error:  # it did the first time
                failures[slot] = failure_of(not_picklable("step", error))
        self._words[SLOT] = 0
        return self._framed(seq, {APART: apart, "failures": failures}, state)

    def spare(self, seq: int, message: Sparing, ask: Callable[[Any], bytes]) -> bytes:
        """Ask all but some, and see who ends the process by what it answers."""
        self._spared = message.slots
        try:
            return ask(message.message)
        finally:
            self._spared = None

    def call(self, seq: int, message: Call) -> bytes:
        """Call a method of each."""
        return self._each(seq, message.name, lambda slot, env: call_by_name(env, message))

    def get(self, seq: int, message: GetAttribute) -> bytes:
        """Read an attribute of each."""
        return self._each(seq, message.name, lambda slot, env: env.get_wrapper_attr(message.name))

    def has(self, seq: int, message: HasAttribute) -> bytes:
        """Tell of each whether there is such an attribute."""
        return self._each(seq, message.name, lambda slot, env: env.has_wrapper_attr(message.name))

    def set(self, seq: int, message: SetAttribute) -> bytes:
        """Write an attribute of each: there is a value for every one."""
        return self._each(seq, message.name, lambda slot, env: env.set_wrapper_attr(message.name, message.value[slot]))

    def render(self, seq: int, message: Render) -> bytes:
        """Draw each."""
        return self._each(seq, "render", lambda slot, env: env.render())

    def _build_anew(self, seq: int, slot: int, lasting: Sequence[bytes]) -> None:
        """Have another env in the place of one whose reset ends every process that it is brought back in.

        The old one is neither closed nor let go of: that may end this one. The new one is not seeded as it was, or it
        would draw what the old one has died of.
        """
        self._words[SLOT] = slot + 1 + RESETTING
        entropy.begin_life(seq)
        env = self._build(slot)
        self._abandoned.append(self._envs[slot])
        self._envs[slot], self._steps[slot] = env, env.step
        for frame in lasting:
            with contextlib.suppress(Exception):  # as it may have been the first time
                self._do_again(env, slot, unpack_message(frame))

    @staticmethod
    def _do_again(env: Any, slot: int, message: Message) -> None:
        """What was asked of all, for one."""
        if isinstance(message, Sparing):
            if slot in message.slots:
                return
            message = message.message
        if isinstance(message, SetAttribute):
            env.set_wrapper_attr(message.name, message.value[slot])
        elif isinstance(message, Call):
            call_by_name(env, message)
        elif isinstance(message, Render):
            env.render()

    def _each(self, seq: int, name: str, ask: Callable[[int, Any], Any]) -> bytes:
        """The answers of all, and what some have raised instead."""
        values: list[bytes | None] = []  # pickled one by one: what cannot be unpickled costs its own env alone
        failures: dict[int, Failure] = {}
        with listening(self._words, -1 if self._spared is None else self.replies) as expose:
            for slot, env in enumerate(self._envs):
                self._words[SLOT] = slot + 1
                values.append(None)
                if self._spared is not None and slot in self._spared:
                    continue
                try:
                    value = ask(slot, env)
                    try:
                        values[slot] = dumps(value)
                    except Exception as error:
                        raise not_picklable(name, error) from error
                except Exception as error:
                    failures[slot] = failure_of(error)
                expose(slot)
        self._words[SLOT] = 0
        return pack_value(seq, (values, failures))

    def _try_out(self, values: list[tuple[int, Any]]) -> None:
        """Pickle them one by one: who does not survive that, or writes on the pipe, is known by the mark."""
        with listening(self._words, self.replies) as expose:
            for slot, value in values:
                self._words[SLOT] = slot + 1
                with contextlib.suppress(Exception):  # told of when all are pickled together
                    dumps(value)
                expose(slot)
        self._words[SLOT] = 0
