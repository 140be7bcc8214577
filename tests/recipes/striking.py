"""Kills at fixed steps: each strikes on any machine, however slow. Those at random moments are the invariants' tests'."""

from __future__ import annotations

from typing import Any

import gymnasium

from multienv.testing import Killer


class Striking(gymnasium.vector.VectorWrapper):
    """Kills a worker before every so many steps."""

    def __init__(self, env: Any, every: int = 40) -> None:
        super().__init__(env)
        self.every, self.steps, self.killer = every, 0, Killer(env, seed=1)

    def step(self, actions: Any) -> Any:
        self.steps += 1
        if self.steps % self.every == 0:
            assert self.killer.strike()
        return self.env.step(actions)


def assert_all_exact(face: Any, deaths: int) -> None:
    """At least so many workers died, and each episode went on exactly."""
    told = face.statistics()
    told = told if isinstance(told, list) else [told]
    assert sum(one.exact_recoveries for one in told) >= deaths
    assert sum(one.truncated_recoveries for one in told) == 0
