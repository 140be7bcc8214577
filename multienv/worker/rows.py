"""The worker's half of the rows codec: several envs, each of which writes into its row of a batch.

Observations are copied as soon as an env returns them (some return the same array at each step), and infos are taken
as they are at that moment. An env that raises, or is skipped in the request, gets a blank row: what its caller sees
is the trainer's to say.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
from gymnasium import spaces
from gymnasium.vector import utils

from multienv.native import native
from multienv.wire.actions import action_decoder
from multienv.wire.banks import ENDED, IRREGULAR, NOT_RESET, RAISED, SKIPPED, STEP, Bank
from multienv.wire.digests import MARK, digester, evidence_of, pack_evidence
from multienv.wire.infos import NUMBERS, InfoPacker
from multienv.wire.messages import Failure, Reset
from multienv.wire.rows import Cell, cells, has_rows, leaf_arrays, nested, row_writer
from multienv.wire.segment import BUSY, REPLY_PAYLOAD, SLOT, Segment
from multienv.worker.env_group import EnvGroup
from multienv.worker.exact import STEP_RESULT, Handle
from multienv.worker.failures import failure_of, pickled, wrong_info, wrong_result, wrong_reward
from multienv.worker.replies import answer_failure, answer_rows

Infos = list[tuple[int, Any]]  # slot and info: a dict of numbers, or the pickle of anything else
Failures = dict[int, Failure]

# Characters of the types of numpy whose items a memoryview can be assigned.
_ITEMS = "?bBhHiIlLqQfd"
_WHOLE = slice(None)


class RowsStepper:
    """Steps several envs and writes what they return.

    Args:
        group: Holds the envs.
        segment: With banks that are laid out for them.
    """

    def __init__(self, group: EnvGroup, segment: Segment) -> None:
        self._group, self._segment = group, segment
        self._batch_space = utils.batch_space(group.action_space, group.slots)
        self._is_array = type(self._batch_space) in (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)
        self._decode = action_decoder(self._batch_space, segment)
        self._packer = InfoPacker(group.slots)
        self._sides = [_Side(group, bank) for bank in segment.banks]

    def compile(self, otherwise: Handle) -> Handle:  # noqa: C901 - see below
        """Return the function that executes any request; see :meth:`ExactStepper.compile`.

        One loop for every kind of env, because each call, and each object that it touches, counts here.
        """
        segment, group, decode, rest, finish = self._segment, self._group, self._decode, self._rest, self._finish
        words, calls, is_array, batch_space = segment.words, group.calls, self._is_array, self._batch_space
        slots, marks = range(group.slots), range(1, group.slots + 1)
        targets: list[tuple[Any, ...]] = [
            (side, side.bank.view, side.cells, side.rewards, side.digest) for side in self._sides
        ]
        key, is_loose = self._sides[0].key, self._sides[0].loose is not None
        told = group.starts.told

        def handle(number: int) -> Any:  # noqa: C901
            side, view, cells, rewards, digest = targets[number & 1]
            if view[0] != STEP:
                return otherwise(number)
            words[BUSY] = number
            infos: Infos = []
            failures: Failures = {}
            side.clear_flags()
            try:
                actions = decode(number, view[1] & ~SKIPPED)
                if not is_array:
                    actions = utils.iterate(batch_space, actions)
                asked = self._calls_without(side) if view[1] & SKIPPED else calls
                for slot, mark, call, action, cell in zip(slots, marks, asked, actions, cells, strict=True):
                    words[SLOT] = mark
                    try:
                        result = call(action)
                        try:
                            observation, reward, terminated, truncated, info = result
                            goes_on = not (terminated or truncated)
                            if goes_on:
                                rewards[slot] = reward
                                cell[key] = observation
                        except (TypeError, ValueError):
                            goes_on = False
                        if not goes_on:
                            info = rest(side, slot, result)
                        if info:
                            infos.append((slot, _taken(info)))
                    except Exception as error:
                        self._note_error(side, slot, error, infos, failures)
                if infos or failures or is_loose or told:
                    finish(number, side, infos, failures)
                else:
                    if side.flags:
                        view[3] = side.flags
                    if digest is not None:
                        digest()
                    if words[REPLY_PAYLOAD + (number & 1)]:
                        words[REPLY_PAYLOAD + (number & 1)] = 0
            except Exception as error:
                answer_failure(segment, number, error)
            words[SLOT] = 0
            words[BUSY] = 0
            return None

        if native is None or not is_array or is_loose:
            return handle
        return native.RowsStep(  # type: ignore[no-any-return]
            reference=handle,
            rest=rest,
            note_error=self._note_error,
            finish=finish,
            fail=partial(answer_failure, segment),
            write_payload=segment.write_reply_payload,
            take_info=_taken,
            told=told,
            words=words,
            calls=calls,
            decode=decode,
            packer=self._packer,
            sides=tuple(
                (bank, place, side.whole, side.cells, side.key, side.digest, side)
                for bank, place, side in zip(segment.banks, segment.reply_places, self._sides, strict=True)
            ),
        )

    def reset(self, number: int, message: Reset) -> None:
        """Execute a reset of the slots that are named and not skipped."""
        group, side = self._group, self._sides[number & 1]
        infos: Infos = []
        failures: Failures = {}
        side.clear_flags()
        side.bank.rewards[:] = 0.0
        for slot in range(group.slots):
            is_skipped = side.bank.view[1] & SKIPPED and side.bank.skipped[slot]
            if is_skipped or not message.touches(slot):
                if is_skipped:
                    group.end(slot)
                side.blank(slot)
                continue
            try:
                observation, info = group.begin(slot, seed=message.seeds[slot], options=message.options[slot])
                side.write(slot, observation)
                if info:
                    infos.append((slot, _taken(info)))
            except Exception as error:
                self._note_failure(side, slot, failure_of(error), failures)
        self._finish(number, side, infos, failures)

    # --- ends and errors --------------------------------------------------------------------------

    def _rest(self, side: _Side, slot: int, result: Any) -> Any:
        """Write what an env returned that ends its episode, or is of other types than most; return the info."""
        try:
            observation, reward, terminated, truncated, info = result
        except (TypeError, ValueError):
            raise wrong_result("step", STEP_RESULT, result) from None
        try:
            side.rewards[slot] = reward
        except (TypeError, ValueError):
            raise wrong_reward(reward) from None
        if terminated or truncated:
            side.note_end(slot, terminated, truncated)
            observation, info = self._end(side, slot, result)
        try:
            side.cells[slot][side.key] = observation
        except (TypeError, ValueError):
            side.write(slot, observation)  # it may fit all the same
        return info

    def _end(self, side: _Side, slot: int, result: tuple[Any, ...]) -> tuple[Any, Any]:
        """Note that an episode has ended with what ``step`` returned; return observation and info for the caller."""
        self._group.end(slot)
        observation, reward, terminated, truncated, info = result
        if self._group.autoreset != "SAME_STEP":
            return observation, info
        side.note_final(slot, observation)
        data = pickled("step", (observation, reward, bool(terminated), bool(truncated), info))
        final_observation, _, _, _, final_info = pickle.loads(data)  # the env may change its own in reset()
        try:
            observation, info = self._group.begin(slot)
        except Exception as error:
            raise _ResetRaisedError(data) from error
        return observation, {"final_obs": final_observation, "final_info": final_info, **(info or {})}

    def _calls_without(self, side: _Side) -> list[Callable[[Any], Any]]:
        """Return what a step calls for each slot, where those that are skipped are not stepped."""
        pairs = zip(self._group.calls, side.bank.skipped.tolist(), strict=True)
        return [partial(_be_skipped, skipped) if skipped else call for call, skipped in pairs]

    def _note_error(self, side: _Side, slot: int, error: Exception, infos: Infos, failures: Failures) -> None:
        """Answer for an env that raised in a step, or is skipped in it: its episode ends with a blank row."""
        group = self._group
        if isinstance(error, _SkippedError):
            group.end(slot)
            side.blank(slot)
            if error.args == (NOT_RESET,):
                return
        elif isinstance(error, _ResetRaisedError):
            assert error.__cause__ is not None
            failure = replace(failure_of(error.__cause__), returned=error.args[0])
            self._note_failure(side, slot, failure, failures)
            return
        else:
            self._note_failure(side, slot, failure_of(error), failures)
            if not group.truncates_errors:
                return
            side.note_end(slot, False, True)
        if group.autoreset == "SAME_STEP":
            try:
                observation, info = group.begin(slot)
                side.write(slot, observation)
                if info:
                    infos.append((slot, _taken(info)))
            except Exception as again:
                self._note_failure(side, slot, failure_of(again), failures)

    def _note_failure(self, side: _Side, slot: int, failure: Failure, failures: Failures) -> None:
        self._group.end(slot)
        side.blank(slot)
        side.note_failure(slot)
        failures[slot] = failure

    # --- replies ----------------------------------------------------------------------------------

    def _finish(self, number: int, side: _Side, infos: Infos, failures: Failures) -> None:
        """Write head and payload of a reply that is not plain, once the rows are written."""
        self._segment.words[SLOT] = 0
        if side.digest is not None:
            side.digest()
        irregular = b"" if side.loose is None else pickle.dumps(side.loose, protocol=5)
        evidence = b"" if side.loose is None else pack_evidence(side.evidence)
        answer_rows(
            self._segment,
            number,
            self._packer,
            infos,
            flags=side.flags | (IRREGULAR if irregular else 0),
            evidence=evidence,
            irregular=irregular,
            failures=failures,
            generators=self._group.starts.take(),
        )


class _Side:
    """One of the two banks: where the envs' observations, rewards and flags go.

    Attributes:
        cells, key: ``cells[slot][key] = observation`` writes an observation, or raises TypeError or ValueError though
            it may fit all the same: :meth:`write` decides.
        whole: All observations, where they are arrays of one or more dimensions; else ``None``.
        rewards: What rewards are assigned to.
        flags: Those of the reply, as far as they are known.
        loose: Where observations have no rows: each of them pickled, ``None`` for a blank one. Else ``None``.
        evidence: Where observations have no rows: a digest of each, ``b""`` for a blank one.
        digest: Computes the digests, where observations are digested.
    """

    __slots__ = (
        "_flags",
        "_leaves",
        "_unset",
        "bank",
        "cells",
        "digest",
        "evidence",
        "flags",
        "key",
        "loose",
        "rewards",
        "whole",
        "write",
    )

    def __init__(self, group: EnvGroup, bank: Bank) -> None:
        self.bank = bank
        self.rewards = bank.rewards.data
        self.whole: Any = None
        self.flags = 0
        self.loose: list[bytes | None] | None = None
        self.evidence = [b""] * group.slots
        self.digest: Callable[[], None] | None = None
        self.key: Any = _WHOLE
        self.write: Callable[[int, Any], None]
        self._leaves: list[Any] = []
        layout = bank.layout
        self._flags = bank.view[layout.terminated : layout.shown]
        self._unset = bytes(layout.shown - layout.terminated)
        space = group.observation_space
        if not has_rows(space):
            self.loose = [None] * group.slots
            self.write = self._keep
            self.cells: list[Any] = [Cell(self._keep, slot) for slot in range(group.slots)]
            return
        self._leaves = leaf_arrays(space, bank)
        tree = nested(space, self._leaves)
        self.write = row_writer(tree)
        if isinstance(tree, np.ndarray) and tree.ndim == 1 and tree.dtype.isnative and tree.dtype.char in _ITEMS:
            self.cells, self.key = [tree[slot : slot + 1].data for slot in range(group.slots)], 0
        else:
            self.cells = cells(tree, group.slots)
            self.whole = tree if isinstance(tree, np.ndarray) and tree.ndim > 1 else None
        if bank.digests is not None:
            self.digest = digester(bank.digests, self._leaves)

    def _keep(self, slot: int, observation: Any) -> None:
        assert self.loose is not None
        self.loose[slot] = pickled("step", observation)
        self.evidence[slot] = evidence_of(observation)

    def blank(self, slot: int) -> None:
        """Write the row of an env of which there is nothing to tell."""
        self.bank.rewards[slot] = 0.0
        self._flags[slot] = self._flags[len(self.cells) + slot] = 0
        if self.loose is not None:
            self.loose[slot], self.evidence[slot] = None, b""
        for leaf in self._leaves:
            leaf[slot] = 0

    def note_end(self, slot: int, terminated: Any, truncated: Any) -> None:
        """Set the flags of an env whose episode has ended."""
        self.flags |= ENDED
        self.bank.terminated[slot], self.bank.truncated[slot] = terminated, truncated

    def note_final(self, slot: int, observation: Any) -> None:
        """Write a digest of an observation that ended an episode, if the next one begins in the same step."""
        assert self.bank.finals is not None
        self.bank.finals[slot] = int.from_bytes(evidence_of(observation)[: len(MARK)], "little")

    def note_failure(self, slot: int) -> None:
        """Set the flag of an env that has raised."""
        self.flags |= RAISED
        self.bank.failed[slot] = True

    def clear_flags(self) -> None:
        """Unset flags and final digests of all envs: an earlier request, or the trainer, may have set some."""
        self._flags[:] = self._unset
        self.flags = 0


class _SkippedError(Exception):
    """An env does not take part in a step; its argument says how (see ``wire.banks``). Caught by the step."""


class _ResetRaisedError(Exception):
    """The reset in the same step raised; its argument is what ``step()`` had returned, pickled. Caught by the step."""


def _be_skipped(skipped: int, action: Any) -> NoReturn:
    raise _SkippedError(skipped)


def _taken(info: Any) -> Any:
    """Return the info as it is now: the env may change what is in it with its next step."""
    if not isinstance(info, dict):
        raise wrong_info(info)
    if NUMBERS.issuperset(map(type, info.values())):
        return dict(info)
    return pickled("step", info)
