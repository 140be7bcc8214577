"""A journal as plain arrays and back to the bit; values as JSON and back; pickles looked into without running them."""

from __future__ import annotations

import io
import json
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_strategies import ANY_SPACES, fingerprint, spaces_with_values

from multienv.recovery.verification import difference
from multienv.reports.plain import (
    NeedsTrust,
    decode,
    encode,
    glimpse,
    glimpse_of_group,
    is_whole,
    pickled_for_group,
    text_of,
)
from multienv.reports.table import Arrays, Row, Shape, message_of, to_arrays, to_rows
from multienv.wire.actions import action_decoder, action_encoder
from multienv.wire.memory import Block
from multienv.wire.messages import (
    FAILED,
    KIND_OF_REQUEST_AT,
    LARGE_EVIDENCE,
    REPLY,
    STEP,
    VALUE,
    Branch,
    Call,
    GetAttribute,
    GroupOptions,
    HasAttribute,
    Render,
    Reset,
    SetAttribute,
    evidence_of,
    pack_message,
    pack_value,
    unpack_message,
)
from multienv.wire.observations import Placement, packer
from multienv.worker import generators


def through_a_file(arrays: Arrays) -> Arrays:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    file.seek(0)
    with np.load(file, allow_pickle=False) as read:
        return dict(read)


def shape_of(action_space: spaces.Space[Any], space: spaces.Space[Any], limit: int) -> Shape:
    box = (space.dtype, space.shape) if type(space) is spaces.Box else None
    return Shape(action_space.shape, box, Placement.of(space, limit).block_size > 0)


class History:
    """What a journal holds, made by the wire itself."""

    def __init__(self, action_space: spaces.Space[Any], space: spaces.Space[Any], limit: int = 1024) -> None:
        self.frames: list[bytes] = []
        self.evidence: list[bytes] = []
        self.shape = shape_of(action_space, space, limit)
        placement = Placement.of(space, limit)
        block = Block.private(placement.block_size) if placement.block_size else None
        self._encode, self._pack = action_encoder(action_space), packer(space, placement, block)

    def _log(self, frame: bytes, reply: bytes) -> None:
        self.frames.append(frame)
        self.evidence.append(evidence_of(reply))

    def step(self, action: Any, observation: Any, reward: Any = 1.0, *, ends: bool = False) -> None:
        seq = len(self.frames) + 1
        self._log(self._encode(seq, action), self._pack(seq, observation, reward, ends, False, {}, 0))

    def reset(self, observation: Any, seed: int | None, options: Any = None) -> None:
        seq = len(self.frames) + 1
        frame = pack_message(seq, Reset(seed, options, anchor=False))
        self._log(frame, self._pack(seq, observation, 0.0, False, False, {"an": "info"}, 0))

    def message(self, message: Any, reply: bytes | None = None) -> None:
        seq = len(self.frames) + 1
        self._log(pack_message(seq, message), reply or pack_value(seq, None, VALUE))

    def rows(self, pending: bytes = b"", *, trust: bool = False) -> list[Row]:
        joined = b"".join(one + other for one, other in zip(self.frames, self.evidence, strict=True))
        return to_rows(through_a_file(to_arrays(joined + pending, self.shape)), trust=trust)


def check(history: History, action_space: spaces.Space[Any], pending: bytes = b"") -> None:
    """To the bit with trust; without it to what the env and the verification make of it."""
    rows = history.rows(pending, trust=True)
    frames = [*history.frames, *([pending] if pending else [])]
    assert [row.frame for row in rows] == frames
    for row, evidence in zip(rows, history.evidence, strict=False):
        assert not difference(evidence, row.evidence)
    for row, frame in zip(history.rows(pending), frames, strict=True):
        assert row.known
        if frame[KIND_OF_REQUEST_AT] == STEP:
            decoder = action_decoder(action_space)
            assert fingerprint(decoder(row.frame)) == fingerprint(decoder(frame))
        else:
            assert unpack_message(row.frame) == unpack_message(frame)
    for row, evidence in zip(history.rows(pending), history.evidence, strict=False):
        assert not difference(evidence, row.evidence)
    assert bool(pending) == (rows[-1].evidence == b"")


# --- a journal --------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(spaces_with_values(ANY_SPACES), spaces_with_values(ANY_SPACES), st.sampled_from([1024, 0, -1]), st.booleans())
def test_any_action_and_any_observation(acting: Any, seeing: Any, limit: int, pending: bool) -> None:
    (action_space, action), (space, observation) = acting, seeing
    history = History(action_space, space, limit)
    history.reset(observation, seed=3)
    history.step(action, observation, ends=True)
    history.reset(observation, seed=None)
    history.step(action_space.sample(), space.sample(), np.float32(0.1))
    check(history, action_space, action_encoder(action_space)(9, action) if pending else b"")


