"""What is asked of each env of a group, besides steps and resets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium

from multienv.wire.memory import SLOT
from multienv.wire.messages import (
    Call,
    Failure,
    GetAttribute,
    HasAttribute,
    Render,
    SetAttribute,
    dumps,
    pack_value,
)
from multienv.worker.failures import failure_of, not_picklable
from multienv.worker.tenant import Tenant, call_by_name


class GroupCalls(Tenant):
    """Calls all envs of a group, one after the other; what one raises keeps none of the others from being called."""

    _envs: list[gymnasium.Env[Any, Any]]
    _words: Any  # the control words

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

    def _each(self, seq: int, name: str, ask: Callable[[int, Any], Any]) -> bytes:
        """The answers of all, and what some have raised instead."""
        values: list[Any] = []
        failures: dict[int, Failure] = {}
        for slot, env in enumerate(self._envs):
            self._words[SLOT] = slot + 1
            value = None
            try:
                value = ask(slot, env)
            except Exception as error:
                failures[slot] = failure_of(error)
            values.append(value)
        try:
            return pack_value(seq, (values, failures))
        except Exception:
            for slot, value in enumerate(values):
                try:
                    dumps(value)
                except Exception as error:
                    values[slot] = None
                    failures[slot] = failure_of(not_picklable(name, error))
            return pack_value(seq, (values, failures))
