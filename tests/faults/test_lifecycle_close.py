"""close() ends everything, whatever state the env is in, and restarts leave nothing: DESIGN, invariants 5 and 7."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kit import (
    CounterEnv,
    FailsNthTime,
    Fault,
    FaultyEnv,
    ForkingEnv,
    SlowEnv,
    SpaceEnv,
    example_spaces,
    is_alive,
    monitor_itself,
    no_leaks,
)
from kit.faults import FaultError
from multienv import Deadlines, MultiEnv, RestartPolicy, SubprocessEnv, create_subprocess_envs
from multienv.errors import ClosedError, EnvsFailedError, MultienvError, WaitTimeout, WorkerLostError

METHODS = ["forkserver", pytest.param("spawn", marks=pytest.mark.soak)]
# close() asks for this long, then kills: stack (none), SIGTERM and SIGKILL within a second; doubled for a slow machine.
ASKS = 0.3
BOUND = 2 * (ASKS + 2.0)
QUICK = Deadlines(close=ASKS)
HANG_IN_C = Fault("hang_c", "step", ignore_sigterm=True)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def no_leaks_of_ours() -> Any:
    """Stricter than the fixture of all tests: threads too."""
    return no_leaks(timeout=5.0, ignore=monitor_itself, threads=True)


def warm(method: str) -> None:
    """Have the monitor up, and every import done, before anything is counted."""
    SubprocessEnv(CounterEnv, context=method).initialize().close()


def close_twice(env: Any) -> None:
    began = time.monotonic()
    env.close()
    env.close()
    assert time.monotonic() - began < BOUND


def faulty(fault: Fault, method: str, **options: Any) -> SubprocessEnv:
    return SubprocessEnv(partial(FaultyEnv, fault=fault), context=method, deadlines=QUICK, **options)


STATES = [
    "new", "started", "initialized", "reset", "ended", "step_pending", "reset_pending", "call_pending", "dead", "dead_and_pending",
    "stopped", "hung_in_python", "hung_in_c", "hung_in_initialize", "raised", "lost", "timed_out",
]  # fmt: skip


@pytest.mark.parametrize("state", STATES)
def test_close_ends_an_env_in_any_state(state: str, method: str) -> None:
    warm(method)
    with no_leaks_of_ours():
        env = env_in_state(state, method)
        close_twice(env)
        assert env.statistics().state == "closed"
        for call in (partial(env.step, 0), env.reset, env.initialize, partial(env.call, "poke"), env.step_wait):
            with pytest.raises(ClosedError):
                call()
        del env, call
        gc.collect()


def env_in_state(state: str, method: str) -> SubprocessEnv:
    if state == "hung_in_initialize":
        return faulty(Fault("hang_c", "construct", ignore_sigterm=True), method).start()
    fault = {
        "hung_in_python": Fault("hang", "step", ignore_sigterm=True),
        "hung_in_c": HANG_IN_C,
        "raised": Fault("raise", "step"),
        "lost": Fault("kill", "step"),
        "timed_out": HANG_IN_C,
    }.get(state, Fault("raise", "call", at=99))
    policy = RestartPolicy(on_crash="raise") if state == "lost" else RestartPolicy()
    env = faulty(fault, method, restart=policy)
    if state == "new":
        return env
    env.start()
    if state == "started":
        return env
    env.initialize()
    if state == "initialized":
        return env
    if state == "reset_pending":
        env.reset_async(seed=0)
        return env
    env.reset(seed=0)
    pid = env.statistics().pid
    assert pid is not None
    if state in ("step_pending", "dead_and_pending", "hung_in_python", "hung_in_c", "timed_out"):
        env.step_async(0)
    if state == "call_pending":
        env.call_async("poke", 1.0)
    if state in ("dead", "dead_and_pending"):
        os.kill(pid, signal.SIGKILL)
    if state == "stopped":
        os.kill(pid, signal.SIGSTOP)
    if state == "ended":
        while not env.step(0)[2]:
            pass
    if state == "raised":
        with pytest.raises(FaultError):
            env.step(0)
    if state == "lost":
        with pytest.raises(WorkerLostError):
            env.step(0)
    if state == "timed_out":
        with pytest.raises(WaitTimeout):
            env.step_wait(0.05)
    return env


@pytest.mark.parametrize("how", ["exec", "fork"])
@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("end", ["close", "kill"])
def test_the_children_of_an_env_end_with_it(how: Any, stubborn: bool, end: str, method: str) -> None:
    """Also those that lead a session of their own and ignore SIGTERM, and while another env lives."""
    env_fn = partial(ForkingEnv, children=2, how=how, stubborn=stubborn)
    with SubprocessEnv(env_fn, context=method) as other, SubprocessEnv(env_fn, context=method) as env:
        spared = other.reset(seed=0)[1]["children"]
        children = env.reset(seed=0)[1]["children"]
        assert all(map(is_alive, children))
        if end == "close":
            env.close()
        else:
            os.kill(env.statistics().pid or 0, signal.SIGKILL)
            assert env.step(1)[0][0] == 1  # the env is back, with children of its own
        deadline = time.monotonic() + 5.0  # DESIGN says 2 s
        while any(map(is_alive, children)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(is_alive, children)), "children of the env live on"
        assert all(map(is_alive, spared)), "children of another env were killed"


def test_a_hundredth_close_is_as_good_as_the_first(method: str) -> None:
    env = SubprocessEnv(CounterEnv, context=method).initialize()
    for _ in range(100):
        env.close()


def test_close_from_many_threads_at_once(method: str) -> None:
    for _ in range(15):
        env = SubprocessEnv(CounterEnv, context=method).initialize()
        errors: list[BaseException] = []
        ready = threading.Barrier(8)

        def close(env: SubprocessEnv = env, ready: threading.Barrier = ready, errors: Any = errors) -> None:
            ready.wait()
            try:
                env.close()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=close) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert not errors


# --- nothing is left ----------------------------------------------------------------------------


@pytest.mark.parametrize("manner", ["raise", "exit", "kill", "segv", "unpicklable"])
def test_create_subprocess_envs_leaves_nothing_when_one_fails(manner: Any, method: str) -> None:
    warm(method)
    fns = [CounterEnv, partial(FaultyEnv, fault=Fault(manner, "construct")), partial(ForkingEnv, stubborn=True)]
    with no_leaks_of_ours():
        with pytest.raises(EnvsFailedError) as caught:
            create_subprocess_envs(fns, context=method)
        assert set(caught.value.failures) == {1}
        del caught
        gc.collect()


def test_create_subprocess_envs_leaves_nothing_when_one_hangs(method: str) -> None:
    warm(method)
    fns = [CounterEnv, partial(FaultyEnv, fault=Fault("hang_c", "construct", ignore_sigterm=True))]
    policy = RestartPolicy(on_timeout="raise")
    with no_leaks_of_ours():
        with pytest.raises(EnvsFailedError) as caught:
            create_subprocess_envs(fns, context=method, deadlines=Deadlines(start=3.0), restart=policy)
        assert set(caught.value.failures) == {1}
        assert isinstance(caught.value, TimeoutError)
        del caught
        gc.collect()


def test_multi_env_over_unequal_spaces_leaves_the_envs_to_their_owner(method: str) -> None:
    warm(method)
    with no_leaks_of_ours():
        envs = create_subprocess_envs([CounterEnv, partial(CounterEnv, num_actions=2)], context=method)
        with pytest.raises(MultienvError, match="env 1 has"):
            MultiEnv(envs)
        for env in envs:
            env.close()


@pytest.mark.parametrize("space", ["box_uint8", "box_float32", "dict", "graph"])
def test_fifty_restarts_leave_no_descriptor_map_or_thread(space: str) -> None:
    count_restarts("forkserver", partial(SpaceEnv, observation_space=big(space)), 50)


@pytest.mark.soak
def test_restarts_of_spawned_workers_leave_no_descriptor_map_or_thread() -> None:
    count_restarts("spawn", partial(SpaceEnv, observation_space=big("box_uint8")), 6)


def big(name: str) -> Any:
    """A space of that kind; the image is large enough to travel in shared memory."""
    import gymnasium

    if name == "box_uint8":
        return gymnasium.spaces.Box(0, 255, (128, 128, 3), "uint8")
    return example_spaces()[name]


def count_restarts(method: str, env_fn: Any, restarts: int) -> None:
    with SubprocessEnv(env_fn, context=method) as env:
        env.reset(seed=0)
        kill_and_step(env)
        gc.collect()
        with no_leaks_of_ours_but_workers():
            for _ in range(restarts):
                kill_and_step(env)
            gc.collect()
        assert env.statistics().restarts == restarts + 1
        assert env.statistics().exact_recoveries == restarts + 1


def no_leaks_of_ours_but_workers() -> Any:
    """One worker is replaced by another: descriptors, maps and processes are counted by kind, not by identity."""
    import re

    def kinds() -> dict[str, int]:
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        counts: dict[str, int] = {}
        for link in [re.sub(r"\d+", "#", link) for link in links]:
            counts[link] = counts.get(link, 0) + 1
        maps = Path("/proc/self/maps").read_text().splitlines()
        counts["memory maps"] = sum("memfd" in line or "/dev/shm" in line for line in maps)
        counts["anon_inode:[pidfd]"] = max(
            1, counts.get("anon_inode:[pidfd]", 0)
        )  # the one worker's is taken when needed
        counts["threads"] = len(os.listdir("/proc/self/task"))
        counts["children"] = sum(
            len(children.read_text().split()) for children in Path("/proc/self/task").glob("*/children")
        )
        return counts

    @contextlib.contextmanager
    def check() -> Any:
        before = kinds()
        yield
        deadline = time.monotonic() + 5.0
        while more(before, kinds()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not more(before, kinds())

    def more(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
        return {name: (before.get(name, 0), count) for name, count in after.items() if count > before.get(name, 0)}

    return check()


def kill_and_step(env: SubprocessEnv) -> None:
    os.kill(env.statistics().pid or 0, signal.SIGKILL)
    if env.step(env.action_space.sample())[2]:
        env.reset()


def test_observations_outlive_the_env_they_came_from(method: str) -> None:
    """An observation is the caller's own: close() and restarts do not change it, nor crash who reads it."""
    with SubprocessEnv(partial(SpaceEnv, observation_space=big("box_uint8")), context=method) as env:
        first, _ = env.reset(seed=0)
        copy = first.copy()
        kill_and_step(env)
        assert (first == copy).all()
    gc.collect()
    assert (first == copy).all()


def test_many_envs_made_and_closed_leave_nothing(method: str) -> None:
    warm(method)
    with no_leaks_of_ours():
        for _ in range(3 if method == "spawn" else 10):
            MultiEnv(create_subprocess_envs([CounterEnv] * 3, context=method)).close()


def test_a_failed_build_that_is_tried_again_leaves_nothing(method: str, tmp_path: Path) -> None:
    warm(method)
    with no_leaks_of_ours():
        env = SubprocessEnv(FailsNthTime(counter=tmp_path / "count", nth=(1, 2)), context=method)
        for _ in range(2):
            with pytest.raises(FaultError):
                env.initialize()
        env.initialize()
        env.reset(seed=0)
        env.close()


def test_close_waits_for_a_slow_env_close(tmp_path: Path, method: str) -> None:
    """An env that needs time to save its work gets it, within Deadlines.close."""
    env = SubprocessEnv(partial(SlowEnv, close_seconds=0.5), context=method, deadlines=Deadlines(close=10)).initialize()
    env.reset(seed=0)
    began = time.monotonic()
    env.close()
    assert time.monotonic() - began >= 0.5
