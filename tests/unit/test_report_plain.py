"""Values as JSON, to be read; and what is unpickled of a report that is not trusted."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from multienv.reports.plain import is_plain_reset, plain_message, readable
from multienv.wire.messages import Call, Replay, Reset, pack_message


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


# --- what is unpickled ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [None, {"a": [1.5, (True, b"x")], 1: {"b": None}}])
def test_a_reset_of_plain_values_is_unpickled(options):
    mail = pack_message(Reset((7, None), (options, None), (True, False), anchor=True))
    assert is_plain_reset(mail)
    assert pack_message(plain_message(mail)) == mail


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize(
    "message",
    [
        Reset((None,), ({"a": Bomb()},)),
        Reset((None,), ({"a": np.float64(1)},)),
        Call("poke", (0.5,)),
        Replay(b"", state=pickle.dumps(Bomb())),
        Bomb(),
    ],
)
def test_anything_else_is_no_plain_reset(message):
    mail = pickle.dumps(message)
    assert not is_plain_reset(mail)
    assert not is_plain_reset(mail[: len(mail) // 2])


def test_a_damaged_reset_is_no_plain_reset():
    assert not is_plain_reset(pickle.dumps(Reset).replace(b".", b")\x81."))  # an instance without its fields
