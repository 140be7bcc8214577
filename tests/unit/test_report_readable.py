"""Values as JSON, to be read."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from multienv._engine.reports.crash import readable
from multienv._engine.wire.messages import Call


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (np.int64(3), {"dtype": "int64", "shape": [], "values": 3}),
        (np.array([0.5, np.nan], np.float32), {"dtype": "float32", "shape": [2], "values": [0.5, "NaN"]}),
        ({1: (2.0, float("inf"))}, {"1": [2.0, "Infinity"]}),
        (Odd(), "<a Odd>"),
        (Call("poke", (0.5,)), {"name": "poke", "args": [0.5], "kwargs": None, "slots": None, "recorded": True}),
    ],
)
def test_what_is_shown(value, shown):
    assert readable(value) == shown
    json.dumps(readable(value), allow_nan=False)


def test_large_and_endless_values_are_cut_short():
    assert len(readable(np.zeros(10**6))) <= 1000
    endless: list[Any] = []
    endless.append(endless)
    assert json.dumps(readable(endless))
