"""However odd a trainer is, its workers do not notice, and however it ends, nothing of it lives on.

It forks, reaps, ignores and blocks what is its own; each trainer is a function here and runs in a process of its own,
see kit/trainer_process.py. ``/dev/shm`` and pytest's own descriptors and children are looked at around every test, by the
fixture ``nothing_left``; for the ends of trainers see invariants/test_7 and test_kill_points.py, too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fault_envs import LimitsEnv

from kit import CounterEnv, is_alive, monitor_pid, monitor_process
from kit.trainer_process import becomes_true, run
from multienv import MultiEnv, RestartPolicy, SubprocessEnv, SubprocessVectorEnv, create_subprocess_envs
from multienv.errors import MultienvError, SystemLimitError, UsageError

HERE = Path(__file__).stem
ENDLESS = partial(CounterEnv, horizon=None)


def say(*words: object) -> None:
    print(*words, flush=True)


class Played:
    """An env and the steps that it has taken, held against a bare one."""

    def __init__(self, context: str = "forkserver") -> None:
        self.env = SubprocessEnv(ENDLESS, context=context).initialize()
        self.bare = ENDLESS()
        for env in (self.env, self.bare):
            env.reset(seed=0)

    def go_on(self, steps: int = 5) -> None:
        for _ in range(steps):
            assert self.env.step(1)[0].tolist() == self.bare.step(np.int64(1))[0].tolist()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        pid = self.env.statistics().pid or 0
        os.kill(pid, number)
        assert becomes_true(lambda: not is_alive(pid))


# --- a trainer that forks: the child has a copy of every descriptor, and of every object that holds one ------


def wait_for(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def child_that_stays() -> int:
    """Fork a child that holds all the trainer's descriptors, and outlives it by far unless killed."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(60)
        os._exit(0)
    return child


def leave(how: str, played: list[Played]) -> None:
    """Be a forked child that does this with the env it has inherited."""
    if how == "exits":
        sys.exit(0)
    if how == "closes":
        played.pop().env.close()
    if how == "collects":
        played.clear()
        gc.collect()
    if how == "steps":  # it is told that the envs are not its own
        env, refused = played.pop().env, 0
        for call in (partial(env.step, 1), env.reset, partial(env.call, "poke")):
            try:
                call()
            except UsageError as error:
                refused += "belongs to process" in str(error)
        os._exit(0 if refused == 3 else 1)
    if how == "has envs of its own":
        own = Played()
        own.go_on()
        own.env.close()
    os._exit(0)


def fork() -> None:
    played = Played()
    for how in ("exits", "closes", "collects", "steps", "has envs of its own"):
        played.go_on()
        trainer, child = os.getpid(), os.fork()
        if child == 0:
            holder = [played]
            del played
            leave(how, holder)
        assert os.getpid() == trainer
        assert wait_for(child) == 0, how
        played.go_on()
    assert played.env.statistics().losses == 0
    child = child_that_stays()
    played.kill()
    played.go_on()
    assert played.env.statistics().exact_recoveries == 1
    played.env.close()
    os.kill(child, signal.SIGKILL)
    wait_for(child)


def test_forked_children_do_not_disturb_the_workers() -> None:
    run(HERE, "fork")


# --- a trainer with children, signals, threads and imports of its own ----------------------------------------


def reap() -> None:
    """Steal everybody's exit status, watch and ignore children, while workers die and are replaced."""
    played, arrived = Played(), list[int]()
    for _ in range(3):
        played.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        played.go_on()
    signal.signal(signal.SIGCHLD, lambda *_: arrived.append(1))
    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(7)"])
    played.kill(signal.SIGSEGV)
    played.go_on()
    assert other.wait(20) == 7, "somebody else has reaped the trainer's own child"
    assert subprocess.run(["/bin/sh", "-c", "exit 5"], check=False).returncode == 5
    assert arrived, "SIGCHLD of the trainer's own child has not arrived"
    assert callable(signal.getsignal(signal.SIGCHLD))
    loss = played.env.statistics().last_loss
    assert loss is not None
    assert loss.exit_code == -signal.SIGSEGV
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps, and nobody learns an exit status
    played.kill()
    played.go_on()
    assert played.env.statistics().exact_recoveries == 5
    played.env.close()


