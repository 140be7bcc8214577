"""The state of a supervised worker, and what to do after each event. Pure: no clock, no I/O.

A state has three parts. The **process** is ready, or being built, or lost. The **episode** of the worker's envs is
running or not. The **request** was asked and is not yet answered; it outlives the process. ``decide`` takes a state and
an event. It returns the state after the event, and the instruction to carry out next. The supervisor commits the new
state with one assignment, and then carries the instruction out. If an interruption (Ctrl-C) comes while the supervisor
waits, the request stays pending: the next call asks ``instruction_of(state, rules)`` and goes on from there. If the
exception of another signal handler comes anywhere else in the call, the process counts as lost.

``TABLE`` says which event leads from which process state to which. ``docs/states.py`` draws the diagram from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from gymnasium.error import NoAsyncCallError

from multienv.config import OnLoss
from multienv.errors import CallPendingError, ResetNeededError, UsageError
from multienv.events import LossCause


class RecoveryDue(Exception):  # noqa: N818 - internal
    """A process must be recovered or built first: call ``collect()`` of the supervisor in a thread, or wait there."""


# So many processes may end with the same request, or while they build their envs, if nothing says that it was chance.
POISON_AFTER = 2


class Process(Enum):
    """Names the states of the worker's process."""

    NONE = "none"  # no process exists: none was started yet, or the last one is gone and is not recovered
    BUILDING = "building"  # the process was launched and builds its envs; the trainer waits for it
    READY = "ready"  # the envs are built, and are in the state that the caller saw last
    LOST = "lost"  # the process is gone or cannot be trusted; first, the state that the caller saw is recovered
    CLOSED = "closed"  # close() was called; nothing else is possible


class Episode(Enum):
    """Names the states of the episodes of the worker's envs, as far as they matter to the caller."""

    NONE = "none"  # no episode has begun, or the last one was given up: step() is refused
    RUNNING = "running"  # step() is possible; in a batch, this does not say which episodes have ended
    ENDED = "ended"  # the env's episode has ended: step() is refused; with autoreset it begins the next one
    TRUNCATED = "truncated"  # a loss in a call, not a step, ended the episode: the next step() returns truncated=True


class Kind(Enum):
    """Names the kinds of requests, as far as they matter after a loss."""

    STEP = "step"
    RESET = "reset"
    CALL = "call"  # any other request: it returns no step, so a loss during it cannot return a truncated one


class Request(NamedTuple):
    """A request that has been asked and not yet answered.

    Attributes:
        kind: Step, reset or call.
        name: What the caller called: ``"step"``, ``"get_attr"`` …
        waits: True: the caller waits for the answer in the same call. If a later call finds the request pending, that
            call was interrupted. False: the request is ``step_async`` or similar, and its answer is not yet collected.
        touched: Which slots a reset resets, or a step steps; ``None``: all.
        steps: Of a rollout: its number of steps, each of which begins the next episode after one that ended. Else 0.
    """

    kind: Kind
    name: str
    waits: bool = True
    touched: tuple[bool, ...] | None = None
    steps: int = 0

    @property
    def is_plain_step(self) -> bool:
        """Tell whether the request is one step, stored in its bank. All other requests are sent as messages."""
        return self.kind is Kind.STEP and not self.steps

    def touches(self, slot: int) -> bool:
        """Tell whether the request concerns a slot."""
        return self.touched is None or self.touched[slot]

    @property
    def left_alone(self) -> list[int]:
        """Return the slots that a step does not touch: their episodes go on."""
        return [slot for slot, is_touched in enumerate(self.touched or ()) if self.kind is Kind.STEP and not is_touched]


