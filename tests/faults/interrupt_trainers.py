"""Trainers that test_interrupts.py runs: interrupted at every place or at random, then held against a quiet run.

Each function is a trainer (see trainer_process.py); its arguments are strings. A failed check is an AssertionError, and
so an exit code that is not zero.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any, Protocol, TypeVar

import numpy as np

from kit import CounterEnv, descendants
from kit.interruption import HandlerError, Interrupted, Interruption, Ledger, every_place
from multienv import MultiEnv, SubprocessEnv, SubprocessVectorEnv, create_subprocess_envs
from multienv.errors import EnvsFailedError

KINDS = {"base": Interrupted, "error": HandlerError, "keyboard": KeyboardInterrupt}


def say(*words: object) -> None:
    print(*words, flush=True)


def no_loss(*envs: Any) -> None:
    for env in envs:
        statistics = env.statistics()
        assert statistics.losses == 0, f"an interruption cost a worker: {statistics.last_loss}"
        assert statistics.restarts == 0


class Stuck(BaseException):
    """A call that must not block does."""


@contextlib.contextmanager
def time_limit(seconds: float = 5.0) -> Iterator[None]:
    """Raise where it blocks for longer."""

    def handler(*_: object) -> None:
        raise Stuck(f"still waiting after {seconds} s")

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# --- at every place -------------------------------------------------------------------------------


class Closable(Protocol):
    """What is explored."""

    hosted: Any  # what has statistics()

    def close(self) -> None: ...


Subject = TypeVar("Subject", bound=Closable)


class Envs:
    """Envs of one face, and a ledger for each, which know about autoreset.

    Args:
        face: ``"one"`` is a `SubprocessEnv`, ``"multi"`` a `MultiEnv` of three, ``"vector"`` four in two processes, and
            ``"vector of one"`` four in one process.
        mode: Of autoreset; a single env has none.
        env_fn: Builds each of them.
        horizon: Of their episodes.
        context: How processes are started.
    """

    def __init__(
        self, face: str, mode: str = "DISABLED", *, env_fn: Any = CounterEnv, horizon: int = 3, context: Any = None
    ) -> None:
        self.face, self.mode, env_fn = face, mode, partial(env_fn, horizon=horizon)
        self.count = {"one": 1, "multi": 3}.get(face, 4)
        if face == "one":
            self.envs: Any = SubprocessEnv(env_fn, context=context).initialize()
            self.hosted: list[Any] = [self.envs]
        elif face == "multi":
            self.hosted = list(create_subprocess_envs([env_fn] * self.count, context=context))
            self.envs = MultiEnv(self.hosted, autoreset_mode=mode)
        else:
            each = 2 if face == "vector" else 4
            self.envs = SubprocessVectorEnv(
                [env_fn] * self.count, envs_per_worker=each, autoreset_mode=mode, context=context
            )
            self.hosted = self.envs._workers
        self.ledgers = [Ledger(horizon=horizon) for _ in range(self.count)]

    def actions(self, action: int) -> Any:
        return action if self.face == "one" else np.full(self.count, action)

    def rows(self, batch: Any) -> list[tuple[Any, ...]]:
        """The transition of each env; its info has what this file looks at."""
        if self.face == "one":
            return [batch]
        if self.face == "multi":
            return list(zip(*batch, strict=True))
        told = {"multienv": None} if "multienv" in batch[4] else {}
        last = batch[4].get("final_obs", [None] * self.count)
        infos = [{"final_obs": one, **told} for one in last]
        numbers = [part.tolist() for part in batch[1:4]]
        return list(zip(batch[0], *numbers, infos, strict=True))

    def begin(self, seed: int, *, anew: bool = False) -> None:
        """See to it that an episode is running, if that is the caller's to do."""
        if anew or (self.mode == "DISABLED" and self.ledgers[0].ended) or not self.ledgers[0].transitions:
            self.reset(self.envs.reset(seed=seed)[0], seed)

    def go_on(self, action: int = 3) -> None:
        """All is as if nothing had happened."""
        if not (self.mode == "DISABLED" and self.ledgers[0].ended):
            self.step(self.envs.step(self.actions(action)), [action])

    def reset(self, observations: Any, seed: int) -> None:
        for index, ledger in enumerate(self.ledgers):
            ledger.reset((observations if self.face == "one" else observations[index], {}), seed + index)

    def step(self, batch: Any, given: Sequence[int]) -> set[int | None]:
        """``given``: the actions, the same for each env, of the calls of which this may be the outcome."""
        taken = set()
        for index, (ledger, row) in enumerate(zip(self.ledgers, self.rows(batch), strict=True)):
            with at(f"env {index}"):
                taken.add(self._one(ledger, row, given))
        assert len(taken - {None}) <= 1, f"some envs took the action of one call, some that of another: {taken}"
        return taken

    def _one(self, ledger: Ledger, row: tuple[Any, ...], allowed: Sequence[int]) -> int | None:
        if self.mode == "NEXT_STEP" and ledger.ended:
            assert row[1:4] == (0.0, False, False), row
            ledger.reset((row[0], {}), None)
            return None
        if self.mode == "SAME_STEP" and (row[2] or row[3]):
            action = ledger.step((row[4]["final_obs"], *row[1:4]), allowed)
            ledger.reset((row[0], {}), None)
            return action
        return ledger.step(row, allowed)

    def kill(self) -> None:
        os.kill(self.hosted[0].statistics().pid or 0, signal.SIGKILL)
        time.sleep(0.001)

    def close(self) -> None:
        self.envs.close()


