"""How the steps of a worker's envs lie in banks; and the trainer's half of a step: write actions, and read replies.

The replies of several envs are rows of a batch. A single env is a batch of one whose values arrive bit for bit as it
returned them. The worker's half is in ``worker/``; both make a :class:`Codec` of the same arguments.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from multienv._engine.wire.actions import Encode, action_bytes, action_encoder, misfit, number_of
from multienv._engine.wire.banks import LENGTH, PICKLED_AT, Array, Bank, BankLayout
from multienv._engine.wire.infos import Extras, numbers_in
from multienv._engine.wire.messages import Description
from multienv._engine.wire.rows import (
    has_rows,
    integer_reader,
    leaf_forms,
    leaf_spaces,
    nested,
    row_bytes,
    row_of,
)
from multienv._engine.wire.segment import REPLY_PAYLOAD, Segment

# The reward of a single env keeps its type, by a tag in the head. A float64 holds integers exactly up to 2**53; what
# does not fit makes a pickled row.
REWARD_TYPES: tuple[type, ...] = (float, np.float64, np.float32, int, np.int64, bool)
REWARD_TAGS = {kind: tag for tag, kind in enumerate(REWARD_TYPES)}
INTEGER_REWARDS = 3  # from this tag on
EXACT_INTEGER = 2**53

Transition = tuple[Any, Any, bool, bool, dict[str, Any]]


@dataclass
class RowsReply:
    """Holds the reply of a worker with several envs: arrays over its bank, which is reused two requests later.

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

    @cached_property
    def views(self) -> tuple[Any, ...]:
        """Return views of rewards, of both flags and of each leaf: to join them takes half as long."""
        return tuple(one.data for one in (self.rewards, self.terminated, self.truncated, *self.leaves))

    def with_extras(self, extras: Extras) -> RowsReply:
        """Return the same rows with these extras."""
        return RowsReply(self.leaves, self.rewards, self.terminated, self.truncated, extras)


class ReplyPayload(NamedTuple):
    """Holds the parts of the payload of a reply.

    Attributes:
        evidence: A digest of each pickled row, packed.
        pickled: The list of the pickled rows, itself pickled.
        rest: Infos and other extras.
    """

    evidence: bytes = b""
    pickled: bytes = b""
    rest: bytes = b""


def payload_of(segment: Segment, number: int) -> ReplyPayload:
    """Return the payload of the reply to request ``number``."""
    if not segment.words[REPLY_PAYLOAD + (number & 1)]:
        return ReplyPayload()
    payload = segment.read_reply_payload(number)
    (end,) = LENGTH.unpack_from(segment.banks[number & 1].view, PICKLED_AT)
    if not end:
        return ReplyPayload(rest=payload)
    middle = LENGTH.size + LENGTH.unpack_from(payload)[0]
    return ReplyPayload(payload[LENGTH.size : middle], payload[middle:end], payload[end:])