class State(NamedTuple):
    """All that ``decide`` knows of one supervised worker.

    Attributes:
        skipped: Slots that take no part in the pending request, and the reasons.
        not_reset: Skipped slots that the pending step does not even reset, because their reset ends processes, or no
            new env can be built.
        pending_truncations: Slots whose episode is lost, and the reasons. The caller does not know it yet: the next
            step skips these slots.
        deaths: Slot and number of processes that ended while they executed the pending request for that slot. In a
            rollout, the slot after the last one stands for the policy.
        killed: The same for processes killed from outside. The slot may be the cause (memory), or not.
        past_blamed: One of the losses is in neither: its process had a long past (:class:`Lost`). Something that has
            piled up in the process may be the cause, not the request.
        losses: Number of processes lost since the pending request was asked, or since the envs were to be built.
        tries: How many processes a slot may end with the pending request before the slot is left out.
        what: A sentence that says how the last of these processes was lost.
    """

    process: Process = Process.NONE
    episode: Episode = Episode.NONE
    request: Request | None = None
    skipped: tuple[tuple[int, str], ...] = ()
    not_reset: tuple[int, ...] = ()
    pending_truncations: tuple[tuple[int, str], ...] = ()
    deaths: tuple[tuple[int, int], ...] = ()
    killed: tuple[tuple[int, int], ...] = ()
    past_blamed: bool = False
    losses: int = 0
    tries: int = POISON_AFTER
    what: str = ""

    @property
    def command(self) -> str:
        """Return what the caller has called, or what is asked between two of its calls."""
        if self.process is Process.BUILDING:
            return "initialize"
        return "snapshot" if self.request is None else self.request.name

    @property
    def is_plain(self) -> bool:
        """Tell whether a step is pending in which all slots take part."""
        request = self.request
        return request is not None and request.is_plain_step and request.touched is None and not self.skipped


_STEP, _STEP_ASYNC = Request(Kind.STEP, "step"), Request(Kind.STEP, "step", waits=False)
_RESET, _RESET_ASYNC = Request(Kind.RESET, "reset"), Request(Kind.RESET, "reset", waits=False)
# The states of plain steps. decide() returns these very objects, so the hot path compares by ``is``.
RUNNING = State(Process.READY, Episode.RUNNING)
STEPPING = State(Process.READY, Episode.RUNNING, _STEP)
STEPPING_ASYNC = State(Process.READY, Episode.RUNNING, _STEP_ASYNC)
# A single env: its episode has ended; a reset that carries nothing is asked for.
EPISODE_OVER = State(Process.READY, Episode.ENDED)
RESETTING = State(Process.READY, Episode.ENDED, _RESET)
RESETTING_ASYNC = State(Process.READY, Episode.ENDED, _RESET_ASYNC)
# Of these the answer may be a plain one.
PLAIN_PENDING = STEPPING, STEPPING_ASYNC, RESETTING, RESETTING_ASYNC
_PLAIN = {state: state for state in (RUNNING, EPISODE_OVER, *PLAIN_PENDING)}


@dataclass(frozen=True, slots=True)
class Rules:
    """Holds the rules of a policy, and the kind of worker that they apply to.

    Attributes:
        slots: Number of envs.
        resets_itself: The worker begins the next episode of an env by itself, in or after the step that ends one.
        on_crash, on_timeout: See :class:`~multienv.RestartPolicy`.
    """

    slots: int = 1
    resets_itself: bool = False
    on_crash: OnLoss = "replay"
    on_timeout: OnLoss = "replay"

    def on(self, cause: LossCause) -> OnLoss:
        """Return what to do about a loss with this cause."""
        return self.on_timeout if cause == "hung" else self.on_crash


# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launched:
    """Says that a process was launched and asked to build the envs."""


@dataclass(frozen=True, slots=True)
class Built:
    """Says that the envs are built."""


@dataclass(frozen=True, slots=True)
class BuildFailed:
    """Says that ``env_fn`` raised, or that no process could be started. The caller gets the error, or a truncation."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Says that the caller makes a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Replied:
    """Says that the request is answered. ``ended``: an episode is over, and the worker does not reset by itself."""

    ended: bool = False
    failed: bool = False  # the env raised


@dataclass(frozen=True, slots=True)
class Lost:
    """Says that the process is gone.

    Attributes:
        cause: The process died, hung, or sent an unreadable answer.
        slot: The slot whose env the process was executing. In a rollout, the slot after the last one stands for the
            policy. -1: none (the process died before it was asked), or unknown.
        outside: The process was killed from outside (SIGKILL, the end of the monitor). The request becomes suspect only
            after many of these.
        what: A sentence that says what happened.
        long_past: The process died, and it came from a recovery for this request that had repeated more of the past
            than it had to: from a snapshot, or from a replay that began at the construction.
        tries: How many processes a slot may end with this request.
    """

    cause: LossCause
    slot: int = -1
    outside: bool = False
    what: str = ""
    long_past: bool = False
    tries: int = POISON_AFTER


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Says that an exception came in the middle of a call that has asked the process.

    ``keeps_request``: all of the call's requests had been sent, so this one is asked again; else it was never made.
    """

    keeps_request: bool = False


