"""The hot path: plain steps of many workers, written by hand.

A worker is asked *plainly* when it waits for a step and nothing else is to be done first. It answers plainly when its
rows, and infos of numbers, hold all there is to tell. Everything else is left to the supervisor by the first branch.

Each line counts here. What takes 1 µs in a loop of its own takes 3 µs between two processes that share a core, because
the caches are cold by then. So the loop over the workers is inside these functions, and what they touch of a process
lies in one object, its ``StepBuffers``.

An answer is committed by one statement, in which no signal handler runs; in native code without Python code in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from gymnasium.spaces import Discrete
from numpy import int64

from multienv._engine.cores import give_way
from multienv._engine.native import native
from multienv._engine.processes.channel import SPIN_SECONDS, Channel
from multienv._engine.processes.watch import Watched
from multienv._engine.recovery.state_machine import EPISODE_OVER, RESETTING, RESETTING_ASYNC, RUNNING, Kind, State
from multienv._engine.wire.actions import ARRAY, DTYPES, INT, INT64, INT64_STEP, INT_STEP
from multienv._engine.wire.banks import ENDED, RESET, STEP, STEPPED
from multienv._engine.wire.codecs import REWARD_TYPES, Codec
from multienv._engine.wire.infos import NO_COLUMNS, Extras, NumberInfos, described
from multienv._engine.wire.messages import PLAIN_RESET
from multienv._engine.wire.segment import REPLY, REQUEST, TRAINER_SLEEPS, WORKER_SLEEPS
from multienv.errors import MultienvError

# A mask of request numbers: after every 64th the limits are applied. See Supervisor.apply_limits.
SAMPLE = 63
# Seconds that collect_plain() sleeps for workers one by one while nobody sees whether another is lost; see FanOut.
_PATIENCE = 0.01

# What a plain reply means for the episode.
GOES_ON, _ENDS, BEGINS = 0, 1, 2

# Stands for the answer that is not there yet.
MISSING: Any = object()


class StepBuffers:
    """Holds what the hot path touches of one process.

    Args:
        channel: To the process.
        codec: Of its envs.
    """

    __slots__ = (
        "after",
        "elements",
        "encode",
        "heads",
        "meanings",
        "read",
        "records",
        "ring",
        "spins",
        "words",
    )

    def __init__(self, channel: Channel, codec: Codec) -> None:
        segment = channel.segment
        self.words, self.ring, self.spins = segment.words, channel.ring, channel.spins
        self.heads = [bank.head for bank in segment.banks]
        self.records = [bank.record for bank in segment.banks]
        self.encode: Callable[[int, Any], None] = codec.encoder(segment)
        self.elements = codec.elements
        self.read: Callable[[int], Any] = codec.reader(segment)  # the answer; None if it has infos that are pickled
        self.meanings = plain_heads(verbatim=codec.verbatim)
        # The state after each meaning. In a batch the episodes of the others go on.
        self.after = (RUNNING, EPISODE_OVER if codec.verbatim else RUNNING, RUNNING)


def buffers_of(supervisor: Any) -> Any:
    """Return what the hot path touches of a supervisor's process."""
    return StepBuffers(supervisor.channel, supervisor.codec)


def _native_buffers(supervisor: Any) -> Any:
    """Return the native counterpart: one ``Hot`` object with everything that the C loops read."""
    codec, segment, position = supervisor.codec, supervisor.channel.segment, supervisor.position
    shown: list[Any] = [*codec.shown(segment)]
    infos = None if codec.verbatim else [NumberInfos(NO_COLUMNS, b"") for _ in shown]
    if infos is not None:
        shown += [reply.with_extras(Extras(one)) for reply, one in zip(shown, infos, strict=True)]
    takes_integers = codec.verbatim and type(codec.action_space) is Discrete
    parts = position, supervisor.pending, supervisor.maintenance, position.journal, supervisor.answers
    return native.Hot(
        owners=(supervisor, *parts),
        buffers=StepBuffers(supervisor.channel, codec),
        areas=segment.reply_areas,
        slots=codec.slots,
        rewards=codec.layout.rewards,
        shown=shown,
        infos=infos,
        described=described,
        int64=int64 if takes_integers else None,
        head=INT_STEP,
        head_of_int64=INT64_STEP,
    )


def plain_heads(*, verbatim: bool) -> dict[int, int]:
    """Return the first 8 bytes, as integers, of a bank that holds a plain reply, and what each means."""
    tags, rewards = (INT, INT64, *range(ARRAY, ARRAY + len(DTYPES))), range(len(REWARD_TYPES)) if verbatim else (0,)
    heads = {
        STEP | tag << 8 | STEPPED << 16 | flag << 24 | reward << 32: _ENDS if flag else GOES_ON
        for tag in tags
        for flag in (0, ENDED)
        for reward in rewards
    }
    return heads | {RESET | STEPPED << 16: BEGINS} if verbatim else heads


