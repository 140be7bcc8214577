"""Values as JSON, to be read; and what is unpickled of a report that is not trusted."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from multienv.recovery.verification import same
from multienv.reports.plain import made_anew, plain_value, readable, reset_made_anew
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
    assert reset_made_anew(mail) == mail


@pytest.mark.parametrize(
    "value",
    [
        [0.5, 1],
        (np.float32(0.5), np.int64(-3), np.bool_(True), np.uint8(200), np.str_("ä")),
        {"a": np.arange(6, dtype=">i2").reshape(2, 3), "b": np.zeros((), np.float64), "c": np.array(["x", "yz"])},
        OrderedDict(image=np.asfortranarray(np.arange(4.0).reshape(2, 2)), empty=np.zeros((0, 3), np.float32)),
        {1, 2},
    ],
)
def test_numbers_and_arrays_are_made_anew_to_the_bit(value):
    again = pickle.loads(made_anew(pickle.dumps(value, protocol=5)))
    assert same(value, again)
    for array in (one for one in (again.values() if isinstance(again, dict) else ()) if isinstance(one, np.ndarray)):
        assert array.flags.writeable


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("unpickled",)


class OfNumpy:
    """Pickles as a call of one of numpy's functions."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


FROM_BUFFER = np.zeros(1).__reduce_ex__(5)[0]
SCALAR = np.float64(0).__reduce__()[0]


@pytest.mark.parametrize(
    "value",
    [
        Bomb(),
        [np.array([Bomb()], object)],
        np.zeros(2, "i4,f8"),  # its dtype says where the fields lie
        np.dtype("f8"),
        OfNumpy(FROM_BUFFER, b"x" * 8, np.dtype("f8"), (2,), "C"),
        OfNumpy(FROM_BUFFER, b"x" * 8, np.dtype(object), (1,), "C"),
        OfNumpy(SCALAR, np.dtype("f8"), b"x" * 7),
        OfNumpy(np.save, "struck", b"x"),
        Call("poke", (0.5,)).__class__,
    ],
)
def test_what_is_not_plain_is_refused(value):
    data = pickle.dumps(value, protocol=5)
    with pytest.raises(Exception):  # noqa: B017 - of any kind
        made_anew(data)


@pytest.mark.parametrize(
    "made",
    [
        b"cnumpy._core.multiarray\nscalar\n",
        b"cnumpy._core.numeric\n_frombuffer\n",
        b"cnumpy\ndtype\n",
        b"cnumpy\ndtype\n(X\x02\x00\x00\x00f8tR",
        b"ccollections\nOrderedDict\n",
        b"ccollections\nOrderedDict\n)R",
        b"cmultienv.wire.messages\nReset\n",
        b"cmultienv.wire.messages\nBuild\n",
    ],
)
@pytest.mark.parametrize("state", [{"__module__": "x"}, {"__reduce__": "x"}, (None, {"__module__": "x"})])
def test_a_pickle_cannot_change_what_it_gets(made, state):
    data = b"\x80\x02" + made + pickle.dumps(state, protocol=2)[2:-1] + b"b."
    with pytest.raises(Exception):  # noqa: B017 - of any kind
        plain_value(data)


@pytest.mark.parametrize("name", ["numpy._core.multiarray scalar", "collections OrderedDict", "numpy dtype"])
def test_what_makes_values_is_no_value(name):
    with pytest.raises(pickle.PicklingError):
        made_anew("c{}\n{}\n.".format(*name.split()).encode())


@pytest.mark.parametrize(
    "message",
    [Reset((None,), ({"a": Bomb()},)), Call("poke", (0.5,)), Replay(b"", state=pickle.dumps(Bomb())), Bomb(), [1]],
)
def test_anything_else_is_no_plain_reset(message):
    mail = pickle.dumps(message)
    for data in (mail, mail[: len(mail) // 2]):
        with pytest.raises(Exception):  # noqa: B017 - of any kind
            reset_made_anew(data)


def test_a_damaged_reset_is_no_plain_reset():
    with pytest.raises(AttributeError):
        reset_made_anew(pickle.dumps(Reset, protocol=2)[:-1] + b")\x81.")  # an instance without its fields
