"""Texts that several commands print."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return a time in its largest unit: ``"0.4 s"``, ``"12 s"``, ``"5 min"``, ``"3.2 h"``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