def test_trainer_that_reaps_watches_or_ignores_all_children_loses_no_step() -> None:
    run(HERE, "reap")


def use_threads() -> None:
    """Build in a thread that ends, step and lose the worker in others: PR_SET_PDEATHSIG goes by the thread that forked."""
    made: list[Played] = []
    work: list[Callable[[], object]] = [
        lambda: made.append(Played()),
        lambda: made[0].go_on(),
        lambda: (made[0].kill(), made[0].go_on()),
    ]
    for one in work:
        thread = threading.Thread(target=one)
        thread.start()
        thread.join()
    time.sleep(0.1)  # it would have struck by now
    made[0].go_on()
    assert made[0].env.statistics().losses == 1
    assert made[0].env.statistics().steps == 15
    made[0].env.close()


def test_worker_outlives_the_thread_that_built_it() -> None:
    run(HERE, "use_threads")


def block_signals() -> None:
    """Be as a program that waits by sigwait(), or that is to end when the reader of its output does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def confuse_imports() -> None:
    """Have no argv, a path that imports pass over, and files with names of libraries that were imported long ago."""
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory)
    for name in ("json", "logging", "queue", "random", "select", "selectors", "socket", "struct"):
        (Path(directory) / f"{name}.py").write_text("raise ImportError('this is not the library')")
    sys.path[:0] = [Path("/nowhere"), directory]  # type: ignore[list-item]
    del sys.argv


def train(context: str) -> None:
    """Lose the worker, then the monitor with it."""
    block_signals()
    confuse_imports()
    played = Played(context)
    played.go_on(3)
    played.kill()
    played.go_on(3)
    played.kill()
    monitor_process().kill()
    played.go_on(3)
    assert played.env.statistics().exact_recoveries == 2
    played.env.close()


@pytest.mark.parametrize("context", ["forkserver", pytest.param("spawn", marks=pytest.mark.soak)])
def test_losses_leave_no_trace_in_an_odd_trainer(context: str) -> None:
    run(HERE, "train", context)


CLONE_NEWPID = 0x20000000


def have_children_elsewhere() -> None:
    """Have children whose numbers are those of other processes here: none is started, and none is killed."""
    env = SubprocessEnv(CounterEnv)
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID):
        say("unshare:", os.strerror(ctypes.get_errno()))
        return
    for _ in range(2):
        with pytest.raises(UsageError):
            env.initialize()
    env.close()
    say("refused")


def test_children_in_another_pid_namespace_are_refused() -> None:
    """As after ``unshare --pid`` without ``--fork``."""
    said = run(HERE, "have_children_elsewhere")
    if "refused" not in said:
        pytest.skip(said[0])


# --- a trainer whose descriptors, or files, are limited --------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def have_many_workers(soft: str, hard: str, workers: str) -> None:
    """Have so many workers under these limits; say the limits of one of them, and what each costs the trainer."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), int(hard)))
    before = descriptors()
    with SubprocessVectorEnv([LimitsEnv] * int(workers), envs_per_worker=1) as envs:
        envs.reset(seed=0)
        say("descriptors", (descriptors() - before) / int(workers))
        say("of a worker", envs.call("limits_here")[0][0])


def test_soft_limit_on_descriptors_is_raised_and_workers_keep_their_own() -> None:
    """A worker holds three descriptors of its trainer, and five of the monitor: forty do not fit below 64."""
    said = run(HERE, "have_many_workers", 64, 1024, 40)
    assert float(said[0].split()[1]) < 3.5
    assert said[1] == "of a worker (64, 1024)"


def fill_descriptors(leaving: int) -> list[int]:
    """Open descriptors until no more than so many are left."""
    opened = []
    with contextlib.suppress(OSError):
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(leaving):
        os.close(opened.pop())
    return opened


