"""``multienv bench``: measure how fast a batch of an env steps in several layouts, and recommend one.

They step in turn with gymnasium's own batches, next to the limit. The env may crash or hang by chance. A
SubprocessVectorEnv recovers. Every other batch has a process of its own, which the env may end: then it is shown as
dead.
"""

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
from functools import cached_property, partial
from typing import Annotated, Any

import gymnasium
import typer
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers import Autoreset
from rich.console import Console
from rich.table import Table

from multienv import SerialVectorEnv, SubprocessVectorEnv, create_subprocess_envs
from multienv._engine.building.building import EnvFn
from multienv._engine.cores import busy_cores, cores
from multienv._engine.reports.texts import exit_text
from multienv._engine.threads import close_at_once
from multienv.cli.checks import working_env
from multienv.cli.options import (
    EnvArgument,
    JsonOption,
    KwargsOption,
    NumEnvsOption,
    VerboseOption,
    at_work,
    plain_console,
    vector_env_code,
)
from multienv.cli.walking import RAISE, Walk
from multienv.config import Deadlines
from multienv.errors import EnvsFailedError, UsageError, WorkerHungError, WorkerLostError, first_line
from multienv.vector.batching import deal

# Seconds that each contender steps before the first turn.
_WARM_UP = 0.1
# A layout other than "auto" is recommended only if it is faster than "auto" by this factor.
_WORTH_IT = 1.05
# A step or a reset counts as hung after so many times the slowest that was seen, and not before so many seconds.
_TIMES_THE_SLOWEST, _LEAST_DEADLINE = 10.0, 2.0
# The limit of an env that crashes by chance: it is tried so often in a turn, each time for a quarter of the time.
_TRIES = 6