@pytest.mark.parametrize(
    "action", [1, True, 1.5, np.int64(1), np.int32(1), np.float64("nan"), np.array(1), -1, 2**63 - 1, 2**63, 10**30], ids=repr
)  # fmt: skip
def test_whatever_is_given_to_a_discrete(action: Any) -> None:
    space = spaces.Discrete(4)
    history = History(space, space)
    for one in (0, np.int64(2), action, 3, action):
        history.step(one, 1)
    check(history, space, action_encoder(space)(9, action))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"])
def test_arrays_of_several_dtypes_in_one_journal(dtype: str) -> None:
    space = spaces.Box(-1.0, 1.0, (2, 3), dtype=np.float32)
    history = History(space, space)
    for one in (space.sample(), np.ones((2, 3), dtype), space.sample().tolist(), np.zeros((2, 3), dtype)):
        history.step(one, space.sample())
    check(history, space)


def test_the_common_case_is_readable() -> None:
    acting, seeing = spaces.Box(-1.0, 1.0, (2,), dtype=np.float32), spaces.Box(-9.0, 9.0, (3,), dtype=np.float32)
    history = History(acting, seeing)
    actions, observations = [acting.sample() for _ in range(4)], [seeing.sample() for _ in range(5)]
    history.reset(observations[0], 7)
    for number, action in enumerate(actions):
        history.step(action, observations[number + 1], float(number))
    joined = b"".join(one + other for one, other in zip(history.frames, history.evidence, strict=True))
    arrays = through_a_file(to_arrays(joined, history.shape))
    assert (arrays["actions_array_float32"] == np.stack(actions)).all()
    assert (arrays["observations"] == np.stack(observations)).all()
    assert arrays["observations"].dtype == np.float32
    assert arrays["reward"].tolist() == [0.0, 0.0, 1.0, 2.0, 3.0]
    assert arrays["seed"].tolist() == [7]
    assert arrays["kind"].tolist() == [3, 2, 2, 2, 2]
    assert "pickles" not in arrays


@pytest.mark.parametrize(
    "message",
    [
        Reset(2**70, None, True),
        Reset(None, {"start": 3, "at": (np.float32(0.5), [1.0, float("-inf")])}, False),
        Call("poke", (0.5, {"a": np.arange(3).tolist()}), {"b": b"x"}),
        Call("np_random.integers", (10,), {}),
        SetAttribute("offset", 2.0),
        GetAttribute("offset"),
        HasAttribute("offset"),
        Branch(3),
        Render(),
    ],
    ids=repr,
)
def test_messages(message: Any) -> None:
    space = spaces.Discrete(3)
    history = History(space, space)
    history.message(message, pack_value(1, None, FAILED))
    history.step(1, 1)
    history.message(message)
    check(history, space, pack_message(9, message))


def test_a_reset_with_the_generators_before_it() -> None:
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=3)
    env.action_space.seed(4)
    message = Reset(None, None, True, generators.capture(env))
    space = spaces.Discrete(3)
    history = History(space, space)
    history.message(message)
    (row,) = history.rows()
    rebuilt = unpack_message(row.frame)
    assert isinstance(rebuilt, Reset)
    assert rebuilt.generators is not None
    other = gymnasium.make("CartPole-v1")
    generators.restore(other, rebuilt.generators)
    assert np.array_equal(env.reset()[0], other.reset()[0])
    assert [env.action_space.sample() for _ in range(20)] == [other.action_space.sample() for _ in range(20)]
    env.close()
    other.close()


def test_evidence_too_large_to_be_kept() -> None:
    space = spaces.Sequence(spaces.Box(-1.0, 1.0, (2,)))
    history = History(spaces.Discrete(3), space)
    history.step(1, tuple(np.zeros(2, np.float32) for _ in range(LARGE_EVIDENCE)))
    assert len(history.evidence[0]) == REPLY.size
    check(history, spaces.Discrete(3))


def test_what_has_no_plain_form_is_asked_to_be_trusted() -> None:
    space = spaces.Discrete(3)
    for message in (
        Call("poke", (OrderedDict(a=1),), {}),
        SetAttribute("a", np.array([None])),
        Reset(1, {"f": len}, False),
    ):
        history = History(space, space)
        history.step(1, 1)
        history.message(message)
        assert len(history.rows(trust=True)) == 2
        with pytest.raises(NeedsTrust, match="request 2"):
            history.rows()


