"""Invariant 8: Ctrl-C costs nothing. Real SIGINTs at random moments cost no worker and no transition.

Each raises KeyboardInterrupt exactly once. The calls are made again after each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from math import inf
from typing import Any

import numpy as np
import pytest
from faces import KINDS, Face

from kit import CounterEnv, SlowEnv
from kit.interruption import Sigint, every_place
from kit.limits import limit, set_limit
from kit.sigints import Presses
from kit.trainer_process import run
from multienv import AsyncEnv, AutoResetWrapper, Loss, SerialEnv, SubprocessEnv

ENDLESS = partial(CounterEnv, horizon=None)
SLOW = partial(SlowEnv, step_seconds=0.001)  # the trainer sleeps meanwhile
# SIGINTs in a test, and in the soak run.
FEW, SOME, MANY = 10, 25, 200


def actions_of(number: int, num_envs: int) -> list[int]:
    return [(number + env) % 4 for env in range(num_envs)]


def plain_steps(kind: str, env_fn: str, times: str) -> None:
    """Step through SIGINTs; hold all that came back against the same envs in this process."""
    env_fns = [partial(SLOW if env_fn == "slow" else CounterEnv, horizon=None)] * 2
    face = Face(kind, env_fns)
    first, envs = face.reset(0), face.envs

    def step(number: int) -> Any:
        actions = actions_of(number, face.num_envs)
        given: Any = actions if kind == "multi_env" else np.array(actions)
        return envs.step(np.int64(actions[0]) if kind == "subprocess_env" else given)

    steps = Presses(int(times), 0.01, f"{kind} {env_fn}").repeat(step)
    assert [(one.losses, one.restarts, one.recycled) for one in face.statistics()] == [(0, 0, 0)] * len(face.pids())
    face.close()
    for env in range(face.num_envs):
        bare = CounterEnv(horizon=None)
        assert np.array_equal(bare.reset(seed=env)[0], first[env].observation)
        for number, one in enumerate(steps):
            row = one if kind == "subprocess_env" else [part[env] for part in one[:4]]
            expected = bare.step(np.int64(actions_of(number, face.num_envs)[env]))
            assert np.array_equal(row[0], expected[0]), (number, row, expected)
            assert tuple(row[1:4]) == expected[1:4], (number, row, expected)
    print(len(steps), "steps", times, "SIGINTs", flush=True)


@pytest.mark.parametrize("times", [SOME, pytest.param(MANY, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("kind", "env_fn"),
    [
        ("vector_env", "fast"),
        ("multi_env", "slow"),
        pytest.param("subprocess_env", "fast", marks=pytest.mark.ci),
        pytest.param("multi_env", "fast", marks=pytest.mark.ci),
    ],
)
def test_plain_steps(kind: str, env_fn: str, times: int) -> None:
    print(run("test_8_sigint_costs_nothing", "plain_steps", kind, env_fn, times, within=110.0))


def each_place(kind: str, what: str, stride: str) -> None:
    """Make calls, each with a SIGINT at the next place at which Python may call the handler."""
    face = Face(kind, [ENDLESS] * 2)
    face.reset(0)
    raised = fired = 0

    def step() -> list[list[int]]:
        return [row.observation[[0, 3]].tolist() for row in face.step([np.int64(1)] * face.num_envs)]

    def snapshot() -> bool:
        return face.envs.snapshot() is not None

    call = snapshot if what == "snapshot" else step
    for steps, interruption in enumerate(every_place(stride=int(stride), strikes=Sigint), 1):
        found: Any = None
        called = inf
        if what == "loss":
            face.signal()
        try:
            with interruption:
                found = call()
            if interruption.fired:
                called = time.monotonic()
                time.sleep(10.0)
        except KeyboardInterrupt:
            raised += 1
            assert time.monotonic() < called + 8.0, interruption.where
        fired += interruption.fired
        found = found or call()
        assert found is True or found == [[steps, 1]] * face.num_envs, interruption.where
        losses = [(one.losses, one.exact_recoveries) for one in face.statistics()]
        assert losses[0] == ((steps, steps) if what == "loss" else (0, 0)), interruption.where
        assert losses[1:] == [(0, 0)] * (len(losses) - 1), interruption.where
    assert raised == fired > 5, (raised, fired)
    face.close()
    print(fired, "places", flush=True)


@pytest.mark.parametrize(
    ("what", "stride"), [("step", 1), ("loss", 97), pytest.param("loss", 61, marks=pytest.mark.ci)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_each_place(kind: str, what: str, stride: int) -> None:
    run("test_8_sigint_costs_nothing", "each_place", kind, what, stride, within=110.0)


@pytest.mark.parametrize("stride", [13, pytest.param(3, marks=pytest.mark.ci)])
@pytest.mark.parametrize("kind", ["subprocess_env", "vector_env"])
def test_each_place_of_a_snapshot(kind: str, stride: int) -> None:
    run("test_8_sigint_costs_nothing", "each_place", kind, "snapshot", stride, within=110.0)


# --- other moments --------------------------------------------------------------------------------------


def all_moments(kind: str, times: str) -> None:
    """Build, step, lose a worker, keep a snapshot and come back to it, close: again and again, through SIGINTs."""
    face: Any = None
    snapshot: Any = None

    def build() -> None:
        nonlocal face
        face = Face(kind, [ENDLESS] * 2)

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):  # it was killed, and the interrupt came after that
            os.kill(face.pids()[0], signal.SIGKILL)

    def keep() -> None:
        nonlocal snapshot
        snapshot = face.envs.snapshot()

    def come_back() -> None:
        face.envs.restore(snapshot)

    def step() -> Any:  # and nothing besides: an interrupt in code of ours, after the step, would lose what it returned
        return face.envs.step(action)[0]

    def reset() -> list[list[int]]:
        return [row.observation[[0, 3]].tolist() for row in face.reset(0)]

    def close() -> list[tuple[int, int, int]]:
        face.close()
        return [(one.losses, one.exact_recoveries, one.truncated_recoveries) for one in face.statistics()]

    action: Any = {"subprocess_env": np.int64(1), "vector_env": np.array([1, 1])}[kind]
    program = [build, reset, step, kill, step, keep, step, step, come_back, step, close]
    began = time.monotonic()
    for call in program:
        call()
    presses = Presses(int(times), time.monotonic() - began, kind)
    told = presses.repeat(lambda number: program[number % len(program)](), at_least=len(program))
    del told[len(told) - len(told) % len(program) :]
    for place in range(0, len(told), len(program)):
        run = told[place : place + len(program)]
        seen = [np.atleast_2d(run[step])[:, [0, 3]].tolist() for step in (2, 4, 6, 7, 9)]
        assert seen == [[[number, 1]] * face.num_envs for number in (1, 2, 3, 4, 3)], run
        assert run[-1] == [(1, 1, 0)], run
    if face is not None:
        face.close()
    print(len(told) // len(program), "programs", times, "SIGINTs", flush=True)


@pytest.mark.parametrize(
    "times", [FEW // 2, pytest.param(FEW, marks=pytest.mark.ci), pytest.param(2 * SOME, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("kind", ["subprocess_env", "vector_env"])
def test_all_moments(kind: str, times: int) -> None:
    print(run("test_8_sigint_costs_nothing", "all_moments", kind, times, within=110.0))


# --- the handler ------------------------------------------------------------------------------------------


@pytest.fixture
def standard() -> Iterator[None]:
    """Have Python's own handler of SIGINT, and no worker that needs another."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("standard")
