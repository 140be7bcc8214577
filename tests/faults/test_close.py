"""close() ends everything, whatever state the env is in, and restarts leave nothing: docs/guarantees.md, 5 and 7."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box

from kit import (
    CounterEnv,
    FailsNthTime,
    FarewellEnv,
    Fault,
    FaultyEnv,
    SlowEnv,
    SpaceEnv,
    is_alive,
    kill_worker,
    monitor_itself,
    no_leaks,
)
from kit.trainer_process import Trainer, becomes_true
from multienv import (
    Deadlines,
    MultiEnv,
    RestartPolicy,
    SubprocessEnv,
    SubprocessVectorEnv,
    create_subprocess_envs,
)
from multienv._engine.processes import endings, worker_process
from multienv.errors import ClosedError, WorkerLostError

pytestmark = pytest.mark.usefixtures("monitor_stays")
# close() asks for this long, then kills: stack (none), SIGTERM and SIGKILL within a second; doubled for a slow machine.
ASKS = 0.1
BOUND = 2 * (ASKS + 2.0)
QUICK = Deadlines(close=ASKS)
NO_LIMIT = Deadlines(recovery=None)
RAISE = RestartPolicy(on_crash="raise")
HANG_IN_C = Fault("hang_c", "step", ignore_sigterm=True)


def no_leaks_of_ours() -> Any:
    """Stricter than the fixture of all tests: threads too."""
    return no_leaks(timeout=5.0, ignore=monitor_itself, threads=True)


def close_twice(env: Any) -> None:
    began = time.monotonic()
    env.close()
    env.close()
    assert time.monotonic() - began < BOUND


def faulty(fault: Fault, **options: Any) -> SubprocessEnv:
    return SubprocessEnv(partial(FaultyEnv, fault=fault), deadlines=QUICK, **options)


STATES = [
    "new",
    "started",
    "dead, a step pending",
    "stopped",
    "hung in C",
    "hung in initialize",
    "lost",
]


@pytest.mark.parametrize("state", STATES)
def test_close_ends_an_env_in_any_state(state: str) -> None:
    with no_leaks_of_ours():
        env = env_in_state(state)
        close_twice(env)
        assert env.statistics().state == "closed"
        for call in (partial(env.step, 0), env.reset, env.initialize, partial(env.call, "poke"), env.step_wait):
            with pytest.raises(ClosedError):
                call()
        del env, call
        gc.collect()


def env_in_state(state: str) -> SubprocessEnv:
    if state == "hung in initialize":
        return faulty(Fault("hang_c", "construct", ignore_sigterm=True)).start()
    fault = Fault("kill", "step") if state == "lost" else HANG_IN_C
    env = faulty(replace(fault, at=1 if state in ("lost", "hung in C") else 99), restart=RAISE)
    if state == "new":
        return env
    env.start()
    if state == "started":
        return env
    env.initialize().reset(seed=0)
    if state == "lost":
        with pytest.raises(WorkerLostError):
            env.step(0)
    if "pending" in state or state == "hung in C":
        env.step_async(0)
    if state in ("dead, a step pending", "stopped"):
        os.kill(env.statistics().pid or 0, signal.SIGSTOP if state == "stopped" else signal.SIGKILL)
    return env


@pytest.mark.parametrize("manner", ["raise", "segv", "hang_c"])
def test_close_never_raises_whatever_the_env_does_in_its_close(manner: Any) -> None:
    env = faulty(Fault(manner, "close")).initialize()
    env.reset(seed=0)
    close_twice(env)
    with pytest.raises(ClosedError):
        env.step(0)


# --- in the middle of another call, which says so or returns -----------------------------------------

ENDLESS = partial(CounterEnv, horizon=None)


@contextlib.contextmanager
def closing(env: Any, seconds: float) -> Iterator[None]:
    """Have the env closed so many seconds from now by another thread; by a handler: invariants/test_8."""
    closer = threading.Timer(seconds, env.close)
    closer.start()
    yield
    closer.join()


def test_close_in_the_middle_of_a_step() -> None:
    moments = random.Random(2)
    for _ in range(6):
        env = SubprocessEnv(ENDLESS).initialize()
        env.reset(seed=0)
        pid = env.statistics().pid or 0
        with closing(env, moments.uniform(5e-4, 3e-3)), pytest.raises(ClosedError):
            for expected in count(1):  # each that returns is the one after the last
                observation, _, _, truncated, _ = env.step(1)
                assert (observation[0], truncated) == (expected, False)
        assert env.statistics().state == "closed"
        with pytest.raises(ClosedError):
            env.reset()
        assert not is_alive(pid)


def test_close_while_one_of_several_workers_is_brought_back(marker: str) -> None:
    fns = [FailsNthTime(counter=marker, nth=2, manner="hang"), CounterEnv]
    policy = RestartPolicy(snapshots=False)
    envs = SubprocessVectorEnv(fns, envs_per_worker=1, deadlines=Deadlines(close=1000), restart=policy)
    envs.reset(seed=1)
    kill_worker(envs)
    with closing(envs, 0.3), pytest.raises(ClosedError):
        envs.step([1, 1])


def test_close_ends_the_back_off_before_a_restart() -> None:
    patient = RestartPolicy(backoff=1000.0, snapshots=False)
    # The second restart for the same step waits, for at least 5 s.
    env = SubprocessEnv(partial(FaultyEnv, fault=Fault("exit", "step")), restart=patient, deadlines=NO_LIMIT)
    env.initialize()
    env.reset(seed=0)
    with closing(env, 0.5), pytest.raises(ClosedError):
        env.step(1)


# --- nothing is left ----------------------------------------------------------------------------


def test_ten_restarts_leave_no_descriptor_map_or_thread() -> None:
    with SubprocessEnv(partial(SpaceEnv, observation_space=Box(0, 255, (128, 128, 3), "uint8"), horizon=99)) as env:
        env.reset(seed=0)
        counts = []
        for _ in range(11):
            kill_worker(env)
            env.step(env.action_space.sample())
            gc.collect()
            counts.append(open_things())
        assert becomes_true(lambda: all(map(int.__le__, open_things(), counts[0]))), counts
        assert env.statistics().exact_recoveries == env.statistics().restarts == 11


def open_things() -> list[int]:
    """Count descriptors, memory maps and threads; those of the processes are the fixture's to find."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    memory = sum("memfd" in line or "/dev/shm" in line for line in maps)
    return [len(os.listdir("/proc/self/fd")), memory, len(os.listdir("/proc/self/task"))]


