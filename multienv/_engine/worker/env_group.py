"""The envs of one worker: it resets and calls them one after the other, and marks the slot of the env being called.

Steps are made in ``stepper``.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from time import perf_counter
from types import BuiltinMethodType, MethodType, ModuleType
from typing import Any, NoReturn

import gymnasium
from gymnasium.spaces.utils import is_space_dtype_shape_equiv

from multienv._engine.wire.messages import Build, Call, Description, Failure, GetAttribute, Method, SetAttribute
from multienv._engine.wire.segment import SLOT, Segment
from multienv._engine.worker import seeding
from multienv._engine.worker.failures import failure_of, pickled, wrong_result
from multienv._engine.worker.starts import Starts
from multienv.errors import ResetNeededError, UsageError

Step = Callable[[Any], Any]


class EnvGroup:
    """Holds the envs of a worker, one for each slot.

    Args:
        envs: The envs, built.
        message: The request that the envs were built for.
        segment: Of the worker: its control words say which slot is called.

    Attributes:
        starts: Resets at which a replay can begin.
        waiting: Slots that take no part in a replay yet.
        raised: In the last call of :meth:`each` the env of a slot that is not in ``waiting`` has raised.
        calls: For each slot the function that a step calls: the env's ``step``, or after the end of an episode another
            one. The list is never replaced: native code holds it.
    """

    def __init__(self, envs: Sequence[gymnasium.Env[Any, Any]], message: Build, segment: Segment) -> None:
        self.envs = list(envs)
        self.slots = len(self.envs)
        self.verbatim = message.verbatim
        self.autoreset = message.autoreset
        self.truncates_errors = message.truncates_errors
        self.observation_space = envs[0].observation_space if message.space is None else message.space
        self.action_space = envs[0].action_space
        self.words = segment.words
        self.starts = Starts(self.envs, message.starts, segment, message.generators)
        self.waiting: AbstractSet[int] = frozenset()
        self.raised = False
        self._steps: list[Step] = []
        self._spaces = [(env.observation_space, env.action_space) for env in self.envs]
        self._new_spaces = b""
        self._ended = [not message.verbatim] * self.slots
        self.calls: list[Step] = []
        self.update_calls()
        for env, draw in zip(envs, message.draws, strict=False):
            seeding.give_generator(env, draw)

    def move(self, segment: Segment) -> None:
        """Go on with another segment."""
        self.words, self.starts.segment = segment.words, segment

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
        """Look up each env's ``step``: some envs set it anew, one for each phase."""
        self._steps = [env.step for env in self.envs]
        self.calls[:] = [self._call_after_end(slot) if ended else step for slot, (ended, step) in self._each_step()]

    def calls_are_current(self) -> bool:
        """Tell whether each env's ``step`` is unchanged; called after each request that is not a step."""
        with contextlib.suppress(Exception):  # code of the user
            return [env.step for env in self.envs] == self._steps
        return True

    def _each_step(self) -> Iterable[tuple[int, tuple[bool, Step]]]:
        return enumerate(zip(self._ended, self._steps, strict=True))

    def begin(self, slot: int, **arguments: Any) -> tuple[Any, Any]:
        """Reset the env of a slot; return observation and info.

        Args:
            slot: Which.
            arguments: ``seed`` and ``options`` where the caller resets; none where the worker resets by itself.
        """
        self.words[SLOT] = slot + 1
        self.starts.before_reset(slot)
        began = perf_counter()
        try:
            result = self.envs[slot].reset(**arguments)
            # An array of two numbers, or a dict of two keys, could be unpacked too: an observation of the old gym API.
            is_pair = isinstance(result, (tuple, list)) and len(result) == 2
            if not is_pair or not (result[1] is None or isinstance(result[1], Mapping)):
                raise wrong_result("reset", "observation, info", result)
            observation, info = result
        except BaseException:
            self.starts.forget(slot)
            raise
        self.starts.count(perf_counter() - began)
        self._look_at_spaces(slot)
        self._ended[slot] = False
        self.calls[slot] = self._steps[slot]
        return observation, info

    def take_spaces(self) -> bytes:
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
        self.calls[slot] = self._call_after_end(slot)

    def _call_after_end(self, slot: int) -> Step:
        return partial(self._begin_by_step, slot) if self.autoreset in {"NEXT_STEP", "SAME_STEP"} else _refuse

    def _begin_by_step(self, slot: int, action: Any) -> tuple[Any, float, bool, bool, Any]:
        observation, info = self.begin(slot)
        return observation, 0.0, False, False, info

    # --- calls and attributes ---------------------------------------------------------------------

    def call(self, message: Call) -> bytes:
        """Call a method of each env, or read an attribute that is not callable; as :meth:`each`."""
        return self.each(message.name, message.slots, lambda index, env: _call_by_name(env, message))

    def write(self, message: SetAttribute) -> bytes:
        """Set an attribute of each env; as :meth:`each`."""
        name, values = message.name, message.values
        return self.each(name, message.slots, lambda index, env: env.set_wrapper_attr(name, values[index]))

    def get(self, message: GetAttribute) -> bytes:
        """Read an attribute of each env or of a wrapper of it; as :meth:`each`."""

        def read(index: int, env: Any) -> Any:
            value = _attribute(env, message.name)
            return Method() if _is_method(value) or (message.callables and callable(value)) else value

        return self.each(message.name, message.slots, read)

    def is_wrapped(self, kind: tuple[str, str], slots: Sequence[int] | None) -> bytes:
        """Tell of each env whether it has a wrapper of a class, given by module and name; as :meth:`each`."""

        def look(index: int, env: Any) -> bool:
            wrappers = [type(layer) for layer in seeding.layers_of(env) if isinstance(layer, gymnasium.Wrapper)]
            return any((base.__module__, base.__name__) == kind for one in wrappers for base in one.__mro__)

        return self.each("is_wrapped", slots, look)

    def each(self, name: str, slots: Sequence[int] | None, ask: Callable[[int, Any], Any]) -> bytes:
        """Call ``ask`` for each env; an exception in one does not keep the others from being asked.

        Args:
            name: Of the method or attribute, for errors.
            slots: Which envs; ``None``: all.
            ask: Called with the index in ``slots`` and the env.

        Returns:
            A pickle: the list of answers, each pickled by itself (``None``: it failed), and failures by slot.
        """
        values: list[bytes | None] = []
        failures: dict[int, Failure] = {}
        self.raised = False
        for index, slot in enumerate(range(self.slots) if slots is None else slots):
            self.words[SLOT] = slot + 1
            values.append(None)
            try:
                values[index] = pickled(name, ask(index, self.envs[slot]))
            except Exception as error:
                failures[slot] = failure_of(error)
                self.raised |= slot not in self.waiting
        self.words[SLOT] = 0
        return pickle.dumps((values, failures), protocol=5)


def _refuse(action: Any) -> NoReturn:
    raise ResetNeededError(
        "There is no episode in this env. Call reset(options={'reset_mask': mask}) before the next step()."
    )


def _call_by_name(env: Any, message: Call) -> Any:
    attribute = _attribute(env, message.name)
    return attribute(*message.args, **(message.kwargs or {})) if callable(attribute) else attribute


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
