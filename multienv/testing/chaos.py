"""Kill workers at random moments for a long time, and hold what comes back against an undisturbed run."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from multienv import create_ray_envs, create_subprocess_envs
from multienv.cluster.options import RayOptions
from multienv.config import Deadlines
from multienv.errors import EnvsFailedError
from multienv.events import Event, Loss, Recovery
from multienv.reports.texts import exit_text
from multienv.testing.killer import Killer, KillManner, send, worker_pids
from multienv.testing.processes import descendants
from multienv.testing.ray_cluster import RayCluster
from multienv.testing.side_by_side import ENOUGH_MISMATCHES, EnvFn, SideBySide

# How often a worker's newest snapshot is killed, so that replays are needed too; how often the worker is spared then.
_SNAPSHOT_TOO, _SNAPSHOT_ALONE = 0.4, 0.25
# A host of a cluster, and a node, is killed whenever so many workers more were lost: the latter takes seconds.
_HOST_EVERY, _NODE_EVERY = 10, 20
# Seconds of silence after which a host is given up: of a node that is killed Ray tells no sooner.
_SUSPECT_AFTER = 3.0


@dataclass
class Chaos:
    """Holds the outcome of :func:`run_chaos`.

    Attributes:
        steps: Env steps held against the undisturbed run.
        strikes: Signals sent, by kind; ``"snapshot"`` is SIGKILL to a snapshot, ``"host"`` and ``"node"`` to an actor
            of a Ray cluster, and to all processes of one of its nodes.
        losses: Workers lost, by how: the cause, and the exit code in words.
        rungs: How often each was used: ``"snapshot"``, ``"journal"``, or the outcome where it was not exact.
        seconds: Those of each recovery, from the loss being noticed to the answer.
        inexact: Reasons given for episodes that were ended, or errors raised, because of a loss.
        mismatches: What differed silently from the undisturbed run; must be empty.
        undisturbed: What differed without any strike, looked for where something differed: the env itself is not
            deterministic, and nothing can be told of recovery. ``""``: nothing.
    """

    steps: int = 0
    strikes: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    rungs: Counter[str] = field(default_factory=Counter)
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
            is_with_host = event.detail.startswith("its host")
            how = "its host was lost" if is_with_host else exit_text(event.exit_code).partition(" (")[0]
            self.losses[f"{event.cause}: {how}"] += 1
        elif isinstance(event, Recovery):
            self.rungs[event.rung or event.outcome] += 1
            self.seconds.append(event.seconds)


class _Strikes:
    """Chooses what is struck, in the thread of a killer, and strikes whatever is no worker.

    Args:
        chaos: Counts.
        dice: Chooses.
        cluster: Whose hosts are killed, too.
        kill_nodes: So are its nodes.
    """

    def __init__(self, chaos: Chaos, dice: random.Random, cluster: RayCluster | None, *, kill_nodes: bool) -> None:
        self._chaos, self._dice = chaos, dice
        self._rare: dict[str, tuple[int, Callable[[random.Random], bool]]] = {}
        if cluster is not None:
            self._rare["host"] = (_HOST_EVERY, cluster.kill_host)
        if cluster is not None and kill_nodes:
            self._rare["node"] = (_NODE_EVERY, cluster.kill_node)
        self._due = {kind: every // 4 for kind, (every, _) in self._rare.items()}

    def victims(self, face: Any, goes_on: Callable[[], bool]) -> list[int]:
        """Return the worker that is to be struck, if any."""
        strikes, dice, workers = self._chaos.strikes, self._dice, worker_pids(face)
        if not workers or not goes_on():
            return []
        for kind, (every, strike) in self._rare.items():
            if self._chaos.kills >= self._due[kind]:
                self._due[kind] = self._chaos.kills + every
                strikes[kind] += strike(dice)
                return []
        worker = dice.choice(workers)
        # A snapshot is never stopped: it would hang while it is woken, and nothing but a debugger does that.
        for snapshot in sorted(descendants(worker))[-1:] if dice.random() < _SNAPSHOT_TOO else []:
            strikes["snapshot"] += send(snapshot, "SIGKILL")
            if dice.random() < _SNAPSHOT_ALONE:
                return []
        return [worker]


def run_chaos(
    env_fn: EnvFn,
    *,
    num_envs: int = 4,
    kills: int = 100,
    seconds: float = float("inf"),
    seed: int = 0,
    manners: Sequence[KillManner] = ("SIGKILL", "SIGSEGV", "SIGSTOP"),
    interval: tuple[float, float] = (0.0, 0.05),
    cluster: RayCluster | None = None,
    kill_nodes: bool = False,
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
        cluster: The envs are on it, and hosts are killed too; ``None``: they are on this machine.
        kill_nodes: Kill whole nodes of the cluster, too. A new one takes the place of each.
        progress: Called now and then.
        options: For ``SubprocessEnv``; deadlines, without which a stopped worker would be waited for, are half a
            second for a step and five for a reset unless they say otherwise.
    """
    chaos, until, dice = Chaos(), time.monotonic() + seconds, random.Random(seed)
    # No reports: reports of strikes would push out the reports of real losses.
    options = {"deadlines": Deadlines(step=0.5, reset=5.0), "reports": "", **options}
    env_fns, options["hooks"] = [env_fn] * num_envs, [chaos.note]

    def make() -> list[Any]:
        if cluster is None:
            return [*create_subprocess_envs(env_fns, **options)]
        where = RayOptions(address=cluster.address, suspect_after=_SUSPECT_AFTER)
        return [*create_ray_envs(env_fns, ray=where, **options)]

    def side_by_side(seed: int) -> SideBySide:
        return SideBySide(env_fn, make, num_envs, seed)

    mend: Callable[[], object] = cluster.mend if cluster is not None else lambda: None
    goes_on: Callable[[], bool] = lambda: chaos.kills < kills and time.monotonic() < until  # noqa: E731
    strikes, attempt = _Strikes(chaos, dice, cluster, kill_nodes=kill_nodes), seed
    while goes_on() and len(chaos.mismatches) < ENOUGH_MISMATCHES and not chaos.undisturbed:
        before = chaos.steps
        with side_by_side(attempt) as pair:
            try:
                aim = partial(strikes.victims, pair.struck, goes_on)
                with Killer(aim, manners=manners, interval=interval, seed=dice.randrange(2**32)) as killer:
                    while goes_on() and pair.agree:
                        pair.step()
                        mend()
                        chaos.steps += 0 if pair.reasons else num_envs
                        progress(chaos)
                chaos.strikes += killer.strikes
                pair.step()  # what the last strike has done shows here
            except EnvsFailedError as failed:
                chaos.inexact += [str(error) for error in failed.failures.values()]
            chaos.inexact += pair.reasons
        if pair.mismatch:
            chaos.undisturbed = _undisturbed(side_by_side, attempt, (chaos.steps - before) // num_envs + 1)
            if not chaos.undisturbed:
                chaos.mismatches.append(f"after {chaos.steps} steps (seed {attempt}): {pair.mismatch}")
        attempt += 1000
    progress(chaos)
    return chaos


def _undisturbed(side_by_side: Callable[[int], SideBySide], seed: int, steps: int) -> str:
    """Return where two runs of the env differ without any strike; ``""``: nowhere."""
    with side_by_side(seed) as pair:
        taken = 0
        while taken < steps and pair.agree:
            pair.step()
            taken += 1
    return pair.mismatch and f"after {taken} steps (seed {seed}): {pair.mismatch}"
