"""MaskablePPO of sb3-contrib whose action masks come with the steps: nothing is asked of the workers for them."""

import struct
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces.utils import flatdim
from sb3_contrib import MaskablePPO
from stable_baselines3.common.vec_env import VecEnvWrapper

from multienv.adapters.stable_baselines3 import SubprocessVecEnv


class MaskInInfo(gymnasium.Wrapper):
    """In the worker: puts ``env.action_masks()`` into the info, as integers of 64 bits. An array would be pickled."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.names = names_of(env.action_space)
        self.masks = env.get_wrapper_attr("action_masks")

    def reset(self, **given: Any) -> Any:
        observation, info = super().reset(**given)
        return observation, {**info, **self._words()}

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {**info, **self._words()}

    def _words(self) -> dict[str, int]:
        data = np.packbits(self.masks()).tobytes().ljust(8 * len(self.names), b"\0")
        return dict(zip(self.names, struct.unpack(f"={len(self.names)}q", data), strict=True))


def names_of(space: gymnasium.spaces.Space[Any]) -> list[str]:
    return [f"mask_{place}" for place in range(-(-flatdim(space) // 64))]


class MasksOfInfos(VecEnvWrapper):
    """In the trainer: takes the masks out of the infos, and answers when MaskablePPO asks for them."""

    def __init__(self, envs: SubprocessVecEnv) -> None:
        super().__init__(envs)
        self.actions, self.names = flatdim(envs.action_space), names_of(envs.action_space)
        self.masks: Any = None

    def reset(self) -> Any:
        observations = self.venv.reset()
        self._note(self.venv.reset_infos)
        return observations

    def step_wait(self) -> Any:
        returned = self.venv.step_wait()
        # Where an episode has ended, the info is that of its last step: the next mask came with the reset.
        infos = zip(returned[2], returned[3], self.venv.reset_infos, strict=True)
        self._note([begun if done else info for done, info, begun in infos])
        return returned

    def _note(self, infos: list[dict[str, Any]]) -> None:
        words = np.array([[info[name] for name in self.names] for info in infos], np.int64)
        self.masks = np.unpackbits(words.view(np.uint8), axis=1, count=self.actions).astype(np.bool_)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        if method_name == "action_masks":
            return list(self.masks if indices is None else self.masks[np.atleast_1d(indices)])
        return self.venv.env_method(method_name, *args, indices=indices, **kwargs)  # type: ignore[no-any-return]


def make_envs(env_fns: list[Any], **options: Any) -> MasksOfInfos:
    return MasksOfInfos(SubprocessVecEnv([partial(_make, env_fn) for env_fn in env_fns], **options))


def _make(env_fn: Any) -> gymnasium.Env[Any, Any]:
    return MaskInInfo(env_fn())


def train(envs: MasksOfInfos, steps: int, callback: Any = None, **options: Any) -> MaskablePPO:
    return MaskablePPO("MlpPolicy", envs, seed=0, device="cpu", **options).learn(steps, callback=callback)
