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
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from interruption import HandlerError, Interrupted, Interruption, Ledger, every_place

from kit import CounterEnv, WallClockInfoEnv, descendants
from multienv import MultiEnv, SubprocessEnv, SubprocessVectorEnv, create_subprocess_envs

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


class One:
    """An env and its ledger."""

    def __init__(self, horizon: int | None = 5, env_fn: Any = CounterEnv) -> None:
        self.env = SubprocessEnv(partial(env_fn, horizon=horizon)).initialize()
        self.ledger = Ledger(horizon=horizon)

    def begin(self, seed: int, *, anew: bool = False) -> None:
        """See to it that an episode is running."""
        if self.ledger.ended or anew:
            self.ledger.reset(self.env.reset(seed=seed), seed)

    def go_on(self, action: int = 3) -> None:
        """All is as if nothing had happened."""
        if not self.ledger.ended:
            self.ledger.step(self.env.step(action), [action])

    def kill(self) -> None:
        os.kill(self.env.statistics().pid or 0, signal.SIGKILL)
        time.sleep(0.001)

    def close(self) -> None:
        self.env.close()


Subject = TypeVar("Subject", bound="One | Several")


def explore(
    make: Callable[[], Subject],
    kind: str,
    trial: Callable[[Subject, Interruption, int], None],
    *,
    kills: int = 0,
    stride: int = 1,
) -> None:
    """Run the trial with an interruption at each place in turn, and tell at which ones it failed.

    With kills each trial gets an env of its own, as a replay passes more places the longer the journal is, and only
    every so many-th place is tried.
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
        no_loss(*getattr(subject, "hosted", [getattr(subject, "env", None)]))
    with time_limit():
        subject.close()
    say("places", places)
    if harmful:
        sys.exit(f"at {harmful} of {places} places an interruption does harm")
    assert places > 5, "nothing was interrupted"


def _library_frames(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames) if "/multienv/" in frame.filename)


def every_place_of_step(kind: str, env_name: str, stride: str = "0") -> None:
    """step() interrupted; the next step() completes it, or takes its own action when nothing had been sent.

    With a stride the worker is dead, so that the interruption falls on a recovery; there every so many-th place is tried.
    """

    def trial(one: One, interruption: Interruption, number: int) -> None:
        one.begin(number)
        if int(stride):
            one.kill()
        transition = None
        with interruption:
            transition = one.env.step(1)
        if transition is None:
            transition = one.env.step(2)
            resumed = one.ledger.step(transition, [1, 2]) == 1
            told = transition[4].get("multienv") == {"resumed": True}
            assert resumed == told, f"info says {transition[4]}, and the action was {int(transition[0][3])}"
        else:
            one.ledger.step(transition, [1])
        one.go_on()

    make = {
        "plain": partial(One, None),
        "with_ends": One,
        "ends": partial(One, 1),
        "info": partial(One, None, WallClockInfoEnv),
    }
    explore(make[env_name], kind, trial, kills=int(stride))


def every_two_places_of_step(kind: str) -> None:
    """The step that completes an interrupted one is interrupted itself."""

    def trial(one: One, interruption: Interruption, number: int) -> None:
        first = interruption
        for second in every_place(KINDS[kind]):
            one.begin(number)
            transition = None
            with first:
                transition = one.env.step(0)
            if transition is None:
                with second:
                    transition = one.env.step(1)
            with at(f"and then at {second.where}"):
                one.ledger.step(transition or one.env.step(2), [0, 1, 2])
                one.go_on()
            one.begin(number, anew=True)
            first = Interruption(interruption.place, KINDS[kind])

    explore(partial(One, None), kind, trial)


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


def every_place_of_step_wait(kind: str, then: str) -> None:
    """The receiving half is interrupted. Called again it collects the answer; step() does, too, or says what to do."""

    def trial(one: One, interruption: Interruption, number: int) -> None:
        one.begin(number)
        transition = None
        one.env.step_async(1)
        with interruption:
            transition = one.env.step_wait()
        if transition is None and then == "step":
            with contextlib.suppress(ValueError):
                transition = one.env.step(2)
        one.ledger.step(transition or one.env.step_wait(), [1, 2])
        one.go_on()

    explore(partial(One, None), kind, trial)


def every_place_of_reset(kind: str, then: str) -> None:
    """reset() interrupted; afterwards reset(), step() and close() work."""

    def trial(one: One, interruption: Interruption, number: int) -> None:
        one.begin(number, anew=True)
        one.go_on()
        with interruption:
            one.env.reset(seed=1000 + number)
        if then == "reset":
            one.begin(5000 + number, anew=True)
        elif then == "step":
            transition = one.env.step(2)
            if transition[0][0] == 1:  # the reset has taken place: this is the first step of the new episode
                one.ledger.reset(CounterEnv().reset(seed=1000 + number), 1000 + number)
            one.ledger.step(transition, [2])
        else:
            one.close()
            one.__init__(None)  # type: ignore[misc]
            return
        one.go_on()
        one.go_on()

    explore(partial(One, None), kind, trial)


def every_place_of_call(kind: str) -> None:
    """call() interrupted: it has happened or it has not, once, and a recovery knows which."""

    def trial(one: One, interruption: Interruption, number: int) -> None:
        one.begin(number)
        before, done = one.env.get_attr("pokes"), None
        with interruption:
            done = one.env.call("poke", 1.0)
        pokes = one.env.get_attr("pokes")
        assert pokes in ([before, before + 1] if done is None else [before + 1]), f"{before} pokes, then {pokes}"
        assert one.env.get_attr("offset") == pokes
        if not number % 8:
            one.kill()
            assert one.env.get_attr("pokes") == pokes, "the recovered env was poked more or less often"

    explore(One, kind, trial, kills=1)


def every_place_of_initialize(kind: str, stride: str = "1") -> None:
    """initialize() interrupted: called again it succeeds, or close() ends it; no descriptor is left by either."""

    def trial(_: One, interruption: Interruption, number: int) -> None:
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

    explore(One, kind, trial, stride=int(stride))


def every_place_of_building_several(kind: str, face: str, stride: str) -> None:
    """Making several envs at once, interrupted: the caller gets none, and nothing is left of them, without a collection."""

    def trial(_: One, interruption: Interruption, number: int) -> None:
        before, envs = descriptors(), None
        with interruption:
            if face == "list":
                envs = MultiEnv(create_subprocess_envs([CounterEnv] * 2))
            else:
                envs = SubprocessVectorEnv([CounterEnv] * 2, envs_per_worker=1)
        if envs is not None:
            envs.close()
        nothing_more_than(before)

    explore(One, kind, trial, stride=int(stride))


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


# --- several envs, at every place -----------------------------------------------------------------


class Several:
    """A MultiEnv, and one ledger for each of its envs, which know about autoreset."""

    def __init__(self, mode: str, workers: str, members: str = "hosted", context: str | None = None) -> None:
        env_fn = partial(CounterEnv, horizon=3)
        self.mode = mode
        count = 2 if members == "mixed" else 3
        self.hosted: list[Any] = list(create_subprocess_envs([env_fn] * count, context=context))
        envs = [*self.hosted, env_fn()] if members == "mixed" else self.hosted
        self.multi = MultiEnv(envs, autoreset_mode=mode, max_workers=int(workers) or None)
        self.ledgers = [Ledger(horizon=3) for _ in envs]

    def begin(self, seed: int, *, anew: bool = False) -> None:
        """See to it that an episode is running, if it is ours to do."""
        if anew or (self.mode == "DISABLED" and self.ledgers[0].ended) or not self.ledgers[0].transitions:
            self.reset(self.multi.reset(seed=seed), seed)

    def go_on(self, action: int = 3) -> None:
        """All is as if nothing had happened."""
        if not (self.mode == "DISABLED" and self.ledgers[0].ended):
            self.step(self.multi.step([action] * 3), [action])

    def reset(self, results: Any, seed: int) -> None:
        for index, ledger in enumerate(self.ledgers):
            ledger.reset((results[0][index], results[1][index]), seed + index)

    def step(self, lists: Any, given: list[int]) -> None:
        """``given``: the actions, same for each env, of the calls of which this may be the outcome."""
        taken = set()
        for index, ledger in enumerate(self.ledgers):
            with at(f"env {index}"):
                action = self._one(ledger, tuple(part[index] for part in lists), given)
            taken.add(action)
        assert len(taken - {None}) <= 1, f"some envs took the action of one call, some that of another: {taken}"

    def _one(self, ledger: Ledger, transition: Any, allowed: list[int]) -> int | None:
        if self.mode == "NEXT_STEP" and ledger.ended:
            assert transition[1:4] == (0.0, False, False), transition
            ledger.reset((transition[0], {}), None)
            return None
        if self.mode == "SAME_STEP" and (transition[2] or transition[3]):
            action = ledger.step((transition[4]["final_obs"], *transition[1:4]), allowed)
            ledger.reset((transition[0], {}), None)
            return action
        return ledger.step(transition, allowed)

    def kill(self) -> None:
        os.kill(self.hosted[0].statistics().pid or 0, signal.SIGKILL)
        time.sleep(0.001)

    def close(self) -> None:
        self.multi.close()


def every_place_of_multi_step(kind: str, mode: str, workers: str, members: str, stride: str = "0") -> None:
    """MultiEnv.step() interrupted; the next one completes it for every env, or takes its own actions for every env."""

    def trial(several: Several, interruption: Interruption, number: int) -> None:
        several.begin(10 * number)
        if int(stride):
            several.kill()
        lists = None
        with interruption:
            lists = several.multi.step([1, 1, 1])
        if lists is None:
            several.step(several.multi.step([2, 2, 2]), [1, 2])
        else:
            several.step(lists, [1])
        several.go_on()

    explore(lambda: Several(mode, workers, members), kind, trial, kills=int(stride))


def every_place_of_multi_reset(kind: str, workers: str, members: str) -> None:
    """MultiEnv.reset() interrupted; then reset(), step() and close() work."""

    def trial(several: Several, interruption: Interruption, number: int) -> None:
        with interruption:
            several.multi.reset(seed=10 * number)
        several.begin(10 * number + 5, anew=True)
        for action in range(4):
            several.go_on(action)

    explore(lambda: Several("NEXT_STEP", workers, members), kind, trial)


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


def random_steps(method: str, name: str, rounds: str, seed: str) -> None:
    """step() and reset() of one env, interrupted at random microseconds."""
    dice = random.Random(int(seed))
    env, ledger = SubprocessEnv(partial(CounterEnv, horizon=20), context=method).initialize(), Ledger(horizon=20)
    signals, given = source(name), []
    for number in range(int(rounds)):
        seconds = dice.uniform(1e-6, 3e-4)
        if ledger.ended:
            result = signals.attempt(seconds, partial(env.reset, seed=number))
            if result is not None:
                ledger.reset(result, number)
            continue
        action = dice.randrange(4)
        given.append(action)
        transition = signals.attempt(seconds, partial(env.step, action))
        if transition is not None:
            ledger.step(transition, given)
            given.clear()
    signals.stop()
    no_loss(env)
    env.close()
    signals.tell(int(rounds))
    assert ledger.transitions > int(rounds) // 20, "too few transitions to tell anything"


def random_multi_steps(method: str, name: str, mode: str, workers: str, rounds: str, seed: str) -> None:
    """The same for several envs at once."""
    dice = random.Random(int(seed))
    several = Several(mode, workers, context=method)
    signals, given = source(name), []
    several.begin(0)
    for number in range(int(rounds)):
        seconds = dice.uniform(1e-6, 8e-4)
        if mode == "DISABLED" and several.ledgers[0].ended:
            result = signals.attempt(seconds, partial(several.multi.reset, seed=number))
            if result is not None:
                several.reset(result, number)
            continue
        action = dice.randrange(4)
        given.append(action)
        lists = signals.attempt(seconds, partial(several.multi.step, [action] * 3))
        if lists is not None:
            several.step(lists, given)
            given.clear()
    signals.stop()
    no_loss(*several.hosted)
    several.close()
    signals.tell(int(rounds))


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


class CtrlC(Source):
    """Whoever presses it; the trainer that runs here does not know when."""

    def __init__(self) -> None:
        super().__init__(KeyboardInterrupt, signal.SIGINT)


def press_ctrl_c(method: str, kind: str) -> None:
    """Steps for ever; after each KeyboardInterrupt the run goes on. Ends when told by SIGUSR1, with a tally."""
    ending: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: ending.append(1))
    signals, several, ledger, given = CtrlC(), Several("NEXT_STEP", "0", context=method), Ledger(horizon=3), []
    env = several.hosted[0]
    number = 0
    if kind == "multi":
        several.begin(0)
    say("ready", *(env.statistics().pid for env in several.hosted))
    while not ending:
        action = number % 4
        call: Callable[[], Any] = partial(env.step, action)
        check: Callable[[Any, Any], Any] = ledger.step
        if kind == "multi":
            call, check = partial(several.multi.step, [action] * 3), several.step
        elif ledger.ended:
            call, check = partial(env.reset, seed=number), ledger.reset
        given.append(action)
        result = signals.attempt(0.0, call)
        if result is not None:
            check(result, number if len(result) == 2 else given)
            given.clear()
        number += 1
    no_loss(*several.hosted)
    several.close()
    signals.tell(0)
    say("steps", number)
