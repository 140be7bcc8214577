"""``SubprocessParallelEnv``: PettingZoo's own tests, and what a parallel env returns by itself, while workers die."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pettingzoo_envs as envs
import pytest
from pettingzoo.utils import parallel_to_aec

from kit import is_alive, observations_equal
from kit.ctrl_c import ctrl_c
from kit.replays import prefer_resets
from kit.trainer_process import becomes_true
from multienv import RestartPolicy
from multienv.adapters.pettingzoo import SubprocessParallelEnv
from multienv.errors import CallPendingError, EnvError, ResetNeededError, UsageError
from multienv.testing import Killer

pytestmark = pytest.mark.ci

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it imports envs in a deprecated way
    from pettingzoo.test import parallel_api_test, parallel_seed_test, render_test

OWN = [envs.camp, envs.generated, envs.rock_paper_scissors, envs.zombies, envs.pistons]
REPLAY = RestartPolicy(snapshots=False)


@pytest.fixture(autouse=True, scope="module")
def no_window() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SDL_VIDEODRIVER", "dummy")
        yield


class Struck(SubprocessParallelEnv):
    """Its worker is killed before every so many steps."""

    def __init__(self, env_fn: Any, every: int) -> None:
        super().__init__(env_fn)
        self.counted, self.every = itertools.count(1), every

    def step(self, actions: Any) -> Any:
        if next(self.counted) % self.every == 0:
            assert Killer(self).strike()
        return super().step(actions)


def all_exact(env: Any, deaths: int = 1) -> bool:
    told = env.statistics()
    return told.exact_recoveries >= deaths and told.truncated_recoveries == 0


def played(env: Any, steps: int, seed: int | None = 3, before_step: Callable[[int], Any] = bool) -> list[Any]:
    """Take random steps, drawn here; return all that the env returned, and who was there. Only the first is seeded."""
    rng, record = np.random.default_rng(0), []

    def draw(space: Any) -> Any:
        space = copy.deepcopy(space)
        space.seed(int(rng.integers(2**31)))
        return space.sample()

    agents: list[Any] = []
    for step in range(steps):
        if not agents:
            record.append((env.reset(seed=seed if step == 0 else None), list(env.agents)))
        before_step(step)
        returned = env.step({agent: draw(env.action_space(agent)) for agent in env.agents})
        agents = env.agents
        record.append((returned, list(agents)))
    return copy.deepcopy(record)


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """The same to the bit, and of the same types."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[1] == theirs[1]
        for one, other in zip(ours[0], theirs[0], strict=True):
            assert type(one) is type(other)
            assert list(one) == list(other)
            assert all(type(value) is type(other[agent]) for agent, value in one.items())
            assert observations_equal(one, other)


# --- PettingZoo's own tests -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*does not have possible_agents", "ignore:No agents present")
@pytest.mark.parametrize("is_struck", [False, True], ids=["calm", "struck"])
@pytest.mark.parametrize("make", OWN)
def test_pettingzoos_tests_of_parallel_envs_pass(make, is_struck):
    made = []

    def env(every: int) -> Any:
        made.append(Struck(make, every) if is_struck else SubprocessParallelEnv(make))
        return made[-1]

    parallel_api_test(env(every=9), num_cycles=50)
    parallel_seed_test(lambda: env(every=1), num_cycles=10)  # it takes one step
    made[0].close()
    assert all(one.statistics().state == "closed" for one in made)
    if make is not envs.generated:  # without a seed it draws from outside: truncated, and the tests pass all the same
        assert all(all_exact(one, deaths=int(is_struck)) for one in made)
    assert all(one.statistics().losses >= int(is_struck) for one in made)


@pytest.mark.parametrize("make", [envs.camp, envs.zombies])
def test_pettingzoos_test_of_rendering_passes(make):
    made = []

    def aec(render_mode: str) -> Any:
        if (make, render_mode) == (envs.camp, "human"):
            render_mode = "rgb_array"  # it asks for that once, of any env, and does not use it
        made.append(SubprocessParallelEnv(partial(make, render_mode=render_mode)))
        return parallel_to_aec(made[-1])

    render_test(aec)
    assert [env.render_mode for env in made[1:]] == made[0].metadata["render_modes"]
    made[0].close()