class Codec:
    """Lays out the banks of a worker, and reads its replies: of several envs as rows, of a single one to the bit.

    Args:
        description: Of the envs, when they were built.
        verbatim: It is a single env, whose values arrive as it returned them.
        space: Observation space of the batch; ``None``: that of the first env.
        autoreset: Name of the ``AutoresetMode`` that the worker carries out; ``""``: none.

    Attributes:
        verbatim, slots: As given; the number of envs.
        space, action_space: Of one env when it was built.
        has_rows: Observations lie as rows in the banks.
        asked_space: Of what one step asks: of a batch, the actions of all envs.
        layout: Of the banks.
        elements: Numbers in the array that the actions of all slots are; 0 where they are no array.
        checks_actions: Actions that do not fit the action space are refused. A single env may have set another one.
    """

    def __init__(self, description: Description, verbatim: bool, space: Any = None, autoreset: str = "") -> None:
        self.verbatim, self.slots = verbatim, len(description.spaces)
        first_observation_space, self.action_space = description.spaces[0]
        self.space = first_observation_space if space is None else space
        self._lies_in_rows = has_rows(self.space)
        self.has_rows = not verbatim and self._lies_in_rows
        self.asked_space: Any = self.action_space if verbatim else batch_space(self.action_space, self.slots)
        self._members = leaf_spaces(self.space) if self._lies_in_rows else []
        self._forms = leaf_forms(self.space, verbatim=verbatim) if self._lies_in_rows else []
        leaves = row_bytes(self.space, verbatim=verbatim) if self._lies_in_rows else ()
        has_finals = not verbatim and autoreset == "SAME_STEP"
        self.layout = BankLayout(self.slots, action_bytes(self.asked_space), leaves, has_finals)
        self.elements = 0 if verbatim else number_of(self.asked_space)
        self.checks_actions = True

    def encoder(self, segment: Segment) -> Encode:
        """Return the function that writes a step request, with the actions of all slots, into its bank."""
        return action_encoder(self.asked_space, segment, self._misfit)

    def _misfit(self, action: Any) -> str:
        return misfit(self.asked_space, action) if self.checks_actions else ""

    def reader(self, segment: Segment) -> Callable[[int], Any]:
        """Return the function that reads the reply to a plain request; ``None`` if some of its infos are pickled.

        It returns the transition of a single env; else rows, which are whole as long as the bank is.
        """
        words, verbatim = segment.words, self.verbatim
        sides: list[tuple[Any, ...]] = [
            (show, bank.view, bank.rewards.data, bank.terminated.data, bank.truncated.data, REPLY_PAYLOAD + side)
            for side, (show, bank) in enumerate(zip(self.shown(segment), segment.banks, strict=True))
        ]

        def read(number: int) -> Any:
            show, view, rewards, terminated, truncated, payload = sides[number & 1]
            numbers = None
            if words[payload]:
                numbers = numbers_in(segment.read_reply_payload(number))
                if numbers is None:
                    return None
            if not verbatim:
                return show if numbers is None else show.with_extras(Extras(numbers))
            info = {} if numbers is None else next(iter(numbers))[1]
            tag = view[4]
            reward = REWARD_TYPES[tag](rewards[0]) if tag else rewards[0]
            if view[3]:
                return show(), reward, terminated[0], truncated[0], info
            return show(), reward, False, False, info

        return read

    def shown(self, segment: Segment) -> list[Any]:
        """Return for each bank its rows; or, of a single env, what returns a copy of the observation there."""
        if not self.verbatim:
            return [self.rows(segment, side) for side in (0, 1)]
        return [self._reader(bank) for bank in segment.banks]

    def _reader(self, bank: Bank) -> Callable[[], Any]:
        """Return the function that returns a copy of the observation in the only row; ``None`` if it lies in none."""
        members = [
            integer_reader(leaf) if type(one) is spaces.Discrete else leaf[0, ...].copy
            for one, leaf in zip(self._members, self._leaves(bank), strict=True)
        ]
        if self._members == [self.space]:
            return members[0]
        return lambda: nested(self.space, [read() for read in members]) if self._lies_in_rows else None

    def _leaves(self, bank: Bank) -> list[Array]:
        return [bank.leaf(index, *form) for index, form in enumerate(self._forms)]

    def observation(self, segment: Segment, number: int, pickled_row: bytes | None = None) -> Any:
        """Return the observation of a single env in the reply to ``number``.

        Args:
            segment: With the bank.
            number: Of the request.
            pickled_row: What the env returned, pickled, if it does not fit the bank; else ``None``.
        """
        if pickled_row is not None:
            return pickle.loads(pickled_row)[0]
        return self._reader(segment.banks[number & 1])()

    def transition(
        self, segment: Segment, number: int, pickled_row: bytes | None = None
    ) -> tuple[Any, Any, bool, bool]:
        """Return observation, reward, terminated and truncated of a single env; arguments as of :meth:`observation`."""
        if pickled_row is not None:
            return pickle.loads(pickled_row)  # type: ignore[no-any-return]
        bank = segment.banks[number & 1]
        tag, number_of_reward = bank.view[4], bank.rewards[0].item()
        reward = REWARD_TYPES[tag](number_of_reward) if tag else number_of_reward
        return self.observation(segment, number), reward, bool(bank.terminated[0]), bool(bank.truncated[0])

    def rows(self, segment: Segment, number: int) -> RowsReply:
        """Return the arrays of the bank that holds the reply to ``number``."""
        bank = segment.banks[number & 1]
        return RowsReply(self._leaves(bank), bank.rewards, bank.terminated, bank.truncated)

    def row(self, segment: Segment, number: int, slot: int) -> Any:
        """Return a copy of one slot's observation in the reply to ``number``."""
        return row_of(self.space, self._leaves(segment.banks[number & 1]), slot)
