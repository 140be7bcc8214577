"""AsyncEnv: what is more than SubprocessEnv: many in one event loop, cancellation, the deadline of one step, the end.

Invariants 2, 3, 5 and 7 are shown for it in ``tests/invariants``. Envs wait at a gate, which the test opens; a gate
that stays closed is a step that takes for ever.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_envs import EchoEnv

from kit import CounterEnv, assert_nothing_left, is_alive, kill_worker, snapshot_resources
from kit.gates import GO, WAIT, GateEnv, gated_from_the_second_time
from kit.limits import set_limit
from kit.policies import constant
from kit.trainer_process import STUCK_AFTER, becomes_true
from multienv import AsyncEnv, Deadlines, Recovery, RestartPolicy, SubprocessEnv
from multienv._engine.processes.launcher import MonitorClient
from multienv.errors import (
    CallPendingError,
    ClosedError,
    EnvError,
    WaitTimeout,
    WorkerHungError,
)

TRUNCATE = RestartPolicy(on_crash="truncate", on_timeout="truncate")
RAISE = RestartPolicy(on_crash="raise", on_timeout="raise")


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine, after which no thread of ours is left."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))
        assert becomes_true(lambda: "multienv-async" not in str(threading.enumerate()))

    return run


async def exists(*paths: Path) -> None:
    until = time.monotonic() + STUCK_AFTER
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, f"none of {[path for path in paths if not path.exists()]}"
        await asyncio.sleep(0.005)


async def started(env: AsyncEnv, directory: Path, call: Coroutine[Any, Any, Any] | None = None) -> asyncio.Task[Any]:
    """Return a task that awaits a step (or the call) which waits at the gate."""
    task = asyncio.create_task(env.step(WAIT) if call is None else call)
    await exists(directory / "waits")
    return task


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def left_by_its_loop(env: AsyncEnv, directory: Path) -> list[asyncio.Task[Any]]:
    """Return a step that waits at the gate, in a loop that was closed."""

    async def leave() -> asyncio.Task[Any]:
        await env.reset(seed=0)
        return await started(env, directory)

    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(leave())
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined] # asyncio's own complaint, which is right
    return [task]


# --- in one loop --------------------------------------------------------------------------------------


@in_a_loop
async def test_twenty_envs_step_at_the_same_time(tmp_path: Path) -> None:
    envs = [AsyncEnv(partial(GateEnv, tmp_path, str(number)), env_index=number) for number in range(20)]
    try:
        await asyncio.gather(*(env.reset(seed=number) for number, env in enumerate(envs)))
        steps = [asyncio.create_task(env.step(WAIT)) for env in envs]
        await exists(*(tmp_path / f"waits{number}" for number in range(20)))
        assert not any(step.done() for step in steps)
        (tmp_path / "gate").touch()
        for number, (observation, *_) in enumerate(await asyncio.gather(*steps)):
            draw = np.random.default_rng(number).random(2)[1]  # each env's answer is its own
            np.testing.assert_array_equal(observation, np.float32([1, 0, draw, WAIT]))
    finally:
        await asyncio.gather(*(env.close() for env in envs))


@in_a_loop
async def test_envs_that_are_built_at_once_take_turns_with_the_monitor(monkeypatch: Any) -> None:
    sends, sending, most = MonitorClient.send, [0], [0]

    def send(*args: Any, **options: Any) -> None:
        sending[0] += 1
        most[0] = max(most[0], sending[0])
        time.sleep(0.01)  # as if its socket were full
        try:
            sends(*args, **options)
        finally:
            sending[0] -= 1

    monkeypatch.setattr(MonitorClient, "send", send)
    envs = [AsyncEnv(CounterEnv) for _ in range(5)]
    await asyncio.gather(*(env.initialize() for env in envs))
    await asyncio.gather(*(env.close() for env in envs))
    assert most == [1]


async def told(call: Any) -> Any:
    """Return what a call of either env returns."""
    return await call if inspect.isawaitable(call) else call


async def all_calls(env: Any) -> list[Any]:
    """Make each call once, and return what they return."""
    found: list[Any] = [await told(env.reset(seed=4, options={"start": 3}))]
    found += [await told(env.step(action)) for action in (1, 2, 3)]
    found += [vars(await told(env.rollout(constant, 9))), await told(env.reset())]
    snapshot, state = await told(env.snapshot()), await told(env.state_dict())
    found += [await told(env.step(1)), await told(env.restore(snapshot))]
    found += [await told(env.step(1)), await told(env.load_state_dict(state))]
    found += [await told(env.step(1)), await told(env.call("poke", 0.5)), await told(env.set_attr("mark", "set"))]
    found += [await told(env.get_attr("mark")), await told((await told(env.get_attr("poke")))(0.5))]
    found += [await told((await told(env.get_attr("step")))(2)), env.statistics().steps]
    return [*found, env.observation_space, env.action_space]


@in_a_loop
async def test_all_calls_are_those_of_a_subprocess_env() -> None:
    env, other = AsyncEnv(CounterEnv), SubprocessEnv(CounterEnv)
    with other:
        expected = await all_calls(other)
    async with env:
        np.testing.assert_equal(await all_calls(env), expected)


@in_a_loop
async def test_what_an_env_raises_is_the_envs_whatever_it_means_to_a_coroutine() -> None:
    raises = partial(EchoEnv, StopIteration(3), WaitTimeout("not ready"))
    async with AsyncEnv(raises, env_index=7) as env:
        for action, kind in enumerate((StopIteration, WaitTimeout)):
            await env.reset(seed=3)
            with pytest.raises(EnvError, match="Env 7 raised") as caught:
                await env.step(action)
            assert (caught.value.env_index, caught.value.command, caught.value.seed) == (7, "step", 3)
            assert isinstance(caught.value.__cause__, kind)
    with pytest.raises(EnvError, match="StopIteration"):
        async with AsyncEnv(lambda: next(iter(()))):
            pass


@in_a_loop
async def test_a_second_task_is_refused_and_the_first_one_goes_on(tmp_path: Path) -> None:
    async with AsyncEnv(partial(GateEnv, tmp_path)) as env:
        await env.reset(seed=0)
        step = await started(env, tmp_path)
        for call in (env.step(GO), env.reset(), env.call("poke"), env.initialize()):
            with pytest.raises(CallPendingError, match=r"another task awaits step\(\)"):
                await call
        (tmp_path / "gate").touch()
        assert (await step)[0][0] == 1


# --- losses -------------------------------------------------------------------------------------------


@in_a_loop
async def test_a_worker_killed_while_its_step_is_awaited_is_brought_back_beside_the_others(tmp_path: Path) -> None:
    threads: set[int] = set()
    events: list[Any] = []

    def hook(event: Any) -> None:
        events.append(event)
        threads.add(threading.get_ident())
        asyncio.get_running_loop()  # a hook may start tasks

    async with (
        AsyncEnv(partial(GateEnv, tmp_path), hooks=[hook], restart=RestartPolicy(snapshots=False)) as env,
        AsyncEnv(CounterEnv) as other,
    ):
        await env.reset(seed=3)
        await env.step(2)
        await other.reset(seed=0)
        step = await started(env, tmp_path)
        (tmp_path / "waits").unlink()
        kill_worker(env)
        await exists(tmp_path / "waits")  # the step is asked of another process, in which it waits too
        assert (await other.step(1))[0][0] == 1
        (tmp_path / "gate").touch()
        observation, _, _, truncated, info = await step
        assert (observation[0], truncated, info) == (2, False, {})
        assert observation[2] == np.float32(np.random.default_rng(3).random(3)[2])
        (recovery,) = [event for event in events if isinstance(event, Recovery)]
        assert recovery.outcome == "exact"
        assert threads == {threading.get_ident()}


# --- deadlines ----------------------------------------------------------------------------------------


@in_a_loop
async def test_the_deadline_of_one_step_is_for_that_step_alone(tmp_path: Path) -> None:
    async with AsyncEnv(partial(GateEnv, tmp_path), restart=RAISE, deadlines=Deadlines(step=1e6)) as env:
        await env.reset(seed=0)
        await env.step(GO, deadline=60.0)
        with pytest.raises(WorkerHungError, match=r"deadline of 0.2 s"):
            await env.step(WAIT, deadline=0.2)
        (tmp_path / "waits").unlink()
        await env.reset()
        step = await started(env, tmp_path)
        await asyncio.sleep(0.4)
        assert not step.done()
        (tmp_path / "gate").touch()
        assert (await step)[0][0] == 1


@in_a_loop
async def test_busy_is_not_hung(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    async with AsyncEnv(partial(GateEnv, tmp_path)) as env:
        await env.reset(seed=0)
        set_limit(monkeypatch, "SILENCE", 0.5)
        with caplog.at_level(logging.WARNING, "multienv"):
            step = await started(env, tmp_path)
            while not caplog.records:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            (tmp_path / "gate").touch()
            assert (await step)[0][0] == 1
        (record,) = caplog.records
        assert "step() of the env has not returned" in record.getMessage()
        assert "in wait" in record.getMessage()  # the stack
        assert env.statistics().losses == 0


# --- cancellation -------------------------------------------------------------------------------------


@in_a_loop
async def test_the_next_step_completes_a_cancelled_one(tmp_path: Path) -> None:
    async with AsyncEnv(partial(GateEnv, tmp_path)) as env:
        await env.reset(seed=0)
        await cancelled(await started(env, tmp_path))
        with pytest.raises(CallPendingError, match=r"step\(\) was cancelled"):
            await env.call("poke")
        with pytest.raises((asyncio.TimeoutError, TimeoutError)):
            await asyncio.wait_for(env.step(GO), 0.1)
        (tmp_path / "gate").touch()
        observation, *_, info = await env.step(GO)
        assert (observation[0], observation[3], info) == (1, WAIT, {"multienv": {"resumed": True}})
        observation, *_, info = await env.step(GO)
        assert (observation[0], observation[3], info) == (2, GO, {})


@in_a_loop
async def test_the_next_rollout_completes_a_cancelled_one(tmp_path: Path) -> None:
    async with AsyncEnv(partial(GateEnv, tmp_path)) as env:
        await env.reset(seed=0)
        await cancelled(await started(env, tmp_path, env.rollout(lambda observation: WAIT, 3)))
        with pytest.raises(CallPendingError, match=r"rollout\(\) was cancelled"):
            await env.step(GO)
        (tmp_path / "gate").touch()
        fragment = await env.rollout(lambda observation: GO, 5)
        assert (fragment.resumed, list(fragment.actions)) == (True, [WAIT] * 3)
        assert (await env.step(GO))[0][0] == 4


@in_a_loop
async def test_a_reset_drops_a_cancelled_step_and_any_call_completes_a_cancelled_call(tmp_path: Path) -> None:
    async with AsyncEnv(partial(GateEnv, tmp_path)) as env:
        await env.reset(seed=0)
        await cancelled(await started(env, tmp_path))
        reset = asyncio.create_task(env.reset(seed=1))
        await asyncio.sleep(0.1)
        assert not reset.done()  # the env is still at it
        (tmp_path / "gate").touch()
        observation, info = await reset
        assert (observation[0], info) == (0, {})
        for path in ("gate", "waits"):
            (tmp_path / path).unlink()
        await cancelled(await started(env, tmp_path, env.call("wait")))
        (tmp_path / "gate").touch()
        observation, *_, info = await env.step(GO)
        assert (observation[0], info) == (1, {})


@in_a_loop
async def test_a_cancelled_step_that_is_given_a_deadline_later_is_given_up_then(
    tmp_path: Path, monkeypatch: Any
) -> None:
    set_limit(monkeypatch, "_LOOK", 0.2)
    async with AsyncEnv(partial(GateEnv, tmp_path), restart=TRUNCATE) as env:
        await env.reset(seed=0)
        await cancelled(await started(env, tmp_path))
        *_, truncated, info = await env.step(GO, deadline=0.2)
        assert truncated
        assert info["multienv"]["resumed"]
        assert "deadline of 0.2 s" in info["multienv"]["reason"]


@in_a_loop
async def test_a_step_cancelled_while_its_worker_is_brought_back_is_completed_by_the_next(tmp_path: Path) -> None:
    policy = RestartPolicy(snapshots=False)
    async with AsyncEnv(partial(gated_from_the_second_time, tmp_path), restart=policy) as env:
        await env.reset(seed=0)
        kill_worker(env)
        await cancelled(await started(env, tmp_path, env.step(2)))
        step = asyncio.create_task(env.step(GO))
        await asyncio.sleep(0.1)  # the loop is not blocked by it
        assert not step.done()
        (tmp_path / "gate").touch()
        observation, *_, info = await step
        assert (observation[0], observation[3], info) == (1, 2, {"multienv": {"resumed": True}})


@in_a_loop
async def test_a_build_that_was_cancelled_goes_on(tmp_path: Path) -> None:
    (tmp_path / "built").touch()
    env = AsyncEnv(partial(gated_from_the_second_time, tmp_path))
    try:
        await cancelled(await started(env, tmp_path, env.initialize()))
        (tmp_path / "gate").touch()
        assert (await env.reset(seed=0))[0][0] == 0
        assert env.statistics().restarts == 0
    finally:
        await env.close()


def test_a_call_in_a_loop_that_was_closed_is_completed_in_the_next(tmp_path: Path) -> None:
    env = AsyncEnv(partial(GateEnv, tmp_path))
    left = left_by_its_loop(env, tmp_path)

    async def complete() -> None:
        step = asyncio.create_task(env.step(GO))
        await asyncio.sleep(0)
        left.clear()  # which ends the call that was left
        gc.collect()
        with pytest.raises(CallPendingError, match=r"another task awaits step\(\)"):
            await env.reset()
        (tmp_path / "gate").touch()
        observation, *_, info = await step
        assert (observation[0], observation[3], info) == (1, WAIT, {"multienv": {"resumed": True}})

    asyncio.run(complete())
    asyncio.run(env.close())


# --- the end ------------------------------------------------------------------------------------------


@in_a_loop
async def test_close_ends_a_step_that_is_awaited(tmp_path: Path) -> None:
    env = AsyncEnv(partial(GateEnv, tmp_path))
    await env.reset(seed=0)
    pid = env.statistics().pid
    step = await started(env, tmp_path)
    await env.close()
    with pytest.raises(ClosedError):
        await step
    assert not is_alive(pid or 0)
    await env.close()


def test_a_loop_that_is_closed_with_a_step_under_way_leaves_nothing(tmp_path: Path) -> None:
    gc.collect()
    before = snapshot_resources(threads=True)
    left_by_its_loop(AsyncEnv(partial(GateEnv, tmp_path)), tmp_path).clear()
    gc.collect()
    assert_nothing_left(before)
