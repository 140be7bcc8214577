"""Stable-Baselines3's PPO learns from the frames of a MuJoCo env. Each worker renders on the device that it is given.

python examples/recipes/pixels_ppo.py --devices 2          # two GPUs
MUJOCO_GL=osmesa python examples/recipes/pixels_ppo.py     # without a GPU and without EGL
"""

import argparse
import os
from functools import partial
from typing import Any

import gymnasium
from gymnasium.wrappers import AddRenderObservation, FrameStackObservation, GrayscaleObservation
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecMonitor

from multienv import Deadlines
from multienv.adapters.stable_baselines3 import SubprocessVecEnv


def make_env(env_id: str, size: int = 64) -> gymnasium.Env[Any, Any]:
    """Build an env whose observation is its last three frames, in gray."""
    env = gymnasium.make(env_id, render_mode="rgb_array", width=size, height=size)
    env.reset(seed=0)  # the next line resets and renders; the camera then stays as it is
    env = AddRenderObservation(env, render_only=True)
    return FrameStackObservation(GrayscaleObservation(env), 3)


def variables(devices: int, worker: int) -> dict[str, str]:
    """Spread the workers over the devices."""
    return {"MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl"), "MUJOCO_EGL_DEVICE_ID": str(worker % devices)}


def make_envs(env_id: str, num_envs: int, devices: int = 1, **options: Any) -> SubprocessVecEnv:
    """Make the envs. If rendering hangs or aborts, that costs a recovery, or at worst a truncated episode."""
    return SubprocessVecEnv(
        [partial(make_env, env_id)] * num_envs,
        worker_env=partial(variables, devices),
        deadlines=Deadlines(step=30.0, reset=60.0),  # replaces a hung renderer too
        **options,
    )


def train(envs: SubprocessVecEnv, steps: int, callback: Any = None, **options: Any) -> PPO:
    """Learn for this many steps."""
    model = PPO("CnnPolicy", VecMonitor(envs), seed=0, device="auto", **options)
    return model.learn(steps, callback=callback)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="InvertedPendulum-v5")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40_000)
    chosen = parser.parse_args()
    options = {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "learning_rate": 5e-4}
    train(make_envs(chosen.env, chosen.num_envs, chosen.devices), chosen.steps, **options, verbose=1)
