"""Infos that gymnasium cannot merge: told of once, with all that the call returns, and the envs go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from contract_envs import INFOS, UnmergeableEnv
from gymnasium.vector import SyncVectorEnv

from multienv import SerialVectorEnv, SubprocessVectorEnv
from multienv.errors import InfosNotMergedError

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
