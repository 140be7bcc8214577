"""The vector envs that ``fault_table.py`` tries, each as one thing that resets, steps and closes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np

NUM_ENVS = 4


class Peer:
    """Has ``NUM_ENVS`` envs, in gymnasium's manner; a subclass builds them, and says what it does otherwise."""

    name: str  # in the table
    package: str  # whose version is told
    deadline: str | None  # what says how long a step may take
    envs: Any

    def __init__(self, env_fns: Sequence[Callable[[], Any]], seconds: float | None) -> None:
        raise NotImplementedError

    def reset(self) -> Any:
        """Return the observations."""
        return self.envs.reset(seed=0)[0]

    def step(self, action: int) -> tuple[Any, Any]:
        """Take this action in all envs; return the observations, and whose episodes have ended."""
        observations, _, terminated, truncated, _ = self.envs.step(np.full(NUM_ENVS, action))
        return observations, terminated | truncated

    def close(self) -> None:
        self.envs.close()


class Multienv(Peer):
    """multienv.SubprocessVectorEnv."""

    name, package, deadline = "multienv", "multienv", "Deadlines(step=…)"

    def __init__(self, env_fns: Sequence[Any], seconds: float | None) -> None:
        from multienv import Deadlines, SubprocessVectorEnv

        self.envs = SubprocessVectorEnv(env_fns, envs_per_worker=1, deadlines=Deadlines(step=seconds), reports="")


class Gymnasium(Peer):
    """gymnasium.vector.AsyncVectorEnv."""

    name, package, deadline = "gymnasium AsyncVectorEnv", "gymnasium", "step_wait(timeout=…)"

    def __init__(self, env_fns: Sequence[Any], seconds: float | None) -> None:
        self.envs, self.seconds = gymnasium.vector.AsyncVectorEnv(env_fns), seconds

    def step(self, action: int) -> Any:
        self.envs.step_async(np.full(NUM_ENVS, action))
        observations, _, terminated, truncated, _ = self.envs.step_wait(timeout=self.seconds)
        return observations, terminated | truncated


class StableBaselines3(Peer):
    """stable_baselines3's SubprocVecEnv."""

    name, package, deadline = "Stable-Baselines3 SubprocVecEnv", "stable_baselines3", None

    def __init__(self, env_fns: Sequence[Any], seconds: float | None) -> None:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        self.envs = SubprocVecEnv(list(env_fns))
        self.envs.seed(0)

    def reset(self) -> Any:
        return self.envs.reset()

    def step(self, action: int) -> Any:
        observations, _, done, _ = self.envs.step(np.full(NUM_ENVS, action))
        return observations, done


class Tianshou(Peer):
    """tianshou.env.SubprocVectorEnv; its ``timeout`` is for how long to wait for the first env, not for a hung one."""

    name, package, deadline = "Tianshou SubprocVectorEnv", "tianshou", None

    def __init__(self, env_fns: Sequence[Any], seconds: float | None) -> None:
        from tianshou.env import SubprocVectorEnv

        self.envs = SubprocVectorEnv(list(env_fns))
        self.envs.seed(0)

    def reset(self) -> Any:
        return self.envs.reset()[0]


class TorchRL(Peer):
    """torchrl.envs.ParallelEnv."""

    name, package, deadline = "TorchRL ParallelEnv", "torchrl", "BATCHED_PIPE_TIMEOUT=…"

    def __init__(self, env_fns: Sequence[Any], seconds: float | None) -> None:
        if seconds is not None:
            os.environ["BATCHED_PIPE_TIMEOUT"] = str(seconds)
        from torchrl.envs import ParallelEnv

        self.envs = ParallelEnv(NUM_ENVS, [partial(_torchrl_env, env_fn) for env_fn in env_fns])
        self.envs.set_seed(0)

    def reset(self) -> Any:
        self.latest = self.envs.reset()
        return self.latest["observation"].numpy()

    def step(self, action: int) -> Any:
        import torch
        from torchrl.envs.utils import step_mdp

        self.latest["action"] = torch.full((NUM_ENVS,), action)
        outcome = self.envs.step(self.latest)
        self.latest = step_mdp(outcome)
        return outcome["next", "observation"].numpy(), outcome["next", "done"].numpy().ravel()


def _torchrl_env(env_fn: Callable[[], Any]) -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(env_fn(), categorical_action_encoding=True)


class PufferLib(Peer):
    """pufferlib.vector with its Multiprocessing backend; any of the envs may be the one that the fault strikes."""

    name, package, deadline = "PufferLib Multiprocessing", "pufferlib", None

    def __init__(self, env_fns: Sequence[Any], seconds: float | None) -> None:
        import pufferlib.vector

        self.envs = pufferlib.vector.make(
            partial(_puffer_env, env_fns[1]),
            backend=pufferlib.vector.Multiprocessing,
            num_envs=NUM_ENVS,
            num_workers=NUM_ENVS,
        )


def _puffer_env(env_fn: Callable[[], Any], **given: Any) -> Any:
    import pufferlib.emulation

    return pufferlib.emulation.GymnasiumPufferEnv(env_creator=env_fn, **given)  # newer versions give it memory


class DIEngine(Peer):
    """DI-engine's SyncSubprocessEnvManager."""

    name, package, deadline = "DI-engine SyncSubprocessEnvManager", "DI-engine", "step_timeout"

    def __init__(self, env_fns: Sequence[Any], seconds: float | None) -> None:
        from ding.envs import SyncSubprocessEnvManager

        config = SyncSubprocessEnvManager.default_config()
        config.update({"shared_memory": False, "episode_num": float("inf"), "context": "fork"})
        config["step_timeout"] = None if seconds is None else int(seconds)  # for signal.alarm()
        self.envs = SyncSubprocessEnvManager([partial(_ding_env, env_fn) for env_fn in env_fns], config)
        self.envs.seed(0, dynamic_seed=False)

    def reset(self) -> Any:
        self.envs.launch()
        ready = self.envs.ready_obs
        return np.stack([ready[index] for index in range(NUM_ENVS)])

    def step(self, action: int) -> Any:
        steps = self.envs.step(dict.fromkeys(range(NUM_ENVS), np.int64(action)))
        rows = [steps[index] for index in range(NUM_ENVS)]
        return np.stack([row.obs for row in rows]), np.array([bool(row.done) for row in rows])


def _ding_env(env_fn: Callable[[], Any]) -> Any:
    from ding.envs import BaseEnv, BaseEnvTimestep

    class Ding(BaseEnv):  # type: ignore[misc]
        """The four values that DI-engine wants, of a gymnasium env."""

        def __init__(self) -> None:
            self.inner, self._seed = env_fn(), 0
            self.observation_space, self.action_space = self.inner.observation_space, self.inner.action_space
            self.reward_space = gymnasium.spaces.Box(0, 1, (1,))

        def seed(self, seed: int, dynamic_seed: bool = True) -> None:
            self._seed = seed

        def reset(self) -> Any:
            return self.inner.reset(seed=self._seed)[0]

        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, info = self.inner.step(action)
            return BaseEnvTimestep(observation, np.array([reward], np.float32), terminated or truncated, info)

        def close(self) -> None:
            self.inner.close()

        def __repr__(self) -> str:
            return "Ding"

    return Ding()


PEERS: list[type[Peer]] = [Multienv, Gymnasium, StableBaselines3, Tianshou, TorchRL, PufferLib, DIEngine]
