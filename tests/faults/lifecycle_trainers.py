"""Trainers that test_lifecycle*.py runs, ends in every way, and looks behind. See trainer_process.py.

Each function is a trainer; its arguments are strings. It says ``ready`` when it stands where it shall be ended.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kit import CounterEnv, Fault, FaultyEnv, ForkingEnv, is_alive
from multienv import MultiEnv, RestartPolicy, SubprocessEnv, SubprocessVectorEnv, create_subprocess_envs
from multienv.errors import MultienvError, UsageError

HANGS = {
    "hang_in_python": Fault("hang", "step", ignore_sigterm=True),
    "hang_in_c": Fault("hang_c", "step", ignore_sigterm=True),
    "hang_in_initialize": Fault("hang_c", "construct", ignore_sigterm=True),
    "hang_in_reset": Fault("hang", "reset", ignore_sigterm=True),
}


def say(*words: object) -> None:
    print(*words, flush=True)


def becomes_true(condition: Any, within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def hanging(name: str, method: str) -> SubprocessEnv:
    return SubprocessEnv(partial(FaultyEnv, fault=HANGS[name]), context=method)


def dying_in_recovery(directory: str) -> CounterEnv:
    """The first process dies in its first step; the ones after it hang there, in C."""
    step = [Fault("kill", "step", once=f"{directory}/killed"), Fault("hang_c", "step", ignore_sigterm=True)]
    return FaultyEnv(fault=step)


def end(how: str) -> None:
    """End this process as told; a signal comes from outside."""
    if how == "sys_exit":
        sys.exit(3)
    if how == "exception":
        raise RuntimeError("the trainer's own mistake")
    if how == "os_exit":
        os._exit(4)
    if how != "return":
        time.sleep(60)
    return


def hold_everything(method: str, how: str, directory: str) -> None:
    """Envs in all states at once, none closed."""
    envs: list[Any] = [SubprocessEnv(CounterEnv, context=method).initialize()]  # idle, not even reset
    stepped = SubprocessEnv(CounterEnv, context=method).initialize()
    stepped.reset(seed=0)
    stepped.step_async(1)
    pending = SubprocessEnv(CounterEnv, context=method).initialize()
    pending.reset_async(seed=0)
    family = SubprocessEnv(partial(ForkingEnv, children=1, stubborn=True), context=method).initialize()
    family.reset(seed=0)
    forks = SubprocessEnv(partial(ForkingEnv, children=1, how="fork", stubborn=True), context=method).initialize()
    forks.reset(seed=0)
    multi = MultiEnv(create_subprocess_envs([CounterEnv, CounterEnv], context=method))
    multi.reset(seed=0)
    for name in ("hang_in_python", "hang_in_c"):
        env = hanging(name, method).initialize()
        env.reset(seed=0)
        env.step_async(1)
        envs.append(env)
    envs.append(hanging("hang_in_initialize", method).start())
    reset = hanging("hang_in_reset", method).initialize()
    reset.reset_async(seed=0)
    recovering = SubprocessEnv(partial(dying_in_recovery, directory), context=method).initialize()
    recovering.reset(seed=0)
    threading.Thread(target=lambda: recovering.step(1), daemon=True).start()
    assert becomes_true(lambda: recovering.statistics().restarts == 1)
    say("ready")
    end(how)
    del stepped, pending, family, forks, multi, reset


def block_in(state: str, method: str, directory: str) -> None:
    """The main thread is inside a call when the end comes."""
    if state == "step of several":
        block_multi(method)
    if state.endswith("of a batch"):
        block_vector(method, "inside" if state.startswith("step") else "between")
    if state == "recovery":
        env = SubprocessEnv(partial(dying_in_recovery, directory), context=method)
    elif state == "long_step":
        env = SubprocessEnv(partial(FaultyEnv, fault=Fault("spin", "step")), context=method)
    else:
        env = hanging(state, method)
    if state == "hang_in_initialize":
        say("ready")
        env.initialize()
    env.initialize()
    if state == "hang_in_reset":
        say("ready")
        env.reset(seed=0)
    env.reset(seed=0)
    say("ready")
    env.step(1)


def block_multi(method: str) -> None:
    """Inside MultiEnv.step(), one env hanging in C, another with a stubborn child of its own."""
    fns = [CounterEnv, partial(FaultyEnv, fault=HANGS["hang_in_c"]), partial(ForkingEnv, stubborn=True)]
    multi = MultiEnv(create_subprocess_envs(fns, context=method), max_workers=2)
    multi.reset(seed=0)
    say("ready")
    multi.step([1, 1, 1])


def block_vector(method: str, where: str) -> None:
    """Inside a step of a vector env, while one of a group hangs in C, or between two steps."""
    fault = Fault("hang_c", "step", at=3, ignore_sigterm=True)
    fns = [CounterEnv, CounterEnv, partial(FaultyEnv, fault=fault) if where == "inside" else CounterEnv, CounterEnv]
    envs = SubprocessVectorEnv(fns, envs_per_worker=2, context=method, restart=RestartPolicy(snapshot_every=1))
    envs.reset(seed=0)
    for _ in range(2):
        envs.step([0, 1, 2, 3])
    say("ready")
    envs.step([0, 1, 2, 3])
    time.sleep(60)


def crowd(method: str) -> None:
    """Workers that wait idly, each with children; their pids are told."""
    envs = create_subprocess_envs([partial(ForkingEnv, how="fork"), partial(ForkingEnv, stubborn=True)], context=method)
    children = [pid for env in envs for pid in env.reset(seed=0)[1]["children"]]
    say("ready", *children)
    time.sleep(60)


# --- forked children of the trainer -------------------------------------------------------------


def play(env: Any, steps: int = 5) -> list[Any]:
    return [env.step(1)[0].tolist() for _ in range(steps)]


def expected_play(rounds: int = 1) -> list[Any]:
    env = CounterEnv(horizon=None)
    env.reset(seed=0)
    return [env.step(1)[0].tolist() for _ in range(5 * rounds)]


def child_that(how: str, env: Any) -> None:
    """What a forked child does with the env it has inherited."""
    if how == "exits":
        sys.exit(0)
    if how == "closes":
        env.close()
    if how == "collects":
        del env
        gc.collect()
    os._exit(0)


def fork_a_child_that(how: str, method: str) -> None:
    """The workers of the trainer do not notice."""
    env = SubprocessEnv(partial(CounterEnv, horizon=None), context=method).initialize()
    env.reset(seed=0)
    seen = play(env)
    pid = os.getpid()
    child = os.fork()
    if child == 0:
        holder = [env]
        del env
        child_that(how, holder.pop())
    assert os.getpid() == pid
    os.waitpid(child, 0)
    seen += play(env)
    assert seen == expected_play(2), "the trajectory has suffered"
    assert env.statistics().losses == 0
    multi = MultiEnv(create_subprocess_envs([CounterEnv] * 2, context=method))
    multi.reset(seed=0)
    multi.step([0, 0])
    multi.close()
    env.close()


def child_that_stays() -> int:
    """A forked child that holds all the trainer's descriptors, and outlives it by far unless killed."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(60)
        os._exit(0)
    return child


