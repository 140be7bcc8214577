"""Bound how many workers of a batch build their envs at the same time."""

from __future__ import annotations

from multienv._engine.threads import Lock


class Turns:
    """Bounds how many workers build their envs at the same time.

    A turn is taken by name, and taking it again does nothing. So an interruption right after that costs no turn.

    Args:
        most: How many may build at the same time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._building: set[object] = set()
        self._lock = Lock()

    def take(self, name: object) -> bool:
        """Take a turn if there is one, and tell whether there is; it lasts until :meth:`give_back`."""
        with self._lock:
            if name not in self._building and len(self._building) >= self.most:
                return False
            self._building.add(name)
            return True

    def give_back(self, name: object) -> None:
        """End a turn; does nothing if it was not taken."""
        self._building.discard(name)
