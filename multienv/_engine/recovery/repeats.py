"""Decides what the log says of losses that are repeated. Pure: the clock is given."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

# Seconds between two lines about losses of one kind.
PERIOD = 60.0


@dataclass(slots=True)
class _Kind:
    """Counts the losses of one kind since the last line about them.

    Attributes:
        outcome: Of all of them.
        logged_at: When the last line was written, seconds of the clock.
        count: Losses since then.
        last: The text about the newest one.
    """

    outcome: str
    logged_at: float
    count: int = 0
    last: str = ""

    def next_line(self, now: float) -> str:
        """Return a line about the losses since the last one, and begin to count anew."""
        count, seconds = self.count, now - self.logged_at
        self.count, self.logged_at = 0, now
        if count == 1:
            return self.last
        return f"{count} such losses in the last {seconds:.0f} s, all {self.outcome}. The last: {self.last}"


class Repeats:
    """Decides when a loss is logged: the first of each kind at once, then at most one line a minute and kind."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[Hashable, str], _Kind] = {}

    def line(self, cause: Hashable, outcome: str, text: str, now: float) -> str:
        """Return the line to log after a loss; ``""``: the loss is only counted.

        Args:
            cause: With ``outcome``, the kind of the loss.
            outcome: What became of it.
            text: The line about this loss alone.
            now: The clock, seconds.
        """
        kind = self._kinds.setdefault((cause, outcome), _Kind(outcome, now - PERIOD))
        kind.count, kind.last = kind.count + 1, text
        return kind.next_line(now) if now - kind.logged_at >= PERIOD else ""

    def rest(self, now: float) -> list[str]:
        """Return a line for each kind of which losses have only been counted since its last line."""
        return [kind.next_line(now) for kind in self._kinds.values() if kind.count]
