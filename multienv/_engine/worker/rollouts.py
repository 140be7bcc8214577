"""Rollouts: a policy beside the envs chooses the actions of many steps, which the trainer asks for in one request.

The same code makes each step as if the trainer had asked for it. The answer holds the bank and the payload of each
step, and the trainer reads and journals them like those of any other step. So a rollout can be replayed without the
policy. Its steps use banks that are not shared: if the worker dies, the shared banks still hold what the trainer has
seen last.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import spaces

from multienv._engine.wire.actions import PICKLED, action_decoder, shown
from multienv._engine.wire.banks import (
    BEGUN,
    ENDED,
    FAILED,
    HEAD,
    NOT_RESET,
    PICKLED_ROWS,
    RAISED,
    RESET,
    SKIPPED,
    STEP,
    STEPPED,
    U32,
    Array,
    Bank,
)
from multienv._engine.wire.codecs import payload_of
from multienv._engine.wire.messages import PLAIN_RESET, Rollout, RolloutResult
from multienv._engine.wire.rows import SOLID, batch_of, nested, stacked
from multienv._engine.wire.segment import BUSY, OTHER_SECONDS, SLOT, Segment
from multienv._engine.worker.env_group import EnvGroup
from multienv._engine.worker.replies import answer_failure, failure_of, pickled
from multienv._engine.worker.stepper import Stepper
from multienv.errors import ActionError


class RolloutRunner:
    """Runs policies beside the envs of one worker.

    Args:
        group: Holds the envs.
        segment: Of the worker, with banks that are laid out for the envs.
    """

    def __init__(self, group: EnvGroup, segment: Segment) -> None:
        self._group, self._segment, self._aside = group, segment, segment.with_private_banks()
        stepper = Stepper(group, self._aside)
        self._reset = stepper.reset
        self._handle = stepper.compile(self._execute_reset)
        self._encode = group.codec.encoder(self._aside)
        self._decode = action_decoder(group.codec.asked_space, self._aside)
        rows = [] if group.verbatim else group.codec.shown(self._aside)
        self._leaves: list[list[Array]] = [each.leaves for each in rows]
        self._pickled_rows: list[bytes | None] = []  # for each slot of what was shown last
        self._seconds = 0.0

    def run(self, number: int, message: Rollout, skipped: Array) -> tuple[RolloutResult, float]:
        """Take the steps.

        Args:
            number: Of the request, and of the first step.
            message: The request.
            skipped: For each slot whether it is skipped in the first step, or from all (see ``wire.banks``).

        Returns:
            The answer, and the seconds that the envs have taken for a step.
        """
        words, result = self._segment.words, RolloutResult(bytearray(), {})
        choices: list[tuple[Any, dict[str, Array]]] = []  # what the policy returned for each step
        idle, first, self._seconds = np.where(skipped == NOT_RESET, skipped, 0), number, 0.0
        self._show_first(message.shown)
        missing: Array | None = skipped if skipped.any() else None
        try:
            policy = cloudpickle.loads(message.policy)
            while len(choices) < message.steps:
                words[BUSY], words[SLOT] = first, 0
                choices.append(self._choose(number, policy))
                bank = self._ask(number, missing, result)
                number += 1
                is_over = missing is not None or bank.view[2] == FAILED or bank.view[3] & ENDED
                if self._group.verbatim and is_over and not idle.any():
                    HEAD.pack_into(self._aside.banks[number & 1].view, 0, RESET, 0, STEPPED, 0, 0, number & U32, 0)
                    bank = self._ask(number, None, result)
                    number += 1
                if bank.view[2] == FAILED:
                    if not self._group.verbatim:  # nothing was stepped
                        del choices[-1]
                    break
                missing = idle if missing is not None and idle.any() else None
            if choices:
                result.chosen = pickled("rollout", self._stacks(choices))
        except Exception as error:  # of the policy, or because of what it returned
            result.failure = failure_of(error)
        return result, self._seconds / max(1, len(choices))

    # --- requests ---------------------------------------------------------------------------------

    def _ask(self, number: int, missing: Array | None, result: RolloutResult) -> Bank:
        """Execute the request in its bank without the missing slots, and store the reply in ``result``."""
        aside, times = self._aside, self._segment.times
        bank = aside.banks[number & 1]
        view, payload = bank.view, b""
        if view[0] == STEP and view[1] == PICKLED:
            payload = aside.read_request_payload(number)
        bank.skipped[:] = 0 if missing is None else missing
        if missing is not None:
            view[1] |= SKIPPED
        began, others = perf_counter(), times[OTHER_SECONDS]
        self._handle(number)
        self._seconds += perf_counter() - began - (times[OTHER_SECONDS] - others)
        reply = aside.read_reply_payload(number)
        if payload or reply:
            result.payloads[len(result.banks) // len(view)] = payload, reply
        result.banks += view
        self._show(number, missing)
        return bank

    def _execute_reset(self, number: int) -> None:
        """Execute a reset of the only env, as the host does."""
        self._segment.words[BUSY] = number
        try:
            self._reset(number, PLAIN_RESET)
            self._group.update_calls()
        except Exception as error:
            answer_failure(self._aside, number, error)

    # --- the policy -------------------------------------------------------------------------------

    def _choose(self, number: int, policy: Any) -> tuple[Any, dict[str, Array]]:
        """Ask the policy for actions and put them into the bank of the step.

        Returns:
            The actions as the envs get them, and what else the policy returned.

        Raises:
            Exception: The policy has raised it, or what it returned is no action.
        """
        chosen = policy(self._shown(number - 1))
        extras: dict[str, Any] = {}
        if type(chosen) is tuple and len(chosen) == 2 and isinstance(chosen[1], dict):
            chosen, extras = chosen
        space, slots, verbatim = self._group.action_space, self._group.slots, self._group.verbatim
        if not verbatim and type(space) in SOLID:
            chosen = np.asarray(chosen)
            if type(space) is spaces.Discrete and (chosen.shape != (slots,) or chosen.dtype.kind not in "iub"):
                raise ActionError(
                    f"The policy returned {shown(chosen)} of dtype {chosen.dtype}; {slots} envs with {space} want as "
                    "many integers of 64 bits."
                )
        extras = {name: np.array(value) for name, value in extras.items()}
        for name, value in extras.items():
            if not verbatim and value.shape[:1] != (slots,):
                raise ValueError(
                    f"The policy returned {name!r} of shape {value.shape}; it must have a row for each of the "
                    f"{slots} observations that it was given."
                )
        self._encode(number, chosen)
        return self._decode(number, self._aside.banks[number & 1].view[1]), extras

    def _stacks(self, choices: list[tuple[Any, dict[str, Array]]]) -> dict[str, Any]:
        """Return what the policy returned for all steps."""
        names = choices[0][1].keys()
        for _, extras in choices:
            if extras.keys() != names:
                raise ValueError(f"The policy returned {list(extras)}, and {list(names)} at the first step.")
        return {
            "actions": stacked(self._group.action_space, [actions for actions, _ in choices]),
            "extras": {name: np.stack([extras[name] for _, extras in choices]) for name in names},
        }

    # --- what the caller sees ---------------------------------------------------------------------

    def _show_first(self, shown: Mapping[str, Any]) -> None:
        """Put what the caller saw last into its bank."""
        bank = self._aside.banks[shown["seen"] & 1]
        bank.view[bank.layout.rewards :] = shown["bank"]
        self._pickled_rows = shown["pickled_rows"]

    def _show(self, number: int, missing: Array | None) -> None:
        """Write into the bank of a request, where it shows nothing, what was shown last once more."""
        bank, before = self._aside.banks[number & 1], self._aside.banks[(number - 1) & 1]
        pickled = payload_of(self._aside, number).pickled if bank.view[3] & PICKLED_ROWS else b""
        if pickled:
            pairs = zip(pickle.loads(pickled), self._pickled_rows, strict=True)
            self._pickled_rows = [old if new is None else new for new, old in pairs]
        elif self._group.verbatim:
            if bank.view[2] == FAILED or missing is not None:
                bank.view[bank.layout.rewards :] = before.view[bank.layout.rewards :]
            else:
                self._pickled_rows = [None]
        elif missing is not None or bank.view[3] & RAISED:
            blank = bank.failed | ((bank.skipped != 0) & (bank.skipped != BEGUN))
            if self._group.autoreset == "SAME_STEP":  # a new episode has begun, but for these
                blank = (bank.failed & ~bank.truncated) | (bank.skipped == NOT_RESET)
            for leaf, last in zip(self._leaves[number & 1], self._leaves[(number - 1) & 1], strict=True):
                leaf[blank] = last[blank]

    def _shown(self, number: int) -> Any:
        """Return what the answer to a request showed, as the policy gets it, which may change it."""
        space = self._group.observation_space
        if self._group.verbatim:
            return self._group.codec.observation(self._aside, number, self._pickled_rows[0])
        if self._leaves[0]:
            return nested(space, [leaf.copy() for leaf in self._leaves[number & 1]])
        return batch_of(space, [pickle.loads(one) for one in self._pickled_rows if one is not None])
