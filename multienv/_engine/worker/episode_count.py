"""A count of episodes that recoveries restore like the random generators of an env; see ``seeding``."""

from __future__ import annotations


class EpisodeCount:
    """Counts the episodes of an env that holds it in an attribute of itself, or of a wrapper.

    Attributes:
        begun: How many have begun.
    """

    __slots__ = ("begun",)

    def __init__(self) -> None:
        self.begun = 0

    def getstate(self) -> int:
        """Return how many have begun."""
        return self.begun

    def setstate(self, begun: int) -> None:
        """Go on from there."""
        self.begun = begun
