"""Check that an environment of yours survives the death of its process unnoticed.

from multienv.testing import check_env_recovers

def test_my_env_recovers():
    check_env_recovers(make_my_env, steps=200, kills=5).raise_if_inexact()
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import gymnasium

from multienv.testing.chaos import Killer, KillManner
from multienv.testing.trajectories import first_difference

__all__ = ["RecoverableEnv", "RecoveryCheck", "check_env_recovers", "check_recovery"]

Env = gymnasium.Env[Any, Any]

ENOUGH_MISMATCHES = 5


class RecoverableEnv(Protocol):
    """What `check_recovery` needs: a `gymnasium.Env` whose ``statistics().pid`` is the process to kill.

    Where there are ``start()`` and ``initialize()``, they are called first.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """As in gymnasium."""

    def step(self, action: Any, /) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """As in gymnasium."""

    def statistics(self) -> Any:
        """An object with the attribute ``pid``."""

    def close(self) -> None:
        """As in gymnasium."""


@dataclass(frozen=True)
class RecoveryCheck:
    """What became of an env whose process was killed again and again.

    Args:
        asked: how many kills were asked for.
        kills: how many were delivered.
        exact: after how many of them the trajectory went on, bit for bit as without.
        truncated: after how many the episode was honestly truncated, because its recovery could not be shown exact.
        mismatches: what differed silently from the same env in this process; must be empty.
    """

    asked: int
    kills: int = 0
    exact: int = 0
    truncated: int = 0
    mismatches: tuple[str, ...] = ()

    @property
    def is_honest(self) -> bool:
        """Whether nothing wrong was passed off as right."""
        return not self.mismatches

    @property
    def is_exact(self) -> bool:
        """Whether every kill asked for was delivered, and recovered from exactly."""
        return self.is_honest and self.exact == self.kills == self.asked

    def raise_if_inexact(self) -> None:
        """Raise `AssertionError` unless `is_exact`."""
        if not self.is_exact:
            raise AssertionError(self._describe())

    def raise_if_dishonest(self) -> None:
        """Raise `AssertionError` unless `is_honest`; truncated episodes are allowed."""
        if not self.is_honest:
            raise AssertionError(self._describe())

    def _describe(self) -> str:
        count = f"of {self.asked} kills asked for {self.kills} were delivered"
        outcome = f"{self.exact} recovered from exactly, {self.truncated} by truncation"
        return "\n  ".join([f"{count}, {outcome}", *self.mismatches])


def check_env_recovers(
    env_fn: Callable[[], Env],
    *,
    steps: int = 200,
    kills: int = 5,
    seed: int = 0,
    manner: KillManner = "SIGKILL",
    **options: Any,
) -> RecoveryCheck:
    """Run ``multienv.SubprocessEnv(env_fn, **options)`` with kills, next to ``env_fn()`` in this process.

    See `check_recovery`.
    """
    # Imported late: the test kit is used by tests of layers below this one.
    from multienv import SubprocessEnv

    def make_env(build: Callable[[], Env]) -> Any:
        # No reports: what is killed on purpose would push out those of real losses.
        return SubprocessEnv(build, **{"reports": "", **options})

    return check_recovery(make_env, env_fn, steps=steps, kills=kills, seed=seed, manner=manner)


def check_recovery(
    make_env: Callable[[Callable[[], Env]], Any],
    env_fn: Callable[[], Env],
    *,
    steps: int = 200,
    kills: int = 5,
    seed: int = 0,
    manner: KillManner = "SIGKILL",
) -> RecoveryCheck:
    """Run ``make_env(env_fn)`` with kills, next to ``env_fn()`` in this process, and compare bit by bit.

    Both get the same seed at the first reset, none later, and the same random actions. The kills come just before
    steps that the seed chooses; they may fall on the first step of an episode. When an episode is truncated by a
    recovery (``info["multienv"]``), or a difference is found, both envs are built anew and go on with another seed.
    After a few differences the check ends.

    Args:
        make_env: wraps an ``env_fn`` into a `RecoverableEnv`.
        env_fn: your env, deterministic under its seed.
        steps: how many steps in all.
        kills: before how many of them to kill; at most *steps*.
        seed: decides seeds, actions and the steps to kill before.
        manner: the signal.
    """
    if not 0 <= kills <= steps:
        raise ValueError(f"there must be at least as many steps as kills, not {steps} steps and {kills} kills")
    doomed = frozenset(random.Random(seed).sample(range(steps), kills))
    result = RecoveryCheck(asked=kills)
    step = attempt = 0
    while step < steps and len(result.mismatches) < ENOUGH_MISMATCHES:
        with _pair(make_env, env_fn) as (subject, reference):
            race = _Race(subject, reference, doomed=doomed, manner=manner)
            step, result = race.run(step, steps, seed=seed + attempt, result=result)
        attempt += 1
    return result


@contextlib.contextmanager
def _pair(
    make_env: Callable[[Callable[[], Env]], RecoverableEnv], env_fn: Callable[[], Env]
) -> Iterator[tuple[RecoverableEnv, Env]]:
    with contextlib.ExitStack() as stack:
        reference = env_fn()
        stack.callback(reference.close)
        subject = make_env(env_fn)
        stack.callback(subject.close)
        for name in ("start", "initialize"):
            method = getattr(subject, name, None)
            if method is not None:
                method()
        yield subject, reference


class _Race:
    """Two envs side by side: the subject, which is killed, and the reference."""

    def __init__(self, subject: RecoverableEnv, reference: Env, *, doomed: frozenset[int], manner: KillManner) -> None:
        self.subject = subject
        self.reference = reference
        self.doomed = doomed
        self.killer = Killer(lambda: subject.statistics().pid, manners=(manner,))

    def run(self, step: int, steps: int, *, seed: int, result: RecoveryCheck) -> tuple[int, RecoveryCheck]:
        """Go on from *step* until all are done, or the two part; returns the next step and what became of them."""
        actions = copy.deepcopy(self.reference.action_space)
        actions.seed(seed)
        difference = self._reset(seed)
        ended = False
        while step < steps and difference is None:
            if ended:
                difference = self._reset(None)
                if difference is not None:
                    break
            killed = step in self.doomed and self.killer.strike().delivered
            result = replace(result, kills=result.kills + killed)
            action = actions.sample()
            taken = self.subject.step(copy.deepcopy(action))
            step += 1
            if taken[3] and "multienv" in taken[4]:
                return step, replace(result, truncated=result.truncated + 1)
            expected = self.reference.step(copy.deepcopy(action))
            ended = bool(expected[2] or expected[3])
            difference = _step_difference(taken, expected)
            result = replace(result, exact=result.exact + (killed and difference is None))
        if difference is not None:
            found = f"after step {step} (seed {seed}): {difference}"
            result = replace(result, mismatches=(*result.mismatches, found))
        return step, result

    def _reset(self, seed: int | None) -> str | None:
        observation, _ = self.subject.reset(seed=seed)
        expected, _ = self.reference.reset(seed=seed)
        return first_difference(observation, expected, "reset observation")


def _step_difference(taken: tuple[Any, ...], expected: tuple[Any, ...]) -> str | None:
    pairs = (
        ("observation", taken[0], expected[0]),
        ("reward", float(taken[1]), float(expected[1])),
        ("terminated", bool(taken[2]), bool(expected[2])),
        ("truncated", bool(taken[3]), bool(expected[3])),
    )
    differences = (first_difference(one, other, name) for name, one, other in pairs)
    return next((difference for difference in differences if difference is not None), None)
