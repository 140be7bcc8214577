"""Frozen records of events, for hooks and ``statistics()``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

# How a process is lost; and why an episode ends that cannot go on.
LossCause = Literal["died", "hung", "broken"]
Cause = LossCause | Literal["error"]
Outcome = Literal["exact", "replayed", "truncated", "reset", "raised"]
RecoveryMethod = Literal["snapshot", "journal", ""]
RecyclingOutcome = Literal["exact", "replayed", "reset", "put off"]


@dataclass(frozen=True, slots=True)
class Loss:
    """Describes a lost worker or, with the cause ``"error"``, an episode that ended with an exception of the env.

    Attributes:
        env_index: Index in the batch of the env that was running, or of the worker's only env; ``None`` if not known.
        cause: ``"died"``, ``"hung"`` (a deadline passed) or ``"broken"`` (the reply cannot be decoded). Or ``"error"``:
            the env raised in ``step()``, ``RestartPolicy.on_error`` is ``"truncate"``, and the worker lives.
        command: The call during which the worker was lost. If the worker died between two calls, the call that noticed
            it.
        step: Number of steps taken in the episode.
        seed: Seed of the last seeded reset.
        pid: Id of the process.
        exit_code: Exit code of the process; a negative number is a signal; ``None`` if not known.
        stack: Python and native stack, if they were recorded.
        stderr: The last lines that the process wrote to stderr.
        deadline: Seconds that the request was allowed; ``None``: no limit.
        detail: More about the cause, for example that a host on a cluster was lost.
        idle: Whether the worker ended before it began to execute the call.
        envs: Indices of all envs of the worker.
        seeds: Seeds of the last seeded resets of these envs.
    """

    env_index: int | None
    cause: Cause
    command: str
    step: int | None
    seed: int | None
    pid: int | None
    exit_code: int | None = None
    stack: str = field(default="", repr=False)
    stderr: str = field(default="", repr=False)
    deadline: float | None = None
    detail: str = ""
    idle: bool = False
    envs: tuple[int, ...] = ()
    seeds: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Recovery:
    """Describes the outcome of a loss.

    Attributes:
        loss: The loss.
        outcome: ``"exact"``: the same episode goes on, from a forked copy of the lost process or from all that happened
            since the env was built, verified. ``"replayed"``: the same episode goes on, repeated from a reset; at least
            one whole episode compared equal, but an env that remembers something from before that reset may go on
            otherwise. ``"truncated"``: the episode ended, and the transition says so. ``"reset"``: the old episode
            had ended, or you had called for a new one, which began clean. ``"raised"``: an error was raised.
        reason: Why the recovery is not exact, or ``""``.
        replayed: Number of requests that were run again, in all attempts together; a replay whose process ended, or
            that raised, counts none.
        attempts: Number of processes that the recovery took.
        seconds: Seconds from the moment the loss was noticed to the answer.
        method: Source of the recovery: ``"snapshot"``, a forked copy of the lost process; ``"journal"``, a new process
            that ran the requests since the construction, or since a reset of each env, again; or ``""`` if nothing was
            recovered.
        report: The crash report, for ``multienv replay``; ``""`` if none is written. When you see an error or a
            truncation, its report exists. After an exact recovery it appears a moment later.
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
    """Says that a process was replaced as planned; see ``RestartPolicy.recycle_after_steps`` and the options after it.

    Attributes:
        env_index: Index in the batch of the worker's first env, or ``None``.
        why: The limit that was reached, in words.
        outcome: ``"reset"``: no episode was running. The new process begins the next episodes; the random generators of
            the envs go on, and calls and attributes that you set are repeated. What else an env remembers is lost.
            ``"exact"`` or ``"replayed"``: the same episodes go on; see :class:`Recovery` for the difference.
            ``"put off"``: the episodes could not be replayed, or the envs could not be built beside the old ones. The
            old process goes on until some more episodes have ended.
        reason: Why the outcome is not exact, or what a ``"reset"`` is known to have lost; or ``""``.
        replayed: Number of requests that were run again; counted as in :class:`Recovery`.
        seconds: Seconds that the replacement took.
    """

    env_index: int | None
    why: str
    outcome: RecyclingOutcome
    reason: str
    replayed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """Holds counters and state of one worker at one moment.

    Attributes:
        state: ``"new"``, ``"starting"``, ``"ready"``, ``"running"``, ``"ended"``, ``"lost"`` or ``"closed"``.
        pid: Process id of the worker; ``None`` if no process runs. One that dies between two calls is replaced by the
            next call; until then this is ``None``.
        steps: Step requests answered. A step of a batch, or of some of its envs, counts once for each worker.
        episodes: Episodes begun, of all envs of the worker together.
        losses: Lost workers, plus episodes that ``on_error="truncate"`` ended.
        restarts: Processes started in place of lost ones.
        recycled: Processes started in place of ones that reached a limit of the ``RestartPolicy``: the sum of the next
            three.
        exact_recyclings: Those in which the same episodes went on, exactly: see :class:`Recycled`.
        replayed_recyclings: Those in which the same episodes went on, repeated from a reset.
        reset_recyclings: Those between two episodes: envs were built anew, and went on with the same random generators.
        exact_recoveries: Losses after which the same episodes went on, exactly: see :class:`Recovery`.
        replayed_recoveries: Losses after which the same episodes went on, repeated from a reset.
        truncated_recoveries: Losses that ended their episode.
        replayed_steps: Requests (steps, resets and calls) run again, after losses and for replacements by plan: the sum
            of ``Recovery.replayed`` and ``Recycled.replayed``.
        recovery_seconds: Seconds that each recovery took; the newest is last; at most 1000 of them.
        step_seconds: Seconds that a step takes in the worker, smoothed, from a sample of the steps. If the worker has
            several envs, the time of all of them together.
        journal_bytes: Bytes in the journal: after the start of a run, about two episodes of each env.
        snapshots: Snapshots that the present process has forked; the newest is kept.
        no_snapshots: Why the process takes no snapshots at present: what it has outside its memory, such as
            ``"threads"``, ``"sockets"`` or ``"files"``, or ``"the fork failed"``; ``""`` if it takes some.
        snapshot_seconds: Seconds of the envs' time between two snapshots at present: the longer a snapshot takes, the
            more; the more often workers are lost, the less. ``None``: not known yet.
        rss: Resident memory of the worker in bytes; ``None`` if it cannot be read.
        last_loss: The last loss, or ``None``.
        last_recovery: The outcome of the last loss, or ``None``.
        recv_seconds: Seconds that ``recv()`` has waited for envs that go at their own pace. A run that spends most of
            its time there is bound by its envs; one that hardly waits is bound by its policy. This and the next two are
            of the whole batch: each of its workers has the same numbers, so do not add them up.
        ready_seconds: Seconds that an env's result lay ready, from when a ``recv()`` found it until one returned it;
            the mean of all envs that ``recv()`` chooses from. What came before a ``recv()`` looked is not counted.
        idle_seconds: Seconds that an env waited for an action after ``recv()`` had returned its result; the mean, too.
    """

    state: str
    pid: int | None
    steps: int
    episodes: int
    losses: int
    restarts: int
    recycled: int
    exact_recyclings: int
    replayed_recyclings: int
    reset_recyclings: int
    exact_recoveries: int
    replayed_recoveries: int
    truncated_recoveries: int
    replayed_steps: int
    recovery_seconds: tuple[float, ...] = field(repr=False)
    step_seconds: float | None
    journal_bytes: int
    snapshots: int
    no_snapshots: str
    snapshot_seconds: float | None
    rss: int | None
    last_loss: Loss | None
    last_recovery: Recovery | None
    recv_seconds: float = 0.0
    ready_seconds: float = 0.0
    idle_seconds: float = 0.0