@dataclass(frozen=True, slots=True)
class Recovered:
    """Says that the envs are in the state that the caller saw last, except ``mismatches``: slot → difference."""

    mismatches: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class NotRecovered:
    """Says that the envs cannot be recovered, and the ``reason``. ``is_built``: new ones could be built."""

    reason: str
    is_built: bool = True


@dataclass(frozen=True, slots=True)
class BudgetSpent:
    """Says that the policy allows no further restart."""


@dataclass(frozen=True, slots=True)
class Discarded:
    """Says that the caller gives up the process."""


@dataclass(frozen=True, slots=True)
class Closed:
    """Says that close() was called."""


Event = (
    Launched
    | Built
    | BuildFailed
    | Asked
    | Replied
    | Lost
    | Interrupted
    | Recovered
    | NotRecovered
    | BudgetSpent
    | Discarded
    | Closed
)


# --- instructions -----------------------------------------------------------------------------


class Instruction(Enum):
    """Names what the supervisor does next."""

    NOTHING = "nothing"  # wait for the caller
    LAUNCH = "launch"  # launch a process, which builds the envs
    AWAIT_BUILD = "await build"  # wait until the envs are built
    ASK = "ask"  # send the pending request, without its skipped slots, and collect the answer
    RECOVER = "recover"  # bring the envs back from one source after the other: see way_back
    DELIVER = "deliver"  # return the answer to the caller, with truncations written over it
    TRUNCATE = "truncate"  # return truncated=True to the caller for all slots, without asking a process
    RAISE_LOST = "raise lost"  # raise the error of the loss
    RAISE_POISON = "raise poison"  # raise the error that the request ends every process
    RAISE_BUDGET = "raise budget"  # raise the error that no restart is left


# After so many losses before an answer, the request counts as the cause, even if no process died while executing it.
# For example, an env may close the worker's descriptors and return, and the worker then ends. The same number of
# processes may be killed from outside while they build their envs, or in one request of a replay: such a death says
# nothing about the request.
MOST_LOSSES = 6

# (process, event) → the process states that it may lead to. All other pairs cannot happen: decide() raises.
TABLE: Mapping[tuple[Process, type], tuple[Process, ...]] = {
    (Process.NONE, Launched): (Process.BUILDING,),
    (Process.NONE, Asked): (Process.NONE,),
    (Process.NONE, Replied): (Process.NONE,),
    (Process.NONE, Interrupted): (Process.NONE,),
    (Process.NONE, BuildFailed): (Process.NONE,),
    (Process.NONE, BudgetSpent): (Process.NONE,),
    (Process.BUILDING, Built): (Process.READY,),
    (Process.BUILDING, Lost): (Process.NONE,),
    (Process.BUILDING, BuildFailed): (Process.NONE,),
    (Process.READY, Asked): (Process.READY,),
    (Process.READY, Replied): (Process.READY,),
    (Process.READY, Lost): (Process.LOST, Process.NONE),
    (Process.READY, Interrupted): (Process.LOST,),
    (Process.READY, Discarded): (Process.NONE,),
    (Process.LOST, Asked): (Process.LOST,),
    (Process.LOST, Lost): (Process.LOST, Process.NONE),
    (Process.LOST, Interrupted): (Process.LOST,),
    (Process.LOST, Discarded): (Process.NONE,),
    (Process.LOST, Recovered): (Process.READY,),
    (Process.LOST, NotRecovered): (Process.NONE,),
    (Process.LOST, BudgetSpent): (Process.NONE,),
} | {(process, Closed): (Process.CLOSED,) for process in Process}


