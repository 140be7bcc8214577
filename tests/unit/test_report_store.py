"""Reports on the disk, as other programs find them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path

import pytest

from multienv._engine.reports import store


def test_who_looks_for_reports_while_they_are_written_finds_whole_ones(tmp_path: Path) -> None:
    done, seen = threading.Event(), []

    def look() -> None:
        while not done.is_set():
            for path in tmp_path.glob("*.json"):
                with contextlib.suppress(FileNotFoundError):  # only the newest are kept
                    seen.append(path.read_bytes())

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for number in range(200):
            store.write(store.new_path(tmp_path, 0), {"number": number}, b"x")
    finally:
        done.set()
        reader.join()
    assert seen
    assert all("number" in json.loads(text) for text in seen)
    assert len(list(tmp_path.iterdir())) == 2 * store.KEPT


class SlowPath(type(Path())):  # type: ignore[misc]
    """Takes a while to be looked for in a set or a dictionary."""

    def __hash__(self) -> int:
        time.sleep(0.05)
        return super().__hash__()


def test_reports_that_fail_at_the_same_instant_are_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    paths = [store.new_path(SlowPath(tmp_path, "file"), index) for index in range(4)]  # of no directory
    writings = [store.Writing(path, lambda: ({}, b""), 0, 0.0) for path in paths]
    for writing in writings:
        writing.start()
    for writing in writings:
        writing.join()
    (told,) = caplog.records
    assert f"Crash reports cannot be written to {tmp_path / 'file'}: FileExistsError" in told.message
