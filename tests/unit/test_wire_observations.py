"""Replies: the observation, reward, flags and info of the env arrive to the bit, wherever they travel."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import assume, given
from hypothesis import strategies as st
from wire_strategies import ANY_SPACES, fingerprint, spaces_with_values

from multienv.testing import example_spaces
from multienv.wire.memory import Block
from multienv.wire.messages import ANCHORED, EVIDENCE, IRREGULAR, REPLY, TERMINATED, TRUNCATED, evidence_of
from multienv.wire.observations import (
    INLINE_LIMIT,
    Placement,
    array_views,
    digester,
    info_of,
    irregular_parts,
    packer,
    reader,
    reward_of,
)

BOX = spaces.Box(-1.0, 1.0, (2, 3), dtype=np.float32)
ZEROS = np.zeros((2, 3), np.float32)
# Everything inline; everything in shared memory; as it is in earnest.
LIMITS = [-1, 0, INLINE_LIMIT]


class Arrived(NamedTuple):
    observation: Any
    reward: Any
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    irregular: bool


class Wire:
    """Both ends of a reply."""

    def __init__(self, space: spaces.Space[Any], limit: int = INLINE_LIMIT) -> None:
        self.placement = Placement.of(space, limit)
        self.block = Block.private(self.placement.block_size) if self.placement.block_size else None
        self.pack = packer(space, self.placement, self.block)
        self.read = reader(space, self.placement, self.block)

    def send(self, observation: Any, reward: Any = 0.0, terminated: Any = False, truncated: Any = False,
             info: Any = None, seq: int = 7, flags: int = 0) -> bytes:  # fmt: skip
        return self.pack(seq, observation, reward, terminated, truncated, {} if info is None else info, flags)

    def receive(self, reply: bytes) -> Arrived:
        length, seq, _, _, flags, tag, reward = REPLY.unpack_from(reply)
        assert length == len(reply)
        info = info_of(reply)[0]
        ends = bool(flags & TERMINATED), bool(flags & TRUNCATED)
        if flags & IRREGULAR:
            observation, reward, *_ = irregular_parts(reply)
            return Arrived(observation, reward, *ends, info, irregular=True)
        return Arrived(self.read(reply, seq), reward_of(tag, reward), *ends, info, irregular=False)


def there_and_back(space: spaces.Space[Any], observation: Any, limit: int = INLINE_LIMIT, **rest: Any) -> Arrived:
    wire = Wire(space, limit)
    return wire.receive(wire.send(observation, **rest))


@given(spaces_with_values(ANY_SPACES), st.sampled_from(LIMITS), st.integers(0, 2**32 - 1))
def test_a_sample_arrives_as_the_env_gave_it(pair, limit, seq):
    space, observation = pair
    expected = fingerprint(observation)
    assert fingerprint(there_and_back(space, observation, limit, seq=seq).observation) == expected


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", example_spaces())
def test_samples_of_the_example_spaces_arrive(name, limit):
    space = example_spaces()[name]
    space.seed(0)
    wire = Wire(space, limit)
    for seq in range(20):
        observation = space.sample()
        assert fingerprint(wire.receive(wire.send(observation, seq=seq)).observation) == fingerprint(observation)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(
    "observation",
    [
        ZEROS.astype(np.float64),
        ZEROS.astype(">f4"),
        ZEROS.T,
        ZEROS[None],
        np.ma.masked_array(ZEROS, mask=True),
        np.rec.array(ZEROS),
        ZEROS.tolist(),
        ZEROS.astype(object),
        0.0,
        None,
        "text",
        {"a": ZEROS},
        np.float32(1),
    ],
    ids=["float64", "big endian", "shape", "axis", "masked", "record", "list", "object", "float", "None", "str", "dict", "scalar"],
)  # fmt: skip
def test_what_does_not_fit_the_space_travels_unchanged(observation, limit):
    arrived = there_and_back(BOX, observation, limit, reward=2.5, terminated=True)
    assert arrived.irregular
    assert fingerprint(arrived.observation) == fingerprint(observation)
    assert (arrived.reward, arrived.terminated, arrived.truncated) == (2.5, True, False)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(
    "reward",
    [0.0, -0.0, math.nan, math.inf, 5e-324, 3, -3, True, 2**53, 2**53 + 1, 2**63, 10**30, np.float64(0.1), np.float32(0.1),
     np.float16(0.1), np.longdouble(0.1), np.int64(2**53 + 1), np.int64(7), np.int32(7), np.uint8(7), np.bool_(True),
     np.array(1.5), np.array([1.0, 2.0]), [1.0, 2.0], None, "reward", 1 + 2j, np.complex64(2)],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("space", [BOX, spaces.Discrete(3)], ids=["box", "discrete"])
def test_rewards_of_any_type_arrive_as_they_are(space, reward, limit):
    observation = ZEROS if space is BOX else np.int64(1)
    assert fingerprint(there_and_back(space, observation, limit, reward=reward).reward) == fingerprint(reward)


@pytest.mark.parametrize("space", [BOX, spaces.Discrete(3)], ids=["box", "discrete"])
def test_an_integer_reward_beyond_any_float_arrives(space):
    observation = ZEROS if space is BOX else np.int64(1)
    assert there_and_back(space, observation, reward=10**400).reward == 10**400


@given(st.floats(allow_nan=False) | st.integers(-(2**70), 2**70), st.booleans(), st.booleans(), st.sampled_from(LIMITS))
def test_reward_and_flags_of_a_regular_observation(reward, terminated, truncated, limit):
    arrived = there_and_back(BOX, ZEROS, limit, reward=reward, terminated=terminated, truncated=truncated)
    assert fingerprint(arrived.reward) == fingerprint(reward)
    assert (arrived.terminated, arrived.truncated) == (terminated, truncated)


@pytest.mark.parametrize("flag", [np.bool_(True), 1, np.array(True)])
def test_flags_become_bools(flag):
    arrived = there_and_back(BOX, ZEROS, terminated=flag, truncated=flag)
    assert (arrived.terminated, arrived.truncated) == (True, True)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("observation", [ZEROS, ZEROS.tolist()], ids=["regular", "irregular"])
def test_infos_arrive_with_either_kind_of_observation(observation, limit):
    info = {"a": 1, "array": np.arange(3), "nested": {"x": (1, None)}, 5: "five"}
    arrived = there_and_back(BOX, observation, limit, info=info)
    assert fingerprint(arrived.info) == fingerprint(info)
    assert there_and_back(BOX, observation, limit).info == {}


def test_an_anchored_reply_carries_the_generators_beside_the_info():
    wire = Wire(BOX)
    reply = wire.send(ZEROS, info=({"a": 1}, b"state"), flags=ANCHORED)
    assert info_of(reply) == ({"a": 1}, b"state")
    assert info_of(wire.send(ZEROS, info=({}, b"state"), flags=ANCHORED)) == ({}, b"state")


def test_a_regular_reply_without_info_has_the_plain_size():
    for limit in LIMITS:
        wire = Wire(BOX, limit)
        assert len(wire.send(ZEROS)) == wire.placement.plain_size
        assert len(wire.send(ZEROS, info={"a": 1})) > wire.placement.plain_size


@given(spaces_with_values(), spaces_with_values(), st.sampled_from(LIMITS))
def test_evidence_tells_different_observations_apart(pair, other, limit):
    space, observation = pair
    space.seed(other[0].np_random.integers(2**31).item())
    another = space.sample()
    assume(fingerprint(observation) != fingerprint(another))
    wire = Wire(space, limit)
    assert evidence_of(wire.send(observation))[EVIDENCE:] != evidence_of(wire.send(another))[EVIDENCE:]


@given(spaces_with_values(), st.sampled_from(LIMITS))
def test_evidence_is_the_same_for_the_same_whatever_came_before_and_whatever_the_info(pair, limit):
    space, observation = pair
    wire = Wire(space, limit)
    first = evidence_of(wire.send(observation, 1.5, seq=2, info={"time": 1}))
    wire.send(space.sample(), seq=4)
    again = evidence_of(wire.send(observation, 1.5, seq=6, info={"time": 2, "more": 3}))
    bare = evidence_of(wire.send(observation, 1.5, seq=9))
    assert first[EVIDENCE:] == again[EVIDENCE:] == bare[EVIDENCE:]


@pytest.mark.parametrize("limit", LIMITS)
def test_the_observation_before_stays_whole_while_the_next_is_written(limit):
    wire = Wire(BOX, limit)
    first = wire.send(ZEROS, seq=1)
    wire.send(ZEROS + 1, seq=2)
    assert (wire.receive(first).observation == 0).all()


@pytest.mark.parametrize("limit", LIMITS)
def test_what_arrives_is_a_value_of_its_own(limit):
    wire = Wire(BOX, limit)
    observation = ZEROS.copy()
    reply = wire.send(observation, seq=1)
    observation += 1  # as envs do that return the same array each time
    first = wire.receive(reply).observation
    first += 5
    assert (wire.receive(reply).observation == 0).all()
    assert first.flags.writeable


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("seq", [2, 3])
def test_views_look_at_where_observations_arrive(limit, seq):
    wire = Wire(BOX, limit)
    buffer = bytearray(4096)
    views = array_views(BOX, wire.placement, wire.block, buffer)
    observation = np.arange(6, dtype=np.float32).reshape(2, 3)
    reply = wire.send(observation, seq=seq)
    buffer[: len(reply)] = reply
    assert fingerprint(views[seq & 1].copy()) == fingerprint(observation)


def test_there_are_views_for_plain_boxes_only():
    buffer = bytearray(4096)
    large = spaces.Box(-1.0, 1.0, (5000,))
    assert array_views(large, Placement.of(large, -1), None, buffer) is None
    assert array_views(spaces.Discrete(3), Placement.of(spaces.Discrete(3), 0), None, buffer) is None


# --- the digest of an observation in shared memory ---------------------------------------------

WORDS = st.integers(0, 2**32 - 1)


def digests(*contents: np.ndarray) -> list[int]:
    """The digests of word arrays of one length, each laid alone into the same place."""
    size = contents[0].nbytes
    block = Block.private(2 * size)
    digest = digester(block, size)
    results = []
    for words in contents:
        block.view[:size] = words.tobytes()
        block.view[size:] = words.tobytes()
        results.append(digest(0))
        assert digest(1) == results[-1], "the two places differ"
    return results


@given(st.lists(WORDS, min_size=1, max_size=40), st.data())
def test_the_digest_changes_when_any_word_changes(words, data):
    before = np.array([*words, *words], np.uint32)  # an even number, as layouts are aligned
    after = before.copy()
    place = data.draw(st.integers(0, len(before) - 1))
    after[place] = data.draw(WORDS.filter(lambda word: word != before[place]))
    assert len(set(digests(before, after))) == 2


@given(st.lists(WORDS, min_size=2, max_size=40, unique=True), st.data())
def test_the_digest_changes_when_two_words_swap(words, data):
    before = np.array(words[: len(words) // 2 * 2], np.uint32)
    one, other = data.draw(st.permutations(range(len(before))))[:2]
    after = before.copy()
    after[[one, other]] = after[[other, one]]
    assert len(set(digests(before, after))) == 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.int64])
def test_the_digest_sees_a_lone_pixel_wherever_it_moves(dtype):
    images = np.zeros((1024, 1024), dtype)
    np.fill_diagonal(images, 1)
    seen = digests(*(image.view(np.uint32) for image in images))
    assert len(set(seen)) == len(seen)


def test_the_digest_sees_every_word_of_an_observation_of_64_kib():
    before = np.zeros(16_384, np.uint32)
    changed = []
    for place in (0, 1, 5000, 16_382, 16_383):
        changed.append(before.copy())
        changed[-1][place] = 1
    assert len(set(digests(before, *changed))) == len(changed) + 1