# Of Statistics: added up over the workers by flat_statistics().
COUNTERS = (
    "steps", "episodes", "losses", "restarts", "recycled", "exact_recyclings", "replayed_recyclings",
    "reset_recyclings", "exact_recoveries", "replayed_recoveries", "truncated_recoveries", "replayed_steps",
)  # fmt: skip


def flat_statistics(statistics: Statistics | Iterable[Statistics | None]) -> dict[str, float]:
    """Turn the ``statistics()`` of any env class into one flat dict of numbers, for a logger.

    Args:
        statistics: Statistics of one worker or of several; ``None`` (an env without statistics) is left out.

    Returns:
        A dict with these keys. ``workers``: the number of workers that have a process. Sums over the workers: ``steps``
        (step requests; a step of a batch counts once for each worker), ``episodes``, ``losses``, ``restarts``,
        ``recycled``, ``exact_recyclings``, ``replayed_recyclings``, ``reset_recyclings``, ``exact_recoveries``,
        ``replayed_recoveries``, ``truncated_recoveries``, ``replayed_steps``, ``journal_bytes`` and ``rss_bytes``.
        ``rss_bytes_max``: the memory of the largest worker. ``step_seconds_mean`` and ``step_seconds_max``: seconds
        that a step takes in the worker, over the workers. ``recovery_seconds_mean`` and ``recovery_seconds_max``: over
        the last recoveries of all workers. ``recv_seconds``, ``ready_seconds`` and ``idle_seconds``, which are of the
        whole batch: not added up; of several batches, the largest. A value that is not known is 0.
    """
    every = [statistics] if isinstance(statistics, Statistics) else [one for one in statistics if one is not None]
    found: dict[str, float] = {"workers": sum(one.pid is not None for one in every)}
    found |= {name: sum(getattr(one, name) for one in every) for name in COUNTERS}
    rss = [one.rss or 0 for one in every]
    found |= {"journal_bytes": sum(one.journal_bytes for one in every)}
    found |= {"rss_bytes": sum(rss), "rss_bytes_max": max(rss, default=0)}
    of_batch = ("recv_seconds", "ready_seconds", "idle_seconds")
    found |= {name: max((getattr(one, name) for one in every), default=0.0) for name in of_batch}
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