@pytest.mark.parametrize(
    "name", ["__class__", "_private", "reset.__globals__.get", "np_random.bit_generator.cffi", "np_random._x", "a.b"]
)
def test_a_call_through_attributes_of_attributes_wants_trust(name: str) -> None:
    with pytest.raises(NeedsTrust, match="a call of"):
        message_of(encode(Call(name, (), {})))


def test_an_answer_without_a_plain_form_is_compared_as_far_as_it_goes() -> None:
    space = spaces.Sequence(spaces.Discrete(3))
    history = History(spaces.Discrete(3), space)
    history.step(1, OrderedDict(a=1))
    (row,) = history.rows()
    assert not row.known
    (row,) = history.rows(trust=True)
    assert row.known
    assert row.evidence[REPLY.size :] == history.evidence[0][REPLY.size :]


# --- values -----------------------------------------------------------------------------------------


@given(spaces_with_values(ANY_SPACES))
def test_samples_survive(pair: Any) -> None:
    _, value = pair
    form = json.loads(text_of(encode(value)))
    assert is_whole(form)
    assert fingerprint(decode(form)) == fingerprint(value)


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.sampled_from(["$array", "$opaque"])
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.just("$opaque"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_nested_values_survive(value: Any) -> None:
    form = json.loads(text_of(encode(value)))
    assert fingerprint(decode(form)) == fingerprint(value)
    assert glimpse(pickle.dumps(value)) == encode(value)


class Trap:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


class Stateful:
    """Its code would run when it is unpickled."""

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("it was unpickled")

    def __getstate__(self) -> Any:
        return {"a": 1}


def test_a_glimpse_runs_no_foreign_code(tmp_path: Path) -> None:
    struck = tmp_path / "struck"
    for value in (Trap(struck), [Trap(struck)], {"a": (Trap(struck), 1)}, Stateful()):
        for dumps in (pickle.dumps, cloudpickle.dumps):
            form = glimpse(dumps(value))
            assert not is_whole(form)
            with pytest.raises(NeedsTrust):
                decode(form)
    assert not struck.exists()
    pickle.loads(pickle.dumps(Trap(struck)))
    assert struck.exists()  # or this test could not fail


@pytest.mark.parametrize("data", [b"", b"garbage", b"\x80\x05.", pickle.dumps([1])[:-2], b"\x80\x05(((((."])
def test_what_is_no_pickle_is_opaque(data: bytes) -> None:
    assert "$opaque" in glimpse(data)


def test_what_is_nested_without_end_is_opaque() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert "$opaque" in glimpse(pickle.dumps(endless))


@pytest.mark.parametrize(
    "form", [{"$array": ["O", [1], [0]]}, {"$scalar": ["U4", "text"]}, {"$nothing": 1}, {"$array": [1]}]
)
def test_forms_that_are_none(form: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode(form)


def test_what_a_report_asks_of_an_env_that_is_built_anew_is_not_unpickled_unasked() -> None:
    """A worker unpickles those requests."""
    options = GroupOptions(None, None, (1,), anew={1: (b"a pickle",)})
    form = encode(options)
    assert not is_whole(form)
    with pytest.raises(NeedsTrust):
        decode(form)
    forged = {"$group": [*encode(["mask", None, (1,)]), False, {"$dict": [[1, {"$tuple": [{"$bytes": "gAQu"}]}]]}]}
    assert decode(forged) == GroupOptions("mask", None, (1,))  # type: ignore[arg-type]


def test_the_observations_of_several_envs_are_plain_where_they_can_be() -> None:
    observations = [{"a": 1.5}, np.arange(3), ("text", 2)]
    answer = pickle.dumps(([pickle.dumps(one) for one in observations], [0.5, 1.0, 2.0], [True] * 3, [False] * 3))
    form = json.loads(text_of(glimpse_of_group(answer)))
    assert is_whole(form)
    pickled, *others = pickle.loads(pickled_for_group(form))
    assert str([pickle.loads(one) for one in pickled]) == str(observations)
    assert others == [[0.5, 1.0, 2.0], [True] * 3, [False] * 3]
    # What looks like a pickle in a report is bytes, and nothing else.
    (once,), *_ = pickle.loads(pickled_for_group([[{"$bytes": "gAQu"}], [], [], []]))
    assert type(pickle.loads(once)) is bytes
    assert not is_whole(glimpse_of_group(pickle.dumps(([pickle.dumps(Path("x"))], [0.0], [False], [False]))))