# --- to the bit -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "restart"),
    [
        pytest.param(make, restart, id=f"{make.__name__}-{'replay' if restart is REPLAY else 'snapshots'}")
        for make, restart in (
            (envs.camp, RestartPolicy()),
            (envs.deep_camp, REPLAY),
            (envs.rock_paper_scissors, RestartPolicy()),
            (envs.zombies, REPLAY),
            (envs.pistons, RestartPolicy()),
        )
    ],
)
def test_what_it_returns_is_what_the_env_returns_while_workers_are_killed(make, restart):
    steps, every = (40, 15) if make is envs.pistons else (130, 31)
    expected = played(make(), steps)
    assert sum(not agents for _, agents in expected) >= 1
    with SubprocessParallelEnv(make, restart=restart) as env:
        killer = Killer(env, seed=1)
        found = played(env, steps, before_step=lambda step: step % every == 10 and killer.strike())
        assert all_exact(env, deaths=killer.delivered)
        assert killer.delivered > 1
    assert_same(found, expected)


def test_an_env_that_nobody_seeds_is_brought_back_long_after_its_construction(monkeypatch):
    """Its generator, which is behind wrappers, is put back: the replay begins at a later reset, which has no seed."""
    prefer_resets(monkeypatch)
    with SubprocessParallelEnv(envs.deep_camp, restart=REPLAY) as env:
        played(env, 1200, seed=None)
        before = env.statistics().replayed_steps
        for _ in range(3):
            played(env, 200, seed=None, before_step=lambda step: step % 150 == 0 and Killer(env).strike())
        told = env.statistics()
        assert (told.replayed_recoveries, told.truncated_recoveries) == (6, 0)
        assert told.replayed_steps - before < 3000  # not from the construction on


# --- what cannot be recovered --------------------------------------------------------------------


def acted(env: Any) -> Any:
    return env.step({agent: env.action_space(agent).sample() for agent in env.agents})


def assert_truncated(returned: Any, before: list[Any], last: Any) -> None:
    """All agents that were there end, with what they saw last."""
    observations, rewards, terminations, truncations, infos = returned
    assert observations_equal(observations, {agent: last[agent] for agent in before})
    assert rewards == dict.fromkeys(before, 0.0)
    assert terminations == dict.fromkeys(before, False)
    assert truncations == dict.fromkeys(before, True)
    assert list(infos) == before
    assert all(info["multienv"]["reason"] and info["multienv"]["recovery"] == "truncated" for info in infos.values())


@pytest.mark.parametrize("fault", ["policy", "kill", "raise"])
def test_an_episode_that_cannot_go_on_is_truncated_for_all_who_were_there(fault):
    """Because the policy says so; because the step kills each process that takes it; because the env raises in it."""
    policy = RestartPolicy(on_crash="truncate" if fault == "policy" else "replay", on_error="truncate", backoff=0)
    with SubprocessParallelEnv(partial(envs.camp, fault=fault), restart=policy, reports="") as env:
        env.reset(seed=1, options={"fault": True})
        acted(env)
        last, before = acted(env)[0], list(env.agents)
        assert len(before) > 1
        if fault == "policy":
            assert Killer(env).strike()
        assert_truncated(acted(env), before, last)
        assert env.agents == []
        with pytest.raises(ResetNeededError):
            env.step({})
        expected = envs.camp().reset(seed=6)
        assert observations_equal(env.reset(seed=6)[0], expected[0])
        assert env.agents == ["scout_0", "smith_0"]