@contextlib.contextmanager
def at(words: str) -> Iterator[None]:
    """Say where, when a check fails."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{words}: {type(error).__name__}: {error}") from error
    except Stuck as error:
        error.args = (f"{words}: {error}",)
        raise


def explore(
    make: Callable[[], Subject],
    kind: str,
    trial: Callable[[Subject, Interruption, int], None],
    *,
    kills: int = 0,
    stride: int = 1,
) -> None:
    """Run the trial with an interruption at each place in turn, and tell at which ones it failed.

    With kills each trial gets envs of its own, as a replay passes more places the longer the journal is, and only every
    so many-th place is tried.
    """
    subject, harmful, places = make(), 0, 0
    for interruption in every_place(KINDS[kind], stride=max(stride, kills)):
        places += 1
        try:
            with time_limit():
                trial(subject, interruption, places)
                if kills:
                    subject.close()
                    subject = make()
        except BaseException as error:
            stuck = f" in {_library_frames(error)}" if isinstance(error, Stuck) else ""
            print(f"{interruption.where}: {type(error).__name__}: {error}{stuck}", file=sys.stderr, flush=True)
            harmful += 1
            if harmful > 5:
                break
            with time_limit():
                subject.close()
            subject = make()
    if not kills:
        no_loss(*subject.hosted)
    with time_limit():
        subject.close()
    say("places", places)
    if harmful:
        sys.exit(f"at {harmful} of {places} places an interruption does harm")
    assert places > 5, "nothing was interrupted"


def _library_frames(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames) if "/multienv/" in frame.filename)


def every_place_of_the_halves_of_step(face: str, kind: str, then: str, stride: str) -> None:
    """Either half is interrupted. Called again it has its effect once; step() does, too, or says what to do."""

    def trial(envs: Envs, interruption: Interruption, number: int) -> None:
        envs.begin(number)
        batch = None
        with interruption:
            envs.envs.step_async(envs.actions(1))
            batch = envs.envs.step_wait()
        if batch is None:
            with contextlib.suppress(ValueError):  # the first is pending
                if then == "step":
                    batch = envs.envs.step(envs.actions(2))
                else:
                    envs.envs.step_async(envs.actions(2))
        envs.step(batch or envs.envs.step_wait(), [1, 2])
        envs.go_on()

    explore(partial(Envs, face), kind, trial, stride=int(stride))


class RaisingEnv(CounterEnv):
    """Raises when it is given the action 0."""

    def step(self, action: Any) -> Any:
        if action == 0:
            raise ValueError("nought")
        return super().step(action)


def every_place_of_a_step_that_fails(kind: str, stride: str) -> None:
    """step() interrupted, of which one env has made an error: the next one raises it, with what the others returned."""
    culprit = 1

    def fail(envs: Envs, actions: Any) -> Any:
        try:
            return envs.envs.step(actions)
        except EnvsFailedError as error:
            failed = error
        assert list(failed.failures) == [culprit], failed.failures
        for index, ledger in enumerate(envs.ledgers):
            if index != culprit:
                observation, reward, *flags = failed.results[index]
                ledger.step((observation, float(reward), *flags), [1])
        envs.ledgers[culprit].ended = True
        return failed

    def trial(envs: Envs, interruption: Interruption, number: int) -> None:
        envs.begin(10 * number, anew=True)
        envs.go_on()
        actions = envs.actions(1)
        actions[culprit] = 0
        outcome = None
        with interruption:
            outcome = fail(envs, actions)
        if outcome is None:
            outcome = fail(envs, envs.actions(2))
        if not isinstance(outcome, EnvsFailedError):  # the first has not been sent
            envs.step(outcome, [2])
        envs.go_on()

    explore(partial(Envs, "vector", "NEXT_STEP", env_fn=RaisingEnv), kind, trial, stride=int(stride))


def every_place_of_initialize(kind: str, stride: str) -> None:
    """initialize() interrupted: called again it succeeds, or close() ends it; no descriptor is left by either."""

    def trial(_: Envs, interruption: Interruption, number: int) -> None:
        before = descriptors()
        env = SubprocessEnv(CounterEnv)
        try:
            with interruption:
                env.initialize()
            if number % 2:
                env.initialize()
                ledger = Ledger()
                ledger.reset(env.reset(seed=1), 1)
                ledger.step(env.step(1), [1])
        finally:
            env.close()
        nothing_more_than(before)

    explore(partial(Envs, "one"), kind, trial, stride=int(stride))


def every_place_of_building_several(kind: str, face: str, stride: str) -> None:
    """Making several envs at once, interrupted: the caller gets none, and nothing is left of them, without a collection."""

    def trial(_: Envs, interruption: Interruption, number: int) -> None:
        before, envs = descriptors(), None
        with interruption:
            if face == "multi":
                envs = MultiEnv(create_subprocess_envs([CounterEnv] * 2))
            else:
                envs = SubprocessVectorEnv([CounterEnv] * 2, envs_per_worker=1)
        if envs is not None:
            envs.close()
        nothing_more_than(before)

    explore(partial(Envs, "one"), kind, trial, stride=int(stride))


def descriptors() -> dict[str, int]:
    """How many descriptors this process has of each kind."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists the directory
            kind = os.readlink(f"/proc/self/fd/{name}").partition("[")[0]
            found[kind] = found.get(kind, 0) + 1
    return found


