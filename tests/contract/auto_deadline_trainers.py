"""Trainers that the tests of "auto" deadlines stop."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from contract_envs import SLOW, UnevenEnv

from kit import ForkingPolicy
from multienv import SubprocessEnv
from multienv._engine.recovery import pending as limits


class ToldEnv(UnevenEnv):
    """Says by a file when its slow step begins."""

    def step(self, action: Any) -> Any:
        if action == SLOW:
            (self.directory / "slow").touch()
            time.sleep(1.0)
        return super().step(action)


def step_slowly(directory: str) -> None:
    """Take a slow step after many quick ones, with deadlines of 2.5 s."""
    limits.LEAST = 2.5
    with SubprocessEnv(partial(ToldEnv, Path(directory)), restart=ForkingPolicy(snapshot_every=1)) as env:
        env.reset(seed=5)
        for _ in range(70):
            env.step(0)
        print("steps", env.statistics().pid, flush=True)
        env.step(SLOW)
        print("losses", env.statistics().losses, flush=True)
