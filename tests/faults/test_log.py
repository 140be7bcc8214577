"""The log has one warning a loss: what happened, what it cost, where the report is."""

from __future__ import annotations

import logging
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kit import CounterEnv
from multienv import RestartPolicy, SubprocessEnv
from multienv.errors import WorkerLostError
from multienv.reports import store


@pytest.mark.parametrize(
    ("action", "cost"),
    [
        ("replay", "Outcome: exact, from the journal, 2 requests replayed, in "),
        ("truncate", "Outcome: truncated, the episode has ended, in "),
        ("raise", "Outcome: raised, an error is raised, in "),
    ],
)
def test_each_loss_is_one_warning(action: Any, cost: str, reports: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = RestartPolicy(on_crash=action, snapshots=False)
    with caplog.at_level(logging.INFO, "multienv"), SubprocessEnv(CounterEnv, env_index=3, restart=policy) as env:
        env.reset(seed=7)
        env.step(1)
        pid = env.statistics().pid or 0
        os.kill(pid, signal.SIGKILL)
        if action == "raise":
            with pytest.raises(WorkerLostError):
                env.step(1)
        else:
            env.step(1)
    first, *others = caplog.records
    assert (first.levelname, others[0].levelname, len(others)) == ("INFO", "WARNING", 1)
    happened = "The process of env 3 was killed by SIGKILL (often the kernel's out-of-memory killer: "
    where = f"while it was idle before step(), after 1 step of its episode (last seed 7) (pid {pid})."
    for record in caplog.records:
        assert record.getMessage().startswith(happened)
        assert where in record.getMessage()
    told = others[0].getMessage()
    assert f"{where} {cost}" in told
    store.settle()
    (report,) = reports.glob("*.json")
    assert told.endswith(f"s. To see it again: multienv replay {report}")


def test_a_replacement_by_plan_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    policy = RestartPolicy(recycle_after_episodes=1)
    with (
        caplog.at_level(logging.INFO, "multienv"),
        SubprocessEnv(partial(CounterEnv, horizon=3), env_index=3, restart=policy) as env,
    ):
        for _ in range(2):
            env.reset(seed=0)
            for _ in range(3):
                env.step(1)
    assert env.statistics().recycled >= 1
    for record in caplog.records:
        assert record.levelname == "INFO"
        assert "Env 3: its process is replaced" in record.getMessage()
    assert len(caplog.records) == env.statistics().recycled
