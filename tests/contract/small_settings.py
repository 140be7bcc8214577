"""What scripts of ``scripts_of_users.py`` set from outside."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

A = 1.5
B: int = 2
TABLE: dict[str, Any] = {"k": 1}
E = [1]
OWN_PROCESS = os.getpid()  # no literal: each process has its own
array = np.zeros(2)
_table = TABLE


class Options:
    speed = 1


def configure(b: int) -> None:
    global B
    B = b


def seen() -> dict[str, Any]:
    """Return the table, by a name that was bound when the module was imported."""
    return _table
