"""Measure how fast a batch of an env steps in several layouts, and in other libraries: in turns, against the limit."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.utils import batch_space

from multienv import RayOptions, RayVectorEnv, SerialVectorEnv, SubprocessVectorEnv, create_subprocess_envs
from multienv.cli.env_functions import EnvFn
from multienv.cli.options import first_line
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
# Steps of a fragment.
_FRAGMENT = 64
# Where less of a round than this share goes into env steps, the call over the network is what limits.
_BUSY = 0.5


@dataclass
class Contender:
    """Steps a batch in one way.

    Attributes:
        package: Whose it is.
        name: What to write in a program.
        make: Builds the batch.
        options: Of SubprocessVectorEnv, as Python; ``None``: it is something else.
        is_local: It steps in this very process.
        batch: What was built; ``None``: nothing yet.
        step_for: Steps it for some seconds and returns the env steps a second; ``None``: nothing was built yet.
        rates: Env steps a second of each turn.
    """

    package: str
    name: str
    make: Callable[[], Any]
    options: str | None = None
    is_local: bool = False
    batch: Any = None
    step_for: Any = None
    rates: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Return the median over the turns."""
        return statistics.median(self.rates)

    def ratio(self, other: Contender) -> float:
        """Return how many times as fast as the other it is: the median over the turns."""
        return statistics.median(one / its for one, its in zip(self.rates, other.rates, strict=True))


@dataclass
class Rounds:
    """Tells how a batch on Ray steps: a round is one call to each host.

    Attributes:
        steps: What was measured, step by step.
        fragments: The same, many steps a call.
        limit: As of the whole measurement.
        num_envs: How many envs step in a round.
        per_process: How many of them share a process, at most.
    """

    steps: Contender
    fragments: Contender
    limit: Contender
    num_envs: int
    per_process: int

    @property
    def rate(self) -> float:
        """Return the rounds a second."""
        return self.steps.rate / self.num_envs

    @property
    def share_of_steps(self) -> float:
        """Return which share of a round a process spends in env steps, if its cores are as fast as those here."""
        return min(1.0, self.steps.ratio(self.limit) * len(cores()) * self.per_process / self.num_envs)

    @property
    def network_limits(self) -> bool:
        """Tell whether most of a round goes into the call over the network."""
        return self.share_of_steps < _BUSY


@dataclass
class Bench:
    """Tells what was measured.

    Attributes:
        limit: All cores together, each stepping one env all the time.
        contenders: Those that could be built and stepped.
        left_out: Why others could not, by name.
        kills: Seconds from the SIGKILL of a worker to the return of the next step, in the recommended layout.
        exact: How many of the kills were recovered from exactly.
        rounds: On Ray, if that was measured.
    """

    limit: Contender
    contenders: list[Contender] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    kills: list[float] = field(default_factory=list)
    exact: int = 0
    rounds: Rounds | None = None

    @property
    def recommended(self) -> Contender:
        """Return the fastest layout of SubprocessVectorEnv, or ``"auto"`` where it is as good."""
        layouts = [one for one in self.contenders if one.options is not None]
        best, auto = max(layouts, key=lambda one: one.rate), layouts[0]
        return best if best.ratio(auto) > WORTH_IT else auto


