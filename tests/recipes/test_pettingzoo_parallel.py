"""PettingZoo's parallel envs as one env of several agents, in a worker: exact, whatever dies."""

from __future__ import annotations

from typing import Any

import pytest
from pettingzoo_parallel import ParallelAsEnv
from striking import assert_all_exact

from kit import observations_equal
from multienv import SubprocessEnv
from multienv.testing import Killer

pytestmark = pytest.mark.ci


def zombies() -> Any:
    """Four agents that leave one by one; zombies come by chance."""
    from pettingzoo.butterfly.knights_archers_zombies import knights_archers_zombies

    return knights_archers_zombies.parallel_env(spawn_delay=3, max_cycles=150)


def test_agents_come_and_go_as_in_the_parallel_env_itself_while_the_worker_is_killed():
    bare, ends, gone = zombies(), 0, 0
    with SubprocessEnv(lambda: ParallelAsEnv(zombies())) as env:
        killer = Killer(env, seed=1)
        env.action_space.seed(0)
        expected = bare.reset(seed=7)[0]
        observation, info = env.reset(seed=7)
        for step in range(300):
            assert observations_equal({agent: observation[agent] for agent in expected}, expected)
            assert info["agents"] == bare.agents
            if not bare.agents:
                ends += 1
                expected = bare.reset(seed=step)[0]
                observation, info = env.reset(seed=step)
                continue
            if step % 25 == 10:
                assert killer.strike()
            actions = env.action_space.sample()
            expected, rewards, terminations, truncations, _ = bare.step(
                {agent: actions[agent] for agent in bare.agents}
            )
            observation, reward, terminated, truncated, info = env.step(actions)
            gone += sum(terminations.values())
            assert (info["rewards"], info["terminations"]) == (rewards, terminations)
            assert info["truncations"] == truncations
            assert reward == sum(rewards.values())
            assert (terminated or truncated) == (not bare.agents)
        assert_all_exact(env, deaths=8)
    bare.close()
    assert ends > 0
    assert gone > 0
