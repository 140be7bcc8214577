"""The monitor holds out: many workers, no descriptor left for one more, its own death."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import subprocess
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fault_envs import BabblingEnv

from kit import CounterEnv, Fault, FaultyEnv, ForkingEnv, is_alive, kill_worker, monitor_pid
from kit.trainer_process import becomes_true
from multienv import Deadlines, RestartPolicy, SubprocessEnv
from multienv._engine.processes.launcher import MonitorClient
from multienv._engine.processes.protocol import LAUNCH
from multienv.errors import MultienvError, WorkerLostError


class limited_descriptors:  # noqa: N801 - used like a function
    """The monitor may open descriptors below this number only."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __enter__(self) -> None:
        self.before = resource.prlimit(monitor_pid(), resource.RLIMIT_NOFILE)
        resource.prlimit(monitor_pid(), resource.RLIMIT_NOFILE, (self.limit, self.before[1]))

    def __exit__(self, *error: object) -> None:
        resource.prlimit(monitor_pid(), resource.RLIMIT_NOFILE, self.before)


@pytest.mark.parametrize("preload", [(), ("json",)])
def test_a_worker_that_the_monitor_has_no_descriptors_for_is_lost_alone(preload: tuple[str, ...]) -> None:
    """Whichever of its system calls is the first to find none left."""
    policy = RestartPolicy(on_crash="raise")
    refused: list[str] = []
    with SubprocessEnv(CounterEnv) as other:
        other.reset(seed=0)
        first = monitor_pid()
        opened = set(map(int, os.listdir(f"/proc/{first}/fd")))
        for limit in sorted(set(range(64)) - opened)[:7]:
            env = SubprocessEnv(CounterEnv, restart=policy, preload=preload)
            with limited_descriptors(limit):
                try:
                    env.initialize()
                except MultienvError as error:
                    refused.append(str(error))
                finally:
                    env.close()
        other.step(1)
        assert other.statistics().last_loss is None
        assert monitor_pid() == first
        with SubprocessEnv(CounterEnv) as env:
            env.reset(seed=0)
    assert len(refused) >= 3
    assert all("ulimit -n" in one for one in refused)


def test_what_an_env_started_ends_with_it_although_the_monitor_is_dead() -> None:
    with SubprocessEnv(partial(ForkingEnv, stubborn=True)) as env:
        (left,) = env.get_attr("children")
        os.kill(monitor_pid(), signal.SIGKILL)
    assert becomes_true(lambda: not is_alive(left))


REPLAYED = RestartPolicy(snapshots=False, backoff=0.0)

# --- what a child sends it ------------------------------------------------------------------------


def test_the_monitor_and_other_workers_survive_what_a_worker_writes_to_it() -> None:
    with (
        SubprocessEnv(partial(CounterEnv, horizon=None), reports="") as other,
        subprocess.Popen(["sleep", "1000"]) as bystander,
    ):
        other.reset(seed=0)
        first, kept = monitor_pid(), other.snapshot()
        for seed in range(16):
            with SubprocessEnv(BabblingEnv, reports="") as env:
                env.reset(seed=0)
                env.call("babble", seed, [first, bystander.pid, other.statistics().pid])
                if seed % 4 == 0:
                    kill_worker(env)
                assert int(env.step(1)[0][0]) == 1
            other.step(1)
        assert bystander.poll() is None
        bystander.kill()
        other.restore(kept)
        assert other.step(1)[0][0] == 1
        assert monitor_pid() == first
        assert other.statistics().losses == 0


ANSWERS = """
    import glob, random, socket, struct
    chance = random.Random({seed})
    channels = [int(n) for n in os.listdir("/proc/self/fd") if int(n) > 2 and os.path.exists(f"/proc/self/fd/{{n}}")]
    def babble():
        if open("/proc/self/comm").read() != "multienv preloa\\n":
            return
        pids = [int(path.split("/")[2]) for path in glob.glob("/proc/[0-9]*")] + [0, -1, -5, -10**6, 2**62]
        data = [struct.pack("<q", chance.choice(pids)), chance.randbytes(chance.randrange(1, 20)), b"ready", b"\\0", b"\\0x"]
        for number in channels:
            try:
                os.write(number, chance.choice(data))
            except OSError:
                pass
    {when}
"""