def nothing_more_than(before: dict[str, int]) -> None:
    """Wait until no more descriptors are open than before."""
    until = time.monotonic() + 2.0
    while any(count > before.get(kind, 0) for kind, count in descriptors().items()):
        assert time.monotonic() < until, f"there were {before}, there are {descriptors()}"
        time.sleep(0.005)


# --- real signals, at random ----------------------------------------------------------------------


def _is_in_library(frame: FrameType | None) -> bool:
    while frame is not None:
        if "/multienv/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class Source:
    """Where interruptions come from. Its handler raises inside of an attempt only, so that late signals do nothing."""

    def __init__(self, kind: type[BaseException], number: signal.Signals) -> None:
        self.kind = kind
        self.inside = False
        self.interruptions = 0
        signal.signal(number, self._handle)

    def _handle(self, _: int, frame: FrameType | None) -> None:
        # Not once the call has returned: what it returned is ours then, to keep or to lose.
        if self.inside and _is_in_library(frame):
            self.inside = False
            raise self.kind

    def attempt(self, seconds: float, call: Callable[[], Any]) -> Any:
        """What the call returns, or None when it was interrupted, which is so many seconds from now."""
        result = None
        try:
            self.inside = True
            self.arm(seconds)
            result = call()
            self.inside = False
        except self.kind:
            self.interruptions += 1
        finally:
            self.inside = False
        self.disarm()
        return result

    def arm(self, seconds: float) -> None:
        """Strike so many seconds from now."""

    def disarm(self) -> None:
        """Have it behind us."""

    def stop(self) -> None:
        """Strike no more."""

    def tell(self, rounds: int) -> None:
        """Say how often it struck, and see that it was often enough to mean something."""
        say("interrupted", self.interruptions)
        assert self.interruptions > rounds // 20, f"only {self.interruptions} interruptions in {rounds} rounds"


