"""A step broken off by a signal at any moment is completed by the next: nothing lost, nothing doubled."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit import CounterEnv, first_difference
from kit.interruption import disarm, every_place
from multienv import AutoResetWrapper, Deadlines, MultiEnv, SubprocessEnv, create_subprocess_envs
from multienv.errors import ActionError, ClosedError, EnvsFailedError

# A signal that lands in the callback of a weak reference is swallowed by the interpreter, which says so.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function WeakSet:pytest.PytestUnraisableExceptionWarning"
)

ENDLESS = partial(CounterEnv, horizon=None)


class WordyEnv(CounterEnv):
    """Answers are longer than one read, some longer than a pipe holds."""

    def _info(self) -> dict[str, Any]:
        return {
            **super()._info(),
            "words": bytes([self.episode_step % 251]) * (5_000 if self.episode_step % 2 else 150_000),
        }


class Tick(Exception):
    """What the handler raises: an ordinary exception, which must not be taken for the env's."""


@pytest.fixture(params=[Tick, KeyboardInterrupt])
def interruption(request: pytest.FixtureRequest) -> Iterator[type[BaseException]]:
    def strike(*_: Any) -> None:
        raise request.param

    before = signal.signal(signal.SIGALRM, strike)
    yield request.param
    disarm()
    signal.signal(signal.SIGALRM, before)


def test_of_one_env_with_long_answers(interruption: type[BaseException]) -> None:
    """At random; the counter in the observation must go on by one each time."""
    moments, hits = random.Random(3), 0
    with SubprocessEnv(partial(WordyEnv, horizon=None)) as env:
        env.reset(seed=0)
        for expected in range(1, 301):
            got = None
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 2.5e-4))
                got = env.step(1)
                disarm()
            except interruption:
                hits += 1
            assert (got or env.step(1))[0][0] == expected
        assert hits > 10
        assert env.statistics().losses == 0


class StrikingEnv(CounterEnv):
    """Sends the trainer a signal from within its so many-th reset or step, and goes on when the gate is opened."""

    def __init__(
        self, *, trainer: int, build: int = 0, reset: int = 0, step: int = 0, gate: str = "", **counter: Any
    ) -> None:
        super().__init__(**counter)
        self.trainer, self.gate, self.left = trainer, gate, {"build": build, "reset": reset, "step": step}
        self._pass("build")

    def _pass(self, moment: str) -> None:
        self.left[moment] -= 1
        if self.left[moment] == 0:
            os.kill(self.trainer, signal.SIGALRM)
            if self.gate:
                Path(self.gate).read_bytes()  # a named pipe: until the trainer opens it, too

    def reset(self, **given: Any) -> Any:
        self._pass("reset")
        return super().reset(**given)

    def step(self, action: Any) -> Any:
        self._pass("step")
        return super().step(action)


@pytest.fixture
def gate(tmp_path: Path) -> str:
    """Where a StrikingEnv waits until it is opened."""
    path = str(tmp_path / "gate")
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("host", [SubprocessEnv, lambda env_fn: env_fn()], ids=["process", "plain"])
@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_of_an_env_that_resets_itself(interruption: type[BaseException], mode: str, host: Any) -> None:
    quiet = AutoResetWrapper(CounterEnv(horizon=3, count_episodes=False), mode)
    env = host(partial(StrikingEnv, trainer=os.getpid(), reset=2, horizon=3, count_episodes=False))
    with contextlib.closing(env):
        if host is SubprocessEnv:
            env.initialize()
        wrapped = AutoResetWrapper(env, mode)
        assert first_difference(wrapped.reset(seed=1), quiet.reset(seed=1)) is None
        hits = 0
        for action in [1, 2, 3, 1, 2, 3, 1, 2]:
            try:
                transition = wrapped.step(action)
            except interruption:
                hits += 1
                transition = wrapped.step(0)
                if host is SubprocessEnv:
                    assert transition[4].pop("multienv") == {"resumed": True}
            assert first_difference(transition, quiet.step(action)) is None
        assert hits == 1


class Boom:
    """As an action it fails in the trainer."""

    def __array__(self, *given: Any) -> Any:
        raise ZeroDivisionError("boom")


