"""Texts that several commands print."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from multienv._engine.reports.store import time_of


def duration(seconds: float) -> str:
    """Return a time in its largest unit, with about two digits: ``"12 ms"``, ``"1.6 s"``, ``"5 min"``, ``"3.2 h"``."""
    for unit, length in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        # Up to two hours in minutes, up to two minutes in seconds.
        if seconds >= length * (2 if length > 1 else 1) or unit == "µs":
            value = seconds / length
            return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.1f} {unit}"
    raise AssertionError


def visible(text: str) -> str:
    """Return a text with its control characters escaped: they could control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def report_line(summary: dict[str, Any], name: str = "") -> str:
    """Return one line about a crash report, see ``summary_of``: its age, outcome, name (if it is given) and loss."""
    age = f"{duration(max(0.0, time.time() - time_of(Path(summary['report']))))} ago"
    what = summary["what"].removeprefix("The ")
    return visible(" ".join([f"{age:>11}  {summary['outcome']:9} ", *name.split(), *what.split()]))
