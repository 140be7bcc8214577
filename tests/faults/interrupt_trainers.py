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
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
from interruption import HandlerError, Interrupted, Interruption, Ledger, every_place

from multienv import MultiEnv, SubprocessEnv, create_subprocess_envs
from multienv.testing import CounterEnv, WallClockInfoEnv

KINDS = {"base": Interrupted, "error": HandlerError, "keyboard": KeyboardInterrupt}


def say(*words: object) -> None:
    print(*words, flush=True)


def no_loss(*envs: Any) -> None:
    for env in envs:
        statistics = env.statistics()
        assert statistics.losses == 0, f"an interruption cost a worker: {statistics.last_loss}"
        assert statistics.restarts == 0


@contextlib.contextmanager
def at(interruption: Interruption) -> Iterator[None]:
    """Say where it happened when the check fails that follows."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"after an interruption at {interruption.where}")
        raise


# --- one env, at every place --------------------------------------------------------------------


def every_place_of_step(kind: str, env_name: str, kill: str = "") -> None:
    """step() interrupted; the next step() completes it, or takes its own action when nothing had been sent."""
    env_fn = {"plain": CounterEnv, "info": WallClockInfoEnv}[env_name]
    horizon = 5  # the interruption falls on ends of episodes, too
    env = SubprocessEnv(partial(env_fn, horizon=horizon)).initialize()
    ledger, places, errors = Ledger(horizon=horizon), 0, []
    for interruption in every_place(KINDS[kind]):
        if ledger.ended:
            ledger.reset(env.reset(seed=places), places)
        if kill:
            os.kill(env.statistics().pid or 0, signal.SIGKILL)
            time.sleep(0.001)
        transition = None
        with at(interruption):
            try:
                with interruption:
                    transition = env.step(1)
                if transition is None:
                    transition = env.step(2)
                    resumed = ledger.step(transition, [1, 2]) == 1
                    told = transition[4].get("multienv") == {"resumed": True}
                    assert resumed == told, f"info says {transition[4]}, and the action was {int(transition[0][3])}"
                else:
                    ledger.step(transition, [1])
                if not ledger.ended:
                    ledger.step(env.step(3), [3])
            except BaseException as error:
                errors.append(f"{interruption.where}: {type(error).__name__}: {error}")
                if len(errors) > 8:
                    break
                env.close()
                env = SubprocessEnv(partial(env_fn, horizon=horizon)).initialize()
                ledger = Ledger(horizon=horizon)
        places += 1
    report(places, errors)
    if not kill:
        no_loss(env)
    env.close()


def report(places: int, errors: list[str]) -> None:
    say("places", places)
    if errors:
        print("\n".join(errors), file=sys.stderr)
        sys.exit(f"{len(errors)} of {places} places at which an interruption does harm")
    assert places > 5


def every_two_places_of_step(kind: str) -> None:
    """The step that completes an interrupted one is interrupted itself."""
    env, ledger, errors = SubprocessEnv(partial(CounterEnv, horizon=None)).initialize(), Ledger(horizon=None), []
    ledger.reset(env.reset(seed=0), 0)
    places = 0
    for first in every_place(KINDS[kind]):
        for second in every_place(KINDS[kind]):
            places += 1
            transition = None
            try:
                with first:
                    transition = env.step(0)
                if transition is None:
                    with second:
                        transition = env.step(1)
                    if transition is None:
                        transition = env.step(2)
                ledger.step(transition, [0, 1, 2])
            except BaseException as error:
                errors.append(f"{first.where}, then {second.where}: {type(error).__name__}: {error}")
                if len(errors) > 8:
                    return report(places, errors)
                env.close()
                env, ledger = SubprocessEnv(partial(CounterEnv, horizon=None)).initialize(), Ledger(horizon=None)
                ledger.reset(env.reset(seed=0), 0)
            first = Interruption(first.place, KINDS[kind])
    no_loss(env)
    env.close()
    return report(places, errors)


def every_place_of_step_wait(kind: str) -> None:
    """The receiving half is interrupted; calling it again collects the answer."""
    every_place_of_halves(kind, lambda env: env.step_wait(), lambda env: env.step_wait())


def every_place_of_step_wait_then_step(kind: str) -> None:
    """The receiving half is interrupted; step() collects the answer, or says that something is pending."""

    def go_on(env: SubprocessEnv) -> Any:
        try:
            return env.step(2)
        except ValueError:
            return env.step_wait()

    every_place_of_halves(kind, lambda env: env.step_wait(), go_on)


def every_place_of_halves(kind: str, interrupted: Callable[[Any], Any], go_on: Callable[[Any], Any]) -> None:
    env, ledger, errors, places = SubprocessEnv(CounterEnv).initialize(), Ledger(), [], 0
    for interruption in every_place(KINDS[kind]):
        if ledger.ended:
            ledger.reset(env.reset(seed=places), places)
        transition = None
        places += 1
        try:
            env.step_async(1)
            with interruption:
                transition = interrupted(env)
            if transition is None:
                with time_limit(2.0):
                    transition = go_on(env)
            ledger.step(transition, [1, 2])
            if not ledger.ended:
                ledger.step(env.step(3), [3])
        except BaseException as error:
            errors.append(f"{interruption.where}: {type(error).__name__}: {error}")
            if len(errors) > 8:
                break
            env.close()
            env, ledger = SubprocessEnv(CounterEnv).initialize(), Ledger()
    report(places, errors)
    no_loss(env)
    env.close()


class Stuck(BaseException):
    """A call that must not block does."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    class Source:
    """Where interruptions come from. Its handler raises inside of an attempt only, so that late signals do nothing."""

    def __init__(self, kind: type[BaseException], number: signal.Signals) -> None:
        self.kind = kind
        self.inside = False
        self.arrived = 0
        signal.signal(number, self._handle)

    def _handle(self, *_: object) -> None:
        self.arrived += 1
        if self.inside:
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
            pass
        self.inside = False
        self.disarm()
        return result

    def arm(self, seconds: float) -> None:
        """Strike so many seconds from now."""

    def disarm(self) -> None:
        """Have it behind us."""

    def stop(self) -> None:
        """Strike no more."""


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
    signals, interrupted, number, given = source(name), 0, 0, []
    for _ in range(int(rounds)):
        seconds = dice.uniform(1e-6, 3e-4)
        if ledger.ended:
            number += 1
            result = signals.attempt(seconds, lambda: env.reset(seed=number))
            if result is not None:
                ledger.reset(result, number)
            interrupted += result is None
            continue
        action = dice.randrange(4)
        given.append(action)
        transition = signals.attempt(seconds, lambda: env.step(action))
        if transition is None:
            interrupted += 1
        else:
            ledger.step(transition, given)
            given.clear()
    signals.stop()
    no_loss(env)
    env.close()
    say("interrupted", interrupted)
    say("transitions", ledger.transitions)
    assert interrupted > int(rounds) // 20, "too few interruptions to tell anything"
    assert ledger.transitions > int(rounds) // 20, "too few transitions to tell anything"


