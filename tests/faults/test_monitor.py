"""The monitor holds out: many workers, no descriptor left for one more, its own death."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from trainer_process import becomes_true, run

from kit import CounterEnv, Fault, FaultyEnv, descendants, is_alive, monitor_pid
from multienv import Deadlines, RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv.errors import MultienvError
from multienv.processes import launcher

METHODS = ["forkserver", pytest.param("spawn", marks=pytest.mark.soak)]
KILLED = partial(FaultyEnv, fault=Fault("kill", "step"))


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class limited_descriptors:  # noqa: N801 - used like a function
    """The monitor may open descriptors below this number only."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __enter__(self) -> None:
        self.before = resource.prlimit(monitor_pid(), resource.RLIMIT_NOFILE)
        resource.prlimit(monitor_pid(), resource.RLIMIT_NOFILE, (self.limit, self.before[1]))

    def __exit__(self, *error: object) -> None:
        resource.prlimit(monitor_pid(), resource.RLIMIT_NOFILE, self.before)


@contextmanager
def monitor_that_begins_with(code: str) -> Iterator[None]:
    """Have another monitor for the block, which executes this line first."""
    plain, before = launcher._command, launcher._client

    def command(control: int) -> list[str]:
        words = plain(control)
        at = words.index("-c") + 1
        return [*words[:at], f"{code}; {words[at]}", *words[at + 1 :]]

    launcher._command, launcher._client = command, None
    try:
        yield
        assert launcher._client is not None
        launcher._client.close()
    finally:
        launcher._command, launcher._client = plain, before


def test_a_monitor_with_more_than_a_thousand_descriptors_reports_deaths(method: str) -> None:
    """As 255 workers make it have: select() knows those below 1024 only."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        crowded = monitor_that_begins_with("import os; [os.open(os.devnull, 0) for _ in range(1020)]")
        with crowded, SubprocessEnv(CounterEnv, context=method) as other:
            other.reset(seed=0)
            first = monitor_pid()
            with SubprocessEnv(KILLED, context=method) as env:
                env.reset(seed=0)
                env.step(1)
            other.step(1)
            assert other.statistics().losses == 0
            assert monitor_pid() == first
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_worker_that_the_monitor_has_no_descriptors_for_is_lost_alone(method: str) -> None:
    """Whichever of its system calls is the first to find none left."""
    policy = RestartPolicy(on_crash="raise")
    refused = 0
    with SubprocessEnv(CounterEnv, context=method) as other:
        other.reset(seed=0)
        first = monitor_pid()
        opened = set(map(int, os.listdir(f"/proc/{first}/fd")))
        for limit in sorted(set(range(64)) - opened)[:12]:
            env = SubprocessEnv(CounterEnv, context=method, restart=policy)
            with limited_descriptors(limit):
                try:
                    env.initialize()
                except MultienvError:
                    refused += 1
                finally:
                    env.close()
        other.step(1)
        assert other.statistics().last_loss is None
        assert monitor_pid() == first
        with SubprocessEnv(CounterEnv, context=method) as env:
            env.reset(seed=0)
    assert refused >= 4


def children() -> list[tuple[int, str]]:
    """The trainer's own, with their states."""
    return [(record.pid, record.state) for record in descendants(os.getpid()).values() if record.parent == os.getpid()]


