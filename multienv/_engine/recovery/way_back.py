"""Decide from which source envs are brought back into a process. Pure: no clock, no I/O.

A loss, a replacement by plan, ``restore()``, ``load_state_dict()`` and new envs after a truncation are one story. Each
has its list of **sources** (``sources_after_loss`` and so on). The first one is tried, and ``decide_way`` says what
follows from what came of it. An instruction carries its data: try this source, take over, or give up because of this
reason.

A process may die in an attempt by chance, of the request that it repeats, or of what has accumulated in it. So deaths
are counted by the request in which they happen. Too many at one request, and the next source is tried. A woken copy
that has died is followed by the newest copy of it. Copies are forked on the way then, and what was repeated before the
newest one is not repeated again: so a stretch in which many processes die by chance is passed in the end.

How often a request may be tried (``LossStatistics``) and how many restarts a worker has (``RestartBudget``) is decided
here, too: clock and dice are given. What counts as poison follows from both, in ``state_machine``.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace

from multienv._engine.processes.channel import Channel
from multienv._engine.recovery.journal import Journal, Plan
from multienv._engine.recovery.state_machine import MOST_LOSSES, POISON_AFTER
from multienv._engine.sometimes import sometimes
from multienv.config import RestartPolicy
from multienv.events import RecoveryMethod

# Seconds in which restarts are counted, see RestartPolicy.max_restarts.
WINDOW = 3600.0
# Seconds of the longest wait before a restart, however often it has failed.
LONGEST_BACKOFF = 10.0
# The mean time between losses is that of so many, the last ones.
_REMEMBERED = 8
# Seconds of the shortest mean: many workers may be killed in one moment.
_LEAST_MEAN = 1e-3
# If requests that ended a process went through when they were repeated, one may end so many more before it is poison.
_MORE_TRIES = 2

# --- sources ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeptSnapshot:
    """Names the frozen process that ``snapshot()`` has kept; ``number``: of the last request executed in it."""

    token: int
    number: int


@dataclass(frozen=True, slots=True)
class NewestSnapshot:
    """Names the frozen copy that a lost process has left.

    Attributes:
        of: The channel to the lost process.
        number: Of the last request executed in the copy.
        plan: What came after it.
    """

    of: Channel
    number: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Replayed:
    """Stands for a new process in which the journal is repeated, from the construction of the envs or from resets."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class NewEnvs:
    """Stands for a new process with new envs, in which these calls and attributes are repeated."""

    calls: tuple[bytes, ...] = ()


Source = KeptSnapshot | NewestSnapshot | Replayed | NewEnvs
_BUILT = (Replayed, NewEnvs)  # in a new process


def sources_after_loss(journal: Journal, snapshot: NewestSnapshot | None, *, long_past: bool) -> list[Source]:
    """Return the sources after a loss: the snapshot first, then replays of the journal.

    If the process that came from a recovery with a long past is lost too, a short replay is tried before both: a
    simulator may fail because of what has accumulated in its process. The snapshot holds that too, and a replay from
    the construction accumulates it again.
    """
    short = journal.plans(near=True) if long_past else []
    copies: list[Source] = [] if snapshot is None else [snapshot]
    return [*map(Replayed, short), *copies, *map(Replayed, journal.plans())]


def sources_of_earlier(journal: Journal, number: int, token: int | None) -> list[Source]:
    """Return the sources of ``restore()`` (with the token of the frozen process) and of ``load_state_dict()``."""
    frozen: list[Source] = [] if token is None else [KeptSnapshot(token, number)]
    return [*frozen, *map(Replayed, journal.plans())]


def sources_by_plan(journal: Journal, generators: Mapping[int, bytes]) -> list[Source]:
    """Return the sources of a replacement by plan: short replays, as one of the whole past would repeat what leaked.

    Args:
        journal: Of the worker.
        generators: Slot → state of its random generators, of the envs that are to be new ones.
    """
    return [*map(Replayed, journal.plans(near=True, new_slots=generators))]


