"""The calls to one supervised env, whole and in two halves: a fan-out over one member."""

from __future__ import annotations

from typing import Any

from multienv.errors import CallPendingError
from multienv.fanout import FanOut, Followup, Round, resumed
from multienv.recovery.state_machine import Process
from multienv.recovery.supervisor import Supervisor


class Calls:
    """Makes one call at a time to one env.

    A step that was interrupted is completed by the next :meth:`step`, whose own action is not taken; ``reset`` drops
    it. Any other interrupted call is completed by whatever is called next, and its outcome dropped.

    Args:
        supervisor: Of the env.
        followup: Makes resets of steps and lets resets follow them.
    """

    __slots__ = ("_fan", "_supervisor")

    def __init__(self, supervisor: Supervisor, followup: Followup | None = None) -> None:
        self._supervisor = supervisor
        self._fan = FanOut([supervisor], followup=followup, skips_none=False)

    def step(self, action: Any) -> Any:
        """Take a step, or complete the one that was interrupted, whose info then says so."""
        fan = self._fan
        unfinished = fan.unfinished
        if unfinished is not None and unfinished.name == "step" and unfinished.whole:
            return self._outcome(fan.resume())
        return self.ask("step", action)

    def ask(self, name: str, request: Any) -> Any:
        """Send a request, a message or the action of a step, and return its answer; raise what it raises."""
        if self._fan.unfinished is not None:
            self.settle(name)
        return self._outcome(self._fan.ask(name, (request,)))

    def send(self, name: str, request: Any) -> None:
        """Send a request whose answer :meth:`wait` collects."""
        self.settle(name)
        current = self._fan.send(name, (request,), whole=False)
        if current.failures:
            self._outcome(current)

    def wait(self, name: str, timeout: float | None) -> Any:
        """Collect the answer to the request that :meth:`send` sent under this name."""
        unfinished = self._fan.unfinished
        if unfinished is None or unfinished.name != name or unfinished.whole:
            self._supervisor.refuse(f"{name}_wait")
        return self._outcome(self._fan.collect(timeout))

    def resume(self) -> Any:
        """Return the answer to the last request, collected before or not."""
        return self._supervisor.resume() if self._fan.unfinished is None else self._outcome(self._fan.resume())

    def settle(self, name: str) -> None:
        """See to what an earlier call has left behind, before ``name`` is called.

        Raises:
            CallPendingError: A step was interrupted, or an answer is to be collected with its ``…_wait()``.
        """
        unfinished = self._fan.unfinished
        if unfinished is None:
            return
        if self._supervisor.state.process is Process.CLOSED:  # meanwhile; the supervisor refuses what is called next
            self._fan.finish()
            return
        asked = unfinished.name
        if not unfinished.whole:
            raise CallPendingError(f"{name}(): {asked} is pending. Call {asked}_wait() first.", asked)
        if asked == "step" and name != "reset":
            advice = "Call step() to complete it, or reset() to drop it."
            raise CallPendingError(f"{name}(): a step was interrupted. {advice}", asked)
        self._fan.drop()

    def _outcome(self, current: Round) -> Any:
        """Return or raise what came of a call, which is finished with that."""
        for error in current.failures.values():
            self._fan.finish()
            raise error
        answer = current.answers[0]
        if current.resumed and current.name == "step":
            answer = resumed(answer)
        self._fan.finish()
        return answer
