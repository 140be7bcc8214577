"""Check that an env survives the death of its process unnoticed.

::

    def test_my_env_recovers():
        check_env_recovers(make_my_env, steps=200, kills=5).raise_if_inexact()
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import gymnasium

from multienv.recovery.verification import same
from multienv.testing.killer import Killer, KillManner

Env = gymnasium.Env[Any, Any]
EnvFn = Callable[[], Env]

ENOUGH_MISMATCHES = 5


@dataclass(frozen=True)
class RecoveryCheck:
    """Tells what became of an env whose process was killed again and again.

    Attributes:
        asked: How many kills were asked for.
        kills: How many were delivered.
        exact: After how many of them the trajectory went on, bit for bit as without.
        truncated: After how many the episode was honestly truncated, because its recovery could not be shown exact.
        mismatches: What differed silently from the same env in this process; must be empty.
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
    """Run an env in a process that is killed, next to ``env_fn()`` in this process, and compare bit by bit.

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
        options: For SubprocessEnv.
    """
    if not 0 <= kills <= steps:
        raise ValueError(f"there must be at least as many steps as kills, not {steps} steps and {kills} kills")
    if make_env is None:
        make_env = _in_a_process(options)
    doomed = frozenset(random.Random(seed).sample(range(steps), kills))
    result = RecoveryCheck(asked=kills)
    step = attempt = 0
    while step < steps and len(result.mismatches) < ENOUGH_MISMATCHES:
        with _pair(make_env, env_fn) as (subject, reference):
            race = _Race(subject, reference, doomed=doomed, manner=manner)
            step, result = race.run(step, steps, seed=seed + attempt, result=result)
        attempt += 1
    return result


def _in_a_process(options: dict[str, Any]) -> Callable[[EnvFn], Any]:
    from multienv import SubprocessEnv

    # No reports: those of kills on purpose would push out those of real losses.
    return lambda env_fn: SubprocessEnv(env_fn, **{"reports": "", **options})


@contextlib.contextmanager
def _pair(make_env: Callable[[EnvFn], Any], env_fn: EnvFn) -> Iterator[tuple[Any, Env]]:
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
    """Steps two envs side by side: the subject, which is killed, and the reference."""

    def __init__(self, subject: Any, reference: Env, *, doomed: frozenset[int], manner: KillManner) -> None:
        self.subject = subject
        self.reference = reference
        self.doomed = doomed
        self.killer = Killer(subject, manners=(manner,))

    def run(self, step: int, steps: int, *, seed: int, result: RecoveryCheck) -> tuple[int, RecoveryCheck]:
        """Go on from ``step`` until all are done or the two differ; return the next step and the result so far."""
        actions = copy.deepcopy(self.reference.action_space)
        actions.seed(seed)
        found = self._reset(seed)
        ended = False
        while step < steps and found is None:
            if ended:
                found = self._reset(None)
                if found is not None:
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
            found = _step_difference(taken, expected)
            result = replace(result, exact=result.exact + (killed and found is None))
        if found is not None:
            text = f"after step {step} (seed {seed}): {found}"
            result = replace(result, mismatches=(*result.mismatches, text))
        return step, result

    def _reset(self, seed: int | None) -> str | None:
        observation, _ = self.subject.reset(seed=seed)
        expected, _ = self.reference.reset(seed=seed)
        return difference(observation, expected, "reset observation")


def _step_difference(taken: tuple[Any, ...], expected: tuple[Any, ...]) -> str | None:
    pairs = (
        ("observation", taken[0], expected[0]),
        ("reward", float(taken[1]), float(expected[1])),
        ("terminated", bool(taken[2]), bool(expected[2])),
        ("truncated", bool(taken[3]), bool(expected[3])),
    )
    found = (difference(one, other, name) for name, one, other in pairs)
    return next((one for one in found if one is not None), None)


def difference(seen: Any, expected: Any, name: str) -> str | None:
    """Tell where two values differ; ``None`` if they agree to the bit. The order of keys does not matter."""
    if isinstance(seen, Mapping) and isinstance(expected, Mapping) and seen.keys() == expected.keys():
        found = (difference(seen[key], expected[key], f"{name}[{key!r}]") for key in expected)
        return next((one for one in found if one is not None), None)
    if isinstance(seen, tuple | list) and type(seen) is type(expected) and len(seen) == len(expected):
        pairs = enumerate(zip(seen, expected, strict=True))
        found = (difference(one, other, f"{name}[{place}]") for place, (one, other) in pairs)
        return next((one for one in found if one is not None), None)
    return None if same(seen, expected) else f"{name}: {seen!r:.300} against {expected!r:.300}"
