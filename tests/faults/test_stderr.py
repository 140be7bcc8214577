"""What envs write on stderr comes out of the trainer's, and workers that end as they should write nothing there."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from fault_envs import LINES, TalkativeEnv

from kit import Fault, SlowEnv, is_alive
from kit.trainer_process import becomes_true
from multienv import Deadlines, RestartPolicy, SubprocessEnv
from multienv._engine.processes import endings
from multienv.errors import WorkerHungError


def run(function: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    code = f"import sys, test_stderr; test_stderr.{function}(*sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])}  # noqa: PTH120
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, **options)


def talk(method: str) -> None:
    with SubprocessEnv(partial(TalkativeEnv, fault=()), context=method) as env:
        env.reset(seed=0)
        env.step(1)


def talk_and_hang(method: str) -> None:
    """Nobody reads it: the deadline is enforced all the same."""
    logging.disable()  # the trainer itself would wait for its reader
    options: dict[str, Any] = {"deadlines": Deadlines(step=0.2), "restart": RestartPolicy(on_timeout="raise")}
    hangs = partial(TalkativeEnv, fault=Fault("hang_c", "step", ignore_sigterm=True))
    with SubprocessEnv(hangs, context=method, **options) as env:
        env.reset(seed=0)
        with pytest.raises(WorkerHungError):
            env.step(1)


def let_go(method: str) -> None:
    """Of an env that has yet to answer, and answers then, however busy the machine is."""
    endings.BUSY_PATIENCE = 30.0
    env = SubprocessEnv(partial(SlowEnv, step_seconds=0.1), context=method).initialize()
    env.reset(seed=0)
    env.step_async(1)
    pid = env.statistics().pid or 0
    del env
    assert becomes_true(lambda: not is_alive(pid))


def test_nothing_of_what_an_env_says_is_cut() -> None:
    with run("talk", "forkserver", stderr=subprocess.PIPE) as trainer:
        said = trainer.communicate(timeout=60)[1]
    assert said.splitlines() == LINES


def test_a_paused_reader_keeps_no_deadline_from_being_enforced() -> None:
    with run("talk_and_hang", "forkserver", stderr=subprocess.PIPE) as trainer:
        assert trainer.wait(60) == 0


def test_a_worker_whose_trainer_let_go_ends_without_a_word() -> None:
    with run("let_go", "forkserver", stderr=subprocess.PIPE) as trainer:
        assert trainer.communicate(timeout=60)[1] == b""
