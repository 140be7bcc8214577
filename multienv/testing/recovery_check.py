"""Check that an env survives the death of its process unnoticed.

::

    def test_my_env_recovers():
        check_env_recovers(make_my_env, steps=200, kills=5).raise_if_inexact()
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from multienv import SubprocessEnv
from multienv.testing.killer import Killer, KillManner
from multienv.testing.side_by_side import ENOUGH_MISMATCHES, PATIENT, EnvFn, SideBySide


@dataclass(frozen=True)
class RecoveryCheck:
    """Tells what became of an env whose process was killed again and again.

    Attributes:
        asked: How many kills were asked for.
        kills: How many were delivered.
        exact: After how many of them the trajectory went on, bit for bit as without.
        truncated: After how many the episode was honestly truncated, because its recovery could not be shown exact.
        mismatches: What differed silently from the undisturbed env; must be empty.
    """

    asked: int
    kills: int = 0
    exact: int = 0
    truncated: int = 0
    mismatches: tuple[str, ...] = ()

    @property
    def is_honest(self) -> bool:
        """Tell whether nothing differed silently."""
        return not self.mismatches

    @property
    def is_exact(self) -> bool:
        """Tell whether every kill asked for was delivered, and recovered from exactly."""
        return self.is_honest and self.exact == self.kills == self.asked

    def raise_if_inexact(self) -> None:
        """Raise AssertionError unless all recoveries were exact."""
        if not self.is_exact:
            raise AssertionError(self._described())

    def raise_if_dishonest(self) -> None:
        """Raise AssertionError if anything differed silently; truncated episodes are allowed."""
        if not self.is_honest:
            raise AssertionError(self._described())

    def _described(self) -> str:
        count = f"of {self.asked} kills asked for {self.kills} were delivered"
        outcome = f"{self.exact} recovered from exactly, {self.truncated} by truncation"
        return "\n  ".join([f"{count}, {outcome}", *self.mismatches])


def check_env_recovers(
    env_fn: EnvFn,
    *,
    steps: int = 200,
    kills: int = 5,
    seed: int = 0,
    manner: KillManner = "SIGKILL",
    make_env: Callable[[EnvFn], Any] | None = None,
    **options: Any,
) -> RecoveryCheck:
    """Run an env in a process that is killed, next to one that is not, and compare bit by bit.

    Both get the same seed at the first reset, none later, and the same random actions. The kills come just before
    steps that the seed chooses; they may fall on the first step of an episode. When an episode is truncated by a
    recovery (``info["multienv"]``), or a difference is found, both envs are built anew and go on with another seed.
    After a few differences the check ends.

    Args:
        env_fn: Builds your env, deterministic under its seed.
        steps: How many steps in all.
        kills: Before how many of them to kill; at most ``steps``.
        seed: Decides seeds, actions and the steps to kill before.
        manner: The signal.
        make_env: Wraps an ``env_fn`` into an env whose ``statistics().pid`` is the process to kill; ``None``:
            ``SubprocessEnv(env_fn, **options)``.
        options: For SubprocessEnv; its deadlines are a minute unless they say otherwise. The undisturbed env has
            the same ``worker_env``.
    """
    if not 0 <= kills <= steps:
        raise ValueError(f"there must be at least as many steps as kills, not {steps} steps and {kills} kills")
    # No reports: reports of kills on purpose would push out the reports of real losses.
    make = make_env or (lambda env_fn: SubprocessEnv(env_fn, **{"reports": "", "deadlines": PATIENT, **options}))
    doomed = frozenset(random.Random(seed).sample(range(steps), kills))
    check, step, attempt = RecoveryCheck(asked=kills), 0, seed
    while step < steps and len(check.mismatches) < ENOUGH_MISMATCHES:
        with SideBySide(env_fn, lambda: [make(env_fn)], 1, attempt, options.get("worker_env")) as pair:
            killer = Killer(pair.struck.envs[0], manners=(manner,))
            while step < steps and pair.agree:
                killed = step in doomed and killer.strike()
                pair.step()
                step += 1
                check = replace(
                    check,
                    kills=check.kills + killed,
                    exact=check.exact + (killed and pair.agree),
                    truncated=check.truncated + bool(pair.reasons),
                )
            if pair.mismatch:
                text = f"after step {step} (seed {attempt}): {pair.mismatch}"
                check = replace(check, mismatches=(*check.mismatches, text))
        attempt += 1
    return check
