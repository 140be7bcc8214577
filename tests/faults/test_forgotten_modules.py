"""An env that has modules of multienv imported anew: its worker and its trainer no longer mean the same by a name."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from kit import CounterEnv
from multienv import Deadlines, RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv.errors import MultienvError


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("multienv")]:
        del sys.modules[name]


class Forgetful(CounterEnv):
    def step(self, action: Any) -> Any:
        forget()
        return super().step(action)


class ForgetfulFromTheStart(CounterEnv):
    def __init__(self) -> None:
        super().__init__()
        forget()


@pytest.mark.parametrize("snapshots", [True, False])
def test_a_replay_that_is_not_understood_is_no_way_back(snapshots: bool) -> None:
    policy = RestartPolicy(snapshots=snapshots, snapshot_every=4 if snapshots else None)
    # close() is not understood either
    with SubprocessEnv(Forgetful, restart=policy, deadlines=Deadlines(close=0.5)) as env:
        env.reset(seed=0)
        for number in range(1, 9):
            if number == 7:  # two steps came since the snapshot
                os.kill(env.statistics().pid or 0, signal.SIGKILL)
            assert env.step(1)[0][0] == number
        assert env.statistics().last_recovery.rung == "journal"  # type: ignore[union-attr]


def test_an_env_that_is_described_in_other_terms_is_refused() -> None:
    policy = RestartPolicy(max_backoff=0.01)
    with pytest.raises(MultienvError), SubprocessEnv(ForgetfulFromTheStart, restart=policy) as env:
        env.reset(seed=0)
    with pytest.raises(MultienvError):
        SubprocessVectorEnv([CounterEnv, ForgetfulFromTheStart], envs_per_worker=1, restart=policy)
