"""Ctrl-C in ``SubprocessVecEnv`` and ``SubprocessParallelEnv``: no transition is lost, wherever it strikes.

At every place within multienv, and by real signals: what the caller is given is the trajectory of the same env alone.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import ParallelEnv

from kit import CounterEnv
from kit.interruption import Interruption, every_place
from kit.sigints import Presses
from kit.trainer_process import run
from multienv.adapters.pettingzoo import SubprocessParallelEnv
from multienv.adapters.stable_baselines3 import SubprocessVecEnv
from multienv.errors import CallPendingError

pytestmark = pytest.mark.ci

ENDLESS = partial(CounterEnv, horizon=None)
SHORT = partial(CounterEnv, horizon=3)


class PairEnv(ParallelEnv[Any, Any, Any]):
    """Two agents that are told their step and their action, in an episode of so many steps; one appears in the second."""

    possible_agents = ("a", "b")
    metadata: ClassVar[dict[str, Any]] = {}

    def __init__(self, horizon: float = 3) -> None:
        self.horizon, self.steps, self.agents = horizon, 0, []

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-1, 1000, (2,), np.int64)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(4)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.steps, self.agents = 0, ["a"]
        return {"a": np.array([0, -1])}, {"a": {}}

    def step(self, actions: dict[str, int]) -> Any:
        self.steps += 1
        told = self.agents = ["a", "b"]
        if self.steps >= self.horizon:
            self.agents = []
        ended = dict.fromkeys(told, not self.agents)
        observations = {agent: np.array([self.steps, actions.get(agent, -1)]) for agent in told}
        return observations, dict.fromkeys(told, 1.0), ended, dict.fromkeys(told, False), {agent: {} for agent in told}


# --- at every place -------------------------------------------------------------------------------------


@pytest.mark.parametrize("horizon", [None, 3])
def test_step_of_a_vec_env_interrupted_at_every_place_is_completed_by_the_next(horizon: int | None) -> None:
    envs = SubprocessVecEnv([partial(CounterEnv, horizon=horizon)] * 2, envs_per_worker=2)
    twin = CounterEnv(horizon=horizon)
    fired = resumed = 0
    with contextlib.closing(envs):
        envs.seed(6)
        envs.reset()
        twin.reset(seed=7)
        for interruption in every_place():
            found: Any = None
            with interruption:
                found = envs.step([1, 1])
            fired += interruption.fired
            told = found is None
            if told:
                found = envs.step([2, 2])
            observations, rewards, dones, infos = found
            told = told and infos[0].get("multienv") == {"resumed": True} == infos[1].get("multienv")
            assert told or not any("multienv" in info for info in infos), (interruption.where, infos)
            resumed += told
            expected = twin.step(np.int64(1 if told or not interruption.fired else 2))
            is_over = expected[2] or expected[3]
            seen = infos[1]["terminal_observation"] if is_over else observations[1]
            assert np.array_equal(seen, expected[0]), interruption.where
            assert (rewards[1], dones[1]) == (np.float32(expected[1]), is_over), interruption.where
            if is_over:
                begun, info = twin.reset()
                assert np.array_equal(observations[1], begun), interruption.where
                assert envs.reset_infos[1] == info
        assert all(one.exact_recoveries == one.losses < fired for one in envs.statistics())
    assert resumed > 5


def test_reset_of_a_vec_env_interrupted_at_every_place_keeps_its_seeds_and_drops_the_step() -> None:
    """The reset is called again: it has the seeds and options that were set for it."""
    fired = 0
    with contextlib.closing(SubprocessVecEnv([ENDLESS] * 2, envs_per_worker=2)) as envs:
        envs.seed(7)
        expected = envs.reset()
        for interruption in every_place(stride=3):
            with Interruption(interruption.place):  # in any place of a step, of which something may be kept
                envs.step([1, 1])
            envs.seed(7)
            found: Any = None
            with interruption:
                found = envs.reset()
            fired += interruption.fired
            if found is None:
                found = envs.reset()
            assert np.array_equal(found, expected), interruption.where
            observations, _, _, infos = envs.step([3, 3])
            assert observations[:, [0, 3]].tolist() == [[1, 3]] * 2, interruption.where
            assert "multienv" not in infos[0], interruption.where
    assert fired > 5


def test_a_step_that_is_pending_is_kept_for_the_next_step_whatever_is_asked_meanwhile() -> None:
    """MaskablePPO asks for masks before each step, also before the one that completes an interrupted one."""
    with contextlib.closing(SubprocessVecEnv([ENDLESS] * 2)) as envs:
        envs.reset()
        envs.step_async([1, 1])
        assert envs.get_attr("episode_step") == [1, 1]
        assert envs.env_method("has_wrapper_attr", "horizon") == [True, True]
        envs.step_async([2, 2])
        observations, _, _, infos = envs.step_wait()
        assert observations[:, [0, 3]].tolist() == [[1, 1]] * 2
        assert [info["multienv"] for info in infos] == [{"resumed": True}] * 2
        observations, _, _, infos = envs.step([2, 2])
        assert observations[:, [0, 3]].tolist() == [[2, 2]] * 2
        assert "multienv" not in infos[0]
        envs.step_async([1, 1])
        assert envs.get_attr("episode_step") == [3, 3]
        assert envs.reset()[:, 0].tolist() == [0, 0]  # drops it
        assert envs.step([3, 3])[0][:, [0, 3]].tolist() == [[1, 3]] * 2


@pytest.mark.parametrize("in_halves", [False, True])
def test_step_of_a_parallel_env_interrupted_at_every_place_is_completed_by_the_next(in_halves: bool) -> None:
    fired = resumed = 0
    twin = PairEnv()
    with SubprocessParallelEnv(PairEnv) as env:
        env.reset(), twin.reset()
        for interruption in every_place():
            before, found = list(env.agents), None
            if in_halves:
                env.step_async(dict.fromkeys(env.agents, 1))
            with interruption:
                found = env.step_wait() if in_halves else env.step(dict.fromkeys(env.agents, 1))
            fired += interruption.fired
            again = found is None
            if again:
                assert env.agents == before, interruption.where  # the step is not over
                if in_halves:
                    with pytest.raises(CallPendingError):
                        env.render()
                found = env.step_wait() if in_halves else env.step(dict.fromkeys(before, 2))
            told = [info.get("multienv") for info in found[4].values()]
            assert told in ([None, None], [{"resumed": True}] * 2), interruption.where
            resumed += again if in_halves else told[0] is not None
            action = 1 if in_halves or told[0] is not None or not again else 2
            expected = twin.step(dict.fromkeys(before, action))
            for ours, theirs in zip(found[:4], expected[:4], strict=True):
                assert str(ours) == str(theirs), interruption.where
            assert env.agents == twin.agents
            if not env.agents:
                env.reset(), twin.reset()
        assert env.statistics().exact_recoveries == env.statistics().losses < fired + in_halves
    assert resumed > 5


def test_reset_of_a_parallel_env_interrupted_at_every_place_is_made_again() -> None:
    fired = 0
    with SubprocessParallelEnv(PairEnv) as env:
        env.reset()
        for interruption in every_place(stride=2):
            env.step({"a": 1})
            found: Any = None
            with interruption:
                found = env.reset()
            fired += interruption.fired
            if found is None:
                found = env.reset()
            assert str(found) == str(({"a": np.array([0, -1])}, {"a": {}})), interruption.where
            assert env.agents == ["a"]
    assert fired > 5


class Elsewhere:
    """Can be unpickled in its worker alone."""

    home = os.getpid()

    def __reduce__(self) -> Any:
        return _at_home, (os.getpid(),)


def _at_home(pid: int) -> Elsewhere:
    if os.getpid() != pid:
        raise LookupError("not here")
    return Elsewhere()


class IllegibleEnv(PairEnv):
    """Returns a reward in its second step that nobody else can unpickle."""

    def step(self, actions: dict[str, int]) -> Any:
        observations, rewards, *rest = super().step(actions)
        return observations, {"a": Elsewhere()} if self.steps == 2 else rewards, *rest


def test_what_cannot_be_unpickled_is_told_of_once_and_the_env_goes_on() -> None:
    with SubprocessParallelEnv(partial(IllegibleEnv, 9)) as env:
        env.reset()
        env.step({"a": 1})
        with pytest.raises(LookupError, match="not here"):
            env.step({"a": 1})
        assert env.step({"a": 3})[0]["a"].tolist() == [3, 3]


# --- and with Python's own handler: nothing is lost, and no worker either ------------------------------------


def step_a_vec_env_through_sigints(times: str) -> None:
    envs = SubprocessVecEnv([ENDLESS] * 2, envs_per_worker=1)
    envs.seed(1)
    envs.reset()
    found = Presses(int(times), 0.01, "vec env").repeat(lambda number: envs.step(np.full(2, number % 4)))
    assert [(one.losses, one.restarts) for one in envs.statistics()] == [(0, 0)] * 2
    envs.close()
    twin = ENDLESS()
    twin.reset(seed=1)
    for number, (observations, rewards, dones, _) in enumerate(found):
        expected = twin.step(np.int64(number % 4))
        assert np.array_equal(observations[0], expected[0]), (number, observations)
        assert (rewards[0], dones[0]) == (np.float32(expected[1]), False), number
    print(len(found), "steps", times, "SIGINTs", flush=True)


@pytest.mark.parametrize("times", [25, pytest.param(200, marks=pytest.mark.soak)])
def test_sigints_at_random_moments_cost_a_vec_env_nothing(times: int) -> None:
    run("test_interrupted_adapters", "step_a_vec_env_through_sigints", times, within=55.0)
