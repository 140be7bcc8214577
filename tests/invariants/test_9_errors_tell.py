"""Invariant 9: errors tell. Exit code or signal by name, out-of-memory hint, remote traceback, native stack, last lines
of stderr, env index, command, step in the episode, seed; and what to do next.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faces import KINDS, RAISE, REPLAY, Face

from kit import CounterEnv, Fault, FaultError, FaultyEnv
from multienv import Deadlines, SubprocessVectorEnv
from multienv.errors import (
    ClosedError,
    EnvError,
    EnvsFailedError,
    ResetNeededError,
    WorkerHungError,
    WorkerLostError,
)

SEED = 40


def lose(kind: str, fault: Fault, restart: Any = RAISE) -> tuple[Any, int]:
    """Take three steps, and one more; return the error of the env with the fault, and its index."""
    culprit = partial(FaultyEnv, fault=fault)
    env_fns = [culprit] if kind == "subprocess_env" else [CounterEnv, culprit]
    hangs = fault.manner in ("hang", "hang_c")  # whatever else it does may take long on a busy machine
    with Face(kind, env_fns, restart=restart, deadlines=Deadlines(step=0.8 if hangs else 60.0, close=1.0)) as face:
        face.reset(SEED)
        for _ in range(3):
            face.step([1, 1])
        with pytest.raises(Exception) as caught:
            face.step([2, 2])
    error, index = caught.value, len(env_fns) - 1
    if kind == "subprocess_env":
        return error, index
    assert isinstance(error, EnvsFailedError)
    # One error for all, which says the same, and can be caught by the type of its only cause.
    assert re.search(rf"  envs? (0–)?{index}: ", str(error))
    assert "reset" in str(error).lower()
    assert isinstance(error, type(error.failures[index].__cause__ or error.failures[index]))
    return error.failures[index], index


def assert_located(error: Any, index: int) -> None:
    """Fail unless the error says, to programs and to people, which env it was, in which call, how far, and its seed."""
    assert (error.env_index, error.command, error.step, error.seed) == (index, "step", 3, SEED + index)
    for words in (f"env {index} ", "during step()", "after 3 steps", f"last seed {SEED + index}"):
        assert words.lower() in str(error).lower()


@pytest.mark.parametrize(
    ("kind", "envs", "who"),
    [
        ("subprocess_env", (0,), "env 0 {} (last seed 40)"),
        ("multi_env", (1,), "env 1 {} (last seed 41)"),
        ("vector_env", (3, 4, 5), "envs 3–5 {} (last seeds 43–45)"),
    ],
)
def test_death_of_an_idle_worker_names_its_envs_its_pid_and_their_seeds(
    kind: str, envs: tuple[int, ...], who: str, reports: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"envs_per_worker": 3} if kind == "vector_env" else {}
    with Face(kind, [CounterEnv] * 6, restart=RAISE, **options) as face:
        face.reset(SEED)
        pid = face.signal(worker=min(len(face.pids()) - 1, 1))
        with caplog.at_level(logging.INFO, "multienv"), pytest.raises(WorkerLostError) as caught:
            face.step([1] * 6)
        (loss,) = (one.last_loss for one in face.statistics() if one.losses)
    assert (loss.envs, loss.idle, loss.command, loss.pid, loss.env_index) == (
        envs, True, "step", pid, envs[0] if len(envs) == 1 else None
    )  # fmt: skip
    error = next(iter(getattr(caught.value, "failures", {0: caught.value}).values()))
    assert (error.envs, error.idle, error.env_index) == (envs, True, loss.env_index)
    subject, seeds = who.split(" {} ")
    (report,) = reports.glob("*.json")
    for text in (
        str(error),
        *(record.getMessage() for record in caplog.records),
        json.loads(report.read_text())["what"],
    ):
        assert text.startswith(f"The process of {subject} was killed by SIGKILL (")
        assert ") while it was idle before step()" in text
        assert f"{seeds} (pid {pid})." in text


@pytest.mark.parametrize("kind", KINDS)
def test_a_segfault_is_told_with_its_signal_and_its_stack(kind: str) -> None:
    error, index = lose(kind, Fault("segv", "step", at=4))
    assert type(error) is WorkerLostError
    assert_located(error, index)
    assert error.exit_code == -11
    assert "was killed by SIGSEGV" in str(error)
    # The native fault, and the Python lines that led to it.
    for words in ("Segmentation fault", "faults.py", "in string_at"):
        assert words in error.stack
        assert words in str(error)
    # Below the env's lines the message ends; the error and the report have the whole stack.
    loss = json.loads(Path(error.report).read_text())["loss"]
    assert loss["stack"] == error.stack.splitlines()
    for words in ("worker/main.py", "Extension modules"):
        assert words in error.stack
        assert words not in str(error)
    assert "reset()" in str(error)
    assert f"multienv replay {error.report}" in str(error)
    assert loss["signal"] == "SIGSEGV"


def test_a_sigkill_hints_at_the_memory() -> None:
    error, index = lose("vector_env", Fault("kill", "step", at=4))
    assert_located(error, index)
    assert error.exit_code == -9
    assert "was killed by SIGKILL" in str(error)
    assert "out-of-memory killer" in str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exit_is_told_with_its_code_and_the_last_lines_of_stderr(kind: str) -> None:
    error, index = lose(kind, Fault("noise", "step", at=4, exit_code=7))
    assert_located(error, index)
    assert error.exit_code == 7
    assert "exited with code 7" in str(error)
    assert error.stderr.rstrip().endswith("noise: last words")
    assert "noise: last words" in str(error)


@pytest.mark.parametrize(("kind", "manner"), [("subprocess_env", "hang_c"), ("vector_env", "hang")])
def test_a_hang_is_told_with_its_deadline_and_where_it_hung(kind: str, manner: Any) -> None:
    error, index = lose(kind, Fault(manner, "step", at=4))
    assert isinstance(error, WorkerHungError)
    assert isinstance(error, TimeoutError)
    assert_located(error, index)
    assert "deadline of 0.8 s" in str(error)
    place = "_hang_in_c" if manner == "hang_c" else "_end_or_hang"
    assert place in error.stack
    assert place in str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_of_the_env_is_its_own_type_with_its_own_traceback(kind: str) -> None:
    error, index = lose(kind, Fault("raise", "step", at=4))
    assert isinstance(error, EnvError)
    assert isinstance(error, FaultError)
    assert_located(error, index)
    assert "FaultError: fault at step 4" in str(error)
    for words in ("Traceback", "faults.py", "in misbehave", "raise FaultError(message)"):
        assert words in error.remote_traceback


@pytest.mark.parametrize("kind", KINDS)
def test_an_uncaught_exception_of_an_env_prints_the_envs_traceback_once_and_then_the_error(kind: str) -> None:
    culprit = partial(FaultyEnv, fault=Fault("raise", "step", at=2))
    with Face(
        kind, [CounterEnv] * (kind != "subprocess_env") + [culprit] * (3 if kind != "subprocess_env" else 1)
    ) as face:
        face.reset(SEED)
        face.step([1] * 4)
        with pytest.raises(EnvError if kind == "subprocess_env" else EnvsFailedError) as caught:
            face.step([1] * 4)
    printed = "".join(traceback.format_exception(caught.value))
    envs, here = printed.split("The above exception was the direct cause of the following exception")
    assert envs.count("raise FaultError(message)") == envs.count("Traceback (most recent call last)") == 1
    assert "in misbehave" in envs
    assert "multienv/_engine/worker" not in envs
    assert "misbehave" not in here
    assert here.count("FaultError: fault at step 2") == 1
    assert kind == "subprocess_env" or "envs 1–3, all as the first: " in here


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncation_tells_as_much_as_an_error(kind: str) -> None:
    with Face(kind, [partial(FaultyEnv, fault=Fault("abort", "step", at=4))], restart=REPLAY) as face:
        face.reset(SEED)
        *_, broken = [face.step([1])[0] for _ in range(4)]
        assert broken.truncated
        reason = broken.recovery["reason"]
        for words in ("env 0", "SIGABRT", "during step()", "after 3 steps", f"last seed {SEED}", "2 processes"):
            assert words in reason
        report = json.loads(Path(broken.recovery["report"]).read_text())
        assert any("in misbehave" in line or "in strike" in line for line in report["loss"]["stack"])
        loss = face.statistics()[0].last_loss
        assert (loss.command, loss.step, loss.seed, loss.exit_code) == ("step", 3, SEED, -6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_that_fails_names_the_seed_that_it_was_asked_for(kind: str) -> None:
    env_fns = [CounterEnv, partial(FaultyEnv, fault=Fault("raise", "reset", at=2))]
    with Face(kind, env_fns[-1:] if kind == "subprocess_env" else env_fns, restart=RAISE) as face:
        face.reset(SEED)
        with pytest.raises(FaultError) as caught:
            face.reset(7)
        failures: Any = getattr(caught.value, "failures", {0: caught.value})
        assert [error.seed for error in failures.values()] == [7 if kind == "subprocess_env" else 8]


@pytest.mark.parametrize("kind", KINDS)
def test_a_poisonous_call_and_a_wrong_call_say_what_to_do_next(kind: str) -> None:
    with Face(kind, [partial(FaultyEnv, fault=Fault("exit", "call"))], restart=REPLAY) as face:
        with pytest.raises(ResetNeededError, match=r"reset\(\)"):
            face.step([1])
        face.reset(SEED)
        with pytest.raises(WorkerLostError, match="process after process") as caught:
            face.call("poke")
        assert "during call()" in str(caught.value)
        for words in ("2 so far", "The episode goes on", "fix the method"):
            assert words in str(caught.value)
        assert "To see it again: multienv replay" in str(caught.value)
    with pytest.raises(ClosedError, match=r"(?s)clos.*(Make|Create) a new one"):
        face.step([1])


@pytest.mark.parametrize(("mode", "step"), [("NEXT_STEP", 2), ("SAME_STEP", 1), ("DISABLED", 9)])
def test_the_step_is_counted_from_the_autoreset_of_the_env_itself(mode: str, step: int) -> None:
    """Of two envs in one process, the other's episodes end elsewhere."""
    horizon = None if mode == "DISABLED" else 4
    culprit = partial(FaultyEnv, fault=Fault("exit", "step", action=3), horizon=horizon)
    env_fns = [partial(CounterEnv, horizon=None if mode == "DISABLED" else 3), culprit]
    with closing(SubprocessVectorEnv(env_fns, envs_per_worker=2, autoreset_mode=mode, restart=RAISE)) as envs:
        envs.reset(seed=SEED)
        for _ in range({"NEXT_STEP": 12, "SAME_STEP": 13, "DISABLED": 9}[mode]):
            observations, *_ = envs.step([0, 0])
        assert observations[1, 0] == step
        with pytest.raises(WorkerLostError, match=f"after {step} step") as caught:
            envs.step([0, 3])
        assert caught.value.failures[1].step == step  # type: ignore[attr-defined]


def test_the_step_is_counted_from_the_autoreset_after_an_error_of_the_env() -> None:
    raising = partial(FaultyEnv, fault=Fault("raise", "step", action=3, per="episode"))
    steps = []
    with closing(SubprocessVectorEnv([CounterEnv, raising], envs_per_worker=2)) as envs:
        envs.reset(seed=SEED)
        for action in (0, 0, 3, 0, 0, 3):  # the first step after the error begins the next episode
            try:
                envs.step([0, action])
            except EnvsFailedError as error:
                steps.append(error.failures[1].step)  # type: ignore[attr-defined]
        assert sum(one.episodes for one in envs.statistics()) == 4, "those that begin in the next step included"
    assert steps == [2, 1]
