"""Wait for crash reports, which a thread writes a moment after the loss."""

from __future__ import annotations

from multienv._engine.reports import store


def reports_written() -> None:
    """Wait until all reports that were submitted are written."""
    for writing in store.being_written():
        writing.join()