def test_what_an_action_raises_in_the_trainer_is_its_envs_failure() -> None:
    with MultiEnv(create_subprocess_envs([ENDLESS] * 3)) as m:
        m.reset(seed=0)
        try:  # an error that is kept keeps the worker's memory mapped
            m.step([Boom(), 1, 1])
        except EnvsFailedError as error:
            kinds, results = {index: type(one) for index, one in error.failures.items()}, error.results
        assert kinds == {0: ActionError}
        assert [result and result[0][3] for result in results] == [None, 1, 1]
        assert [one[0] for one in m.step([1, 1, 1])[0]] == [1, 2, 2]


class StrikingAction:
    """The action 1, which sends a signal when it is looked at for the first time."""

    def __init__(self) -> None:
        self.looks = 0

    def __array__(self, *given: Any) -> Any:
        self.looks += 1
        if self.looks == 1:
            signal.raise_signal(signal.SIGALRM)
        return np.array(1)

    def __reduce__(self) -> Any:
        return int, (1,)


def test_the_callers_actions_may_change_before_an_interrupted_step_is_completed(
    interruption: type[BaseException],
) -> None:
    with MultiEnv(create_subprocess_envs([ENDLESS] * 3)) as m:
        m.reset(seed=0)
        row = np.array(1)
        actions = [1, StrikingAction(), row]
        with pytest.raises(interruption):
            m.step(actions)
        row[...] = 2
        actions[:] = [2, 2, 2]
        assert [one[3] for one in m.step(actions)[0]] == [1, 1, 1]
        assert [one[3] for one in m.step(actions)[0]] == [2, 2, 2]


@pytest.mark.parametrize(
    ("then", "host"),
    [("step", SubprocessEnv), ("reset", SubprocessEnv), ("step", lambda env_fn: env_fn())],
    ids=["step", "reset", "step of a plain env"],
)
def test_of_a_reset_of_several_envs(interruption: type[BaseException], then: str, host: Any, gate: str) -> None:
    """It is completed first, and never made by two threads at once."""
    quiet = [CounterEnv(horizon=None) for _ in range(2)]
    striking = host(partial(StrikingEnv, trainer=os.getpid(), reset=1, gate=gate, horizon=None))
    with MultiEnv([striking, SubprocessEnv(ENDLESS)]) as m:
        with pytest.raises(interruption):
            m.reset(seed=1)
        opener = threading.Thread(target=lambda: Path(gate).write_bytes(b""))
        opener.start()
        if then == "call":
            assert m.call("poke") == [1, 1]
        seed = 5 if then == "reset" else 1
        first = [one.reset(seed=seed + index)[0] for index, one in enumerate(quiet)]
        if then == "reset":
            assert first_difference(m.reset(seed=seed)[0], first) is None
        expected = [one.step(np.int64(2))[0] for one in quiet]
        assert first_difference(m.step([2, 2])[0], expected) is None
        opener.join()


@pytest.mark.parametrize("several", [False, True], ids=["create_subprocess_envs", "MultiEnv"])
def test_of_building_several_envs(interruption: type[BaseException], several: bool, gate: str) -> None:
    """What is being built is closed, however long it would have taken: nobody opens the gate."""
    env_fns = [ENDLESS, partial(StrikingEnv, trainer=os.getpid(), build=1, gate=gate)]
    deadlines = Deadlines(start=None, close=0.1)
    if several:
        envs = [SubprocessEnv(env_fn, deadlines=deadlines) for env_fn in env_fns]
        envs[0].initialize()
        with pytest.raises(interruption):
            MultiEnv(envs)
        assert envs[0].statistics().state == "ready"
        for env in envs:
            env.close()
    else:
        with pytest.raises(interruption):
            create_subprocess_envs(env_fns, deadlines=deadlines)


def test_of_closing_several_envs() -> None:
    """Wherever it is broken off, closing again closes what is left."""

    class ClosingEnv(CounterEnv):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    for interruption in every_place():
        m = MultiEnv([ClosingEnv(), ClosingEnv()])
        with interruption:
            m.close()
        m.close()
        assert [env.is_closed for env in m.envs] == [True, True], interruption.where  # type: ignore[attr-defined]
        with pytest.raises(ClosedError):
            m.step([1, 1])
