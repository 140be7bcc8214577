"""close() by a signal handler, or by another thread, at any moment of another call: that call says so, or returns."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest

from kit import CounterEnv, Fault, FaultyEnv, is_alive
from multienv import RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv.errors import ClosedError, EnvsFailedError
from multienv.processes import launcher
from multienv.processes.worker_process import ProcessChannel

ENDLESS = partial(CounterEnv, horizon=None)


@pytest.fixture
def closing() -> Iterator[list[SubprocessEnv]]:
    envs: list[SubprocessEnv] = []
    before = signal.signal(signal.SIGALRM, lambda *_: envs[-1].close())
    yield envs
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def step_until_closed(env: SubprocessEnv) -> None:
    """From the first step of an episode on; each that returns is the one after the last."""
    with pytest.raises(ClosedError):
        for expected in count(1):
            observation, _, _, truncated, _ = env.step(1)
            assert (observation[0], truncated) == (expected, False)


def test_close_by_a_handler_in_the_middle_of_a_step(closing: list[SubprocessEnv]) -> None:
    moments = random.Random(2)
    for _ in range(60):
        env = SubprocessEnv(ENDLESS).initialize()
        closing.append(env)
        env.reset(seed=0)
        pid = env.statistics().pid
        signal.setitimer(signal.ITIMER_REAL, moments.uniform(5e-4, 3e-3))
        step_until_closed(env)
        assert env.statistics().state == "closed"
        with pytest.raises(ClosedError):
            env.reset()
        env.close()
        assert pid is not None
        assert not is_alive(pid)


def test_close_by_another_thread_in_the_middle_of_a_step() -> None:
    moments = random.Random(3)
    for _ in range(40):
        env = SubprocessEnv(ENDLESS).initialize()
        env.reset(seed=0)
        pid = env.statistics().pid
        closer = threading.Timer(moments.uniform(5e-4, 3e-3), env.close)
        closer.start()
        step_until_closed(env)
        closer.join()
        assert env.statistics().state == "closed"
        assert pid is not None
        assert not is_alive(pid)


def test_close_by_another_thread_while_a_step_hangs() -> None:
    env = SubprocessEnv(partial(FaultyEnv, fault=Fault("hang_c", "step", at=1))).initialize()
    env.reset(seed=0)
    closer = threading.Timer(0.2, env.close)
    closer.start()
    with pytest.raises(ClosedError):
        env.step(1)
    closer.join()


@pytest.mark.parametrize("by", ["handler", "thread"])
def test_close_in_the_middle_of_building(closing: list[SubprocessEnv], by: str) -> None:
    def build() -> CounterEnv:
        threading.Event().wait(20)
        return CounterEnv()

    env = SubprocessEnv(build)
    closing.append(env)
    env.start()
    closer = threading.Timer(0.2, env.close)
    if by == "thread":
        closer.start()
    else:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(ClosedError):
        env.initialize()
    if by == "thread":
        closer.join()
    assert env.statistics().state == "closed"
    with pytest.raises(ClosedError):
        env.initialize()
    env.close()


def test_an_interrupted_close_is_completed_by_the_next() -> None:
    class Impatient(Exception):
        pass

    def strike(*_: object) -> None:
        raise Impatient

    class Slow(CounterEnv):
        def close(self) -> None:
            threading.Event().wait(20)

    env = SubprocessEnv(Slow).initialize()
    pid = env.statistics().pid
    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Impatient):
            env.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    env.close()
    assert pid is not None
    assert not is_alive(pid)


class Unrepeatable(CounterEnv):
    """No replay shows what was seen."""

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        observation[1] = int.from_bytes(os.urandom(2), "little") / 65536
        return observation, *rest


def lost_batch() -> SubprocessVectorEnv:
    policy = RestartPolicy(on_crash="raise", snapshots=False, state_anchors=False)
    batch = SubprocessVectorEnv([partial(Unrepeatable, horizon=None)] * 2, envs_per_worker=1, restart=policy)
    batch.reset(seed=0)
    batch.step([0, 0])
    os.kill(batch.statistics()[0].pid or 0, signal.SIGKILL)
    with pytest.raises(EnvsFailedError):
        batch.step([0, 0])
    return batch


@pytest.mark.parametrize("where", [(launcher.Launch, "start"), (ProcessChannel, "wait"), (ProcessChannel, "kill")])
def test_a_batch_closed_by_a_handler_while_a_process_is_launched_awaited_or_killed(
    where: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, (owner, name), closed = lost_batch(), where, []
    plain = getattr(owner, name)

    def close(*_: Any) -> None:
        batch.close()
        closed.append(True)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            monkeypatch.undo()
            signal.raise_signal(signal.SIGUSR1)
        return plain(*arguments, **options)

    before = signal.signal(signal.SIGUSR1, close)
    try:
        monkeypatch.setattr(owner, name, interrupted)
        with contextlib.suppress(ClosedError):
            batch.reset(seed=1)
            batch.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert closed or name != "wait"
    batch.close()


def test_a_child_forked_while_another_thread_launches_closes_its_copy_of_an_env() -> None:
    """It lets go of its copies without waiting for a lock whose holder is not there."""
    kept = SubprocessEnv(ENDLESS).initialize()
    kept.reset(seed=0)
    with launcher._lock:
        pid = fork_in_a_thread(kept)
    until = time.monotonic() + 10
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended or time.monotonic() > until:
            break
        time.sleep(0.01)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert ended, "it hangs in close()"
    assert status == 0
    assert kept.step(1)[0][0] == 1
    kept.close()


def fork_in_a_thread(env: SubprocessEnv) -> int:
    forked: list[int] = []

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                env.close()
                code = 0
            finally:
                os._exit(code)
        forked.append(pid)

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    return forked[0]