def test_what_the_env_raises_is_raised_and_a_wrong_action_is_its_own_business():
    with SubprocessParallelEnv(partial(envs.camp, fault="raise"), reports="") as env:
        env.reset(seed=5, options={"fault": True})
        with pytest.raises(KeyError, match="smith_0") as missing:
            env.step({"scout_0": 1})
        assert isinstance(missing.value, EnvError)
        env.reset(seed=5)
        env.step({"scout_0": 1, "smith_0": np.zeros(2, np.float32), "nobody": "nothing"})
        env.reset(seed=5, options={"fault": True})
        acted(env), acted(env)
        with pytest.raises(ZeroDivisionError, match="the camp is empty"):
            acted(env)
        with pytest.raises(ResetNeededError):
            acted(env)
        env.reset()
        acted(env)


# --- several, interruptions, checkpoints ----------------------------------------------------------


def test_several_are_stepped_at_the_same_time(tmp_path):
    class Meeting(envs.CampEnv):
        """Ends a step when all have begun it."""

        steps = 0

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def step(self, actions: Any) -> Any:
            self.steps += 1
            (tmp_path / f"{self.steps} {self.index}").touch()
            while len(list(tmp_path.glob(f"{self.steps} *"))) < 4:
                time.sleep(0.001)
            return super().step(actions)

    several = [SubprocessParallelEnv(partial(Meeting, index), env_index=index).start() for index in range(4)]
    alone = [envs.camp() for _ in several]
    for seed, env in enumerate(several):
        env.initialize().reset_async(seed=seed)
    for seed, (env, bare) in enumerate(zip(several, alone, strict=True)):
        assert observations_equal(env.reset_wait()[0], bare.reset(seed=seed)[0])
    for step in range(5):
        actions = [{agent: env.action_space(agent).sample() for agent in env.agents} for env in several]
        for env, one in zip(several, actions, strict=True):
            env.step_async(one)
        with pytest.raises(CallPendingError):
            several[0].step_async(actions[0])
        if step == 2:
            assert Killer(several[0]).strike()  # the first that is waited for: the others do not end before it
        results = [env.step_wait() for env in several]
        for (ours, *_), bare, one in zip(results, alone, actions, strict=True):
            assert observations_equal(ours, bare.step(one)[0])
    assert all_exact(several[0])
    for env in several:
        env.close()


def test_an_agent_that_appears_has_the_spaces_of_its_episode():
    class Growing(envs.CampEnv):
        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            size = 1 + (self.spaces["late"][0].shape[0] if "late" in self.spaces else 0)
            self.spaces["late"] = gymnasium.spaces.Box(0, 1, (size,)), gymnasium.spaces.Discrete(2)
            return super().reset(seed, options)

    with SubprocessParallelEnv(Growing) as env:
        env.reset(seed=5)
        assert env.observation_space("late") is env.observation_space("late")
        state, shape = env.state_dict(), env.observation_space("late").shape
        env.reset(seed=6)
        assert env.observation_space("late").shape == (shape[0] + 1,)
        env.load_state_dict(state)
        assert env.observation_space("late").shape == shape


def test_a_step_that_ctrl_c_interrupts_is_completed_by_the_next_and_says_so(tmp_path):
    class Gate(envs.CampEnv):
        def step(self, actions: Any) -> Any:
            (tmp_path / "waits").touch() if self.steps == 1 else None
            while self.steps == 1 and not (tmp_path / "gate").exists():
                time.sleep(0.002)
            return super().step(actions)

    with SubprocessParallelEnv(Gate) as env:
        bare = envs.camp()
        env.reset(seed=5), bare.reset(seed=5)
        first = {agent: env.action_space(agent).sample() for agent in env.agents}
        env.step(first), bare.step(first)
        second = {agent: env.action_space(agent).sample() for agent in env.agents}
        with pytest.raises(KeyboardInterrupt), ctrl_c(tmp_path):
            env.step(second)
        ours, theirs = env.step({}), bare.step(second)
        assert all(observations_equal(one, other) for one, other in zip(ours[:4], theirs[:4], strict=True))
        assert env.agents == bare.agents
        assert ours[4].keys() == theirs[4].keys()
        assert all(info["multienv"] == {"resumed": True} for info in ours[4].values())
        assert "multienv" not in next(iter(acted(env)[4].values()))


