"""Steps the envs of a worker: what each returns is written into its row of a bank, and into the payload if need be.

Rows of a batch are *cast* to its dtype; the row of a single env is *verbatim*: see ``worker.cells``. Observations are
copied, and infos copied or pickled, as soon as an env returns them: some envs return the same array at each step. An
env of a batch that raises, and any env that the request skips, gets a blank row; the trainer then decides what the
caller sees. If a single env raises, its exception is the answer to the request.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
from gymnasium.vector import utils

from multienv._engine.native import native
from multienv._engine.wire.actions import action_decoder
from multienv._engine.wire.banks import (
    BEGUN,
    ENDED,
    LEFT_ALONE,
    LENGTH,
    NOT_RESET,
    PICKLED_ROWS,
    RAISED,
    SKIPPED,
    STEP,
    STEPPED,
    Bank,
)
from multienv._engine.wire.codecs import REWARD_TAGS
from multienv._engine.wire.digests import MARK, digester, evidence_of, pack_evidence
from multienv._engine.wire.infos import InfoPacker
from multienv._engine.wire.messages import Failure, Reset
from multienv._engine.wire.rows import ARRAYS
from multienv._engine.wire.segment import BUSY, REPLY_PAYLOAD, SLOT, Segment
from multienv._engine.worker.cells import Cast, Verbatim
from multienv._engine.worker.env_group import EnvGroup
from multienv._engine.worker.replies import answer, answer_failure, failure_of, pickled, wrong_result

# Executes a request. Host.handle says what it returns.
Handle = Callable[[int], Any]
Infos = list[tuple[int, Any]]  # slot and info: a dict of numbers, or the pickle of anything else
Failures = dict[int, Failure]

_STEP_RESULT = "observation, reward, terminated, truncated, info"
# Rewards of a single env that native code, and the loop below, write by themselves, and their tags.
_PLAIN_REWARDS = {kind: REWARD_TAGS[kind] for kind in (float, np.float64)}


class Stepper:
    """Steps the envs of a worker and writes what they return.

    Args:
        group: Holds the envs.
        segment: With banks that are laid out for them.
    """

    def __init__(self, group: EnvGroup, segment: Segment) -> None:
        self._group, self._segment = group, segment
        self._decode = action_decoder(group.codec.asked_space, segment)
        self._packer = InfoPacker(group.slots)
        self._replies = [_Reply(group, bank) for bank in segment.banks]

    def compile(self, otherwise: Handle) -> Handle:  # noqa: C901 - see below
        """Return the function that executes any request.

        One loop for every kind of env, because each call, and each object that it touches, counts here.

        Args:
            otherwise: Executes a request that is not a step.
        """
        segment, group, rest, finish, decode = self._segment, self._group, self._rest, self._finish, self._decode
        space = group.codec.asked_space
        is_array = type(space) in ARRAYS
        words, calls, ndarray, tags, verbatim = segment.words, group.calls, np.ndarray, _PLAIN_REWARDS, group.verbatim
        slots, marks = range(group.slots), range(1, group.slots + 1)
        targets: list[tuple[Any, ...]] = [
            (reply, reply.bank.view, reply.rows.cells, reply.bank.rewards.data, reply.digest) for reply in self._replies
        ]
        rows = self._replies[0].rows
        key, taken, generators = rows.key, rows.copied_info, group.replay_points.generators

        def handle(number: int) -> Any:  # noqa: C901
            reply, view, cells, rewards, digest = targets[number & 1]
            if view[0] != STEP:
                return otherwise(number)
            words[BUSY] = number
            infos: Infos = []
            failures: Failures = {}
            reply.clear_flags()
            try:
                tag = view[1]
                asked = self._calls_without(reply) if tag & SKIPPED else calls
                if not verbatim:
                    actions = decode(number, tag & ~SKIPPED)
                    if not is_array:
                        actions = utils.iterate(space, actions)
                else:  # an action that is skipped is not even unpickled: it may be what ends each process
                    actions = (None if tag & SKIPPED else decode(number, tag),)
                for slot, mark, call, action, cell in zip(slots, marks, asked, actions, cells, strict=True):
                    words[SLOT] = mark
                    try:
                        result = call(action)
                        try:
                            observation, reward, terminated, truncated, info = result
                            goes_on = not (terminated or truncated)
                            if verbatim:
                                tag = tags.get(type(reward), -1)
                                goes_on = terminated is truncated is False and type(observation) is ndarray and tag >= 0
                                if tag > 0:
                                    view[4] = tag
                            if goes_on:
                                rewards[slot] = reward
                                cell[key] = observation
                        except (TypeError, ValueError):
                            goes_on = False
                        if not goes_on:
                            info = rest(reply, slot, result)
                        if info:
                            infos.append((slot, taken(info)))
                    except Exception as error:
                        if verbatim and not isinstance(error, _SkippedError):
                            raise
                        self._note_error(reply, slot, error, infos, failures)
                if infos or failures or generators or reply.flags & PICKLED_ROWS:
                    finish(number, reply, infos, failures)
                else:
                    if reply.flags:
                        view[3] = reply.flags
                    if digest is not None:
                        digest()
                    if words[REPLY_PAYLOAD + (number & 1)]:
                        words[REPLY_PAYLOAD + (number & 1)] = 0
            except Exception as error:
                answer_failure(segment, number, error)
            words[SLOT] = 0
            words[BUSY] = 0
            return None

        if native is None or rows.pickled_rows is not None or not (verbatim or is_array):
            return handle
        return native.Step(  # type: ignore[no-any-return]
            reference=handle,
            rest=rest,
            note_error=self._note_error,
            finish=finish,
            fail=partial(answer_failure, segment),
            write_payload=segment.write_reply_payload,
            take_info=taken,
            generators=generators,
            words=words,
            calls=calls,
            decode=decode,
            packer=self._packer,
            is_verbatim=verbatim,
            sides=tuple(
                (bank, area, reply.rows.whole, reply.rows.cells, key, reply.digest, reply)
                for bank, area, reply in zip(segment.banks, segment.reply_areas, self._replies, strict=True)
            ),
        )

    def reset(self, number: int, message: Reset) -> None:
        """Execute a reset of the slots that are named and not skipped. Raises what a single env raises."""
        group, reply = self._group, self._replies[number & 1]
        infos: Infos = []
        failures: Failures = {}
        reply.clear_flags()
        for slot in range(group.slots):
            is_skipped = reply.bank.view[1] & SKIPPED and reply.bank.skipped[slot]
            if is_skipped or not message.touches(slot):
                if is_skipped:
                    group.end(slot)
                reply.blank(slot)
                continue
            try:
                observation, info = group.reset(slot, seed=message.seeds[slot], options=message.options[slot])
                self._write_reset(reply, slot, observation, info, infos)
            except Exception as error:
                if group.verbatim:
                    raise
                self._note_failure(reply, slot, failure_of(error), failures)
        self._finish(number, reply, infos, failures)

    def _write_reset(self, reply: _Reply, slot: int, observation: Any, info: Any, infos: Infos) -> None:
        """Write what a reset returned."""
        reply.rows.write_reward(slot, 0.0, False, False)
        reply.write_observation(slot, observation)
        if info:
            infos.append((slot, reply.rows.copied_info(info)))

    # --- ends and errors --------------------------------------------------------------------------

    def _rest(self, reply: _Reply, slot: int, result: Any) -> Any:
        """Write what an env returned that ends its episode, or is of other types than most; return the info."""
        try:
            observation, reward, terminated, truncated, info = result
        except (TypeError, ValueError):
            raise wrong_result("step", _STEP_RESULT, result) from None
        reply.rows.write_reward(slot, reward, terminated, truncated)
        if terminated or truncated:
            reply.set_end(slot, terminated, truncated)
            observation, info = self._end(reply, slot, result)
        reply.write_observation(slot, observation)
        return info

    def _end(self, reply: _Reply, slot: int, result: tuple[Any, ...]) -> tuple[Any, Any]:
        """Note that an episode has ended with what ``step`` returned; return observation and info for the caller."""
        self._group.end(slot)
        observation, reward, terminated, truncated, info = result
        if self._group.autoreset != "SAME_STEP":
            return observation, info
        assert reply.bank.finals is not None
        reply.bank.finals[slot] = int.from_bytes(evidence_of(observation)[: len(MARK)], "little")
        data = pickled("step", (observation, reward, bool(terminated), bool(truncated), info))
        final_observation, _, _, _, final_info = pickle.loads(data)  # the env may change its own in reset()
        try:
            observation, info = self._group.reset(slot)
        except Exception as error:
            raise _ResetRaisedError(data) from error
        return observation, {"final_obs": final_observation, "final_info": final_info, **(info or {})}

    def _calls_without(self, reply: _Reply) -> list[Callable[[Any], Any]]:
        """Return what a step calls for each slot, where those that are skipped are not stepped."""
        pairs = zip(self._group.calls, reply.bank.skipped.tolist(), strict=True)
        return [partial(_be_skipped, skipped) if skipped else call for call, skipped in pairs]

    def _note_error(self, reply: _Reply, slot: int, error: Exception, infos: Infos, failures: Failures) -> None:
        """Answer by a blank row for an env that raised in a step, which ends its episode, or is skipped in it."""
        group = self._group
        if isinstance(error, _SkippedError):
            reply.blank(slot)
            if error.args == (LEFT_ALONE,):
                return
            group.end(slot)
            if error.args == (NOT_RESET,):
                return
        elif isinstance(error, _ResetRaisedError):
            assert error.__cause__ is not None
            failure = replace(failure_of(error.__cause__), returned=error.args[0])
            self._note_failure(reply, slot, failure, failures)
            return
        else:
            self._note_failure(reply, slot, failure_of(error), failures)
            if not group.truncates_errors:
                return
            reply.set_end(slot, False, True)
        if group.autoreset == "SAME_STEP" or error.args == (BEGUN,):
            try:
                self._write_reset(reply, slot, *group.reset(slot), infos)
            except Exception as again:
                self._note_failure(reply, slot, failure_of(again), failures)

    def _note_failure(self, reply: _Reply, slot: int, failure: Failure, failures: Failures) -> None:
        self._group.end(slot)
        reply.blank(slot)
        reply.flags |= RAISED
        reply.bank.failed[slot] = True
        failures[slot] = failure

    # --- replies ----------------------------------------------------------------------------------

    def _finish(self, number: int, reply: _Reply, infos: Infos, failures: Failures) -> None:
        """Write head and payload of a reply that is not plain, once the rows are written."""
        self._segment.words[SLOT] = 0
        if reply.digest is not None:
            reply.digest()
        generators, spaces = self._group.replay_points.pop_generators(), self._group.pop_new_spaces()
        first = rest = b""
        if reply.flags & PICKLED_ROWS:
            evidence = pack_evidence(reply.rows.evidence)
            first = LENGTH.pack(len(evidence)) + evidence + pickle.dumps(reply.rows.pickled_rows, protocol=5)
        is_plain = not failures and not generators and not spaces
        if infos and is_plain:
            rest = self._packer.numbers(infos)
        if not rest and (infos or not is_plain):
            taken = [(slot, info if type(info) is bytes else pickled("step", info)) for slot, info in infos]
            rest = pickle.dumps((taken, failures, generators, spaces), protocol=5)
        payload, tag = first + rest, reply.bank.view[4]
        answer(self._segment, number, STEPPED, payload, flags=reply.flags, tag=tag, pickled_part=len(first))


class _Reply:
    """Writes the rows and flags of a reply into one of the two banks.

    Attributes:
        rows: Writes observations and rewards.
        flags: Of the reply, as far as they are known.
        digest: Computes the digests, if this bank has them; else ``None``.
    """

    __slots__ = ("_flags", "_least", "_unset", "bank", "digest", "flags", "rows")

    def __init__(self, group: EnvGroup, bank: Bank) -> None:
        self.bank = bank
        self.rows: Cast | Verbatim = (Verbatim if group.verbatim else Cast)(group.observation_space, bank)
        self.flags = self._least = 0 if self.rows.pickled_rows is None else PICKLED_ROWS
        self.digest: Callable[[], None] | None = None
        if bank.digests is not None:
            self.digest = digester(bank.digests, self.rows.leaves)
        layout = bank.layout
        self._flags = bank.view[layout.terminated : layout.shown]
        self._unset = bytes(layout.shown - layout.terminated)

    def write_observation(self, slot: int, observation: Any) -> None:
        """Write an observation, whatever it is."""
        self.rows.write_observation(slot, observation)
        if self.rows.pickled_rows is not None:
            self.flags |= PICKLED_ROWS

    def blank(self, slot: int) -> None:
        """Write the row of an env that has nothing to show: zeros."""
        self.bank.terminated[slot] = self.bank.truncated[slot] = False
        self.rows.blank(slot)

    def set_end(self, slot: int, terminated: Any, truncated: Any) -> None:
        """Set the flags of an env whose episode has ended."""
        self.flags |= ENDED
        self.bank.terminated[slot], self.bank.truncated[slot] = terminated, truncated

    def clear_flags(self) -> None:
        """Unset flags and final digests of all envs: an earlier request, or the trainer, may have set some."""
        self._flags[:] = self._unset
        self.flags = self._least


class _SkippedError(Exception):
    """An env does not take part in a step; its argument says how (see ``wire.banks``). Caught by the step."""


class _ResetRaisedError(Exception):
    """Says that the reset in the same step raised; its argument is what ``step()`` had returned, pickled."""


def _be_skipped(skipped: int, action: Any) -> NoReturn:
    raise _SkippedError(skipped)
