"""Actions arrive as the caller gave them, in value, type, dtype and shape; what cannot fit is refused unsent."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from wire_strategies import ANY_SPACES, fingerprint, spaces_with_values

from multienv.errors import ActionError
from multienv.wire.actions import action_bytes, action_decoder, action_encoder, misfit
from multienv.wire.banks import HEAD, STEP, STEPPED, BankLayout
from multienv.wire.segment import REQUEST_MAIL, Segment

BOX = spaces.Box(-1.0, 1.0, (2, 3), dtype=np.float32)
DISCRETE = spaces.Discrete(4)
NUMBERS = np.arange(6).reshape(2, 3)


def segment_for(space: spaces.Space[Any]) -> Segment:
    segment = Segment(-1)
    segment.lay_out(BankLayout(1, action_bytes(space)))
    return segment


def there_and_back(space: spaces.Space[Any], action: Any, number: int = 7) -> Any:
    segment = segment_for(space)
    before = bytes(segment.banks[~number & 1].view)
    action_encoder(space, segment)(number, action)
    bank = segment.banks[number & 1]
    kind, tag, *presumed = HEAD.unpack_from(bank.view)
    assert (kind, *presumed) == (STEP, STEPPED, 0, 0, number, 0)
    assert bytes(bank.view[bank.layout.absent :]) == bytes(bank.layout.size - bank.layout.absent), "it wrote elsewhere"
    assert bytes(segment.banks[~number & 1].view) == before, "it wrote into the other bank"
    return action_decoder(space, segment)(number, tag)


@given(spaces_with_values(ANY_SPACES), st.integers(1, 2**32 - 1))
def test_a_sample_arrives_as_it_was_given(pair, number):
    space, action = pair
    assert fingerprint(there_and_back(space, action, number)) == fingerprint(action)


@pytest.mark.parametrize(
    "action",
    [
        np.asfortranarray(NUMBERS.astype(np.float32)),
        np.repeat(NUMBERS, 2, axis=1)[:, ::2],
        NUMBERS[::-1, ::-1],
        np.broadcast_to(np.float64(2.5), (2, 3)),
        np.full((2, 3), np.nan, np.float32),
        NUMBERS.tolist(),
        tuple(map(tuple, NUMBERS.tolist())),
        [np.float32([1, 2, 3]), [4, 5, 6]],
    ],
    ids=["Fortran", "strided", "reversed", "broadcast", "NaN", "list", "tuple", "mixed"],
)
def test_arrays_of_any_order_and_sequences_arrive(action):
    assert fingerprint(there_and_back(BOX, action)) == fingerprint(action)


@pytest.mark.parametrize(
    "action",
    [-1, 4, np.int64(4), np.array(-1), 2**63 - 1, -(2**63), 2**63, np.uint64(2**64 - 1), np.uint8(200), True],
    ids=repr,
)
@pytest.mark.parametrize("space", [DISCRETE, spaces.Discrete(3, start=5)], ids=repr)
def test_an_integer_that_no_discrete_space_has_arrives(space, action):
    assert fingerprint(there_and_back(space, action)) == fingerprint(action)


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (DISCRETE, None),
        (DISCRETE, [1]),
        (DISCRETE, np.array([1])),
        (DISCRETE, np.zeros((2, 2))),
        (DISCRETE, 10**30),
        (DISCRETE, 1.0),
        (DISCRETE, np.float32(1)),
        (DISCRETE, float("nan")),
        (BOX, None),
        (BOX, 0.0),
        (BOX, np.zeros((3, 2), np.float32)),
        (BOX, np.zeros((1, 2, 3), np.float32)),
        (BOX, np.zeros(6, np.float32)),
        (BOX, [[1, 2, 3], [4, 5]]),
        (BOX, []),
        (spaces.MultiBinary(3), np.zeros(4, np.int8)),
        (spaces.MultiDiscrete([2, 2]), np.zeros(3, np.int64)),
        (spaces.Tuple((DISCRETE, BOX)), (1,)),
        (spaces.Tuple((DISCRETE, BOX)), (1, np.zeros(2))),
        (spaces.Tuple((DISCRETE, BOX)), 1),
        (spaces.Tuple((DISCRETE, BOX)), None),
        (spaces.Tuple((DISCRETE, BOX)), np.array(3)),
        (spaces.Dict({"a": DISCRETE}), {}),
        (spaces.Dict({"a": DISCRETE}), {"a": 1, "b": 1}),
        (spaces.Dict({"a": DISCRETE}), {"a": [1, 2]}),
        (spaces.Dict({"a": DISCRETE}), 1),
        (spaces.Dict({"a": spaces.Tuple((BOX,))}), {"a": (None,)}),
    ],
    ids=repr,
)
def test_a_misfit_is_refused_and_writes_nothing(space, action):
    assert misfit(space, action)
    segment = segment_for(space)
    with pytest.raises(ActionError, match="Nothing was sent") as caught:
        action_encoder(space, segment)(1, action)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, gymnasium.error.InvalidAction)
    assert_untouched(segment)


def assert_untouched(segment: Segment) -> None:
    assert not any(any(bank.view) for bank in segment.banks)
    assert not any(segment.words[REQUEST_MAIL : REQUEST_MAIL + 2])


def refuse_to_be_rebuilt() -> None:
    raise RuntimeError("not here")


class SentOnly:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return refuse_to_be_rebuilt, ()


def test_an_action_that_cannot_be_unpickled_is_named():
    with pytest.raises(ActionError, match=r"cannot be unpickled in the env's process.*not here"):
        there_and_back(spaces.Sequence(DISCRETE), SentOnly())
