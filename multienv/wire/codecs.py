"""The trainer's half of a step: how actions get into a bank, and what is read out of it.

There are two codecs behind one interface. ``ExactCodec`` is for one env whose values arrive exactly as the env returned
them. ``RowsCodec`` is for several envs whose values become rows of a batch. The worker's half is in ``worker/``; both
halves take the layout of the banks from :func:`layout_of_envs`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from multienv.wire.actions import Encode, action_bytes, action_encoder, misfit, number_of
from multienv.wire.banks import IRREGULAR, IRREGULAR_AT, LENGTH, BankLayout
from multienv.wire.infos import Extras, numbers_in
from multienv.wire.layout import layout_of
from multienv.wire.messages import Description
from multienv.wire.rows import Array, has_rows, leaf_arrays, nested, row_bytes, row_of
from multienv.wire.segment import REPLY_PAYLOAD, Segment

# The reward of a single env keeps its type, by a tag in the head. A float64 holds integers exactly up to 2**53; what
# does not fit makes the reply irregular.
REWARD_TYPES: tuple[type, ...] = (float, np.float64, np.float32, int, np.int64, bool)
REWARD_TAGS = {kind: tag for tag, kind in enumerate(REWARD_TYPES)}
INTEGER_REWARDS = 3  # from this tag on
EXACT_INTEGER = 2**53

Transition = tuple[Any, Any, bool, bool, dict[str, Any]]


def layout_of_envs(
    exact: bool, observation_space: Any, action_space: Any, slots: int, autoreset: str = ""
) -> BankLayout:
    """Return the layout of the banks; worker and trainer call this with the same arguments.

    Args:
        exact: For the exact codec; else for rows.
        observation_space: Of one env; for rows, the space that the batch has.
        action_space: Of one env.
        slots: Number of envs.
        autoreset: Name of the ``AutoresetMode`` that the worker carries out; ``""``: none.
    """
    if exact:
        layout = layout_of(observation_space)
        return BankLayout(1, action_bytes(action_space), () if layout is None else (layout.size,))
    leaves = row_bytes(observation_space) if has_rows(observation_space) else ()
    has_finals = autoreset == "SAME_STEP"
    return BankLayout(slots, action_bytes(batch_space(action_space, slots)), leaves, has_finals)


@dataclass(slots=True)
class RowsReply:
    """What a worker with several envs answered: arrays over its bank, whole until the request after the next.

    Attributes:
        leaves: For each leaf of the observation space an array with a row for each slot; empty where observations
            travel as a payload: see ``extras.observations``.
        rewards, terminated, truncated: One value for each slot.
        extras: Infos, failures and observations that travelled; ``None``: nothing.
        errors: What the envs have raised, by slot, as errors to raise.
    """

    leaves: list[Array]
    rewards: Array
    terminated: Array
    truncated: Array
    extras: Extras | None = None
    errors: dict[int, Exception] = field(default_factory=dict)

    def with_extras(self, extras: Extras) -> RowsReply:
        """Return the same rows with what else was answered."""
        return RowsReply(self.leaves, self.rewards, self.terminated, self.truncated, extras)


def _reward_of(tag: int, number: float) -> Any:
    return number if tag == 0 else REWARD_TYPES[tag](number)


class ReplyPayload(NamedTuple):
    """Holds the payload of a reply, taken apart.

    Attributes:
        evidence: Of the irregular part, a digest for each slot, packed.
        irregular: What does not fit into the bank, pickled.
        rest: Infos and other extras.
    """

    evidence: bytes = b""
    irregular: bytes = b""
    rest: bytes = b""


def payload_of(segment: Segment, number: int) -> ReplyPayload:
    """Return the payload of the reply to request ``number``."""
    if not segment.words[REPLY_PAYLOAD + (number & 1)]:
        return ReplyPayload()
    payload = segment.read_reply_payload(number)
    (end,) = LENGTH.unpack_from(segment.banks[number & 1].view, IRREGULAR_AT)
    if not end:
        return ReplyPayload(rest=payload)
    middle = LENGTH.size + LENGTH.unpack_from(payload)[0]
    return ReplyPayload(payload[LENGTH.size : middle], payload[middle:end], payload[end:])


def verbatim_of(irregular: bytes) -> tuple[Any, Any, bool, bool]:
    """Return observation, reward and flags of a single env that do not fit the bank."""
    (packed,) = pickle.loads(irregular)
    told: tuple[Any, Any, bool, bool] = pickle.loads(packed)
    return told


class ExactCodec:
    """Reads the replies of one env exactly as it gave them.

    Attributes:
        space, action_space: Of the env when it was built.
        layout: Of the banks.
        checks_actions: The env has still these spaces: an action that does not fit is refused.
    """

    exact = True
    slots = 1
    elements = 0

    def __init__(self, description: Description) -> None:
        ((self.space, self.action_space),) = description.spaces
        self._observations = layout_of(self.space)
        self.layout = layout_of_envs(True, self.space, self.action_space, 1)
        self.checks_actions = True

    def encoder(self, segment: Segment) -> Encode:
        """Return the function that writes a step request into its bank."""
        return action_encoder(self.action_space, segment, self._misfit)

    def _misfit(self, action: Any) -> str:
        return misfit(self.action_space, action) if self.checks_actions else ""

    def reader(self, segment: Segment) -> Callable[[int], Transition | None]:
        """Return the function that reads the reply to a plain step or reset; ``None`` if its info is pickled."""
        words, banks = segment.words, segment.banks
        sides: list[tuple[Any, ...]] = [
            (look, bank.view, bank.rewards.data, bank.terminated.data, bank.truncated.data, REPLY_PAYLOAD + side)
            for side, (look, bank) in enumerate(zip(self.shown(segment), banks, strict=True))
        ]

        def read(number: int) -> Transition | None:
            look, view, rewards, terminated, truncated, payload = sides[number & 1]
            info: dict[str, Any] = {}
            if words[payload]:
                numbers = numbers_in(segment.read_reply_payload(number))
                if numbers is None:
                    return None
                ((_, info),) = numbers
            tag = view[4]
            reward = REWARD_TYPES[tag](rewards[0]) if tag else rewards[0]
            if view[3]:
                return look(), reward, terminated[0], truncated[0], info
            return look(), reward, False, False, info

        return read

    def shown(self, segment: Segment) -> list[Callable[[], Any]]:
        """Return for each bank what returns a copy of the observation that lies there."""
        space = self.space
        if type(space) is spaces.Box and self._observations is not None:
            start = self.layout.leaves[0]
            return [np.ndarray(space.shape, space.dtype, bank.view, start).copy for bank in segment.banks]
        return [partial(self.observation, segment, side, b"") for side in (0, 1)]

    def observation(self, segment: Segment, number: int, irregular: bytes) -> Any:
        """Return the observation in the reply to ``number``, whose irregular part is given where it is irregular."""
        if irregular:
            return verbatim_of(irregular)[0]
        if self._observations is None:
            return None
        bank = segment.banks[number & 1]
        return self._observations.read(bank.view, bank.layout.leaves[0])

    def transition(self, segment: Segment, number: int, irregular: bytes) -> tuple[Any, Any, bool, bool]:
        """Return observation, reward, terminated and truncated of any reply."""
        bank = segment.banks[number & 1]
        if bank.view[3] & IRREGULAR:
            return verbatim_of(irregular)
        reward = _reward_of(bank.view[4], bank.rewards[0].item())
        return (
            self.observation(segment, number, b""),
            reward,
            bool(bank.terminated[0]),
            bool(bank.truncated[0]),
        )


class RowsCodec:
    """Reads the replies of several envs as rows.

    Attributes:
        space, action_space: Of one env.
        has_rows: Observations lie in the banks.
        layout: Of the banks.
        elements: Numbers in the array that the actions of all slots are; 0 where they are no array.
    """

    exact = False

    def __init__(self, description: Description, space: Any = None, autoreset: str = "") -> None:
        self.slots = len(description.spaces)
        first_observation_space, self.action_space = description.spaces[0]
        self.space = first_observation_space if space is None else space
        self.has_rows = has_rows(self.space)
        self.layout = layout_of_envs(False, self.space, self.action_space, self.slots, autoreset)
        self._batch_space: Any = batch_space(self.action_space, self.slots)
        self.elements = number_of(self._batch_space)

    def encoder(self, segment: Segment) -> Encode:
        """Return the function that writes a step request, with a batch of actions, into its bank."""
        return action_encoder(self._batch_space, segment)

    def reader(self, segment: Segment) -> Callable[[int], RowsReply | None]:
        """Return the function that reads the reply to a plain step; ``None`` if some of its infos are pickled.

        What it returns is whole as long as the bank is.
        """
        replies, words = self.shown(segment), segment.words

        def read(number: int) -> RowsReply | None:
            reply = replies[number & 1]
            if not words[REPLY_PAYLOAD + (number & 1)]:
                return reply
            numbers = numbers_in(segment.read_reply_payload(number))
            return None if numbers is None else reply.with_extras(Extras(numbers))

        return read

    def shown(self, segment: Segment) -> list[RowsReply]:
        """Return for each bank its arrays."""
        return [self.rows(segment, side) for side in (0, 1)]

    def rows(self, segment: Segment, number: int) -> RowsReply:
        """Return the arrays of the bank that holds the reply to ``number``."""
        bank = segment.banks[number & 1]
        leaves = leaf_arrays(self.space, bank) if self.has_rows else []
        return RowsReply(leaves, bank.rewards, bank.terminated, bank.truncated)

    def row(self, segment: Segment, number: int, slot: int) -> Any:
        """Return a copy of one slot's observation in the reply to ``number``."""
        return row_of(nested(self.space, leaf_arrays(self.space, segment.banks[number & 1])), slot)


Codec = ExactCodec | RowsCodec


def codec_of(description: Description, exact: bool, space: Any = None, autoreset: str = "") -> Codec:
    """Return the codec for envs that describe themselves so."""
    return ExactCodec(description) if exact else RowsCodec(description, space, autoreset)
