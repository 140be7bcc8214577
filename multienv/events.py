"""Records of what happened: frozen, handed to hooks and returned by ``statistics()``."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from multienv.errors import UsageError

logger = logging.getLogger("multienv")

# How a process is lost; and why an episode ends that cannot go on.
LossCause = Literal["died", "hung", "broken"]
Cause = LossCause | Literal["error"]
Outcome = Literal["exact", "truncated", "reset", "raised"]
RecoveryMethod = Literal["snapshot", "journal", ""]


@dataclass(frozen=True, slots=True)
class Loss:
    """Tells of one worker lost; or, with the cause ``"error"``, an episode that an exception of the env ended.

    Attributes:
        env_index: The index in its batch of the env that was being executed, or is the only one; ``None``: not known.
        cause: ``"died"``, ``"hung"`` (a deadline passed), ``"broken"`` (undecodable reply); or ``"error"``: the env
            raised in ``step()``, ``RestartPolicy.on_error`` is ``"truncate"``, and the worker lives.
        command: The call that the worker was lost in; of one that died between two calls, the call that found it.
        step: Steps taken in the episode.
        seed: The seed of the last seeded reset.
        pid: The process.
        exit_code: Its exit code; negative is a signal's number; ``None`` if not known.
        stack: Python and native stack, where one was taken.
        stderr: The last lines it wrote.
        deadline: Seconds the request was allowed, ``None``: no limit.
        detail: What else is known: that its host on a cluster is lost, for instance.
        idle: The worker had not begun to execute the call when it ended.
        envs: The indexes of all its envs.
        seeds: The seeds of their last seeded resets.
    """

    env_index: int | None
    cause: Cause
    command: str
    step: int | None
    seed: int | None
    pid: int | None
    exit_code: int | None = None
    stack: str = ""
    stderr: str = ""
    deadline: float | None = None
    detail: str = ""
    idle: bool = False
    envs: tuple[int, ...] = ()
    seeds: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Recovery:
    """Tells what became of a loss.

    Attributes:
        loss: The loss.
        outcome: ``"exact"``: the same episode goes on, verified; ``"truncated"``: it was ended, the
            transition says so; ``"reset"``: the caller had asked for a new episode anyway and got a clean
            one; ``"raised"``: an error was raised.
        reason: Why it is not exact, or ``""``.
        replayed: Requests that were run again, in all attempts together.
        attempts: Processes it took.
        seconds: From the loss being noticed to the answer.
        method: What the env was brought back from: ``"snapshot"``, a forked copy of the lost process; ``"journal"``,
            a new process in which the requests since a reset of each env were run again; or ``""`` when it was not.
        report: The crash report, for ``multienv replay``; ``""`` if none is written. It is there when an error or a
            truncation tells of it, and a moment later after an exact recovery.
    """

    loss: Loss
    outcome: Outcome
    reason: str
    replayed: int
    attempts: int
    seconds: float
    method: RecoveryMethod = ""
    report: str = ""


@dataclass(frozen=True, slots=True)
class Recycled:
    """A process was replaced by plan; see ``RestartPolicy.recycle_after_steps`` and its likes.

    Attributes:
        env_index: The env's index in its batch, or ``None``.
        why: Which limit was reached, in words.
        outcome: ``"exact"``: the same episodes go on, verified; ``"reset"``: they could not be replayed, and the new
            process began with the reset of all envs that was asked for; ``"put off"``: nor was there such a reset, so
            the old process goes on, until there is one or some more episodes have ended.
        reason: Why it is not exact, or ``""``.
        replayed: Requests that were run again.
        seconds: How long it took.
    """

    env_index: int | None
    why: str
    outcome: Literal["exact", "reset", "put off"]
    reason: str
    replayed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """Holds one env's counters and state at one moment.

    Attributes:
        state: ``"new"``, ``"starting"``, ``"ready"``, ``"running"``, ``"ended"``, ``"lost"`` or ``"closed"``.
        pid: The worker, ``None`` while there is none.
        steps: Steps done for the caller.
        episodes: Episodes begun, of all envs of the worker together.
        losses: Workers lost, and episodes that ``on_error="truncate"`` ended.
        restarts: Processes started in place of lost ones.
        recycled: Processes started in place of ones that had served their time.
        exact_recoveries: Losses after which the same episode went on, verified.
        truncated_recoveries: Those of the losses that ended their episode.
        replayed_steps: Requests run again in all replays.
        recovery_seconds: Seconds each recovery took, the newest last, at most 1000.
        step_seconds: Time that a step takes in the worker, seconds, smoothed, from a sample of the steps; where the
            worker has several envs, that of all of them.
        journal_bytes: Bytes the journal holds: of a run that is longer than a moment about two episodes of each env.
        snapshots: Forked snapshots the present process has taken of itself; the newest is kept.
        no_snapshots: Why it takes none at present: ``"threads"``, ``"child processes"``, ``"sockets"``, ``"devices"``,
            ``"shared memory"``, ``"the fork failed"``; or ``""``.
        rss: Resident memory of the worker in bytes, ``None`` where it cannot be read.
        last_loss: The last loss.
        last_recovery: What became of it.
    """

    state: str
    pid: int | None
    steps: int
    episodes: int
    losses: int
    restarts: int
    recycled: int
    exact_recoveries: int
    truncated_recoveries: int
    replayed_steps: int
    recovery_seconds: tuple[float, ...] = field(repr=False)
    step_seconds: float | None
    journal_bytes: int
    snapshots: int
    no_snapshots: str
    rss: int | None
    last_loss: Loss | None
    last_recovery: Recovery | None


# Of Statistics: added up over the workers by flat_statistics().
COUNTERS = (
    "steps", "episodes", "losses", "restarts", "recycled", "exact_recoveries", "truncated_recoveries", "replayed_steps",
)  # fmt: skip


def flat_statistics(statistics: Statistics | Iterable[Statistics | None]) -> dict[str, float]:
    """Return what ``statistics()`` of any env class returned as one flat dict of numbers, for a logger.

    Args:
        statistics: Of one worker, or of several; ``None`` for an env that keeps none is left out.

    Returns:
        ``workers``: those with a process. Added up: ``steps`` (requests for a step: one of a batch counts once a
        worker), ``episodes``, ``losses``, ``restarts``, ``recycled``, ``exact_recoveries``, ``truncated_recoveries``,
        ``replayed_steps``; ``journal_bytes`` and ``rss_bytes``. ``rss_bytes_max``: of the largest worker.
        ``step_seconds_mean`` and ``step_seconds_max``: time that a step takes in the worker, over the workers.
        ``recovery_seconds_mean`` and ``recovery_seconds_max``: over the last recoveries of each worker. What is not
        known is 0.
    """
    every = [statistics] if isinstance(statistics, Statistics) else [one for one in statistics if one is not None]
    found: dict[str, float] = {"workers": sum(one.pid is not None for one in every)}
    found |= {name: sum(getattr(one, name) for one in every) for name in COUNTERS}
    rss = [one.rss or 0 for one in every]
    found |= {"journal_bytes": sum(one.journal_bytes for one in every)}
    found |= {"rss_bytes": sum(rss), "rss_bytes_max": max(rss, default=0)}
    times = {
        "step_seconds": [one.step_seconds for one in every if one.step_seconds is not None],
        "recovery_seconds": [seconds for one in every for seconds in one.recovery_seconds],
    }
    for name, values in times.items():
        found[f"{name}_mean"] = sum(values) / len(values) if values else 0.0
        found[f"{name}_max"] = max(values, default=0.0)
    return found


Event = Loss | Recovery | Recycled
Hook = Callable[[Event], None]


def checked_hooks(hooks: Any) -> tuple[Hook, ...]:
    """Return `hooks` as a tuple; raise UsageError unless every item is callable."""
    given = tuple(hooks) if isinstance(hooks, Iterable) else (hooks, None)
    if not all(map(callable, given)):
        raise UsageError(f"hooks is {hooks!r:.100}; give a list of functions that take an event.")
    return given


def tell(told: deque[tuple[Callable[[Any], object], Any]]) -> None:
    """Call hooks with events, the oldest first, and forget them; log the exceptions that hooks raise."""
    while told:
        hook, event = told.popleft()
        try:
            hook(event)
        except Exception:  # a hook must not break a recovery
            logger.exception("A hook failed on %r", event)
