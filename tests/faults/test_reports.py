"""Each loss leaves a report with all that is known of it, whatever is in the way of writing it."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from kit import CounterEnv, SpaceEnv, kill_worker, reports_written
from kit.trainer_process import STUCK_AFTER
from multienv import RestartPolicy, SubprocessEnv
from multienv._engine.reports import store
from multienv._engine.reports.read import load
from multienv._engine.wire.banks import split_entries
from multienv._engine.wire.messages import message_of
from multienv.cli.env_functions import env_functions
from multienv.errors import UsageError, WorkerLostError
from multienv.events import Recovery

RAISE = RestartPolicy(on_crash="raise", on_timeout="raise")


def all_in(directory: Path) -> list[dict[str, Any]]:
    reports_written()
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]


def only(directory: Path) -> dict[str, Any]:
    (report,) = all_in(directory)
    return report


def test_a_kill_that_is_recovered(reports: Path) -> None:
    events: list[Any] = []
    with SubprocessEnv(partial(gymnasium.make, "CartPole-v1"), env_index=3, hooks=[events.append]) as env:
        first, _ = env.reset(seed=5)
        seen = [env.step(action)[0] for action in (0, 1, 1)]
        pid = env.statistics().pid
        os.kill(pid, signal.SIGKILL)
        env.step(np.int64(1))
    (recovery,) = [event for event in events if isinstance(event, Recovery)]
    report, found = only(reports), load(recovery.report)
    assert report["replay"] == f"multienv replay {recovery.report}"
    assert "env 3 was killed by SIGKILL" in report["what"]
    expected = {"signal": "SIGKILL", "exit_code": -9, "cause": "died", "command": "step", "step": 3, "seed": 5}
    assert report["loss"].items() >= {**expected, "env_index": 3, "pid": pid}.items()
    assert report["request"]["action"] == {"dtype": "int64", "shape": [], "values": 1}
    assert report["recovery"].items() >= {"outcome": "exact", "attempts": 1}.items()
    assert report["env"]["spec"]["id"] == "CartPole-v1"
    assert report["states"][-1] == "Replied: process ready, episode running"
    assert (report["journal"]["requests"], report["journal"]["steps"]) == (4, 3)
    assert set(report["made_with"]) == {"multienv", "python", "gymnasium", "numpy", "platform"}
    assert found.replays
    assert found.layout is not None
    entries = list(split_entries(found.replays[0].entries, found.end))
    shown = [np.frombuffer(entry.record, np.float32, 4, found.layout.shown) for entry in entries]
    assert (np.stack(shown) == np.stack([first, *seen])).all()
    assert [entry.record[16] for entry in entries[1:]] == [0, 1, 1]
    (pending,) = split_entries(found.pending, found.end)
    assert (pending.is_step, pending.record[16]) == (True, 1)
    assert message_of(entries[0].record[0], entries[0].request_payload).seeds == (5,)


# --- where they lie -------------------------------------------------------------------------------


def lose_one(env_fn: Any = CounterEnv, action: Any = 0, **options: Any) -> Recovery:
    with SubprocessEnv(env_fn, restart=RAISE, **options) as env:
        env.reset(seed=0)
        kill_worker(env)
        with pytest.raises(WorkerLostError):
            env.step(action)
        recovery = env.statistics().last_recovery
    assert recovery is not None
    return recovery


def test_the_directory_can_be_chosen_and_is_private(tmp_path: Path, reports: Path) -> None:
    """Unless it is there already, as somebody else has made it."""
    chosen = tmp_path / "deep" / "down"
    path = Path(lose_one(reports=chosen).report)
    assert path.parent == chosen
    assert chosen.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.with_suffix(".pickle").stat().st_mode & 0o777 == 0o600
    assert sorted(file.name for file in chosen.iterdir()) == sorted([path.name, path.with_suffix(".pickle").name])
    assert not list(reports.iterdir())
    chosen.chmod(0o755)
    lose_one(reports=chosen)
    assert chosen.stat().st_mode & 0o777 == 0o755


def test_without_a_word_it_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MULTIENV_REPORTS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.directory_for(None) == tmp_path / "multienv" / "reports"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.directory_for(None) == tmp_path / ".cache" / "multienv" / "reports"
    store.directory_for(None).mkdir(parents=True, mode=0o755)
    assert Path(lose_one().report).parent == store.directory_for(None)
    assert store.directory_for(None).stat().st_mode & 0o777 == 0o700


def test_an_empty_string_switches_them_off(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lose_one(reports="").report == ""
    monkeypatch.setenv("MULTIENV_REPORTS", "")
    assert lose_one().report == ""
    assert not all_in(reports)


TODAY = f"{datetime.now(timezone.utc):%Y%m%d}"


def test_the_newest_hundred_of_each_trainer_are_kept_and_nothing_else_is_touched(reports: Path) -> None:
    """Those of another trainer do not push out those of this one."""
    own = os.getpid()
    for trainer in (own, own + 1):
        for number in range(120):
            for suffix in ("json", "pickle"):
                (reports / f"{TODAY}-000000-{number:06}-{trainer}-1-env0.{suffix}").write_bytes(b"x")
    others = [reports / name for name in ("notes.txt", "20200101.json", "20200101-000000-000000-1-1.txt")]
    for other in others:
        other.write_text("mine")
    path = Path(lose_one().report)
    for trainer, first in ((own, 21), (own + 1, 20)):
        kept = sorted(file.name for file in reports.glob(f"*-*-*-{trainer}-*.json"))
        assert len(kept) == 100
        assert kept[0] == f"{TODAY}-000000-{first:06}-{trainer}-1-env0.json"
        assert (kept[-1] == path.name) == (trainer == own)
    assert len(list(reports.glob("*.pickle"))) == 200
    assert all(other.read_text() == "mine" for other in others)


def test_the_oldest_are_dropped_until_all_take_a_quarter_of_a_gibibyte(reports: Path) -> None:
    for number in range(10):
        with (reports / f"{TODAY}-000000-{number:06}-1-1-env0.pickle").open("wb") as file:
            file.truncate(32 * 2**20)  # without taking place on the disk
    lose_one()
    kept = sorted(file.name for file in reports.glob("*-1-1-env0.pickle"))
    assert kept == [f"{TODAY}-000000-{number:06}-1-1-env0.pickle" for number in range(3, 10)]


def test_reports_older_than_two_weeks_are_dropped(reports: Path) -> None:
    now = datetime.now(timezone.utc)
    days = [f"{now - timedelta(days=age):%Y%m%d-%H%M%S}-000000-1-1.json" for age in (13, 15)]
    for name in days:
        (reports / name).write_text("{}")
    own = Path(lose_one().report).name
    assert sorted(path.name for path in reports.glob("*.json")) == [days[0], own]


def test_a_journal_that_is_too_large_for_a_report_leaves_the_document_alone(reports: Path) -> None:
    actions = gymnasium.spaces.Box(-1, 1, (2**16,), np.float32)
    policy = RestartPolicy(on_crash="raise", journal_limit=2**27)
    with SubprocessEnv(partial(SpaceEnv, action_space=actions, horizon=200), restart=policy) as env:
        env.reset(seed=0)
        for number in range(150):
            env.step(np.full(actions.shape, number / 150, np.float32))
        kill_worker(env)
        with pytest.raises(WorkerLostError) as caught:
            env.step(np.ones(actions.shape, np.float32))
    path = Path(caught.value.report)
    assert not path.with_suffix(".pickle").exists()
    assert json.loads(path.read_text())["journal"] == {"requests": 151, "steps": 150}
    with pytest.raises(UsageError, match="a report takes 32 MiB at most, and the record of its 151 requests 76"):
        load(path)


def test_an_env_fn_or_an_action_that_is_too_large_for_a_report_is_left_out(reports: Path) -> None:
    ballast, text = os.urandom(20 * 2**20), "a" * 40 * 2**20
    path = Path(lose_one(env_fn=lambda: CounterEnv(horizon=len(ballast))).report)
    assert path.with_suffix(".pickle").stat().st_size < 2**20
    with pytest.raises(UsageError, match="has no env_fn: it was too large for a report. Give --env ID"):
        env_functions(load(path), None)
    space = gymnasium.spaces.Text(len(text))
    path = Path(lose_one(env_fn=partial(SpaceEnv, action_space=space), action=text).report)
    assert path.stat().st_size < 2**20
    with pytest.raises(UsageError, match="cannot be replayed: a report takes 32 MiB at most"):
        load(path)


# --- what is in the way ---------------------------------------------------------------------------


def test_a_directory_that_cannot_be_is_said_once_and_breaks_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with SubprocessEnv(CounterEnv, reports=tmp_path / "file" / "reports") as env:
        env.reset(seed=0)
        for _ in range(3):
            env.step(0)
            kill_worker(env)
            env.step(0)
            reports_written()
        assert env.statistics().exact_recoveries == 3
    warnings = [record for record in caplog.records if "cannot be written" in record.message]
    assert len(warnings) == 1
    assert "MULTIENV_REPORTS" in warnings[0].message


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file may grow: the kernel says EFBIG, as it says ENOSPC of a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_nothing_half(tmp_path: Path, full_disk: None, caplog: pytest.LogCaptureFixture) -> None:
    with SubprocessEnv(CounterEnv, restart=RAISE, reports=tmp_path) as env:
        env.reset(seed=0)
        kill_worker(env)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        with pytest.raises(WorkerLostError):
            env.step(0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert "cannot be written" in caplog.text
    assert not list(tmp_path.iterdir())


def test_at_the_end_of_the_interpreter_all_are_written(reports: Path) -> None:
    script = """if True:
        from multienv import SubprocessEnv
        from kit import CounterEnv, kill_worker
        env = SubprocessEnv(CounterEnv).initialize()
        env.reset(seed=0)
        kill_worker(env)
        env.step(0)
    """
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert only(reports)["recovery"]["outcome"] == "exact"


def test_a_forked_child_writes_none_of_the_trainers(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, may_write, write = os.getpid(), threading.Event(), store.write

    def wait_and_write(*report: Any) -> None:
        assert os.getpid() != trainer or may_write.wait(STUCK_AFTER)
        write(*report)

    monkeypatch.setattr(store, "write", wait_and_write)
    with SubprocessEnv(CounterEnv) as env:
        env.reset(seed=0)
        kill_worker(env)
        env.step(0)  # the report waits in the trainer
        child = multiprocessing.get_context("fork").Process(target=reports_written)
        child.start()
        child.join()
        child.close()
        assert not list(reports.iterdir())
    may_write.set()
    only(reports)