@pytest.mark.parametrize("kind", KINDS)
def test_the_handler_is_there_while_there_are_envs(kind: str) -> None:
    with Face(kind, [ENDLESS] * 2):
        ours = signal.getsignal(signal.SIGINT)
        assert ours.__module__.startswith("multienv.")
        with SubprocessEnv(ENDLESS):
            pass
        assert signal.getsignal(signal.SIGINT) is ours
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("standard")
def test_another_handler_is_left_alone_and_may_call_ours() -> None:
    def mine(number: int, frame: Any) -> None:
        told.append(number)
        ours(number, frame)

    told: list[int] = []
    signal.signal(signal.SIGINT, mine)
    with SubprocessEnv(ENDLESS):
        assert signal.getsignal(signal.SIGINT) is mine
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with SubprocessEnv(ENDLESS) as env:
            env.reset(seed=0)
            ours: Any = signal.signal(signal.SIGINT, mine)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            assert env.step(np.int64(1))[0][0] == 1
    assert signal.getsignal(signal.SIGINT) is mine
    assert told == [signal.SIGINT]


@pytest.mark.usefixtures("standard")
def test_a_hook_and_an_env_in_this_process_can_be_interrupted_however_long_they_take() -> None:
    took: list[float] = []

    def wait_for_ever(*_: Any) -> None:
        began = time.monotonic()
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30.0)
        finally:
            took.append(time.monotonic() - began)

    def hook(event: Any) -> None:
        if isinstance(event, Loss):
            wait_for_ever()

    class Waiting(CounterEnv):
        def step(self, action: Any) -> Any:
            wait_for_ever()

    with SubprocessEnv(ENDLESS, hooks=[hook]) as env, SerialEnv(Waiting) as other:
        env.reset(seed=0)
        os.kill(env.statistics().pid or 0, signal.SIGKILL)
        with pytest.raises(KeyboardInterrupt):
            env.step(np.int64(1))
        assert env.step(np.int64(2))[0][[0, 3]].tolist() == [1, 1]
        other.reset(seed=0)
        with pytest.raises(KeyboardInterrupt):
            other.step(np.int64(1))
        wrapped = AutoResetWrapper(Waiting())
        wrapped.reset(seed=0)
        with pytest.raises(KeyboardInterrupt):
            wrapped.step(1)
    assert len(took) == 3
    assert max(took) < limit("PATIENCE")


