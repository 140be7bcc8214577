"""Calls, attributes, wrong calls, failures and the end of vector envs: as gymnasium's AsyncVectorEnv has them."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from contract_envs import FarewellEnv, LockInfoEnv
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from vector_pairs import expect_same

from kit import CounterEnv, Fault, FaultError, FaultyEnv, SlowEnv
from multienv import SerialVectorEnv, SubprocessVectorEnv
from multienv.errors import (
    ActionError,
    EnvFnError,
    EnvsFailedError,
    ResetNeededError,
    ResultNotPicklableError,
    UsageError,
)

FACES = [SubprocessVectorEnv, SerialVectorEnv]
both_faces = pytest.mark.parametrize("face", FACES)
CARTPOLE = partial(gymnasium.make, "CartPole-v1")
WAITS = {"reset": "reset_async", "step": "step_async", "call": "call_async"}


class KeepsSeeds(CounterEnv):
    """Refuses the seed 1."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed == 1:
            raise ValueError("Error in reset")
        return super().reset(seed=seed, options=options)


def ask(envs: Any, command: str) -> None:
    arguments = {"reset": (), "step": (np.zeros(envs.num_envs, int),), "call": ("get_wrapper_attr", "length")}
    getattr(envs, WAITS[command])(*arguments[command])


@contextlib.contextmanager
def made(face: Any, env_fns: Any, **options: Any) -> Any:
    envs = face(env_fns, **options)
    try:
        yield envs
    finally:
        envs.close()


# --- calls and attributes -------------------------------------------------------------------------


@both_faces
def test_calls_and_attributes(face):
    with made(face, [CARTPOLE] * 3) as envs:
        assert envs.call("get_wrapper_attr", "gravity") == (9.8,) * 3
        assert envs.get_attr("gravity") == (9.8,) * 3
        envs.set_attr("gravity", [1.0, 2.0, 3.0])
        assert envs.get_attr("gravity") == (1.0, 2.0, 3.0)
        envs.set_attr("gravity", 4.0)
        assert envs.call("gravity") == (4.0,) * 3
        envs.set_attr("tags", [(1, 2), [3], None])
        assert envs.get_attr("tags") == ((1, 2), [3], None)
        with pytest.raises(ValueError, match="Values must be a list or tuple with length equal .*Got `2` values for 3"):
            envs.set_attr("gravity", (1.0, 2.0))
        for name in ("reset", "step", "close"):
            with pytest.raises(ValueError, match=f"use `{name}`"):
                envs.call(name)


@both_faces
def test_what_some_raise_in_a_call(face):
    with made(face, [CounterEnv] * 3) as envs:
        envs.reset(seed=0)
        with pytest.raises(AttributeError) as caught:
            envs.call("no_such_thing")
        assert sorted(caught.value.failures) == [0, 1, 2]
        envs.set_attr("mark", [1, 2, 3])
        assert envs.call("mark") == (1, 2, 3)
        assert envs.step(np.zeros(3, int))[0].shape[0] == 3


@both_faces
def test_what_a_call_returns_and_cannot_travel(face):
    with made(face, [LockInfoEnv] * 2) as envs:
        with pytest.raises(EnvsFailedError) as caught:
            envs.call("lock")
        assert all(isinstance(error, ResultNotPicklableError) for error in caught.value.failures.values())
        envs.reset(seed=0)
        with pytest.raises(EnvsFailedError) as caught:
            envs.step(np.array([0, 1]))
        assert list(caught.value.failures) == [1]
        observation, _, terminated, truncated = caught.value.results[0]
        assert observation[0] == 1
        assert not terminated
        assert not truncated


# --- wrong calls ------------------------------------------------------------------------------------


