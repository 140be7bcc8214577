"""Calls at the wrong time and with the wrong arguments: a typed error that says what to do, and nothing is lost."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
from functools import partial
from threading import Thread, Timer
from typing import Any

import numpy as np
import pytest
from contract_envs import LockInfoEnv, OldEnv
from gymnasium.error import NoAsyncCallError

from kit import CounterEnv, FarewellEnv
from kit.limits import set_limit
from multienv import (
    Deadlines,
    MultiEnv,
    SerialEnv,
    SubprocessEnv,
    SubprocessVectorEnv,
    SyncSubprocessEnvManager,
    create_subprocess_envs,
)
from multienv.errors import (
    CallPendingError,
    MultienvError,
    ResultNotPicklableError,
)

FACES = [SubprocessEnv, SerialEnv]


# --- timeouts -----------------------------------------------------------------------------------


def test_closing_while_an_answer_is_pending_still_closes_the_env(tmp_path, monkeypatch):
    """Also that of a worker which gets no time for a while."""
    set_limit(monkeypatch, "BUSY_PATIENCE", 30.0)  # the thread below may come late on a busy machine
    left = tmp_path / "left"
    env = SubprocessEnv(partial(FarewellEnv, left=left), deadlines=Deadlines(close=60.0)).initialize()
    env.reset(seed=0)
    pid = env.statistics().pid
    os.kill(pid, signal.SIGSTOP)
    env.step_async(0)
    goes_on = Timer(0.1, os.kill, (pid, signal.SIGCONT))
    goes_on.start()
    env.close()
    goes_on.join()
    assert left.exists(), "the process was killed instead of asked"


# --- what the env does wrong --------------------------------------------------------------------


@pytest.mark.parametrize("action", [1, 2])
@pytest.mark.parametrize("face", FACES)
def test_a_result_that_cannot_be_pickled_is_named_and_the_env_stays_usable(face, action):
    with face(LockInfoEnv) as env:
        env.reset(seed=0)
        pid = env.statistics().pid
        with pytest.raises(ResultNotPicklableError, match="lock") as caught:
            env.step(action)
        assert caught.value.command == "step"
        assert "Traceback" in caught.value.remote_traceback
        with pytest.raises(ResultNotPicklableError, match="reset"):
            env.reset(seed=1, options={"lock": True})
        with pytest.raises(ResultNotPicklableError, match="lock"):
            env.call("lock")
        env.reset(seed=1)
        assert env.step(0)[0][0] == 1
        with pytest.raises(ResultNotPicklableError):
            env.call("lock")
        assert env.step(0)[0][0] == 2, "a call does not end the episode"
        assert env.statistics().pid == pid, "its process was not lost"


@pytest.mark.parametrize("face", FACES)
def test_the_old_api_is_recognised(face):
    with face(OldEnv) as env:
        env.reset(seed=0)
        with pytest.raises(TypeError, match="terminated, truncated, info") as caught:
            env.step(1)
        assert isinstance(caught.value, MultienvError)
        for observation, told in (
            (np.arange(3), r"ndarray \[0 1 2\]"),
            (np.arange(2), r"ndarray \[0 1\]"),  # these could be unpacked
            ({"a": 1, "b": 2}, r"dict {'a': 1, 'b': 2}"),
            ((3, 4), r"tuple \(3, 4\)"),
            (None, "NoneType None"),
        ):
            wrong = rf"env.reset\(\) must return \(observation, info\), and returned {told}"
            with pytest.raises(TypeError, match=wrong) as caught:
                env.reset(options={"observation": observation})
            assert isinstance(caught.value, MultienvError)
        env.reset(seed=0)


def test_the_old_api_is_recognised_in_a_batch():
    with SubprocessVectorEnv([OldEnv] * 2) as envs:
        with pytest.raises(TypeError, match=r"must return \(observation, info\), and returned ndarray \[0 1\]"):
            envs.reset(options={"observation": np.arange(2)})
        envs.reset(seed=0)


def test_what_owns_envs_is_not_copied():
    for envs in (
        SubprocessEnv(CounterEnv),
        SubprocessVectorEnv([CounterEnv] * 2),
        MultiEnv([CounterEnv(), CounterEnv()]),
        SyncSubprocessEnvManager([CounterEnv] * 2),
    ):
        for copied in (copy.copy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                copied(envs)
        envs.close()


@pytest.mark.parametrize("kind", ["env", "batch", "list"])
def test_two_threads_that_step_the_same_envs_get_whole_steps_or_are_refused(kind: str) -> None:
    """Each step is one thread's: none is torn, given to both or counted twice."""
    env_fns = [partial(CounterEnv, horizon=None)] * 2
    envs: Any
    if kind == "env":
        envs = SubprocessEnv(env_fns[0])
        envs.initialize()
        action: Any = 1
    elif kind == "batch":
        envs, action = SubprocessVectorEnv(env_fns, envs_per_worker=1), np.array([1, 1])
    else:
        envs, action = MultiEnv(create_subprocess_envs(env_fns), autoreset_mode="DISABLED"), [1, 1]
    envs.reset(seed=3)
    seen: list[Any] = []
    refused: list[CallPendingError] = []
    wrong: list[BaseException] = []

    def step_often() -> None:
        for _ in range(2000):
            try:
                observation = envs.step(action)[0]
                seen.append(np.atleast_2d(np.array(observation))[:, 0].tolist())
            except CallPendingError as error:
                refused.append(error)
            except BaseException as error:
                wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [Thread(target=step_often) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong, wrong[:3]
    assert refused, "the threads have never met"
    assert "one call at a time" in str(refused[0])
    count = len(seen)
    assert sorted(seen) == [[float(step)] * (1 if kind == "env" else 2) for step in range(1, count + 1)]
    envs.step(action)  # and it goes on
    envs.close()


def test_a_thread_that_was_interrupted_and_has_ended_leaves_the_envs_to_others() -> None:
    with SubprocessEnv(partial(CounterEnv, horizon=None)) as env:
        env.reset(seed=3)

        def interrupted() -> None:
            fan = env._calls._fan
            fan.send("step", (1,))

        thread = Thread(target=interrupted)
        thread.start()
        thread.join()
        observation, *_, info = env.step(2)
        assert observation[0] == 1
        assert info["multienv"] == {"resumed": True}
        assert env.step(2)[0][0] == 2


def test_two_threads_that_collect_the_same_step_get_it_once() -> None:
    with SubprocessVectorEnv([partial(CounterEnv, horizon=None)] * 2, envs_per_worker=1) as envs:
        envs.reset(seed=3)
        got: list[Any] = []
        refused: list[Any] = []

        def collect() -> None:
            try:
                got.append(envs.step_wait()[0][:, 0].tolist())
            except (CallPendingError, NoAsyncCallError) as error:
                refused.append(error)

        for step in range(1, 100):
            envs.step_async(np.array([1, 1]))
            threads = [Thread(target=collect) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert got == [[float(step)] * 2]
            got.clear()
        assert len(refused) == 99