def instruction_of(state: State, rules: Rules) -> Instruction:
    """Return the instruction that a state waits for. An interrupted call goes on with it."""
    if state.process is Process.BUILDING:
        return Instruction.AWAIT_BUILD
    if state.process is Process.LOST:
        return Instruction.RECOVER
    if state.request is None:
        return Instruction.NOTHING
    if _is_all_skipped(state, rules):
        return Instruction.TRUNCATE
    return Instruction.ASK if state.process is Process.READY else Instruction.LAUNCH


def _is_all_skipped(state: State, rules: Rules) -> bool:
    """Tell whether a step needs no process: no slot that it touches takes part in it, or is reset in it."""
    request = state.request
    if request is None or request.kind is not Kind.STEP or _touches_other(state, dict(state.skipped), rules):
        return False
    if not _resets_itself(state, rules):
        return True
    return state.process is Process.NONE and request.is_plain_step and not _touches_other(state, state.not_reset, rules)


def _touches_other(state: State, slots: Container[int], rules: Rules) -> bool:
    """Tell whether the pending request touches another slot than these."""
    assert state.request is not None
    return any(state.request.touches(slot) and slot not in slots for slot in range(rules.slots))


def _resets_itself(state: State, rules: Rules) -> bool:
    """Tell whether the worker begins the next episode of an env in or after the pending step that ends one."""
    return rules.resets_itself or (state.request is not None and state.request.steps > 0)


def slots_beginning(state: State, ended: Sequence[Any], rules: Rules) -> tuple[int, ...]:
    """Return the slots that a step skips, and that begin their next episode in it: there is nothing to truncate.

    Args:
        state: The worker's.
        ended: Of each slot, whether its episode had ended before the step.
        rules: With autoreset. A slot whose reset ends processes is truncated all the same.
    """
    if state.request is None or state.request.kind is not Kind.STEP or not rules.resets_itself:
        return ()
    guilty = {*state.not_reset, *_poisoned(state, rules)}
    return tuple(slot for slot, _ in state.skipped if ended[slot] and slot not in guilty)


def decide(state: State, event: Event, rules: Rules) -> tuple[State, Instruction]:
    """Return the state after an event, and what to do next.

    Raises:
        ValueError: The event cannot happen in this state.
    """
    allowed = TABLE.get((state.process, type(event)))
    if allowed is None:
        raise ValueError(f"{type(event).__name__} cannot happen while the process is {state.process.value}")
    after, instruction = _HANDLERS[type(event)](state, event, rules)
    assert after.process in allowed, (state, event, after)
    return _PLAIN.get(after, after), instruction


def refusal(state: State, kind: Kind, name: str, *, is_built: bool) -> Exception | None:
    """Return the error for asking in this state, with the call to make instead; ``None``: asking is allowed.

    Args:
        state: The worker's state.
        kind: Kind of the request.
        name: The method that the caller has called: ``"step"``, ``"step_wait"``, …
        is_built: The envs have been built.
    """
    is_wait = name.endswith("_wait")
    if state.request is not None:
        pending = state.request.name
        if is_wait:
            return NoAsyncCallError(f"{name}(): what is pending is {pending}; call {pending}_wait().", name)
        if state.request.waits:
            advice = f"{pending}() was interrupted. Call {pending}() again for its outcome, or reset()."
        else:
            advice = f"{pending} is pending. Call {pending}_wait() first."
        return CallPendingError(f"{name}(): {advice}", pending)
    if not is_built:
        called = name if name.endswith("_space") else f"{name}()"
        return UsageError(f"{called}: the env is not built yet. Call initialize() first.")
    if is_wait:
        return NoAsyncCallError(f"{name}(): call {name.removesuffix('_wait')}_async() first.", name)
    if kind is not Kind.STEP or state.episode in (Episode.RUNNING, Episode.TRUNCATED):
        return None
    if state.process is Process.NONE:
        return ResetNeededError(f"{name}(): the worker was lost. Call reset(): it starts a new one.")
    if state.episode is Episode.ENDED:
        return ResetNeededError(f"{name}(): the episode has ended. Call reset() first.")
    return ResetNeededError(f"{name}(): there is no episode yet. Call reset() first.")


