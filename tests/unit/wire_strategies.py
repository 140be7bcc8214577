"""What the tests of the wire draw from: gymnasium's spaces, their values, and a fingerprint that sees every bit."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from hypothesis import strategies as st

BOX_DTYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
# No scalars: Box(shape=()) samples numpy scalars, which are no arrays and travel pickled.
SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)
KEYS = st.text(min_size=1, max_size=3)


@st.composite
def boxes(draw: st.DrawFn) -> spaces.Box:
    dtype = np.dtype(draw(st.sampled_from(BOX_DTYPES)))
    low, high = (0, 100) if dtype.kind == "u" else (-100, 100)
    return spaces.Box(low, high, draw(SHAPES), dtype=dtype.type)


@st.composite
def discretes(draw: st.DrawFn) -> spaces.Discrete:
    return spaces.Discrete(draw(st.integers(1, 1000)), start=draw(st.integers(-(2**40), 2**40)))


LAID_OUT = st.one_of(
    boxes(),
    discretes(),
    st.lists(st.integers(1, 9), min_size=1, max_size=4).map(spaces.MultiDiscrete),
    st.integers(1, 9).map(spaces.MultiBinary),
    st.just(spaces.MultiBinary((2, 3))),
)
SCALARS = st.sampled_from(BOX_DTYPES).map(lambda dtype: spaces.Box(0, 100, (), dtype=np.dtype(dtype).type))
PICKLED = st.sampled_from(
    [
        spaces.Sequence(spaces.Box(-1.0, 1.0, (2,))),
        spaces.Graph(spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3)),
        spaces.Text(20, charset="aäß€𝄞 "),
        spaces.OneOf((spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,)))),
    ]
)


def _nested(children: st.SearchStrategy[spaces.Space[Any]]) -> st.SearchStrategy[spaces.Space[Any]]:
    return st.one_of(
        st.lists(children, max_size=3).map(lambda members: spaces.Tuple(tuple(members))),
        st.dictionaries(KEYS, children, max_size=3).map(spaces.Dict),
    )


ANY_SPACES = st.recursive(LAID_OUT | SCALARS | PICKLED, _nested, max_leaves=5)


@st.composite
def spaces_with_values(
    draw: st.DrawFn, of: st.SearchStrategy[spaces.Space[Any]] = ANY_SPACES
) -> tuple[spaces.Space[Any], Any]:
    space = draw(of)
    space.seed(draw(st.integers(0, 2**31 - 1)))
    return space, space.sample()


def fingerprint(value: Any) -> Any:
    """Equal for two values only if types, dtypes, shapes, the order of keys and every bit agree."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, np.ndarray | np.generic):
        data = repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
        return kind, value.dtype.str, value.shape, data
    if isinstance(value, Mapping):
        return kind, tuple((fingerprint(key), fingerprint(item)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return kind, tuple(map(fingerprint, value))
    if isinstance(value, float):
        return kind, struct.pack("<d", value)
    return kind, repr(value)