def test_an_earlier_state_comes_back_in_this_trainer_and_in_another():
    with SubprocessParallelEnv(envs.camp) as env, SubprocessParallelEnv(envs.camp) as other:
        env.reset(seed=5)
        acted(env)
        snapshot, state, before = env.snapshot(), pickle.loads(pickle.dumps(env.state_dict())), list(env.agents)
        rest = [{agent: np.zeros_like(env.action_space(agent).sample()) for agent in before}]
        expected = env.step(rest[0])
        while env.agents:
            acted(env)
        env.restore(snapshot)
        other.load_state_dict(state)
        for one in (env, other):
            assert one.agents == before
            assert_same([(one.step(rest[0]), [])], [(copy.deepcopy(expected), [])])
        env.restore(snapshot)
        assert Killer(env).strike()
        assert_same([(env.step(rest[0]), [])], [(copy.deepcopy(expected), [])])
        with pytest.raises(UsageError):
            env.load_state_dict({"something": "else"})


# --- spaces and attributes ------------------------------------------------------------------------


def test_spaces_are_the_envs_and_always_the_same_objects():
    bare = envs.generated()
    with SubprocessParallelEnv(envs.generated) as env:
        assert not hasattr(env, "possible_agents")
        assert not hasattr(env, "observation_spaces")
        assert env.state_space == bare.state_space
        env.reset(seed=1), bare.reset(seed=1)
        born: set[str] = set()
        for _ in range(40):
            actions = {agent: bare.action_space(agent).sample() for agent in bare.agents}
            env.step(actions), bare.step(actions)
            born |= set(env.agents)
            for agent in env.agents:
                assert env.observation_space(agent) is env.observation_space(agent)
                assert env.observation_space(agent) == bare.observation_space(agent)
                assert env.action_space(agent) == bare.action_space(agent)
        assert len(born) > 5
        with pytest.raises(KeyError):
            env.observation_space("nobody_0")
    with SubprocessParallelEnv(envs.camp) as env:
        assert env.possible_agents == envs.CampEnv.possible_agents
        assert env.max_num_agents == 12
        assert all(env.action_space(agent) == envs.camp().action_space(agent) for agent in env.possible_agents)


def test_the_env_is_built_when_it_is_first_asked_for_anything():
    env = SubprocessParallelEnv(envs.deep_camp)
    assert (str(env), env.agents, env.num_agents, env.unwrapped) == ("SubprocessParallelEnv", [], 0, env)
    assert env.statistics().pid is None
    assert env.metadata["render_modes"] == ["rgb_array"]
    assert (str(env), env.render_mode) == ("camp", None)
    env.reset(seed=0)
    assert env.state().tolist() == [0, 2]
    assert env.get_attr("gravity") == 9.8
    env.set_attr("gravity", 5.0)
    assert env.call("weigh", 2) == env.get_attr("weigh")(2) == 10.0
    assert Killer(env).strike()
    assert env.get_attr("gravity") == 5.0
    before = env.statistics().journal_bytes
    env.state(), env.observation_space("cook_1")
    assert env.statistics().journal_bytes == before
    for refused in (lambda: env.gravity, lambda: env.get_attr("nothing")):
        with pytest.raises(AttributeError, match="has no attribute|have no attribute"):
            refused()
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(env)
    env.close()
    env.close()


def test_what_is_no_parallel_env_is_refused_in_a_line():
    from pettingzoo.classic.rps import rps

    with pytest.raises(UsageError, match="give a function"):
        SubprocessParallelEnv(envs.camp())
    with pytest.raises(TypeError, match="no ParallelEnv"), SubprocessParallelEnv(rps.env):
        pass


def test_nothing_is_left_of_an_env_that_is_not_closed():
    env = SubprocessParallelEnv(envs.camp)
    env.reset(seed=0)
    pid = env.statistics().pid
    del env
    assert becomes_true(lambda: not is_alive(pid))
