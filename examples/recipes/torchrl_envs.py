"""TorchRL's GymWrapper around one env and around a batch, and a reader that marks lost steps in the tensordict."""

from collections.abc import Callable
from typing import Any

import torch
from gymnasium.vector import AutoresetMode
from torchrl.data import Composite, Unbounded
from torchrl.envs import GymWrapper
from torchrl.envs.gym_like import BaseInfoDictReader

import multienv


def one_env(env_fn: Callable[[], Any]) -> GymWrapper:
    return GymWrapper(multienv.SubprocessEnv(env_fn).initialize())  # build it now: TorchRL asks for its spaces


def batch(env_fns: list[Callable[[], Any]]) -> GymWrapper:
    # DISABLED: TorchRL resets ended episodes itself, with a mask.
    return GymWrapper(multienv.SubprocessVectorEnv(env_fns, autoreset_mode=AutoresetMode.DISABLED))


class LostReader(BaseInfoDictReader):
    """Writes ``lost`` into each step: whether its worker was lost, so that its outcome is unknown.

    ::

        env.set_info_dict_reader(LostReader(env.batch_size))
    """

    def __init__(self, batch_size: Any) -> None:
        self.batch_size = batch_size

    @property
    def info_spec(self) -> Any:
        return Composite(lost=Unbounded(self.batch_size, dtype=torch.bool), shape=self.batch_size)

    def __call__(self, info_dict: dict[str, Any], tensordict: Any) -> Any:
        told = info_dict.get("multienv", {})
        lost = told.get("_reason", "reason" in told)  # in a batch: an array
        return tensordict.set("lost", torch.as_tensor(lost).expand(self.batch_size).clone())
