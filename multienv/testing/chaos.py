"""Kill workers at random moments for a long time, and compare the trajectories with an undisturbed run."""

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
        steps: Env steps that were compared with the undisturbed run.
        strikes: Signals sent, by kind; ``"snapshot"`` is SIGKILL to a snapshot.
        losses: Lost workers, by cause and exit code in words.
        outcomes: How often each outcome of a loss came: ``"exact"``, ``"replayed"``, ``"truncated"``, ``"reset"`` or
            ``"raised"``.
        methods: How often each source of recovery was used: ``"snapshot"`` or ``"journal"``.
        seconds: Duration of each recovery, from the moment the loss was noticed to the answer.
        inexact: Reasons of the episodes that ended, or the errors that were raised, because of a loss.
        strayed: Differences from the undisturbed run after a recovery that was only ``"replayed"``: the env carries
            memory across resets.
        mismatches: Differences from the undisturbed run that multienv did not report; must be empty.
        undisturbed: A difference that appears without any kill, looked for after a mismatch; ``""`` if there is none.
            The env itself is not deterministic then, and the run says nothing about recovery.
    """

    steps: int = 0
    strikes: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)
    strayed: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    undisturbed: str = ""

    @property
    def kills(self) -> int:
        """Return how many workers were lost. A signal may hit a worker that is dead or stopped already."""
        return self.losses.total()

    def quantile(self, share: float) -> float:
        """Return the seconds within which this share of the recoveries was done; 0.0 if there were none."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    def note(self, event: Event) -> None:
        """Count a loss or its outcome; this is a hook."""
        if isinstance(event, Loss):
            self.losses[f"{event.cause}: {exit_text(event.exit_code).partition(' (')[0]}"] += 1
        elif isinstance(event, Recovery):
            self.outcomes[event.outcome] += 1
            self.methods[event.method] += bool(event.method)
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
    """Step a batch of an env while its workers are killed or stopped, and compare it with undisturbed envs.

    Both batches get the same seed at the first reset, no seed later, and the same random actions. After a loss that
    ended an episode, or after a difference, all envs are built anew with another seed. After a difference the same
    steps are also taken without kills: if the env differs then too, the run ends.

    Args:
        env_fn: Function that builds the env, which must be deterministic under its seed.
        num_envs: Number of envs.
        kills: End the run when this many workers have been lost.
        seconds: End the run after this time.
        seed: Seed of the choice of env seeds, actions, victims, signals and pauses. It does not decide what a worker is
            doing when a signal arrives.
        manners: The signals to choose from. A worker stopped by SIGSTOP hangs, and is killed at its deadline.
        interval: The shortest and the longest pause between two signals, in seconds.
        progress: Function that is called with the :class:`Chaos` now and then.
        options: Options for ``SubprocessEnv``. A stopped worker needs a deadline: the default is half a second for a
            step and five seconds for a reset. The undisturbed envs have the same ``worker_env``.
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

    while goes_on() and len(chaos.mismatches + chaos.strayed) < ENOUGH_MISMATCHES and not chaos.undisturbed:
        before, replayed = chaos.steps, chaos.outcomes["replayed"]
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
                steps = _differs_after(again, (chaos.steps - before) // num_envs + 1)
            if steps is None:
                found = chaos.mismatches if chaos.outcomes["replayed"] == replayed else chaos.strayed
                found.append(f"after {chaos.steps} steps (seed {attempt}): {pair.mismatch}")
            else:
                chaos.undisturbed = f"after {steps} steps (seed {attempt}): {again.mismatch}"
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
