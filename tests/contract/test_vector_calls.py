"""Calls, attributes, wrong calls, failures and the end of vector envs: as gymnasium's AsyncVectorEnv has them."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from contract_envs import FarewellEnv
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from vector_pairs import expect_same

from kit import CounterEnv, Fault, FaultError, FaultyEnv
from multienv import RestartPolicy, SerialVectorEnv, SubprocessVectorEnv, make_vec
from multienv.errors import (
    ActionError,
    EnvError,
    EnvsFailedError,
    ResetNeededError,
    UsageError,
)

FACES = [SubprocessVectorEnv, SerialVectorEnv]
both_faces = pytest.mark.parametrize("face", FACES)
CARTPOLE = partial(gymnasium.make, "CartPole-v1")
ACTIONS = np.array([1, 2])
WAITS = {"reset": "reset_async", "step": "step_async", "call": "call_async"}


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


# --- wrong calls ------------------------------------------------------------------------------------


@both_faces
@pytest.mark.parametrize("pending", WAITS)
def test_a_second_call_before_the_first_is_collected(face, pending):
    envs = face([CARTPOLE] * 2)
    envs.reset(seed=0)
    for command in WAITS:
        ask(envs, pending)
        with pytest.raises(
            AlreadyPendingCallError, match=f"Calling `{command}_async` while waiting for a pending call to `{pending}`"
        ) as caught:
            ask(envs, command)
        assert caught.value.name == pending
        with pytest.raises(AlreadyPendingCallError):
            envs.set_attr("gravity", 1.0)
        getattr(envs, f"{pending}_wait")()
    ask(envs, pending)
    with pytest.warns(UserWarning, match=f"Calling `close` while waiting for a pending call to `{pending}`"):
        envs.close()
    envs.close()


@both_faces
def test_a_wait_without_a_call(face):
    with made(face, [CARTPOLE] * 2) as envs:
        for command in (*WAITS, *WAITS):
            match = f"Calling `{command}_wait` without any prior call to `{command}_async`"
            with pytest.raises(NoAsyncCallError, match=match) as caught:
                getattr(envs, f"{command}_wait")()
            assert caught.value.name == command
            envs.reset(seed=0)


@both_faces
def test_after_close(face):
    envs = face([partial(CARTPOLE, render_mode="rgb_array")] * 2)
    envs.reset(seed=0)
    envs.close()
    arguments = {"step": (np.zeros(2, int),), "call": ("length",), "get_attr": ("length",), "set_attr": ("length", 1.0)}
    match = f"Trying to operate on `{face.__name__}`, after a call to `close"
    for command in ("reset", "step", "call", "get_attr", "set_attr", "render", "get_images"):
        with pytest.raises(ClosedEnvironmentError, match=match):
            getattr(envs, command)(*arguments.get(command, ()))


@both_faces
def test_actions_of_another_length(face):
    """Nothing is sent: the next step is as if there had been no such call."""
    theirs = SyncVectorEnv([CARTPOLE] * 2)
    with made(face, [CARTPOLE] * 2) as envs:
        expect_same(envs.reset(seed=0), theirs.reset(seed=0))
        for actions in (0, np.int64(1), None, np.zeros(3, int), [0], [0, 1, 0], np.zeros((2, 2), int), [], "01x"):
            with pytest.raises(ActionError) as caught:
                envs.step(actions)
            if np.shape(actions) == () and not isinstance(actions, str):  # also of gymnasium's type
                with pytest.raises(TypeError):
                    theirs.step(actions)
                assert isinstance(caught.value, TypeError), actions
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


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"worker": print}, ValueError, "worker. runs AsyncVectorEnv's own"),
        ({"autoreset_mode": "sometimes"}, ValueError, "sometimes"),
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
    with pytest.raises(UsageError):
        face([CARTPOLE, "CartPole-v1"])


# --- failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@both_faces
def test_one_raises_in_a_step(face, mode):
    """The results of the others are not lost, and their episodes go on; the one that failed begins anew."""
    with made(
        face, [CounterEnv, partial(FaultyEnv, fault=Fault("raise", "step", at=3)), CounterEnv], autoreset_mode=mode
    ) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            envs.step([1, 2, 3])
        with pytest.raises(FaultError) as caught:
            envs.step([1, 2, 3])
        error: Any = caught.value
        assert list(error.failures) == [1]
        assert "Traceback" in error.failures[1].remote_traceback
        assert error.failures[1].env_index == 1
        seen = [None if row is None else row[0][[0, 3]].tolist() for row in error.results]
        assert seen == [[3, 1], None, [3, 3]]
        for step in range(2):
            assert envs.step([1, 2, 3])[0][:, 0].tolist() == [4 + step, step, 4 + step]


# --- timeouts and the end --------------------------------------------------------------------------------


@both_faces
def test_close_closes_the_envs_and_again_does_nothing(face, tmp_path):
    envs = face([partial(FarewellEnv, left=tmp_path / f"{index}") for index in range(3)])
    envs.reset(seed=0)
    envs.close()
    envs.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


# --- nothing is sent, or nothing is lost ------------------------------------------------------------


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


# --- errors, ends and what is sent all at once or not at all ------------------------------------------


def test_an_error_taken_for_an_end_has_a_final_observation():
    """Or the next episode would follow the last one without a word."""
    fns = [lambda: FaultyEnv(fault=Fault("raise", "step", at=3, per="episode")), CounterEnv]
    envs = SubprocessVectorEnv(
        fns, envs_per_worker=2, restart=RestartPolicy(on_error="truncate"), autoreset_mode=AutoresetMode.SAME_STEP
    )
    envs.reset(seed=0)
    for step in range(1, 10):
        observations, _, _, truncations, infos = envs.step(ACTIONS)
        assert truncations[0] == (step % 3 == 0)
        if step % 3 == 0:
            assert infos["final_obs"][0][0] == 2
            assert "FaultError" in infos["final_info"]["multienv"]["reason"][0]
        assert observations[0, 0] == step % 3
    envs.close()


@both_faces
def test_a_reset_that_raises_does_not_take_the_end_of_the_episode_with_it(face):
    """With autoreset in the same step it comes with the error."""
    fns = [partial(FaultyEnv, fault=Fault("raise", "reset", at=2), horizon=3), partial(CounterEnv, horizon=30)]
    envs = face(fns, autoreset_mode=AutoresetMode.SAME_STEP)
    reference = CounterEnv(horizon=3)
    envs.reset(seed=0)
    reference.reset(seed=0)
    for _ in range(2):
        envs.step(ACTIONS)
        reference.step(ACTIONS[0])
    expected = reference.step(ACTIONS[0])
    with pytest.raises(EnvsFailedError) as caught:
        envs.step(ACTIONS)
    failure = caught.value.failures[0]
    assert isinstance(failure, EnvError)
    assert "FaultError" in str(failure)
    assert failure.returned is not None
    assert failure.returned[0].tobytes() == expected[0].tobytes()
    assert failure.returned[1:] == expected[1:]
    assert caught.value.results[0] is None
    assert caught.value.results[1][0][0] == 3
    observations, rewards, terminations, _, _ = envs.step(ACTIONS)  # it is tried again
    assert observations[:, 0].tolist() == [0, 4]
    assert (rewards[0], terminations[0]) == (0.0, False)
    envs.close()


@both_faces
def test_a_reward_that_is_no_number(face):
    class RewardEnv(CounterEnv):
        def _reward(self) -> Any:
            return None

    envs = face([RewardEnv, CounterEnv])
    envs.reset(seed=0)
    with pytest.raises(TypeError, match="as reward") as caught:
        envs.step(ACTIONS)
    assert isinstance(caught.value, EnvsFailedError)
    assert list(caught.value.failures) == [0]
    envs.close()


def test_recycling_by_episodes_is_refused_where_several_envs_share_a_process():
    with pytest.raises(UsageError, match="envs_per_worker=1"):
        SubprocessVectorEnv([CounterEnv] * 2, envs_per_worker=2, restart=RestartPolicy(recycle_after_episodes=3))


# --- what gymnasium takes, or refuses by a type of its own --------------------------------------------


@pytest.mark.parametrize("envs_per_worker", [2])
def test_of_values_of_which_one_cannot_be_sent_none_is_set(envs_per_worker: int) -> None:
    with contextlib.closing(SubprocessVectorEnv([CounterEnv] * 4, envs_per_worker=envs_per_worker)) as envs:
        envs.set_attr("mark", 0)
        with pytest.raises(UsageError, match=r"set_attr\(\).*Nothing was sent"):
            envs.set_attr("mark", [1, 2, 3, threading.Lock()])
        assert envs.get_attr("mark") == (0,) * 4
        envs.set_attr("mark", [1, 2, 3, 4])
        assert envs.get_attr("mark") == (1, 2, 3, 4)


@pytest.mark.parametrize(("mode", "face"), [("sync", SerialVectorEnv), ("async", SubprocessVectorEnv)])
def test_a_spec_that_gymnasiums_make_vec_has_made(mode: str, face: Any) -> None:
    theirs = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    spec: Any = theirs.spec
    theirs.close()
    spec.kwargs["vectorization_mode"] = mode
    with contextlib.closing(make_vec(spec)) as envs:
        assert type(envs) is face
        assert envs.num_envs == 3