@both_faces
@pytest.mark.parametrize("pending", WAITS)
@pytest.mark.parametrize("command", WAITS)
def test_a_second_call_before_the_first_is_collected(face, pending, command):
    envs = face([CARTPOLE] * 2)
    envs.reset(seed=0)
    ask(envs, pending)
    with pytest.raises(
        AlreadyPendingCallError, match=f"Calling `{command}_async` while waiting for a pending call to `{pending}`"
    ) as caught:
        ask(envs, command)
    assert caught.value.name == pending
    with pytest.raises(AlreadyPendingCallError):
        envs.set_attr("gravity", 1.0)
    getattr(envs, f"{pending}_wait")()
    ask(envs, command)
    with pytest.warns(UserWarning, match=f"Calling `close` while waiting for a pending call to `{command}`"):
        envs.close()
    envs.close()


@both_faces
@pytest.mark.parametrize("command", WAITS)
def test_a_wait_without_a_call(face, command):
    with made(face, [CARTPOLE] * 2) as envs:
        match = f"Calling `{command}_wait` without any prior call to `{command}_async`"
        for _ in range(2):
            with pytest.raises(NoAsyncCallError, match=match) as caught:
                getattr(envs, f"{command}_wait")()
            assert caught.value.name == command
            envs.reset(seed=0)


@both_faces
def test_a_step_before_any_reset(face):
    with made(face, [CARTPOLE] * 2) as envs:
        with pytest.raises(ResetNeededError, match="Call reset"):
            envs.step(np.zeros(2, int))
        with pytest.raises(gymnasium.error.ResetNeeded):
            envs.step_async(np.zeros(2, int))
        envs.reset(seed=0)
        envs.step(np.zeros(2, int))


@both_faces
@pytest.mark.parametrize("command", ["reset", "step", "call", "get_attr", "set_attr", "render", "get_images"])
def test_after_close(face, command):
    envs = face([partial(CARTPOLE, render_mode="rgb_array")] * 2)
    envs.reset(seed=0)
    envs.close()
    arguments = {"step": (np.zeros(2, int),), "call": ("length",), "get_attr": ("length",), "set_attr": ("length", 1.0)}
    with pytest.raises(ClosedEnvironmentError, match=f"Trying to operate on `{face.__name__}`, after a call to `close"):
        getattr(envs, command)(*arguments.get(command, ()))


@both_faces
@pytest.mark.parametrize(
    "actions",
    [np.zeros(1, int), np.zeros(3, int), [0], [0, 1, 0], 0, None, np.zeros((2, 2), int), [], "01x"],
    ids=repr,
)
def test_actions_of_another_length(face, actions):
    """Nothing is sent: the next step is as if there had been no such call."""
    theirs = SyncVectorEnv([CARTPOLE] * 2)
    with made(face, [CARTPOLE] * 2) as envs:
        expect_same(envs.reset(seed=0), theirs.reset(seed=0))
        with pytest.raises(ActionError):
            envs.step(actions)
        expect_same(envs.step([1, 0]), theirs.step([1, 0]))
        expect_same(envs.step((np.int64(1), 0)), theirs.step(np.array([1, 0])))


@both_faces
def test_ended_envs_are_to_be_reset_where_nobody_else_does(face):
    with made(face, [partial(CounterEnv, horizon=1 + index) for index in range(2)], autoreset_mode="Disabled") as envs:
        envs.reset(seed=0)
        _, _, terminations, _, _ = envs.step(np.zeros(2, int))
        assert terminations.tolist() == [True, False]
        with pytest.raises(ResetNeededError, match=r"no episode in envs \[0\].*reset_mask"):
            envs.step(np.zeros(2, int))
        envs.reset(options={"reset_mask": terminations})
        assert envs.step(np.zeros(2, int))[2].tolist() == [True, True]


@both_faces
@pytest.mark.parametrize(
    ("mask", "kind", "match"),
    [
        ([True, False], TypeError, "must be a numpy array"),
        (np.array([1, 0]), TypeError, "`dtype=np.bool_`"),
        (np.array([True]), ValueError, r"must have shape `\(2,\)`"),
        (np.array([False, False]), ValueError, "at least one True value"),
    ],
)
def test_masks_that_make_no_sense(face, mask, kind, match):
    with made(face, [CARTPOLE] * 2) as envs:
        envs.reset(seed=0)
        with pytest.raises(kind, match=match):
            envs.reset(options={"reset_mask": mask})
        envs.step(np.zeros(2, int))