def test_close_waits_for_a_slow_env_close(tmp_path: Path) -> None:
    """An env that needs time to save its work gets it, within Deadlines.close."""
    env = SubprocessEnv(partial(SlowEnv, close_seconds=0.2), deadlines=Deadlines(close=10)).initialize()
    env.reset(seed=0)
    began = time.monotonic()
    env.close()
    assert time.monotonic() - began >= 0.2


# --- envs that take long to close -----------------------------------------------------------------

PATIENT = Deadlines(close=30)


def open_saving(kind: str, path: str, seconds: float, deadlines: Deadlines) -> Any:
    saving = partial(FarewellEnv, close_seconds=seconds, horizon=None)
    env_fns = [partial(saving, left=f"{path}{number}") for number in range(4)]
    if kind == "env":
        env = SubprocessEnv(env_fns[0], deadlines=deadlines, env_index=0).initialize()
        env.reset(seed=0)
        return env
    if kind == "list":
        several = MultiEnv(create_subprocess_envs(env_fns, deadlines=deadlines))
        several.reset(seed=0)
        return several
    envs = SubprocessVectorEnv(env_fns, envs_per_worker=1, deadlines=deadlines)
    envs.reset(seed=0)
    return envs


def end_without_close(how: str, kind: str, path: str, seconds: str = "1.5", close: str = "30", kill: str = "0") -> None:
    """Be a trainer that ends in a way which Python sees, and calls no close(); its envs are local variables.

    ``kill``: seconds that each order to kill takes, so that several threads could give some of them.
    """
    channel_class = worker_process.ProcessChannel
    order_kill = channel_class.order_kill
    channel_class.order_kill = lambda channel: (time.sleep(float(kill)), order_kill(channel))[1]  # type: ignore[method-assign]
    endings.BUSY_PATIENCE = 30.0  # the step that is interrupted may take a while on a busy machine
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    envs = open_saving(kind, path, float(seconds), Deadlines(close=float(close)))
    if how == "global":
        globals()["kept"] = envs
    print("ready", flush=True)
    if how == "exception":
        raise RuntimeError("the trainer's own mistake")
    if how in ("sys.exit", "global"):
        sys.exit(3)
    while how != "return":
        envs.step(1 if kind == "env" else np.ones(4, int))


