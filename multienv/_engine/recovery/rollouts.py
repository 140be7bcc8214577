"""Make the caller's answer to a rollout: each reply in it is read like any other, and the results are stacked."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from multienv._engine.processes.channel import Channel
from multienv._engine.recovery.answers import Answers, Reply, Skipped, unreadable
from multienv._engine.recovery.hot_path import GOES_ON, plain_heads
from multienv._engine.recovery.position import Position
from multienv._engine.reports.texts import cause_of, counted
from multienv._engine.sometimes import sometimes
from multienv._engine.wire.banks import ENDED, FAILED, RESET, SKIPPED, STEP, Array, entry_of
from multienv._engine.wire.infos import Extras, Illegible, NumberInfos, numbers_in
from multienv._engine.wire.messages import PLAIN_RESET, Failure, Rollout, RolloutResult, call_user_code
from multienv._engine.wire.rows import batch_of, leaf_spaces, nested, stacked
from multienv._engine.wire.segment import Segment
from multienv.errors import PolicyError

Infos = NumberInfos | list[tuple[int, Any]]  # slot and info of those that have one
_NO_PAYLOAD = b"", b""


@dataclass(slots=True)
class RolloutReply:
    """Holds what a worker answered to a rollout.

    Attributes:
        shown: What the caller then saw last, as ``Position.shown()`` returns it.
        values: Observations, actions, extras, rewards, terminations and truncations, each a stack: the first axis is
            that of the steps, the second that of the slots; of a single env there is no second one. What has no array
            of a fixed shape is a list with an item for each step. Observations have one step more, those after the
            last. ``None``: they cannot be read here.
        infos: Of each step in which some slot has an info.
        errors: What the envs have raised, by slot; the first of each.
        truncated_errors: Slot and error of what ``on_error="truncate"`` made a truncation of.
        failure: What the policy raised; ``None``: nothing.
        steps: How many steps were made.
        entries: The journal entries of all requests.
        ends: Requests in which episodes of several envs ended, or a single env began one: how many steps were made
            before, number of the request, slots.
        replay_points: Number of a request, and the generators of the slots that were reset in it, as
            ``Extras.generators``.
        is_over: No episode of a single env is running.
        is_legible: All that there are values of can be unpickled here.
    """

    shown: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] | None = None
    infos: dict[int, Infos] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    truncated_errors: list[tuple[int, Exception]] = field(default_factory=list)
    failure: Failure | None = None
    steps: int = 0
    entries: list[bytes] = field(default_factory=list)
    ends: list[tuple[int, int, Sequence[int]]] = field(default_factory=list)
    replay_points: list[tuple[int, Mapping[int, bytes]]] = field(default_factory=list)
    is_over: bool = False
    is_legible: bool = True

    @property
    def answer(self) -> RolloutReply | PolicyError:
        """Return what the caller gets."""
        return self if self.failure is None else policy_error(self.failure, self.steps)


class RolloutReader:
    """Reads what a worker answered to a rollout.

    Args:
        answers: Reads the replies of the worker.
        position: Of the worker.
    """

    def __init__(self, answers: Answers, position: Position) -> None:
        self._scratch = Position(position.build, position.journal)  # what the caller has seen so far within the rollout
        self._answers, self._codec = answers.for_position(self._scratch), answers.codec
        self._aside = Segment(-1)  # until all is read and journalled, the worker's own shows what the caller saw last
        codec = self._codec
        self._aside.lay_out(codec.layout)
        # Of replies that hold all there is to tell. That to a step which ended the episode of a single env does not.
        self._plain = {
            head
            for head, meaning in plain_heads(verbatim=codec.verbatim).items()
            if meaning == GOES_ON or not codec.verbatim
        }
        # Arrays of a batch in a bank; what has none is read step by step.
        self._leaves = leaf_spaces(codec.space) if codec.has_rows else []
        self._show = codec.shown(self._aside)

    def read_reply(self, channel: Channel, first: int, message: Rollout, skipped: Skipped) -> RolloutReply:
        """Read the answer of a process; see :meth:`read_result`. Raises ``Gone`` if it cannot be decoded."""
        try:
            result = call_user_code(partial(pickle.loads, channel.segment.read_reply_payload(first)), Illegible)
        except Illegible as illegible:
            sometimes("the reply to a rollout is unreadable")
            raise channel.kill(cause="broken", detail=str(illegible)) from illegible
        if not isinstance(result, RolloutResult):
            raise channel.kill(cause="broken", detail=f"it answered a rollout by {result!r:.1000}")
        return self.read_result(first, message, result, skipped)

    def read_result(self, first: int, message: Rollout, result: RolloutResult, skipped: Skipped) -> RolloutReply:
        """Return the reply.

        Args:
            first: Number of the first request.
            message: What was asked.
            result: What was answered; truncations are laid over its banks.
            skipped: The slots that took no part in the first step, or in any, and why.
        """
        scratch, answers, aside = self._scratch, self._answers, self._aside
        reply = RolloutReply(failure=result.failure)
        scratch.set_shown(aside, message.shown)
        answers.points_in = 0
        shown = [self._legible(reply, self._first)]
        memory, size = memoryview(result.banks), aside.layout.size
        add, number = self._add_one if self._codec.verbatim else self._add_rows, first
        for index in range(len(memory) // size):
            number = first + index
            view, (request_payload, payload) = memory[index * size :][:size], result.payloads.get(index, _NO_PAYLOAD)
            bank = aside.banks[number & 1]
            bank.view[:] = view
            infos = numbers_in(payload) if payload else None
            if bank.head[0] in self._plain and (infos is not None or not payload):
                if infos is not None:
                    reply.infos[reply.steps] = infos
                if self._codec.verbatim:
                    shown.append(self._show[number & 1]())
                reply.entries.append(bytes(bank.record))
                reply.steps += 1
                scratch.seen = number
                continue
            aside.write_reply_payload(number, payload)
            read = answers.read_raw(aside, number)
            reply.entries.append(entry_of(bank, request_payload, read.evidence))
            add(read, skipped, reply, shown)
            scratch.seen, scratch.pickled_rows = read.seen, read.pickled_rows
            if answers.points_in == number:
                reply.replay_points += answers.points
            if read.seen != number:  # it shows nothing: what was seen last is seen once more
                scratch.set_shown(aside, {**scratch.shown(aside), "seen": number})
                bank.rewards[:], bank.terminated[:], bank.truncated[:] = 0.0, False, True
            view[:] = bank.view
        reply.shown = {**scratch.shown(aside), "seen": number}
        self._finish(first, result, reply, shown)
        return reply

    def _first(self) -> Any:
        """Return what was seen before the first step: an observation or batch; of rows the arrays of their leaves."""
        seen = self._answers.shown(self._aside)
        if self._codec.verbatim or self._leaves:
            return seen
        return batch_of(self._codec.space, [pickle.loads(one) for one in seen])

    def _legible(self, reply: RolloutReply, run: Callable[[], Any]) -> Any:
        """Return what ``run`` unpickles; ``None``, and the reply has no values, if that cannot be done here."""
        try:
            return call_user_code(run, Illegible)
        except Illegible as illegible:
            error = unreadable("rollout", illegible)
            reply.errors = dict.fromkeys(range(self._codec.slots), error) | reply.errors
            reply.is_legible = False
            return None

    # --- one request ------------------------------------------------------------------------------

    def _add_rows(self, read: Reply, skipped: Skipped, reply: RolloutReply, shown: list[Any]) -> None:
        """Read a step of several envs, which lies in its bank."""
        aside, codec, step = self._aside, self._codec, reply.steps
        bank = aside.banks[read.number & 1]
        answer: Any = self._answers.step_answer(aside, read, [one for one in skipped if bank.skipped[one[0]]])
        if isinstance(answer, Exception):  # nothing was stepped
            reply.errors = dict.fromkeys(range(codec.slots), answer) | reply.errors
            return
        extras = answer.extras or Extras()
        infos: Any = extras.infos
        observations: Any = extras.observations
        failed = {slot: error for slot, error in answer.errors.items() if bank.failed[slot]}
        if failed:  # their next episodes belong to the fragment
            bank.truncated[list(failed)] = True
            by_slot = dict(infos)
            for slot, error in failed.items():
                final_info = {"multienv": self._answers.truncation_info(str(error))}
                by_slot[slot] = {**by_slot.get(slot, {}), **final_info}
                if self._answers.same_step:
                    last = observations[slot] if observations else codec.row(aside, read.number, slot)
                    by_slot[slot] |= {"final_obs": last, "final_info": final_info}
            infos = sorted(by_slot.items())
        reply.errors = answer.errors | reply.errors
        reply.truncated_errors += read.truncated_errors.items()
        reply.steps += 1
        if infos:
            reply.infos[step] = infos
        if observations and any(observations[slot] is None for slot in answer.errors.keys() - failed.keys()):
            reply.is_legible = False
        elif observations:
            shown.append(batch_of(codec.space, observations))

    def _add_one(self, read: Reply, skipped: Skipped, reply: RolloutReply, shown: list[Any]) -> None:
        """Read a step of a single env, or the reset that followed one, which lies in its bank."""
        answers, aside, step = self._answers, self._aside, reply.steps
        view = aside.banks[read.number & 1].view
        begins, failed = view[0] == RESET, view[2] == FAILED
        if view[1] & SKIPPED:
            answer: Any = answers.truncation(aside, skipped)
        elif begins:
            answer = self._legible(reply, partial(answers.reset_answer, aside, read, PLAIN_RESET, ()))
        else:
            answer = self._legible(reply, partial(answers.step_answer, aside, read, ()))
        if failed and self._answers.truncates and not begins:
            reply.truncated_errors.append((0, answer))
        elif failed:
            reply.errors.setdefault(0, answer)
        if failed:
            answer = answers.truncation(aside, ((0, str(answer)),))
        observation, *_, info = answer or (None, {})
        if begins:
            reply.is_over = failed
            if not failed:
                ((_, ending),) = reply.infos[step - 1]
                reply.infos[step - 1] = [(0, {**info, **ending})]
                reply.ends.append((step, read.number, (0,)))
                shown[-1] = observation
            return
        truncation: dict[str, Any] = info if read.seen != read.number else {}
        reply.is_over = bool(truncation or view[3] & ENDED)
        if reply.is_over:
            info = {"final_obs": observation, "final_info": info, **truncation}
        if info:
            reply.infos[step] = [(0, info)]
        reply.steps += 1
        shown.append(observation)

    # --- all of them ------------------------------------------------------------------------------

    def _finish(self, first: int, result: RolloutResult, reply: RolloutReply, shown: list[Any]) -> None:
        """Put the steps together; ``shown`` are the observations, or of rows the first ones."""
        codec, layout, steps = self._codec, self._aside.layout, reply.steps
        is_step = self._stack(result, 0, np.uint8) == STEP
        rewards, terminated, truncated = (
            self._stack(result, offset, dtype, (codec.slots,))[is_step][:steps]
            for offset, dtype in (
                (layout.rewards, np.float64),
                (layout.terminated, np.bool_),
                (layout.truncated, np.bool_),
            )
        )
        if not codec.verbatim:
            ended = terminated | truncated
            for step in np.flatnonzero(ended.any(axis=1)).tolist():
                reply.ends.append((step, first + step, np.flatnonzero(ended[step]).tolist()))
        stacks: dict[str, Any] = {"rewards": rewards, "terminations": terminated, "truncations": truncated}
        chosen = self._legible(reply, partial(pickle.loads, result.chosen)) if result.chosen else None
        if chosen is None or not reply.is_legible:
            return
        if codec.verbatim:
            stacks = {name: stack[:, 0] for name, stack in stacks.items()}
        if self._leaves:
            leaves = []
            for before, leaf, offset in zip(shown[0], self._leaves, layout.leaves, strict=True):
                after = self._stack(result, offset, leaf.dtype, before.shape)
                leaves.append(np.concatenate([before[None], after[:steps]]))
            stacks["observations"] = nested(codec.space, leaves)
        else:
            stacks["observations"] = stacked(codec.space, shown)
        reply.values = {**stacks, **chosen}

    def _stack(self, result: RolloutResult, offset: int, dtype: Any, shape: tuple[int, ...] = ()) -> Array:
        """Return the array that lies at this offset in each bank, over their memory."""
        size = self._aside.layout.size
        bank = np.dtype({"names": ["it"], "formats": [(dtype, shape)], "offsets": [offset], "itemsize": size})
        return np.ndarray(len(result.banks) // size, bank, result.banks)["it"]  # type: ignore[no-any-return]


def policy_error(failure: Failure, steps: int) -> PolicyError:
    """Return the error that says that a policy raised, or returned what are no actions, after so many steps."""
    done = f"{counted(steps, 'step') if steps else 'No step'} {'was' if steps < 2 else 'were'}"
    error = PolicyError(
        f"rollout(): the policy raised {failure.type_name}: {failure.text}\n{done} made before that, and not "
        "returned. The envs are in the state after them, and all episodes go on: call rollout() with a fixed policy, "
        "or reset()."
    )
    error.remote_traceback, error.__cause__ = failure.traceback, cause_of(failure)
    return error
