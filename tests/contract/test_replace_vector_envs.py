"""``replace_vector_envs()``: multienv's classes stand under the names of gymnasium's until it is undone."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector.async_vector_env import _async_worker
from small_env import SmallEnv

import multienv
from multienv import RestartPolicy, SubprocessEnv, SubprocessVectorEnv

# In a list: names of modules are replaced.
ASYNC, SYNC, MAKE = range(3)
OWN: list[Any] = [gymnasium.vector.AsyncVectorEnv, gymnasium.vector.SyncVectorEnv, gymnasium.make]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a module that has imported the names before."""
    module: Any = ModuleType("library_of_somebody")
    module.AsyncVectorEnv, module.Renamed, module.make = OWN
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture(autouse=True)
def originals_are_back() -> Iterator[None]:
    yield
    assert gymnasium.vector.AsyncVectorEnv is gymnasium.vector.async_vector_env.AsyncVectorEnv is OWN[ASYNC]
    assert gymnasium.vector.SyncVectorEnv is OWN[SYNC]
    assert gymnasium.make is OWN[MAKE]


def test_names_are_replaced_wherever_they_were_imported_and_put_back(library: Any) -> None:
    replaced = multienv.replace_vector_envs()
    stand_in: Any = gymnasium.vector.AsyncVectorEnv
    assert stand_in is gymnasium.vector.async_vector_env.AsyncVectorEnv is library.AsyncVectorEnv
    assert stand_in is not OWN[ASYNC]
    assert issubclass(stand_in, SubprocessVectorEnv)
    assert gymnasium.vector.SyncVectorEnv is library.Renamed
    assert gymnasium.make is library.make
    assert pickle.loads(pickle.dumps(stand_in)) is stand_in
    with multienv.replace_vector_envs(serial=True, single=True) as inner:
        assert issubclass(gymnasium.vector.SyncVectorEnv, SubprocessVectorEnv)
        assert gymnasium.vector.SyncVectorEnv is library.Renamed
        assert gymnasium.make is library.make
        assert gymnasium.make is not OWN[MAKE]
    inner.undo()
    assert gymnasium.vector.AsyncVectorEnv is stand_in
    replaced.undo()
    assert library.AsyncVectorEnv is OWN[ASYNC]
    assert library.Renamed is OWN[SYNC]
    assert library.make is OWN[MAKE]


def test_instances_and_subclasses_are_of_the_class_that_stands_there() -> None:
    with multienv.replace_vector_envs() as replaced:

        class Mine(gymnasium.vector.AsyncVectorEnv):
            def __init__(self, number: int) -> None:
                super().__init__([SmallEnv] * number, False, context="fork")

        made = [
            gymnasium.vector.AsyncVectorEnv([SmallEnv] * 2, True, True, None, autoreset_mode="SameStep"),
            gymnasium.make_vec("CartPole-v1", 2, "async"),
            Mine(3),
        ]
        for envs in made:
            assert isinstance(envs, gymnasium.vector.AsyncVectorEnv)
            assert isinstance(envs, SubprocessVectorEnv)
            envs.reset(seed=0)
            os.kill(envs.statistics()[0].pid, signal.SIGKILL)
            envs.step(envs.action_space.sample())
            envs.close()
        assert made[0].metadata["autoreset_mode"] is gymnasium.vector.AutoresetMode.SAME_STEP
        assert replaced.summary()["envs"] == 7
    told = replaced.summary()
    assert told["losses"] == {"SIGKILL": 3}
    assert told["outcomes"]["exact"] == 3


def test_what_cannot_be_kept_is_said_once_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    with multienv.replace_vector_envs(), caplog.at_level(logging.WARNING, "multienv"):
        for _ in range(2):
            gymnasium.vector.AsyncVectorEnv([SmallEnv], context="fork").close()
        envs = gymnasium.vector.AsyncVectorEnv([SmallEnv], False, worker=_async_worker, context="fork")
        assert not isinstance(envs, SubprocessVectorEnv)
        assert isinstance(envs, gymnasium.vector.AsyncVectorEnv)
        envs.close()
    said = [record.getMessage() for record in caplog.records if __file__ in record.getMessage()]
    assert len(said) == 2
    assert f"{__file__}, line " in said[0]
    assert "context='fork' is passed over" in said[0]
    assert "AsyncVectorEnv is gymnasium's own here: A custom `worker` runs" in said[1]


class OldEnv:
    """Has the spaces of an env, and is none of gymnasium's."""

    observation_space, action_space = SmallEnv.observation_space, SmallEnv.action_space
    metadata: Any = {}  # noqa: RUF012
    render_mode = spec = None

    def close(self) -> None:
        """Do nothing."""


def test_env_that_multienv_refuses_is_made_by_the_library(caplog: pytest.LogCaptureFixture) -> None:
    with multienv.replace_vector_envs(serial=True), caplog.at_level(logging.WARNING, "multienv"):
        envs: Any = gymnasium.vector.SyncVectorEnv([OldEnv])  # type: ignore[list-item]
        assert type(envs.envs[0]) is OldEnv
    assert "SyncVectorEnv is gymnasium's own here" in caplog.text


def test_env_that_exists_stays_in_the_process(caplog: pytest.LogCaptureFixture) -> None:
    env = SmallEnv()
    with multienv.replace_vector_envs(serial=True), caplog.at_level(logging.WARNING, "multienv"):
        envs: Any = gymnasium.vector.SyncVectorEnv([lambda: env])
        assert envs.envs[0] is env
        assert isinstance(envs, gymnasium.vector.SyncVectorEnv)
    assert "It is given an env that exists already" in caplog.text


def test_single_env_lives_in_a_worker_and_envs_in_workers_do_not() -> None:
    with multienv.replace_vector_envs(single=True, serial=True) as replaced:
        twin = OWN[MAKE]("CartPole-v1")
        with gymnasium.make("CartPole-v1") as env:
            assert isinstance(env, SubprocessEnv)
            assert np.array_equal(env.reset(seed=1)[0], twin.reset(seed=1)[0])
            os.kill(env.statistics().pid, signal.SIGKILL)
            assert np.array_equal(env.step(1)[0], twin.step(1)[0])
        envs = gymnasium.make_vec("CartPole-v1", 2, "sync")  # an env in a worker makes no worker of its own
        assert isinstance(envs, SubprocessVectorEnv)
        assert "SubprocessEnv" not in envs.call("__str__")[0]
        envs.close()
        with pytest.raises(gymnasium.error.NameNotFound):
            gymnasium.make("NoSuchEnv-v1")
    assert replaced.summary()["envs"] == 3
    assert replaced.summary()["outcomes"]["exact"] == 1


def test_options_are_those_of_all_envs_and_wrong_ones_are_refused_at_once() -> None:
    seen: list[Any] = []
    with multienv.replace_vector_envs(
        restart=RestartPolicy(on_crash="truncate"), hooks=[seen.append], envs_per_worker=2
    ) as replaced:
        envs: Any = gymnasium.vector.AsyncVectorEnv([SmallEnv] * 2)
        assert envs.envs_per_worker == [2]
        envs.reset(seed=0)
        os.kill(envs.statistics()[0].pid, signal.SIGKILL)
        assert envs.step(envs.action_space.sample())[3].all()
        envs.close()
    assert len(seen) == 2
    assert replaced.summary()["outcomes"]["truncated"] == 1
    with pytest.raises(multienv.UsageError, match="restart is 5"):
        multienv.replace_vector_envs(restart=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="autoreset_mode"):
        multienv.replace_vector_envs(autoreset_mode="SameStep")  # type: ignore[call-arg]
