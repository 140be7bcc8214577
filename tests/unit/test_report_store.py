"""Reports on the disk, as other programs find them."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path

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
