"""The log has one warning a loss: what happened, what it cost, where the report is. What is lost: invariants/test_9."""

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
from multienv.reports import store


@pytest.mark.parametrize(
    ("action", "cost"),
    [
        ("replay", "Outcome: exact, from the journal, 2 requests replayed, in "),
        ("truncate", "Outcome: truncated, the episode has ended, in "),
    ],
)
def test_each_loss_is_one_warning(action: Any, cost: str, reports: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = RestartPolicy(on_crash=action, snapshots=False)
    with caplog.at_level(logging.INFO, "multienv"), SubprocessEnv(CounterEnv, env_index=3, restart=policy) as env:
        env.reset(seed=7)
        env.step(1)
        os.kill(env.statistics().pid or 0, signal.SIGKILL)
        env.step(1)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    told = caplog.records[1].getMessage()
    assert cost in told
    store.settle()
    (report,) = reports.glob("*.json")
    assert told.endswith(f"s. To see it again: multienv replay {report}")


def test_a_replacement_by_plan_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    env_fn, policy = partial(CounterEnv, horizon=3), RestartPolicy(recycle_after_episodes=1)
    with caplog.at_level(logging.INFO, "multienv"), SubprocessEnv(env_fn, env_index=3, restart=policy) as env:
        for _ in range(2):
            env.reset(seed=0)
            for _ in range(3):
                env.step(1)
    assert len(caplog.records) == env.statistics().recycled >= 1
    for record in caplog.records:
        assert record.levelname == "INFO"
        assert "Env 3: its process is replaced" in record.getMessage()