def name_of(state: State, *, started: bool) -> str:
    """Return the word that ``statistics()`` has for a state; ``started``: the envs have been built once."""
    names = {Process.CLOSED: "closed", Process.BUILDING: "starting", Process.LOST: "lost"}
    if state.process is Process.NONE:
        return "lost" if started else "new"
    if state.process in names:
        return names[state.process]
    return {Episode.NONE: "ready", Episode.ENDED: "ended"}.get(state.episode, "running")


def line_of(event: Event, after: State) -> str:
    """Return an event and the state after it, as a line for a crash report."""
    request = "" if after.request is None else f", {after.request.name} pending"
    cause = f" ({event.cause}, slot {event.slot})" if isinstance(event, Lost) else ""
    return f"{type(event).__name__}{cause}: process {after.process.value}, episode {after.episode.value}{request}"


def _on_launched(state: State, event: Launched, rules: Rules) -> tuple[State, Instruction]:
    return state._replace(process=Process.BUILDING), Instruction.AWAIT_BUILD


def _on_built(state: State, event: Built, rules: Rules) -> tuple[State, Instruction]:
    after = state._replace(process=Process.READY)
    return after, instruction_of(after, rules)


def _on_build_failed(state: State, event: BuildFailed, rules: Rules) -> tuple[State, Instruction]:
    after, request = state._replace(process=Process.NONE), state.request
    if request is None or request.kind is Kind.CALL:
        return _without_request(after), Instruction.NOTHING
    if request.kind is Kind.STEP and not _touches_other(state, dict(state.skipped), rules):
        return _without_new_envs(after, rules, Instruction.NOTHING)
    # Those of a batch begin with a reset, whatever is asked first. One of a single env would be stepped without.
    episode = _episode_after_failed_reset(state) if rules.slots == 1 and not rules.resets_itself else state.episode
    return _without_request(after, episode=episode), Instruction.NOTHING


def _on_asked(state: State, event: Asked, rules: Rules) -> tuple[State, Instruction]:
    request = event.request
    truncations = [one for one in state.pending_truncations if request.kind is Kind.STEP and request.touches(one[0])]
    after = state._replace(request=request, skipped=tuple(truncations), losses=0)
    return after, instruction_of(after, rules)


def _on_replied(state: State, event: Replied, rules: Rules) -> tuple[State, Instruction]:
    request = state.request
    assert request is not None
    after = _without_request(state)
    pending_truncations = tuple(one for one in state.pending_truncations if not request.touches(one[0]))
    if request.kind is Kind.RESET and not event.failed:
        after = after._replace(
            episode=Episode.TRUNCATED if pending_truncations and rules.slots == 1 else Episode.RUNNING,
            pending_truncations=pending_truncations,
        )
    elif request.kind is Kind.RESET and rules.slots == 1:
        after = after._replace(episode=_episode_after_failed_reset(state), pending_truncations=())
    elif request.kind is Kind.STEP:
        ended = event.ended and not rules.resets_itself and rules.slots == 1
        episode = Episode.ENDED if ended else Episode.RUNNING
        after = after._replace(episode=episode, pending_truncations=pending_truncations)
    return after, Instruction.DELIVER


def _on_lost(state: State, event: Lost, rules: Rules) -> tuple[State, Instruction]:
    if state.process is Process.BUILDING:
        after = state._replace(process=Process.NONE, losses=state.losses + 1)
        goes_on = after.losses < (MOST_LOSSES if event.outside else POISON_AFTER)
        if goes_on and rules.on(event.cause) == "replay":
            return after, Instruction.LAUNCH
        return _without_request(after), Instruction.RAISE_LOST
    after = state._replace(process=Process.LOST, losses=state.losses + 1, tries=event.tries, what=event.what)
    if event.long_past and not state.past_blamed:
        after = after._replace(past_blamed=True)
    elif event.outside:
        after = after._replace(killed=_add_one(state.killed, event.slot))
    else:
        after = after._replace(deaths=_add_one(state.deaths, event.slot))
    if event.slot in dict(state.skipped) and event.slot in _poisoned(after, rules):
        after = after._replace(not_reset=tuple(sorted({*state.not_reset, event.slot})))
    action = rules.on(event.cause)
    if action == "replay":
        return after, Instruction.RECOVER
    if action == "raise":
        return _after_error(after, event.what, rules), Instruction.RAISE_LOST
    return _end_episodes(after, event.what, rules)


