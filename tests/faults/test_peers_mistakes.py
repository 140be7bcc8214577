"""One test for each mistake seen in a peer that is tested nowhere else. Named after peer and mistake.

The others are held down by the tests of the invariants, and by a few of this folder:

| peer | mistake | where |
|---|---|---|
| gymnasium | a stale reply answers the next step; orphans of a killed trainer | 4; 7 |
| gymnasium | after one env's exception the next step fails; a killed worker is a bare EOFError | 1, 6; 9 |
| Stable-Baselines3 | the message of the env is lost; close() raises EOFError | 9; test_close.py |
| baselines, actorcritic | the terminal or the reset observation is lost | contract/test_autoreset*.py |
| actorcritic | a spliced episode; Ctrl-C restarts envs; a failing env_fn goes unnoticed; one numpy state | 1; 8; 6; 10 |
| DI-engine | an exception with a constructor of its own; stuck envs closed one after another | test_crash_matrix.py; 5 |
| PufferLib | recv() spins for ever when a worker dies | 9 |
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kit import (
    CounterEnv,
    Fault,
    FaultyEnv,
    SlowEnv,
)
from multienv import Deadlines, MultiEnv, RestartPolicy, SubprocessEnv, create_subprocess_envs
from multienv.errors import (
    ActionError,
    CallPendingError,
    EnvsFailedError,
)

RAISE = RestartPolicy(on_crash="raise", on_timeout="raise")


def three(middle: Any, **options: Any) -> MultiEnv:
    """Three envs, the one in the middle is the troublemaker. None resets by itself."""
    return MultiEnv(create_subprocess_envs([CounterEnv, middle, CounterEnv], **options), autoreset_mode="DISABLED")


def pid_of(env: Any) -> int:
    pid = env.statistics().pid
    assert pid is not None
    return int(pid)


def failed(multi: MultiEnv, actions: Any = (1, 1, 1)) -> Any:
    """The error of a step that must fail in env 1 alone."""
    with pytest.raises(EnvsFailedError) as caught:
        multi.step(list(actions))
    assert list(caught.value.failures) == [1]
    return caught.value


# --- gymnasium AsyncVectorEnv ---------------------------------------------------------------------


def test_gymnasium_after_a_killed_worker_every_call_is_already_pending() -> None:
    with three(CounterEnv, restart=RAISE) as multi:
        multi.reset(seed=0)
        os.kill(pid_of(multi.envs[1]), signal.SIGKILL)
        assert failed(multi).results[0][0][0] == 1
        multi.reset(mask=[False, True, False], seed=5)
        assert [int(observation[0]) for observation in multi.step([1, 1, 1])[0]] == [2, 1, 2]
        multi.reset(seed=0)


# --- Stable-Baselines3 SubprocVecEnv --------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
def test_stable_baselines3_a_forked_sibling_holds_the_dead_workers_end(victim: int) -> None:
    envs = create_subprocess_envs([CounterEnv] * 3, restart=RAISE)
    with MultiEnv(envs) as multi:
        multi.reset(seed=0)
        os.kill(pid_of(envs[victim]), signal.SIGKILL)
        with pytest.raises(EnvsFailedError) as caught:
            multi.step([1, 1, 1])
        assert list(caught.value.failures) == [victim]


# --- OpenAI baselines -----------------------------------------------------------------------------


def test_baselines_reset_during_a_pending_step_reads_its_reply() -> None:
    with SubprocessEnv(CounterEnv) as env:
        env.reset(seed=0)
        env.step_async(3)
        with pytest.raises(CallPendingError, match=r"step_wait\(\)"):
            env.reset(seed=1)
        assert env.step_wait()[0].tolist()[::3] == [1, 3]
        assert env.reset(seed=1)[0].tolist()[::3] == [0, -1]


@pytest.mark.parametrize("count", [0, 2, 4])
def test_baselines_surplus_actions_are_dropped(count: int) -> None:
    with three(CounterEnv) as multi:
        multi.reset(seed=0)
        with pytest.raises(ActionError, match=f"{count} actions for 3 envs"):
            multi.step([1] * count)
        assert [int(observation[0]) for observation in multi.step([1] * 3)[0]] == [1, 1, 1]  # nothing had been sent


# --- actorcritic's multi_env ----------------------------------------------------------------------


# --- DI-engine ------------------------------------------------------------------------------------


class AlarmingEnv(CounterEnv):
    """Uses SIGALRM itself, as some simulators do for their own time limits."""

    def step(self, action: Any) -> Any:
        rang = []
        signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        until = time.monotonic() + 5
        while not rang and time.monotonic() < until:
            time.sleep(0.001)
        assert rang, "SIGALRM never came"
        return super().step(action)


def test_di_engine_the_watchdog_is_sigalrm_in_the_envs_process() -> None:
    with SubprocessEnv(AlarmingEnv, deadlines=Deadlines(step=20)) as env:
        env.reset(seed=0)
        assert env.step(1)[0][0] == 1
        assert env.step(1)[0][0] == 2


# --- PufferLib, RLlib, gym3 -----------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_pufferlib_idle_workers_burn_a_core() -> None:
    from kit import monitor_pid

    with MultiEnv(create_subprocess_envs([CounterEnv] * 3, deadlines=Deadlines(step=60))) as multi:
        multi.reset(seed=0)
        multi.step([1, 1, 1])
        pids = [monitor_pid(), *map(pid_of, multi.envs)]
        before = [cpu_seconds(pid) for pid in pids]
        time.sleep(1.0)
        assert [cpu_seconds(pid) - was for pid, was in zip(pids, before, strict=True)] == pytest.approx(
            [0] * 4, abs=0.1
        )


def test_pufferlib_a_waiting_trainer_burns_a_core() -> None:
    with MultiEnv(create_subprocess_envs([partial(SlowEnv, step_seconds=1.0)] * 3)) as multi:
        multi.reset(seed=0)
        before = cpu_seconds(os.getpid())
        multi.step([1, 1, 1])
        assert cpu_seconds(os.getpid()) - before < 0.3


def test_rllib_all_envs_are_rebuilt_for_one() -> None:
    with MultiEnv(create_subprocess_envs([CounterEnv] * 3)) as multi:
        multi.reset(seed=0)
        multi.step([1, 1, 1])
        before = [pid_of(env) for env in multi.envs]
        os.kill(before[1], signal.SIGKILL)
        assert [int(observation[0]) for observation in multi.step([1, 1, 1])[0]] == [2, 2, 2]
        after = [pid_of(env) for env in multi.envs]
        assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]


def test_gym3_one_failure_makes_every_later_call_raise_it() -> None:
    with three(partial(FaultyEnv, fault=Fault("raise", "step"))) as multi:
        multi.reset(seed=0)
        failed(multi)
        multi.reset(seed=1)
        assert [int(observation[0]) for observation in multi.step([1, 1, 1])[0]] == [1, 1, 1]
        assert multi.call("poke") == [1, 1, 1]