ENDS = [
    ("return", "env", 0),
    ("sys.exit", "vector", 3),
    ("global", "vector", 3),
    ("exception", "env", 1),
    ("SIGINT", "vector", -signal.SIGINT),
    ("SIGTERM", "env", 5),
]


def test_each_end_that_python_sees_waits_for_a_slow_env_close(tmp_path: Path) -> None:
    """All trainers at a time: each of them waits."""
    with contextlib.ExitStack() as stack:
        trainers = []
        for how, kind, code in ENDS:
            (tmp_path / how).mkdir()
            trainer = Trainer("test_close", "end_without_close", how, kind, tmp_path / how / "saved")
            trainers.append((stack.enter_context(trainer), how, kind, code))
        for trainer, how, _, _ in trainers:
            trainer.expect("ready")
            if how.startswith("SIG"):
                trainer.signal(signal.Signals[how])
        for trainer, how, kind, code in trainers:
            assert trainer.wait() == code, how
            saved = sorted(path.name for path in (tmp_path / how).glob("saved?"))
            assert saved == [f"saved{number}" for number in range(1 if kind == "env" else 4)], how
            assert "close()" not in trainer.errors()
            trainer.assert_nothing_lives()


def test_forgotten_env_is_given_the_time_to_close(tmp_path: Path) -> None:
    env = open_saving("env", str(tmp_path / "saved"), 1.5, PATIENT)
    del env
    assert becomes_true(lambda: (tmp_path / "saved0").exists())


@pytest.mark.parametrize("kill", [0, 0.02])
def test_env_close_that_is_cut_at_the_end_of_the_trainer_is_told_of(kill: float, tmp_path: Path) -> None:
    """All envs are waited for together, no longer than Deadlines.close, and told of in one line.

    The envs are forgotten just before the trainer ends: one thread waits for each of the two.
    """
    with Trainer("test_close", "end_without_close", "sys.exit", "vector", tmp_path / "saved", 60, 1.0, kill) as trainer:
        trainer.expect("ready")
        began = time.monotonic()
        assert trainer.wait() == 3
        assert time.monotonic() - began < 4 * 1.0 + 4.0  # one after the other they would take as long, and more
        told = trainer.errors()
        trainer.assert_nothing_lives()
    (line,) = told.splitlines()
    assert line.startswith("close() of env 0, env 1, env 2 and 1 more was cut short, and the process was killed.")


def end_while_a_thread_closes() -> None:
    """Be a trainer that ends while a thread closes its envs, which are busy, and is slow to kill them."""
    channel_class = worker_process.ProcessChannel
    kill = channel_class.kill
    channel_class.kill = lambda channel, **why: (time.sleep(0.2), kill(channel, **why))[1]  # type: ignore[method-assign]
    envs = SubprocessVectorEnv([partial(SlowEnv, step_seconds=60)] * 3, envs_per_worker=1)
    envs.reset(seed=0)
    envs.step_async(np.zeros(3, int))
    threading.Thread(target=envs.close).start()
    sys.exit(3)


def test_each_env_close_that_is_cut_at_the_end_of_the_trainer_and_by_a_thread_is_told_of_once() -> None:
    with Trainer("test_close", "end_while_a_thread_closes") as trainer:
        assert trainer.wait() == 3
        lines = [line for line in trainer.errors().splitlines() if "was cut short" in line]
        trainer.assert_nothing_lives()
    assert sorted(re.findall(r"env \d", " ".join(lines))) == ["env 0", "env 1", "env 2"]


@pytest.mark.parametrize("kind", ["env", "vector", "list"])
def test_env_closes_that_are_cut_by_close_are_told_of_in_one_line(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    envs = open_saving(kind, str(tmp_path / "saved"), 60, Deadlines(close=0.5))
    envs.close()
    assert becomes_true(lambda: caplog.records)  # close() waits for the log half a second at the most
    (record,) = caplog.records
    names = "env 0" if kind == "env" else "env 0, env 1, env 2 and 1 more"
    assert record.getMessage().startswith(f"close() of {names} was cut short, and the process was killed.")
    assert record.levelname == "WARNING"


def test_close_of_many_workers_has_time_for_the_ends_of_all_of_them(tmp_path: Path) -> None:
    """A second more for 64 workers: some of them close in that time, however busy the machine is."""
    saving = [partial(FarewellEnv, close_seconds=0.2, left=str(tmp_path / str(number))) for number in range(64)]
    SubprocessVectorEnv(saving, envs_per_worker=1, deadlines=Deadlines(close=0.05)).close()
    assert [path for path in tmp_path.iterdir() if not path.suffix]


def test_timeout_of_close_is_not_lengthened_for_the_ends_of_many_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "_END_SECONDS", 10.0)
    envs = open_saving("vector", str(tmp_path / "saved"), 60, PATIENT)
    began = time.monotonic()
    envs.close(timeout=0.5)
    assert time.monotonic() - began < 15.0  # not 40 s


