"""Evidence held against evidence: every difference is found and named, and nothing else is one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import GraphInstance
from hypothesis import given
from hypothesis import strategies as st
from wire_strategies import ANY_SPACES, fingerprint, spaces_with_values

from multienv.recovery.verification import first_difference, same
from multienv.wire.memory import Block
from multienv.wire.messages import FAILED, LARGE_EVIDENCE, evidence_of, pack_value
from multienv.wire.observations import INLINE_LIMIT, Placement, packer

BOX = spaces.Box(-1.0, 1.0, (2,), dtype=np.float32)
ZEROS = np.zeros(2, np.float32)


def evidence(observation=ZEROS, reward=0.0, terminated=False, truncated=False, info=None, *, space=BOX, seq=1):
    placement = Placement.of(space, INLINE_LIMIT)
    block = Block.private(placement.block_size) if placement.block_size else None
    return evidence_of(packer(space, placement, block)(seq, observation, reward, terminated, truncated, info, 0))


def raised(text="oh", seq=1):
    return evidence_of(pack_value(seq, text, FAILED))


@given(st.lists(st.floats(width=32, allow_nan=True), min_size=2, max_size=2), st.floats(), st.booleans(), st.booleans())
def test_the_same_is_no_difference_whatever_its_number_and_info(values, reward, terminated, truncated):
    observation = np.array(values, np.float32)
    before = evidence(observation, reward, terminated, truncated, {"time": 1}, seq=1)
    after = evidence(observation, reward, terminated, truncated, {"time": 2, "x": 3}, seq=99)
    assert first_difference([before], [after]) == ""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"observation": ZEROS + 1}, "observation"),
        ({"observation": np.float32([0.0, -0.0])}, "observation"),
        ({"observation": np.float32([0.0, math.nan])}, "observation"),
        ({"observation": [0.0, 0.0]}, ""),
        ({"reward": 1.0}, "reward"),
        ({"reward": math.nan}, "reward"),
        ({"reward": 0}, "reward"),
        ({"terminated": True}, "flags"),
        ({"truncated": True}, "flags"),
    ],
    ids=["value", "sign of zero", "NaN", "type", "reward", "NaN reward", "type of reward", "terminated", "truncated"],
)
def test_every_difference_is_found_and_named(change, text):
    same_before = [evidence(seq=1), evidence(seq=2)]
    found = first_difference([*same_before, evidence()], [*same_before, evidence(**change)])
    assert text in found
    assert "at request 3 of 3" in found
    assert first_difference([evidence(**change)], [evidence()])


def test_the_first_of_several_differences_is_named():
    before, after = [evidence(), evidence(), evidence()], [evidence(), evidence(reward=1.0), evidence(terminated=True)]
    assert "request 2 of 3" in first_difference(before, after)


def test_raising_and_returning_differ_but_what_was_raised_is_not_compared():
    assert "raised" in first_difference([evidence()], [raised()])
    assert "raised" in first_difference([raised()], [evidence()])
    assert first_difference([raised("at 0x7f01")], [raised("at 0x7f02")]) == ""


def test_a_different_number_of_replies_is_not_passed_over():
    with pytest.raises(ValueError, match="shorter|longer"):
        first_difference([evidence()], [evidence(), evidence()])


IRREGULAR = spaces.Sequence(spaces.Discrete(9))


def test_irregular_replies_are_compared_by_value():
    one, two = [1, 2], [1, 2]
    # One list twice pickles to other bytes than two equal lists.
    assert first_difference([evidence((one, one), space=IRREGULAR)], [evidence((one, two), space=IRREGULAR)]) == ""
    assert first_difference([evidence((1, 2), space=IRREGULAR)], [evidence((1, 3), space=IRREGULAR)])
    assert first_difference([evidence((1, 2), 1.0, space=IRREGULAR)], [evidence((1, 2), 2.0, space=IRREGULAR)])
    assert first_difference([evidence((1, 2), [1, 2], space=IRREGULAR)], [evidence((1, 2), [1, 3], space=IRREGULAR)])


def test_of_a_large_irregular_reply_the_reward_and_the_flags_are_kept():
    large = "x" * 2 * LARGE_EVIDENCE
    before = evidence(large, 1.0, space=IRREGULAR)
    assert len(before) < LARGE_EVIDENCE
    assert first_difference([before], [evidence(large, 1.0, space=IRREGULAR)]) == ""
    assert "reward" in first_difference([before], [evidence(large, 2.0, space=IRREGULAR)])
    assert "flags" in first_difference([before], [evidence(large, 1.0, terminated=True, space=IRREGULAR)])


@given(spaces_with_values(ANY_SPACES), st.integers(0, 2**31 - 1))
def test_same_agrees_with_the_fingerprint(pair, seed):
    space, value = pair
    space.seed(seed)
    another = space.sample()
    assert same(value, value)
    assert same(value, another) == (fingerprint(value) == fingerprint(another))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (np.float32(0.0), np.float32(-0.0)),
        ([1.0, (0.0,)], [1.0, (-0.0,)]),
        (1, 1.0),
        (1, True),
        (np.int64(1), np.int32(1)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), np.zeros((2, 1))),
        (np.zeros(2), -np.zeros(2)),
        (np.zeros(2), np.ma.masked_array(np.zeros(2), mask=True)),
        (np.array([1, "a"], object), np.array([1, "b"], object)),
        ((1, 2), [1, 2]),
        ((1, 2), (1, 2, 3)),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (GraphInstance(np.zeros((2, 1)), None, None), GraphInstance(np.ones((2, 1)), None, None)),
        (None, 0),
        ("a", b"a"),
    ],
    ids=repr,
)
def test_not_the_same(one, other):
    assert not same(one, other)
    assert not same(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (math.nan, float("nan")),
        (np.array([np.nan]), np.array([np.nan])),
        (np.array([1, "a"], object), np.array([1, "a"], object)),
        ({"a": [1, {"b": np.zeros(2)}]}, {"a": [1, {"b": np.zeros(2)}]}),
        (np.asfortranarray(np.eye(3)), np.eye(3)),
        ({3, 1, 2}, {1, 2, 3}),
        (GraphInstance(np.ones((2, 1)), None, None), GraphInstance(np.ones((2, 1)), None, None)),
    ],
    ids=repr,
)
def test_the_same(one, other):
    assert same(one, other)


class Tensor:
    """As torch's: its pickle has an address in it, and comparing it gives one answer for each element."""

    def __init__(self, values, dtype=np.float32):
        self.values = np.array(values, dtype)
        self.shape, self.dtype = self.values.shape, self.values.dtype

    def __reduce__(self):
        return Tensor, (self.values, id(self))

    def __eq__(self, other):
        return self.values == other.values

    __hash__ = None

    def __array__(self, dtype=None, copy=None):
        return self.values

    def __dlpack__(self):
        raise NotImplementedError


def test_tensors_go_by_their_values():
    assert same({"x": [Tensor([1, 2])]}, {"x": [Tensor([1, 2])]})
    assert same(Tensor([np.nan]), Tensor([np.nan]))
    for other in (Tensor([1, 3]), Tensor([1, 2, 3]), Tensor([1, 2], np.float64), Tensor([[1, 2]]), np.array([1, 2])):
        assert not same(Tensor([1, 2]), other)
