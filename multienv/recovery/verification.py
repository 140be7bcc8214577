"""Is the replayed env the lost one? Held against what the caller already saw."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import GraphInstance

from multienv.wire.messages import EVIDENCE, IRREGULAR, REPLY, STEPPED, TAILED, TERMINATED, TRUNCATED, is_cut


def first_difference(recorded: Sequence[bytes], replayed: Sequence[bytes]) -> str:
    """Where the two lists of evidence first differ, in words; ``""`` when they agree to the bit."""
    for place, (before, after) in enumerate(zip(recorded, replayed, strict=True)):
        if before[EVIDENCE:] != after[EVIDENCE:]:
            told = difference(before, after)
            if told:
                return f"{told} at request {place + 1} of {len(recorded)}"
    return ""


def difference(before: bytes, after: bytes) -> str:
    """What differs between two pieces of evidence, in words; ``""`` when they agree to the bit."""
    if before[EVIDENCE:] == after[EVIDENCE:]:
        return ""
    _, _, _, kind_before, flags_before, tag_before, reward_before = REPLY.unpack_from(before)
    _, _, _, kind_after, flags_after, tag_after, reward_after = REPLY.unpack_from(after)
    if kind_before != kind_after:
        return "one raised and the other did not"
    if kind_before != STEPPED:
        return ""
    ends = TERMINATED | TRUNCATED
    if flags_before & ends != flags_after & ends:
        return "the flags differ"
    if flags_before & flags_after & IRREGULAR:
        return _irregular_difference(before, after)
    if (tag_before, reward_before) != (tag_after, reward_after) and reward_before == reward_before:
        return f"the reward was {reward_before!r} and is {reward_after!r}"
    return "the observation differs"


def _irregular_difference(before: bytes, after: bytes) -> str:
    lengths = len(before), len(after)
    if REPLY.size in lengths or is_cut(before) or is_cut(after):  # too large to keep; the header has the reward
        return "the reward differs" if before[EVIDENCE : min(lengths)] != after[EVIDENCE : min(lengths)] else ""
    # Equal values do not always pickle to equal bytes: what is the same object in one may be a copy in the other.
    agree = _groups_alike if REPLY.unpack_from(before)[4] & TAILED else alike
    return "" if agree(before[REPLY.size :], after[REPLY.size :]) else "the observation or the reward differs"


def _groups_alike(one: bytes, other: bytes) -> bool:
    """Of several envs the observations are pickled one by one."""
    (seen, *rest), (replayed, *others) = pickle.loads(one), pickle.loads(other)
    return same(rest, others) and len(seen) == len(replayed) and all(map(alike, seen, replayed))


def alike(one: bytes, other: bytes) -> bool:
    """Whether these pickles hold the same. Those that cannot be read here do if their bytes are the same."""
    if one == other:
        return True
    try:
        return same(pickle.loads(one), pickle.loads(other))
    except Exception:  # foreign code
        return False


def _is_tensor(kind: type) -> bool:
    """Torch's, or of another such library: the pickle has the address of its memory in it."""
    return hasattr(kind, "__dlpack__") and hasattr(kind, "__array__") and not issubclass(kind, np.ndarray)


def same(one: Any, other: Any) -> bool:
    """Equality to the bit, through nested containers; NaN equals NaN."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and not one.dtype.hasobject:
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, GraphInstance | tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float | np.generic) and not np.asarray(one).dtype.hasobject:
        return np.asarray(one).tobytes() == np.asarray(other).tobytes()
    if one is other or pickle.dumps(one) == pickle.dumps(other):
        return True
    try:
        if _is_tensor(type(one)):
            return one.shape == other.shape and one.dtype == other.dtype and same(np.asarray(one), np.asarray(other))
        return bool(one == other)
    except Exception:  # foreign code
        return False