def measure(
    env_fn: EnvFn,
    num_envs: int,
    against: list[str],
    *,
    seconds: float,
    repeats: int,
    ray: RayOptions | None = None,
    told: Callable[[str], object] = lambda text: None,
) -> Bench:
    """Build all contenders, and have them step in turns, in another order each time.

    Args:
        env_fn: Builds the env.
        num_envs: How many of it.
        against: Some of ``PEERS``.
        seconds: Of each turn.
        repeats: Turns of each contender.
        ray: Measure RayVectorEnv, too, on this cluster.
        told: Called with what is being done.

    Raises:
        MultienvError: The env failed in a process of its own, or no layout of SubprocessVectorEnv could be measured.
        Exception: An env failed in a turn of its own accord.
    """
    dice = random.Random(0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # what a library says of its failure is in left_out
        # First: an env that ends its process shows it there, and not in this process.
        bench = Bench(_limit(env_fn, stack))
        bench.limit.step_for(_WARM_UP)
        on_ray = [] if ray is None else [_on_ray(env_fn, num_envs, ray)]
        for one in (*_contenders(env_fn, num_envs, against), *on_ray):
            told(f"building {one.name} ...")
            try:
                one.batch = one.make()
                stack.callback(_close, one.batch)
                one.step_for = _stepper(one.batch, num_envs)
                one.step_for(_WARM_UP)
            except Exception as error:  # of the env, of other libraries
                bench.left_out[one.name] = first_line(error)
            else:
                bench.contenders.append(one)
        if not any(one.options is not None for one in bench.contenders):
            raise UsageError("; ".join(f"{name}: {why}" for name, why in bench.left_out.items()))
        if on_ray and on_ray[0] in bench.contenders:
            bench.rounds = _rounds(bench, on_ray[0], num_envs)
        turns = [bench.limit, *bench.contenders]
        for number in range(repeats):
            told(f"turn {number + 1} of {repeats} ...")
            dice.shuffle(turns)
            for one in turns:
                one.rates.append(one.step_for(seconds))
        told("killing workers ...")
        _kill(bench)
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


def _on_ray(env_fn: EnvFn, num_envs: int, options: RayOptions) -> Contender:
    where = "" if options.address is None else f", ray={options!r}"
    make = partial(RayVectorEnv, [env_fn] * num_envs, ray=options, reports="")
    return Contender("multienv", f"RayVectorEnv(env_fns{where})", make)


def _rounds(bench: Bench, steps: Contender, num_envs: int) -> Rounds:
    """Have the batch on Ray step in fragments, too."""
    batch = steps.batch
    policy = RandomPolicy(batch.single_action_space)
    fragments = Contender("multienv", f"{steps.name}.rollout(policy, {_FRAGMENT})", steps.make, batch=batch)
    fragments.step_for = partial(_take, lambda: batch.rollout(policy, _FRAGMENT), num_envs * _FRAGMENT)
    fragments.step_for(_WARM_UP)
    bench.contenders.append(fragments)
    return Rounds(steps, fragments, bench.limit, num_envs, max(batch.envs_per_worker))


class RandomPolicy:
    """Chooses random actions, beside the envs.

    Args:
        space: Of the actions of one env.
    """

    def __init__(self, space: Any) -> None:
        self._space = space
        self._spaces: dict[int, Any] = {}  # by how many envs share a process

    def __call__(self, observations: Any) -> Any:
        """Return the batch of actions for a batch of observations."""
        leaf = observations
        while isinstance(leaf, Mapping | tuple):  # of a Dict or Tuple space
            leaf = next(iter(leaf.values() if isinstance(leaf, Mapping) else leaf))
        if len(leaf) not in self._spaces:
            self._spaces[len(leaf)] = batch_space(self._space, len(leaf))
        return self._spaces[len(leaf)].sample()


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

    turn = itertools.cycle(actions)
    return partial(_take, lambda: batch.step(next(turn)), num_envs)


def _take(step: Callable[[], object], env_steps: int, seconds: float) -> float:
    """Step for some seconds, so many env steps at once; return the env steps a second."""
    began, calls = time.perf_counter(), 0
    while not calls or (spent := time.perf_counter() - began) < seconds:
        step()
        calls += 1
    return env_steps * calls / spent


def _limit(env_fn: EnvFn, stack: contextlib.ExitStack) -> Contender:
    """Build an env for each core, until the stack is closed; it steps all of them at the same time."""
    steppers = [partial(Stepper, env_fn, core) for core in cores()]
    deadlines = Deadlines(call=60.0)
    make = partial(create_subprocess_envs, steppers, restart=RAISE, deadlines=deadlines, reports="")
    workers = make()
    stack.callback(close_at_once, [worker.close for worker in workers])

    def step_for(seconds: float) -> float:
        for worker in workers:
            worker.call_async("step_for", seconds)
        return float(sum(worker.call_wait() for worker in workers))

    name = "each core steps an env and nothing else"
    return Contender("limit", name, make, batch=workers, step_for=step_for)


def _kill(bench: Bench) -> None:
    """Kill a worker of the recommended batch a few times, and note how long the step takes that meets it."""
    batch, dice = bench.recommended.batch, random.Random(0)
    for _ in range(_KILLS):
        bench.recommended.step_for(_WARM_UP)
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
