"""Kill workers at random moments for a long time, and hold what comes back against an undisturbed run."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from multienv.config import Deadlines
from multienv.errors import EnvsFailedError
from multienv.events import Event, Loss, Recovery
from multienv.recovery.record import resident_bytes
from multienv.reports.texts import exit_text
from multienv.testing.killer import KillManner, send, worker_pids
from multienv.testing.processes import descendants
from multienv.testing.recovery_check import ENOUGH_MISMATCHES, difference

EnvFn = Callable[[], gymnasium.Env[Any, Any]]

# What a strike is aimed at, and how often.
_TARGETS = {"worker": 6, "worker and snapshot": 3, "snapshot": 1}


@dataclass(frozen=True)
class Usage:
    """Tells what this process uses, with its children.

    Attributes:
        rss: Resident memory of this process, bytes.
        descriptors: How many it has open.
        processes: How many descend from it.
    """

    rss: int
    descriptors: int
    processes: int

    @classmethod
    def now(cls) -> Usage:
        """Ask the kernel."""
        return cls(resident_bytes(os.getpid()) or 0, len(os.listdir("/proc/self/fd")), len(descendants(os.getpid())))


@dataclass(frozen=True)
class Growth:
    """Tells the use of resources before the first strike, and after the last."""

    before: Usage
    after: Usage


@dataclass
class Chaos:
    """Tells what came of it.

    Attributes:
        steps: Env steps held against the undisturbed run.
        strikes: Signals sent, by what they were aimed at.
        losses: Workers lost, by how: the cause, and the exit code in words.
        rungs: How often each was used: ``"snapshot"``, ``"journal"``, or the outcome where it was not exact.
        seconds: Those of each recovery, from the loss being noticed to the answer.
        inexact: Reasons given for episodes that were ended, or errors raised, because of a loss.
        mismatches: What differed silently from the undisturbed run; must be empty.
        growth: ``None`` until a run has ended.
    """

    steps: int = 0
    strikes: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    rungs: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    growth: Growth | None = None

    @property
    def kills(self) -> int:
        """Workers lost. A strike may come to one that is dead or stopped already."""
        return sum(self.losses.values())

    def quantile(self, share: float) -> float:
        """Return the seconds within which this share of the recoveries was done; 0.0 if there were none."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def run_chaos(
    env_fn: EnvFn,
    *,
    num_envs: int = 4,
    kills: int = 100,
    seconds: float = float("inf"),
    seed: int = 0,
    manners: Sequence[KillManner] = ("SIGKILL", "SIGSEGV", "SIGSTOP"),
    interval: tuple[float, float] = (0.0, 0.05),
    progress: Callable[[Chaos], object] = lambda chaos: None,
    **options: Any,
) -> Chaos:
    """Step ``MultiEnv`` over some envs while workers are struck, beside the same envs in this process.

    Both get the same seed at the first reset, none later, and the same random actions. When an episode is ended by a
    loss, or a difference is found, all envs are built anew and go on with another seed.

    Args:
        env_fn: Builds the env, deterministic under its seed.
        num_envs: How many.
        kills: End when so many workers have been lost.
        seconds: End after this time.
        seed: Decides seeds, actions, victims, manners and pauses; not what a victim is doing at that moment.
        manners: The signals; a stopped worker hangs, and is killed at its deadline.
        interval: The least and greatest pause between two strikes, seconds.
        progress: Called now and then.
        options: For ``SubprocessEnv``; deadlines, without which a stopped worker would be waited for, are half a
            second for a step and five for a reset unless they say otherwise.
    """
    chaos, until = Chaos(), time.monotonic() + seconds
    dice = random.Random(seed)
    attempt = 0
    while chaos.kills < kills and time.monotonic() < until and len(chaos.mismatches) < ENOUGH_MISMATCHES:
        with _Run(env_fn, num_envs, seed + 1000 * attempt, options, chaos) as run:
            with _Striker(run.struck, chaos, dice, manners=manners, interval=interval, kills=kills):
                while chaos.kills < kills and time.monotonic() < until and run.step():
                    progress(chaos)
            if not run.parted:
                run.step()  # what the last strike has done shows here
            chaos.growth = Growth(chaos.growth.before if chaos.growth else run.usage, Usage.now())
        attempt += 1
    progress(chaos)
    return chaos