def have_too_many_workers() -> None:
    """Have more workers than the hard limit allows, then fewer."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    before = descriptors()
    for build in (lambda n: SubprocessVectorEnv([CounterEnv] * n, envs_per_worker=1), lambda n: MultiEnv(envs_of(n))):
        with pytest.raises(SystemLimitError, match=r"may have 100 descriptors .* n workers need .*envs_per_worker"):
            build(40)
        with build(4) as envs:
            envs.reset(seed=0)
    gc.collect()
    say("left", descriptors() - before)


def envs_of(number: int) -> list[SubprocessEnv]:
    return create_subprocess_envs([CounterEnv] * number)


def test_more_workers_than_descriptors_are_refused_by_an_error_that_names_the_limit() -> None:
    run(HERE, "have_too_many_workers")


def lose_workers_while_none_can_be_launched() -> None:
    """Lose all workers while the system allows no memory for others; step again when it does."""
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    actions, bare = np.zeros(4, int), [ENDLESS() for _ in range(4)]
    with SubprocessVectorEnv([ENDLESS] * 4, envs_per_worker=1, reports="") as envs:
        envs.reset(seed=0)
        for seed, env in enumerate(bare):
            env.reset(seed=seed)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        pids = [one.pid or 0 for one in envs.statistics()]
        os.kill(monitor_pid(), signal.SIGKILL)
        assert becomes_true(lambda: not any(map(is_alive, pids)))
        for _ in range(6):
            with pytest.raises(SystemLimitError, match="ulimit -f"):
                envs.step(actions)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        seen, _, _, truncated, _ = envs.step(actions)
        assert not truncated.any()
        assert np.array_equal(seen, [env.step(0)[0] for env in bare])


def test_recovery_that_the_system_refuses_is_made_by_the_next_call() -> None:
    """Not one refusal of each worker, one after the other, when there is room again."""
    run(HERE, "lose_workers_while_none_can_be_launched")


def lose_workers_at_the_limit() -> None:
    """Have as many workers as possible, and lose the monitor with all of them."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    with SubprocessVectorEnv([ENDLESS] * 40, envs_per_worker=1, restart=RestartPolicy(snapshots=False)) as envs:
        envs.reset(seed=0)
        opened = fill_descriptors(60)  # not enough for another forty, with three each
        pids = [one.pid or 0 for one in envs.statistics()]
        os.kill(monitor_pid(), signal.SIGKILL)
        assert becomes_true(lambda: not any(map(is_alive, pids)))
        assert not envs.step(np.zeros(40, int))[3].any()
        assert sum(one.exact_recoveries for one in envs.statistics()) == 40
        for descriptor in opened:
            os.close(descriptor)


def test_lost_workers_give_their_descriptors_back_before_others_are_launched() -> None:
    run(HERE, "lose_workers_at_the_limit")


def limit_files(limit: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    with SubprocessVectorEnv([partial(CounterEnv, horizon=5)] * 4, envs_per_worker=2) as envs:
        envs.reset(seed=0)
        for _ in range(20):
            envs.step(np.zeros(4, int))
        say("went on")


def limit_files_too_far() -> None:
    with pytest.raises(SystemLimitError, match=r"A file may have 1000 bytes here.*ulimit -f unlimited"):
        limit_files("1000")


def test_finite_limit_on_file_sizes_is_enough_or_named() -> None:
    """The memory that is shared with a worker counts as a file."""
    assert "went on" in run(HERE, "limit_files", 10_000_000)
    run(HERE, "limit_files_too_far")


# --- a trainer that ends ------------------------------------------------------------------------------------


def close_in_exit_handlers() -> None:
    """Close several envs at a time where no thread can be started any more."""
    vector = SubprocessVectorEnv([CounterEnv] * 4, envs_per_worker=1)
    multi = MultiEnv(create_subprocess_envs([CounterEnv] * 4))
    vector.reset(seed=0)
    multi.reset(seed=0)

    def use() -> None:
        for step, actions in ((vector.step, np.zeros(4, int)), (multi.step, [0] * 4)):
            try:
                step(actions)
            except MultienvError as error:
                say("raised", type(error).__name__)
        for _ in range(2):
            vector.close()
            multi.close()
        say("closed")

    atexit.register(use)


def test_several_envs_are_closed_in_an_exit_handler() -> None:
    said = run(HERE, "close_in_exit_handlers")
    assert [word.partition("[")[0] for word in said if word] == [
        "raised ClosedError",
        "raised EnvsFailedError",
        "closed",
    ]
