"""Observations and actions of any space arrive as they were given, and what does not fit is converted or refused.

Through env classes whose worker is in this process: encoders, shared memory and decoders are those of the others.
"""

from __future__ import annotations

import contextlib
import re
from collections import OrderedDict
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st
from wire_strategies import ANY_SPACES, fingerprint, spaces_with_values

from kit import first_difference
from multienv import SerialEnv, SerialVectorEnv
from multienv.errors import ActionError, EnvsFailedError

BOX = spaces.Box(-1.0, 1.0, (2, 3), np.float32)
DISCRETE = spaces.Discrete(4)
NUMBERS = np.arange(6, dtype=np.float32).reshape(2, 3)


class TellingEnv(gymnasium.Env[Any, Any]):
    """Returns one observation after the other, and begins again, with an info; notes the actions that it gets."""

    got: list[Any] = []  # noqa: RUF012 - of all, in their order

    def __init__(self, observation_space: Any, action_space: Any, observations: list[Any], infos: Any = ({},)) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.observations, self.infos, self.steps = observations, infos, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.observations[0], self.infos[0]

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.got.append(fingerprint(action))
        info = self.infos[self.steps % len(self.infos)]
        return self.observations[self.steps % len(self.observations)], 0.0, False, False, info


def seen_by_one_env(space: spaces.Space[Any], observations: list[Any]) -> list[Any]:
    """Return what comes of these observations, twice each, so that each follows other ones in each bank."""
    with SerialEnv(lambda: TellingEnv(space, DISCRETE, observations)) as env:
        env.reset(seed=0)
        return [env.step(1)[0] for _ in range(2 * len(observations))]


def assert_unchanged(space: spaces.Space[Any], observations: list[Any]) -> None:
    expected = [fingerprint(one) for one in observations]
    seen = list(map(fingerprint, seen_by_one_env(space, observations)))
    assert seen == [*expected[1:], *expected, expected[0]]


def got(space: spaces.Space[Any], action: Any) -> Any:
    """Return the fingerprint of what an env gets if this action is given."""
    TellingEnv.got.clear()
    with SerialEnv(lambda: TellingEnv(BOX, space, [NUMBERS])) as env:
        env.reset(seed=0)
        env.step(action)
    (seen,) = TellingEnv.got
    return seen


@given(spaces_with_values(), spaces_with_values(), st.integers(0, 2**31 - 1))
def test_values_of_any_space_and_those_of_another_arrive_to_the_bit_from_one_env(pair, other, seed):
    space, value = pair
    space.seed(seed)
    assert_unchanged(space, [value, space.sample(), other[1]])


@given(spaces_with_values(ANY_SPACES))
def test_actions_of_any_space_arrive_to_the_bit(pair):
    space, action = pair
    assert got(space, action) == fingerprint(action)


# gymnasium steps no env whose part of a batch of actions has nothing in it.
SOME_SPACES = ANY_SPACES.filter(lambda space: not re.search(r"(Tuple|Dict)\(\)", repr(space)))


@given(ANY_SPACES, SOME_SPACES, st.integers(1, 4), st.integers(0, 2**31 - 1))
def test_batches_of_any_space_are_gymnasiums(space, actions, count, seed):
    space.seed(seed)
    env_fns = [lambda: TellingEnv(space, actions, [space.sample() for _ in range(3)])] * count
    observations, received = [], []
    for kind in (SerialVectorEnv, SyncVectorEnv):
        space.seed(seed)
        envs = kind(env_fns)
        TellingEnv.got.clear()
        envs.action_space.seed(seed)
        observations.append([envs.reset(seed=0)[0], *(envs.step(envs.action_space.sample())[0] for _ in range(4))])
        received.append([*TellingEnv.got])
        envs.close()
    assert first_difference(*observations) is None
    assert received[0] == received[1]