def _on_interrupted(state: State, event: Interrupted, rules: Rules) -> tuple[State, Instruction]:
    process = Process.LOST if state.process is Process.READY else state.process
    after = state._replace(process=process) if event.keeps_request else _without_request(state, process=process)
    return after, instruction_of(after, rules)


def _on_recovered(state: State, event: Recovered, rules: Rules) -> tuple[State, Instruction]:
    after = state._replace(process=Process.READY)
    request = state.request
    poisoned = _poisoned(state, rules)
    if request is None or request.kind is Kind.CALL or rules.slots in poisoned:
        is_lost = event.mismatches and rules.slots == 1 and state.episode is Episode.RUNNING
        episode = Episode.TRUNCATED if is_lost else state.episode
        after = after._replace(pending_truncations=_merge(state.pending_truncations, event.mismatches), episode=episode)
        if request is None:
            return _without_request(after), Instruction.NOTHING
        if poisoned:
            return _without_request(after), Instruction.RAISE_POISON
        return after, Instruction.ASK
    if request.kind is Kind.STEP:
        skipped, others = _split_by_touch(request, {**event.mismatches, **poisoned})
    else:  # a reset begins new episodes in the slots that it touches
        skipped = poisoned
        _, others = _split_by_touch(request, event.mismatches)
    after = after._replace(
        skipped=_merge(state.skipped, skipped), pending_truncations=_merge(state.pending_truncations, others)
    )
    if poisoned and request.kind is Kind.RESET and rules.slots == 1:
        return _without_request(after, episode=_episode_after_failed_reset(state)), Instruction.RAISE_POISON
    return after, instruction_of(after, rules)


def _on_not_recovered(state: State, event: NotRecovered, rules: Rules) -> tuple[State, Instruction]:
    after, instruction = _end_episodes(state, event.reason, rules)
    if event.is_built or state.request is None or state.request.kind is not Kind.STEP:
        return after, instruction
    return _without_new_envs(after, rules, Instruction.RAISE_LOST)


def _without_new_envs(state: State, rules: Rules, of_rollout: Instruction) -> tuple[State, Instruction]:
    """End the episodes that a pending step touches, though no envs are there to begin the next ones.

    The next step or reset begins them. A rollout would be of more than one step: it raises, and the next step tells.
    """
    assert state.request is not None
    if state.request.steps:
        return _without_process(state, dict(state.skipped), running=True), of_rollout
    after = state._replace(not_reset=tuple(slot for slot, _ in state.skipped))
    return after, instruction_of(after, rules)


def _end_episodes(state: State, reason: str, rules: Rules) -> tuple[State, Instruction]:
    """End all episodes of the worker. Running ones are truncated; a pending reset begins in a new process."""
    everyone = dict.fromkeys(range(rules.slots), reason)
    request = state.request
    after = state._replace(process=Process.NONE)
    running = state.episode in (Episode.RUNNING, Episode.TRUNCATED)
    if request is None or request.kind is Kind.CALL:
        return _without_process(after, everyone, running=running), Instruction.RAISE_LOST
    # The slots that the request does not touch are truncated in their next step. A reset begins new episodes in those
    # that it touches.
    touched, others = _split_by_touch(request, everyone)
    after = after._replace(pending_truncations=_merge(state.pending_truncations, others if running else {}))
    if request.kind is Kind.STEP:
        after = after._replace(skipped=_merge(state.skipped, touched))
        return after, instruction_of(after, rules)
    after = after._replace(skipped=_merge((), _poisoned(state, rules)))
    if after.skipped and rules.slots == 1:
        return _without_request(after, episode=_episode_after_failed_reset(state)), Instruction.RAISE_POISON
    return after, Instruction.LAUNCH


def _on_budget_spent(state: State, event: BudgetSpent, rules: Rules) -> tuple[State, Instruction]:
    return _after_error(state, state.what, rules), Instruction.RAISE_BUDGET


