"""Find out, inside its worker, what an env imports, draws from and has outside, and if its values can be compared."""

from __future__ import annotations

import builtins
import importlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import gymnasium

from multienv._engine.processes.leftovers import open_descriptors
from multienv._engine.wire.digests import MARK, evidence_of
from multienv._engine.worker.asked import obstacle_of
from multienv._engine.worker.census import OBSTACLES, census, standard_streams
from multienv._engine.worker.seeding import seed_process, state_of_process
from multienv.testing.side_by_side import EnvFn


class Outside(NamedTuple):
    """Tells of one thing that an env has beyond its memory.

    Attributes:
        when: When it was first seen: ``"after its construction"`` and so on.
        what: For people.
        obstacle: One of ``OBSTACLES``; ``""``: it is put back.
    """

    when: str
    what: str
    obstacle: str


class Noticed(NamedTuple):
    """Holds what was noticed of an env.

    Attributes:
        drawn_from: Which of ``random`` and ``numpy.random`` it has drawn from, or seeded, in resets and steps.
        incomparable: Name of the type of a value that it returned and that cannot be compared; ``""``: there is none.
        outside: What it has beyond its memory.
    """

    drawn_from: tuple[str, ...] = ()
    incomparable: str = ""
    outside: tuple[Outside, ...] = ()


class Watched(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Compares the generators of the process before and after each reset and step, and looks at what they return.

    Args:
        env_fn: Builds the env. What the process has open before is multienv's.
    """

    def __init__(self, env_fn: EnvFn) -> None:
        self._ours = open_descriptors()
        self._standard = standard_streams()
        self._outside: dict[tuple[str, str], Outside] = {}
        self._is_called, self._steps = False, 0
        super().__init__(env_fn())
        self._noticed = Noticed()
        self._before = state_of_process()
        self._take_census("after its construction")
        sys.addaudithook(self._hear)

    def reset(self, **options: Any) -> Any:
        """Reset the env."""
        self._before, self._is_called = state_of_process(), True
        try:
            observation, info = self.env.reset(**options)
        finally:
            self._is_called = False
        self._look(observation)
        if not self._steps:
            self._take_census("after a reset")
        return observation, info

    def step(self, action: Any) -> Any:
        """Step the env."""
        self._before, self._is_called = state_of_process(), True
        self._steps += 1
        try:
            *result, info = self.env.step(action)
        finally:
            self._is_called = False
        self._look(*result)
        return (*result, info)

    def noticed(self) -> Noticed:
        """Return what was noticed up to now."""
        self._take_census(f"after {self._steps} steps")
        return self._noticed._replace(outside=tuple(self._outside.values()))

    def _take_census(self, when: str) -> None:
        for found in census(self._ours, (), self._standard) if sys.platform == "linux" else ():
            self._note(when, found.what, OBSTACLES[found.obstacle])

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_called and obstacle_of(event, arguments):
            what = f"{event}({', '.join(map(repr, arguments[-1:] if event.startswith('socket') else arguments[:1]))})"
            when = "in a step" if self._steps else "in a reset"
            self._note(when, f"{what:.160}", OBSTACLES[obstacle_of(event, arguments)])

    def _note(self, when: str, what: str, obstacle: str) -> None:
        self._outside.setdefault((obstacle, what), Outside(when, what, obstacle))

    def _look(self, *returned: Any) -> None:
        pairs = zip(("random", "numpy.random"), self._before, state_of_process(), strict=True)
        changed = {name for name, before, after in pairs if before != after}
        marks = [found[len(MARK) :] for found in map(evidence_of, returned) if found.startswith(MARK)]
        incomparable = marks[0].decode(errors="replace") if marks else ""
        known = self._noticed
        drawn_from = tuple(sorted(changed.union(known.drawn_from), reverse=True))
        self._noticed = Noticed(drawn_from, known.incomparable or incomparable)


class Imported(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Tells how long the imports of an env took."""

    def __init__(self, env: Any, seconds: dict[str, float]) -> None:
        super().__init__(env)
        self._seconds = seconds

    def import_seconds(self) -> dict[str, float]:
        """Return the seconds that each package took to import, with all that it imports."""
        return self._seconds


def imported(packed: bytes, own: str) -> Imported:
    """Unpickle ``env_fn``, build an env, and measure the imports meanwhile.

    Args:
        packed: The function, pickled by cloudpickle.
        own: The package that the function comes from; what it imports counts, and not the package itself.
    """
    known = {name.partition(".")[0] for name in sys.modules} | {own}
    seconds: dict[str, float] = {}
    real_import, real_import_module = builtins.__import__, importlib.import_module
    outer: list[str] = []  # the package that is being measured

    def measured(name: str, call: Callable[[], Any]) -> Any:
        package = name.partition(".")[0]
        if outer or not package or package in known:
            return call()
        outer.append(package)
        began = time.perf_counter()
        try:
            return call()
        finally:
            seconds[package] = seconds.get(package, 0.0) + time.perf_counter() - began
            outer.clear()

    def import_(name: str, *arguments: Any, **named: Any) -> Any:
        level = named.get("level", arguments[3] if len(arguments) > 3 else 0)
        return measured("" if level else name, lambda: real_import(name, *arguments, **named))

    def import_module(name: str, package: str | None = None) -> Any:
        return measured(name, lambda: real_import_module(name, package))

    builtins.__import__, importlib.import_module = import_, import_module
    try:
        return Imported(cloudpickle.loads(packed)(), seconds)
    finally:
        builtins.__import__, importlib.import_module = real_import, real_import_module


def seeded(env_fn: EnvFn) -> EnvFn:
    """Return a function that builds an env with the same states of ``random`` and ``numpy.random`` each time.

    multienv puts them back after a loss. So the walks of an env that draws from them can be compared, too.
    """

    def build() -> Any:  # pickled by value: a worker does not import the command line for it
        seed_process((0, 0))
        return env_fn()

    return build