class Alarms(Source):
    """SIGALRM from the kernel."""

    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__(kind, signal.SIGALRM)

    def arm(self, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def disarm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


class FromThread(Source):
    """SIGINT from another thread."""

    def __init__(self, strike: Callable[[], object]) -> None:
        super().__init__(KeyboardInterrupt, signal.SIGINT)
        self._strike = strike
        self._armed, self._struck = threading.Event(), threading.Event()
        self._seconds = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._armed.wait()
            self._armed.clear()
            if self._stopping:
                return
            until = time.perf_counter() + self._seconds
            while time.perf_counter() < until:
                time.sleep(0)
            self._strike()
            self._struck.set()

    def arm(self, seconds: float) -> None:
        self._seconds = seconds
        self._struck.clear()
        self._armed.set()

    def disarm(self) -> None:
        self._armed.set()  # in case that arm() was interrupted before it got that far
        self._struck.wait()

    def stop(self) -> None:
        self._stopping = True
        self._armed.set()
        self._thread.join()


def source(name: str) -> Source:
    if name in ("alarm", "alarm_error"):
        return Alarms(HandlerError if name == "alarm_error" else Interrupted)
    return FromThread({"interrupt_main": _thread.interrupt_main, "raise_signal": _sigint_to_main}[name])


def _sigint_to_main() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def random_steps(face: str, mode: str, method: str, name: str, rounds: str, seed: str) -> None:
    """step() and reset(), interrupted at random microseconds."""
    dice = random.Random(int(seed))
    envs = Envs(face, mode, horizon=20 if face == "one" else 3, context=method)
    signals, given = source(name), list[int]()
    envs.begin(0)
    for number in range(int(rounds)):
        seconds = dice.uniform(1e-6, 3e-4 if face == "one" else 8e-4)
        if mode == "DISABLED" and envs.ledgers[0].ended:
            result = signals.attempt(seconds, partial(envs.envs.reset, seed=number))
            if result is not None:
                envs.reset(result[0], number)
            continue
        action = dice.randrange(4)
        given.append(action)
        batch = signals.attempt(seconds, partial(envs.envs.step, envs.actions(action)))
        if batch is not None:
            envs.step(batch, given)
            given.clear()
    signals.stop()
    no_loss(*envs.hosted)
    envs.close()
    signals.tell(int(rounds))
    assert envs.ledgers[0].transitions > int(rounds) // 20, "too few transitions to tell anything"


def random_initialize(method: str, rounds: str, seed: str) -> None:
    """create_subprocess_envs(), interrupted at random, leaves nothing; initialize() can be called again."""
    dice = random.Random(int(seed))
    SubprocessEnv(CounterEnv, context=method).initialize().close()  # warms up
    signals = Alarms(Interrupted)
    for number in range(int(rounds)):
        if number % 2:
            create = partial(create_subprocess_envs, [CounterEnv] * 2, context=method)
            for env in signals.attempt(dice.uniform(1e-6, 0.1), create) or ():
                env.close()
            continue
        env = SubprocessEnv(CounterEnv, context=method)
        signals.attempt(dice.uniform(1e-6, 0.05), env.initialize)
        env.initialize()
        ledger = Ledger()
        ledger.reset(env.reset(seed=1), 1)
        ledger.step(env.step(1), [1])
        env.close()
    signals.tell(int(rounds))
    deadline = time.monotonic() + 5.0
    while len(descendants(os.getpid())) > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    left = [str(record) for record in descendants(os.getpid()).values()]
    assert len(left) <= 1, f"beside the monitor there live {left}"
