"""The recovery check judges rightly: held against backends whose virtues and vices are known.

The backends here keep the env in this process, beside a process that can be killed; what they make of its death is
decided by the test.
"""

from __future__ import annotations

import copy
import os
import signal
import subprocess
from types import SimpleNamespace

import gymnasium
import pytest

from kit import CounterEnv, no_leaks
from multienv import SubprocessEnv
from multienv.testing import RecoveryCheck, check_env_recovers


@pytest.fixture(autouse=True)
def _nothing_left():
    with no_leaks():
        yield


class Backend(gymnasium.Env):
    """An env beside a process; `recover` says what becomes of the env when the process has died."""

    started = 0

    def __init__(self, env_fn):
        self.env_fn = env_fn
        self.last = None
        self.is_aimed_at = False
        self.start()
        self.env = env_fn()
        self.observation_space, self.action_space = self.env.observation_space, self.env.action_space
        type(self).started += 1

    def start(self):
        self.process = subprocess.Popen(["/bin/sleep", "60"], stdin=subprocess.DEVNULL)

    def statistics(self):
        self.is_aimed_at = True  # nobody asks but the killer
        return SimpleNamespace(pid=self.process.pid)

    def reset(self, *, seed=None, options=None):
        self.last, info = self.env.reset(seed=seed, options=options)
        return self.last, info

    def step(self, action):
        if self.is_aimed_at:
            self.process.wait()
            self.is_aimed_at = False
            self.start()
            return self.recover(action)
        return self.go_on(action)

    def go_on(self, action):
        result = self.env.step(action)
        self.last = result[0]
        return result

    def recover(self, action):
        return self.go_on(action)

    def close(self):
        self.process.kill()
        self.process.wait()


class Truncating(Backend):
    def recover(self, action):
        return self.last, 0.0, False, True, {"multienv": {"reason": "the test says so"}}


class Splicing(Backend):
    def recover(self, action):
        self.env = self.env_fn()
        self.env.reset()
        return self.go_on(action)


class Forgetful(Backend):
    """Goes on, with an RNG that is one draw behind: shows one step later than one would wish."""

    def recover(self, action):
        generator = copy.deepcopy(self.env.np_random)
        result = self.go_on(action)
        self.env.np_random = generator
        return result


def test_an_exact_backend_passes():
    check = check_env_recovers(CounterEnv, make_env=Backend, steps=30, kills=4, seed=1)
    assert check == RecoveryCheck(asked=4, kills=4, exact=4)
    assert check.is_exact
    check.raise_if_inexact()
    check.raise_if_dishonest()


def test_a_truncating_backend_is_honest_but_not_exact():
    check = check_env_recovers(CounterEnv, make_env=Truncating, steps=30, kills=3, seed=1)
    assert check == RecoveryCheck(asked=3, kills=3, truncated=3)
    check.raise_if_dishonest()
    with pytest.raises(AssertionError, match="3 by truncation"):
        check.raise_if_inexact()


@pytest.mark.parametrize("backend", [Splicing, Forgetful])
def test_a_dishonest_backend_is_found_out(backend):
    check = check_env_recovers(CounterEnv, make_env=backend, steps=30, kills=3, seed=1)
    assert len(check.mismatches) == 3
    assert not check.is_honest
    with pytest.raises(AssertionError, match="observation"):
        check.raise_if_dishonest()


class CrashesByItself(CounterEnv):
    """Its fourth step is its process's last."""

    def step(self, action):
        if self.episode_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def test_an_env_that_crashes_by_itself_is_told_and_does_not_take_this_process_with_it():
    check = check_env_recovers(CrashesByItself, steps=9, kills=1, make_env=AlwaysAsked)
    assert check.is_honest
    assert check.truncated == 2


class AlwaysAsked(SubprocessEnv):
    """Is not struck where its undisturbed twin dies: it is the twin that ends the comparison."""

    def __init__(self, env_fn):
        super().__init__(CounterEnv, reports="")
