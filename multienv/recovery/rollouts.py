"""What the caller gets for a rollout: the values that the worker has sent, with infos, reasons and errors."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from multienv.errors import PolicyError, RemoteTraceback
from multienv.recovery.answers import Absent, ErrorOf, Told, unreadable
from multienv.reports.texts import original_of
from multienv.wire.infos import Illegible, NumberInfos, unpack_extras
from multienv.wire.messages import Failure, foreign
from multienv.wire.rollouts import RolloutResult, Values, slot_of, steps_of

Infos = NumberInfos | list[tuple[int, Any]]  # slot and info of those that have one


@dataclass(slots=True)
class RolloutReply:
    """Holds what a worker answered to a rollout.

    Attributes:
        values: Observations, actions, rewards and flags; ``None``: they cannot be read here.
        infos: Of each step in which some slot has an info.
        errors: What the envs have raised, by slot; the first of each.
        truncated_errors: Slot and error of what ``on_error="truncate"`` made a truncation of.
        started: Step, requests after it, and slot → state of generators before a reset, as ``Extras.generators``.
    """

    values: Values | None = None
    infos: dict[int, Infos] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    truncated_errors: list[tuple[int, Exception]] = field(default_factory=list)
    started: list[tuple[int, int, Mapping[int, bytes]]] = field(default_factory=list)

    def starts(self, numbers: Sequence[int]) -> Iterator[tuple[int, Mapping[int, bytes]]]:
        """Yield the number of each request with resets that a replay can begin at; ``numbers`` are those of steps."""
        for step, after, generators in self.started:
            yield numbers[step] + after, generators


class RolloutReader:
    """Makes the reply to a rollout of what a worker answered.

    Args:
        slots: Number of envs.
        exact: It is a single env, which travels by the exact codec.
        same_step: The worker begins the next episode in the step that ended one, as that of a single env does.
        truncates: What an env raises is made a truncation of.
        error_of: Builds the error of a slot's failure.
        told: What ``info["multienv"]`` says of a truncation.
    """

    def __init__(
        self, slots: int, *, exact: bool, same_step: bool, truncates: bool, error_of: ErrorOf, told: Told
    ) -> None:
        self._slots, self._exact = range(slots), exact
        self._same_step, self._truncates = same_step, truncates
        self._error_of, self._told = error_of, told

    def reply(self, rolled: RolloutResult, absent: Absent) -> RolloutReply | PolicyError:
        """Return the reply; ``absent`` are the slots that took no part in the first step, and why."""
        if rolled.by_policy:
            assert rolled.failure is not None
            return _policy_error(rolled.failure, rolled.steps)
        reply = RolloutReply()
        try:
            if rolled.values:
                reply.values = foreign(partial(pickle.loads, rolled.values), Illegible)
        except Illegible as illegible:
            reply.errors |= dict.fromkeys(self._slots, unreadable("rollout", illegible))
        failures: list[tuple[int, int, Failure]] = []
        for step, mail in rolled.mails.items():
            infos = self._unpacked(mail, reply, step, failures)
            if infos:
                reply.infos[step] = infos
        failures += [(step, 0, pickle.loads(mail)) for step, mail in rolled.raised.items()]
        reasons = {(0, slot): reason for slot, reason in absent}
        for step, slot, failure in sorted(failures, key=lambda one: one[:2]):
            error = self._error_of(slot, failure)
            reasons[step, slot] = f"The env raised {failure.type_name}: {failure.text}"
            if (step, slot) in rolled.truncated_errors or (self._exact and self._truncates):
                reply.truncated_errors.append((slot, error))
            else:
                reply.errors.setdefault(slot, error)
        if self._exact:
            self._join_ends(reply, rolled, reasons)
        else:
            for (step, slot), reason in reasons.items():
                self._tell(reply, step, slot, reason)
        if rolled.failure is not None:
            for slot in self._slots:
                reply.errors.setdefault(slot, self._error_of(slot, rolled.failure))
        return reply

    def _unpacked(
        self, mail: bytes, reply: RolloutReply, step: int, failures: list[tuple[int, int, Failure]], after: int = 0
    ) -> Infos:
        extras, illegible = unpack_extras(mail)
        if extras.generators:
            reply.started.append((step, after, extras.generators))
        failures += [(step, slot, failure) for slot, failure in extras.failures.items()]
        for slot, error in illegible.items():
            reply.errors.setdefault(slot, unreadable("rollout", error))
        return extras.infos

    def _tell(self, reply: RolloutReply, step: int, slot: int, reason: str) -> None:
        """Say in the info of a slot that its step is a truncation, and why."""
        infos, told = dict(reply.infos.get(step, ())), {"multienv": self._told(slot, reason)}
        infos[slot] = {**infos.get(slot, {}), **told}
        if self._same_step and reply.values is not None:
            before = slot_of(steps_of(reply.values.observations, slice(step, step + 1)), slot)
            infos[slot] |= {"final_obs": steps_of(before, 0), "final_info": told}
        reply.infos[step] = sorted(infos.items())

    def _join_ends(self, reply: RolloutReply, rolled: RolloutResult, reasons: dict[tuple[int, int], str]) -> None:
        """Give each step of a single env that ended an episode the info of the reset that followed it."""
        for step, _ in rolled.ends:
            info = dict(reply.infos.get(step, ())).get(0, {})
            reason = reasons.get((step, 0))
            told = {} if reason is None else {"multienv": self._told(0, reason)}
            begun = dict(self._unpacked(rolled.begun.get(step, b""), reply, step, [], 1)).get(0, {})
            ending = None if reply.values is None else reply.values.ending[step]
            reply.infos[step] = [(0, {**begun, "final_obs": ending, "final_info": {**info, **told}, **told})]


def split(values: Values) -> tuple[Any, Any]:
    """Return the observations that actions were chosen for, and those after the last step."""
    return steps_of(values.observations, slice(None, -1)), steps_of(values.observations, -1)


def first_policy_error(errors: Sequence[BaseException]) -> PolicyError | None:
    """Return the first of the errors that says that a policy raised, or ``None``."""
    return next((error for error in errors if isinstance(error, PolicyError)), None)


def _policy_error(failure: Failure, steps: int) -> PolicyError:
    done = "No step was" if not steps else f"{steps} step{' was' if steps == 1 else 's were'}"
    error = PolicyError(
        f"rollout(): the policy raised {failure.type_name}: {failure.text}\n{done} made before that, and not "
        "returned. The envs stand there, and all episodes go on: call rollout() with a mended policy, or reset()."
    )
    error.remote_traceback, remote = failure.traceback, RemoteTraceback(failure.traceback)
    original = original_of(failure)
    if original is not None:
        original.__cause__ = remote
    error.__cause__ = original or remote
    return error