@pytest.mark.parametrize("when", ["os.register_at_fork(before=babble)", "babble()"])
def test_the_monitor_and_other_workers_survive_what_an_import_writes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with SubprocessEnv(CounterEnv, reports="") as other:
        other.reset(seed=0)
        first = monitor_pid()
        for seed in range(6):
            name = f"babbling_{seed}_{when[:2]}"
            (tmp_path / f"{name}.py").write_text("import os\n" + textwrap.dedent(ANSWERS).format(seed=seed, when=when))
            env = SubprocessEnv(CounterEnv, preload=[name], restart=REPLAYED, reports="")
            with contextlib.suppress(WorkerLostError):  # no answer that makes sense: the next try does without
                env.initialize()
            with env:
                env.reset(seed=0)
                kill_worker(env)
                assert int(env.step(1)[0][0]) == 1
            other.step(1)
        assert monitor_pid() == first
        assert other.statistics().losses == 0


# --- without the monitor --------------------------------------------------------------------------

LIMITED = Deadlines(step=1.0, reset=1.0)


def reason_of(info: dict[str, Any]) -> str:
    return str(info["multienv"]["reason"])


def test_a_deadline_holds_though_the_monitor_is_killed() -> None:
    policy = RestartPolicy(on_timeout="truncate")  # the worker dies with the monitor: that is replayed
    with SubprocessEnv(
        partial(FaultyEnv, fault=Fault("hang", "step", action=0)), deadlines=LIMITED, restart=policy
    ) as env:
        env.reset(seed=0)
        env.step(1)
        os.kill(monitor_pid(), signal.SIGKILL)
        _, _, _, truncated, info = env.step(0)
        assert truncated
        assert "did not answer within its deadline" in reason_of(info)
        env.reset(seed=0)
        assert env.step(1)[0][0] == 1


@pytest.fixture
def kill_monitors(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what has so many monitors killed, each just before it is given the order to launch a worker."""
    send, left = MonitorClient.send, [0.0]

    def kill_then_send(self: MonitorClient, order: Any, *rest: Any, **options: Any) -> None:
        if order.operation == LAUNCH and left[0] > 0:
            left[0] -= 1
            self.process.kill()
            self.process.wait()
        send(self, order, *rest, **options)

    monkeypatch.setattr(MonitorClient, "send", kill_then_send)
    return lambda count: left.__setitem__(0, count)


def test_a_launch_survives_monitors_that_die_one_after_the_other(kill_monitors: Callable[[float], None]) -> None:
    count = 7  # more than one order to launch a worker outlives
    kill_monitors(count)
    with SubprocessEnv(CounterEnv, restart=REPLAYED) as env:
        env.reset(seed=0)
        env.step(1)
        kill_worker(env)
        kill_monitors(count)
        observation, _, _, truncated, _ = env.step(1)
        assert (int(observation[0]), truncated) == (2, False)


def test_a_launch_is_given_up_with_a_reason_where_all_monitors_die(kill_monitors: Callable[[float], None]) -> None:
    kill_monitors(math.inf)
    env = SubprocessEnv(CounterEnv, restart=REPLAYED)
    with pytest.raises(WorkerLostError, match=r"(?s)during initialize.*monitors.*dmesg"):
        env.initialize()
    kill_monitors(0)
    with env:
        env.reset(seed=0)
        env.step(1)
        kill_worker(env)
        kill_monitors(math.inf)
        _, _, _, truncated, info = env.step(1)
        assert truncated
        assert "processes ended while being built" in reason_of(info)
        with pytest.raises(WorkerLostError, match="could not be started again"):
            env.reset(seed=0)
        kill_monitors(0)
        env.reset(seed=0)
        assert env.step(1)[0][0] == 1


def test_an_env_is_built_though_the_monitor_is_stopped() -> None:
    with SubprocessEnv(CounterEnv, deadlines=LIMITED):
        os.kill(monitor_pid(), signal.SIGSTOP)
        with SubprocessEnv(CounterEnv, deadlines=Deadlines(start=20.0, step=60.0)) as env:
            env.reset(seed=0)
            assert env.step(1)[0][0] == 1
            assert env.statistics().losses == 0  # it was resumed at once, not after the deadline
