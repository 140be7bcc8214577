"""Find out, from inside its worker, what an env draws from, and whether what it returns can be compared."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium

from multienv.testing.side_by_side import EnvFn
from multienv.wire.digests import MARK, evidence_of
from multienv.worker.seeding import seed_process, state_of_process


class Noticed(NamedTuple):
    """Holds what was noticed of an env.

    Attributes:
        drawn_from: Which of ``random`` and ``numpy.random`` it has drawn from, or seeded, in resets and steps.
        incomparable: Name of the type of a value that it returned and that cannot be compared; ``""``: there is none.
    """

    drawn_from: tuple[str, ...] = ()
    incomparable: str = ""


class Watched(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Compares the generators of the process before and after each reset and step, and looks at what they return."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._noticed = Noticed()
        self._before = state_of_process()

    def reset(self, **options: Any) -> Any:
        """Reset the env."""
        self._before = state_of_process()
        observation, info = self.env.reset(**options)
        self._look(observation)
        return observation, info

    def step(self, action: Any) -> Any:
        """Step the env."""
        self._before = state_of_process()
        *result, info = self.env.step(action)
        self._look(*result)
        return (*result, info)

    def noticed(self) -> Noticed:
        """Return what was noticed up to now."""
        return self._noticed

    def _look(self, *returned: Any) -> None:
        pairs = zip(("random", "numpy.random"), self._before, state_of_process(), strict=True)
        changed = {name for name, before, after in pairs if before != after}
        marks = [found[len(MARK) :] for found in map(evidence_of, returned) if found.startswith(MARK)]
        incomparable = marks[0].decode(errors="replace") if marks else ""
        known = self._noticed
        drawn_from = tuple(sorted(changed.union(known.drawn_from), reverse=True))
        self._noticed = Noticed(drawn_from, known.incomparable or incomparable)


def watched(env_fn: EnvFn) -> Watched:
    """Build an env that is watched."""
    return Watched(env_fn())


def seeded(env_fn: EnvFn) -> EnvFn:
    """Return a function that builds an env with the same states of ``random`` and ``numpy.random`` each time.

    multienv puts them back after a loss. So the walks of an env that draws from them can be compared, too.
    """

    def build() -> Any:  # pickled by value: a worker does not import the command line for it
        seed_process((0, 0))
        return env_fn()

    return build
