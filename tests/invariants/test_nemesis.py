"""Invariant 2, at random moments: all that can happen to processes, in all faces, beside a quiet run.

A few seconds each by default; for hours: ``NEMESIS=5000 pytest -o timeout=0 -n0 tests/invariants/test_nemesis.py`` (strikes for each face).
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from faces import Face
from invariant_envs import DrawingEnv

from kit import ForkingPolicy, descendants, first_difference, monitor_pid
from kit.limits import set_limit
from multienv import Deadlines, Recovery

STRIKES = int(os.environ.get("NEMESIS", "5"))
# Strikes that one request meets at most: an env whose way back meets more is given up, and truncated.
MOST = 4
DEADLINES = Deadlines(step=1.0, reset=1.0, call=1.0)


def run_program(face: Face, seed: int, goes_on: Callable[[int], bool]) -> list[Any]:
    """Step, reset, call and set as the seed says; return all that was seen, and a draw from each env at the end."""
    dice = random.Random(seed)
    rows = face.reset(seed)
    said: list[Any] = [[astuple(row) for row in rows]]
    while goes_on(len(said)):
        what = dice.choices(["step", "reset", "draw", "set"], [30, 1, 4, 2])[0]
        actions, number = [np.int64(dice.randrange(4)) for _ in range(face.num_envs)], dice.randrange(1000)
        ended = [row.ended for row in rows]
        if any(ended):
            begun = face.reset(mask=ended)
            rows = [new if is_new else old for new, old, is_new in zip(begun, rows, ended, strict=True)]
        elif what == "step":
            rows = face.step(actions)
        elif what == "reset":
            rows = face.reset(number)
        elif what == "set":
            face.set_attr("offset", number / 8)
        drawn = face.call("draw", number * 100) if what == "draw" else []
        said.append([drawn, *map(astuple, rows)])
    return [*said, face.call("draw", 3)]


class Nemesis:
    """Strikes workers, snapshots and the monitor from a thread of its own.

    Args:
        face: Its victims.
        seed: Of the order of strikes; what a victim is doing at that moment is chance.

    Attributes:
        strikes: How many there were, by kind.
    """

    def __init__(self, face: Face, seed: int) -> None:
        self.strikes: Counter[str] = Counter()
        self._met = 0  # strikes that the request under way has met
        self._face, self._dice = face, random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Nemesis:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def goes_on(self, done: int) -> bool:
        """Tell, between two requests, whether strikes are still to come."""
        self._met = 0
        return self.strikes.total() < STRIKES

    def _run(self) -> None:
        kinds = {"kill": 6, "crash": 3, "kill the snapshot": 3, "stop": 2, "kill the monitor": 1}
        while not self._stop.wait(self._dice.uniform(0.02, 0.2)):
            (kind,) = self._dice.choices(list(kinds), list(kinds.values()))
            workers = self._face.pids()
            if workers and self._met < MOST:
                has_struck = self._strike(kind, self._dice.choice(workers))
                self.strikes[kind] += has_struck
                self._met += has_struck

    def _strike(self, kind: str, worker: int) -> bool:
        if kind == "kill the monitor":
            return send(monitor_pid(), signal.SIGKILL)
        if kind == "kill the snapshot":
            return any(send(one, signal.SIGKILL) for one in sorted(descendants(worker))[-1:])
        if kind == "stop":  # it goes on before its deadline, or after it is given up
            sent = send(worker, signal.SIGSTOP)
            self._stop.wait(self._dice.uniform(0.0, 1.6))
            send(worker, signal.SIGCONT)
            return sent
        return send(worker, signal.SIGSEGV if kind == "crash" else signal.SIGKILL)


def send(pid: int | None, number: signal.Signals) -> bool:
    """Send a signal to a descendant of this process; tell whether there was one with this number."""
    if pid not in descendants(os.getpid()):
        return False
    try:
        os.kill(pid or 0, number)
    except ProcessLookupError:
        return False
    return True


def recoveries_of(events: list[Any]) -> list[Recovery]:
    return [event for event in events if isinstance(event, Recovery)]


@pytest.mark.timeout(0 if STRIKES > 50 else 120)
@pytest.mark.parametrize(
    ("kind", "rung"),
    [("subprocess_env", "journal"), ("multi_env", "snapshot"), ("vector_env", "journal"), ("async_env", "snapshot")],
)
def test_whatever_happens_to_processes_the_trajectory_is_the_quiet_one(
    kind: str, rung: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limit(monkeypatch, "AFFORDABLE", 100.0)  # env time: a stop counts, and so does a busy core
    env_fns = [partial(DrawingEnv, horizon=9, count_episodes=False)] * 3
    # A worker that is crashed several times in the same request by chance is not to count as poisoned.
    set_limit(monkeypatch, "POISON_AFTER", MOST + 1)
    policy = ForkingPolicy(snapshots=rung == "snapshot", snapshot_every=4, backoff=0.0)
    events: list[Any] = []
    with Face(kind, env_fns, restart=policy, deadlines=DEADLINES, hooks=[events.append], reports="") as face:
        with Nemesis(face, seed=len(kind) + len(rung)) as nemesis:
            seen = run_program(face, 6, lambda done: nemesis.goes_on(done) or not recoveries_of(events))
        quiet = gymnasium.vector.SyncVectorEnv(env_fns[: face.num_envs], autoreset_mode="Disabled")
        expected = run_program(Face.around("vector_env", quiet, face.num_envs), 6, lambda done: done < len(seen) - 1)
        quiet.close()
    assert {event.outcome for event in recoveries_of(events)} == {"exact"}
    assert first_difference(seen, expected) is None
