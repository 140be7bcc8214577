"""Kill the workers of an env that remembers something across resets: BipedalWalker-v3, whose Box2D world lives on.

A recovery called exact must be followed by what an undisturbed env shows, to the bit, until the end of the run. After
one called ``"replayed"``, or a truncation, an env may go another way, so it is not compared for the rest of that run.

::

    pip install -e ".[examples]" "gymnasium[box2d]"
    python benchmarks/memory.py                     # 200 recoveries of envs a row, about two minutes
    python benchmarks/memory.py --steps 40000       # a replay from the construction is no longer affordable

Exit code 1: an env differed although all its recoveries were called exact.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from rich.console import Console
from rich.table import Table

from multienv import MultiEnv, RestartPolicy, SubprocessVectorEnv, create_subprocess_envs

ENVS, EVERY = 4, 30
FACES = ("MultiEnv", "batch")
KILLED = ("workers", "workers with a thread", "workers and the monitor")
OUTCOMES = ("exact", "replayed", "truncated")


def make(thread: bool, env_id: str) -> Any:
    """Build the env; with a thread, so that it cannot be forked."""
    if thread:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return gymnasium.make(env_id)


class Run:
    """Steps envs whose processes are killed, beside undisturbed ones.

    Attributes:
        outcomes: Recoveries of envs, by outcome.
        differ: Envs that differed although all their recoveries were called exact.
    """

    def __init__(self, face: str, killed: str, env_id: str, restart: RestartPolicy, steps: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.differ: list[str] = []
        self._face, self._killed, self._restart, self._steps = face, killed, restart, steps
        self._env_fn = partial(make, "thread" in killed, env_id)

    def play(self, seed: int) -> None:
        """Take all steps once."""
        envs, twins = self._made(), [self._env_fn() for _ in range(ENVS)]
        known, ended = [True] * ENVS, [False] * ENVS
        actions = twins[0].action_space
        actions.seed(seed)
        try:
            shown = list(envs.reset(seed=seed)[0])
            for env, twin in enumerate(twins):
                assert np.array_equal(shown[env], twin.reset(seed=seed + env)[0])
            for step in range(self._steps):
                if step % EVERY == EVERY - 1:
                    self._kill(envs)
                chosen = np.stack([actions.sample() for _ in range(ENVS)])
                self._known, before = known, list(known)
                seen = envs.step(chosen if self._face == "batch" else list(chosen))
                for env, twin in enumerate(twins):
                    expected = (twin.reset()[0], 0.0, False, False) if ended[env] else twin.step(chosen[env])[:4]
                    ended[env] = expected[2] or expected[3]
                    same = all(np.array_equal(part[env], other) for part, other in zip(seen, expected, strict=False))
                    if known[env] and before[env] and not same:
                        self.differ.append(f"env {env} at step {step} (seed {seed})")
                        known[env] = False
        finally:
            envs.close()
            for twin in twins:
                twin.close()

    def _made(self) -> Any:
        options: dict[str, Any] = {"restart": self._restart, "hooks": [self._note], "reports": ""}
        if self._face == "batch":
            return SubprocessVectorEnv([self._env_fn] * ENVS, envs_per_worker=ENVS, **options)
        return MultiEnv(create_subprocess_envs([self._env_fn] * ENVS, **options), autoreset_mode="NEXT_STEP")

    def _note(self, event: Any) -> None:
        outcome = getattr(event, "outcome", None)
        if outcome is not None:
            self.outcomes[outcome] += len(event.loss.envs)
            for env in event.loss.envs:
                self._known[env] &= outcome == "exact"

    def _kill(self, envs: Any) -> None:
        workers = [one.pid for one in envs.statistics()]
        victims = list(workers)
        if "monitor" in self._killed:  # and with it all snapshots
            status = Path(f"/proc/{workers[0]}/status").read_text()
            victims.append(int(status.partition("PPid:")[2].split()[0]))
        for victim in victims:
            os.kill(victim, signal.SIGKILL)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recoveries", type=int, default=200, help="of envs, at least so many in each row")
    parser.add_argument("--steps", type=int, default=800, help="of a run")
    parser.add_argument("--env", default="BipedalWalker-v3")
    parser.add_argument("--accept", default="replayed", choices=["replayed", "exact"])
    given = parser.parse_args()
    table = Table("killed", "envs", "recoveries", *OUTCOMES, "differ after exact")
    restart, found = RestartPolicy(max_restarts=10**6, accept=given.accept), 0
    for killed in KILLED:
        for face in FACES:
            run, seed = Run(face, killed, given.env, restart, given.steps), 0
            while run.outcomes.total() < given.recoveries:
                run.play(seed)
                seed += ENVS
            counts = [str(run.outcomes[outcome]) for outcome in OUTCOMES]
            table.add_row(killed, face, str(run.outcomes.total()), *counts, str(len(run.differ)))
            found += len(run.differ)
            for what in run.differ:
                print(f"{killed}, {face}: {what}")
    Console().print(table)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
