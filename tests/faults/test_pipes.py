"""What lies in the pipes of a worker when it dies, or is closed, at the worst moment."""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import os
import signal
import struct
import termios
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from interruption import Interruption, every_place
from trainer_process import becomes_true

from multienv import Deadlines, MultiEnv, RestartPolicy, SubprocessEnv
from multienv.errors import EnvsFailedError, MultienvError, NothingPendingError, ReplyBrokenError, WaitTimeout
from multienv.testing import CounterEnv, is_alive

PIPE_SIZE = 65_536


class LongReplyEnv(CounterEnv):
    """Its observations, sent inline, make replies so many bytes longer than a pipe takes."""

    def __init__(self, excess: int) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (PIPE_SIZE - 24 + excess,), np.uint8)

    def _observe(self) -> Any:
        return np.full(self.observation_space.shape, 100 + self.episode_step, np.uint8)


class BabblingEnv(CounterEnv):
    """At action 7 it writes into the pipe of replies itself."""

    def step(self, action: Any) -> Any:
        if action == 7:
            ends = next(frame.frame.f_locals["ends"] for frame in inspect.stack() if "ends" in frame.frame.f_locals)
            os.write(ends.replies, b"\xff" * 64)
        return super().step(action)


class LongActionEnv(CounterEnv):
    """Its actions are longer than a pipe takes."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(0, 1, (PIPE_SIZE,), np.float64)


class FarewellEnv(CounterEnv):
    """Its infos are longer than a pipe takes; it leaves a file when it is closed."""

    def __init__(self, left: Path) -> None:
        super().__init__()
        self.left = left

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"long": bytes(4 * PIPE_SIZE)}

    def close(self) -> None:
        self.left.touch()


def worker_of(env: SubprocessEnv) -> Any:
    return env._supervisor._backend._worker


def unread(worker: Any) -> int:
    """How many bytes lie in the pipe of replies."""
    return int(struct.unpack("i", fcntl.ioctl(worker.replies, termios.FIONREAD, b"\0" * 4))[0])


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def hold_open(worker: Any) -> int:
    """Another descriptor of the worker's end of the pipe of replies, as a process that it leaves behind may have."""
    pipe = os.readlink(f"/proc/self/fd/{worker.replies}")
    ends = (end for end in Path(f"/proc/{worker.pid}/fd").iterdir() if os.readlink(end) == pipe)
    return os.open(next(ends), os.O_WRONLY)


@pytest.mark.parametrize("excess", [8, 8 * 1024])
def test_the_notice_of_a_death_is_not_taken_for_a_part_of_a_long_reply(excess: int) -> None:
    with SubprocessEnv(partial(LongReplyEnv, excess), shared_memory=False) as env:
        env.reset(seed=0)
        worker = worker_of(env)
        held = hold_open(worker)
        env.step_async(1)
        assert becomes_true(lambda: unread(worker) == PIPE_SIZE)
        os.kill(worker.pid, signal.SIGSTOP)
        assert becomes_true(lambda: is_stopped(worker.pid))

        def kill_once_read() -> None:
            if becomes_true(lambda: unread(worker) == 0):
                os.kill(worker.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_once_read)
        killer.start()
        observation, _, _, truncated, _ = env.step_wait()
        killer.join()
        os.close(held)
        assert set(observation.tolist()) == {101}
        assert not truncated
        assert env.statistics().exact_recoveries == 1
        assert set(env.step(1)[0].tolist()) == {102}


def test_how_a_worker_was_lost_is_said_again_when_it_is_asked_again() -> None:
    """A batch asks a second time, from where it heals."""
    with MultiEnv([SubprocessEnv(BabblingEnv, restart=RestartPolicy(on_crash="raise"))]) as multi:
        multi.reset(seed=0)
        with pytest.raises(EnvsFailedError) as caught:
            multi.step([7])
        assert isinstance(caught.value.failures[0], ReplyBrokenError)


# So long that a test that waited for it would be given up.
NEVER = Deadlines(close=10_000.0)


def test_closing_does_not_wait_for_a_worker_that_waits_for_the_rest_of_its_action() -> None:
    env = SubprocessEnv(LongActionEnv, deadlines=NEVER).initialize()
    env.reset(seed=0)
    pid = env.statistics().pid
    os.kill(pid, signal.SIGSTOP)  # it reads no more of the action than the pipe takes
    assert becomes_true(lambda: is_stopped(pid))
    env.step_async(np.zeros(PIPE_SIZE))
    os.kill(pid, signal.SIGCONT)
    env.close()
    assert becomes_true(lambda: not is_alive(pid))


def test_closing_makes_room_for_a_reply_that_nobody_has_collected(tmp_path: Path) -> None:
    env = SubprocessEnv(partial(FarewellEnv, tmp_path / "left"), deadlines=NEVER).initialize()
    env.reset(seed=0)
    env.step_async(1)
    worker = worker_of(env)
    assert becomes_true(lambda: unread(worker) == PIPE_SIZE)
    env.close()
    assert (tmp_path / "left").exists(), "the env was not closed but killed"


@pytest.mark.parametrize("impatient", [False, True])
def test_waiting_with_a_timeout_finds_the_reply_after_an_interruption(impatient: bool) -> None:
    with SubprocessEnv(CounterEnv) as env:
        place, fired = 0, True
        while fired:
            with Interruption(place) as interruption:
                env.reset_async(seed=3)
            place, fired = place + 1, interruption.fired
            if impatient:
                with contextlib.suppress(WaitTimeout, NothingPendingError):
                    env.reset_wait(timeout=0.0)
                    continue
            try:
                observation, _ = env.reset_wait(timeout=10.0)
            except NothingPendingError:  # it had not begun
                continue
            assert observation[0] == 0, interruption.where
        assert place > 10


def test_building_with_a_timeout_after_an_interruption_and_a_wrong_call() -> None:
    for interruption in every_place():
        env = SubprocessEnv(CounterEnv, deadlines=Deadlines(start=None)).start()
        with interruption:
            env.initialize()
        with pytest.raises(MultienvError):
            env.step(1)
        env.initialize(timeout=10.0)
        assert env.reset(seed=3)[0][0] == 0, interruption.where
        env.close()


class GatedEnv(CounterEnv):
    """Its step waits until a file is there."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self.gate = gate

    def step(self, action: Any) -> Any:
        becomes_true(self.gate.exists)
        return super().step(action)


def test_a_step_is_not_waited_for_longer_than_said_after_an_interruption(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    with SubprocessEnv(partial(GatedEnv, gate)) as env:
        for interruption in every_place():
            env.reset(seed=3)
            gate.unlink()
            with interruption:
                env.step_async(1)
            with contextlib.suppress(NothingPendingError):
                with pytest.raises(WaitTimeout):
                    env.step_wait(timeout=0.01)
                with pytest.raises(WaitTimeout):
                    env.step_wait(timeout=0.01)
            gate.touch()
            with contextlib.suppress(NothingPendingError):
                assert env.step_wait(timeout=10.0)[0][0] == 1, interruption.where
