"""Values as JSON: any, to be read; resets, exactly."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multienv.reports.plain import readable, reset_as_json, reset_from_json
from multienv.wire.messages import Call, Reset


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@dataclass
class Holder:
    inside: Any


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3, 3),
        (np.int64(3), {"dtype": "int64", "shape": [], "values": 3}),
        (np.array([0.5, np.nan], np.float32), {"dtype": "float32", "shape": [2], "values": [0.5, "nan"]}),
        ({1: (2.0, float("inf"))}, {"1": [2.0, "inf"]}),
        (OrderedDict(a=b"x"), {"a": "b'x'"}),
        (Odd(), "<a Odd>"),
        (Holder([1]), {"inside": [1]}),
        (Call("poke", (0.5,)), {"name": "poke", "args": [0.5], "kwargs": None, "slots": None, "recorded": True}),
        (None, None),
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


OPTIONS = st.none() | st.dictionaries(
    st.text(max_size=3),
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    max_size=3,
)


@given(st.lists(st.tuples(st.none() | st.integers(0), OPTIONS, st.booleans()), min_size=1, max_size=4), st.booleans())
def test_a_reset_goes_through_json_and_back(slots, is_masked):
    seeds, options, mask = zip(*slots, strict=True)
    message = Reset(seeds, options, mask if is_masked else None, anchor=True)
    fields = reset_as_json(message)
    assert fields is not None
    again = reset_from_json(json.loads(json.dumps(fields)))
    assert again == message
    assert repr(again) == repr(message)  # 1 and True and 1.0 are equal


@pytest.mark.parametrize("options", [{1: 2}, {"a": (1, 2)}, {"a": np.float64(1)}, {"a": float("nan")}, [object()]])
def test_a_reset_that_json_does_not_keep_has_no_such_form(options):
    assert reset_as_json(Reset((None,), (options,))) is None


@pytest.mark.parametrize("fields", [{}, {"seeds": ["x"], "options": [None], "mask": None, "anchor": False}, [1]])
def test_damaged_resets_are_refused(fields):
    with pytest.raises((ValueError, KeyError, TypeError)):
        reset_from_json(fields)
