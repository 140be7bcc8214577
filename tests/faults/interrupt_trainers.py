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
            first = Interruption(places_before(first), KINDS[kind])
    no_loss(env)
    env.close()
    return report(places, errors)


def places_before(interruption: Interruption) -> int:
    """Its place, to make another at the same."""
    return interruption.place


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
    def handler(*_: object) -> None:
        raise Stuck(f"still waiting after {seconds} s")

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def every_place_of_reset(kind: str, then: str) -> None:
    """reset() interrupted; afterwards reset(), step() and close() work."""
    env, errors, places = SubprocessEnv(partial(CounterEnv, horizon=None)).initialize(), [], 0
    for interruption in every_place(KINDS[kind]):
        places += 1
        try:
            ledger = Ledger(horizon=None)
            ledger.reset(env.reset(seed=places), places)
            ledger.step(env.step(0), [0])
            with interruption:
                env.reset(seed=places + 1000)
            if then == "reset":
                ledger.reset(env.reset(seed=places + 5000), places + 5000)
                ledger.step(env.step(2), [2])
                ledger.step(env.step(3), [3])
            elif then == "step":
                transition = env.step(2)
                if transition[0][0] == 1:  # the reset has taken place: this is the first step of the new episode
                    ledger.reset(ledger_reset(places + 1000), places + 1000)
                ledger.step(transition, [2])
                ledger.step(env.step(3), [3])
            else:
                with time_limit(10):
                    env.close()
                env = SubprocessEnv(partial(CounterEnv, horizon=None)).initialize()
        except BaseException as error:
            errors.append(f"{interruption.where}: {type(error).__name__}: {error}")
            if len(errors) > 8:
                break
            env.close()
            env = SubprocessEnv(partial(CounterEnv, horizon=None)).initialize()
    report(places, errors)
    no_loss(env)
    env.close()


def ledger_reset(seed: int) -> tuple[Any, Any]:
    """What a reset with that seed returns."""
    return CounterEnv(horizon=None).reset(seed=seed)


def every_place_of_call(kind: str) -> None:
    """call() interrupted: it has happened or it has not, once, and a recovery knows which."""
    env, errors, places, least, most = SubprocessEnv(CounterEnv).initialize(), [], 0, 0, 0
    env.reset(seed=0)
    for interruption in every_place(KINDS[kind]):
        places += 1
        done = None
        try:
            with interruption:
                done = env.call("poke", 1.0)
            least, most = least + (done is not None), most + 1
            pokes = env.get_attr("pokes")
            assert least <= pokes <= most, f"{pokes} pokes, between {least} and {most} expected"
            assert env.get_attr("offset") == pokes
            least = most = pokes
            if not places % 8:
                os.kill(env.statistics().pid or 0, signal.SIGKILL)
                assert env.get_attr("pokes") == pokes, "the recovered env was poked more or less often"
        except BaseException as error:
            errors.append(f"{interruption.where}: {type(error).__name__}: {error}")
            if len(errors) > 8:
                break
            env.close()
            env, least, most = SubprocessEnv(CounterEnv).initialize(), 0, 0
            env.reset(seed=0)
    assert env.statistics().truncated_recoveries == 0
    env.close()
    report(places, errors)


def every_place_of_initialize(kind: str, stride: str = "1") -> None:
    """initialize() interrupted: called again it succeeds, or close() ends it."""
    errors, places = [], 0
    for interruption in every_place(KINDS[kind], stride=int(stride)):
        places += 1
        env = SubprocessEnv(CounterEnv)
        try:
            with interruption:
                env.initialize()
            if places % 2:
                with time_limit(20):
                    env.initialize()
                ledger = Ledger()
                ledger.reset(env.reset(seed=1), 1)
                ledger.step(env.step(1), [1])
            with time_limit(20):
                env.close()
        except BaseException as error:
            errors.append(f"{interruption.where}: {type(error).__name__}: {error}")
            if len(errors) > 8:
                break
            env.close()
    report(places, errors)


# --- several envs, at every place -----------------------------------------------------------------


class InProcess(CounterEnv):
    """One of the envs that a MultiEnv steps in its threads."""


def several(mode: str, workers: str, members: str) -> tuple[MultiEnv, list[Any]]:
    envs: list[gymnasium.Env[Any, Any]] = list(create_subprocess_envs([partial(CounterEnv, horizon=3)] * 2))
    if members == "mixed":
        envs.append(InProcess(horizon=3))
    else:
        envs.append(create_subprocess_envs([partial(CounterEnv, horizon=3)])[0])
    return MultiEnv(envs, autoreset_mode=mode, max_workers=int(workers) or None), envs


