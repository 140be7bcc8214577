"""What ``multienv doctor`` tries with an env: each check is a function that returns what was found.

The env runs only in workers with deadlines, so that no check takes the doctor with it. A check uses what those before
it have learnt. One that finds the env broken ends the examination.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import cloudpickle
from rich.filesize import decimal as size_of

from multienv import SubprocessEnv
from multienv.cli.texts import duration
from multienv.config import Deadlines, RestartPolicy
from multienv.errors import EnvFnError, MultienvError, WorkerLostError
from multienv.events import Recovery, Statistics
from multienv.processes.leftovers import kill
from multienv.testing.killer import KillManner, send
from multienv.testing.probe import RAISE, Times, Walk, in_worker, times, walk
from multienv.testing.processes import descendants, is_alive, name_of
from multienv.testing.side_by_side import EnvFn

Verdict = Literal["ok", "note", "truncates", "broken"]
Outcome = Literal["exact", "truncated", "differs"]

# Of the first walk; the later ones take as many steps as that took.
_STEPS, _SECONDS = 200, 2.0
# Given to a snapshot to be announced before its worker is killed, seconds.
_ANNOUNCED = 0.2
# Short episodes in which an env may leak: their steps, how many at least and at the most, and about how many seconds.
_EPISODE_STEPS, _LEAST_EPISODES, _MOST_EPISODES, _EPISODES_SECONDS = 20, 3, 50, 0.5
# What is counted of a process; and how much of it comes and goes in one that leaks nothing.
_COUNTED = {"descriptors": 0, "threads": 0, "processes": 0, "memory": 256 * 2**10}
# Seconds until nothing of a killed worker may be left.
_GONE_WITHIN = 2.0
_USE_NP_RANDOM = "Draw from self.np_random only."
# How often a check is tried of an env that ends its worker by itself.
_TRIES = 3
# The frames of a worker's own code in a traceback or in a stack.
_FRAMES_OF_THE_WORKER = re.compile(r'^  File "[^"\n]*/multienv/worker/.*\n?(?:    .*\n?)*', re.MULTILINE)


class Row(NamedTuple):
    """Tells what one check found.

    Attributes:
        verdict: ``"ok"``; ``"note"``: worth knowing, and recovery works all the same; ``"truncates"``: a lost episode
            is ended; ``"broken"``: multienv cannot run the env.
        meaning: What was found, a line.
        advice: What to do about it, or ``""``.
        detail: More of it: a traceback, the stack of a crash; or ``""``.
        name: Of the check.
    """

    verdict: Verdict
    meaning: str
    advice: str = ""
    detail: str = ""
    name: str = ""


@dataclass
class Patient:
    """Holds an env, and what the checks have learnt of it.

    Attributes:
        name: Of the env, on the command line.
        env_fn: Builds it.
        step_deadline, reset_deadline: Seconds until a step, and anything else, counts as hung.
        first: The walk that all others are held against.
        again: Whether another process walks the same.
        times: How long what takes; 0 until it is known.
        ways: What recovery by a snapshot and by the journal came to.
        leaks: Whether it leaks.
        ready: Seconds until a worker was ready.
        crashes: How it has ended its workers by itself, once for each time.
    """

    name: str
    env_fn: EnvFn
    step_deadline: float
    reset_deadline: float
    first: Walk = field(default_factory=Walk)
    again: bool = True
    times: Times = field(default_factory=Times)
    ways: dict[str, Outcome] = field(default_factory=dict)
    leaks: bool = False
    ready: float = 0.0
    crashes: list[str] = field(default_factory=list)

    @property
    def longest(self) -> float:
        """Return the seconds in which a build, a reset and a step are done, or the env hangs."""
        return min(2 * self.reset_deadline, 20.0 + 10 * self.ready) + self.step_deadline

    @property
    def verdict(self) -> Verdict:
        """Return what recovery comes to: ``"ok"`` if there is a way back that is exact."""
        return "ok" if "exact" in self.ways.values() and self.ways.get("journal") != "differs" else "truncates"

    def worker(self, *, step_deadline: float | None = None, **options: Any) -> SubprocessEnv:
        """Return the env in a worker that is yet to be started; without other options a loss raises."""
        most = self.reset_deadline
        deadlines = Deadlines(
            start=most, reset=most, step=step_deadline or self.step_deadline, call=most, recovery=most
        )
        return SubprocessEnv(self.env_fn, **{"restart": RAISE, "deadlines": deadlines, "reports": "", **options})


def examine(patient: Patient, told: Callable[[Row], object]) -> list[Row]:
    """Run all checks, as far as they make sense; call ``told`` with the row of each."""
    rows: list[Row] = []
    for check in CHECKS:
        for _ in range(_TRIES):
            try:
                found = check(patient)
                break
            except WorkerLostError as error:
                patient.crashes.append(str(error).partition(". ")[0].splitlines()[0].rstrip("."))
                found = _failed(patient, error)
            except Exception as error:  # the env's doing, through multienv
                found = _failed(patient, error)
                break
        rows.append(found._replace(name=check.__name__.replace("_", " ")))
        told(rows[-1])
        if found.verdict == "broken":
            break
    return rows


def _failed(patient: Patient, error: Exception) -> Row:
    """Return the row of a check that raised: what happened, and where in the env."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    advice, detail = "Run it without multienv, and mend that first.", str(getattr(error, "remote_traceback", ""))
    if not isinstance(error, MultienvError):
        detail = "".join(traceback.format_exception(error))
    if isinstance(error, WorkerLostError | EnvFnError):
        text = text.partition(". ")[0].rstrip(".")  # what follows is for the caller of multienv
    if isinstance(error, EnvFnError):
        advice = "Build what it needs inside the function."
    if isinstance(error, WorkerLostError) and patient.first.steps:  # it runs, until it ends its worker by itself
        return Row("note", f"not known: it ended its worker in each of {_TRIES} tries", "See the last line.")
    if isinstance(error, WorkerLostError):
        detail = error.stack
        if error.report:
            env = f" --env {patient.name}" if ":" in patient.name else ""
            advice = f"This runs it again: multienv replay {error.report}{env}"
    return Row("broken", text, advice, _FRAMES_OF_THE_WORKER.sub("", detail).strip("\n"))


