"""The log has one warning a loss: what happened, what it cost, where the report is. What is lost: invariants/test_9."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kit import CounterEnv, SlowEnv, kill_worker
from multienv import RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv.recovery import pending, recoverer
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
        kill_worker(env)
        env.step(1)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    told = caplog.records[1].getMessage()
    assert cost in told
    store.settle()
    (report,) = reports.glob("*.json")
    assert told.endswith(f"s. To see it again: multienv replay {report}")


def test_a_quick_replacement_by_plan_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_recovery_that_takes_long_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recoverer, "_SILENCE", 0.2)
    policy, fns = RestartPolicy(snapshots=False), [CounterEnv, partial(SlowEnv, step_seconds=0.05)]
    with SubprocessVectorEnv(fns, envs_per_worker=2, restart=policy, reports="") as envs:
        envs.reset(seed=0)
        for _ in range(12):
            envs.step([1, 1])
        kill_worker(envs)
        with caplog.at_level(logging.WARNING, "multienv"):
            envs.step([1, 1])
    *news, outcome = [record.getMessage() for record in caplog.records]
    assert "Outcome: exact" in outcome
    told = [re.fullmatch(r"Envs 0–1 are being recovered, \d s so far: (.*)\.", line) for line in news]
    assert 1 <= len(told) <= 4  # at 0.2, 0.4, 0.8 and 1.6 s
    done = re.fullmatch(r"replaying 13 requests, (\d+) are done", told[-1].group(1) if told[-1] else "")
    assert done
    assert 0 < int(done.group(1)) < 13


def test_the_warning_of_a_silent_hang_names_the_env_of_several_in_the_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pending, "SILENCE", 0.2)
    with SubprocessVectorEnv([CounterEnv, partial(SlowEnv, step_seconds=1.0), CounterEnv], envs_per_worker=3) as envs:
        envs.reset(seed=0)
        envs.step([1, 1, 1])
    assert [record.getMessage().partition(" (pid")[0] for record in caplog.records] == [
        "step() of env 1 has not returned for 0 s"
    ]
