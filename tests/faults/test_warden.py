"""The warden holds out: many workers, no descriptor left for one more, its own death."""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import subprocess
import threading
from contextlib import closing, suppress
from functools import partial
from typing import Any

import pytest
from trainer_process import becomes_true, run

from multienv import Deadlines, RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv.errors import MultienvError
from multienv.processes import client, descriptors, launch
from multienv.testing import CounterEnv, Fault, FaultyEnv, descendants, is_alive

METHODS = ["forkserver", pytest.param("spawn", marks=pytest.mark.soak), "fork"]
KILLED = partial(FaultyEnv, fault=Fault("kill", "step"))


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def warden_pid() -> int:
    assert client._client is not None
    return client._client.process.pid


class limited_descriptors:  # noqa: N801 - used like a function
    """The warden may open descriptors below this number only."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __enter__(self) -> None:
        self.before = resource.prlimit(warden_pid(), resource.RLIMIT_NOFILE)
        resource.prlimit(warden_pid(), resource.RLIMIT_NOFILE, (self.limit, self.before[1]))

    def __exit__(self, *error: object) -> None:
        resource.prlimit(warden_pid(), resource.RLIMIT_NOFILE, self.before)


def test_a_warden_with_more_than_a_thousand_descriptors_reports_deaths(method: str, monkeypatch: Any) -> None:
    """As 255 workers make it have: select() knows those below 1024 only."""
    launch_warden = client._warden_command

    def crowded(control: int) -> list[str]:
        command = launch_warden(control)
        at = command.index("-c") + 1
        command[at] = "import os; [os.open(os.devnull, 0) for _ in range(1020)]; " + command[at]
        return command

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    monkeypatch.setattr(client, "_warden_command", crowded)
    try:
        client._client, before = None, client._client
        with SubprocessEnv(CounterEnv, context=method) as other:
            other.reset(seed=0)
            first = warden_pid()
            with SubprocessEnv(KILLED, context=method) as env:
                env.reset(seed=0)
                env.step(1)
            other.step(1)
            assert other.statistics().losses == 0
            assert warden_pid() == first
        assert client._client is not None
        client._client.close()
    finally:
        client._client = before
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_worker_that_the_warden_has_no_descriptors_for_is_lost_alone(method: str) -> None:
    """Whichever of its system calls is the first to find none left."""
    policy = RestartPolicy(on_crash="raise")
    refused = 0
    with SubprocessEnv(CounterEnv, context=method) as other:
        other.reset(seed=0)
        first = warden_pid()
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
        assert other.statistics().losses == 0
        assert warden_pid() == first
        with SubprocessEnv(CounterEnv, context=method) as env:
            env.reset(seed=0)
    assert refused >= 4


def children() -> list[tuple[int, str]]:
    """The trainer's own, with their states."""
    return [(record.pid, record.state) for record in descendants(os.getpid()).values() if record.parent == os.getpid()]


class LargeEnv(CounterEnv):
    """Takes the kernel some milliseconds to end."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = b"x" * 2**27


def test_close_reaps_a_forked_worker_whose_warden_is_dead() -> None:
    with SubprocessEnv(LargeEnv, context="fork") as env:
        env.reset(seed=0)
        pid = env.statistics().pid or 0
        os.kill(pid, signal.SIGSTOP)  # it does not end by itself
        os.kill(warden_pid(), signal.SIGKILL)
    assert pid not in dict(children())


class LeavingEnv(CounterEnv):
    """Starts a process that leads a session of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = subprocess.Popen(["sleep", "60"], start_new_session=True).pid


@pytest.mark.parametrize("end", ["close", "collect"])
def test_a_dead_warden_leaves_no_zombie(end: str, method: str) -> None:
    env = SubprocessEnv(CounterEnv, context=method).initialize()
    warden = warden_pid()
    os.kill(warden, signal.SIGKILL)
    assert client._client is not None
    becomes_readable(client._client._control.fileno())
    if end == "close":
        env.close()
    del env
    gc.collect()
    assert warden not in dict(children())


def becomes_readable(descriptor: int) -> None:
    assert select.select([descriptor], [], [], 30)[0]


def test_what_an_env_started_ends_with_it_although_the_warden_is_dead(method: str) -> None:
    with SubprocessEnv(LeavingEnv, context=method) as env:
        left = env.get_attr("left")
        os.kill(warden_pid(), signal.SIGKILL)
    assert becomes_true(lambda: not is_alive(left))


# --- who guards it --------------------------------------------------------------------------------

LIMITED = Deadlines(step=0.5, reset=0.5)


