"""Constants that are rare in life, drawn anew for each simulated program: small limits are met in every run then."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from multienv import Deadlines, RestartPolicy
from multienv._engine.recovery import hot_path, journal, pending, recoverer, state_machine, supervisor, way_back
from multienv._engine.recovery.way_back import ForkingPolicy
from multienv._engine.wire import segment

LONGER = 3.0  # with "auto"


@dataclass(frozen=True)
class Constants:
    """Stand in for constants of the package, and for defaults of a policy.

    Attributes:
        poison_after: ``state_machine.POISON_AFTER``.
        backoff, recycle_after_steps: See :class:`~multienv.RestartPolicy`.
        snapshot_every: Steps between two snapshots, for policies with snapshots.
        journal_limit, replay_limit: The same; ``None``: as the policy has them.
        losses: ``state_machine.MOST_LOSSES``.
        shows_after: When an env that remembers something across resets shows it, see ``SimulatedEnv``.
        most_calls: ``journal.MOST_CALLS``.
        sample: ``hot_path.SAMPLE``.
        payload: Bytes of a payload that have a place among the control words.
        auto: The deadlines of steps and resets are found from the times seen, from the first one on.
    """

    poison_after: int = 2
    backoff: float = 0.0
    snapshot_every: int = 2
    recycle_after_steps: int | None = None
    journal_limit: int | None = None
    replay_limit: float | None = None
    losses: int = 6
    shows_after: int | None = 5
    most_calls: int = 1000
    sample: int = 63
    payload: int = 512
    auto: bool = False

    @property
    def forgets(self) -> bool:
        """Whether a journal may have forgotten what a recovery needs."""
        return self.journal_limit is not None or self.replay_limit is not None or self.most_calls < 1000

    def policy(self, base: RestartPolicy) -> RestartPolicy:
        """Return a policy with these constants."""
        changes = {"journal_limit": self.journal_limit, "replay_limit": self.replay_limit}
        if isinstance(base, ForkingPolicy):
            changes["snapshot_every"] = self.snapshot_every
        return replace(
            base,
            backoff=self.backoff,
            recycle_after_steps=self.recycle_after_steps if base.replays else None,
            **{name: value for name, value in changes.items() if value is not None},
        )

    def deadlines(self, base: Deadlines) -> Deadlines:
        """Return deadlines with these constants."""
        return replace(base, step="auto", reset="auto") if self.auto else base

    def step_limit(self, limit: float) -> float:
        """Return how long one process may take for a step: longer, with "auto", if there is no snapshot."""
        return LONGER * limit if self.auto else limit

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Have the package use these constants meanwhile."""
        changes = [
            (state_machine, "MOST_LOSSES", self.losses),
            (recoverer, "MOST_LOSSES", self.losses),
            *((module, "POISON_AFTER", self.poison_after) for module in (state_machine, recoverer, way_back)),
            (journal, "MOST_CALLS", self.most_calls),
            (journal, "OVERHEAD", 0),
            (hot_path, "SAMPLE", self.sample),
            (supervisor, "SAMPLE", self.sample),
            (segment, "_SHORT", self.payload),
        ]
        if self.auto:
            found = {"LEAST": 1.0, "MULTIPLE": 1.0, "STEPS": 0, "RESETS": 0, "LONGER": LONGER}
            changes += [(pending, name, value) for name, value in found.items()]
        before = [(module, name, getattr(module, name)) for module, name, _ in changes]
        try:
            for module, name, value in changes:
                setattr(module, name, value)
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)


def constants_of(seed: int) -> Constants:
    """Return the constants that are drawn with a seed; with 0 those of life. Most of them are as in life."""
    if not seed:
        return Constants()
    dice = random.Random(seed)

    def rarely(value: object, usual: object) -> object:
        return value if dice.random() < 0.3 else usual

    drawn = replace(
        Constants(),
        poison_after=rarely(dice.choice([1, 3, 4]), 2),
        backoff=rarely(0.5, 0.0),
        snapshot_every=dice.choice([1, 2, 3]),
        recycle_after_steps=rarely(dice.choice([1, 3, 5]), None),
        journal_limit=rarely(dice.choice([0, 300, 900, 2500]), None),
        # Rarer still: nothing is replayed then, and little is left to be checked.
        replay_limit=rarely(0.0, None) if dice.random() < 0.3 else None,
        losses=rarely(dice.choice([3, 4]), 6),
        shows_after=rarely(dice.choice([1, None]), 5),
        most_calls=rarely(dice.choice([0, 1]), 1000),
        sample=dice.choice([0, 1, 3, 63]),
        payload=dice.choice([16, 64, 512]),
        auto=rarely(True, False),
    )
    if drawn.poison_after == 1:  # one process that hangs while it is built ends a replacement by plan, and the reset
        return replace(drawn, recycle_after_steps=None)
    return drawn
