"""Measure how fast a batch of an env steps in several layouts, and in other libraries: in turns, against the limit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from multienv import SerialVectorEnv, SubprocessVectorEnv, create_subprocess_envs
from multienv.cli.env_functions import EnvFn
from multienv.config import Deadlines
from multienv.cores import busy_cores, cores
from multienv.errors import UsageError
from multienv.testing.killer import worker_pids
from multienv.testing.probe import RAISE, Stepper
from multienv.threads import close_at_once
from multienv.vector.batching import deal

PEERS = ("gymnasium", "sb3")
# Of each contender before the first turn, seconds.
_WARM_UP = 0.1
# Another layout than "auto" must be faster by so much to be recommended.
WORTH_IT = 1.05
_KILLS = 5


@dataclass
class Contender:
    """One way to step a batch.

    Attributes:
        package: Whose it is.
        name: What to write in a program.
        make: Builds the batch.
        options: Of SubprocessVectorEnv, as Python; ``None``: it is something else.
        is_local: It steps in this very process.
        rates: Env steps a second of each turn.
    """

    package: str
    name: str
    make: Callable[[], Any]
    options: str | None = None
    is_local: bool = False
    rates: list[float] = field(default_factory=list)


@dataclass
class Bench:
    """Tells what was measured.

    Attributes:
        contenders: Those that could be measured.
        left_out: Why others could not, by name.
        limit: Env steps a second of all cores together, each stepping one env all the time, for each turn.
        kills: Seconds from the SIGKILL of a worker to the return of the next step, in the recommended layout.
        exact: How many of the kills were recovered from exactly.
    """

    contenders: list[Contender] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    limit: list[float] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    exact: int = 0

    @property
    def recommended(self) -> Contender:
        """Return the fastest layout of SubprocessVectorEnv, or ``"auto"`` where it is as good."""
        auto, *others = (one for one in self.contenders if one.options is not None)
        best = max([auto, *others], key=lambda one: statistics.median(one.rates))
        return best if self.ratio(best, auto) > WORTH_IT else auto

    def ratio(self, one: Contender, other: Contender) -> float:
        """Return how many times as fast one is: the median over the turns."""
        return _ratio(one.rates, other.rates)

    def share(self, one: Contender) -> float:
        """Return the share of the limit: the median over the turns."""
        return _ratio(one.rates, self.limit)


def measure(
    env_fn: EnvFn,
    num_envs: int,
    against: list[str],
    *,
    seconds: float,
    repeats: int,
    told: Callable[[str], object] = lambda text: None,
) -> Bench:
    """Build all contenders, and have them step in turns, in another order each time.

    Args:
        env_fn: Builds the env.
        num_envs: How many of it.
        against: Some of ``PEERS``.
        seconds: Of each turn.
        repeats: Turns of each contender.
        told: Called with what is being done.

    Raises:
        MultienvError: The env failed in a process of its own, or no layout of SubprocessVectorEnv could be measured.
    """
    bench, dice = Bench(), random.Random(0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # what a library says of its failure is in left_out
        # First: an env that ends its process shows it there, and not in this process.
        limit = stack.enter_context(_limit(env_fn))
        limit(_WARM_UP)
        steppers: dict[str, Callable[[float], float]] = {}
        batches: dict[str, Any] = {}
        for one in _contenders(env_fn, num_envs, against):
            told(f"building {one.name} ...")
            try:
                batches[one.name] = batch = one.make()
                stack.callback(_close, batch)
                steppers[one.name] = _stepper(batch, num_envs)
                steppers[one.name](_WARM_UP)
            except Exception as error:  # of the env, of other libraries
                bench.left_out[one.name] = _said(error)
            else:
                bench.contenders.append(one)
        turns: list[Contender | None] = [None, *bench.contenders]
        for number in range(repeats):
            told(f"turn {number + 1} of {repeats} ...")
            dice.shuffle(turns)
            for turn in turns:
                if turn is None:
                    bench.limit.append(limit(seconds))
                elif turn.name not in bench.left_out:
                    try:
                        turn.rates.append(steppers[turn.name](seconds))
                    except Exception as error:  # as above
                        bench.left_out[turn.name] = _said(error)
        bench.contenders = [one for one in bench.contenders if one.name not in bench.left_out]
        if not any(one.options is not None for one in bench.contenders):
            raise UsageError("; ".join(f"{name}: {why}" for name, why in bench.left_out.items()))
        told("killing workers ...")
        _kill(bench, batches[bench.recommended.name], steppers[bench.recommended.name])
    return bench


def _contenders(env_fn: EnvFn, num_envs: int, against: list[str]) -> Iterator[Contender]:
    """Yield layouts with different numbers of workers, ``"auto"`` first, and what they are measured against."""
    env_fns, seen = [env_fn] * num_envs, set()
    for each in ("auto", 1, max(1, -(-num_envs // (2 * busy_cores()))), num_envs):
        sizes = tuple(deal(num_envs, each, busy_cores()))
        if sizes not in seen:
            seen.add(sizes)
            options = "" if each == "auto" else f"envs_per_worker={each}"
            make = partial(SubprocessVectorEnv, env_fns, envs_per_worker=each, reports="")
            yield Contender("multienv", f"SubprocessVectorEnv(env_fns{options and ', '}{options})", make, options)
    yield Contender("multienv", "SerialVectorEnv(env_fns)", partial(SerialVectorEnv, env_fns), is_local=True)
    if "gymnasium" in against:
        yield Contender("gymnasium", "AsyncVectorEnv(env_fns)", partial(AsyncVectorEnv, env_fns, context="forkserver"))
        yield Contender("gymnasium", "SyncVectorEnv(env_fns)", partial(SyncVectorEnv, env_fns), is_local=True)
    if "sb3" in against:
        yield from _of_stable_baselines3(env_fns)


def _of_stable_baselines3(env_fns: list[EnvFn]) -> Iterator[Contender]:
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    from multienv.adapters.stable_baselines3 import SubprocessVecEnv

    yield Contender("multienv", "SubprocessVecEnv(env_fns)", partial(SubprocessVecEnv, env_fns, reports=""))
    yield Contender("SB3", "SubprocVecEnv(env_fns)", partial(SubprocVecEnv, env_fns, start_method="forkserver"))
    yield Contender("SB3", "DummyVecEnv(env_fns)", partial(DummyVecEnv, env_fns), is_local=True)


def _stepper(batch: Any, num_envs: int) -> Callable[[float], float]:
    """Reset the batch, and return what steps it for some seconds and returns the env steps a second."""
    batch.reset()
    space = batch.action_space
    space.seed(0)
    if hasattr(batch, "single_action_space"):  # as gymnasium has it
        actions = [space.sample() for _ in range(64)]
    else:
        actions = [np.array([space.sample() for _ in range(num_envs)]) for _ in range(64)]

    def step_for(seconds: float) -> float:
        began, steps = time.perf_counter(), 0
        while not steps or (spent := time.perf_counter() - began) < seconds:
            batch.step(actions[steps % 64])
            steps += 1
        return num_envs * steps / spent

    return step_for


@contextlib.contextmanager
def _limit(env_fn: EnvFn) -> Iterator[Callable[[float], float]]:
    """Yield what has each core step an env for some seconds, and returns the steps a second of all together."""
    with contextlib.ExitStack() as stack:
        steppers = [partial(Stepper, env_fn, core) for core in cores()]
        workers = create_subprocess_envs(steppers, restart=RAISE, deadlines=Deadlines(call=60.0), reports="")
        stack.callback(close_at_once, [worker.close for worker in workers])

        def step_for(seconds: float) -> float:
            for worker in workers:
                worker.call_async("step_for", seconds)
            return float(sum(worker.call_wait() for worker in workers))

        yield step_for


def _kill(bench: Bench, batch: SubprocessVectorEnv, step_for: Callable[[float], float]) -> None:
    """Kill a worker of the batch a few times, and note how long the step takes that meets it."""
    dice = random.Random(0)
    for _ in range(_KILLS):
        step_for(_WARM_UP)
        actions = batch.action_space.sample()
        began = time.perf_counter()
        os.kill(dice.choice(worker_pids(batch)), signal.SIGKILL)
        batch.step(actions)
        bench.kills.append(time.perf_counter() - began)
    known = {one.pid: one for one in batch.statistics() if one is not None}.values()
    bench.exact = sum(one.exact_recoveries for one in known)


def _close(batch: Any) -> None:
    with contextlib.suppress(Exception):  # other libraries' batches, after a failure
        batch.close(**({"terminate": True} if isinstance(batch, AsyncVectorEnv) else {}))


def _ratio(rates: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(rates, others, strict=False))


def _said(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