class LeavingEnv(CounterEnv):
    """Starts a process that leads a session of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = subprocess.Popen(["sleep", "60"], start_new_session=True).pid


@pytest.mark.parametrize("end", ["close", "collect"])
def test_a_dead_monitor_leaves_no_zombie(end: str, method: str) -> None:
    env = SubprocessEnv(CounterEnv, context=method).initialize()
    monitor = monitor_pid()
    os.kill(monitor, signal.SIGKILL)
    if end == "close":
        env.close()
    del env
    gc.collect()
    assert becomes_true(lambda: monitor not in dict(children()))


def test_what_an_env_started_ends_with_it_although_the_monitor_is_dead(method: str) -> None:
    with SubprocessEnv(LeavingEnv, context=method) as env:
        left = env.get_attr("left")
        os.kill(monitor_pid(), signal.SIGKILL)
    assert becomes_true(lambda: not is_alive(left))


# --- without the monitor --------------------------------------------------------------------------

LIMITED = Deadlines(step=0.5, reset=0.5)


class HangingEnv(CounterEnv):
    def step(self, action: Any) -> Any:
        if action == 0:
            threading.Event().wait()
        return super().step(action)


def reason_of(info: dict[str, Any]) -> str:
    return str(info["multienv"]["reason"])


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_deadline_holds_without_the_monitor(method: str, number: signal.Signals) -> None:
    on_crash: Any = "replay" if number == signal.SIGKILL else "raise"  # the worker dies with the monitor
    policy = RestartPolicy(on_timeout="truncate", on_crash=on_crash)
    with SubprocessEnv(HangingEnv, context=method, deadlines=LIMITED, restart=policy) as env:
        env.reset(seed=0)
        env.step(1)
        os.kill(monitor_pid(), number)
        _, _, _, truncated, info = env.step(0)
        assert truncated
        assert "did not answer within its deadline" in reason_of(info)
        env.reset(seed=0)
        assert env.step(1)[0][0] == 1


def test_a_death_is_heard_of_without_a_deadline_though_the_monitor_is_stopped(method: str) -> None:
    with SubprocessEnv(CounterEnv, context=method) as env:
        env.reset(seed=0)
        env.step(1)
        os.kill(monitor_pid(), signal.SIGSTOP)
        os.kill(env.statistics().pid or 0, signal.SIGKILL)
        observation, _, _, truncated, info = env.step(1)
        assert (observation[0], truncated, info.get("multienv")) == (2, False, None)


def test_a_death_is_heard_of_without_pidfd_though_the_monitor_is_stopped() -> None:
    """As where the kernel, or a sandbox, has no pidfd: the line alone tells of the death."""
    with monitor_that_begins_with("import os; del os.pidfd_open"), SubprocessEnv(CounterEnv) as env:
        env.reset(seed=0)
        env.step(1)
        os.kill(monitor_pid(), signal.SIGSTOP)
        os.kill(env.statistics().pid or 0, signal.SIGKILL)
        assert env.step(1)[0][0] == 2
        assert env.statistics().exact_recoveries == 1


def test_close_is_bounded_though_the_monitor_is_stopped(method: str) -> None:
    make = partial(SubprocessEnv, context=method, deadlines=Deadlines(close=0.5))
    envs = [make(env_fn).initialize() for env_fn in (CounterEnv, HangingEnv)]
    for env in envs:
        env.reset(seed=0)
    envs[1].step_async(0)
    os.kill(monitor_pid(), signal.SIGSTOP)
    began = time.monotonic()
    for env in envs:
        env.close()
    assert time.monotonic() - began < 6.0


def test_an_env_is_built_though_the_monitor_is_stopped(method: str) -> None:
    with SubprocessEnv(CounterEnv, deadlines=LIMITED):
        os.kill(monitor_pid(), signal.SIGSTOP)
        with SubprocessEnv(CounterEnv, context=method, deadlines=Deadlines(start=0.5, step=60)) as env:
            env.reset(seed=0)
            assert env.step(1)[0][0] == 1


@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)])
def test_a_deadline_of_several_in_a_process_holds_without_the_monitor(method: str, number: signal.Signals) -> None:
    envs = SubprocessVectorEnv(
        [CounterEnv, HangingEnv, CounterEnv, CounterEnv], envs_per_worker=2, context=method, deadlines=LIMITED
    )
    with closing(envs):
        envs.reset(seed=0)
        envs.step([1, 1, 1, 1])
        os.kill(monitor_pid(), number)
        observations, _, _, truncations, _ = envs.step([1, 0, 1, 1])
        assert observations[[0, 2, 3], 0].tolist() == [2, 2, 2]
        assert truncations.tolist() == [False, True, False, False]


class Stopping(threading.Thread):
    """Stops the monitor again whenever it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()
        self.monitor = monitor_pid()

    def run(self) -> None:
        with suppress(ProcessLookupError):
            while not self.over.wait(0.001):
                os.kill(self.monitor, signal.SIGSTOP)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.join()


def test_a_monitor_that_does_not_go_on_is_replaced(monkeypatch: Any) -> None:
    with SubprocessEnv(HangingEnv, deadlines=LIMITED) as env:
        env.reset(seed=0)
        env.step(1)
        before = monitor_pid()
        with Stopping():
            assert env.step(0)[3]
            env.reset(seed=0)
            assert env.step(1)[0][0] == 1
        assert monitor_pid() != before


def test_a_call_in_an_exit_handler_is_refused(method: str) -> None:
    said = run("lifecycle_trainers", "use_in_exit_handlers", method)
    assert said.count("raised ClosedError") >= 3
    assert "used" in said


def test_several_envs_are_closed_in_an_exit_handler(method: str) -> None:
    said = run("lifecycle_trainers", "close_in_exit_handlers", method)
    assert [word.partition("[")[0] for word in said if word] == [
        "raised ClosedError",
        "raised EnvsFailedError",
        "closed",
    ]
