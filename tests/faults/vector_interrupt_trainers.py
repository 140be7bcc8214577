"""As interrupt_trainers.py, for several envs in each of several processes: test_vector_interrupts.py runs these."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from interrupt_trainers import KINDS, at, explore
from interruption import Interruption, Ledger, every_place

from kit import CounterEnv, SlowEnv
from multienv import SubprocessVectorEnv
from multienv.errors import EnvsFailedError

NUM_ENVS = 4
HORIZON = 3


class Grouped:
    """Four envs in two processes, a ledger for each."""

    def __init__(
        self,
        mode: str = "NEXT_STEP",
        at_once: int | None = None,
        each: int | str = 2,
        step_seconds: float = 0.0,
        env_fn: Any = None,
    ) -> None:
        each = NUM_ENVS if at_once else each  # one process, which steps its envs one after the other
        fns = [env_fn or partial(SlowEnv, step_seconds=step_seconds, horizon=HORIZON)] * NUM_ENVS
        self.mode = mode
        self.envs = SubprocessVectorEnv(fns, envs_per_worker=each, autoreset_mode=mode)
        self.ledgers = [Ledger(horizon=HORIZON) for _ in fns]

    @property
    def hosted(self) -> list[Any]:
        return self.envs._workers

    def begin(self, seed: int, *, anew: bool = False) -> None:
        """See to it that episodes are running, if that is ours to do."""
        if anew or (self.mode == "DISABLED" and self.ledgers[0].ended) or not self.ledgers[0].transitions:
            self.reset(self.envs.reset(seed=seed)[0], seed)

    def actions(self, action: int) -> np.ndarray[Any, Any]:
        return np.full(NUM_ENVS, action)

    def go_on(self, action: int = 3) -> None:
        """All is as if nothing had happened."""
        if not (self.mode == "DISABLED" and self.ledgers[0].ended):
            self.step(self.envs.step(self.actions(action)), [action])

    def reset(self, observations: Any, seed: int) -> None:
        for index, ledger in enumerate(self.ledgers):
            ledger.reset((observations[index], {}), seed + index)

    def step(self, batch: Any, given: Sequence[int]) -> set[int | None]:
        """``given``: the actions of the calls of which this may be the outcome."""
        taken = set()
        for index, ledger in enumerate(self.ledgers):
            with at(f"env {index}"):
                taken.add(self._one(ledger, index, batch, given))
        assert len(taken - {None}) <= 1, f"some envs took the action of one call, some that of another: {taken}"
        return taken

    def _one(self, ledger: Ledger, index: int, batch: Any, allowed: Sequence[int]) -> int | None:
        transition = tuple(part[index] if not place else part[index].item() for place, part in enumerate(batch[:4]))
        if self.mode == "NEXT_STEP" and ledger.ended:
            assert transition[1:] == (0.0, False, False), transition
            ledger.reset((transition[0], {}), None)
            return None
        if self.mode == "SAME_STEP" and (transition[2] or transition[3]):
            action = ledger.step((batch[4]["final_obs"][index], *transition[1:]), allowed)
            ledger.reset((transition[0], {}), None)
            return action
        return ledger.step(transition, allowed)

    def kill(self) -> None:
        os.kill(self.hosted[0].statistics().pid or 0, signal.SIGKILL)
        time.sleep(0.001)

    def close(self) -> None:
        self.envs.close()


def every_place_of_step(kind: str, mode: str, at_once: str = "0", stride: str = "0") -> None:
    """step() interrupted: the next one completes it for every env, and says so; with a stride a worker is dead."""

    def trial(grouped: Grouped, interruption: Interruption, number: int) -> None:
        grouped.begin(10 * number)
        if int(stride):
            grouped.kill()
        batch = None
        with interruption:
            batch = grouped.envs.step(grouped.actions(1))
        if batch is None:
            batch = grouped.envs.step(grouped.actions(2))
            taken = grouped.step(batch, [1, 2])
            assert None in taken or (1 in taken) == ("multienv" in batch[4]), f"infos say {batch[4]}, {taken} was taken"
        else:
            grouped.step(batch, [1])
        grouped.go_on()

    explore(lambda: Grouped(mode, int(at_once) or None), kind, trial, kills=int(stride))


class RaisingEnv(CounterEnv):
    """Raises when it is given the action 0."""

    def step(self, action: Any) -> Any:
        if action == 0:
            raise ValueError("nought")
        return super().step(action)


def every_place_of_a_step_that_fails(kind: str, each: str) -> None:
    """step() interrupted, of which one env has made an error: the next one raises it, with what the others returned."""
    culprit = 1

    def fail(grouped: Grouped, envs: Any, actions: Any) -> Any:
        try:
            return envs.step(actions)
        except EnvsFailedError as error:
            failed = error
        assert list(failed.failures) == [culprit], failed.failures
        for index, ledger in enumerate(grouped.ledgers):
            if index != culprit:
                observation, reward, *flags = failed.results[index]
                ledger.step((observation, float(reward), *flags), [1])
        grouped.ledgers[culprit].ended = True
        return failed

    def trial(grouped: Grouped, interruption: Interruption, number: int) -> None:
        grouped.begin(10 * number, anew=True)
        grouped.go_on()
        actions = grouped.actions(1)
        actions[culprit] = 0
        outcome = None
        with interruption:
            outcome = fail(grouped, grouped.envs, actions)
        if outcome is None:
            outcome = fail(grouped, grouped.envs, grouped.actions(2))
        if not isinstance(outcome, EnvsFailedError):  # the first has not been sent
            grouped.step(outcome, [2])
        grouped.go_on()

    explore(lambda: Grouped(each=int(each), env_fn=partial(RaisingEnv, horizon=HORIZON)), kind, trial)


def every_two_places_of_step(kind: str, stride: str) -> None:
    """The step that completes an interrupted one is interrupted itself."""

    def trial(grouped: Grouped, interruption: Interruption, number: int) -> None:
        first = interruption
        for second in every_place(KINDS[kind], int(stride)):
            grouped.begin(number)
            batch = None
            with first:
                batch = grouped.envs.step(grouped.actions(0))
            if batch is None:
                with second:
                    batch = grouped.envs.step(grouped.actions(1))
            with at(f"and then at {second.where}"):
                grouped.step(batch or grouped.envs.step(grouped.actions(2)), [0, 1, 2])
                grouped.go_on()
            first = Interruption(interruption.place, KINDS[kind])

    explore(Grouped, kind, trial)


def every_place_of_step_wait(kind: str, then: str, at_once: str = "0") -> None:
    """The receiving half is interrupted; called again it collects the answer, and step() does or says what to do."""

    def trial(grouped: Grouped, interruption: Interruption, number: int) -> None:
        grouped.begin(number)
        batch = None
        grouped.envs.step_async(grouped.actions(1))
        with interruption:
            batch = grouped.envs.step_wait()
        if batch is None and then == "step":
            with contextlib.suppress(ValueError):
                batch = grouped.envs.step(grouped.actions(2))
        grouped.step(batch or grouped.envs.step_wait(), [1, 2])
        grouped.go_on()

    explore(lambda: Grouped("NEXT_STEP", int(at_once) or None), kind, trial)


def every_place_of_step_async(kind: str) -> None:
    """The sending half is interrupted: either it is pending, or nothing has been sent."""

    def trial(grouped: Grouped, interruption: Interruption, number: int) -> None:
        grouped.begin(number)
        with interruption:
            grouped.envs.step_async(grouped.actions(1))
        with contextlib.suppress(ValueError):  # an earlier one is pending
            grouped.envs.step_async(grouped.actions(2))
        grouped.step(grouped.envs.step_wait(), [1, 2])
        grouped.go_on()

    explore(Grouped, kind, trial)


def every_place_of_reset(kind: str, then: str, mode: str, stride: str = "0") -> None:
    """reset() interrupted; afterwards reset(), step(), call() and close() work."""

    def trial(grouped: Grouped, interruption: Interruption, number: int) -> None:
        grouped.begin(10 * number, anew=True)
        grouped.go_on()
        if int(stride):
            grouped.kill()
        seed = 1000 + 10 * number
        with interruption:
            grouped.envs.reset(seed=seed)
        if then == "reset":
            grouped.begin(5000 + 10 * number, anew=True)
        elif then == "close":
            grouped.close()
            grouped.__init__(mode)  # type: ignore[misc]
            return
        else:
            if then == "call":
                assert len(set(grouped.envs.call("poke", 0.0))) == 1
            batch = grouped.envs.step(grouped.actions(2))
            if batch[0][0][0] == 1:  # the reset has taken place: this is the first step of the new episodes
                for index, ledger in enumerate(grouped.ledgers):
                    ledger.reset(CounterEnv(horizon=HORIZON).reset(seed=seed + index), seed + index)
            grouped.step(batch, [2])
        grouped.go_on()
        grouped.go_on()
        if then == "call":
            grouped.close()
            grouped.__init__(mode)  # type: ignore[misc]

    explore(lambda: Grouped(mode), kind, trial, kills=int(stride))


def every_place_of_call(kind: str, stride: str = "1") -> None:
    """call() interrupted: it has happened or it has not, once for each env, and a recovery knows which."""

    def trial(grouped: Grouped, interruption: Interruption, number: int) -> None:
        grouped.begin(number)
        before, done = grouped.envs.get_attr("pokes"), None
        with interruption:
            done = grouped.envs.call("poke", 1.0)
        pokes = grouped.envs.get_attr("pokes")
        assert len(set(pokes)) == 1, f"some were poked, some not: {pokes}"
        assert pokes[0] - before[0] in ([0, 1] if done is None else [1]), f"{before} pokes, then {pokes}"
        assert grouped.envs.get_attr("offset") == pokes
        if not number % 8:
            grouped.kill()
            assert grouped.envs.get_attr("pokes") == pokes, "the recovered envs were poked more or less often"

    explore(Grouped, kind, trial, kills=int(stride))