def test_terminated_envs_are_not_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    envs = open_saving("vector", str(tmp_path / "saved"), 60, PATIENT)
    monkeypatch.setattr(endings, "log_cuts", told.append)  # into the log another test's may come late
    envs.close(terminate=True)  # the caller wants it so
    assert not told


def test_env_that_is_busy_when_it_is_closed_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    env = SubprocessEnv(partial(SlowEnv, step_seconds=60), deadlines=PATIENT, env_index=7).initialize()
    env.reset(seed=0)
    env.step_async(0)
    env.close()
    assert becomes_true(lambda: caplog.records)
    (record,) = caplog.records
    assert record.getMessage().startswith("close() of env 7 was cut short")
    assert record.getMessage().endswith("a call that they are still in has 0.5 s to end.")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.ci), signal.SIGINT])
def test_signal_ends_a_trainer_that_waits_for_envs_to_close(number: signal.Signals, tmp_path: Path) -> None:
    """SIGKILL, of course; and a second Ctrl-C ends the wait."""
    with Trainer("test_close", "end_without_close", "sys.exit", "env", tmp_path / "saved", 60) as trainer:
        trainer.expect("ready")
        assert becomes_true((tmp_path / "saved0.begun").exists)
        time.sleep(1.0)  # longer than the workers of a trainer that is killed may take
        assert trainer.process.poll() is None
        trainer.signal(number)
        trainer.wait()
        trainer.assert_nothing_lives()


@pytest.mark.parametrize("end", ["", pytest.param("for env in (one, several): env.close()", marks=pytest.mark.ci)])
def test_envs_that_outlive_the_main_script_are_let_go_of_in_silence(end: str) -> None:
    """gymnasium's registry holds the lambda, so the script's globals, when the interpreter has cleared its modules."""
    script = (
        "import gymnasium\n"
        "from multienv import SubprocessEnv, SubprocessVectorEnv\n"
        "gymnasium.register('Mine-v0', entry_point=lambda: gymnasium.make('CartPole-v1'))\n"
        "make = lambda: gymnasium.make('CartPole-v1')\n"
        "if __name__ == '__main__':\n"
        "    one, several = SubprocessEnv(make).initialize(), SubprocessVectorEnv([make] * 2)\n"
        "    for env in (one, several): env.reset(seed=0)\n"
        f"    {end}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, timeout=100, capture_output=True, text=True)
    assert done.stderr == ""


def test_finalizers_that_run_when_names_in_modules_are_gone_are_silent() -> None:
    """An error handler of codecs keeps all modules alive, so the interpreter sets their names to None.

    It begins with those imported last: ``json`` has its names, and so the envs, when the package has lost its own.
    """
    script = (
        "import codecs, json, sys\n"
        "import gymnasium, numpy\n"
        "from multienv import AsyncEnv, MultiEnv, SubprocessVectorEnv, create_subprocess_envs\n"
        "large = numpy.zeros(100_000)\n"
        "make = lambda: gymnasium.make('CartPole-v1', sutton_barto_reward=bool(large[0]))\n"
        "batch = SubprocessVectorEnv([make] * 2, preload=['json'])\n"
        "several = MultiEnv(create_subprocess_envs([make] * 2))\n"
        "for envs in (batch, several): envs.reset(seed=0)\n"
        "batch.send(numpy.zeros(2, int))\n"
        "batch.recv(1)\n"
        "json.kept = batch, several, AsyncEnv(make)\n"
        "codecs.register_error('kept', lambda error, modules=list(sys.modules.values()): None)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, timeout=100, capture_output=True, text=True)
    assert done.stderr == ""


def test_an_env_that_was_brought_back_is_closed_as_any_other(tmp_path: Path) -> None:
    left = tmp_path / "left"
    with SubprocessEnv(partial(FarewellEnv, left=left)) as env:
        env.reset(seed=0)
        kill_worker(env)
        env.step(1)
        assert not left.exists()
    assert left.exists()