@both_faces
@pytest.mark.parametrize("seed", [[1], [1, 2, 3], -1, 1.5, "a", [1, -2]], ids=repr)
def test_seeds_that_make_no_sense(face, seed):
    with made(face, [CARTPOLE] * 2) as envs, pytest.raises(ValueError):
        envs.reset(seed=seed)


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"worker": print}, ValueError, "worker. runs AsyncVectorEnv's own"),
        ({"observation_mode": "other"}, ValueError, "observation_mode"),
        ({"observation_mode": (1, 2)}, TypeError, "observation_mode"),
        ({"autoreset_mode": "sometimes"}, ValueError, "sometimes"),
        ({"max_concurrency": 0}, ValueError, "max_concurrency"),
        ({"max_concurrency": 1.5}, ValueError, "max_concurrency"),
        ({"envs_per_worker": 0}, ValueError, "envs_per_worker"),
        ({"envs_per_worker": "all"}, ValueError, "envs_per_worker"),
        ({"context": "thread"}, ValueError, "thread"),
    ],
)
def test_arguments_that_make_no_sense(options, kind, match):
    with pytest.raises(kind, match=match):
        SubprocessVectorEnv([CARTPOLE], **options)


@both_faces
def test_no_env_fns(face):
    with pytest.raises(UsageError, match="env_fns is empty"):
        face([])
    with pytest.raises(EnvFnError):
        face([CARTPOLE, "CartPole-v1"])


# --- failures -----------------------------------------------------------------------------------------


@both_faces
@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
def test_one_raises_in_a_step(face, mode):
    """The results of the others are not lost, and their episodes go on; the one that failed begins anew."""
    faulty = partial(FaultyEnv, fault=Fault("raise", "step", at=3), horizon=30)
    env_fns = [partial(CounterEnv, horizon=30), faulty, partial(CounterEnv, horizon=30)]
    reference = SyncVectorEnv([env_fns[0]] * 3)
    with made(face, env_fns, autoreset_mode=mode) as envs:
        envs.reset(seed=0)
        reference.reset(seed=0)
        for step in range(10):
            expected = reference.step(np.full(3, step % 3))
            if step == 2:
                with pytest.raises(FaultError) as caught:
                    envs.step(np.full(3, step % 3))
                error: Any = caught.value
                assert list(error.failures) == [1]
                assert "Traceback" in error.failures[1].remote_traceback
                assert error.failures[1].env_index == 1
                assert error.results[1] is None
                for index in (0, 2):
                    expect_same(error.results[index][0], expected[0][index], step)
                    assert error.results[index][1] == expected[1][index]
                if mode is AutoresetMode.DISABLED:
                    envs.reset(options={"reset_mask": np.array([False, True, False])})
            else:
                batch = envs.step(np.full(3, step % 3))
                for one, other in zip(batch[:4], expected[:4], strict=True):
                    expect_same(one[[0, 2]], other[[0, 2]], step)


@both_faces
@pytest.mark.parametrize("seeds", [[1, 0], [0, 1], [1, 1]], ids=str)
def test_some_raise_in_a_reset(face, seeds):
    with made(face, [KeepsSeeds] * 2) as envs:
        with pytest.raises(ValueError, match="Error in reset") as caught:
            envs.reset(seed=seeds)
        assert list(caught.value.failures) == [index for index in range(2) if seeds[index] == 1]
        observations, _ = envs.reset(seed=[0, 2])
        assert len(observations) == 2


@both_faces
def test_some_cannot_be_built(face):
    def broken() -> Any:
        raise OSError("no simulator here")

    with pytest.raises(EnvsFailedError, match="no simulator here") as caught:
        face([CARTPOLE, broken, CARTPOLE])
    assert isinstance(caught.value, OSError)


# --- timeouts and the end --------------------------------------------------------------------------------


