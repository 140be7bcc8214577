"""Check that an env is recovered exactly when its process dies.

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
    """Holds the outcome of :func:`check_env_recovers`: an env whose process was killed again and again.

    Attributes:
        asked: Number of kills that you asked for.
        kills: Number of kills that were delivered.
        exact: Number of kills after which the trajectory went on bit for bit as without them, from a snapshot or from
            all that happened since the env was built.
        replayed: Number of kills after which the trajectory went on so far bit for bit, repeated from a reset. An env
            that remembers something from before that reset may go on otherwise.
        truncated: Number of kills after which the episode was truncated, because its recovery could not be shown exact.
        strayed: Differences from the undisturbed env after a recovery that was only ``"replayed"``: the env carries
            memory across resets.
        mismatches: Differences from the undisturbed env that multienv did not report; must be empty.
    """

    asked: int
    kills: int = 0
    exact: int = 0
    truncated: int = 0
    replayed: int = 0
    strayed: tuple[str, ...] = ()
    mismatches: tuple[str, ...] = ()

    @property
    def is_honest(self) -> bool:
        """Return whether no difference went unreported."""
        return not self.mismatches

    @property
    def is_exact(self) -> bool:
        """Return whether every kill that you asked for was delivered and recovered from exactly."""
        return self.is_honest and self.exact == self.kills == self.asked

    def raise_if_inexact(self) -> None:
        """Raise AssertionError unless all recoveries were exact."""
        if not self.is_exact:
            raise AssertionError(self._described())

    def raise_if_dishonest(self) -> None:
        """Raise AssertionError if a difference went unreported; truncated episodes are allowed."""
        if not self.is_honest:
            raise AssertionError(self._described())

    def _described(self) -> str:
        count = f"of {self.asked} kills asked for {self.kills} were delivered"
        outcome = f"{self.exact} recovered from exactly, {self.replayed} replayed from a reset, "
        outcome += f"{self.truncated} by truncation"
        return "\n  ".join([f"{count}, {outcome}", *self.strayed, *self.mismatches])


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
    """Run an env in a process that is killed, next to an undisturbed one, and compare the two bit by bit.

    Both envs get the same seed at the first reset, no seed later, and the same random actions. The kills come just
    before steps that the seed chooses, possibly the first step of an episode. When a recovery truncates an episode
    (``info["multienv"]``), or a difference is found, both envs are built anew with another seed. After five differences
    the check ends.

    Args:
        env_fn: Function that builds your env, which must be deterministic under its seed.
        steps: Number of steps in all.
        kills: Number of steps before which the process is killed; at most ``steps``.
        seed: Seed of the choice of env seeds, actions and steps to kill before.
        manner: The signal.
        make_env: Function that makes an env from ``env_fn``; its ``statistics().pid`` is the process to kill. ``None``:
            ``SubprocessEnv(env_fn, **options)``.
        options: Options for SubprocessEnv; the default deadline is a minute for a step or a reset. The undisturbed env
            has the same ``worker_env``.
    """
    if not 0 <= kills <= steps:
        raise ValueError(f"there must be at least as many steps as kills, not {steps} steps and {kills} kills")
    # No reports: reports of kills on purpose would push out the reports of real losses.
    make = make_env or (lambda env_fn: SubprocessEnv(env_fn, **{"reports": "", "deadlines": PATIENT, **options}))
    doomed = frozenset(random.Random(seed).sample(range(steps), kills))
    check, step, attempt = RecoveryCheck(asked=kills), 0, seed
    while step < steps and len(check.mismatches + check.strayed) < ENOUGH_MISMATCHES:
        with SideBySide(env_fn, lambda: [make(env_fn)], 1, attempt, options.get("worker_env")) as pair:
            killer, replays = Killer(pair.struck.envs[0], manners=(manner,)), 0
            while step < steps and pair.agree:
                killed = step in doomed and killer.strike()
                pair.step()
                step += 1
                was_replayed = killed and _outcome(pair.struck.envs[0]) == "replayed"
                replays += was_replayed
                check = replace(
                    check,
                    kills=check.kills + killed,
                    exact=check.exact + (killed and pair.agree and not was_replayed),
                    replayed=check.replayed + (was_replayed and pair.agree),
                    truncated=check.truncated + bool(pair.reasons),
                )
            if pair.mismatch:
                text = f"after step {step} (seed {attempt}): {pair.mismatch}"
                if replays:
                    check = replace(check, strayed=(*check.strayed, text))
                else:
                    check = replace(check, mismatches=(*check.mismatches, text))
        attempt += 1
    return check


def _outcome(env: Any) -> str:
    """Return the outcome of the last recovery of an env."""
    last = env.statistics().last_recovery
    return "" if last is None else str(last.outcome)
