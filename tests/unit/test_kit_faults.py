"""Each manner of failing does what it says, in a real process; each moment and each count is kept."""

from __future__ import annotations

import copy
import faulthandler
import itertools
import os
import pickle
import signal
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import pytest

from kit import CounterEnv, FailsNthTime, Fault, FaultError, FaultyEnv, TwoArgumentError, misbehave, no_leaks

ACTION = np.int64(1)
DEADLY = {
    "exit": 3,
    "system_exit": 3,
    "noise": 3,
    "kill": -signal.SIGKILL,
    "segv": -signal.SIGSEGV,
    "abort": -signal.SIGABRT,
}


@pytest.fixture(autouse=True)
def _nothing_left():
    with no_leaks():
        yield


def fork(action: Callable[[], object], *, keep: tuple[int, ...] = ()) -> int:
    """Run *action* in a forked child, silently, and give its pid. Of our descriptors it has only those to *keep*."""
    pid = os.fork()
    if pid == 0:
        _run_child(action, keep)
    return pid


def _run_child(action: Callable[[], object], keep: tuple[int, ...]) -> NoReturn:
    status = 99
    try:
        faulthandler.disable()
        borders = [2, *sorted(keep), os.sysconf("SC_OPEN_MAX")]
        for low, high in itertools.pairwise(borders):
            os.closerange(low + 1, high)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        action()
        status = 0
    except SystemExit as exit_request:
        status = int(exit_request.code or 0)
    except BaseException:
        status = 98
    finally:
        os._exit(status)


def exit_code(pid: int) -> int:
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize("manner", DEADLY)
def test_a_deadly_manner_ends_the_process_as_named(manner):
    assert exit_code(fork(lambda: misbehave(manner))) == DEADLY[manner]


@pytest.mark.parametrize(
    ("manner", "error"),
    [("raise", FaultError), ("custom_exception", TwoArgumentError), ("keyboard_interrupt", KeyboardInterrupt)],
)
def test_a_raising_manner_raises_and_leaves_the_env_as_it_was(manner, error):
    env = FaultyEnv(fault=Fault(manner, "step", at=2))
    twin = CounterEnv()
    env.reset(seed=3)
    twin.reset(seed=3)
    np.testing.assert_array_equal(env.step(ACTION)[0], twin.step(ACTION)[0])
    with pytest.raises(error):
        env.step(ACTION)
    np.testing.assert_array_equal(env.step(ACTION)[0], twin.step(ACTION)[0])


def test_a_pickle_fault_strikes_while_pickling_and_not_while_copying():
    env = FaultyEnv(fault=Fault("raise", "pickle", at=2))
    env.reset()
    assert pickle.loads(pickle.dumps(env.step(ACTION)[4])) == {}
    info = copy.deepcopy(env.step(ACTION)[4])
    with pytest.raises(FaultError):
        pickle.dumps(info)
    assert env.step(ACTION)[4] == {}


def test_an_unpickle_fault_strikes_the_reader():
    env = FaultyEnv(fault=Fault("custom_exception", "unpickle"))
    env.reset()
    data = pickle.dumps(copy.copy(env.step(ACTION)[4]))
    with pytest.raises(TwoArgumentError):
        pickle.loads(data)


def strikes(env: FaultyEnv, steps: int) -> list[int]:
    """The numbers of the steps, from 1, that raised; episodes are of four steps."""
    raised = []
    for step in range(1, steps + 1):
        if step % 4 == 1:
            env.reset()
        try:
            env.step(ACTION)
        except FaultError:
            raised.append(step)
    return raised


def test_faults_count_over_the_life_or_over_the_episode():
    assert strikes(FaultyEnv(fault=Fault("raise", "step", at=6)), 16) == [6]
    assert strikes(FaultyEnv(fault=Fault("raise", "step", at=2, per="episode")), 12) == [2, 6, 10]


def test_a_transient_fault_strikes_once_over_all_processes(tmp_path):
    fault = Fault("kill", "step", at=2, once=tmp_path / "marker")

    def live():
        env = FaultyEnv(fault=fault)
        env.reset()
        for _ in range(4):
            env.step(ACTION)

    assert exit_code(fork(live)) == -signal.SIGKILL
    assert exit_code(fork(live)) == 0
    assert (tmp_path / "marker").exists()


def test_fails_nth_time_counts_over_processes(tmp_path):
    env_fn = FailsNthTime(counter=tmp_path / "count", nth={2, 4})
    env_fn().close()
    assert exit_code(fork(pickle.loads(pickle.dumps(env_fn)))) == 98
    env_fn().close()
    with pytest.raises(FaultError, match="call 4"):
        env_fn()
    env_fn().close()
