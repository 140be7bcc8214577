"""TorchRL's GymWrapper around one env, and around a batch."""

from collections.abc import Callable
from typing import Any

from gymnasium.vector import AutoresetMode
from torchrl.envs import GymWrapper

import multienv


def one_env(env_fn: Callable[[], Any]) -> GymWrapper:
    return GymWrapper(multienv.SubprocessEnv(env_fn).initialize())  # built: TorchRL asks for its spaces


def batch(env_fns: list[Callable[[], Any]]) -> GymWrapper:
    # DISABLED: TorchRL itself resets those that have ended, with a mask.
    return GymWrapper(multienv.SubprocessVectorEnv(env_fns, autoreset_mode=AutoresetMode.DISABLED))
