"""A trainer for ``multienv top``: its envs wait wherever a file of that name lies in a directory."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from kit import CounterEnv
from multienv import SubprocessVectorEnv


def halt_while_it_is_there(path: Path) -> None:
    while path.exists():
        time.sleep(0.01)


class HaltingEnv(CounterEnv):
    """Waits in its constructor while ``build`` is there, in a step while ``step-INDEX`` is."""

    def __init__(self, index: int, directory: str) -> None:
        halt_while_it_is_there(Path(directory) / "build")
        self.halt = Path(directory) / f"step-{index}"
        super().__init__()

    def step(self, action: Any) -> Any:
        halt_while_it_is_there(self.halt)
        return super().step(action)


def recv_for_ever(directory: str) -> None:
    """Four envs at their own pace, each in a process."""
    envs = SubprocessVectorEnv([partial(HaltingEnv, index, directory) for index in range(4)], envs_per_worker=1)
    envs.reset_async(seed=0)
    print("ready", flush=True)
    while os.getppid() != 1:
        indices = envs.recv(1)[-1]
        envs.send(envs.action_space.sample()[:1], indices)


def step_for_ever(directory: str) -> None:
    """Four envs in two processes."""
    fns = [partial(HaltingEnv, index, directory) for index in range(4)]
    envs = SubprocessVectorEnv(fns, envs_per_worker=2)
    envs.reset(seed=0)
    print("ready", flush=True)
    while os.getppid() != 1:
        envs.step(envs.action_space.sample())
        time.sleep(0.002)
