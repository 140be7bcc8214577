"""Rollouts: a policy beside the envs chooses the actions of many steps, which the trainer asks for in one request.

Each step is made as if the trainer had asked for it, by the same code, and leaves the same journal entry. So it can be
replayed without the policy. The steps use banks of this process alone: what the trainer has seen stays in the shared
ones until it has the answer, whatever dies meanwhile.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from multienv.errors import ActionError
from multienv.wire.actions import action_encoder, shown
from multienv.wire.banks import (
    ABSENT,
    BEGIN,
    ENDED,
    FAILED,
    HEAD,
    IDLE,
    IRREGULAR,
    RAISED,
    STEPPED,
    U32,
    Bank,
    entry_of,
    is_plain,
)
from multienv.wire.codecs import ExactCodec, mail_of
from multienv.wire.messages import BEGINNING, Failure, Rollout
from multienv.wire.rollouts import RolloutResult, Values, stacked
from multienv.wire.rows import has_rows, leaf_arrays, nested
from multienv.wire.segment import BUSY, OTHER_SECONDS, SLOT, Segment
from multienv.worker.env_group import EnvGroup
from multienv.worker.failures import failure_of, pickled
from multienv.worker.replies import answer_failure

Array = np.ndarray[Any, Any]
_CONSTANT = (int, float, str, bytes, np.generic)
_SOLID = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)


@dataclass
class _Progress:
    """Holds what has come of a rollout so far; see ``RolloutResult`` in ``wire.rollouts`` for what is not said here.

    Attributes:
        next: Number of the next request.
        shown: What was shown last: for rows the arrays of its leaves, or each slot's observation pickled; of a single
            env its observation.
        rewards, terminated, truncated: Of all steps, of which the first ``steps`` are done.
        leaves: For rows, those of all observations: they begin with what was shown before the first step.
        observations: The same for all others, as a list.
        seconds: Time of the envs.
    """

    next: int
    shown: Any
    rewards: Array
    terminated: Array
    truncated: Array
    leaves: list[Array]
    steps: int = 0
    observations: list[Any] = field(default_factory=list)
    entries: list[bytes] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    extras: list[dict[str, Array]] = field(default_factory=list)
    ends: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    mails: dict[int, bytes] = field(default_factory=dict)
    raised: dict[int, bytes] = field(default_factory=dict)
    begun: dict[int, bytes] = field(default_factory=dict)
    ending: dict[int, Any] = field(default_factory=dict)
    truncated_errors: set[tuple[int, int]] = field(default_factory=set)
    seen: dict[str, Any] | None = None
    is_running: bool = True
    failure: Failure | None = None
    by_policy: bool = False
    seconds: float = 0.0


class RolloutRunner:
    """Runs policies beside the envs of one worker.

    Args:
        group: Holds the envs.
        segment: Of the worker, with banks that are laid out for the envs.
        make_stepper: Makes what steps the envs, for another segment.
    """

    def __init__(self, group: EnvGroup, segment: Segment, make_stepper: Callable[[Segment], Any]) -> None:
        self._group, self._segment = group, segment
        self._aside = segment.aside()
        stepper = make_stepper(self._aside)
        self._reset = stepper.reset
        self._handle = stepper.compile(self._begin)
        batched = group.action_space if group.exact else batch_space(group.action_space, group.slots)
        self._encode = action_encoder(batched, self._aside)
        self._codec = ExactCodec(group.describe()) if group.exact else None
        self._has_rows = has_rows(group.observation_space)
        self._leaves = [
            leaf_arrays(group.observation_space, bank) if self._has_rows and not group.exact else []
            for bank in self._aside.banks
        ]

    def run(self, number: int, message: Rollout, absent: Array) -> tuple[RolloutResult, float]:
        """Take the steps.

        Args:
            number: Of the request, and of the first step.
            message: The request.
            absent: For each slot whether it is absent from the first step, or from all (see ``wire.banks``).

        Returns:
            The answer, and the seconds that the envs have taken for a step.
        """
        progress, words = self._begun(number, message), self._segment.words
        after = self._after_rows if self._codec is None else self._after_exact
        idle = np.where(absent == IDLE, absent, 0)
        is_short, stays_short = absent.any(), idle.any()
        try:
            policy = cloudpickle.loads(message.policy)
        except Exception as error:
            progress.failure, progress.by_policy, policy = failure_of(error), True, None
        for step in range(message.steps):
            if progress.failure is not None:
                break
            words[BUSY], words[SLOT] = number, 0
            try:
                self._choose(policy, progress)
            except Exception as error:
                progress.failure, progress.by_policy = failure_of(error), True
                break
            missing = (idle if step else absent) if is_short else None
            if missing is not None:
                bank = self._aside.banks[progress.next & 1]
                bank.view[1] |= ABSENT
                bank.absent[:] = missing
            after(progress, missing, self._ask(progress))
            is_short = stays_short
        for bank in self._aside.banks:
            bank.absent[:] = 0
        return self._rolled(progress), progress.seconds / max(1, progress.steps)

    def _begun(self, number: int, message: Rollout) -> _Progress:
        """Return the progress of a rollout that has not been begun."""
        shown, steps, slots = message.observations, message.steps, self._group.slots
        shape = (steps,) if self._group.exact else (steps, slots)
        leaves = [np.empty((steps + 1, *leaf.shape), leaf.dtype) for leaf in self._leaves[0]]
        progress = _Progress(
            number, shown, np.zeros(shape), np.zeros(shape, np.bool_), np.zeros(shape, np.bool_), leaves
        )
        for leaf, first in zip(leaves, shown if leaves else (), strict=True):
            leaf[0] = first
        self._show(progress)
        return progress

    # --- requests ---------------------------------------------------------------------------------

    def _ask(self, progress: _Progress) -> Bank:
        """Execute the next request, which lies in its bank, and note its entry."""
        number = progress.next
        bank = self._aside.banks[number & 1]
        is_mailed = not is_plain(bank.stretch) and bank.view[0] != BEGIN
        mail = self._aside.read_request_mail(number) if is_mailed else b""
        began, times = time.perf_counter(), self._segment.times
        others = times[OTHER_SECONDS]
        self._handle(number)
        progress.seconds += time.perf_counter() - began - (times[OTHER_SECONDS] - others)
        evidence = mail_of(self._aside, number)[0] if bank.view[3] & IRREGULAR else b""
        entry = entry_of(bank, mail, evidence, exact=self._group.exact)
        progress.entries.append(entry)
        progress.next += 1
        return bank

    def _begin(self, number: int) -> None:
        """Execute a reset of the only env, as the host does."""
        self._segment.words[BUSY] = number
        try:
            self._reset(number, BEGINNING)
            if not self._group.calls_are_current():
                self._group.update_calls()
        except Exception as error:
            answer_failure(self._aside, number, error)

    # --- the policy -------------------------------------------------------------------------------

    def _choose(self, policy: Any, progress: _Progress) -> None:
        """Ask the policy for actions and put them into the bank of the next step. Raises what the policy raises."""
        chosen = policy(self._batch(progress.shown))
        extras: dict[str, Any] = {}
        if type(chosen) is tuple and len(chosen) == 2 and isinstance(chosen[1], dict):
            chosen, extras = chosen
        space, exact = self._group.action_space, self._group.exact
        if not exact and type(space) in _SOLID:
            chosen = np.array(chosen)  # a copy, which the policy cannot change
            if type(space) is spaces.Discrete:
                self._check_integers(space, chosen)
        else:
            chosen = _copied(chosen)
        taken = {name: np.array(value) for name, value in extras.items()}
        for name, value in taken.items():
            if not exact and value.shape[:1] != (self._group.slots,):
                raise ValueError(
                    f"The policy returned {name!r} of shape {value.shape}; it must have a row for each of the "
                    f"{self._group.slots} observations that it was given."
                )
        if progress.extras and taken.keys() != progress.extras[0].keys():
            raise ValueError(f"The policy returned {list(taken)}, and {list(progress.extras[0])} at the first step.")
        self._encode(progress.next, chosen)
        progress.actions.append(chosen)
        progress.extras.append(taken)

    def _check_integers(self, space: spaces.Discrete, actions: Array) -> None:
        if actions.shape != (self._group.slots,) or actions.dtype.kind not in "iub":
            raise ActionError(
                f"The policy returned {shown(actions)} of dtype {actions.dtype}; {self._group.slots} envs with {space} "
                "want as many integers of 64 bits."
            )

    def _batch(self, shown: Any) -> Any:
        """Return what was shown last as the policy gets it, which may change it."""
        if self._codec is not None:
            return _copied(shown)
        return self._batch_of([leaf.copy() for leaf in shown] if self._has_rows else shown)

    def _batch_of(self, shown: Any) -> Any:
        space = self._group.observation_space
        if self._has_rows:
            return nested(space, shown)
        observations = [pickle.loads(one) for one in shown]
        empty: Any = create_empty_array(space, self._group.slots)
        return concatenate(space, observations, empty)

    def _show(self, progress: _Progress) -> None:
        """Note what was shown last, which nothing changes any more."""
        if not progress.leaves:
            progress.observations.append(progress.shown if self._group.exact else self._batch_of(progress.shown))

    # --- after a step -----------------------------------------------------------------------------

    def _after_rows(self, progress: _Progress, missing: Array | None, bank: Bank) -> None:
        """Note what came of a step of several envs; ``missing`` says who was left out, if anybody was."""
        number, step = progress.next - 1, progress.steps
        evidence, rest = mail_of(self._aside, number)
        if bank.view[2] == FAILED:
            progress.failure = pickle.loads(rest)
            return
        before, blank = progress.shown, None
        rewards = progress.rewards[step]
        rewards[:] = bank.rewards
        if missing is not None or bank.view[3] & (ENDED | RAISED):
            blank = self._end_rows(progress, missing, bank)
        if not self._has_rows:
            pairs = zip(pickle.loads(evidence), before, strict=True)
            progress.shown = [old if new is None else new for new, old in pairs]
        elif progress.leaves:
            for leaf, own in zip(self._leaves[number & 1], progress.leaves, strict=True):
                if blank is not None:
                    leaf[blank] = own[step][blank]  # as the caller will see it: what was shown last, once more
                own[step + 1] = leaf
            progress.shown = [own[step + 1] for own in progress.leaves]
        if rest:
            progress.mails[step] = rest
        progress.steps += 1
        self._show(progress)
        loose = [None] * self._group.slots if self._has_rows else progress.shown
        progress.seen = {"seen": number, "loose": loose}

    def _end_rows(self, progress: _Progress, missing: Array | None, bank: Bank) -> Array:
        """Note which episodes a step has ended; return the slots that have no row of their own."""
        step, same_step = progress.steps, self._group.autoreset == "SAME_STEP"
        failed, truncated = bank.failed.copy(), bank.truncated.copy()
        absent = np.zeros_like(failed) if missing is None else missing > 0
        idle = absent if missing is None else missing == IDLE
        progress.truncated_errors |= {(step, slot) for slot in np.flatnonzero(failed & truncated).tolist()}
        # What an env raised, or an absent env, ends its episode: the next transition belongs to another one.
        gone = absent | failed
        progress.rewards[step][gone] = 0.0
        progress.terminated[step] = bank.terminated & ~gone
        progress.truncated[step] = truncated | gone
        ended = progress.terminated[step] | progress.truncated[step]
        if ended.any():
            progress.ends.append((step, tuple(np.flatnonzero(ended).tolist())))
        blank: Array = idle | (failed & ~truncated) if same_step else gone
        return blank

    def _after_exact(self, progress: _Progress, missing: Array | None, bank: Bank) -> None:
        """Note what came of a step of a single env; where it ended the episode, begin the next one."""
        number, step, codec = progress.next - 1, progress.steps, self._codec
        assert codec is not None
        evidence, rest = mail_of(self._aside, number)
        before, reward, terminated, truncated = progress.shown, 0.0, False, True
        if bank.view[2] == FAILED:
            progress.raised[step] = rest
        elif missing is None:
            progress.shown, reward, terminated, truncated = codec.transition(self._aside, number, evidence)
            before = progress.shown
            progress.seen = self._standing(number, bank, evidence)
            if rest:
                progress.mails[step] = rest
        if terminated or truncated:
            progress.ends.append((step, (0,)))
            progress.ending[step] = _copied(before)
            is_idle = missing is not None and missing[0] == IDLE
            progress.is_running = not is_idle and self._begin_next(progress, step)
        progress.rewards[step], progress.terminated[step], progress.truncated[step] = reward, terminated, truncated
        progress.steps += 1
        self._show(progress)

    def _begin_next(self, progress: _Progress, step: int) -> bool:
        """Begin the next episode of a single env; return whether it has begun."""
        number, codec = progress.next, self._codec
        assert codec is not None
        bank = self._aside.banks[number & 1]
        HEAD.pack_into(bank.view, 0, BEGIN, 0, STEPPED, 0, 0, number & U32, 0)
        bank.absent[:] = 0
        self._ask(progress)
        evidence, rest = mail_of(self._aside, number)
        if bank.view[2] == FAILED:
            progress.failure = pickle.loads(rest)
            return False
        progress.shown = codec.observation(self._aside, number, evidence)
        progress.seen = self._standing(number, bank, evidence)
        progress.begun[step] = rest
        return True

    def _standing(self, number: int, bank: Bank, evidence: bytes) -> dict[str, Any]:
        return {"seen": number, "bank": bytes(bank.view[bank.layout.rewards :]), "evidence": evidence}

    # --- the answer -------------------------------------------------------------------------------

    def _rolled(self, progress: _Progress) -> RolloutResult:
        steps, values = progress.steps, b""
        if progress.seen is not None and "bank" not in progress.seen:
            bank = self._aside.banks[progress.seen["seen"] & 1]
            progress.seen["bank"] = bytes(bank.view[bank.layout.rewards :])
        if steps and not progress.by_policy:
            try:
                values = pickled("rollout", self._values(progress, steps))
            except Exception as error:
                progress.failure = progress.failure or failure_of(error)
        return RolloutResult(
            entries=tuple(progress.entries),
            steps=steps,
            ends=tuple(progress.ends),
            seen=progress.seen,
            is_running=progress.is_running,
            mails=progress.mails,
            raised=progress.raised,
            begun=progress.begun,
            truncated_errors=frozenset(progress.truncated_errors),
            values=values,
            failure=progress.failure,
            by_policy=progress.by_policy,
        )

    def _values(self, progress: _Progress, steps: int) -> Values:
        extras, space = progress.extras[:steps], self._group.observation_space
        if progress.leaves:
            observations = nested(space, [leaf[: steps + 1] for leaf in progress.leaves])
        else:
            observations = stacked(space, progress.observations)
        return Values(
            observations=observations,
            actions=stacked(self._group.action_space, progress.actions[:steps]),
            extras={name: np.stack([one[name] for one in extras]) for name in extras[0]},
            rewards=progress.rewards[:steps],
            terminated=progress.terminated[:steps],
            truncated=progress.truncated[:steps],
            ending=progress.ending,
        )


def _copied(value: Any) -> Any:
    """Return a copy of an observation or of actions, which belongs to nobody else."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.copy()
    if isinstance(value, _CONSTANT):
        return value
    if isinstance(value, dict):
        return {key: _copied(member) for key, member in value.items()}
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(map(_copied, value))
    try:
        return pickle.loads(cloudpickle.dumps(value))
    except Exception:  # foreign code
        return value
