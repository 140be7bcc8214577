"""What the workers of a batch have in common about their code: its files, the changes told of, how it is built."""

from __future__ import annotations

import logging

logger = logging.getLogger("multienv")


class BatchCode:
    """Keeps one copy of the list of files, which is long, and has each changed file told once.

    Attributes:
        builds_alone: An env could not be built beside the one that it was to replace, which holds a port or a lock.
    """

    def __init__(self) -> None:
        self.builds_alone = False
        self._first = b""
        self._told: set[str] = set()

    def shared(self, files: bytes) -> bytes:
        """Return an equal list that another worker keeps, if there is one."""
        self._first = self._first or files
        return self._first if files == self._first else files

    def tell(self, file: str) -> None:
        """Log that a file has changed, the first time."""
        if file not in self._told:
            self._told.add(file)
            logger.warning(
                "%s has changed since the running envs imported it, and a new process imports it as it is now. A "
                "replay there counts as replayed, not as exact, even if all compares equal; "
                "RestartPolicy(accept='exact') does not take it.",
                file,
            )
