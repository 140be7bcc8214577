"""When the state of an env is asked for: pure arithmetic, in steps of its life."""

from __future__ import annotations

from multienv.config import RestartPolicy

# Time spent stepping for each second spent asking: 1 % is what it may cost. Where the journal is about to forget all
# that there is to replay, 10 %; or what it takes, if that is no more than this, in seconds.
_PACE = 100
_HURRY = 10
_CHEAP = 0.1
# Where there is a snapshot to come back to, only what takes no longer than this is asked for in a hurry, in seconds.
_CHEAP_BESIDE = 5e-3
# Steps until it is tried again, and how many times as many with each failure; after one that cost the process, more.
_PATIENCE = 1024
_GROWTH = 4
_AFTER_LOSS = 64


class Anchoring:
    """Looks after one env.

    Attributes:
        wanted: The policy has any loss made good, and states kept for it.
        taken: How many have been kept.
        obstacle: Why the last one that was asked for is not, or ``""``.
    """

    __slots__ = ("_hurry_at", "_next_at", "_patience", "_seconds", "obstacle", "taken", "wanted")

    def __init__(self, policy: RestartPolicy) -> None:
        """None has been asked for."""
        self.wanted = policy.state_anchors and policy.on_crash == policy.on_timeout == "replay"
        self.taken = 0
        self.obstacle = ""
        self._next_at = self._hurry_at = 0
        self._patience = _PATIENCE
        self._seconds = float("inf")

    def may_ask(self, steps: int, *, hurry: bool, beside: bool = False) -> bool:
        """Whether it may be asked for after so many steps, perhaps beside a snapshot."""
        if beside and self._seconds > _CHEAP_BESIDE:
            hurry = False
        return self.wanted and steps >= (self._hurry_at if hurry else self._next_at)

    def took(self, steps: int, seconds: float, step_seconds: float) -> None:
        """One has been kept. It took the processor so long, which the first in a process does longer than others."""
        self.taken += 1
        self.obstacle = ""
        self._patience = _PATIENCE
        self._seconds = min(self._seconds, seconds)
        self._next_at = steps + int(_PACE * self._seconds / step_seconds)
        self._hurry_at = steps + (0 if self._seconds <= _CHEAP else int(_HURRY * self._seconds / step_seconds))

    def move(self, steps: int) -> None:
        """So many steps of its life have been added, or taken away, without having been taken."""
        self._next_at, self._hurry_at = self._next_at + steps, self._hurry_at + steps

    def refused(self, steps: int, why: str, *, lost: bool = False) -> None:
        """There is none; with ``lost`` the process ended of it."""
        self.obstacle = why
        self._patience *= _AFTER_LOSS if lost else _GROWTH
        self._next_at = self._hurry_at = steps + self._patience
