"""How long an env may take for a request: as given, or, for ``"auto"``, found from the times that requests took."""

from __future__ import annotations

from math import inf

from multienv.config import Deadlines

# The shortest deadline that is found from the times seen, seconds.
LEAST = 60.0
# A wait for less than this part of it says nothing of a deadline, and costs no more than without one.
BRIEF = 0.01
# A deadline is so many times the slowest request that was seen.
MULTIPLE = 10.0
# There is no deadline before so many steps and resets: the first ones compile and load.
STEPS, RESETS = 20, 3
# A deadline is so many times as long where a loss may cost the episode, and in the process after a first loss.
LONGER = 5.0


class RequestDeadlines:
    """Keeps the deadlines of the requests to one worker, and finds those that are ``"auto"``.

    Args:
        deadlines: As the user gave them.
        resets_in_steps: A step may be a reset, too.

    Attributes:
        step, reset, call: Seconds that an env may take; ``None``: there is no limit, or none yet.
        is_learning: One of them is ``"auto"``.
    """

    def __init__(self, deadlines: Deadlines, *, resets_in_steps: bool) -> None:
        self._finds = {name for name in ("step", "reset") if getattr(deadlines, name) == "auto"}
        step, reset = deadlines.step, deadlines.reset
        self.step: float | None = None if isinstance(step, str) else step
        self.reset: float | None = None if isinstance(reset, str) else reset
        self.call = deadlines.call
        self.is_learning = bool(self._finds)
        self._slowest = {"step": 0.0, "reset": 0.0}
        self._resets_in_steps = resets_in_steps
        self.learn(0, 0)

    def finds(self, name: str) -> bool:
        """Tell whether the deadline of ``"step"`` or ``"reset"`` is ``"auto"``."""
        return name in self._finds

    def note(self, name: str, seconds: float) -> bool:
        """Note how long an env has taken for a step or a reset; return whether none took longer before."""
        if seconds <= self._slowest.get(name, inf):
            return False
        self._slowest[name] = seconds
        return True

    def learn(self, steps: int, resets: int) -> None:
        """Find the deadlines, once there were so many steps and resets."""
        step, reset = self._slowest["step"], self._slowest["reset"]
        if self._resets_in_steps:
            step = reset = max(step, reset)
        if "step" in self._finds and steps >= STEPS:
            self.step = max(LEAST, MULTIPLE * step)
        if "reset" in self._finds and resets >= RESETS:
            self.reset = max(LEAST, MULTIPLE * reset)
