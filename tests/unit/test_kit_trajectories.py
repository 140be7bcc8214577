"""Records are complete and copied; comparison is bitwise and names the first difference; splices are seen."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kit import (
    CounterEnv,
    NondeterministicEnv,
    SameArrayEnv,
    StickyStateEnv,
    Transition,
    assert_no_splice,
    assert_same_trajectory,
    counter_clock,
    first_difference,
    observations_equal,
    rollout,
)

VALUES = st.recursive(
    st.none()
    | st.integers()
    | st.floats()
    | st.text()
    | st.booleans()
    | hnp.arrays(st.sampled_from([np.float32, np.int64, np.uint8, np.bool_]), hnp.array_shapes(min_dims=0, max_side=3)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def test_a_rollout_records_every_reset_and_step():
    record = rollout(CounterEnv(horizon=3), num_steps=7, seed=1)
    assert [transition.is_reset for transition in record] == [True, *[False] * 3] * 2 + [True, False]
    assert [counter_clock(transition.observation) for transition in record] == [
        (episode, step) for episode in range(3) for step in range(4)
    ][:10]
    assert [transition.ended for transition in record] == [False, False, False, True] * 2 + [False, False]
    assert record[0].action is None
    assert record[0].reward == 0.0


def test_a_rollout_copies_observations():
    record = rollout(SameArrayEnv(), num_steps=3)
    assert [t.observation[0] for t in record] == [0, 1, 2, 3]


@given(VALUES)
def test_every_value_equals_its_copy(value):
    assert observations_equal(value, copy.deepcopy(value))


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


def test_a_record_that_ends_early_is_a_difference():
    record = rollout(CounterEnv(), num_steps=3, seed=1)
    with pytest.raises(AssertionError, match="3 entries against 4"):
        assert_same_trajectory(record[:-1], record)


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


@pytest.mark.parametrize("shown_in", ["observation", "reward", "both"])
def test_a_nondeterministic_env_differs_only_since_and_where_told(shown_in):
    runs = [rollout(NondeterministicEnv(since=3, shown_in=shown_in), num_steps=9, seed=1) for _ in range(2)]
    assert_same_trajectory(runs[0][:3], runs[1][:3])
    observations = [first_difference(one.observation, other.observation) for one, other in zip(*runs, strict=True)]
    rewards = [one.reward == other.reward for one, other in zip(*runs, strict=True)]
    assert any(observations) == (shown_in != "reward")
    assert all(rewards) == (shown_in == "observation")


def test_sticky_state_shows_late_and_only_with_a_past():
    used, new = StickyStateEnv(visible_after=3), StickyStateEnv(visible_after=3)
    rollout(used, num_steps=4, seed=0)
    past, fresh = (rollout(env, [np.int64(1)] * 4, seed=1) for env in (used, new))
    assert_same_trajectory(past[:3], fresh[:3])
    assert first_difference(past[3].observation, fresh[3].observation) is not None
