"""PettingZoo's parallel envs in processes: the recipe counts the same, whatever dies."""

from __future__ import annotations

from typing import Any

import pettingzoo_parallel
import pytest
from pettingzoo.utils import BaseParallelWrapper
from striking import assert_all_exact

from multienv.adapters.pettingzoo import SubprocessParallelEnv
from multienv.testing import Killer

pytestmark = pytest.mark.ci


def zombies() -> Any:
    """Four agents that leave one by one; zombies come by chance."""
    from pettingzoo.butterfly.knights_archers_zombies import knights_archers_zombies

    return knights_archers_zombies.parallel_env(spawn_delay=3, max_cycles=100)


class InTwoHalves(BaseParallelWrapper):
    """The env itself, in this process."""

    def step_async(self, actions: Any) -> None:
        self.sent = actions

    def step_wait(self) -> Any:
        return self.step(self.sent)


class Struck(SubprocessParallelEnv):
    """Its worker is killed before every 70th step."""

    steps = 0

    def step_async(self, actions: Any) -> None:
        self.steps += 1
        if self.steps % 70 == 0:
            assert Killer(self).strike()
        super().step_async(actions)


def test_agents_come_and_go_as_in_the_parallel_envs_themselves_while_their_workers_are_killed(monkeypatch):
    expected = pettingzoo_parallel.run([InTwoHalves(zombies()) for _ in range(2)], 250, seed=7)
    monkeypatch.setattr(pettingzoo_parallel, "SubprocessParallelEnv", Struck)
    envs = pettingzoo_parallel.make_envs(zombies, 2)
    with envs[0], envs[1]:
        found = pettingzoo_parallel.run(envs, 250, seed=7)
        for env in envs:
            assert_all_exact(env, deaths=3)
    assert found == expected
    assert len({agent for _, agent, _ in found}) == 4
    assert len(found) > 10
