"""RL Zoo trains and plays on ``SubprocessVecEnv``: one attribute of its ``ExperimentManager`` is set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import multienv

pytestmark = pytest.mark.ci

CODE = """
import sys
from pathlib import Path

import torch
from rl_zoo3 import enjoy, train
from rl_zoo3.exp_manager import ExperimentManager
from stable_baselines3 import PPO

from multienv.adapters.stable_baselines3 import SubprocessVecEnv

made = []


class Noted(SubprocessVecEnv):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        made.append(self.num_envs)


def weights(folder):
    few = ["-n", "128", "--eval-freq", "-1", "--hyperparams", "n_envs:2", "n_steps:32", "batch_size:32", "n_epochs:1"]
    sys.argv = ["train", "--algo", "ppo", "--env", "CartPole-v1", "--seed", "1", "-f", folder, "--device", "cpu", *few]
    train.train()
    (saved,) = Path(folder).rglob("CartPole-v1.zip")
    return PPO.load(saved, device="cpu").policy.state_dict()


expected = weights("dummy")
ExperimentManager.default_vec_env_cls = Noted
found = weights("workers")
assert made == [2], made
assert all(torch.equal(found[name], expected[name]) for name in expected)
sys.argv = ["enjoy", "--algo", "ppo", "--env", "CartPole-v1", "-f", "workers", "-n", "20", "--no-render"]
enjoy.enjoy()
assert made == [2, 1], made
"""


def test_rl_zoo_learns_the_same_and_plays(tmp_path):
    source = str(Path(multienv.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": source, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
