"""SAME_STEP with a moment between two episodes, in which the process can be replaced.

A worker that resets its env in the step that ends an episode leaves no such moment. So where one env has a process that
is replaced now and then, the worker resets it in the next step, and the trainer asks for that step at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from multienv._engine.asking.members import Ending
from multienv._engine.recovery.answers import info_of
from multienv._engine.recovery.supervisor import Supervisor
from multienv._engine.wire.codecs import RowsReply
from multienv._engine.wire.infos import Extras


class ResetAtOnce:
    """Lets the step that resets follow the step that ended an episode: an autoreset hook, one env a worker.

    Args:
        observation_of: Returns a copy of the observation in a reply.
    """

    leaves_ends = True

    def __init__(self, observation_of: Callable[[RowsReply], Any]) -> None:
        self._observation_of = observation_of

    def first(self, supervisor: Supervisor) -> None:
        """Return ``None``: a step is a step."""

    def next(
        self, supervisor: Supervisor, ended: Ending | None, reply: RowsReply, request: Any
    ) -> tuple[Ending, str, Any] | None:
        """Return what to keep of a reply that ended an episode, and the request that follows it."""
        if ended is not None and ended.number != supervisor.position.number:
            # A reset that ended process after process: the next one has an env without the past that made it fail.
            is_lost = reply.truncated[0] and not ended.is_last
            again = ended._replace(number=supervisor.position.number, is_last=True)
            return (again, "step", request) if is_lost else None
        if not (reply.terminated[0] or reply.truncated[0]):
            return None
        observation = self._observation_of(reply)
        flags = bool(reply.terminated[0]), bool(reply.truncated[0])
        kept = RowsReply([], reply.rewards.copy(), reply.terminated.copy(), reply.truncated.copy(), errors=reply.errors)
        returned = observation, float(reply.rewards[0]), *flags, info_of(reply.extras or Extras())
        return Ending(returned, kept, supervisor.position.number), "step", request

    def joined(self, ended: Ending | None, reply: RowsReply) -> RowsReply:
        """Return the outcome of a step, as a worker gives it that resets in the same step."""
        if ended is None:
            return reply
        observation, *_, final_info = ended.returned
        extras = reply.extras or Extras()
        info = {**info_of(extras), "final_obs": observation, "final_info": final_info}
        if "multienv" in final_info:
            info["multienv"] = final_info["multienv"]
        for error in reply.errors.values():
            error.returned = ended.returned  # type: ignore[attr-defined]
        return RowsReply(
            reply.leaves,
            ended.reply.rewards,
            ended.reply.terminated,
            ended.reply.truncated | reply.truncated,  # of a reset that ended every process
            Extras([(0, info)], {}, extras.observations),
            {**ended.reply.errors, **reply.errors},
        )
