"""What envs write on stderr comes out of the trainer's, and workers that end as they should write nothing there."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from kit import CounterEnv, Fault, FaultyEnv
from multienv import Deadlines, RestartPolicy, SubprocessEnv
from multienv.errors import WorkerHungError


def lines() -> list[bytes]:
    """More than a pipe holds."""
    return [b"line %05d of what a simulator has to say on its stderr" % number for number in range(4000)]


class TalkativeEnv(CounterEnv):
    """Says much in each step."""

    def step(self, action: Any) -> Any:
        for line in lines():
            os.write(2, line + b"\n")
        return super().step(action)


class HangingTalkativeEnv(FaultyEnv):
    """Says much, then hangs."""

    def __init__(self) -> None:
        super().__init__(fault=Fault("hang_c", "step", ignore_sigterm=True))

    def step(self, action: Any) -> Any:
        for line in lines():
            os.write(2, line + b"\n")
        return super().step(action)


def run(function: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    code = f"import sys, test_stderr; test_stderr.{function}(*sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])}  # noqa: PTH120
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, **options)


def talk(method: str) -> None:
    with SubprocessEnv(TalkativeEnv, context=method) as env:
        env.reset(seed=0)
        env.step(1)


def talk_and_hang(method: str) -> None:
    """Nobody reads it: the deadline is enforced all the same."""
    logging.disable()  # the trainer itself would wait for its reader
    policy = RestartPolicy(on_timeout="raise")
    with SubprocessEnv(HangingTalkativeEnv, context=method, deadlines=Deadlines(step=0.5), restart=policy) as env:
        env.reset(seed=0)
        with pytest.raises(WorkerHungError):
            env.step(1)


def let_go(method: str) -> None:
    """Of an env that has yet to answer, and answers then."""
    gate, opener = os.pipe()
    os.set_inheritable(gate, True)
    env = SubprocessEnv(partial(GatedEnv, f"/proc/{os.getpid()}/fd/{gate}"), context=method).initialize()
    env.reset(seed=0)
    env.step_async(1)
    del env
    os.write(opener, b"go on")


class GatedEnv(CounterEnv):
    """Its step waits for something to read."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate = open(gate, "rb", buffering=0)  # noqa: SIM115, PTH123

    def step(self, action: Any) -> Any:
        self.gate.read(1)
        return super().step(action)


def test_nothing_of_what_an_env_says_is_cut() -> None:
    with run("talk", "forkserver", stderr=subprocess.PIPE) as trainer:
        said = trainer.communicate(timeout=60)[1]
    assert said.splitlines() == lines()


def test_a_paused_reader_keeps_no_deadline_from_being_enforced() -> None:
    with run("talk_and_hang", "forkserver", stderr=subprocess.PIPE) as trainer:
        assert trainer.wait(60) == 0


def test_a_worker_whose_trainer_let_go_ends_without_a_word() -> None:
    with run("let_go", "forkserver", stderr=subprocess.PIPE) as trainer:
        assert trainer.communicate(timeout=60)[1] == b""