def random_multi_steps(method: str, name: str, mode: str, workers: str, rounds: str, seed: str) -> None:
    """The same for several envs at once."""
    dice = random.Random(int(seed))
    envs = create_subprocess_envs([partial(CounterEnv, horizon=3)] * 3, context=method)
    multi = MultiEnv(envs, autoreset_mode=mode, max_workers=int(workers) or None)
    ledgers, signals, interrupted, given = Ledgers(mode, 3), source(name), 0, []
    ledgers.reset(multi.reset(seed=0), 0)
    for number in range(int(rounds)):
        seconds = dice.uniform(1e-6, 8e-4)
        if mode == "DISABLED" and ledgers.each[0].ended:
            result = signals.attempt(seconds, lambda: multi.reset(seed=number))
            if result is not None:
                ledgers.reset(result, number)
            interrupted += result is None
            continue
        actions = [dice.randrange(4) for _ in envs]
        given.append(actions)
        lists = signals.attempt(seconds, lambda: multi.step(actions))
        if lists is None:
            interrupted += 1
        else:
            ledgers.step(lists, given)
            given.clear()
    signals.stop()
    no_loss(*envs)
    multi.close()
    say("interrupted", interrupted)
    assert interrupted > int(rounds) // 20, "too few interruptions to tell anything"


def random_initialize(method: str, rounds: str, seed: str) -> None:
    """create_subprocess_envs(), interrupted at random, leaves nothing; initialize() can be called again."""
    dice = random.Random(int(seed))
    SubprocessEnv(CounterEnv, context=method).initialize().close()  # warms up
    signals, interrupted = Alarms(Interrupted), 0
    for number in range(int(rounds)):
        if number % 2:
            envs = signals.attempt(dice.uniform(1e-6, 0.1), lambda: create_subprocess_envs([CounterEnv] * 2, context=method))
            interrupted += envs is None
            for env in envs or ():
                env.close()
        else:
            env = SubprocessEnv(CounterEnv, context=method)
            interrupted += signals.attempt(dice.uniform(1e-6, 0.05), env.initialize) is None
            env.initialize()
            ledger = Ledger()
            ledger.reset(env.reset(seed=1), 1)
            ledger.step(env.step(1), [1])
            env.close()
    say("interrupted", interrupted)
    assert interrupted > 2


class CtrlC(Source):
    """Whoever presses it; the trainer that runs here does not know when."""

    def __init__(self) -> None:
        super().__init__(KeyboardInterrupt, signal.SIGINT)


def press_ctrl_c(method: str, kind: str) -> None:
    """Steps for ever; after each KeyboardInterrupt the run goes on. Ends when told by SIGUSR1, with a tally."""
    ending: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: ending.append(1))
    signals = CtrlC()
    envs = create_subprocess_envs([partial(CounterEnv, horizon=3)] * 3, context=method)
    ledgers, ledger, given = Ledgers("NEXT_STEP", 3), Ledger(horizon=3), []
    number = interrupted = 0
    if kind == "multi":
        multi = MultiEnv(envs)
        ledgers.reset(multi.reset(seed=0), 0)
    say("ready", *(env.statistics().pid for env in envs))
    while not ending:
        action = number % 4
        if kind == "multi":
            call, check = partial(multi.step, [action] * 3), ledgers.step
        elif ledger.ended:
            call, check = partial(envs[0].reset, seed=number), ledger.reset
        else:
            call, check = partial(envs[0].step, action), ledger.step
        given.append([action] * 3 if kind == "multi" else action)
        result = signals.attempt(0.0, lambda call=call: call())
        if result is None:
            interrupted += 1
        else:
            check(result, number if len(result) == 2 else given)
            given = []
        number += 1
    no_loss(*envs)
    for env in envs:
        env.close()
    say("interrupted", interrupted)
    say("steps", number)