def bench(
    env: EnvArgument,
    num_envs: NumEnvsOption = 8,
    seconds: Annotated[float, typer.Option(min=0.01, help="Length of each turn.")] = 0.25,
    repeats: Annotated[int, typer.Option(min=1, help="Number of turns per contender.")] = 7,
    step_deadline: Annotated[
        float | None,
        typer.Option(min=0.01, help="Seconds after which a step counts as hung. Default: by the times of the first."),
    ] = None,
    env_kwargs: KwargsOption = "{}",
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast a batch of an env steps. Which layout is best, and how close is it to the limit of the cores?

    All contenders are built first. Then they step in turn, with random actions.
    Ratios and shares are medians over the turns. Run it on an idle machine.

    The limit is the most that the cores can do: one process per core steps an env, and does nothing else.

    For example:

    multienv bench CartPole-v1 --num-envs 32

    multienv bench my_envs.py:MyEnv
    """
    with at_work("building ...", as_json=as_json, verbose=verbose) as work:
        found, walk = working_env(env, env_kwargs, step_deadline or 10.0)
        options: Any = {"step_deadline": step_deadline, "seconds": seconds, "repeats": repeats, "say": work.update}
        try:
            limit, contenders = measure(found.env_fn, num_envs, walk, **options)
        except UsageError as error:
            raise UsageError(f"{env} cannot be measured: {error}. For details, run `multienv doctor {env}`.") from error
    best = recommended(contenders)
    document = {
        "env": env,
        "num_envs": num_envs,
        "cores": len(cores()),
        "contenders": _rows(limit, contenders, best),
        "recommended": best.name,
        "code": vector_env_code(found, num_envs, best.options or ""),
    }
    work.warn_if_busy()
    if as_json:
        work.print_document(document)
        return
    console = plain_console()
    work.show_printed(console)
    _show(console, document)
    if any(one.is_local and (one.ratio(best) or 0.0) > _WORTH_IT for one in contenders):
        console.print("This env is faster without processes. Use them only if it must survive crashes.")
    console.print(f"Recommended:\n{document['code']}", soft_wrap=True)


def _rows(limit: Contender, contenders: list[Contender], best: Contender) -> list[dict[str, Any]]:
    """Return the measurements as JSON values: the fastest first, then those that died, and the limit last."""
    return [
        {
            "package": one.package,
            "name": one.name,
            "died": one.died,
            "steps_per_second": one.rate,
            "share_of_limit": one.ratio(limit),
            "recommended_is_faster_by": best.ratio(one),
            "rates": one.rates,
        }
        for one in (*sorted(contenders, key=lambda one: -one.rate), limit)
    ]


def _show(console: Console, document: dict[str, Any]) -> None:
    console.print(f"{document['env']} × {document['num_envs']} on {document['cores']} cores", soft_wrap=True)
    table = Table("", box=None, pad_edge=False)
    for header in ("steps/s", "of the\nlimit", "recommended\nis faster by"):
        table.add_column(header, justify="right")
    for one in document["contenders"]:
        is_best = one["name"] == document["recommended"]
        is_compared = not is_best and one["package"] != "limit"
        share, ratio = one["share_of_limit"], one["recommended_is_faster_by"]
        owner = "gymnasium's " if one["package"] == "gymnasium" else ""
        table.add_row(
            owner + one["name"].replace("(env_fns, ", "(").removesuffix("(env_fns)"),
            "died" if one["died"] else f"{one['steps_per_second']:,.0f}",
            "" if share is None else f"{share:.2f}",
            "" if ratio is None or not is_compared else f"{ratio:.2f} ×",
            style="bold" if is_best else "",
        )
    console.print(table)
    for one in document["contenders"]:
        if one["died"]:
            console.print(f"Died: {one['name']}: {one['died']}", style="yellow", soft_wrap=True)


@dataclass
class Contender:
    """Steps a batch in one way.

    Attributes:
        package: The package of the class.
        name: The code for a program.
        build: Builds the batch, and returns a function that steps it for some seconds and returns env steps per second.
        options: Options of SubprocessVectorEnv, as Python; ``None``: another class.
        is_local: The batch steps its envs in its own process.
        step_for: What ``build`` has returned; ``None``: it is not built yet.
        rates: Env steps per second of each turn.
        died: What has ended it, or why it could not be built, in one line; ``""``: it lives.
    """

    package: str
    name: str
    build: Callable[[], Callable[[float], float]]
    options: str | None = None
    is_local: bool = False
    step_for: Callable[[float], float] | None = None
    rates: list[float] = field(default_factory=list)
    died: str = ""

    @property
    def rate(self) -> float:
        """Return the median over the turns; 0.0: it has died."""
        return 0.0 if self.died else statistics.median(self.rates)

    def ratio(self, other: Contender) -> float | None:
        """Return the ratio of its speed to the other's speed: the median over the turns; ``None``: one has died."""
        if self.died or other.died:
            return None
        return statistics.median(one / its for one, its in zip(self.rates, other.rates, strict=True))

    def step_and_record(self, seconds: float) -> None:
        """Step for some seconds and note the rate, or what has ended the batch. One that has died does nothing."""
        if not self.died:
            try:
                self.step_for = self.step_for or self.build()
                self.rates.append(self.step_for(seconds))
            except Exception as error:  # from the env or from another library
                self.died = _cause(error)


def recommended(contenders: list[Contender]) -> Contender:
    """Return the fastest layout of SubprocessVectorEnv, or ``"auto"`` if that is about as fast."""
    layouts = [one for one in contenders if one.options is not None and not one.died]
    best, first = max(layouts, key=lambda one: one.rate), layouts[0]
    return best if (best.ratio(first) or 0.0) > _WORTH_IT else first


def measure(
    env_fn: EnvFn,
    num_envs: int,
    walk: Walk,
    *,
    step_deadline: float | None,
    seconds: float,
    repeats: int,
    say: Callable[[str], object] = lambda text: None,
) -> tuple[Contender, list[Contender]]:
    """Build all contenders, and let them step in turn, in another order each time.

    Returns:
        The limit, which is all cores together, each of which steps one env all the time; and all others.

    Args:
        env_fn: Builds the env.
        num_envs: Number of envs.
        walk: Of the env: by its slowest step and reset it is found after how many seconds one counts as hung.
        step_deadline: The same for a step, if the user has given it.
        seconds: Length of each turn.
        repeats: Number of turns of each contender.
        say: Called with a text that says what is being done.

    Raises:
        UsageError: No layout of SubprocessVectorEnv could be measured.
    """
    dice = random.Random(0)
    with contextlib.ExitStack() as stack:
        found = _TIMES_THE_SLOWEST * max(walk.slowest_step, walk.slowest_reset)
        step = step_deadline or max(_LEAST_DEADLINE, found)
        reset = max(step, found)
        # A call takes the time of a turn, and may reset and step all envs before and after that.
        call = max(_WARM_UP, seconds) + reset * max(1.0, num_envs / _TIMES_THE_SLOWEST)
        worker = {"restart": RAISE, "deadlines": Deadlines(call=call), "reports": ""}
        single = partial(BatchInWorker, lambda: Autoreset(env_fn()), 1)
        build = partial(_build_in_workers, [partial(single, core) for core in cores()], stack, worker, tries=_TRIES)
        limit = Contender("limit", "each core steps an env and nothing else", build)
        deadlines = Deadlines(step=step, reset=reset, recovery=2 * reset)
        layout = partial(SubprocessVectorEnv, deadlines=deadlines, reports="")
        contenders = list(_contenders([env_fn] * num_envs, stack, layout, worker))
        turns = [limit, *contenders]
        for one in turns:
            say(f"building {one.name} ...")
            one.step_and_record(_WARM_UP)
            one.rates.clear()
        for number in range(repeats):
            say(f"turn {number + 1} of {repeats} ...")
            dice.shuffle(turns)
            for one in turns:
                one.step_and_record(seconds)
    if all(one.died for one in contenders if one.options is not None):
        raise UsageError("; ".join(f"{one.name}: {one.died}" for one in contenders))
    return limit, contenders


def _contenders(
    env_fns: list[EnvFn], stack: contextlib.ExitStack, layout: Callable[..., Any], worker: dict[str, Any]
) -> Iterator[Contender]:
    """Yield layouts with different numbers of workers, ``"auto"`` first, and then gymnasium's vector envs.

    They are closed with the stack. ``worker`` has the options of a worker with a batch.
    """
    num_envs, seen = len(env_fns), set()
    for each in ("auto", 1, max(1, -(-num_envs // (2 * busy_cores()))), num_envs):
        sizes = tuple(deal(num_envs, each, busy_cores()))
        if sizes not in seen:
            seen.add(sizes)
            options = "" if each == "auto" else f"envs_per_worker={each}"
            build = partial(_build, partial(layout, env_fns, envs_per_worker=each), num_envs, stack)
            yield Contender("multienv", f"SubprocessVectorEnv(env_fns{options and ', '}{options})", build, options)
    kinds: tuple[Any, ...] = SerialVectorEnv, SyncVectorEnv, AsyncVectorEnv
    for kind in kinds:
        batch = partial(BatchInWorker, partial(kind, env_fns), num_envs)
        # The libraries of the env have as many threads as they would have in a program of the user.
        build = partial(_build_in_workers, [batch], stack, {**worker, "native_threads": None})
        package = "multienv" if kind is SerialVectorEnv else "gymnasium"
        yield Contender(package, f"{kind.__name__}(env_fns)", build, is_local=kind is not AsyncVectorEnv)


def _build(make: Callable[[], Any], num_envs: int, stack: contextlib.ExitStack) -> Callable[[float], float]:
    batch = make()
    stack.callback(batch.close)
    return _stepper(batch, num_envs)


def _stepper(batch: Any, num_envs: int) -> Callable[[float], float]:
    """Reset and step the batch. Return a function that steps it for some seconds and returns env steps per second."""
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

    step_for(0.0)
    return step_for


class BatchInWorker(gymnasium.Env[Any, Any]):
    """Builds a batch of another class in a worker, and steps it there: the env may end that process.

    Args:
        make: Builds the batch, or an env that resets by itself.
        num_envs: Number of its envs.
        core: The core to run on; ``None``: any.
    """

    def __init__(self, make: Callable[[], Any], num_envs: int, core: int | None = None) -> None:
        warnings.simplefilter("ignore")  # Contender.died has the reason if a library fails
        if core is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})
        self._batch = make()
        self.observation_space, self.action_space = self._batch.observation_space, self._batch.action_space
        self._num_envs = num_envs

    @cached_property
    def step_for(self) -> Callable[[float], float]:
        """Return the function that steps it, see :func:`_stepper`: made by the first call, which has a deadline."""
        return _stepper(self._batch, self._num_envs)

    def close(self) -> None:
        """Close the batch and its envs. If it waits for a dead process, Deadlines.close ends that."""
        self._batch.close()


def _build_in_workers(
    batches: list[EnvFn], stack: contextlib.ExitStack, options: dict[str, Any], tries: int = 1
) -> Callable[[float], float]:
    """Build each batch in a worker. Return a function that steps all of them at the same time.

    If a worker is lost, it tries again, so often and each time for a quarter of the time.
    """
    workers = create_subprocess_envs(batches, **options)
    stack.callback(close_at_once, [worker.close for worker in workers])
    part = 1.0  # of the time of a turn; kept for the next one, because a hang takes long

    def step_for(seconds: float) -> float:
        nonlocal part
        for _ in range(tries):
            for worker in workers:
                worker.call_async("step_for", part * seconds)
            rates: list[float] = []
            for worker in workers:
                try:
                    rates.append(worker.call_wait())
                except WorkerLostError as error:  # the next call builds the env anew
                    lost = error
            if len(rates) == len(workers):
                return sum(rates)
            part /= 4
        raise lost

    return step_for


def _cause(error: BaseException) -> str:
    """Return what has ended a batch, in one line."""
    if isinstance(error, EnvsFailedError):
        error = next(iter(error.failures.values()))
    if isinstance(error, WorkerHungError):
        return "hung"
    if isinstance(error, WorkerLostError):
        return exit_text(error.exit_code)
    return first_line(error).rpartition(" raised ")[2].removeprefix("builtins.").rstrip(": ")
