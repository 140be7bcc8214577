"""Infos of numbers take a way of their own from the env to the caller; nobody sees which.

The odd ones: for numbers of all types, under the same keys or others, see unit/test_wire_values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from contract_envs import TellingEnv

from kit.side_by_side import beside_gymnasium, run_side_by_side
from multienv import SerialVectorEnv, SubprocessEnv, SubprocessVectorEnv

Tell = Callable[[int, int], dict[Any, Any]]  # index, step → info


class Number(float):
    """Is more than its bits."""


SHARED = {"count": 0}


def one_that_all_share(index: int, step: int) -> dict[Any, Any]:
    SHARED["count"] = 10 * step + index
    return SHARED


TELLS: dict[str, Tell] = {
    "of_the_first_envs": lambda index, step: {"a": step} if index < 2 else {},
    "one_that_all_share": one_that_all_share,
    "masks_of_its_own": lambda index, step: {"a": 1, "_a": False},
    "subclasses": lambda index, step: {
        "a": Number(step),
        "b": 1j,
        "": 1,
        "nothing": None,
        "nested": {"a": {"b": step}},
    },
    "more_now_and_then": lambda index, step: {"a": 1.0, "b": 2} if step % 2 else {"a": 1.0},
    "keys_of_every_kind": lambda index, step: {"\ud800": 1, "a\0": 2.0, "a:b": np.float64(3), " ": True, "0": step},
    "long_keys": lambda index, step: {"a" * 70_000: np.float64(step)},
    "many_keys": lambda index, step: {f"key {number}{'.' * 100}": np.float32(step) for number in range(700)},
    "unsigned": lambda index, step: {"a": np.uint64(2**64 - 1), "b": np.uint8(255)},
}
# gymnasium cannot merge these.
OF_ONE: dict[str, Tell] = {
    "too_large": lambda index, step: {"a": 2**62 * step},
    "of_one_final": lambda index, step: {"final_obs": step, (1,): 1.0, "array": np.zeros(2)},
    "with_text_at_last": lambda index, step: {"a": 1 if step < 3 else "text"},
}


def every_kind(index: int, step: int) -> dict[Any, Any]:
    """Each kind of infos for three steps in a row, one after the other."""
    kinds = list(TELLS.values())
    return kinds[step // 3 % len(kinds)](index, step % 3)


@pytest.mark.parametrize("face", [partial(SubprocessVectorEnv, envs_per_worker=2), SerialVectorEnv])
def test_each_kind_as_gymnasium_has_it(face):
    env_fns = [partial(TellingEnv, every_kind, index, horizon=1000) for index in range(4)]
    with beside_gymnasium(face, env_fns) as pair:
        run_side_by_side(*pair, 3 * len(TELLS) + 5)


@pytest.mark.parametrize("tell", [every_kind, *OF_ONE.values()], ids=["every kind", *OF_ONE])
def test_one_env_gives_the_very_types(tell):
    plain = TellingEnv(tell, 2, horizon=1000)
    with SubprocessEnv(partial(TellingEnv, tell, 2, horizon=1000)) as env:
        for one in (plain, env):
            one.reset(seed=1)
        for _ in range(3 * len(TELLS)):
            expected, info = plain.step(0)[4], env.step(0)[4]
            assert repr(info) == repr(expected)
            assert list(map(type, info.values())) == list(map(type, expected.values()))
