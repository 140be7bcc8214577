"""Check that an env is recovered exactly when its process dies.

::

    def test_my_env_recovers():
        check_env_recovers(make_my_env, steps=200, kills=5).raise_if_inexact()
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from multienv import Deadlines, MultiEnv, RestartPolicy, create_subprocess_envs
from multienv._engine.building.building import EnvFn
from multienv._engine.recovery.verification import same
from multienv.errors import EnvsFailedError, WorkerLostError, first_line
from multienv.events import Event, Loss
from multienv.testing.killer import Killer, KillManner, worker_pids

# After so many differences a check ends.
ENOUGH_MISMATCHES = 5
# Arrays of no more values are shown whole.
_FEW = 16
# For envs that may hang by themselves; a step is not expected to take so long.
PATIENT = Deadlines(reset=60.0, step=60.0)

# A worker that is struck, or whose env crashes by chance, is restarted as often as it takes.
MANY_RESTARTS = 1_000_000
# Options of SubprocessEnv for an env that is not struck: a busy machine is waited for, and what the env itself loses is
# recovered.
UNDISTURBED: dict[str, Any] = {
    "restart": RestartPolicy(max_restarts=MANY_RESTARTS),
    "deadlines": PATIENT,
    "reports": "",
}


@dataclass(frozen=True)
class RecoveryCheck:
    """Holds the outcome of :func:`check_env_recovers`: envs whose processes were killed again and again.

    Attributes:
        asked: Number of kills that you asked for.
        kills: Number of kills that were delivered.
        steps: Env steps that were compared with undisturbed envs.
        episodes: Number of episodes that ended by themselves in these steps. 0: no later reset was compared.
        losses: Number of workers that were lost. A signal may hit a worker that is dead or stopped already.
        own_losses: Number of workers that the env itself has lost, without a signal: those of undisturbed envs, and
            those among ``losses``, unless ``make_env`` was given.
        killed: Ids of the processes that got a signal.
        exact: Number of losses after which the episode went on from a snapshot, or from all that happened since the env
            was built.
        replayed: Number of losses after which the episode went on, repeated from a reset. An env that remembers
            something from before that reset may go on otherwise.
        truncated: Reasons of the episodes that ended, or the errors that were raised, because of a loss.
        strayed: Differences from the undisturbed envs after a recovery that was only ``"replayed"``: the env carries
            memory across resets.
        mismatches: Differences from the undisturbed envs that multienv did not report; must be empty.
        undisturbed: A difference that appears without any kill, looked for after a difference; ``""`` if there is none.
            The env itself is not deterministic then, and the check says nothing about recovery.
    """

    asked: int
    kills: int = 0
    steps: int = 0
    episodes: int = 0
    losses: int = 0
    own_losses: int = 0
    killed: tuple[int, ...] = field(default=(), compare=False, repr=False)
    exact: int = 0
    replayed: int = 0
    truncated: tuple[str, ...] = ()
    strayed: tuple[str, ...] = ()
    mismatches: tuple[str, ...] = ()
    undisturbed: str = ""

    @property
    def is_honest(self) -> bool:
        """Return whether no difference went unreported."""
        return not self.mismatches and not self.undisturbed

    @property
    def is_exact(self) -> bool:
        """Return whether every kill that you asked for was delivered, and every loss was recovered from exactly."""
        return self.is_honest and self.kills == self.asked and self.exact == self.losses

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
        outcome = (
            f"of {self.losses} losses {self.exact} recovered from exactly, {self.replayed} replayed from a reset, "
        )
        outcome += f"{len(self.truncated)} by truncation; the env itself lost {self.own_losses} workers"
        lines = [f"{count}, {outcome}", *self.truncated, *self.strayed, *self.mismatches]
        if self.undisturbed:
            lines.append(f"The env is not deterministic: without any kill, two processes differ {self.undisturbed}")
        return "\n  ".join(lines)


def check_env_recovers(
    env_fn: EnvFn,
    *,
    steps: int = 200,
    kills: int = 5,
    num_envs: int = 1,
    seed: int = 0,
    manners: Sequence[KillManner] = ("SIGKILL",),
    interval: tuple[float, float] | None = None,
    seconds: float = float("inf"),
    make_env: Callable[[EnvFn], Any] | None = None,
    **options: Any,
) -> RecoveryCheck:
    """Run envs in processes that are killed, next to undisturbed ones, and compare them bit by bit.

    Both get the same seed at the first reset, no seed later, and the same random actions. When a recovery truncates an
    episode (``info["multienv"]``), or a difference is found, all envs are built anew with another seed. After a
    difference the same steps are also taken without kills: if the env differs then too, the check ends. It also ends
    after five differences. What the env itself loses is recovered, too, and counted in ``own_losses``.

    Args:
        env_fn: Function that builds your env, which must be deterministic under its seed.
        steps: Number of steps in all, unless `interval` is given.
        kills: Number of kills; at most one before each of the ``steps``.
        num_envs: Number of envs.
        seed: Seed of the choice of env seeds, actions, victims, signals and moments.
        manners: The signals to choose from. A worker stopped by SIGSTOP hangs, and is killed at its deadline.
        interval: ``None``: the kills come just before steps that the seed chooses, possibly the first step of an
            episode. Or the shortest and the longest pause between two kills, in seconds: they come at any moment, and
            the check ends after the last one.
        seconds: End after this time.
        make_env: Function that makes an env from ``env_fn``; its ``statistics().pid`` is the process to kill. ``None``:
            ``create_subprocess_envs([env_fn] * num_envs, **options)``.
        options: Options for SubprocessEnv; the default deadline is a minute for a step or a reset. The undisturbed envs
            have the same ``worker_env``.
    """
    events: list[Event] = []
    # No reports: reports of kills on purpose would push out the reports of real losses.
    options = {"reports": "", "deadlines": PATIENT, **options, "hooks": [*options.get("hooks", ()), events.append]}
    fns = [env_fn] * num_envs
    undisturbed: dict[str, Any] = {"worker_env": options.get("worker_env"), **UNDISTURBED}
    until, dice, attempt = time.monotonic() + seconds, random.Random(seed), seed
    doomed = dice.sample(range(steps), kills) if interval is None else []
    check, step = RecoveryCheck(asked=kills), 0

    def is_done(delivered: int = 0) -> bool:
        enough = step >= steps if interval is None else check.kills + delivered >= kills
        return enough or time.monotonic() >= until

    while not is_done() and len(check.mismatches + check.strayed) < ENOUGH_MISMATCHES and not check.undisturbed:
        began = step
        struck: Sequence[Any] = [make_env(env_fn) for _ in fns] if make_env else create_subprocess_envs(fns, **options)
        calm = create_subprocess_envs(fns, **undisturbed)
        events.clear()
        with MultiEnv([*calm, *struck]) as both:
            pair = SideBySide(both, attempt)
            killer = Killer(
                lambda envs=struck: [pid for env in envs for pid in worker_pids(env)],
                manners=manners,
                interval=interval or (0.0, 0.0),
                kills=kills - check.kills,
                seed=dice.randrange(2**32),
            )
            with killer if interval else contextlib.nullcontext():
                while pair.agree and not is_done(killer.delivered):
                    if step in doomed:
                        killer.strike()
                    pair.step()
                    step += 1
            if interval:
                pair.step()  # what the last strike has done shows here
            told = [env.statistics() for env in struck]
            lost_calm = sum(env.statistics().losses for env in calm)
        losses = [event for event in events if isinstance(event, Loss) and event.cause != "error"]
        check = replace(
            check,
            kills=check.kills + killer.delivered,
            steps=check.steps + (step - began) * num_envs,
            episodes=check.episodes + pair.ended,
            losses=check.losses + sum(one.losses for one in told),
            own_losses=check.own_losses + lost_calm + sum(loss.pid not in killer.struck for loss in losses),
            killed=(*check.killed, *killer.struck),
            exact=check.exact + sum(one.exact_recoveries for one in told),
            replayed=check.replayed + sum(one.replayed_recoveries for one in told),
            truncated=(*check.truncated, *pair.reasons),
        )
        if pair.mismatch:
            where = f"after {check.steps} steps (seed {attempt})"
            twins = [env for _ in range(2) for env in create_subprocess_envs(fns, **undisturbed)]
            with MultiEnv(twins) as both:
                again = SideBySide(both, attempt)
                for _ in range(began, step + 1):
                    again.step()
            if again.mismatch:
                check = replace(check, undisturbed=f"{where}: {again.mismatch}")
            elif any(one.replayed_recoveries for one in told):
                check = replace(check, strayed=(*check.strayed, f"{where}: {pair.mismatch}"))
            else:
                check = replace(check, mismatches=(*check.mismatches, f"{where}: {pair.mismatch}"))
        attempt += 1000
    return check


class SideBySide:
    """Steps envs in pairs until they part: one of each pair is struck, the other one undisturbed.

    Both get the same seed at the first reset, none later, and the same random actions. The undisturbed envs have
    processes of their own, too: an env that crashes by itself does not take this one with it.

    Args:
        envs: The undisturbed envs, and after them as many of the same envs that are struck.
        seed: Decides seeds and actions.

    Attributes:
        mismatch: What differed; ``""``: nothing.
        ended: Number of episodes that have ended by themselves.
        reasons: Why episodes were ended, or errors raised, because of a loss; also a loss of an undisturbed env.
    """

    def __init__(self, envs: MultiEnv, seed: int) -> None:
        self.mismatch = ""
        self.reasons: list[str] = []
        self.ended = 0
        self._envs, self._pairs = envs, len(envs) // 2
        self._actions = copy.deepcopy(envs.action_space)
        self._actions.seed(seed)
        self._compare("reset", envs.reset(seed=[*range(seed, seed + self._pairs)] * 2)[0])

    @property
    def agree(self) -> bool:
        """Tell whether no pair has parted."""
        return not self.mismatch and not self.reasons

    def step(self) -> None:
        """Step all envs, if no pair has parted."""
        if not self.agree:
            return
        actions = [self._actions.sample() for _ in range(self._pairs)]
        try:
            *returned, infos = self._envs.step([*actions, *copy.deepcopy(actions)])
        except EnvsFailedError as failed:
            lost = [error for error in failed.failures.values() if isinstance(error, WorkerLostError)]
            if len(lost) < len(failed.failures):
                raise
            self.reasons = [first_line(error) for error in lost]
            return
        told = [info["multienv"] for info in infos if info and "multienv" in info]
        self.reasons = [one["reason"] for one in told if "reason" in one]
        if self.reasons:
            return
        for name, values in zip(("observations", "rewards", "terminated", "truncated"), returned, strict=True):
            self._compare(name, values)
        ends = [bool(over or cut) for over, cut in zip(returned[2], returned[3], strict=True)]
        self.ended += sum(ends[: self._pairs])

    def _compare(self, name: str, values: list[Any]) -> None:
        expected, seen = values[: self._pairs], values[self._pairs :]
        self.mismatch = self.mismatch or difference(seen, expected, name) or ""


def difference(seen: Any, expected: Any, name: str) -> str | None:
    """Tell where two values differ; ``None`` if they agree to the bit. The order of keys does not matter."""
    if isinstance(seen, Mapping) and isinstance(expected, Mapping) and seen.keys() == expected.keys():
        found = (difference(seen[key], expected[key], f"{name}[{key!r}]") for key in expected)
        return next((one for one in found if one is not None), None)
    if isinstance(seen, tuple | list) and type(seen) is type(expected) and len(seen) == len(expected):
        pairs = enumerate(zip(seen, expected, strict=True))
        found = (difference(one, other, f"{name}[{index}]") for index, (one, other) in pairs)
        return next((one for one in found if one is not None), None)
    if same(seen, expected):
        return None
    if _is_large(seen) and _is_large(expected):
        return f"{name}: {_difference_of_arrays(seen, expected)}"
    return f"{name}: {seen!r:.300} against {expected!r:.300}"


def _is_large(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.size > _FEW and not value.dtype.hasobject


def _difference_of_arrays(seen: Any, expected: Any) -> str:
    """Tell how many values of two arrays differ, and the first of them."""
    if seen.shape != expected.shape or seen.dtype != expected.dtype:
        return f"{seen.dtype} of shape {seen.shape} against {expected.dtype} of shape {expected.shape}"
    one, other = np.ascontiguousarray(seen).reshape(-1, 1), np.ascontiguousarray(expected).reshape(-1, 1)
    differ = (one.view(np.uint8) != other.view(np.uint8)).any(1)
    place = int(differ.argmax())
    index = list(map(int, np.unravel_index(place, seen.shape)))
    pair = f"{one[place, 0]!s:.50} against {other[place, 0]!s:.50}"
    return f"{differ.sum():,} of {differ.size:,} values differ, the first at {index}: {pair}"