class _Run:
    """Steps two batches side by side until they differ: one that is struck, and an undisturbed one."""

    def __init__(self, env_fn: EnvFn, num_envs: int, seed: int, options: dict[str, Any], chaos: Chaos) -> None:
        from multienv import MultiEnv, SerialEnv, create_subprocess_envs

        self.parted = False
        self._chaos = chaos
        self._seed = seed
        # No reports: those of strikes on purpose would push out those of real losses.
        options = {"deadlines": Deadlines(step=0.5, reset=5.0), "reports": "", **options}
        with contextlib.ExitStack() as stack:
            # One after the other: what envs share in one process (pygame, for one) may not bear threads.
            self._calm: Any = stack.enter_context(MultiEnv([SerialEnv(env_fn) for _ in range(num_envs)]))
            subjects = create_subprocess_envs([env_fn] * num_envs, hooks=[self._note], **options)
            self.struck: Any = stack.enter_context(MultiEnv(subjects))
            self._stack = stack.pop_all()

    def __enter__(self) -> _Run:  # noqa: PYI034 - Self needs Python 3.11
        self._action_space = copy.deepcopy(self._calm.action_space)
        self._action_space.seed(self._seed)
        seen, expected = self.struck.reset(seed=self._seed), self._calm.reset(seed=self._seed)
        self._compare("reset", seen[0], expected[0])
        self.usage = Usage.now()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def step(self) -> bool:
        """Step both; return whether they still agree."""
        actions = [self._action_space.sample() for _ in self.struck.envs]
        try:
            seen = self.struck.step(copy.deepcopy(actions))
        except EnvsFailedError as failed:
            self._part([str(error) for error in failed.failures.values()])
            return False
        reasons = [info["multienv"]["reason"] for info in seen[4] if info and "reason" in info.get("multienv", {})]
        if reasons:
            self._part(reasons)
            return False
        expected = self._calm.step(actions)
        self._chaos.steps += len(actions)
        names = ("observations", "rewards", "terminated", "truncated")
        for name, one, other in zip(names, seen, expected, strict=False):
            self._compare(name, one, other)
        return not self.parted

    def _part(self, reasons: list[str]) -> None:
        self.parted = True
        self._chaos.inexact += reasons

    def _compare(self, name: str, seen: Any, expected: Any) -> None:
        found = difference(list(seen), list(expected), name)
        if found is not None:
            self.parted = True
            self._chaos.mismatches.append(f"after {self._chaos.steps} steps (seed {self._seed}): {found}")

    def _note(self, event: Event) -> None:
        if isinstance(event, Loss):
            how = exit_text(event.exit_code).partition(" (")[0]
            self._chaos.losses[f"{event.cause}: {how}"] += 1
        elif isinstance(event, Recovery):
            self._chaos.rungs[event.rung or event.outcome] += 1
            self._chaos.seconds.append(event.seconds)


class _Striker:
    """Strikes workers and their snapshots from a thread of its own."""

    def __init__(
        self,
        face: Any,
        chaos: Chaos,
        dice: random.Random,
        *,
        manners: Sequence[KillManner],
        interval: tuple[float, float],
        kills: int,
    ) -> None:
        self._face = face
        self._chaos = chaos
        self._dice = dice
        self._manners = tuple(manners)
        self._interval = interval
        self._kills = kills
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="multienv-chaos", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        dice, chaos = self._dice, self._chaos
        while chaos.kills < self._kills and not self._stop.wait(dice.uniform(*self._interval)):
            workers = worker_pids(self._face)
            if not workers:
                continue
            worker = dice.choice(workers)
            (target,) = dice.choices(list(_TARGETS), list(_TARGETS.values()))
            manner = dice.choice(self._manners)
            struck = target.startswith("worker") and send(worker, manner)
            # A snapshot is never stopped: it would hang while it is woken, and nothing but a debugger does that.
            for snapshot in sorted(descendants(worker))[-1:] if target != "worker" else []:
                struck |= send(snapshot, "SIGKILL")
            chaos.strikes[target] += struck