def death_despite_a_child(method: str) -> None:
    """A forked child holds all pipes open; a worker's death is seen all the same, and healed."""
    env = SubprocessEnv(partial(CounterEnv, horizon=None), context=method).initialize()
    env.reset(seed=0)
    seen = play(env)
    child = child_that_stays()
    os.kill(env.statistics().pid or 0, signal.SIGKILL)
    seen += play(env)
    assert seen == expected_play(2)
    assert env.statistics().exact_recoveries == 1
    env.close()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def killed_despite_a_child(method: str) -> None:
    """Says the pid of a forked child that holds everything open; the trainer is then killed."""
    env = SubprocessEnv(CounterEnv, context=method).initialize()
    hung = hanging("hang_in_c", method).initialize()
    hung.reset(seed=0)
    hung.step_async(0)
    say("ready", child_that_stays())
    time.sleep(60)
    env.close()


def envs_in_a_forked_child(method: str) -> None:
    """A forked child makes envs of its own, beside the trainer's."""
    env = SubprocessEnv(partial(CounterEnv, horizon=None), context=method).initialize()
    env.reset(seed=0)
    seen = play(env)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with SubprocessEnv(partial(CounterEnv, horizon=None), context=method) as own:
                own.reset(seed=0)
                code = 0 if play(own) == expected_play() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    seen += play(env)
    assert seen == expected_play(2)
    env.close()


def step_in_a_forked_child(method: str) -> None:
    """It is told that the envs are not its own; it may close what it has of them."""
    envs = SubprocessVectorEnv([partial(CounterEnv, horizon=None)] * 2, envs_per_worker=1, context=method)
    envs.reset(seed=[0, 0])
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: envs.step([1, 1]), envs.reset, lambda: envs.call("poke")):
            try:
                call()
            except UsageError:
                refused += 1
        envs.close()
        os._exit(0 if refused == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [envs.step([1, 1])[0][0].tolist() for _ in range(5)] == expected_play()
    envs.close()


# --- the trainer's other children ---------------------------------------------------------------


def reap_any_child(method: str) -> None:
    """A trainer that calls waitpid(-1), and so steals everybody's exit status, while workers die and are replaced."""
    env = SubprocessEnv(partial(CounterEnv, horizon=None), context=method).initialize()
    env.reset(seed=0)
    seen = []
    for _ in range(3):
        os.kill(env.statistics().pid or 0, signal.SIGKILL)
        time.sleep(0.05)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        seen += play(env)
    assert seen == expected_play(3)
    assert env.statistics().exact_recoveries == 3
    env.close()


def watch_children(method: str) -> None:
    """SIGCHLD handlers and subprocesses of the trainer's own are undisturbed, and so is its wakeup descriptor."""
    import subprocess

    arrived: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: arrived.append(1))
    env = SubprocessEnv(partial(CounterEnv, horizon=None), context=method).initialize()
    assert callable(signal.getsignal(signal.SIGCHLD))
    env.reset(seed=0)
    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(7)"])
    seen = play(env)
    os.kill(env.statistics().pid or 0, signal.SIGSEGV)
    seen += play(env)
    assert seen == expected_play(2)
    assert other.wait(20) == 7, "somebody else has reaped the trainer's own child"
    assert subprocess.run(["/bin/sh", "-c", "exit 5"], check=False).returncode == 5
    assert arrived, "SIGCHLD of the trainer's own child has not arrived"
    loss = env.statistics().last_loss
    assert loss is not None
    assert loss.exit_code == -signal.SIGSEGV
    env.close()


