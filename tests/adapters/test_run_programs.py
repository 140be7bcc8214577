"""``multienv run`` with programs that nobody changed: they learn the same, to the bit, though workers are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import multienv
from kit.kills import busy_workers
from multienv.testing import Killer

pytestmark = pytest.mark.ci

# The form of a file of CleanRL: gymnasium's vector env, wrappers in a thunk, no function but for the thunk.
CLEANRL = """
import random
import sys

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions.categorical import Categorical


def make_env(env_id, idx, capture_video, run_name):
    def thunk():
        env = gym.make(env_id)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        return env

    return thunk


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        size = int(np.array(envs.single_observation_space.shape).prod())
        self.critic = nn.Sequential(nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, 1))
        self.actor = nn.Sequential(nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, envs.single_action_space.n))


if __name__ == "__main__":
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.backends.cudnn.deterministic = True
    torch.set_num_threads(1)
    envs = getattr(gym.vector, sys.argv[1])([make_env("CartPole-v1", i, False, "run") for i in range(4)])
    assert isinstance(envs.single_action_space, gym.spaces.Discrete), "only discrete action space is supported"
    agent = Agent(envs)
    optimizer = optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    steps, returns = 64, []
    next_obs, _ = envs.reset(seed=1)
    next_obs, next_done = torch.Tensor(next_obs), torch.zeros(4)
    for iteration in range(15):
        obs, actions, logprobs = torch.zeros(steps, 4, 4), torch.zeros(steps, 4), torch.zeros(steps, 4)
        rewards, dones, values = torch.zeros(steps, 4), torch.zeros(steps, 4), torch.zeros(steps, 4)
        for step in range(steps):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                probs = Categorical(logits=agent.actor(next_obs))
                action = probs.sample()
                values[step] = agent.critic(next_obs).flatten()
            actions[step], logprobs[step] = action, probs.log_prob(action)
            next_obs, reward, terminations, truncations, infos = envs.step(action.cpu().numpy())
            next_done = np.logical_or(terminations, truncations)
            rewards[step] = torch.tensor(reward)
            next_obs, next_done = torch.Tensor(next_obs), torch.Tensor(next_done)
            if "episode" in infos:
                returns += infos["episode"]["r"][infos["_episode"]].tolist()
        advantages, lastgaelam = torch.zeros(steps, 4), 0
        with torch.no_grad():
            next_value = agent.critic(next_obs).flatten()
            for t in reversed(range(steps)):
                nonterminal = 1.0 - (next_done if t == steps - 1 else dones[t + 1])
                nextvalues = next_value if t == steps - 1 else values[t + 1]
                delta = rewards[t] + 0.99 * nextvalues * nonterminal - values[t]
                advantages[t] = lastgaelam = delta + 0.99 * 0.95 * nonterminal * lastgaelam
        for epoch in range(2):
            probs = Categorical(logits=agent.actor(obs.reshape(-1, 4)))
            ratio = (probs.log_prob(actions.flatten()) - logprobs.flatten()).exp()
            gain = torch.max(-advantages.flatten() * ratio, -advantages.flatten() * ratio.clamp(0.8, 1.2)).mean()
            value_loss = (agent.critic(obs.reshape(-1, 4)).flatten() - (advantages + values).flatten()).pow(2).mean()
            optimizer.zero_grad()
            (gain - 0.01 * probs.entropy().mean() + 0.5 * value_loss).backward()
            optimizer.step()
    envs.close()
    assert len(returns) > 30
    torch.save([agent.state_dict(), returns], sys.argv[2])
"""
# The form of gymnasium's A2C tutorial: no main guard, a vector wrapper, envs with other arguments each.
A2C_TUTORIAL = """
import sys

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch import optim

