"""The log warns of losses: what happened, what it cost, where the report is. What is lost: invariants/test_9."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kit import CounterEnv, Fault, FaultyEnv, kill_worker, reports_written
from kit.gates import WAIT, GateEnv
from kit.trainer_process import becomes_true
from multienv import Deadlines, RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv._engine.recovery import pending, recoverer
from multienv.events import Loss, Recovery


@pytest.mark.parametrize(
    ("action", "cost"),
    [
        ("replay", "Outcome: exact, from the journal, 2 requests replayed, in "),
        ("truncate", "Outcome: truncated, the episode has ended, in "),
    ],
)
def test_a_loss_is_one_warning(action: Any, cost: str, reports: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = RestartPolicy(on_crash=action, snapshots=False)
    with caplog.at_level(logging.INFO, "multienv"), SubprocessEnv(CounterEnv, env_index=3, restart=policy) as env:
        env.reset(seed=7)
        env.step(1)
        kill_worker(env)
        env.step(1)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    told = caplog.records[1].getMessage()
    assert cost in told
    reports_written()
    (report,) = reports.glob("*.json")
    assert told.endswith(f"s. To see it again: multienv replay {report}")


@pytest.mark.parametrize(("attempts", "outcome"), [(1, "exact"), (9, "truncated")])
def test_losses_in_one_step_are_one_warning_which_says_of_a_deadline_that_the_env_may_only_be_slow(
    attempts: int, outcome: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Any] = []
    policy, deadlines = RestartPolicy(snapshots=False, backoff=0.0), Deadlines(step=0.8)
    once = tmp_path / "slow" if attempts == 1 else None
    env_fn = partial(FaultyEnv, fault=Fault("hang", "step", at=2, once=once))
    with SubprocessEnv(env_fn, env_index=0, restart=policy, deadlines=deadlines, hooks=[events.append]) as env:
        env.reset(seed=7)
        env.step(1)
        assert env.step(1)[3] == (outcome == "truncated")
        (told,) = [record.getMessage() for record in caplog.records]
    happened = "The process of env 0 did not answer within its deadline of 0.8 s (Deadlines.step) and was killed"
    if outcome == "exact":
        assert told.startswith(f"{happened} during step()")
    else:
        assert told.startswith(f"2 processes were lost in the same step(). The last: {happened} during step()")
    assert ("The env may only be slower than Deadlines.step: give it more. " in told) == (outcome == "truncated")
    assert f"Outcome: {outcome}, " in told
    assert [type(event) for event in events] == [Loss, Recovery] * (2 if outcome == "truncated" else 1)


@pytest.mark.parametrize("face", ["env", "batch"])
def test_losses_that_come_again_are_counted_and_hooks_get_each(face: str, caplog: pytest.LogCaptureFixture) -> None:
    events: list[Any] = []
    policy = RestartPolicy(snapshots=False, backoff=0.0)
    env_fn, options = partial(CounterEnv, horizon=None), {"restart": policy, "hooks": [events.append]}
    envs: Any = SubprocessEnv(env_fn, env_index=0, **options)  # type: ignore[arg-type]
    if face == "batch":
        envs = SubprocessVectorEnv([env_fn, env_fn], envs_per_worker=1, **options)  # type: ignore[arg-type]
    else:
        envs.initialize()
    with contextlib.closing(envs):
        envs.reset(seed=7)
        for _ in range(4):
            envs.step([1, 1] if face == "batch" else 1)
            kill_worker(envs)
        envs.step([1, 1] if face == "batch" else 1)
        first = "The process of env 0 was killed by SIGKILL"
        assert [record.getMessage().startswith(first) for record in caplog.records] == [True]
    assert becomes_true(lambda: len(caplog.records) > 1)  # close() waits for the log half a second at the most
    _, rest = [record.getMessage() for record in caplog.records]
    assert re.match(rf"3 such losses in the last \d+ s, all exact. The last: {first}.* Outcome: exact", rest)
    assert [type(event) for event in events] == 4 * [Loss, Recovery]


def test_exceptions_that_end_episodes_are_counted_too(caplog: pytest.LogCaptureFixture) -> None:
    fault = partial(FaultyEnv, fault=Fault("raise", "step", at=2, per="episode"))
    with SubprocessEnv(fault, restart=RestartPolicy(on_error="truncate")) as env:
        for _ in range(3):
            env.reset(seed=0)
            while not env.step(1)[3]:
                pass
        (whole,) = caplog.records
        assert whole.exc_info
    assert becomes_true(lambda: len(caplog.records) > 1)
    _, rest = caplog.records
    assert re.match(
        r"2 such losses in the last \d+ s, all truncated. The last: An exception of the env", rest.getMessage()
    )
    assert not rest.exc_info


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The replay waits at a gate, which opens when the log has said how far it is."""
    monkeypatch.setattr(recoverer, "_SILENCE", 0.2)
    gate = tmp_path / "gate"

    def open_up() -> None:
        becomes_true(lambda: "are done" in caplog.text)
        gate.touch()

    policy, fns = RestartPolicy(snapshots=False), [CounterEnv, partial(GateEnv, tmp_path)]
    with SubprocessVectorEnv(fns, envs_per_worker=2, restart=policy, reports="") as envs:
        envs.reset(seed=0)
        gate.touch()
        for step in range(12):
            envs.step([1, WAIT if step == 6 else 1])
        gate.unlink()
        kill_worker(envs)
        opener = threading.Thread(target=open_up)
        with caplog.at_level(logging.WARNING, "multienv"):
            opener.start()
            envs.step([1, 1])
        opener.join()
    *news, outcome = [record.getMessage() for record in caplog.records]
    assert "Outcome: exact" in outcome
    told = [re.fullmatch(r"Envs 0–1 are being recovered, \d+ s so far: (.*)\.", line) for line in news]
    done = re.fullmatch(r"replaying 13 requests, (\d+) are done", told[-1].group(1) if told[-1] else "")
    assert done
    assert 0 < int(done.group(1)) <= 7


def test_the_warning_of_a_silent_hang_names_the_env_of_several_in_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def open_up() -> None:
        becomes_true(lambda: caplog.text)
        (tmp_path / "gate").touch()

    with SubprocessVectorEnv([CounterEnv, partial(GateEnv, tmp_path), CounterEnv], envs_per_worker=3) as envs:
        envs.reset(seed=0)
        envs.step_async([1, WAIT, 1])
        assert becomes_true((tmp_path / "waits").exists)
        monkeypatch.setattr(pending, "SILENCE", 0.2)
        opener = threading.Thread(target=open_up)
        opener.start()
        envs.step_wait()
        opener.join()
    assert [record.getMessage().partition(" (pid")[0] for record in caplog.records] == [
        "step() of env 1 has not returned for 0 s"
    ]
    stack = caplog.records[0].getMessage().partition("Its stack:")[2]
    assert " in step" in stack
    assert "worker/main.py" not in stack