def set_plain_reset(supervisor: Any, waits: bool) -> bool:
    """Make a reset without seed and options the pending request of a single env, if its episode has ended.

    Returns:
        Whether it is, so that the ``Supervisor`` publishes it; not if something else is due first.
    """
    maintenance = supervisor.maintenance
    if supervisor.state is not EPISODE_OVER or maintenance.is_due or maintenance.recycling.wanted:
        return False
    supervisor.reporter.seeds_asked = ()
    supervisor.pending.set_request(PLAIN_RESET, b"", supervisor.pending.limit_of(Kind.RESET))
    supervisor.state = RESETTING if waits else RESETTING_ASYNC
    return True


def send_plain(
    supervisors: Sequence[Any],
    members: Sequence[int],
    done: int,
    actions: Sequence[Any],
    state: State,
    asker: Any,
    nothing: Any = MISSING,
    watched: Watched | None = None,
) -> int:
    """Send steps, up to the first worker that cannot be asked plainly; does not block.

    Args:
        supervisors: Each a ``Supervisor``; of all members.
        members: Which of them, in this order.
        done: How many of ``members`` were sent theirs already.
        actions: One for each supervisor. With ``watched`` one for each of ``members``.
        state: ``STEPPING`` or ``STEPPING_ASYNC``.
        asker: What asked each worker last, as its ``asked_by`` says.
        nothing: The action of a member that is not asked: the caller sees to it.
        watched: Of workers that go at their own pace. One whose process is not watched is not asked plainly.

    Returns:
        The place of the first that was not sent.
    """
    for place in range(done, len(members)):
        member = members[place]
        supervisor, action = supervisors[member], actions[member if watched is None else place]
        if action is nothing:
            return place
        with supervisor.lock:
            buffers = supervisor.buffers  # None: they are made for the first request to a process
            if supervisor.state is not RUNNING or supervisor.asked_by is not asker or buffers is None:
                return place
            if supervisor.maintenance.is_due:
                return place
            number, pending = supervisor.position.number + 1, supervisor.pending
            try:
                buffers.encode(number, action)
            except MultienvError:  # the supervisor raises it once more
                return place
            words = buffers.words
            if watched is not None:
                known: Any = watched.known.get(member)
                if known is not words:
                    return place
                watched.asked[member] = words, number
                words[TRAINER_SLEEPS] = watched.sleeps
            limit = pending.limit = pending.step_limit
            pending.until = None if limit is None else monotonic() + limit
            supervisor.state = state
            words[REQUEST] = number
            if words[WORKER_SLEEPS]:
                buffers.ring(number)
    return len(members)


def collect_plain(  # noqa: C901 - one loop, because each call counts here
    supervisors: Sequence[Any],
    members: Sequence[int] | dict[int, Any],
    answers: Any,
    state: State,
    leaves_ends: bool = False,
) -> bool:
    """Wait for plain answers, of the worker that was asked last first; commit them, and put them into ``answers``.

    A worker alone is waited for until it answers or is lost; of several, one that is slow is left.
    ``recv()`` passes only those that have answered.

    Args:
        supervisors: Each a ``Supervisor``; of all members.
        members: Which of them, in the order in which they were asked.
        answers: Where the answers are put, by member.
        state: That of a worker whose answer may be collected.
        leaves_ends: Leave the answer that ends an episode with its supervisor.

    Returns:
        Whether an answer is left, because it is not plain, or its process is slow or has ended.
    """
    is_left, until = False, None
    for member in reversed(members):
        supervisor = supervisors[member]
        with supervisor.lock:
            buffers, position = supervisor.buffers, supervisor.position
            if supervisor.state is not state or buffers is None:
                is_left = True
                continue
            number = position.number + 1
            words, side = buffers.words, number & 1
            spins = buffers.spins
            if words[REPLY] != number and spins:
                asleep_at = monotonic() + SPIN_SECONDS
                while words[REPLY] != number and spins:
                    give_way()
                    spins = spins - 1 if monotonic() < asleep_at else 0
            if not spins:
                if until is None and len(members) > 1:
                    until = monotonic() + _PATIENCE
                if not supervisor.wait_plain(number, until):
                    is_left = True
                    continue
            meaning = buffers.meanings.get(buffers.heads[side][0])
            if meaning is None or (meaning == BEGINS and words[REQUEST] != number):
                is_left = True
                continue
            answer = buffers.read(number)
            if answer is None:
                answer = supervisor.with_infos(number)
                if answer is None:
                    is_left = True
                    continue
            journal = position.journal
            if journal.recording:
                journal.entries[number] = bytes(buffers.records[side])
            if meaning == BEGINS:
                answer = answer[0], answer[4]
            after = buffers.after[meaning]
            supervisor.last_answer, position.seen, position.number, supervisor.state = answer, number, number, after
            if meaning or supervisor.answers.points_in == number or not number & SAMPLE:
                supervisor.count_plain(answer, number, meaning)
            else:
                position.steps += 1
            if meaning and leaves_ends:
                is_left = True
            else:
                answers[member] = answer
    return is_left


if native is not None and native.follow(globals()):  # the same in native code
    send_plain, collect_plain, buffers_of = native.send_plain, native.collect_plain, _native_buffers
