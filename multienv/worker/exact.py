"""The worker's half of the exact codec: one env, whose values reach the trainer as the env returned them.

What does not fit the bank to the bit (another dtype, shape or type than the space says) is pickled: the reply is then
irregular. A digest of it is the evidence that a replay is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from multienv.native import native
from multienv.wire.actions import INT, action_decoder
from multienv.wire.banks import ENDED, HEAD, IRREGULAR, SKIPPED, STEP
from multienv.wire.codecs import EXACT_INTEGER, INTEGER_REWARDS, REWARD_TAGS
from multienv.wire.digests import digester, evidence_of, pack_evidence
from multienv.wire.infos import InfoPacker
from multienv.wire.layout import Layout, layout_of
from multienv.wire.messages import Reset
from multienv.wire.rows import copy_into
from multienv.wire.segment import BUSY, REPLY_PAYLOAD, SLOT, Segment
from multienv.worker.env_group import EnvGroup
from multienv.worker.failures import pickled, wrong_result
from multienv.worker.replies import answer_failure, answer_rows

# Executes a request; returns what the worker's loop is to know of it, see Host.handle.
Handle = Callable[[int], Any]

STEP_RESULT = "observation, reward, terminated, truncated, info"
_ARRAYS = (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)
_FLAGS = (bool, np.bool_)


class ExactStepper:
    """Steps one env and writes what it returns.

    Args:
        group: Holds the env.
        segment: With banks that are laid out for it.
    """

    def __init__(self, group: EnvGroup, segment: Segment) -> None:
        self._group, self._segment = group, segment
        self._decode = action_decoder(group.action_space, segment)
        self._layout = layout_of(group.observation_space)
        self._packer = InfoPacker(1)
        self._digests = [
            None if bank.digests is None else digester(bank.digests, [bank.leaf(0, bank.layout.leaf_bytes, np.uint8)])
            for bank in segment.banks
        ]
        self._whole, self._cells = self._lay_out_cells()

    def compile(self, otherwise: Handle) -> Handle:  # noqa: C901 - see below
        """Return the function that executes any request.

        One function for a step, because each call, and each object that it touches, counts here.

        Args:
            otherwise: Executes a request that is not a step.
        """
        segment, calls, decode, rest, skip = self._segment, self._group.calls, self._decode, self._rest, self._skip
        words, ndarray, whole, pack = segment.words, np.ndarray, slice(None), self._packer.numbers
        float64, tag_of_float64 = np.float64, REWARD_TAGS[np.float64]
        is_integer = type(self._group.action_space) is spaces.Discrete
        targets: list[tuple[Any, ...]] = [
            (
                bank.view,
                bank.view[HEAD.size : HEAD.size + 8].cast("q") if is_integer else None,
                cell,
                bank.rewards.data,
                # All flags as one integer. An earlier request, or the trainer, may have set one.
                bank.view[bank.layout.terminated : bank.layout.terminated + 8].cast("q"),
                digest,
                REPLY_PAYLOAD + side,
            )
            for side, (bank, cell, digest) in enumerate(zip(segment.banks, self._cells, self._digests, strict=True))
        ]

        def handle(number: int) -> Any:
            side = number & 1
            view, integer, cell, rewards, set_flags, digest, payload = targets[side]
            if view[0] != STEP:
                return otherwise(number)
            words[BUSY] = number
            words[SLOT] = 1
            try:
                tag = view[1]
                if tag & SKIPPED:
                    skip(number)
                else:
                    result = calls[0](integer[0] if tag == INT else decode(number, tag))
                    try:
                        observation, reward, terminated, truncated, info = result
                    except (TypeError, ValueError):
                        raise wrong_result("step", STEP_RESULT, result) from None
                    kind, packed = type(reward), b""
                    if (
                        terminated is not False
                        or truncated is not False
                        or (kind is not float and kind is not float64)
                        or type(observation) is not ndarray
                        or set_flags[0]
                        or (info and (type(info) is not dict or not (packed := pack([(0, info)]))))
                    ):
                        rest(number, result)
                    else:
                        try:
                            cell[whole] = observation
                        except (TypeError, ValueError):  # it may fit all the same
                            rest(number, result)
                        else:
                            rewards[0] = reward
                            if kind is float64:
                                view[4] = tag_of_float64
                            if digest is not None:
                                digest()
                            if packed:
                                segment.write_reply_payload(number, packed)
                            elif words[payload]:
                                words[payload] = 0
            except Exception as error:
                answer_failure(segment, number, error)
            words[SLOT] = 0
            words[BUSY] = 0
            return None

        if native is None or self._whole[0] is None:
            return handle
        return native.ExactStep(  # type: ignore[no-any-return]
            reference=handle,
            rest=rest,
            fail=partial(answer_failure, segment),
            write_payload=segment.write_reply_payload,
            words=words,
            calls=calls,
            decode=decode,
            packer=self._packer,
            sides=tuple(
                (bank, place, whole, [cell], slice(None), digest, None)
                for bank, place, whole, cell, digest in zip(
                    segment.banks, segment.reply_places, self._whole, self._cells, self._digests, strict=True
                )
            ),
        )

    def reset(self, number: int, message: Reset) -> None:
        """Execute a reset. Raises what the env raises."""
        bank = self._segment.banks[number & 1]
        if (bank.view[1] & SKIPPED and bank.skipped[0]) or not message.touches(0):
            self._skip(number)
            return
        observation, info = self._group.begin(0, seed=message.seeds[0], options=message.options[0])
        self._write(number, observation, 0.0, False, False, info)

    def _skip(self, number: int) -> None:
        """Reply for an env that is skipped in the request, whose episode ends; its row is blank."""
        self._group.end(0)
        side = number & 1
        bank = self._segment.banks[side]
        self._blank(side)
        bank.rewards[0], bank.terminated[0], bank.truncated[0] = 0.0, False, False
        answer_rows(self._segment, number, self._packer, [])

    def _lay_out_cells(self) -> tuple[list[Any], list[Any]]:
        """Return for each bank the array of the observation, and what it is assigned to, which raises ValueError.

        ``None`` where observations are no arrays.
        """
        space: Any = self._group.observation_space
        if self._layout is None or type(space) not in _ARRAYS:
            return [None, None], [None, None]
        arrays = [bank.leaf(0, space.shape, space.dtype) for bank in self._segment.banks]
        if len(space.shape) == 1 and space.dtype.isnative:
            # A memoryview takes what has its very format and shape, in half the time that it takes to ask for both.
            return arrays, [array[0].data for array in arrays]
        return arrays, [_Cell(self._layout, array[0, ...]) for array in arrays]

    def _rest(self, number: int, result: Any) -> None:
        """Write the reply to a step, whatever the env has returned."""
        try:
            observation, reward, terminated, truncated, info = result
        except (TypeError, ValueError):
            raise wrong_result("step", STEP_RESULT, result) from None
        self._write(number, observation, reward, terminated, truncated, info)

    def _write(self, number: int, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        """Write the reply to a step or a reset, whatever the env has returned."""
        side = number & 1
        bank, flags, evidence, irregular = self._segment.banks[side], 0, b"", b""
        tag = REWARD_TAGS.get(type(reward), -1)
        regular = (
            tag >= 0
            and (tag < INTEGER_REWARDS or -EXACT_INTEGER <= reward <= EXACT_INTEGER)
            and type(terminated) in _FLAGS
            and type(truncated) in _FLAGS
            and self._put(side, observation)
        )
        if not regular:
            tag, flags = 0, IRREGULAR
            told = observation, reward, terminated, truncated
            evidence, irregular = pack_evidence([evidence_of(told)]), pickled("step", told)
        bank.rewards[0] = reward if regular else _number(reward)
        bank.terminated[0], bank.truncated[0] = terminated, truncated = bool(terminated), bool(truncated)
        if terminated or truncated:
            flags |= ENDED
        infos = [(0, info if type(info) is dict else pickled("step", info))] if info else []
        answer_rows(
            self._segment,
            number,
            self._packer,
            infos,
            flags=flags,
            tag=tag,
            evidence=evidence,
            irregular=irregular,
            generators=self._group.starts.take(),
            spaces=self._group.take_spaces(),
        )

    def _put(self, side: int, observation: Any) -> bool:
        """Write an observation to the bank, if it fits to the bit."""
        layout = self._layout
        if layout is None or not layout.fits(observation):
            return False
        bank, digest = self._segment.banks[side], self._digests[side]
        layout.write(observation, bank.view, bank.layout.leaves[0])
        if digest is not None:
            digest()
        return True

    def _blank(self, side: int) -> None:
        bank, digest = self._segment.banks[side], self._digests[side]
        if self._layout is not None:
            start = bank.layout.leaves[0]
            bank.view[start : start + self._layout.size] = bytes(self._layout.size)
        if digest is not None:
            digest()


class _Cell:
    """Takes an array that is assigned to all of it; raises ValueError if it does not fit to the bit."""

    __slots__ = ("_fits", "_target")

    def __init__(self, layout: Layout, target: Any) -> None:
        self._fits, self._target = layout.fits, target

    def __setitem__(self, whole: slice, value: Any) -> None:
        if not self._fits(value):
            raise ValueError
        copy_into(self._target, value)


def _number(reward: Any) -> float:
    """Return about what an irregular reward is, for the stacks of a rollout; 0.0 for no number."""
    try:
        return float(reward)
    except (TypeError, ValueError, OverflowError):
        return 0.0