# --- does it run at all? --------------------------------------------------------------------------


def builds(patient: Patient) -> Row:
    """Send what builds the env to a worker, and build it there."""
    began = time.perf_counter()
    with patient.worker(reports=None) as env:
        patient.ready = time.perf_counter() - began
        seconds, memory = patient.ready, env.statistics().rss or 0
    size = size_of(len(cloudpickle.dumps(patient.env_fn)))
    return Row("ok", f"{size} travel to a worker; it is ready in {duration(seconds)}, and takes {size_of(memory)}")


def steps(patient: Patient) -> Row:
    """Walk at random: the walk that others are held against. It leaves a report if the env ends its worker."""
    with patient.worker(reports=None) as env:
        patient.first = walk(env, _STEPS, seconds=_SECONDS)
    return Row("ok", f"{patient.first.steps} random steps")


def repeats(patient: Patient) -> Row:
    """Walk the same way in another process, and once more in that one: a seed should begin the same again."""
    with patient.worker() as env:
        other, again = (walk(env, patient.first.steps) for _ in range(2))
    place = patient.first.differs_at(other)
    patient.again = not place
    if place:
        return Row(
            "note",
            f"two processes with the same seed part at {place}",
            "Does it draw from elsewhere than self.np_random: random, numpy.random, the clock, os.urandom?",
        )
    place = other.differs_at(again)
    if place:
        return Row(
            "note",
            f"reset(seed=0) twice in a process is not the same twice: {place} differs",
            "Forget everything in reset(seed=…), and draw from self.np_random only.",
        )
    return Row("ok", f"a seed begins the same again, in one process and in another, for {patient.first.steps} steps")


def time_it_takes(patient: Patient) -> Row:
    """Time its calls inside a process."""
    known = patient.times = in_worker(times, patient.env_fn, patient.first.steps, _SECONDS / 2, seconds=patient.longest)
    parts = {"build": known.build, "reset": known.reset, "step": known.step, "close": known.close}
    told = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items())
    return Row("ok", f"{told}; slowest step {duration(known.slowest_step)}")


# --- the ways back --------------------------------------------------------------------------------


