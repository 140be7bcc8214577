"""Whether an env has shown that it remembers something across resets; all workers of one batch share the answer."""

from __future__ import annotations

import logging

logger = logging.getLogger("multienv")


class MemoryAcrossResets:
    """Holds whether a replay from a reset has come out otherwise than what the caller saw.

    Attributes:
        has_shown: It has, in a worker of the batch. It never becomes false again.
    """

    def __init__(self) -> None:
        self.has_shown = self._is_loss_logged = False

    @property
    def reservation(self) -> str:
        """Return why a replay from a reset is not exact though it shows no difference."""
        if self.has_shown:
            return "This env carries memory across resets: a replay that begins at a reset may go on otherwise."
        return "An env that remembers something from before the reset where its replay began may go on otherwise."

    @property
    def lost(self) -> str:
        """Return what is lost when new envs replace old ones; ``""`` if no memory is known."""
        return "What the env remembered from earlier episodes is lost." if self.has_shown else ""

    def note(self, env: str, what: str) -> None:
        """Note that a replay from a reset differs; log a warning the first time.

        Args:
            env: Names the env.
            what: The difference.
        """
        if self.has_shown:
            return
        self.has_shown = True
        logger.warning(
            "%s carries memory across resets, or draws random numbers that multienv does not know: a replay from a "
            "reset came out otherwise (%s). From now on a replay begins at the construction where it can, and planned "
            "replacements wait for a reset of all envs of a worker, which then lose that memory. "
            "To have only recoveries that are shown to be exact, give RestartPolicy(accept='exact'). "
            "`multienv doctor` examines the env.",
            env,
            what,
        )

    def note_loss(self, env: str, why: str) -> str:
        """Note that new envs have replaced old ones; return what is lost, and log a warning the first time.

        Args:
            env: Names the env.
            why: The limit that was reached, in words.
        """
        if self.has_shown and not self._is_loss_logged:
            self._is_loss_logged = True
            logger.warning(
                "%s: its process is replaced, %s, by one with new envs. What the env remembers from earlier episodes "
                "(a curriculum, statistics) is lost, now and at each such replacement of an env of this batch. To keep "
                "it, raise the limit (max_rss, recycle_…), give RestartPolicy(accept='exact'), or give the env what it "
                "needs in the options of reset().",
                env,
                why,
            )
        return self.lost
