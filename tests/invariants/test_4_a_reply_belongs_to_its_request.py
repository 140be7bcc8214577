"""Invariant 4: a reply belongs to its request; a process that timed out, broke or misread is never asked again.

What an answer belongs to shows in it: the action in the observation, a number that no two calls share.
"""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faces import KINDS, RAISE, REPLAY, Face, assert_as_without_losses, counts
from invariant_envs import EchoEnv

from kit import CounterEnv, Fault, FaultyEnv, is_alive
from kit.gates import WAIT, GateEnv, opened_meanwhile
from kit.trainer_process import becomes_true
from multienv import AsyncSubprocessEnvManager, Deadlines, RestartPolicy
from multienv.errors import CallPendingError, MultienvError, WaitTimeout


@pytest.mark.parametrize(
    ("kind", "on_timeout"),
    [("subprocess_env", "replay"), ("multi_env", "raise"), ("vector_env", "truncate")],
)
def test_a_worker_that_wakes_up_after_its_deadline_answers_nobody(kind: str, on_timeout: Any) -> None:
    policy = RestartPolicy(on_timeout=on_timeout, snapshots=False)
    with Face(kind, [CounterEnv] * 2, deadlines=Deadlines(step=1.0), restart=policy) as face:
        face.reset(0)
        face.step([1, 1])
        stopped = face.signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError) if on_timeout == "raise" else contextlib.nullcontext():
            (row, *_) = face.step([2, 2])
        # It would have its answer now, if it were still there.
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
        assert becomes_true(lambda: not is_alive(stopped))
        assert face.losses() == 1
        if on_timeout == "replay":
            assert (row.observation[[0, 3]].tolist(), row.truncated) == ([2, 2], False)
        else:
            assert face.reset(5)[0].observation[[0, 3]].tolist() == [0, -1]
        steps = [face.step([action, action])[0].observation[[0, 3]].tolist() for action in (3, 0, 1)]
        first = 3 if on_timeout == "replay" else 1
        assert steps == [[first, 3], [first + 1, 0], [first + 2, 1]]
        assert stopped not in face.pids()


@pytest.mark.parametrize("kind", ["subprocess_env", "vector_env"])
def test_a_wait_that_ran_out_leaves_the_answer_to_its_own_request(kind: str, tmp_path: Path) -> None:
    with Face(kind, [partial(GateEnv, tmp_path)] * 2) as face:
        face.reset(0)
        action: Any = WAIT if kind == "subprocess_env" else [WAIT, 2]
        face.envs.step_async(action)
        with pytest.raises(WaitTimeout):
            face.envs.step_wait(timeout=0.02)
        for other in (lambda: face.step([3, 3]), lambda: face.reset(1), lambda: face.call("poke")):
            with pytest.raises(CallPendingError):
                other()
        (tmp_path / "gate").touch()
        seen = face.envs.step_wait()[0]
        assert seen[..., 3].tolist() == action
        assert [row.observation[3] for row in face.step([1, 0])] == [1, 0][: face.num_envs]
        assert face.losses() == 0


@pytest.mark.parametrize("kind", ["subprocess_env", "vector_env"])
def test_calls_get_their_own_answers_whatever_became_of_those_before(kind: str) -> None:
    policy = RestartPolicy(on_timeout="raise", snapshots=False)
    with Face(kind, [EchoEnv] * 2, deadlines=Deadlines(call=1.0), restart=policy) as face:
        face.reset(0)
        for number, how in enumerate(["", "raise", "", "late", "never", "", "raise", "raise", "late", ""]):
            if how in ("raise", "never"):
                with pytest.raises(KeyError if how == "raise" else TimeoutError):
                    face.call("echo", number, how)
                face.reset(number) if how == "never" else face.step([1, 1])
            else:
                assert face.call("echo", number, how) == [number] * face.num_envs
        assert face.losses() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_on_every_descriptor_of_the_worker_is_taken_for_no_answer(kind: str, tmp_path: Path) -> None:
    """A worker's line carries no answers: they lie in shared memory under the number of their request."""
    fault = Fault("garbage", "step", at=4, once=tmp_path / "struck")
    with Face(
        kind, [partial(FaultyEnv, fault=fault), CounterEnv], deadlines=Deadlines(step=10), restart=REPLAY
    ) as face:
        actions = counts(12, 2)
        records = face.record(actions, 9)
        assert (tmp_path / "struck").exists()
        assert_as_without_losses(face, records, actions, 9)


@pytest.mark.parametrize("kind", KINDS)
def test_after_an_error_of_one_env_all_answers_are_those_of_their_envs(kind: str) -> None:
    """One that cannot be decoded here, one that cannot be pickled there, one that was raised."""
    manners: list[Any] = [
        ("raise", "unpickle"),
        ("unpicklable", "step"),
        ("raise", "step"),
        ("custom_exception", "step"),
    ]
    for manner, moment in manners:
        culprit = partial(FaultyEnv, fault=Fault(manner, moment, at=2))
        with Face(kind, [culprit, CounterEnv], restart=RAISE) as face:
            face.reset(0)
            face.step([0, 1])
            with pytest.raises(MultienvError):
                face.step([2, 3])
            assert [int(row.observation[0]) for row in face.reset(4)] == [0] * face.num_envs
            assert [row.observation[[0, 3]].tolist() for row in face.step([3, 0])] == [[1, 3], [1, 0]][: face.num_envs]


def test_a_manager_that_resets_an_env_under_its_step_hands_out_no_step(tmp_path: Path) -> None:
    with AsyncSubprocessEnvManager([partial(GateEnv, tmp_path), CounterEnv], wait_num=1) as manager:
        assert list(manager.step({0: WAIT, 1: 2})) == [1]
        with opened_meanwhile(tmp_path):
            manager.reset({0: {"seed": 3}})  # the step of env 0 is still running
        assert manager.ready_obs[0][[0, 3]].tolist() == [0, -1]
        timesteps = manager.step({0: 2})
        assert list(timesteps) == [0]
        assert timesteps[0].obs[[0, 3]].tolist() == [1, 2]
