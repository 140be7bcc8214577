"""Rare branches, each named once where it is taken: tests fail unless the simulator has taken every one of them.

After the *sometimes* assertions of Antithesis (antithesis.com/docs/best_practices/sometimes_assertions) and the
``CODE_PROBE`` of FoundationDB.
"""

from __future__ import annotations

from collections.abc import Callable

# What is told of rare branches that are taken; ``None`` outside tests.
listener: Callable[[str], object] | None = None


def sometimes(what: str, condition: object = True) -> None:
    """Name a rare branch where it is taken; does nothing outside tests.

    Args:
        what: What is the case here, in words that no other call has.
        condition: It is not the case unless this is true.
    """
    if listener is not None and condition:
        listener(what)