def sources_of_new_envs(journal: Journal) -> list[Source]:
    """Return the source of new envs in all slots."""
    return [NewEnvs(journal.kept_calls() if journal.replaying else ())]


# --- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CameBack:
    """Says that the envs are there. ``mismatches``: slot → difference, for each that is not as the caller saw it."""

    mismatches: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Died:
    """Says that the process was lost in the attempt.

    Attributes:
        request: Index of the request that it repeated; -1: none.
        outside: It was killed from outside.
        hung: It did not answer in time.
        late: The time of this source is over.
        copy: The copy that the woken process had taken of itself; ``None``: there is none.
    """

    request: int
    outside: bool
    hung: bool = False
    late: bool = False
    copy: NewestSnapshot | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Says that the source leads nowhere; ``reason``: why, ``""`` if it is not there."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class NothingBuilt:
    """Says that no new process can be had for a replay, and the ``reason``."""

    reason: str


WayEvent = CameBack | Died | Failed | NothingBuilt


# --- instructions -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Try:
    """Try this source; ``is_last``: all the time that is left may be used."""

    source: Source
    is_last: bool


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Take over the process that came back; the slots in ``mismatches`` are not as they were."""

    mismatches: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Bring nothing back, for this ``reason``."""

    reason: str


WayInstruction = Try | TakeOver | GiveUp


# --- deciding ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WayRules:
    """Holds what does not change on the way.

    Attributes:
        slots: Number of envs.
        tries: Processes that one request may end before the source is given up.
        replay_limit: Seconds of a replay while the old process still runs: it is tried once; 0.0: that is gone.
        new_slots: Slots whose envs are new ones, and need not match.
        takes_some: The last replay is taken if at least one slot of it is as it was; else only if all are.
    """

    slots: int
    tries: int
    replay_limit: float = 0.0
    new_slots: Collection[int] = ()
    takes_some: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """Tells how far a way back has come.

    Attributes:
        sources: What is left to try; the first one is being tried.
        reason: Why the last one failed.
        snapshot_failure: Why a snapshot did not bring the envs back; ``""``: it did, or was not tried.
        deaths: Deaths in this source: request and whether it was from outside → number.
    """

    sources: tuple[Source, ...]
    reason: str
    snapshot_failure: str = ""
    deaths: tuple[tuple[tuple[int, bool], int], ...] = ()

    @property
    def next(self) -> Try | GiveUp:
        """Return what to do where nothing has come back yet."""
        if not self.sources:
            return GiveUp(self.reason)
        return Try(self.sources[0], is_last=len(self.sources) == 1)


def decide_way(way: Way, event: WayEvent, rules: WayRules) -> tuple[Way, WayInstruction]:
    """Return the way after an event, and what to do next."""
    source, is_last = way.sources[0], len(way.sources) == 1
    if isinstance(event, CameBack):
        if _is_taken(source, event.mismatches, rules, is_last=is_last):
            sometimes("a snapshot brings the envs back", isinstance(source, NewestSnapshot))
            sometimes("a replay brings some envs of a batch back and others not", event.mismatches)
            return way, TakeOver(event.mismatches)
        sometimes("what follows a woken snapshot differs", isinstance(source, NewestSnapshot))
        sometimes("a replay differs, and another one is tried", isinstance(source, Replayed) and not is_last)
        after = _to_next_source(way, next(iter(event.mismatches.values())))
    elif isinstance(event, Died):
        after = _after_death(way, event, rules)
    elif isinstance(event, NothingBuilt):
        frozen = tuple(one for one in way.sources[1:] if not isinstance(one, _BUILT))
        after = replace(way, sources=frozen, reason=event.reason, deaths=())
    else:
        after = _to_next_source(way, event.reason)
    return after, after.next


def _is_taken(source: Source, mismatches: Mapping[int, str], rules: WayRules, *, is_last: bool) -> bool:
    """Tell whether envs that came back are taken."""
    if isinstance(source, Replayed) and rules.takes_some and is_last:
        return len(mismatches) < rules.slots
    return mismatches.keys() <= set(rules.new_slots)