def _on_discarded(state: State, event: Discarded, rules: Rules) -> tuple[State, Instruction]:
    return _without_process(state, {}, running=False), Instruction.NOTHING


def _on_closed(state: State, event: Closed, rules: Rules) -> tuple[State, Instruction]:
    return State(process=Process.CLOSED), Instruction.NOTHING


def _poisoned(state: State, rules: Rules) -> dict[int, str]:
    """Return the slots that end every process with the pending request, and the reasons for the caller."""
    if state.request is None:
        return {}
    found = {slot: count for slot, count in state.deaths if count >= state.tries}
    if state.losses >= MOST_LOSSES and not found:
        # The slot in which most processes ended is the cause. If nothing is known, all slots are.
        suspects = Counter(dict(state.deaths)) + Counter(dict(state.killed))
        most = max(suspects.values(), default=0)
        found = {slot: count for slot, count in suspects.items() if count == most}
        found = found or dict.fromkeys(range(rules.slots), state.losses)
    return {
        slot: f"{state.what} The same {state.request.name}() ended {count} processes; it was not tried again."
        for slot, count in found.items()
    }


def _add_one(counts: tuple[tuple[int, int], ...], slot: int) -> tuple[tuple[int, int], ...]:
    """Return the counts, with one more for the slot; -1: no slot."""
    return tuple(sorted((Counter(dict(counts)) + Counter([slot] if slot >= 0 else [])).items()))


def _merge(known: tuple[tuple[int, str], ...], more: Mapping[int, str]) -> tuple[tuple[int, str], ...]:
    """Merge slots and reasons. A slot keeps the reason that it already has."""
    return tuple(sorted({**more, **dict(known)}.items()))


_NO_REQUEST = {
    name: State._field_defaults[name]
    for name in ("request", "skipped", "not_reset", "deaths", "killed", "past_blamed", "losses", "tries", "what")
}


def _without_request(state: State, **changes: Any) -> State:
    return state._replace(**_NO_REQUEST, **changes)


def _episode_after_failed_reset(state: State) -> Episode:
    """Return the state of the episode after a reset that failed: the next one is still due after an end."""
    return Episode.ENDED if state.episode is Episode.ENDED else Episode.NONE


def _split_by_touch(request: Request, reasons: Mapping[int, str]) -> tuple[dict[int, str], dict[int, str]]:
    """Part slots with their reasons: return those that a request touches, and the others."""
    touched = {slot: reason for slot, reason in reasons.items() if request.touches(slot)}
    return touched, {slot: reason for slot, reason in reasons.items() if slot not in touched}


def _after_error(state: State, reason: str, rules: Rules) -> State:
    """Return the state after an error that tells of a loss. Slots that the request does not touch are truncated later.

    The caller has to reset some of the envs before.
    """
    request, after = state.request, _without_process(state, {}, running=False)
    if request is None:
        return after
    running = state.process is not Process.NONE and state.episode in (Episode.RUNNING, Episode.TRUNCATED)
    _, others = _split_by_touch(request, dict.fromkeys(range(rules.slots), reason) if running else {})
    truncations = tuple(one for one in state.pending_truncations if not request.touches(one[0]))
    return after._replace(pending_truncations=_merge(truncations, others))


def _without_process(state: State, pending_truncations: Mapping[int, str], *, running: bool) -> State:
    """Return the state without process and request. The next step truncates running episodes."""
    episode = Episode.TRUNCATED if pending_truncations and running else _episode_after_failed_reset(state)
    return _without_request(
        state,
        process=Process.NONE,
        episode=episode,
        pending_truncations=_merge(state.pending_truncations, pending_truncations) if running else (),
    )


# Event → the function that says what follows from it.
_HANDLERS: Mapping[type, Callable[[State, Any, Rules], tuple[State, Instruction]]] = {
    Launched: _on_launched,
    Built: _on_built,
    BuildFailed: _on_build_failed,
    Asked: _on_asked,
    Replied: _on_replied,
    Lost: _on_lost,
    Interrupted: _on_interrupted,
    Recovered: _on_recovered,
    NotRecovered: _on_not_recovered,
    BudgetSpent: _on_budget_spent,
    Discarded: _on_discarded,
    Closed: _on_closed,
}