def ignore_children(method: str) -> None:
    """SIGCHLD is ignored: the kernel reaps, and nobody learns an exit status of the trainer's children."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    env = SubprocessEnv(partial(CounterEnv, horizon=None), context=method).initialize()
    env.reset(seed=0)
    os.kill(env.statistics().pid or 0, signal.SIGKILL)
    assert play(env) == expected_play()
    env.close()


# --- its threads ----------------------------------------------------------------------


def another_thread(method: str) -> None:
    """Made and initialized in a thread that has ended, stepped and replaced in others."""
    envs: list[SubprocessEnv] = []

    def make() -> None:
        env = SubprocessEnv(partial(CounterEnv, horizon=None), context=method).initialize()
        env.reset(seed=0)
        envs.append(env)

    seen: list[Any] = []

    def step() -> None:
        seen.extend(play(envs[0]))

    def replace() -> None:
        os.kill(envs[0].statistics().pid or 0, signal.SIGKILL)
        step()

    for work in (make, step, replace, step):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    time.sleep(0.1)  # PR_SET_PDEATHSIG would have struck by now
    seen += play(envs[0])
    assert seen == expected_play(4)
    assert envs[0].statistics().losses == 1
    envs[0].close()


# --- nothing left -----------------------------------------------------------------------------------


def close_in_exit_handlers(method: str) -> None:
    """Several envs at a time: no thread can be started any more."""
    vector = SubprocessVectorEnv([CounterEnv] * 4, envs_per_worker=1, context=method)
    multi = MultiEnv(create_subprocess_envs([CounterEnv] * 4, context=method))
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


def hold_snapshots(method: str, moment: str) -> None:
    """Workers with a snapshot each; with ``bereaved`` they have just died, and nobody has looked yet."""
    policy = RestartPolicy(snapshot_every=3)
    envs = [SubprocessEnv(CounterEnv, context=method, restart=policy).initialize() for _ in range(3)]
    for env in envs:
        env.reset(seed=0)
        for _ in range(5):
            env.step(1)
        assert env.statistics().snapshots
    if moment == "bereaved":
        for env in envs:
            os.kill(env.statistics().pid or 0, signal.SIGKILL)
    say("ready")
    time.sleep(60)


# --- trainers in a state that envs in this process do not mind ------------------------------------------

CLONE_NEWPID = 0x20000000


def shadowing_directory() -> str:
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory)
    for name in ("json", "logging", "queue", "random", "select", "selectors", "socket", "struct"):
        (Path(directory) / f"{name}.py").write_text("raise ImportError('this is not the library')")
    return directory


ODDITIES = {
    # Of a launcher, or a program that waits by sigwait() or signalfd().
    "sigchld_blocked": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD]),
    "all_signals_blocked": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()),
    # The idiom of a program that is to end when its reader does.
    "ended_by_broken_pipes": lambda: signal.signal(signal.SIGPIPE, signal.SIG_DFL),
    # Passed over by imports.
    "path_objects_in_sys_path": lambda: sys.path.insert(0, Path("/nowhere")),  # type: ignore[arg-type]
    # With files in it that are called as the standard library's, which has long been imported.
    "files_of_libraries_names": lambda: sys.path.insert(0, shadowing_directory()),
    "no_argv": lambda: delattr(sys, "argv"),
}


def train(oddity: str, method: str) -> None:
    """A loss of the worker, one of the monitor with it, and the end."""
    ODDITIES[oddity]()
    env = SubprocessEnv(partial(CounterEnv, horizon=None), context=method).initialize()
    env.reset(seed=0)
    for step in range(9):
        if step in (3, 6):
            pid = env.statistics().pid or 0
            os.kill(pid, signal.SIGKILL)
            assert becomes_true(lambda pid=pid: not is_alive(pid))
        if step == 6:
            from kit import monitor_process

            monitor_process().kill()
        assert env.step(step % 4)[0][[0, 3]].tolist() == [step + 1, step % 4]
    assert env.statistics().exact_recoveries == 2
    env.close()


def children_elsewhere(method: str) -> None:
    """Their numbers are those of other processes here: none is started, and none is killed."""
    env = SubprocessEnv(CounterEnv, context=method)
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID):
        print("unshare:", os.strerror(ctypes.get_errno()), flush=True)
        return
    for _ in range(2):
        with contextlib.suppress(UsageError):
            env.initialize()
            raise AssertionError("it has been started")
    env.close()
    print("refused", flush=True)
