"""Records are complete and copied; comparison is bitwise and names the first difference; splices are seen."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from multienv.testing import (
    CounterEnv,
    SameArrayEnv,
    SpaceEnv,
    Transition,
    assert_no_splice,
    assert_same_trajectory,
    counter_clock,
    example_spaces,
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


def test_a_rollout_does_not_reset_after_its_last_step():
    assert rollout(CounterEnv(horizon=3), num_steps=3)[-1].terminated


def test_a_rollout_takes_actions_and_ends_with_them():
    record = rollout(CounterEnv(), [np.int64(1), np.int64(3)], seed=1)
    assert [transition.action for transition in record] == [None, 1, 3]
    assert len(rollout(CounterEnv(), [np.int64(1)] * 5, num_steps=2)) == 3


def test_the_policy_seed_decides_the_actions_and_leaves_the_envs_space_alone():
    env = CounterEnv()
    env.action_space.seed(1)
    twin = copy.deepcopy(env.action_space)

    def actions(seed):
        return [transition.action for transition in rollout(env, policy_seed=seed, num_steps=30)]

    assert actions(1) == actions(1)
    assert actions(1) != actions(2)
    assert env.action_space.sample() == twin.sample()


def test_later_resets_are_seeded_only_if_asked_for():
    unseeded = rollout(CounterEnv(horizon=2), num_steps=6, seed=5)
    assert [counter_clock(t.observation)[0] for t in unseeded if t.is_reset] == [0, 1, 2]
    seeded = rollout(CounterEnv(horizon=2), num_steps=6, seed=5, reset_every_unseeded=False)
    for number, transition in enumerate(t for t in seeded if t.is_reset):
        expected, _ = CounterEnv().reset(seed=5 + number)
        assert observations_equal(transition.observation, expected)


def test_options_go_to_the_first_reset_and_the_hook_is_called_before_each_step():
    calls = []
    record = rollout(CounterEnv(horizon=4), num_steps=3, options={"start": 2}, before_step=calls.append)
    assert [t.observation[0] for t in record] == [2, 3, 4, 0, 1]
    assert calls == [0, 1, 2]


def test_a_rollout_copies_observations():
    record = rollout(SameArrayEnv(), num_steps=3)
    assert [t.observation[0] for t in record] == [0, 1, 2, 3]


def test_a_rollout_without_an_end_or_a_seed_to_count_from_is_refused():
    with pytest.raises(ValueError, match="num_steps"):
        rollout(CounterEnv())
    with pytest.raises(ValueError, match="seed"):
        rollout(CounterEnv(), num_steps=1, reset_every_unseeded=False)


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


@pytest.mark.parametrize("name", example_spaces())
def test_samples_of_every_space_equal_their_copies_and_no_other(name):
    space = example_spaces()[name]
    space.seed(1)
    samples = [space.sample() for _ in range(20)]
    assert all(observations_equal(sample, copy.deepcopy(sample)) for sample in samples)
    if name != "box_empty":
        assert not all(observations_equal(sample, samples[0]) for sample in samples)


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


def test_mapping_types_and_key_orders_are_the_same():
    assert observations_equal(OrderedDict(a=1, b=2), {"b": 2, "a": 1})


def test_nan_equals_itself_only_bit_by_bit():
    assert observations_equal(np.array([np.nan]), np.array([np.nan]))
    assert observations_equal(float("nan"), float("nan"))
    assert not observations_equal(np.array([np.nan]), -np.array([np.nan]))


def test_an_array_that_is_not_contiguous_is_compared_by_value():
    array = np.arange(12).reshape(3, 4)
    assert observations_equal(array.T, array.T.copy())


def test_graphs_are_compared_whole():
    space = gymnasium.spaces.Graph(gymnasium.spaces.Box(-1, 1, (2,)), None, seed=1)
    graph = space.sample()
    assert observations_equal(graph, copy.deepcopy(graph))
    assert not observations_equal(graph, graph._replace(nodes=graph.nodes + 1))


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


def test_infos_are_compared_only_if_asked_for():
    record = rollout(CounterEnv(), num_steps=3, seed=1)
    changed = [*record[:-1], replace(record[-1], info={"new": 1})]
    assert_same_trajectory(changed, record)
    with pytest.raises(AssertionError, match="info"):
        assert_same_trajectory(changed, record, compare_info=True)


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


def test_a_clock_of_ones_own():
    record = [Transition(number, is_reset=number == 0) for number in range(4)]
    assert_no_splice(record, clock=lambda observation: (0, observation))
    with pytest.raises(AssertionError):
        assert_no_splice(record, clock=lambda observation: (observation, 0))


def test_space_envs_with_different_seeds_differ():
    one, other = (rollout(SpaceEnv(), num_steps=3, seed=seed) for seed in (1, 2))
    with pytest.raises(AssertionError, match="entry 0"):
        assert_same_trajectory(one, other)
