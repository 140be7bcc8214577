"""The public faulty env fails where it is told to, and is deterministic everywhere else."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from multienv.testing import FaultyEnv


def test_without_a_fault_it_is_an_env_like_any_other():
    check_env(FaultyEnv(), skip_render_check=True)
    env = FaultyEnv(horizon=2)
    first, _ = env.reset(seed=3)
    assert first[[0, 1, 3]].tolist() == [0, 0, -1]
    assert env.step(np.int64(2))[0][[0, 1, 3]].tolist() == [1, 0, 2]
    assert env.step(np.int64(0))[2]
    assert env.reset()[0][1] == 1


def test_it_raises_at_that_step_of_each_episode():
    env = FaultyEnv("raise", 2)
    for _ in range(2):
        env.reset()
        env.step(np.int64(0))
        with pytest.raises(RuntimeError):
            env.step(np.int64(0))
        assert env.steps == 1  # the step has changed nothing


def test_once_is_once_in_all_processes(tmp_path):
    for is_first in (True, False):
        env = FaultyEnv("raise", once=tmp_path / "struck")
        env.reset()
        if is_first:
            with pytest.raises(RuntimeError):
                env.step(np.int64(0))
        assert env.step(np.int64(0))[0][0] == 1


ENDS = """
import os, time, numpy
from multienv.testing import FaultyEnv
for fault in ("exit", "kill", "segfault", "hang"):
    env = FaultyEnv(fault)
    env.reset()
    child = os.fork()
    if child == 0:
        env.step(numpy.int64(0))
        os._exit(0)
    if fault == "hang":
        time.sleep(0.3)
        print(os.waitpid(child, os.WNOHANG) == (0, 0))
        os.kill(child, 15)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_process_ends_or_hangs():
    ended = subprocess.run([sys.executable, "-c", ENDS], timeout=60, check=True, capture_output=True, text=True)
    codes = [3, -signal.SIGKILL, -signal.SIGSEGV, True, -signal.SIGTERM]
    assert ended.stdout.split() == [str(code if code is True else int(code)) for code in codes]