def _to_next_source(way: Way, reason: str) -> Way:
    """Return the way with the next source; one that is not there leaves no reason behind."""
    is_snapshot = not isinstance(way.sources[0], _BUILT)
    return replace(
        way,
        sources=way.sources[1:],
        deaths=(),
        reason=way.reason if is_snapshot else reason or way.reason,
        snapshot_failure=(reason or way.snapshot_failure) if is_snapshot else way.snapshot_failure,
    )


def _after_death(way: Way, event: Died, rules: WayRules) -> Way:
    """Return the way after a death: the same source once more, or the next one."""
    source, others = way.sources[0], way.sources[1:]
    if rules.replay_limit and isinstance(source, Replayed):
        hung = f"hung, or took longer than RestartPolicy.replay_limit ({rules.replay_limit:g} s)"
        reason = f"its replay {hung if event.hung else 'ended the new process'}"
        return replace(way, sources=(), reason=reason)
    counted = Counter(dict(way.deaths)) + Counter([(event.request, event.outside)])
    way = replace(way, deaths=tuple(sorted(counted.items())))
    if isinstance(source, NewEnvs):
        goes_on = event.outside and counted[event.request, True] < MOST_LOSSES
        sometimes("a repeated call ends the process of new envs", not goes_on)
        sometimes("the process of new envs is killed from outside while calls are repeated", goes_on)
        return way if goes_on else replace(way, sources=(NewEnvs(),), deaths=())
    if isinstance(source, Replayed):
        sometimes("a replay ends its process")
        reason = _too_many(counted, event, rules)
        if not reason and others and counted.total() >= MOST_LOSSES:
            # An env that crashes so often by chance will hardly come to the end of a long replay: try a shorter one.
            reason = f"{counted.total()} processes ended in its replay"
        if not reason and event.late:
            reason = "its replay took too long (see Deadlines.recovery)"
        return _to_next_source(way, reason) if reason else way
    reason, copy = _too_many(counted, event, rules), event.copy
    if reason or copy is None or not isinstance(source, NewestSnapshot):
        return _to_next_source(way, reason)
    repeated, here = source.plan.requests - copy.plan.requests, (event.request, event.outside)
    if repeated > source.plan.repeated:
        sometimes("a woken snapshot fails, and a copy goes on that it has forked on its way")
        counted = Counter({here: counted[here]})
    elif counted.total() >= MOST_LOSSES:
        return _to_next_source(way, "")
    sometimes("a woken snapshot is killed before it is handed over", event.outside)
    sometimes("a woken snapshot fails by chance in a request that it repeats", not event.outside)
    every = max(1, copy.plan.requests >> (counted.total() + 1))
    plan = replace(source.plan, repeated=repeated, every=every)  # all of it is compared in the end
    return replace(way, sources=(replace(copy, plan=plan), *others), deaths=tuple(sorted(counted.items())))


def _too_many(counted: Counter[tuple[int, bool]], event: Died, rules: WayRules) -> str:
    """Return why a source is given up if too many processes died at this request, else ``""``."""
    deaths = counted[event.request, event.outside]
    if deaths < (MOST_LOSSES if event.outside else rules.tries):
        return ""
    where = "when their replay was over" if event.request == -1 else f"while running request {event.request + 1} of its"
    return f"{deaths} processes ended {where}{'' if event.request == -1 else ' replay'}"


# --- how often: tries and budget -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ForkingPolicy(RestartPolicy):
    """Has snapshots taken every so many steps, whatever they cost: for the doctor, tests and benchmarks."""

    snapshot_every: int = 1


