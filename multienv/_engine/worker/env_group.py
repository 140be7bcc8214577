"""The envs of one worker: it resets and calls them one after the other, and marks the slot of the env being called.

Steps are made in ``stepper``.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from time import perf_counter
from types import BuiltinMethodType, MethodType, ModuleType
from typing import Any, NoReturn

import gymnasium
from gymnasium.spaces.utils import is_space_dtype_shape_equiv

from multienv._engine.wire.codecs import Codec
from multienv._engine.wire.messages import (
    Build,
    Call,
    Description,
    Failure,
    GetAttribute,
    IsWrapped,
    Method,
    Question,
    SetAttribute,
)
from multienv._engine.wire.segment import SLOT, Segment
from multienv._engine.worker import seeding
from multienv._engine.worker.replay_points import ReplayPoints
from multienv._engine.worker.replies import failure_of, pickled, wrong_result
from multienv.errors import ResetNeededError, UsageError

Step = Callable[[Any], Any]


class EnvGroup:
    """Holds the envs of a worker, one for each slot.

    Args:
        envs: The envs, built.
        message: The request that the envs were built for.
        segment: Of the worker: its control words say which slot is called.

    Attributes:
        codec: Says how their steps lie in banks.
        replay_points: Resets at which a replay can begin.
        waiting: Slots that take no part in a replay yet.
        raised: In the last call of :meth:`ask` the env of a slot that is not in ``waiting`` has raised.
        calls: For each slot the function that a step calls: the env's ``step``, or after the end of an episode another
            one. The list is never replaced: native code holds it.
    """

    def __init__(self, envs: Sequence[gymnasium.Env[Any, Any]], message: Build, segment: Segment) -> None:
        self.envs = list(envs)
        self.slots = len(self.envs)
        self.verbatim = message.verbatim
        self.autoreset = message.autoreset
        self.truncates_errors = message.truncates_errors
        self.codec = Codec(self.describe(), message.verbatim, message.space, message.autoreset)
        self.observation_space, self.action_space = self.codec.space, self.codec.action_space
        self.words = segment.words
        self.replay_points = ReplayPoints(self.envs, message.replay_point_share, segment, message.generators)
        self.waiting: AbstractSet[int] = frozenset()
        self.raised = False
        self._spaces = [(env.observation_space, env.action_space) for env in self.envs]
        self._new_spaces = b""
        self._ended = [not message.verbatim] * self.slots
        self._steps: list[Step] = [env.step for env in self.envs]
        self.calls: list[Step] = list(map(self._call_of, range(self.slots)))
        for env, draw in zip(envs, message.draws, strict=False):
            seeding.ensure_generator(env, draw)

    def move(self, segment: Segment) -> None:
        """Go on with another segment."""
        self.words, self.replay_points.segment = segment.words, segment

    def describe(self) -> Description:
        """Return the spaces of all envs, with metadata, spec and render mode of the first."""
        first = self.envs[0]
        return Description(
            spaces=tuple((env.observation_space, env.action_space) for env in self.envs),
            metadata=dict(first.metadata or {}),
            spec=first.spec,
            render_mode=first.render_mode,
        )

    def close(self) -> None:
        """Close all envs, also if one raises."""
        with contextlib.ExitStack() as stack:
            for env in self.envs:
                stack.callback(env.close)

    # --- episodes ---------------------------------------------------------------------------------

    def update_calls(self) -> None:
        """Look up each env's ``step``, after a request that is none: some envs set it anew, one for each phase."""
        with contextlib.suppress(Exception):  # code of the user
            steps: list[Step] = [env.step for env in self.envs]
            if steps != self._steps:
                self._steps = steps
                self.calls[:] = map(self._call_of, range(self.slots))

    def reset(self, slot: int, **arguments: Any) -> tuple[Any, Any]:
        """Reset the env of a slot; return observation and info.

        Args:
            slot: Which.
            arguments: ``seed`` and ``options`` where the caller resets; none where the worker resets by itself.
        """
        self.words[SLOT] = slot + 1
        self.replay_points.before_reset(slot)
        began = perf_counter()
        try:
            result = self.envs[slot].reset(**arguments)
            # An array of two numbers, or a dict of two keys, could be unpacked too: an observation of the old gym API.
            is_pair = isinstance(result, (tuple, list)) and len(result) == 2
            if not is_pair or not (result[1] is None or isinstance(result[1], Mapping)):
                raise wrong_result("reset", "observation, info", result)
            observation, info = result
        except BaseException:
            self.replay_points.forget(slot)
            raise
        self.replay_points.count(perf_counter() - began)
        self._look_at_spaces(slot)
        self._ended[slot] = False
        self.calls[slot] = self._call_of(slot)
        return observation, info

    def pop_new_spaces(self) -> bytes:
        """Return the spaces of a single env, pickled, if it has set others in its reset; once."""
        spaces, self._new_spaces = self._new_spaces, b""
        return spaces

    def _look_at_spaces(self, slot: int) -> None:
        """Note the spaces that an env has set in its reset; raise UsageError if they do not fit its batch."""
        env, known = self.envs[slot], self._spaces[slot]
        now = env.observation_space, env.action_space
        if now[0] is known[0] and now[1] is known[1]:
            return
        self._spaces[slot] = now
        if now == known:
            return
        if self.verbatim:
            self._new_spaces = pickled("reset", now)
        elif not all(map(is_space_dtype_shape_equiv, now, known)):
            raise UsageError(
                f"reset() has set the spaces {now}, and the env was built with {known}. The envs of a batch keep their "
                "shapes and dtypes: use SubprocessEnv or MultiEnv, or spaces large enough for all episodes."
            )

    def end(self, slot: int) -> None:
        """Note that the episode of a slot has ended."""
        self._ended[slot] = True
        self.calls[slot] = self._call_of(slot)

    def _call_of(self, slot: int) -> Step:
        if not self._ended[slot]:
            return self._steps[slot]
        return partial(self._reset_by_step, slot) if self.autoreset in {"NEXT_STEP", "SAME_STEP"} else _refuse

    def _reset_by_step(self, slot: int, action: Any) -> tuple[Any, float, bool, bool, Any]:
        observation, info = self.reset(slot)
        return observation, 0.0, False, False, info

    # --- calls and attributes ---------------------------------------------------------------------

    def ask(self, message: Question) -> bytes:
        """Call a method of each env, or read or write an attribute; one that raises does not keep others from it.

        Returns:
            A pickle: the list of answers, each pickled by itself (``None``: it failed), and failures by slot.
        """
        values: list[bytes | None] = []
        failures: dict[int, Failure] = {}
        self.raised = False
        for index, slot in enumerate(range(self.slots) if message.slots is None else message.slots):
            self.words[SLOT] = slot + 1
            values.append(None)
            try:
                answer = ASK[type(message)](message, index, self.envs[slot])
                values[index] = pickled(getattr(message, "name", "is_wrapped"), answer)
            except Exception as error:
                failures[slot] = failure_of(error)
                self.raised |= slot not in self.waiting
        self.words[SLOT] = 0
        return pickle.dumps((values, failures), protocol=5)