torch.manual_seed(2)
torch.set_num_threads(1)
envs = gym.vector.AsyncVectorEnv(
    [
        lambda: gym.make("Acrobot-v1", max_episode_steps=60),
        lambda: gym.make("Acrobot-v1", max_episode_steps=80),
        lambda: gym.make("Acrobot-v1", max_episode_steps=100),
    ]
)
envs_wrapper = gym.wrappers.vector.RecordEpisodeStatistics(envs, buffer_length=300)
critic = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
actor = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
critic_optim = optim.RMSprop(critic.parameters(), lr=0.005)
actor_optim = optim.RMSprop(actor.parameters(), lr=0.001)
for sample_phase in range(20):
    rewards, log_probs, values, masks = (torch.zeros(60, 3) for _ in range(4))
    if sample_phase == 0:
        states, info = envs_wrapper.reset(seed=42)
    for step in range(60):
        state = torch.Tensor(states)
        values[step] = critic(state).squeeze()
        policy = torch.distributions.Categorical(logits=actor(state))
        actions = policy.sample()
        log_probs[step] = policy.log_prob(actions)
        states, reward, terminated, truncated, infos = envs_wrapper.step(actions.cpu().numpy())
        rewards[step] = torch.tensor(reward)
        masks[step] = torch.tensor([not one for one in terminated])
    advantages, gae = torch.zeros(59, 3), 0.0
    for t in reversed(range(59)):
        error = rewards[t] + 0.99 * masks[t] * values[t + 1] - values[t]
        gae = error + 0.99 * 0.95 * masks[t] * gae
        advantages[t] = gae
    critic_optim.zero_grad()
    advantages.pow(2).mean().backward(retain_graph=True)
    critic_optim.step()
    actor_optim.zero_grad()
    (-(advantages.detach() * log_probs[:-1]).mean()).backward()
    actor_optim.step()
envs_wrapper.close()
torch.save([actor.state_dict(), list(map(float, envs_wrapper.return_queue))], sys.argv[1])
"""
# A plain script of Stable-Baselines3, as in its documentation.
STABLE_BASELINES3 = """
import sys

import stable_baselines3
import torch
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

if __name__ == "__main__":
    torch.set_num_threads(1)
    name, kind, file = sys.argv[1:]
    arguments = {"PPO": {"n_steps": 128, "n_epochs": 2}, "A2C": {}, "DQN": {"learning_starts": 100}}[name]
    if kind == "single":
        env = "CartPole-v1"
    else:
        kinds = {"SubprocVecEnv": SubprocVecEnv, "default": None}
        env = make_vec_env("Acrobot-v1", n_envs=2, seed=0, vec_env_cls=kinds[kind])
        assert isinstance(env, SubprocVecEnv if kind == "SubprocVecEnv" else DummyVecEnv)
        env = VecNormalize(env)
    model = getattr(stable_baselines3, name)("MlpPolicy", env, seed=5, device="cpu", **arguments)
    model.learn(1500)
    model.get_env().close()
    torch.save([model.policy.state_dict()], file)