@pytest.mark.usefixtures("standard")
def test_an_interrupt_in_a_finalizer_is_raised_after_it() -> None:
    class Dropped:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            told.append("ended")

    told: list[str] = []
    with SubprocessEnv(ENDLESS):
        dropped = [Dropped()]
        with pytest.raises(KeyboardInterrupt):
            dropped.clear()
            time.sleep(10.0)
    assert told == ["ended"]


@pytest.mark.usefixtures("standard")
def test_what_neither_waits_nor_ends_is_interrupted_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        def __reduce__(self) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30.0)

    set_limit(monkeypatch, "PATIENCE", 0.2)
    with SubprocessEnv(ENDLESS) as env:
        env.reset(seed=0, options=None)
        with pytest.raises(KeyboardInterrupt):
            env.reset(options={"endless": Endless()})
        env.reset(seed=0)
        assert env.step(np.int64(1))[0][0] == 1


# --- asyncio ------------------------------------------------------------------------------------------------


def in_a_loop(is_first: str) -> None:
    """Be interrupted in asyncio.run(), with an env that was there before, or was made there."""
    ended: list[str] = []

    async def main() -> None:
        async with AsyncEnv(SLOW) as env:
            await env.reset(seed=0)
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                while True:
                    transition = await env.step(1)
                    if transition[2] or transition[3]:
                        await env.reset()
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

    other = SubprocessEnv(ENDLESS).initialize() if is_first == "True" else None
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        ended.append("interrupted")
    # With our handler, asyncio has not installed its own: the interrupt is raised in the loop, or in the task itself.
    assert ended == ["cancelled", "interrupted"] or (other is not None and ended == ["interrupted"])
    if other is not None:
        other.reset(seed=0)
        assert other.step(np.int64(1))[0][0] == 1
        other.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("is_first", [False, True])
def test_asyncio_run_cancels_its_task_and_raises(is_first: bool) -> None:
    run("test_8_sigint_costs_nothing", "in_a_loop", is_first)