def _refuse(action: Any) -> NoReturn:
    raise ResetNeededError(
        "There is no episode in this env. Call reset(options={'reset_mask': mask}) before the next step()."
    )


def _call(message: Call, index: int, env: Any) -> Any:
    attribute = _attribute(env, message.name)
    return attribute(*message.args, **(message.kwargs or {})) if callable(attribute) else attribute


def _get(message: GetAttribute, index: int, env: Any) -> Any:
    value = _attribute(env, message.name)
    return Method() if _is_method(value) or (message.callables and callable(value)) else value


def _set(message: SetAttribute, index: int, env: Any) -> Any:
    return env.set_wrapper_attr(message.name, message.values[index])


def _is_wrapped(message: IsWrapped, index: int, env: Any) -> bool:
    wrappers = [type(layer) for layer in seeding.layers_of(env) if isinstance(layer, gymnasium.Wrapper)]
    return any((base.__module__, base.__name__) == message.kind for one in wrappers for base in one.__mro__)


def _attribute(env: Any, path: str) -> Any:
    """Return what is found under a name, or under names joined by dots."""
    name, *inside = path.split(".")
    value = env.get_wrapper_attr(name)
    for name in inside:
        value = getattr(value, name)
    return value


def _is_method(value: Any) -> bool:
    """Tell whether calling a copy of ``value`` would call a method of a copy."""
    while isinstance(value, partial):
        value = value.func
    return isinstance(value, MethodType | BuiltinMethodType) and not isinstance(
        value.__self__, type | ModuleType | None
    )


# Answers a question for one env, given its index in the slots that are asked.
ASK: dict[type, Callable[[Any, int, Any], Any]] = {
    Call: _call,
    GetAttribute: _get,
    SetAttribute: _set,
    IsWrapped: _is_wrapped,
}