class HangingEnv(CounterEnv):
    def step(self, action: Any) -> Any:
        if action == 0:
            threading.Event().wait()
        return super().step(action)


def reason_of(info: dict[str, Any]) -> str:
    return str(info["multienv"]["reason"])


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_deadline_holds_without_the_warden(method: str, number: signal.Signals) -> None:
    dies_with_it = number == signal.SIGKILL and method != "fork"
    policy = RestartPolicy(on_timeout="truncate", on_crash="replay" if dies_with_it else "raise")
    with SubprocessEnv(HangingEnv, context=method, deadlines=LIMITED, restart=policy) as env:
        env.reset(seed=0)
        env.step(1)
        os.kill(warden_pid(), number)
        _, _, _, truncated, info = env.step(0)
        assert truncated
        assert "did not answer within its deadline" in reason_of(info)
        env.reset(seed=0)
        assert env.step(1)[0][0] == 1


def test_a_death_is_heard_of_though_the_warden_is_stopped(method: str) -> None:
    with SubprocessEnv(CounterEnv, context=method, deadlines=LIMITED) as env:
        env.reset(seed=0)
        env.step(1)
        os.kill(warden_pid(), signal.SIGSTOP)
        os.kill(env.statistics().pid or 0, signal.SIGKILL)
        observation, _, _, truncated, info = env.step(1)
        assert (observation[0], truncated, info.get("multienv")) == (2, False, None)


def test_an_env_is_built_though_the_warden_is_stopped(method: str) -> None:
    with SubprocessEnv(CounterEnv, deadlines=LIMITED):
        os.kill(warden_pid(), signal.SIGSTOP)
        with SubprocessEnv(CounterEnv, context=method, deadlines=Deadlines(start=0.5, step=60)) as env:
            env.reset(seed=0)
            assert env.step(1)[0][0] == 1
            os.kill(warden_pid(), signal.SIGCONT)  # nobody else needs it, under fork


@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)])
def test_of_several_in_a_process(method: str, number: signal.Signals) -> None:
    envs = SubprocessVectorEnv(
        [CounterEnv, HangingEnv, CounterEnv, CounterEnv], envs_per_worker=2, context=method, deadlines=LIMITED
    )
    with closing(envs):
        envs.reset(seed=0)
        envs.step([1, 1, 1, 1])
        os.kill(warden_pid(), number)
        observations, _, _, truncations, _ = envs.step([1, 0, 1, 1])
        assert observations[[0, 2, 3], 0].tolist() == [2, 2, 2]
        assert truncations.tolist() == [False, True, False, False]


class Stopping(threading.Thread):
    """Stops the warden again whenever it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()
        self.warden = warden_pid()

    def run(self) -> None:
        with suppress(ProcessLookupError):
            while not self.over.wait(0.001):
                os.kill(self.warden, signal.SIGSTOP)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.join()


def test_a_warden_that_does_not_go_on_is_replaced(monkeypatch: Any) -> None:
    monkeypatch.setattr(launch, "_UP_WITHIN", 0.0)
    with SubprocessEnv(HangingEnv, deadlines=LIMITED) as env:
        env.reset(seed=0)
        env.step(1)
        before = warden_pid()
        with Stopping():
            assert env.step(0)[3]
            env.reset(seed=0)
            assert env.step(1)[0][0] == 1
        assert warden_pid() != before


def test_a_forked_worker_of_a_dead_warden_is_not_the_next_ones_fault() -> None:
    with (
        SubprocessEnv(HangingEnv, context="fork", deadlines=LIMITED) as env,
        SubprocessEnv(CounterEnv, deadlines=LIMITED) as other,
    ):
        env.reset(seed=0)
        other.reset(seed=0)
        env.step_async(0)
        pid = other.statistics().pid or 0
        os.kill(warden_pid(), signal.SIGKILL)
        assert becomes_true(lambda: not is_alive(pid))
        other.step(1)
        warden = warden_pid()
        assert env.step_wait()[3]
        other.step(1)
        assert warden_pid() == warden
        assert other.statistics().losses == 1


def test_an_env_is_refused_in_an_exit_handler(method: str) -> None:
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


def test_one_that_cannot_be_launched_leaves_no_number_behind() -> None:
    """A worker forked later would close whatever has that number then."""
    noted = set(descriptors._trainers.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        with pytest.raises(BlockingIOError):
            client.WardenClient()
    gc.collect()
    assert set(descriptors._trainers.values()) == noted


def refuse(*_: Any, **__: Any) -> None:
    raise BlockingIOError("Resource temporarily unavailable")
