"""``multienv doctor``: the line *outside*, and that no other line contradicts it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from cli_command import run

from multienv.cli import checks

OUTSIDE_ENVS = Path(__file__).parents[1] / "invariants" / "outside_envs.py"


def rows_of(monkeypatch: pytest.MonkeyPatch, name: str, **arguments: Any) -> dict[str, dict[str, Any]]:
    chosen = [checks.builds, checks.steps, checks.compares, checks.repeats, checks.outside, checks.forks]
    monkeypatch.setattr(checks, "CHECKS", [*chosen, checks.replays])
    monkeypatch.setattr(checks, "_STEPS", 60)
    _, told = run("doctor", f"{OUTSIDE_ENVS}:{name}", "--json", "--env-kwargs", json.dumps(arguments))
    return {row["name"]: row for row in told["checks"]}


def test_an_env_with_nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(monkeypatch, "PlainEnv")
    assert rows["outside"]["meaning"] == "nothing beyond its memory: a forked copy has all of it"
    assert rows["outside"]["verdict"] == "ok"
    assert "exactly from its snapshot" in rows["forks"]["meaning"]


def test_a_data_set_is_put_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("".join(f"{number:5}\n" for number in range(1, 2000)))
    rows = rows_of(monkeypatch, "DataSetEnv", path=str(path))
    assert rows["outside"]["meaning"] == f"after its construction {path}: put back in a copy"
    assert rows["outside"]["verdict"] == "ok"
    assert "exactly from its snapshot" in rows["forks"]["meaning"]


@pytest.mark.parametrize(
    ("name", "when", "what", "follows", "obstacle"),
    [
        ("TransactionEnv", "after", "database", "what was written stays", "files"),
        ("StateFileEnv", "in a reset", "open('{path}')", "what was written stays", "files"),
        pytest.param("HoldsLockEnv", "after 16 steps", "lock", "while it is held", "locks", marks=pytest.mark.ci),
        pytest.param(
            "TimerEnv",
            "after its construction",
            "a timer of timer_create(2)",
            "would not have it",
            "timers",
            marks=pytest.mark.ci,
        ),
    ],
)
def test_what_forbids_snapshots_is_named_with_what_follows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, when: str, what: str, follows: str, obstacle: str
) -> None:
    path = tmp_path / ("lock" if name == "HoldsLockEnv" else "database")
    if name == "HoldsLockEnv":
        path.touch()
    rows = rows_of(monkeypatch, name, **({} if name == "TimerEnv" else {"path": str(path)}))
    row = rows["outside"]
    assert row["verdict"] == "note"
    assert row["meaning"].startswith(when)
    assert what.format(path=path) in row["meaning"]
    assert follows in row["meaning"]
    assert rows["forks"]["meaning"] == f"no snapshot can be taken: {obstacle}"


def test_a_pipe_that_is_read_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    keep = os.open(path, os.O_RDWR)
    os.write(keep, b"".join(f"{number:5}\n".encode() for number in range(1, 5000)))
    try:
        row = rows_of(monkeypatch, "StreamEnv", path=str(path))["outside"]
    finally:
        os.close(keep)
    assert row["meaning"] == f"after its construction {path}: no snapshots; what was read is gone"
