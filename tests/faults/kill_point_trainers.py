"""The short rollouts of test_kill_points.py, and the trainer that takes one in a process of its own."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import pickle
import signal
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from kit import CounterEnv, ForkingPolicy, is_alive
from kit.trainer_process import becomes_true
from multienv import SubprocessEnv, SubprocessVectorEnv

ENV_FNS = {"counter": partial(CounterEnv, horizon=5), "cart_pole": partial(gymnasium.make, "CartPole-v1")}
FACES = ("env", "vector")
STEPS = 12  # three episodes, and a snapshot in each
POLICY = ForkingPolicy(snapshot_every=4)


def open_face(face: str, env_name: str, method: str, **options: Any) -> Any:
    """Return a `SubprocessEnv`, or a `SubprocessVectorEnv` of two envs in one worker, that is built."""
    env_fn = ENV_FNS[env_name]
    if face == "vector":
        return SubprocessVectorEnv([env_fn] * 2, envs_per_worker=2, context=method, restart=POLICY, **options)
    return SubprocessEnv(env_fn, context=method, restart=POLICY, **options).initialize()


def open_twin(face: str, env_name: str) -> Any:
    """Return the same without processes of its own, made by gymnasium alone."""
    env_fn = ENV_FNS[env_name]
    return gymnasium.vector.SyncVectorEnv([env_fn] * 2) if face == "vector" else env_fn()


class Play:
    """Takes steps, and resets where an episode has ended, and keeps all that is returned."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.steps = 0
        self.seen = [copy.deepcopy(env.reset(seed=5))]
        self._is_vector = isinstance(env, gymnasium.vector.VectorEnv)

    def go(self, steps: int) -> Play:
        for _ in range(steps):
            last = self.seen[-1]
            if not self._is_vector and len(last) == 5 and (last[2] or last[3]):
                self.seen.append(copy.deepcopy(self.env.reset()))
            action = np.int64(self.steps * 7 // 3 % 2)
            self.seen.append(
                copy.deepcopy(self.env.step(np.array([action, 1 - action]) if self._is_vector else action))
            )
            self.steps += 1
        return self


def statistics_of(env: Any) -> Any:
    """Return the statistics of its only worker."""
    found = env.statistics()
    return found[0] if isinstance(found, list) else found


def kill_worker(env: Any) -> None:
    """Kill the worker, unless it has ended already, with its monitor."""
    pid = statistics_of(env).pid
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        assert becomes_true(lambda: not is_alive(pid))


def digest(play: Play) -> str:
    return hashlib.sha256(pickle.dumps(play.seen)).hexdigest()


def train(face: str, method: str) -> None:
    """Stop; once resumed, roll out with a loss in the middle, close, and say what was seen."""
    print("ready", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    env = open_face(face, "counter", method)
    play = Play(env).go(STEPS // 2)
    kill_worker(env)
    play.go(STEPS // 2)
    assert statistics_of(env).exact_recoveries == statistics_of(env).losses == 1
    env.close()
    print("seen", digest(play), flush=True)