def test_what_takes_longer_is_waited_for_once_more():
    with made(SubprocessVectorEnv, [SlowEnv, partial(SlowEnv, reset_seconds=0.3, step_seconds=0.3)]) as envs:
        envs.reset_async(seed=0)
        with pytest.raises(TimeoutError):
            envs.reset_wait(timeout=0)
        envs.reset_wait()
        envs.step_async(np.zeros(2, int))
        with pytest.raises(TimeoutError):
            envs.step_wait(timeout=0)
        with pytest.raises(AlreadyPendingCallError):
            envs.step(np.zeros(2, int))
        assert len(envs.step_wait()[1]) == 2


@pytest.mark.parametrize("arguments", [{"terminate": True}, {"timeout": 0.1}, {"timeout": 0, "unknown": 1}], ids=str)
def test_close_does_not_wait_for_a_call(arguments):
    """The step takes an hour; a test has two minutes."""
    envs = SubprocessVectorEnv([partial(SlowEnv, step_seconds=3600.0)] * 2)
    envs.reset(seed=0)
    envs.step_async(np.zeros(2, int))
    with pytest.warns(UserWarning, match="pending call to `step`"):
        envs.close(**arguments)


@both_faces
def test_close_closes_the_envs_and_again_does_nothing(face, tmp_path):
    envs = face([partial(FarewellEnv, left=tmp_path / f"{index}") for index in range(3)])
    envs.reset(seed=0)
    envs.close()
    envs.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


def test_dropped_without_close():
    """What conftest looks for at the end of each test: nothing is left."""
    envs = SubprocessVectorEnv([CARTPOLE] * 3)
    envs.reset(seed=0)
    pids = [one.pid for one in envs.statistics()]
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert os.getpid() not in pids
    del envs
    gc.collect()


@both_faces
def test_what_it_says_of_itself(face):
    with made(face, [CARTPOLE] * 3, autoreset_mode="SameStep") as envs:
        assert repr(envs) == f"{face.__name__}(num_envs=3)"
        assert envs.unwrapped is envs
        assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        assert envs.metadata["render_fps"] == 50
        assert [one.state for one in envs.statistics()]
    assert envs.closed


# --- nothing is sent, or nothing is lost ------------------------------------------------------------


@pytest.mark.parametrize("command", ["step", "reset", "call"])
@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), -1, 10**400, "x", True])
def test_a_timeout_that_is_none_changes_nothing(command, timeout):
    with made(SubprocessVectorEnv, [CounterEnv] * 2, envs_per_worker=1) as envs:
        envs.reset(seed=1)
        if command == "call":
            envs.call_async("get_wrapper_attr", "horizon")
        else:
            ask(envs, command)
        with pytest.raises(UsageError, match="timeout is"):
            getattr(envs, f"{command}_wait")(timeout)
        getattr(envs, f"{command}_wait")(5)
        count = 1 if command == "step" else 0
        assert envs.step(np.zeros(2, int))[0][:, 0].tolist() == [count + 1] * 2


@both_faces
@pytest.mark.parametrize("space", [spaces.Text(5, charset="ab"), spaces.Box(-1.0, 1.0, (2,))])
def test_actions_of_which_one_cannot_be_pickled_are_not_sent(face, space):
    """Not even to the workers before."""
    class_options = {"envs_per_worker": 1} if face is SubprocessVectorEnv else {}
    good = ["a", "b"] if isinstance(space, spaces.Text) else np.zeros((2, 2), np.float32)
    bad = np.array([[0.0, 0.0], [0.0, threading.Lock()]], object)
    with made(face, [partial(TextEnv, space)] * 2, **class_options) as envs:
        envs.reset(seed=1)
        with pytest.raises(ActionError, match="Nothing was sent"):
            envs.step(["a", threading.Lock()] if isinstance(space, spaces.Text) else bad)
        assert envs.step(good)[0][:, 0].tolist() == [1.0, 1.0]


class TextEnv(gymnasium.Env[Any, Any]):
    """Counts its steps, whatever the actions."""

    observation_space = spaces.Box(0.0, 1e9, (1,))

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        self.action_space = action_space
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.full(1, self.steps, np.float32), 0.0, False, False, {}
