"""Kill workers at random moments for a long time, and hold what comes back against an undisturbed run."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from multienv import create_subprocess_envs
from multienv.config import Deadlines
from multienv.errors import EnvsFailedError
from multienv.events import Event, Loss, Recovery
from multienv.reports.texts import exit_text
from multienv.testing.killer import Killer, KillManner, send, worker_pids
from multienv.testing.processes import descendants
from multienv.testing.side_by_side import ENOUGH_MISMATCHES, UNDISTURBED, EnvFn, SideBySide

# How often a worker's newest snapshot is killed, so that replays are needed too; how often the worker is spared then.
_SNAPSHOT_TOO, _SNAPSHOT_ALONE = 0.4, 0.25


@dataclass
class Chaos:
    """Holds the outcome of :func:`run_chaos`.

    Attributes:
        steps: Env steps held against the undisturbed run.
        strikes: Signals sent, by kind; ``"snapshot"`` is SIGKILL to a snapshot.
        losses: Workers lost, by how: the cause, and the exit code in words.
        methods: How often each was used: ``"snapshot"``, ``"journal"``, or the outcome where it was not exact.
        seconds: Those of each recovery, from the loss being noticed to the answer.
        inexact: Reasons given for episodes that were ended, or errors raised, because of a loss.
        mismatches: What differed silently from the undisturbed run; must be empty.
        undisturbed: What differed without any strike, looked for where something differed: the env itself is not
            deterministic, and nothing can be told of recovery. ``""``: nothing.
    """

    steps: int = 0
    strikes: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    undisturbed: str = ""

    @property
    def kills(self) -> int:
        """Return how many workers were lost; a strike may hit one that is dead or stopped already."""
        return self.losses.total()

    def quantile(self, share: float) -> float:
        """Return the seconds within which this share of the recoveries was done; 0.0 if there were none."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    def note(self, event: Event) -> None:
        """Count a loss or its outcome: a hook."""
        if isinstance(event, Loss):
            self.losses[f"{event.cause}: {exit_text(event.exit_code).partition(' (')[0]}"] += 1
        elif isinstance(event, Recovery):
            self.methods[event.method or event.outcome] += 1
            self.seconds.append(event.seconds)


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
    """Step a batch of an env while workers are struck, beside the same envs undisturbed.

    Both get the same seed at the first reset, none later, and the same random actions. When an episode is ended by a
    loss, or a difference is found, all envs are built anew and go on with another seed. After a difference the same
    steps are taken without strikes: an env that differs then too ends the run.

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
            second for a step and five for a reset unless they say otherwise. The undisturbed envs have the same
            ``worker_env``.
    """
    worker_env = options.get("worker_env")
    chaos, until, dice = Chaos(), time.monotonic() + seconds, random.Random(seed)
    # No reports: reports of strikes would push out the reports of real losses.
    options = {"deadlines": Deadlines(step=0.5, reset=5.0), "reports": "", **options}
    options["hooks"], attempt = [chaos.note], seed

    def side_by_side(**options: Any) -> SideBySide:
        make = partial(create_subprocess_envs, [env_fn] * num_envs, **options)
        return SideBySide(env_fn, make, num_envs, attempt, worker_env)

    def goes_on() -> bool:
        return chaos.kills < kills and time.monotonic() < until

    def victims() -> list[int]:
        """Return the worker that is to be struck, if any; called in the thread of the killer."""
        workers = worker_pids(pair.struck)
        if not workers or not goes_on():
            return []
        worker = dice.choice(workers)
        # A snapshot is never stopped: it would hang while it is woken, and nothing but a debugger does that.
        for snapshot in sorted(descendants(worker))[-1:] if dice.random() < _SNAPSHOT_TOO else []:
            chaos.strikes["snapshot"] += send(snapshot, "SIGKILL")
            if dice.random() < _SNAPSHOT_ALONE:
                return []
        return [worker]

    while goes_on() and len(chaos.mismatches) < ENOUGH_MISMATCHES and not chaos.undisturbed:
        before = chaos.steps
        with side_by_side(**options) as pair:
            try:
                with Killer(victims, manners=manners, interval=interval, seed=dice.randrange(2**32)) as killer:
                    while goes_on() and pair.agree:
                        pair.step()
                        chaos.steps += 0 if pair.reasons else num_envs
                        progress(chaos)
                chaos.strikes += killer.strikes
                pair.step()  # what the last strike has done shows here
            except EnvsFailedError as failed:
                chaos.inexact += [str(error) for error in failed.failures.values()]
            chaos.inexact += pair.reasons
        if pair.mismatch:
            with side_by_side(worker_env=worker_env, **UNDISTURBED) as again:
                place = _differs_after(again, (chaos.steps - before) // num_envs + 1)
            if place is None:
                chaos.mismatches.append(f"after {chaos.steps} steps (seed {attempt}): {pair.mismatch}")
            else:
                chaos.undisturbed = f"after {place} steps (seed {attempt}): {again.mismatch}"
        attempt += 1000
    progress(chaos)
    return chaos


def _differs_after(pair: SideBySide, steps: int) -> int | None:
    """Step both batches; return after how many steps they differ, ``None``: they do not."""
    for taken in range(1, steps + 1):
        pair.step()
        if pair.mismatch:
            return taken
    return None
