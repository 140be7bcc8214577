"""Infos of numbers take a way of their own from the env to the caller, and nobody sees which: here the odd ones, and in
unit/test_wire_values numbers of all types. Those that gymnasium cannot merge are told of once, and the envs go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from contract_envs import INFOS, TellingEnv, UnmergeableEnv
from gymnasium.vector import SyncVectorEnv

from kit.side_by_side import beside_gymnasium, run_side_by_side
from multienv import SerialVectorEnv, SubprocessEnv, SubprocessVectorEnv
from multienv.errors import InfosNotMergedError

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


FACES = [
    partial(SubprocessVectorEnv, envs_per_worker=1),
    partial(SubprocessVectorEnv, envs_per_worker=2),
    SerialVectorEnv,
]


def envs_at(at: int) -> list[Any]:
    return [partial(UnmergeableEnv, index, at) for index in range(2)]


@contextmanager
def refused(name: str) -> Iterator[Any]:
    with pytest.raises(InfosNotMergedError, match=rf"{name}\(\): the infos .* cannot be merged") as caught:
        yield caught
    assert isinstance(caught.value, TypeError)  # as gymnasium has it
    assert type(caught.value.__cause__) is TypeError


def test_gymnasium_cannot_merge_these() -> None:
    with closing(SyncVectorEnv(envs_at(0))) as envs, pytest.raises(TypeError):
        envs.reset(seed=0)


@pytest.mark.parametrize("face", FACES)
def test_a_step_and_a_reset_whose_infos_cannot_be_merged_are_done_and_in_the_error(face: Any) -> None:
    with face(envs_at(1)) as envs:
        envs.reset(seed=3)
        with refused("step") as caught:
            envs.step(np.array([1, 2]))
        observations, rewards, terminations, truncations, infos = caught.value.results
        assert observations[:, [0, 3]].tolist() == [[1, 1], [1, 2]]
        assert rewards.shape == terminations.shape == truncations.shape == (2,)
        assert infos == INFOS
        assert envs.step(np.array([1, 2]))[0][:, 0].tolist() == [2, 2]
    with face(envs_at(0)) as envs:
        with refused("reset") as caught:
            envs.reset(seed=3)
        assert caught.value.results[0][:, 0].tolist() == [0, 0]
        assert caught.value.results[1] == INFOS
        assert envs.step(np.array([1, 2]))[0][:, 0].tolist() == [1, 1]


@pytest.mark.parametrize("face", FACES)
def test_recv_of_infos_that_cannot_be_merged_tells_of_them_once_and_the_stream_goes_on(face: Any) -> None:
    with face(envs_at(1)) as envs:
        envs.reset_async(seed=3)
        envs.recv(2)
        envs.send(np.array([1, 2]))
        with refused("recv") as caught:
            envs.recv(2)
        observations, _, _, _, infos, indices = caught.value.results
        rows = {env: row.tolist() for env, row in zip(indices, observations[:, [0, 3]], strict=True)}
        assert rows == {0: [1, 1], 1: [1, 2]}
        assert dict(zip(indices, infos, strict=True)) == dict(enumerate(INFOS))
        envs.send(np.array([1, 2]))
        assert envs.recv(2)[0][:, 0].tolist() == [2, 2]


@pytest.mark.parametrize("face", FACES)
def test_a_rollout_whose_infos_cannot_be_merged_is_done_and_in_the_error(face: Any) -> None:
    with face(envs_at(2)) as envs:
        envs.reset(seed=3)
        with refused("rollout") as caught:
            envs.rollout(lambda observations: np.ones(len(observations), np.int64), 3)
        fragment = caught.value.results
        assert fragment.observations[-1][:, 0].tolist() == [2, 2]
        assert fragment.infos[1] == INFOS
        assert envs.step(np.array([1, 2]))[0][:, 0].tolist() == [4, 4]


def test_infos_in_lists_need_no_merging() -> None:
    with SubprocessVectorEnv(envs_at(1), merge_infos=False) as envs:
        envs.reset(seed=3)
        assert envs.step(np.array([1, 2]))[4] == INFOS


def test_infos_are_merged_by_the_method_of_gymnasium_s_that_a_subclass_overrides() -> None:
    class Telling(SerialVectorEnv):
        def _add_info(self, vector_infos, env_info, env_num):
            return super()._add_info(vector_infos, {f"of_{key}": value for key, value in env_info.items()}, env_num)

    with Telling([partial(TellingEnv, lambda index, step: {"a": step})] * 2) as envs:
        of_reset = envs.reset()[-1]
        of_step = envs.step(envs.action_space.sample())[-1]
        assert of_reset.keys() == of_step.keys() == {"of_a", "_of_a"}
