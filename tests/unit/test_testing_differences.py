"""How two runs that are compared are said to differ: briefly, also where their observations are images."""

from __future__ import annotations

import numpy as np
import pytest

from multienv.testing.recovery_check import difference

IMAGE = np.arange(84 * 84 * 4, dtype=np.uint8).reshape(84, 84, 4)


def changed(array, *places):
    other = array.copy()
    for place in places:
        other[place] += 1
    return other


def test_small_values_are_shown_whole():
    assert difference([np.arange(3)], [np.arange(3)], "observations") is None
    assert difference(1.0, 2.0, "rewards") == "rewards: 1.0 against 2.0"
    assert difference((np.arange(2),), (np.array([0, 5]),), "x") == "x[0]: array([0, 1]) against array([0, 5])"


def test_of_images_it_is_told_how_many_values_differ_and_the_first():
    other = changed(IMAGE, (1, 2, 3), (70, 0, 0))
    assert difference([{"image": IMAGE}], [{"image": other}], "observations") == (
        "observations[0]['image']: 2 of 28,224 values differ, the first at [1, 2, 3]: 91 against 92"
    )


@pytest.mark.parametrize("seen", [np.zeros((5, 5), order="F"), np.full((5, 5), np.nan), np.zeros((5, 5), ">f4")])
def test_arrays_of_any_kind_are_compared_to_the_bit(seen):
    assert difference(seen, seen.copy(), "x") is None
    other = seen.copy()
    other[3, 1] = -0.0
    assert str(difference(seen, other, "x")).startswith("x: 1 of 25 values differ, the first at [3, 1]: ")


def test_arrays_of_other_shapes_and_dtypes_are_named_by_those():
    told = difference(IMAGE, IMAGE[1:].astype(np.float32), "x")
    assert told == "x: uint8 of shape (84, 84, 4) against float32 of shape (83, 84, 4)"