def forks(patient: Patient) -> Row:
    """Kill the worker with SIGKILL after it has taken a snapshot of itself."""
    struck = strike(patient, "SIGKILL", restart=RestartPolicy(snapshot_every=max(1, patient.first.steps // 4)))
    recovery, obstacle = struck.recovery, struck.statistics.no_snapshots
    if recovery.rung == "snapshot":
        patient.ways["snapshot"] = struck.outcome
        if struck.outcome == "exact":
            return Row("ok", f"a killed worker comes back from its snapshot, exact, in {duration(recovery.seconds)}")
        return Row(
            "note",
            f"after a snapshot was woken {struck.difference} differs silently",
            "RestartPolicy(snapshots=False): this env is another one after a fork.",
        )
    if sys.platform != "linux":
        return Row("note", "snapshots are taken on Linux only")
    if obstacle:
        advice = "Not needed where replays are exact, see the next line."
        return Row("note", f"no snapshot can be taken: {obstacle}", advice)
    if struck.outcome == "truncated":
        return Row("note", f"a woken snapshot does not go on the same: {struck.reason}", _USE_NP_RANDOM)
    return Row("note", "no snapshot was ready, or it did not go on the same; a new process did", _USE_NP_RANDOM)


def replays(patient: Patient) -> Row:
    """Kill the worker with SIGKILL where there are no snapshots, as on macOS or with threads."""
    struck = strike(patient, "SIGKILL", restart=RestartPolicy(snapshots=False))
    patient.ways["journal"] = struck.outcome
    if struck.outcome == "exact":
        took = duration(struck.recovery.seconds)
        return Row("ok", f"a new process repeats {struck.recovery.replayed} requests, exact, in {took}")
    if struck.outcome == "differs":
        return Row(
            "truncates",
            f"after a replay {struck.difference} differs silently",
            'RestartPolicy(on_crash="truncate", on_timeout="truncate"): what it knows lies outside of its process?',
        )
    advice = f"It comes back from snapshots alone. {_USE_NP_RANDOM}" if patient.verdict == "ok" else _USE_NP_RANDOM
    return Row(_unless_recoverable(patient), f"a new process does not repeat it: {struck.reason}", advice)


# --- what it leaves behind ------------------------------------------------------------------------


def leaks(patient: Patient) -> Row:
    """Count descriptors, threads, processes and memory before and after three rounds of short episodes."""
    if sys.platform != "linux":
        return Row("ok", "not looked at: this needs Linux")
    most = min(_EPISODE_STEPS, patient.first.steps)
    wanted = _EPISODES_SECONDS / max(1e-6, patient.times.reset + most * patient.times.step)
    episodes = int(min(max(_LEAST_EPISODES, wanted), _MOST_EPISODES))
    counts = []
    with patient.worker() as env:
        env.action_space.seed(0)
        env.reset(seed=0)
        for _ in range(4):  # after the first round an env has what it keeps for good
            for _ in range(episodes):
                _episode(env, most)
            counts.append(_usage(env))
    found = []
    for place, (name, noise) in enumerate(_COUNTED.items()):
        least = min(after[place] - before[place] for before, after in pairwise(counts))
        if least > noise:
            each = least / episodes
            found.append(f"{name} by {size_of(int(each)) if name == 'memory' else f'{each:.3g}'}")
    if not found:
        return Row("ok", f"nothing in {3 * episodes} episodes")
    patient.leaks = True
    return Row(
        "note",
        f"grow with each episode: {', '.join(found)}",
        "RestartPolicy(recycle_after_steps=100_000) replaces the process in time, without a trace.",
    )


def _episode(env: SubprocessEnv, most: int) -> None:
    env.reset()
    for _ in range(most):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            return


def _usage(env: SubprocessEnv) -> tuple[int, ...]:
    known = env.statistics()
    assert known.pid is not None
    descriptors, threads = (len(os.listdir(Path("/proc", str(known.pid), name))) for name in ("fd", "task"))
    return descriptors, threads, len(descendants(known.pid)), known.rss or 0


def orphans(patient: Patient) -> Row:
    """Kill the worker with SIGKILL, and look for the processes that its env had started."""
    others = descendants(os.getpid())
    with patient.worker() as env:
        walk(env, min(20, patient.first.steps))
        started = descendants(os.getpid()) - others - {_pid(env)}  # also those that are no longer its children
        send(_pid(env), "SIGKILL")
        until = time.monotonic() + _GONE_WITHIN
        while any(map(is_alive, started)) and time.monotonic() < until:
            time.sleep(0.01)
        left = {pid: name_of(pid) for pid in started if is_alive(pid)}
        kill(left)
    if left:
        names = ", ".join(f"{name} ({pid})" for pid, name in left.items())
        return Row("note", f"outlive their worker: {names}", "Have them end when their parent is gone.")
    return Row("ok", f"none: all {len(started)} that it had started ended with it" if started else "none")


# --- what a loss costs ----------------------------------------------------------------------------


def a_dead_worker(patient: Patient) -> Row:
    """Kill the worker, with the options that users have who choose none."""
    struck = strike(patient, "SIGKILL", restart=RestartPolicy())
    return _cost(patient, struck, duration(struck.recovery.seconds))


def a_hung_worker(patient: Patient) -> Row:
    """Stop the worker with SIGSTOP: it does not answer any more."""
    deadline = max(0.5, 5 * patient.times.slowest_step)
    struck = strike(patient, "SIGSTOP", restart=RestartPolicy(), step_deadline=deadline)
    return _cost(patient, struck, f"its deadline, and then {duration(struck.recovery.seconds)}")


def crashes(patient: Patient) -> Row:
    """Tell how often it has ended its worker in the other checks, without being struck."""
    if not patient.crashes:
        return Row("ok", "none by itself in all of this")
    number = len(patient.crashes)
    return Row(
        "note",
        f"{number} by itself in all of this: {patient.crashes[-1]}",
        "The fewer steps a recovery repeats, the fewer of its crashes it meets: RestartPolicy(snapshot_every=20).",
    )


def _cost(patient: Patient, struck: Struck, took: str) -> Row:
    if struck.outcome == "exact":
        return Row("ok", f"costs nothing; {took}")
    if struck.outcome == "differs":
        return Row(_unless_recoverable(patient), f"costs a silent difference; {took}", "Use the options below.")
    return Row(_unless_recoverable(patient), f"costs the rest of its episode (truncated=True); {took}")


CHECKS: tuple[Callable[[Patient], Row], ...] = (
    builds,
    steps,
    repeats,
    time_it_takes,
    forks,
    replays,
    leaks,
    orphans,
    a_dead_worker,
    a_hung_worker,
    crashes,
)


@dataclass
class Struck:
    """Tells what became of a walk whose worker was struck.

    Attributes:
        outcome: ``"differs"``: it was taken for exact, and is not the walk without a strike.
        difference: The reset or step at which it differs.
        recovery: What became of the loss.
        statistics: Of the worker, at the end.
    """

    outcome: Outcome
    difference: str
    recovery: Recovery
    statistics: Statistics

    @property
    def reason(self) -> str:
        """Return why the recovery was not exact, without what is known: that the process was killed."""
        reason = self.recovery.reason
        return reason.partition("It cannot be brought back: ")[2] or reason


def strike(patient: Patient, manner: KillManner, **options: Any) -> Struck:
    """Walk as the first walk did, and strike the worker with a signal when most of the steps are done.

    Args:
        patient: The env.
        manner: The signal.
        **options: Of the worker.
    """
    late = patient.first.steps * 17 // 20

    def before_step(step: int) -> None:
        if step == late:
            time.sleep(_ANNOUNCED)
            send(_pid(env), manner)

    for _ in range(_TRIES):
        env = patient.worker(**options)
        with env:
            found = walk(env, patient.first.steps, before_step=before_step)
            known = env.statistics()
        if known.losses == 1:
            break
        patient.crashes.append(f"{known.losses - 1} more than it was struck")
    assert known.last_recovery is not None
    difference = found.differs_at(patient.first) if patient.again else ""
    outcome: Outcome = "differs" if difference else "exact"
    if known.exact_recoveries < known.losses:
        outcome = "truncated"
    return Struck(outcome, difference, known.last_recovery, known)


def _unless_recoverable(patient: Patient) -> Verdict:
    """Return the verdict of a check in which a loss was not recovered from: there may be another way back."""
    return "note" if patient.verdict == "ok" else "truncates"


def _pid(env: SubprocessEnv) -> int:
    return env.statistics().pid or 0


# --- what to write --------------------------------------------------------------------------------


def options_for(patient: Patient) -> str:
    """Return the options to run this env with, as Python."""
    step, reset = (max(1, math.ceil(20 * seconds)) for seconds in (patient.times.slowest_step, patient.times.reset))
    options = [f"deadlines=Deadlines(step={step:.1f}, reset={max(5, reset):.1f})"]
    restart = []
    if patient.ways.get("journal") == "differs":
        restart += ['on_crash="truncate"', 'on_timeout="truncate"']
    elif patient.ways.get("snapshot") == "differs":
        restart += ["snapshots=False"]
    if patient.crashes and patient.ways.get("snapshot") == "exact":
        restart += ["snapshot_every=20"]
    if patient.leaks:
        restart += ["recycle_after_steps=100_000"]
    if restart:
        options.append(f"restart=RestartPolicy({', '.join(restart)})")
    return ", ".join(options)