class Ledgers:
    """One ledger for each env of a MultiEnv, which know about autoreset."""

    def __init__(self, mode: str, count: int) -> None:
        self.mode = mode
        self.each = [Ledger(horizon=3) for _ in range(count)]

    def reset(self, results: Any, seed: int) -> None:
        for index, ledger in enumerate(self.each):
            ledger.reset((results[0][index], results[1][index]), seed + index)

    def step(self, lists: Any, given: list[list[int]]) -> None:
        """``given``: the actions of the calls that this outcome may be of, one list each."""
        for index, ledger in enumerate(self.each):
            transition = tuple(part[index] for part in lists)
            allowed = [actions[index] for actions in given]
            with noting(f"env {index}"):
                self._one(ledger, transition, allowed)

    def _one(self, ledger: Ledger, transition: Any, allowed: list[int]) -> None:
        if self.mode == "NEXT_STEP" and ledger.ended:
            assert transition[1:4] == (0.0, False, False)
            ledger.reset((transition[0], {}), None)
        elif self.mode == "SAME_STEP" and (transition[2] or transition[3]):
            ledger.step((transition[4]["final_obs"], *transition[1:4]), allowed)
            ledger.reset((transition[0], {}), None)
        else:
            ledger.step(transition, allowed)


@contextlib.contextmanager
def noting(words: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{words}: {error}") from error


def every_place_of_multi_step(kind: str, mode: str, workers: str, members: str, kill: str = "") -> None:
    """MultiEnv.step() interrupted; the next step() completes it for every env, or takes its own actions for every env."""
    multi, envs = several(mode, workers, members)
    ledgers, errors, places = Ledgers(mode, 3), [], 0
    ledgers.reset(multi.reset(seed=0), 0)
    for interruption in every_place(KINDS[kind]):
        places += 1
        seed = 10 * places
        lists = None
        try:
            if mode == "DISABLED" and ledgers.each[0].ended:
                ledgers.reset(multi.reset(seed=seed), seed)
            if kill:
                os.kill(envs[0].statistics().pid or 0, signal.SIGKILL)
                time.sleep(0.001)
            with interruption:
                lists = multi.step([1, 1, 1])
            if lists is None:
                with time_limit(10):
                    lists = multi.step([2, 2, 2])
                ledgers.step(lists, [[1, 1, 1], [2, 2, 2]])
            else:
                ledgers.step(lists, [[1, 1, 1]])
            if not (mode == "DISABLED" and ledgers.each[0].ended):
                ledgers.step(multi.step([3, 3, 3]), [[3, 3, 3]])
        except BaseException as error:
            errors.append(f"{interruption.where}: {type(error).__name__}: {error}")
            if len(errors) > 8:
                break
            multi.close()
            multi, envs = several(mode, workers, members)
            ledgers = Ledgers(mode, 3)
            ledgers.reset(multi.reset(seed=0), 0)
    if not kill:
        no_loss(*envs[:2])
    multi.close()
    report(places, errors)


def every_place_of_multi_reset(kind: str, workers: str, members: str) -> None:
    """MultiEnv.reset() interrupted; then reset(), step() and close() work."""
    multi, envs = several("NEXT_STEP", workers, members)
    errors, places = [], 0
    for interruption in every_place(KINDS[kind]):
        places += 1
        ledgers = Ledgers("NEXT_STEP", 3)
        seed = 10 * places
        try:
            with interruption:
                multi.reset(seed=seed)
            with time_limit(10):
                ledgers.reset(multi.reset(seed=seed + 5), seed + 5)
                for action in range(4):
                    ledgers.step(multi.step([action] * 3), [[action] * 3])
        except BaseException as error:
            errors.append(f"{interruption.where}: {type(error).__name__}: {error}")
            if len(errors) > 8:
                break
            multi.close()
            multi, envs = several("NEXT_STEP", workers, members)
    no_loss(*envs[:2])
    multi.close()
    report(places, errors)


# --- real signals, at random ----------------------------------------------------------------------


def handler(*_: object) -> None:
    raise Interrupted


def error_handler(*_: object) -> None:
    raise HandlerError


class Alarms:
    """A source of interruptions: SIGALRM from the kernel, some microseconds from now."""

    kinds: tuple[type[BaseException], ...] = (Interrupted, HandlerError)

    def __init__(self, raises: str) -> None:
        signal.signal(signal.SIGALRM, error_handler if raises == "error" else handler)

    def arm(self, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def disarm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def stop(self) -> None:
        self.disarm()


class FromThread:
    """A source of interruptions: a thread that strikes some microseconds after it was armed."""

    kinds: tuple[type[BaseException], ...] = (KeyboardInterrupt,)

    def __init__(self, strike: Callable[[], object]) -> None:
        self._strike = strike
        self._armed, self._done = threading.Event(), threading.Event()
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
            self._done.set()

    def arm(self, seconds: float) -> None:
        self._seconds = seconds
        self._done.clear()
        self._armed.set()

    def disarm(self) -> None:
        """Wait until it has struck, so that it cannot do so later."""
        while not self._done.is_set():
            self._done.wait(1.0)

    def stop(self) -> None:
        self._stopping = True
        self._armed.set()
        self._thread.join()


def source(name: str) -> Any:
    if name in ("alarm", "alarm_error"):
        return Alarms("error" if name == "alarm_error" else "base")
    return FromThread({"interrupt_main": _thread.interrupt_main, "raise_signal": _sigint_to_main}[name])


def _sigint_to_main() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def attempt(signals: Any, seconds: float, call: Callable[[], Any]) -> Any:
    """What the call returns, or None when it was interrupted. None of it is multienv's, so it must not fail itself."""
    result = None
    struck = False
    try:
        signals.arm(seconds)
        result = call()
    except signals.kinds:
        struck = True
    while True:  # a signal that comes late, outside of the call
        try:
            if not (struck and isinstance(signals, FromThread)):
                signals.disarm()
            else:
                signals._done.wait(1.0)
            return result
        except signals.kinds:
            continue


def random_steps(method: str, name: str, rounds: str, seed: str) -> None:
    """step() and reset() of one env, interrupted at random microseconds."""
    dice = random.Random(int(seed))
    env, ledger = SubprocessEnv(partial(CounterEnv, horizon=20), context=method).initialize(), Ledger(horizon=20)
    signals, interrupted, number, given = source(name), 0, 0, []
    for _ in range(int(rounds)):
        seconds = dice.uniform(1e-6, 3e-4)
        if ledger.ended:
            number += 1
            result = attempt(signals, seconds, lambda: env.reset(seed=number))
            if result is not None:
                ledger.reset(result, number)
            interrupted += result is None
            continue
        action = dice.randrange(4)
        given.append(action)
        transition = attempt(signals, seconds, lambda: env.step(action))
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
            result = attempt(signals, seconds, lambda: multi.reset(seed=number))
            if result is not None:
                ledgers.reset(result, number)
            interrupted += result is None
            continue
        actions = [dice.randrange(4) for _ in envs]
        given.append(actions)
        lists = attempt(signals, seconds, lambda: multi.step(actions))
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
    signals, interrupted = Alarms("base"), 0
    for number in range(int(rounds)):
        if number % 2:
            envs = attempt(signals, dice.uniform(1e-6, 0.1), lambda: create_subprocess_envs([CounterEnv] * 2, context=method))
            interrupted += envs is None
            for env in envs or ():
                env.close()
        else:
            env = SubprocessEnv(CounterEnv, context=method)
            interrupted += attempt(signals, dice.uniform(1e-6, 0.05), env.initialize) is None
            env.initialize()
            ledger = Ledger()
            ledger.reset(env.reset(seed=1), 1)
            ledger.step(env.step(1), [1])
            env.close()
    say("interrupted", interrupted)
    assert interrupted > 2


def press_ctrl_c(method: str, kind: str) -> None:
    """Steps for ever; each KeyboardInterrupt is noted and the run goes on. Ends when told by SIGUSR1, with a tally."""
    ending: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: ending.append(1))
    envs = create_subprocess_envs([partial(CounterEnv, horizon=3)] * 3, context=method)
    multi = MultiEnv(envs) if kind == "multi" else None
    ledgers, ledger = Ledgers("NEXT_STEP", 3), Ledger(horizon=3)
    if multi is not None:
        ledgers.reset(multi.reset(seed=0), 0)
    number, presses, given, started = 0, 0, [], False
    while not ending:
        result = None
        try:
            if not started:
                started = True
                say("ready", *(env.statistics().pid for env in envs))
            if multi is not None:
                given.append([number % 4] * 3)
                result = multi.step([number % 4] * 3)
            elif ledger.ended:
                result = envs[0].reset(seed=number)
            else:
                given.append(number % 4)
                result = envs[0].step(number % 4)
        except KeyboardInterrupt:
            presses += 1
        while True:
            try:
                if result is not None:
                    pending, result = result, None
                    if multi is not None:
                        quiet(ledgers.step, pending, given)
                    elif len(pending) == 2:
                        quiet(ledger.reset, pending, number)
                    else:
                        quiet(ledger.step, pending, given)
                    given = []
                break
            except KeyboardInterrupt:
                presses += 1
        number += 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    no_loss(*envs)
    for env in envs:
        env.close()
    say("presses", presses)
    say("steps", number)


def quiet(check: Callable[..., Any], *arguments: Any) -> None:
    """Run a check of ours without being interrupted in it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        check(*arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
