"""Records are complete and copied; comparison is bitwise and names the first difference; splices are seen."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kit import (
    CounterEnv,
    Transition,
    assert_no_splice,
    assert_same_trajectory,
    first_difference,
    observations_equal,
    rollout,
)


@given(hnp.arrays(np.float32, hnp.array_shapes(), elements=st.floats(width=32)), st.data())
def test_one_bit_makes_a_difference(array, data):
    other = array.copy()
    place = data.draw(st.integers(0, other.nbytes - 1))
    other.view(np.uint8).reshape(-1)[place] ^= 1 << data.draw(st.integers(0, 7))
    assert not observations_equal(array, other)
    assert observations_equal({"nested": (array,)}, {"nested": (array.copy(),)})


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (np.zeros(2, np.float32), np.zeros(2), "value: dtype float32 against float64"),
        (np.zeros((1, 2)), np.zeros(2), r"value: shape \(1, 2\) against \(2,\)"),
        (np.array([0.0, 1.0]), np.array([0.0, 2.0]), r"^\[1\]: .*1.0.* against .*2.0"),
        ({"a": (1, np.float32(2))}, {"a": (1, np.float32(3))}, r"^\['a'\]\[1\]: "),
        ({"a": 1}, {"b": 1}, r"keys \['a'\] against \['b'\]"),
        ([1], [1, 2], "length 1 against 2"),
        (0.0, -0.0, "0.0 against -0.0"),
        (1, np.int64(1), "int against int64"),
        (1, True, "int against bool"),
        ((1,), [1], "tuple against list"),
        (None, 0, "NoneType against int"),
        (np.float64(1), np.float64(2), "^value: .*1.0.* against .*2.0"),
        (np.array(["a", None], object), np.array(["a", 1], object), r"^\[1\]: NoneType against int"),
    ],
)
def test_the_first_difference_is_named(first, second, message):
    assert re.search(message, first_difference(first, second) or "")


@pytest.mark.parametrize(
    "change",
    [
        {"observation": np.zeros(4, np.float32)},
        {"reward": -1.0},
        {"terminated": True},
        {"truncated": True},
        {"action": np.int64(9)},
        {"is_reset": True},
    ],
)
def test_any_changed_field_but_the_info_is_a_difference(change):
    record = rollout(CounterEnv(), num_steps=5, seed=1)
    changed = [*record[:3], replace(record[3], **change), *record[4:]]
    with pytest.raises(AssertionError, match=next(iter(change))) as caught:
        assert_same_trajectory(changed, record)
    assert "entry 3" in str(caught.value)
    if "is_reset" not in change:
        assert "step 3 of episode 0" in str(caught.value)


def test_a_second_episode_spliced_in_is_seen():
    env = CounterEnv(horizon=None)
    honest = rollout(env, num_steps=3, seed=1)
    assert_no_splice(honest)
    restarted = rollout(env, num_steps=3, seed=1)
    with pytest.raises(AssertionError, match="follows from the entry before"):
        assert_no_splice([*honest, *restarted[1:]])
    assert_no_splice([*honest, *restarted])


def test_a_lost_a_doubled_and_a_late_step_are_seen():
    record = rollout(CounterEnv(horizon=5), num_steps=5, seed=1)
    for broken in (
        [*record[:2], *record[3:]],
        [*record[:3], *record[2:]],
        [*record, Transition(record[-1].observation)],
    ):
        with pytest.raises(AssertionError, match="entry"):
            assert_no_splice(broken)


def test_a_truncated_recovery_repeats_the_last_observation():
    record = rollout(CounterEnv(horizon=5), num_steps=3, seed=1)
    last = record[-1].observation
    truncated = Transition(last, truncated=True, info={"multienv": {"reason": "lost"}})
    assert truncated.recovery == {"reason": "lost"}
    assert_no_splice([*record, truncated, *record])
    with pytest.raises(AssertionError):
        assert_no_splice([*record, replace(truncated, info={})])
