"""Each manner of failing does what it says, in a real process; each moment and each count is kept."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import itertools
import os
import pickle
import select
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
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


@pytest.mark.parametrize("moment", ["construct", "reset", "step", "render", "call", "close"])
@pytest.mark.parametrize("manner", ["kill", "exit", "raise", "system_exit"])
def test_every_moment_strikes(manner, moment):
    reached = []

    def live():
        env = FaultyEnv(fault=Fault(manner, moment))
        env.reset(seed=0)
        env.step(ACTION)
        env.render()
        env.poke()
        env.close()
        reached.append("the end")
        os._exit(0)

    expected = 98 if manner == "raise" else DEADLY[manner]
    assert exit_code(fork(live)) == expected


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


def hang_beside_an_echo(manner: str, echo: socket.socket) -> None:
    """Hang in the main thread while another one answers on *echo*."""

    def answer():
        while data := echo.recv(1):
            echo.send(data)

    threading.Thread(target=answer, daemon=True).start()
    misbehave(manner)


def answers(connection: socket.socket) -> bool:
    connection.send(b"?")
    readable, _, _ = select.select((connection,), (), (), 0.5)
    return bool(readable) and connection.recv(1) == b"?"


@pytest.mark.parametrize(("manner", "others_run"), [("hang", True), ("spin", True), ("hang_c", False)])
def test_a_hang_holds_the_gil_only_in_c(manner, others_run):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pid = fork(lambda: hang_beside_an_echo(manner, theirs), keep=(theirs.fileno(),))
        try:
            assert answers(ours) or not others_run
            if not others_run:
                while answers(ours):  # until the child has reached its hang
                    pass
        finally:
            os.kill(pid, signal.SIGKILL)
        assert exit_code(pid) == -signal.SIGKILL


@pytest.mark.parametrize("manner", ["hang", "hang_c"])
def test_sigterm_ends_a_hang_unless_ignored(manner):
    signal_read, signal_write = os.pipe()

    def hang():
        fault = Fault(manner, "step", ignore_sigterm=True)
        os.write(signal_write, b".")
        fault.strike()

    stubborn = fork(hang, keep=(signal_write,))
    meek = fork(lambda: Fault(manner, "step").strike())
    os.read(signal_read, 1)
    os.kill(meek, signal.SIGTERM)
    assert exit_code(meek) == -signal.SIGTERM
    wait_until_sigterm_is_ignored(stubborn)
    os.kill(stubborn, signal.SIGTERM)
    os.kill(stubborn, signal.SIGKILL)
    assert exit_code(stubborn) == -signal.SIGKILL
    os.close(signal_read)
    os.close(signal_write)


def wait_until_sigterm_is_ignored(pid: int) -> None:
    bit = 1 << (signal.SIGTERM - 1)
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        ignored = next(line for line in status.splitlines() if line.startswith("SigIgn"))
        if int(ignored.split()[1], 16) & bit:
            return


def test_garbage_reaches_pipes_and_sockets_and_never_blocks():
    reading, writing = os.pipe()
    full_reading, full_writing = os.pipe()
    os.set_blocking(full_writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(full_writing, b"x" * 4096)
    os.set_blocking(full_writing, True)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channels = (writing, full_writing, ours.fileno())
        assert exit_code(fork(lambda: misbehave("garbage"), keep=channels)) == 0
        assert os.read(reading, 7) == b"garbage"
        assert theirs.recv(7) == b"garbage"
    for descriptor in (reading, writing, full_reading, full_writing):
        os.close(descriptor)


def test_unpicklable_results_at_every_moment():
    for moment in ("reset", "step"):
        env = FaultyEnv(fault=Fault("unpicklable", moment))
        info = env.reset()[1]
        if moment == "step":
            info = env.step(ACTION)[4]
        with pytest.raises(TypeError):
            pickle.dumps(info)
    for name, moment in (("render", "render"), ("poke", "call")):
        env = FaultyEnv(fault=Fault("unpicklable", moment))
        with pytest.raises(TypeError):
            pickle.dumps(getattr(env, name)())
    with pytest.raises(TypeError):
        pickle.dumps(FaultyEnv(fault=Fault("unpicklable", "construct")).metadata)
    FaultyEnv(fault=Fault("unpicklable", "close")).close()


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
