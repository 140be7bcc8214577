"""Infos of numbers come back and are merged as gymnasium merges them; all else is left to pickle, one slot at a time."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from hypothesis import given
from hypothesis import strategies as st
from wire_strategies import fingerprint

from multienv.wire.infos import InfoMerger, InfoPacker, NumberInfos, pack_extras, unpack_extras
from multienv.wire.messages import Failure, dumps

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
FAILURE = Failure("ValueError", "oh", "Traceback", None)


def alike(rows: int) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Infos with the same keys, in one order, and the same types."""
    shapes = st.dictionaries(KEYS, st.sampled_from(KINDS), min_size=1, max_size=5)
    infos = shapes.flatmap(lambda shape: st.lists(st.fixed_dictionaries(shape), min_size=rows, max_size=rows))
    return infos.map(lambda many: [{key: one[key] for key in many[0]} for one in many])


def packed(*infos: dict[Any, Any]) -> bytes:
    """As a worker packs those of all its envs."""
    return InfoPacker(len(infos)).numbers(list(enumerate(infos)))


def unpacked(mail: bytes, start: int = 0) -> Any:
    extras, illegible = unpack_extras(mail, start)
    assert not illegible
    return extras.infos


@given(alike(3))
def test_infos_of_numbers_come_back_with_their_types_and_bits(infos):
    told = unpacked(b"evidence" + packed(*infos), len(b"evidence"))
    assert type(told) is NumberInfos
    for _ in range(2):
        assert fingerprint(list(told)) == fingerprint(list(enumerate(infos)))


@given(alike(4))
def test_infos_of_several_workers_are_merged_as_gymnasium_merges_them(infos):
    ours = InfoMerger(4).merged([unpacked(packed(infos[0])), unpacked(packed(*infos[1:]))])
    theirs: dict[str, Any] = {}
    batch: VectorEnv[Any, Any, Any] = VectorEnv()
    batch.num_envs = 4
    for index, info in enumerate(infos):
        theirs = batch._add_info(theirs, info, index)
    assert fingerprint(ours) == fingerprint(theirs)
    assert all(value.flags.writeable for value in ours.values())


# --- everything else --------------------------------------------------------------------------


def test_infos_failures_and_generators_travel_together():
    mail = pack_extras([(1, dumps({"text": "a"})), (4, dumps({}))], {2: FAILURE}, {4: b"generators"})
    extras, illegible = unpack_extras(b"xyz" + mail, 3)
    assert extras.infos == [(1, {"text": "a"}), (4, {})]
    assert (extras.failures, extras.generators, illegible) == ({2: FAILURE}, {4: b"generators"}, {})


def refuse() -> None:
    raise RuntimeError("not here")


class SentOnly:
    def __reduce__(self) -> Any:
        return refuse, ()


def test_an_info_that_cannot_be_unpickled_costs_its_own_slot_alone():
    extras, illegible = unpack_extras(pack_extras([(0, dumps({"a": 1})), (1, pickle.dumps(SentOnly())), (2, dumps({"b": 2}))], {}))  # fmt: skip
    assert extras.infos == [(0, {"a": 1}), (2, {"b": 2})]
    assert list(illegible) == [1]
    assert str(illegible[1]) == "not here"
