"""Waiting for several workers: timeouts, a worker being brought back meanwhile, close() from elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from kit import CounterEnv, Fault, FaultyEnv, is_alive
from multienv import Deadlines, RestartPolicy, SerialVectorEnv, SubprocessVectorEnv
from multienv.errors import (
    ClosedError,
    EnvsFailedError,
    MultienvError,
    RestartBudgetExceeded,
    UsageError,
    WaitTimeout,
)

NUM_ENVS = 6
HANG = Fault("hang_c", "step", at=4)


class GatedEnv(CounterEnv):
    """Builds at once the first time; then, and in every step after the first few, only while the gate is open."""

    def __init__(self, gate: str, *, builds: bool, **counter: Any) -> None:
        self.gate = Path(gate)
        begun = self.gate.with_suffix(".begun")
        if builds and begun.exists():
            self._pass()
        begun.touch()
        self.builds = builds
        super().__init__(**counter)

    def step(self, action: Any) -> Any:
        if not self.builds and self.episode_step == 3:
            self._pass()
        return super().step(action)

    def _pass(self) -> None:
        waiting = threading.Event()
        while not self.gate.exists():
            waiting.wait(0.005)


def fns(**others: Callable[[], Any]) -> list[Callable[[], Any]]:
    made: list[Callable[[], Any]] = [partial(CounterEnv, horizon=5 + index) for index in range(NUM_ENVS)]
    for place, env_fn in others.items():
        made[int(place.removeprefix("env"))] = env_fn
    return made


def actions_of(step: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(step).integers(0, 4, NUM_ENVS)


def kill(envs: SubprocessVectorEnv, worker: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(envs.statistics()[worker].pid or 0, signal.SIGKILL)


def expect_same(one: Any, other: Any, rows: Any = slice(None)) -> None:
    for mine, own in zip(one[:4], other[:4], strict=True):
        assert mine[rows].tobytes() == own[rows].tobytes()


@pytest.fixture
def gate(tmp_path: Path) -> str:
    return str(tmp_path / "gate")


@pytest.mark.parametrize("slow", [0, 3, 5])
def test_step_wait_after_a_timeout_returns_the_answer_to_the_actions_that_were_sent(slow: int, gate: str) -> None:
    env_fn = partial(GatedEnv, gate, builds=False, horizon=5 + slow)
    envs = SubprocessVectorEnv(fns(**{f"env{slow}": env_fn}), envs_per_worker=2)
    twin = SerialVectorEnv(fns())
    envs.reset(seed=1)
    twin.reset(seed=1)
    for step in range(3):
        expect_same(envs.step(actions_of(step)), twin.step(actions_of(step)))
    actions = actions_of(3)
    envs.step_async(actions)
    expected = twin.step(actions.copy())
    actions[:] = 0  # the caller's again
    for _ in range(3):
        with pytest.raises(WaitTimeout):
            envs.step_wait(timeout=0.05)
    Path(gate).touch()
    expect_same(envs.step_wait(timeout=20), expected)
    for step in range(4, 20):
        expect_same(envs.step(actions_of(step)), twin.step(actions_of(step)))
    envs.close()
    twin.close()


def test_a_wait_is_bounded_while_a_worker_is_brought_back(gate: str) -> None:
    env_fn = partial(GatedEnv, gate, builds=True, horizon=5)
    policy = RestartPolicy(snapshots=False)
    envs = SubprocessVectorEnv(fns(env0=env_fn), envs_per_worker=2, restart=policy)
    twin = SerialVectorEnv(fns())
    envs.reset(seed=1)
    twin.reset(seed=1)
    kill(envs, 0)
    envs.step_async(actions_of(0))
    for _ in range(3):
        with pytest.raises(WaitTimeout):
            envs.step_wait(timeout=0.1)
    Path(gate).touch()
    expect_same(envs.step_wait(timeout=20), twin.step(actions_of(0)))
    expect_same(envs.step(actions_of(1)), twin.step(actions_of(1)))
    envs.close()
    twin.close()


@pytest.fixture
def closing() -> Iterator[list[Any]]:
    envs: list[Any] = []
    before = signal.signal(signal.SIGALRM, lambda *_: envs[-1].close())
    yield envs
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("hung", [0, 1, 5])
@pytest.mark.parametrize("by", ["handler", "thread"])
def test_close_while_a_step_hangs(closing: list[Any], by: str, hung: int) -> None:
    env_fn = partial(FaultyEnv, fault=HANG)
    deadlines = Deadlines(close=1000)  # a wait of that length exceeds the limit on tests
    envs = SubprocessVectorEnv(fns(**{f"env{hung}": env_fn}), envs_per_worker=2, deadlines=deadlines)
    closing.append(envs)
    envs.reset(seed=1)
    pids = [statistics.pid for statistics in envs.statistics()]
    closer = threading.Timer(0.2, envs.close)
    if by == "thread":
        closer.start()
    else:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(ClosedError):
        for step in range(5):
            envs.step(actions_of(step))
    if by == "thread":
        closer.join()
    envs.close()
    assert not any(is_alive(pid) for pid in pids if pid)


@pytest.mark.parametrize("by", ["handler", "thread"])
def test_close_while_a_worker_is_brought_back(closing: list[Any], by: str, gate: str) -> None:
    env_fn = partial(GatedEnv, gate, builds=True, horizon=5)
    envs = SubprocessVectorEnv(
        fns(env0=env_fn), envs_per_worker=2, deadlines=Deadlines(close=1000), restart=RestartPolicy(snapshots=False)
    )
    closing.append(envs)
    envs.reset(seed=1)
    kill(envs, 0)
    closer = threading.Timer(0.3, envs.close)
    if by == "thread":
        closer.start()
    else:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(ClosedError):
        envs.step(actions_of(0))
    if by == "thread":
        closer.join()
    envs.close()


class ClosesTogether(CounterEnv):
    """Its close() comes back once all have been asked to close."""

    def __init__(self, directory: str, number: int) -> None:
        self.directory, self.number = Path(directory), number
        super().__init__()

    def close(self) -> None:
        (self.directory / f"closing{self.number}").touch()
        waiting = threading.Event()
        while len(list(self.directory.glob("closing*"))) < NUM_ENVS:
            waiting.wait(0.005)


def test_all_are_asked_to_close_before_any_is_waited_for(tmp_path: Path) -> None:
    made = [partial(ClosesTogether, str(tmp_path), index) for index in range(NUM_ENVS)]
    envs = SubprocessVectorEnv(made, envs_per_worker=1, deadlines=Deadlines(close=1000))
    envs.reset(seed=1)
    envs.close()


def test_a_forked_child_of_the_trainer_is_refused() -> None:
    envs = SubprocessVectorEnv(fns(), envs_per_worker=2)
    envs.reset(seed=1)
    twin = SerialVectorEnv(fns())
    twin.reset(seed=1)
    pid = os.fork()
    if pid == 0:
        verdict = 1
        with contextlib.suppress(BaseException):
            refused = 0
            for call in (lambda: envs.step(actions_of(0)), lambda: envs.reset(), lambda: envs.call("poke")):
                try:
                    call()
                except UsageError:
                    refused += 1
            envs.close()
            verdict = 0 if refused == 3 else 2
        os._exit(verdict)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for step in range(8):
        expect_same(envs.step(actions_of(step)), twin.step(actions_of(step)))
    envs.close()
    twin.close()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("worker", [0, 1, 2])
def test_a_worker_without_restarts_left_does_not_put_the_others_out_of_step(worker: int, mode: AutoresetMode) -> None:
    envs = SubprocessVectorEnv(fns(), envs_per_worker=2, restart=RestartPolicy(max_restarts=0), autoreset_mode=mode)
    twin = SerialVectorEnv(fns(), autoreset_mode=mode)
    envs.reset(seed=1)
    twin.reset(seed=1)
    lost = [2 * worker, 2 * worker + 1]
    others = [index for index in range(NUM_ENVS) if index not in lost]
    expect_same(envs.step(actions_of(0)), twin.step(actions_of(0)))
    kill(envs, worker)
    for step in range(1, 8):
        expected = twin.step(actions_of(step))
        with pytest.raises(EnvsFailedError) as caught:
            envs.step(actions_of(step))
        assert isinstance(caught.value, RestartBudgetExceeded) or step > 1
        assert sorted(caught.value.failures) == lost
        for index in others:
            observation, *rest = caught.value.results[index]
            assert observation.tobytes() == expected[0][index].tobytes()
            assert rest == [part[index] for part in expected[1:4]]
    # A reset begins a new life of the envs; nothing is restarted for it.
    assert envs.reset(seed=5)[0].tobytes() == twin.reset(seed=5)[0].tobytes()
    for step in range(8, 12):
        expect_same(envs.step(actions_of(step)), twin.step(actions_of(step)))
    envs.close()
    twin.close()


def test_a_call_that_raises_is_raised_for_its_env_alone() -> None:
    envs = SubprocessVectorEnv(fns(env1=partial(FaultyEnv, fault=Fault("raise", "call"))), envs_per_worker=2)
    envs.reset(seed=1)
    with pytest.raises(MultienvError) as caught:
        envs.call("poke", 0.5)
    assert list(caught.value.failures) == [1]  # type: ignore[attr-defined]
    assert caught.value.results[0] == 1  # type: ignore[attr-defined]
    assert "Traceback" in caught.value.failures[1].remote_traceback  # type: ignore[attr-defined]
    envs.close()
