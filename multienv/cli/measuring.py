"""Measure how fast a batch of an env steps in several layouts, and in gymnasium's own, in turn, next to the limit."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from multienv import SerialVectorEnv, SubprocessVectorEnv, create_subprocess_envs
from multienv._engine.building.building import EnvFn
from multienv._engine.cores import busy_cores, cores
from multienv._engine.threads import close_at_once
from multienv.cli.options import first_line
from multienv.cli.walking import RAISE
from multienv.config import Deadlines
from multienv.errors import UsageError
from multienv.vector.batching import deal

# Seconds that each contender steps before the first turn.
_WARM_UP = 0.1
# A layout other than "auto" is recommended only if it is faster than "auto" by this factor.
WORTH_IT = 1.05


@dataclass
class Contender:
    """Steps a batch in one way.

    Attributes:
        package: The package of the class.
        name: The code for a program.
        make: Builds the batch.
        options: Options of SubprocessVectorEnv, as Python; ``None``: another class.
        is_local: The batch steps in this process.
        step_for: Steps the batch for some seconds and returns env steps per second; ``None``: not built yet.
        rates: Env steps per second of each turn.
    """

    package: str
    name: str
    make: Callable[[], Any]
    options: str | None = None
    is_local: bool = False
    step_for: Any = None
    rates: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Return the median over the turns."""
        return statistics.median(self.rates)

    def ratio(self, other: Contender) -> float:
        """Return the ratio of its speed to the other's speed: the median over the turns."""
        return statistics.median(one / its for one, its in zip(self.rates, other.rates, strict=True))


@dataclass
class Bench:
    """Holds the measurements.

    Attributes:
        limit: All cores together; each steps one env all the time.
        contenders: The contenders that could be built and stepped.
        left_out: Name of each other contender, and the reason.
    """

    limit: Contender
    contenders: list[Contender] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def recommended(self) -> Contender:
        """Return the fastest layout of SubprocessVectorEnv, or ``"auto"`` if that is about as fast."""
        layouts = [one for one in self.contenders if one.options is not None]
        best, auto = max(layouts, key=lambda one: one.rate), layouts[0]
        return best if best.ratio(auto) > WORTH_IT else auto


def measure(
    env_fn: EnvFn,
    num_envs: int,
    *,
    seconds: float,
    repeats: int,
    say: Callable[[str], object] = lambda text: None,
) -> Bench:
    """Build all contenders, and let them step in turn, in another order each time.

    Args:
        env_fn: Builds the env.
        num_envs: Number of envs.
        seconds: Length of each turn.
        repeats: Number of turns of each contender.
        say: Called with a text that says what is being done.

    Raises:
        MultienvError: The env failed in its own process, or no layout of SubprocessVectorEnv could be measured.
        Exception: An env failed by itself in a turn.
    """
    dice = random.Random(0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # left_out has the reason if a library fails
        # Build the limit first: if the env ends its process, that happens there, not in this process.
        bench = Bench(_limit(env_fn, stack))
        bench.limit.step_for(_WARM_UP)
        for one in _contenders(env_fn, num_envs):
            say(f"building {one.name} ...")
            try:
                batch = one.make()
                stack.callback(_close, batch)
                one.step_for = _stepper(batch, num_envs)
                one.step_for(_WARM_UP)
            except Exception as error:  # from the env or from another library
                bench.left_out[one.name] = first_line(error)
            else:
                bench.contenders.append(one)
        if not any(one.options is not None for one in bench.contenders):
            raise UsageError("; ".join(f"{name}: {why}" for name, why in bench.left_out.items()))
        turns = [bench.limit, *bench.contenders]
        for number in range(repeats):
            say(f"turn {number + 1} of {repeats} ...")
            dice.shuffle(turns)
            for one in turns:
                one.rates.append(one.step_for(seconds))
    return bench


def _contenders(env_fn: EnvFn, num_envs: int) -> Iterator[Contender]:
    """Yield layouts with different numbers of workers, ``"auto"`` first, and then gymnasium's vector envs."""
    env_fns, seen = [env_fn] * num_envs, set()
    for each in ("auto", 1, max(1, -(-num_envs // (2 * busy_cores()))), num_envs):
        sizes = tuple(deal(num_envs, each, busy_cores()))
        if sizes not in seen:
            seen.add(sizes)
            options = "" if each == "auto" else f"envs_per_worker={each}"
            make = partial(SubprocessVectorEnv, env_fns, envs_per_worker=each, reports="")
            yield Contender("multienv", f"SubprocessVectorEnv(env_fns{options and ', '}{options})", make, options)
    yield Contender("multienv", "SerialVectorEnv(env_fns)", partial(SerialVectorEnv, env_fns), is_local=True)
    yield Contender("gymnasium", "AsyncVectorEnv(env_fns)", partial(AsyncVectorEnv, env_fns, context="forkserver"))
    yield Contender("gymnasium", "SyncVectorEnv(env_fns)", partial(SyncVectorEnv, env_fns), is_local=True)


def _stepper(batch: Any, num_envs: int) -> Callable[[float], float]:
    """Reset the batch. Return a function that steps it for some seconds and returns env steps per second."""
    batch.reset()
    space = batch.action_space
    space.seed(0)
    turn = itertools.cycle([space.sample() for _ in range(64)])

    def step_for(seconds: float) -> float:
        began, calls = time.perf_counter(), 0
        while not calls or (spent := time.perf_counter() - began) < seconds:
            batch.step(next(turn))
            calls += 1
        return num_envs * calls / spent

    return step_for


class BoundEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Steps an env for a given time: the most that a core can do.

    Args:
        env_fn: Builds the env.
        core: The core to run on.
    """

    def __init__(self, env_fn: EnvFn, core: int) -> None:
        super().__init__(env_fn())
        self._core = core
        self.env.reset(seed=0)
        self.env.action_space.seed(0)
        self._actions = [self.env.action_space.sample() for _ in range(64)]

    def step_for(self, seconds: float) -> float:
        """Step for this time, and begin a new episode when one ends. Return steps per second."""
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {self._core})
        env, steps, began = self.env, 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds:
            _, _, terminated, truncated, _ = env.step(self._actions[steps % 64])
            if terminated or truncated:
                env.reset()
            steps += 1
        return steps / spent


def _limit(env_fn: EnvFn, stack: contextlib.ExitStack) -> Contender:
    """Build an env for each core. The contender steps all of them at the same time, until the stack is closed."""
    steppers = [partial(BoundEnv, env_fn, core) for core in cores()]
    make = partial(create_subprocess_envs, steppers, restart=RAISE, deadlines=Deadlines(call=60.0), reports="")
    workers = make()
    stack.callback(close_at_once, [worker.close for worker in workers])

    def step_for(seconds: float) -> float:
        for worker in workers:
            worker.call_async("step_for", seconds)
        return float(sum(worker.call_wait() for worker in workers))

    return Contender("limit", "each core steps an env and nothing else", make, step_for=step_for)


def _close(batch: Any) -> None:
    with contextlib.suppress(Exception):  # batches of other libraries, after a failure
        batch.close(**({"terminate": True} if isinstance(batch, AsyncVectorEnv) else {}))