PARTS = spaces.Dict({"a": DISCRETE, "b": spaces.Tuple((spaces.Tuple(()), BOX))})
NAN_PAYLOADS = np.array([0x7FC00001, 0x80000000, 0xFFFFFFFF, 0x7F800000, 0, 1], np.uint32).view(np.float32)
ODD: dict[str, tuple[Any, list[Any]]] = {
    "other dtypes and orders": (BOX, [NUMBERS.astype(np.float64), NUMBERS.astype(">f4"), NUMBERS.astype(object)]),
    "other shapes": (BOX, [NUMBERS.T, NUMBERS[None], 0.0, None, NUMBERS.tolist(), {"a": 1}]),
    "every bit": (BOX, [NAN_PAYLOADS.reshape(2, 3)]),
    "no integers of 64 bits": (DISCRETE, [True, 1.0, np.float32(1), np.uint64(1), np.bool_(True), 2**63, None, "1"]),
    "integers out of range": (DISCRETE, [-1, np.int64(4), np.array(1), 2**63 - 1]),
    "other dicts": (PARTS, [{"a": 1}, {"b": ((), NUMBERS), "a": 1}, OrderedDict(a=1, b=((), NUMBERS)), (1, 2)]),
    "other tuples": (PARTS, [{"a": 1, "b": other} for other in (((), None), ((1,), NUMBERS), [(), NUMBERS], ())]),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_not_of_the_space_of_one_env_arrives_unchanged(name):
    assert_unchanged(*ODD[name])


def test_arrays_of_any_order_arrive_with_their_numbers():
    strided = [np.asfortranarray(NUMBERS), np.repeat(NUMBERS, 2, axis=1)[:, ::2], NUMBERS[::-1][::-1]]
    for value in [*seen_by_one_env(BOX, strided), *strided]:
        assert (value == NUMBERS).all()
    for action in [
        *strided,
        np.broadcast_to(np.float64(2.5), (2, 3)),
        NUMBERS.tolist(),
        [[1, 2, 3], np.float32([4, 5, 6])],
    ]:
        assert got(BOX, action) == fingerprint(action)


@pytest.mark.parametrize("action", [-1, 4, np.array(-1), 2**63, np.uint64(2**64 - 1), np.uint8(200), True], ids=repr)
@pytest.mark.parametrize("space", [DISCRETE, spaces.Discrete(3, start=5)], ids=repr)
def test_an_integer_that_no_discrete_space_has_arrives(space, action):
    assert got(space, action) == fingerprint(action)


PAIR = spaces.Tuple((DISCRETE, BOX))
NAMED = spaces.Dict({"a": DISCRETE})
MISFITS = [
    *((DISCRETE, action) for action in (None, [1], np.array([1]), 10**30, 1.0, float("nan"))),
    *((BOX, action) for action in (None, 0.0, NUMBERS.T, NUMBERS[None], np.zeros(6), [[1, 2, 3], [4, 5]], [])),
    (spaces.MultiBinary(3), np.zeros(4, np.int8)),
    (spaces.MultiDiscrete([2, 2]), np.zeros(3, np.int64)),
    *((PAIR, action) for action in ((1,), (1, np.zeros(2)), 1, None, np.array(3))),
    *((NAMED, action) for action in ({}, {"a": 1, "b": 1}, {"a": [1, 2]}, 1)),
]


@pytest.mark.parametrize(("space", "action"), MISFITS, ids=repr)
def test_an_action_that_does_not_fit_is_refused_and_the_next_one_arrives(space, action):
    TellingEnv.got.clear()
    with SerialEnv(lambda: TellingEnv(BOX, space, [NUMBERS])) as env:
        env.reset(seed=0)
        with pytest.raises(ActionError, match="Nothing was sent") as caught:
            env.step(action)
        assert isinstance(caught.value, gymnasium.error.InvalidAction)
        right = space.sample()
        env.step(right)
    assert TellingEnv.got == [fingerprint(right)]


def refuse_to_be_rebuilt() -> None:
    raise RuntimeError("not here")


class SentOnly:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return refuse_to_be_rebuilt, ()


def test_an_action_that_cannot_be_unpickled_is_named():
    with pytest.raises(ActionError, match=r"cannot be unpickled in the env's process.*not here"):
        got(spaces.Sequence(DISCRETE), SentOnly())


# --- rows of a batch ----------------------------------------------------------------------------


FITTING: list[tuple[Any, Any, Any]] = [
    (np.float32, (2,), [0.5, 1.5]),
    (np.float32, (2,), np.float64([0.1, 1e300])),  # as np.stack into the batch would: to infinity
    (np.float32, (2,), np.array([1.0, 2.0], ">f4")),
    (np.uint8, (), 255),
    (np.int64, (), True),
    (np.float32, (), 1.5),
    (np.float16, (), np.float16(1.5)),
    (np.int64, (2,), np.int32([1, 2])),
    (np.uint8, (2, 2, 3), np.moveaxis(np.arange(12, dtype=np.uint8).reshape(3, 2, 2), 0, -1)),
    (np.uint8, (4, 4, 4), np.arange(64, dtype=np.uint8).reshape(4, 4, 4)[::-1, ::-1]),
]


@pytest.mark.parametrize(("dtype", "shape", "value"), FITTING)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_values_that_fit_are_converted_as_numpy_converts_them(dtype, shape, value):
    for count in (1, 2):
        space = spaces.Box(0, 100, shape, dtype)
        with SerialVectorEnv([lambda space=space: TellingEnv(space, DISCRETE, [value])] * count) as envs:
            for batch in (envs.reset(seed=0)[0], envs.step([1] * count)[0]):
                assert fingerprint(batch) == fingerprint(np.stack([np.asarray(value).astype(dtype)] * count))


PARTED = spaces.Dict({"a": DISCRETE, "b": spaces.Tuple((DISCRETE, DISCRETE))})
REFUSED: list[tuple[Any, Any]] = [
    *((BOX, value) for value in (np.zeros((3, 3)), np.zeros((1, 2, 3)), 1.0, None, "ab", [[1], [2, 3]], {"a": 1})),
    (BOX, np.complex64(np.ones((2, 3)))),
    (spaces.Box(0, 100, (1,)), 1.0),
    (spaces.Box(0, 100, (2,), np.int64), np.float32([1, 2])),
    (spaces.Box(0, 100, (2,), np.uint8), np.int64([1, 2])),
    *((spaces.Box(0, 100, (), np.uint8), value) for value in (256, -1, 1.0)),
    *((PARTED, value) for value in ({"a": 1}, {"a": 1, "b": (1,)}, {"a": 1, "b": (1, 2, 3)}, 5)),
]


@pytest.mark.parametrize(("space", "value"), REFUSED, ids=repr)
def test_values_of_another_shape_kind_or_structure_are_the_failure_of_their_env(space, value):
    with (
        SerialVectorEnv([lambda: TellingEnv(space, DISCRETE, [value])] * 2) as envs,
        pytest.raises(EnvsFailedError),
    ):
        envs.reset(seed=0)


# --- infos --------------------------------------------------------------------------------------

KINDS: list[st.SearchStrategy[Any]] = [
    st.floats(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats().map(np.float64),
    st.floats(width=32).map(np.float32),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.integers(-(2**31), 2**31 - 1).map(np.int32),
    st.integers(0, 255).map(np.uint8),
]
KEYS = st.text(min_size=1).filter(lambda key: not key.startswith("_") and key not in ("final_obs", "final_info"))
SHAPES = st.dictionaries(KEYS, st.sampled_from(KINDS), max_size=5)
# Of the same keys in one order and of the same types, as a rule; or each of its own.
INFOS = SHAPES.flatmap(lambda shape: st.lists(st.fixed_dictionaries(shape), min_size=6, max_size=6)) | st.lists(
    SHAPES.flatmap(st.fixed_dictionaries), min_size=6, max_size=6
)


@given(INFOS)
def test_infos_of_numbers_arrive_with_their_types_and_bits_and_are_merged_as_gymnasium_merges_them(infos):
    env_fns = [lambda index=index: TellingEnv(DISCRETE, DISCRETE, [1], infos[2 * index :][:2]) for index in range(3)]
    with (
        SerialVectorEnv(env_fns) as envs,
        contextlib.closing(SyncVectorEnv(env_fns)) as theirs,
        SerialEnv(env_fns[0]) as env,
    ):
        assert fingerprint(env.reset()[1]) == fingerprint(infos[0])
        assert first_difference(envs.reset()[1], theirs.reset()[1]) is None
        for step in (1, 0, 1):
            assert fingerprint(env.step(1)[4]) == fingerprint(infos[step])
            merged = envs.step(np.ones(3, np.int64))[4]
            assert first_difference(merged, theirs.step(np.ones(3, np.int64))[4]) is None
            assert all(value.flags.writeable for key, value in merged.items() if key[0] != "_")