"""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(multienv.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": "", **more}


def same_as_alone(folder: Path, *command: str, options: tuple[str, ...] = (), suffix: str = ".pt") -> dict[str, object]:
    """Run a program by itself, and by ``multienv run`` while its workers are killed; compare what it has written.

    Args:
        folder: Where it runs.
        *command: After ``python``; the last argument names what it writes.
        options: For ``multienv run``.
        suffix: Of what it writes.

    Returns:
        The summary.
    """
    alone = [sys.executable, "-W", "ignore", *command]
    done = subprocess.run([*alone, f"alone{suffix}"], cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = [sys.executable, "-W", "ignore", "-m", "multienv", "run", "--summary", "told.json", *options, *command]
    process = subprocess.Popen(
        [*run, f"run{suffix}"],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    # More kills than come on a machine with nothing else to do. A busy one, which recovers hardly faster than they come,
    # would take minutes.
    with Killer(lambda: busy_workers(process.pid), interval=(0.1, 0.3), kills=40, seed=1):
        _, stderr = process.communicate(timeout=280)
    assert process.returncode == 0, stderr
    told = json.loads((folder / "told.json").read_text())
    assert told["losses"].get("SIGKILL", 0) > 0, stderr
    assert told["outcomes"]["exact"] == sum(told["outcomes"].values()) == sum(told["losses"].values())
    assert stderr.splitlines()[-1].startswith("multienv run: ")
    return told


def assert_same(folder: Path) -> None:
    import torch

    alone, run = (torch.load(folder / f"{name}.pt", weights_only=False) for name in ("alone", "run"))
    assert alone[0].keys() == run[0].keys()
    assert all(torch.equal(alone[0][name], run[0][name]) for name in alone[0])
    assert alone[1:] == run[1:]


@pytest.mark.parametrize("kind", ["AsyncVectorEnv", "SyncVectorEnv"])
def test_script_in_the_form_of_cleanrl_learns_the_same(kind: str, tmp_path: Path) -> None:
    (tmp_path / "ppo.py").write_text(CLEANRL)
    told = same_as_alone(tmp_path, "ppo.py", kind, options=("--serial",) if kind == "SyncVectorEnv" else ())
    assert told["envs"] == 4
    assert_same(tmp_path)


def test_script_in_the_form_of_gymnasiums_a2c_tutorial_learns_the_same(tmp_path: Path) -> None:
    (tmp_path / "tutorial.py").write_text(A2C_TUTORIAL)
    same_as_alone(tmp_path, "tutorial.py")
    assert_same(tmp_path)


@pytest.mark.parametrize(
    ("learner", "kind", "options"),
    [
        ("PPO", "SubprocVecEnv", ()),
        ("A2C", "SubprocVecEnv", ()),
        ("DQN", "SubprocVecEnv", ()),
        ("PPO", "default", ("--serial",)),
        ("A2C", "single", ("--single",)),
    ],
)
def test_script_of_stable_baselines3_learns_the_same(
    learner: str, kind: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(STABLE_BASELINES3)
    same_as_alone(tmp_path, "train.py", learner, kind, options=options)
    assert_same(tmp_path)


def test_training_command_of_rl_zoo_learns_the_same(tmp_path: Path) -> None:
    pytest.importorskip("rl_zoo3", reason="rl_zoo3 is in no extra; .ci/run installs it")
    from stable_baselines3 import A2C

    command = "-m rl_zoo3.train --algo a2c --env CartPole-v1 --seed 1 --vec-env subproc --device cpu -n 1500"
    few = ["--num-threads", "1", "--eval-freq", "-1", "--hyperparams", "n_envs:2", "-f"]
    same_as_alone(tmp_path, *command.split(), *few, suffix="")
    alone, run = (
        A2C.load(next((tmp_path / name).rglob("CartPole-v1.zip")), device="cpu").policy.state_dict()
        for name in ("alone", "run")
    )
    assert all((alone[name] == run[name]).all() for name in alone)


def test_stand_in_for_subproc_vec_env_returns_its_rewards(caplog: pytest.LogCaptureFixture) -> None:
    """Those are float64, and those of DummyVecEnv float32."""
    from stable_baselines3.common import vec_env

    with multienv.replace_vector_envs(serial=True):
        for kind, dtype in ((vec_env.SubprocVecEnv, np.float64), (vec_env.DummyVecEnv, np.float32)):
            arguments: Any = {"start_method": "fork"} if dtype is np.float64 else {}
            envs: Any = kind([lambda: gymnasium.make("Pendulum-v1")], **arguments)
            envs.seed(1)
            envs.reset()
            rewards = envs.step(np.ones((1, 1)))[1]
            twin = gymnasium.make("Pendulum-v1")
            twin.reset(seed=1)
            assert rewards.dtype == dtype
            assert rewards[0] == dtype(twin.step(np.ones(1))[1])
            envs.close()
    assert "start_method='fork' is passed over" in caplog.text


def test_class_is_replaced_though_the_script_has_imported_ours_first(tmp_path: Path) -> None:
    script = """
from multienv.adapters.stable_baselines3 import SubprocessVecEnv
from stable_baselines3.common import vec_env
from stable_baselines3.common.vec_env import subproc_vec_env
assert issubclass(vec_env.SubprocVecEnv, SubprocessVecEnv), vec_env.SubprocVecEnv.__mro__
assert vec_env.SubprocVecEnv is subproc_vec_env.SubprocVecEnv
assert not issubclass(vec_env.DummyVecEnv, SubprocessVecEnv)
"""
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-W", "ignore", "-m", "multienv", "run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
