"""``SubprocessVecEnv`` beside Stable-Baselines3's own ``DummyVecEnv``: the same transitions, the same weights."""

from __future__ import annotations

import contextlib
import copy
import itertools
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit
from sb3_envs import GoalEnv, MaskedEnv, NamedDict, ShapesEnv
from stable_baselines3 import DQN, PPO, SAC, HerReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
)

from kit import CounterEnv, Fault, FaultyEnv, observations_equal
from kit.ctrl_c import ctrl_c
from kit.gates import WAIT, GateEnv
from multienv import Loss, RestartPolicy
from multienv.adapters.stable_baselines3 import SubprocessVecEnv
from multienv.testing import Killer

pytestmark = pytest.mark.ci

with contextlib.suppress(ImportError):  # moviepy's bars of progress: a lock for all processes, never released
    from tqdm import tqdm

    tqdm.get_lock()

CARTPOLE = partial(gymnasium.make, "CartPole-v1", max_episode_steps=30)
PENDULUM = partial(gymnasium.make, "Pendulum-v1", max_episode_steps=30)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    """Tiny nets learn faster so; and threads of torch's would disturb the workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def made(env_fns: Any, **options: Any) -> Any:
    envs = SubprocessVecEnv(env_fns, **options)
    try:
        yield envs
    finally:
        envs.close()


@contextlib.contextmanager
def pair(env_fns: Any, seed: int = 3, **options: Any) -> Any:
    """Envs of both kinds, to be compared."""
    twin = DummyVecEnv(env_fns)
    with made(env_fns, **options) as envs:
        envs.seed(seed)
        twin.seed(seed)
        yield envs, twin
    twin.close()


def compare(envs: Any, twin: Any, steps: int = 40) -> int:
    """Step both, with the same actions; return how many episodes have ended."""
    ended = 0
    assert observations_equal(envs.reset(), twin.reset())
    assert list(envs.reset_infos) == list(twin.reset_infos)
    twin.action_space.seed(1)
    for _ in range(steps):
        actions = np.array([twin.action_space.sample() for _ in range(twin.num_envs)])
        for ours, theirs in zip(envs.step(actions), twin.step(actions), strict=True):
            assert observations_equal(ours, theirs), (ours, theirs)
            if isinstance(ours, np.ndarray):
                assert ours.dtype == theirs.dtype
                ended += int(ours.sum()) if ours.dtype == np.bool_ else 0
        assert list(envs.reset_infos) == list(twin.reset_infos)
    return ended


# --- learning -------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"policy_kwargs": {"net_arch": [16]}, "seed": 5, "device": "cpu"}
REPLAY: dict[str, Any] = {"learning_starts": 40, "batch_size": 16, "buffer_size": 1000, **SMALL}
SHORT: dict[str, Any] = {"n_steps": 32, "batch_size": 32, "n_epochs": 2, **SMALL}
HINDSIGHT: dict[str, Any] = {"replay_buffer_class": HerReplayBuffer, **REPLAY, "learning_starts": 60}
LEARNERS: dict[str, tuple[str, Any, dict[str, Any], int]] = {
    "PPO": ("MlpPolicy", CARTPOLE, SHORT, 256),
    "DQN": ("MlpPolicy", CARTPOLE, {"target_update_interval": 50, "exploration_fraction": 0.5, **REPLAY}, 300),
    "SAC": ("MlpPolicy", PENDULUM, REPLAY, 160),
    "hindsight, which asks a worker for rewards": ("MultiInputPolicy", GoalEnv, HINDSIGHT, 120),
    "MaskablePPO, which asks for masks at every step": ("MlpPolicy", MaskedEnv, SHORT, 128),
}


def weights(name: str, envs: VecEnv, at_each_step: Any = None) -> dict[str, Any]:
    learner: Any = {"PPO": PPO, "DQN": DQN}.get(name, SAC)
    if "MaskablePPO" in name:
        reason = "sb3-contrib is not installed: it is of the extra recipes"
        learner = pytest.importorskip("sb3_contrib", reason=reason).MaskablePPO
    policy, _, arguments, steps = LEARNERS[name]
    return learner(policy, envs, **copy.deepcopy(arguments)).learn(steps, callback=at_each_step).policy.state_dict()


@pytest.mark.parametrize("name", LEARNERS)
def test_a_learner_whose_workers_are_killed_comes_to_the_same_weights_as_on_a_dummy_vec_env(name):
    env_fns, steps = [LEARNERS[name][1]] * 2, itertools.count()
    with contextlib.closing(DummyVecEnv(env_fns)) as envs:
        expected = weights(name, envs)
    with made(env_fns) as envs, Killer(envs, interval=(0.01, 0.05), kills=4, seed=1):
        between = Killer(envs, seed=2)

        def strike(*scope: Any) -> bool:
            if next(steps) % 30 == 10:
                between.strike()
            return True

        found = weights(name, envs, strike)
        told = envs.statistics()
    assert between.delivered > 0
    assert sum(one.exact_recoveries for one in told) > 0
    assert sum(one.truncated_recoveries for one in told) == 0
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_what_is_asked_for_rewards_and_masks_fills_no_journal():
    goals = np.zeros((1000, 1), np.float32)
    for env_fn, *asked in ((GoalEnv, "compute_reward", goals, goals, None), (MaskedEnv, "action_masks")):
        with made([env_fn] * 2, envs_per_worker=2, restart=RestartPolicy(snapshots=False)) as envs:
            envs.reset()
            before = envs.statistics()[0].journal_bytes
            assert len(envs.env_method(*asked, indices=[1])[0]) in (1000, 4)
            assert envs.statistics()[0].journal_bytes == before
            assert envs.has_attr(asked[0])
            assert len(envs.get_attr(asked[0], 0)[0](*asked[1:])) in (1000, 4)
            before = envs.statistics()[0].journal_bytes
            envs.env_method("poke") if env_fn is MaskedEnv else envs.set_attr("taken", 1)  # these are kept
            assert envs.statistics()[0].journal_bytes > before


# --- transitions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["terminated", "both"])
def test_transitions_and_infos_are_those_of_a_dummy_vec_env(ending):
    fns = [partial(MaskedEnv, horizon=4 + index, ending=ending) for index in range(3)]
    with pair(fns) as (envs, twin):
        assert compare(envs, twin) > 20


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(7),
        spaces.Box(0, 255, (8, 8, 3), np.uint8),
        spaces.Dict({"b": spaces.Box(-1, 1, (2,), np.float32), "a": spaces.Discrete(3)}),
        spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32))),
    ],
    ids=lambda space: type(space).__name__,
)
def test_spaces(space):
    with pair([partial(ShapesEnv, space, spaces.Box(-1, 1, (2,), np.float32))] * 2) as (envs, twin):
        assert envs.observation_space == space
        assert compare(envs, twin, 20) > 0


@pytest.mark.parametrize("kind", [spaces.Dict, NamedDict])
def test_actions_of_a_nested_space_come_as_a_list(kind):
    space = kind({"go": spaces.Discrete(3), "turn": spaces.Box(-1, 1, (2,), np.float32)})
    with made([partial(ShapesEnv, spaces.Discrete(2), space)] * 3) as envs:  # it checks its actions
        envs.reset()
        _, rewards, _, _ = envs.step([space.sample() for _ in range(3)])
        assert rewards.tolist() == [1.0] * 3


def test_wrappers_of_vec_envs():
    def wrapped(envs: VecEnv) -> VecEnv:
        return VecFrameStack(VecNormalize(envs), 3)

    with pair([CARTPOLE] * 3) as (envs, twin):
        assert compare(wrapped(envs), wrapped(twin), 100) > 3
    with made([CARTPOLE] * 2) as envs:
        monitored = VecMonitor(envs)
        monitored.reset()
        infos = [info for _ in range(60) for info in monitored.step(np.zeros(2, int))[3]]
        assert min(info["episode"]["l"] for info in infos if "episode" in info) > 5


def test_an_episode_that_cannot_be_brought_back_is_a_time_limit_with_a_reason(tmp_path):
    told: list[Any] = []
    poison = partial(FaultyEnv, fault=Fault("kill", "step", at=3, per="episode"), horizon=100)
    with made([CounterEnv, poison, CounterEnv], envs_per_worker=3, hooks=[told.append], reports="") as envs:
        envs.reset()
        actions = np.zeros(3, int)
        seen = [envs.step(actions)[0] for _ in range(2)][-1]
        observations, rewards, dones, infos = envs.step(actions)
        assert any(isinstance(one, Loss) for one in told)
        assert dones.tolist() == [False, True, False]
        assert rewards[1] == 0.0
        assert infos[1]["TimeLimit.truncated"] is True
        assert np.array_equal(infos[1]["terminal_observation"], seen[1])
        assert infos[1]["multienv"]["reason"]
        assert envs.reset_infos[1] == {}
        assert observations[:, 0].tolist() == [3, 0, 3]
        assert [info for index, info in enumerate(infos) if index != 1] == [{"TimeLimit.truncated": False}] * 2
        observations, _, dones, _ = envs.step(actions)
        assert observations[:, 0].tolist() == [4, 1, 4]
        assert not dones.any()


def test_seeds_and_options_are_used_once():
    with made([MaskedEnv] * 3) as envs:
        assert envs.seed(7) == [7, 8, 9]
        envs.set_options({"start": 2})
        first = envs.reset()
        assert first[:, 0].tolist() == [2, 2, 2]
        assert [info["episode_step"] for info in envs.reset_infos] == [2, 2, 2]
        envs.set_options([{"start": 1}, {}, {"start": 4}])
        assert envs.reset()[:, 0].tolist() == [1, 0, 4]
        assert envs.reset()[:, 0].tolist() == [0, 0, 0]
        envs.seed(7)
        envs.set_options({"start": 2})
        assert np.array_equal(envs.reset(), first)


# --- pending and interrupted steps ----------------------------------------------------------------


def test_a_step_interrupted_by_ctrl_c_is_completed_by_the_next(tmp_path):
    with made([partial(GateEnv, tmp_path)] * 2) as envs:
        normal = VecNormalize(envs, norm_obs=False, norm_reward=False)  # it calls step_async and step_wait
        normal.reset()
        normal.step(np.ones(2, int))
        with ctrl_c(tmp_path), pytest.raises(KeyboardInterrupt):
            normal.step(np.full(2, WAIT))
        observations, _, _, infos = normal.step(np.ones(2, int))
        assert observations[:, 0].tolist() == [2, 2]
        assert observations[:, 3].tolist() == [WAIT, WAIT]  # the actions of the interrupted step
        assert [info["multienv"]["resumed"] for info in infos] == [True, True]
        observations, _, _, infos = normal.step(np.ones(2, int))
        assert observations[:, 0].tolist() == [3, 3]
        assert "multienv" not in infos[0]


# --- what is asked of the envs --------------------------------------------------------------------


def test_attributes_and_methods_with_indices_through_wrappers():
    with made([lambda: TimeLimit(MaskedEnv(), 50)] * 3, envs_per_worker=2) as envs:
        envs.reset()
        assert envs.has_attr("offset")
        assert not envs.has_attr("nothing")
        with pytest.raises(AttributeError, match="nothing"):
            envs.get_attr("nothing")
        envs.set_attr("offset", 2.5, indices=[0, -1])
        assert envs.get_attr("offset") == [2.5, 0.0, 2.5]
        assert envs.get_attr("offset", indices=np.int64(1)) == [0.0]
        envs.set_attr("tags", [1, 2])  # one value, for each
        assert envs.get_attr("tags", -1) == [[1, 2]]
        assert envs.env_method("poke", amount=1.0, indices=range(1, 3)) == [1, 1]
        assert envs.get_attr("poke", 2)[0](amount=1.0) == 2
        assert envs.get_attr("pokes") == [0, 1, 2]
        with pytest.raises(IndexError):
            envs.get_attr("offset", indices=3)


def test_wrappers_of_envs_are_told():
    with made([CARTPOLE, lambda: RecordEpisodeStatistics(CARTPOLE())]) as envs:
        assert envs.env_is_wrapped(RecordEpisodeStatistics) == [False, True]
        assert envs.env_is_wrapped(TimeLimit, indices=-1) == [True]
        assert envs.env_is_wrapped(Monitor) == [False, False]


# --- pictures -------------------------------------------------------------------------------------


def test_frames_are_tiled():
    fns = [partial(CounterEnv, render_mode="rgb_array", horizon=3)] * 3
    with pair(fns) as (envs, twin):
        compare(envs, twin, 4)
        assert envs.render_mode == "rgb_array"
        assert envs.metadata["render_fps"] == 30
        assert np.array_equal(envs.render(), twin.render())
        assert envs.render("rgb_array").shape == (16, 16, 3)
        with pytest.warns(UserWarning, match="render mode"):
            envs.render("ansi")
    with made([CounterEnv]) as envs, pytest.warns(UserWarning, match="draw no images"):
        assert envs.get_images() == [None]


# --- as people make it ----------------------------------------------------------------------------


def test_make_vec_env_and_evaluate_policy():
    options = {"vec_env_kwargs": {"start_method": "fork", "envs_per_worker": 2}}
    made_so = partial(make_vec_env, "CartPole-v1", 2, seed=1, env_kwargs={"max_episode_steps": 20})
    envs, twin = made_so(vec_env_cls=SubprocessVecEnv, **options), made_so()
    try:
        assert isinstance(envs, VecEnv)
        assert envs.env_is_wrapped(Monitor) == [True, True]
        model = PPO("MlpPolicy", envs, n_steps=16, batch_size=32, n_epochs=1, **copy.deepcopy(SMALL)).learn(32)
        model.set_env(twin)
        returns = [
            evaluate_policy(model, each, n_eval_episodes=4, return_episode_rewards=True)[0] for each in (envs, twin)
        ]
        assert len(returns[0]) == 4
        envs.seed(2)
        twin.seed(2)
        again = [
            evaluate_policy(model, each, n_eval_episodes=4, return_episode_rewards=True)[0] for each in (envs, twin)
        ]
        assert again[0] == again[1]
    finally:
        envs.close()
        twin.close()