@dataclass(slots=True)
class RecoveryProgress:
    """Holds what one recovery, or one replacement by plan, has taken so far, and its deadline.

    Attributes:
        began: When the loss was noticed, seconds of the clock.
        log_at: When the log next says that it is still running, seconds of the clock.
        until: When it is given up; ``None``: never.
        planned: A replacement by plan: no process was lost, and nothing is charged to the budget.
        is_optional: The old process still runs, and goes on if this fails: a replay is tried once, and not for long.
        begins_at: When it may begin, seconds of the clock; ``None``: it is not charged yet.
        attempts: Processes that were started or woken for it.
        replayed: Requests that were replayed in them.
        method: What recovered the envs.
        is_exact: The recovery counts as exact; else as replayed.
        changed: Says that the code has changed since the lost process imported it; ``""``: not as far as is known.
        doing: What it waits for, in words.
        snapshot_failure: Why the snapshot did not recover the envs; ``""``: it did, or was not tried.
        since: When the first process was lost with the same request, seconds of the clock.
        tries: How many processes a request may end, the pending one or one that is repeated, before it is given up.
    """

    began: float
    log_at: float
    until: float | None
    planned: bool = False
    is_optional: bool = False
    begins_at: float | None = None
    attempts: int = 0
    replayed: int = 0
    method: RecoveryMethod = ""
    is_exact: bool = True
    changed: str = ""
    doing: str = ""
    snapshot_failure: str = ""
    since: float = 0.0
    tries: int = POISON_AFTER


class LossStatistics:
    """Counts the losses of all workers made in the same call: tells how often they come, and whether by chance.

    Attributes:
        seconds: Time that all envs took, all together.
        count: Of the losses so far.
    """

    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0
        self._times = deque([0.0], maxlen=_REMEMBERED + 1)
        self._chances: Counter[Hashable] = Counter()  # by kind: requests that went through at last, less their repeats

    @property
    def mean(self) -> float:
        """Return the mean time of the envs between two losses; 0.0: there was none.

        It grows while none comes. Kills from outside count too: where they are rare, it soon is long.
        """
        return max(_LEAST_MEAN, (self.seconds - self._times[0]) / (len(self._times) - 1)) if self.count else 0.0

    def record(self, progress: RecoveryProgress, before: RecoveryProgress | None, kind: Hashable, limit: float) -> None:
        """Record a loss, and decide how often its request may be tried.

        A request that always ends its process (poison) is given up soon. If most of those that ended one went through
        when they were repeated, it is chance: then there are more tries, but none begins later than after ``limit``.

        Args:
            progress: Of the recovery from the loss.
            before: Of the recovery from the loss before, if that came with the same request.
            kind: Of the loss.
            limit: Seconds, see :class:`~multienv.Deadlines`.
        """
        self.count += 1
        self._times.append(self.seconds)
        progress.since = progress.began
        if before is None:
            progress.tries = POISON_AFTER + min(max(0, self._chances[kind]), _MORE_TRIES)
            self._chances[kind] += 1
            return
        self._chances[kind] -= 1
        progress.since = before.since
        progress.tries = before.tries if progress.began - before.since < limit else POISON_AFTER


class RestartBudget:
    """Restarts of one worker within an hour, with exponential back-off while they make no progress.

    The first restart after progress is immediate; each further one waits twice as long as the last, between half
    and the whole of that.

    Args:
        policy: The limits.
        dice: Gives numbers in [0, 1).
    """

    def __init__(self, policy: RestartPolicy, dice: Callable[[], float] = random.random) -> None:
        self._policy = policy
        self._dice = dice
        self._restarts: deque[float] = deque()
        self._in_a_row = 0
        self._answered = -1

    def charge(self, now: float, answered: int) -> float | None:
        """Return the seconds to wait before a restart that begins ``now``; ``None``: no restart is left.

        Args:
            now: The clock, seconds.
            answered: Any count that grows when the worker answers its caller.
        """
        while self._restarts and self._restarts[0] <= now - WINDOW:
            self._restarts.popleft()
        if len(self._restarts) >= self._policy.max_restarts:
            return None
        self._restarts.append(now)
        if answered != self._answered:
            self._answered, self._in_a_row = answered, 0
        self._in_a_row += 1
        if self._in_a_row == 1:
            return 0.0
        full = min(LONGEST_BACKOFF, self._policy.backoff * 2.0 ** min(self._in_a_row - 2, 60))
        return full * (0.5 + self._dice() / 2)
