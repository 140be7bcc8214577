"""Envs that do to their process what only its owner should: fork it, close its descriptors, set its timer."""

from __future__ import annotations

import contextlib
import re
from functools import partial

import pytest
from fault_envs import ClosingEnv, Forking, Nesting, Truncating

from invariants.faces import Face, assert_as_without_losses, counts
from kit import CounterEnv, descendants, is_alive
from kit.trainer_process import becomes_true
from multienv import Deadlines, RestartPolicy, SubprocessEnv
from multienv.errors import WorkerLostError

# --- an env that forks, and whose child comes back out of the env's method -------------------------------------


def no_child_is_left(*pids: int) -> bool:
    """Those that it does not wait for are zombies until it ends."""
    return not any(is_alive(child) for pid in pids for child in descendants(pid))


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(("vector_env", way) for way in ("return", "raise", "exit", "fork again")),
        *(("subprocess_env", way) for way in ("return", "raise")),
    ],
)
def test_a_child_that_comes_back_answers_nothing_and_writes_over_no_other_env(kind: str, way: str) -> None:
    counter = partial(CounterEnv, horizon=7)
    env_fns = (
        [partial(Forking, way), counter] if kind == "subprocess_env" else [counter, partial(Forking, way), counter]
    )
    with Face(kind, env_fns) as face:
        face.env_fns = [counter] * face.num_envs
        actions = counts(6)
        assert_as_without_losses(face, face.record(actions, 0), actions, 0)
        if kind == "subprocess_env":
            assert face.call("fork", 5) == [5]
        assert face.losses() == 0
        assert becomes_true(lambda: no_child_is_left(*face.pids()))


def test_an_env_may_have_subprocess_envs_of_its_own() -> None:
    with SubprocessEnv(Nesting) as env:
        env.reset(seed=0)
        assert [env.step(1)[0][0] for _ in range(5)] == [2, 4, 6, 8, 10]
        assert env.statistics().losses == 0


# --- an env that closes the worker's descriptors, or uses its timer ---------------------------------------------


def test_step_that_closes_the_workers_descriptors_is_answered_and_the_next_one_truncated() -> None:
    with SubprocessEnv(ClosingEnv, deadlines=Deadlines(step=1.0), restart=RestartPolicy(backoff=0.01)) as env:
        env.reset(seed=1)
        env.step(1)
        seen = env.step(3)[0]
        assert seen[[0, 3]].tolist() == [2, 3]
        pid = env.statistics().pid or -1
        assert becomes_true(lambda: not is_alive(pid))  # until it sleeps it would answer another step, too
        observation, _, _, truncated, info = env.step(1)
        assert truncated
        assert observation.tolist() == seen.tolist()
        # In its replays, or each time that the step was asked again: it depends on when a worker goes to sleep.
        assert re.search("2 processes ended|ended 6 processes", info["multienv"]["reason"])
        # The replay closes them in each process that is to be reset; the next one is a new life.
        with contextlib.suppress(WorkerLostError):
            env.reset(seed=2)
        env.reset(seed=2)
        assert env.step(2)[0][0] == 1


@pytest.mark.parametrize("kind", ["subprocess_env", "vector_env"])
def test_step_that_truncates_the_workers_descriptors_takes_no_memory_from_the_trainer(kind: str) -> None:
    """The trainer would be ended by SIGBUS."""
    with Face(kind, [partial(Truncating, horizon=7)] * 2) as face:
        actions = counts(20, 2)
        assert_as_without_losses(face, face.record(actions, 3), actions, 3)
        assert face.losses() == 0
