"""What ``multienv doctor`` tries with an env: each check is a function that returns what was found.

The env runs only in workers with deadlines, so that no check takes the doctor with it. A check uses what those before
it have learnt. One that finds the env broken ends the examination.
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import cloudpickle

from multienv import SubprocessEnv
from multienv.cli.texts import duration, size_of
from multienv.config import Deadlines, RestartPolicy
from multienv.errors import EnvFnError, MultienvError, WorkerLostError
from multienv.events import Recovery, Statistics
from multienv.processes.leftovers import kill
from multienv.recovery.record import resident_bytes
from multienv.testing.killer import KillManner, send
from multienv.testing.probe import RAISE, RoundTrip, Times, Walk, in_worker, state_round_trip, times, walk
from multienv.testing.processes import descendants, is_alive
from multienv.testing.side_by_side import EnvFn

Verdict = Literal["ok", "note", "truncates", "broken"]
Outcome = Literal["exact", "truncated", "differs", "none"]

# Of the first walk; the later ones take as many steps as that took.
_STEPS, _SECONDS = 200, 2.0
# Given to a snapshot to be announced before its worker is killed, seconds.
_ANNOUNCED = 0.05
# Walks until a snapshot was there when its worker was killed.
_TRIES = 3
# Least and most episodes before the count of what an env leaks begins, and the seconds spent on them.
_FEWEST_EPISODES, _MOST_EPISODES, _EPISODES_SECONDS = 3, 50, 0.5
_EPISODE_STEPS = 20
# Bytes of resident memory that come and go in a process that leaks nothing.
_NOISE = 256 * 2**10
_USE_NP_RANDOM = "Draw from self.np_random only."
# Seconds until nothing of a killed worker may be left.
_GONE_WITHIN = 2.0


class Row(NamedTuple):
    """Tells what one check found.

    Attributes:
        name: Of the check.
        verdict: ``"ok"``; ``"note"``: worth knowing, and recovery works all the same; ``"truncates"``: a lost episode
            is ended; ``"broken"``: multienv cannot run the env.
        meaning: What was found, a line.
        advice: What to do about it, or ``""``.
        detail: More of it: a traceback, the stack of a crash; or ``""``.
    """

    name: str
    verdict: Verdict
    meaning: str
    advice: str = ""
    detail: str = ""


class Finding(NamedTuple):
    """Tells what a check says of its row: see :class:`Row`."""

    verdict: Verdict
    meaning: str
    advice: str = ""


@dataclass
class Patient:
    """Holds an env, and what the checks have learnt of it.

    Attributes:
        name: Of the env, on the command line.
        env_fn: Builds it.
        deadlines: Of all workers.
        first: The walk that all others are held against.
        again: Whether another process walks the same.
        times: How long what takes; ``None``: not known yet.
        ways: What recovery by a snapshot and by the journal came to.
        leaks: Whether it leaks.
    """

    name: str
    env_fn: EnvFn
    deadlines: Deadlines
    first: Walk = field(default_factory=Walk)
    again: bool = True
    times: Times | None = None
    ways: dict[str, Outcome] = field(default_factory=dict)
    leaks: bool = False

    def worker(self, **options: Any) -> SubprocessEnv:
        """Return the env in a worker that is yet to be started; without other options a loss raises."""
        return SubprocessEnv(self.env_fn, **{"restart": RAISE, "deadlines": self.deadlines, "reports": "", **options})

    @property
    def verdict(self) -> Verdict:
        """Return what recovery comes to: ``"ok"`` if there is a way back that is exact."""
        ways = self.ways.values()
        return "ok" if "exact" in ways and self.ways.get("journal") != "differs" else "truncates"


@dataclass
class Struck:
    """Tells what became of a walk whose worker was struck.

    Attributes:
        outcome: ``"differs"``: it was taken for exact, and is not the walk without a strike.
        walk: The walk.
        recoveries: What became of each loss.
        seconds: From each strike to the return of the step that met it.
        statistics: Of the worker, at the end.
    """

    outcome: Outcome
    walk: Walk
    recoveries: list[Recovery]
    seconds: list[float]
    statistics: Statistics

    @property
    def reason(self) -> str:
        """Return why a recovery was not exact, without what is known: that the process was killed."""
        reason = next((one.reason for one in self.recoveries if one.reason), "")
        return reason.partition("It cannot be brought back: ")[2] or reason


def examine(patient: Patient, told: Callable[[Row], object]) -> list[Row]:
    """Run all checks, as far as they make sense; call ``told`` with the row of each."""
    rows: list[Row] = []
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        try:
            row = Row(name, *check(patient))
        except Exception as error:  # the env's doing, through multienv
            row = _failed(name, patient, error)
        rows.append(row)
        told(row)
        if row.verdict == "broken":
            break
    return rows


def _failed(name: str, patient: Patient, error: Exception) -> Row:
    """Return the row of a check that raised: what happened, and where in the env."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    advice, detail = "Run it without multienv, and mend that first.", str(getattr(error, "remote_traceback", ""))
    if not isinstance(error, MultienvError):
        detail = "".join(traceback.format_exception(error))
    if isinstance(error, WorkerLostError | EnvFnError):
        text = text.partition(". ")[0].rstrip(".")  # what follows is for the caller of multienv
    if isinstance(error, EnvFnError):
        advice = "Build what it needs inside the function."
    if isinstance(error, WorkerLostError):
        detail = error.stack
        if error.report:
            env = f" --env {patient.name}" if ":" in patient.name else ""
            advice = f"This runs it again: multienv replay {error.report}{env}"
    return Row(name, "broken", text, advice, _of_the_env(detail))


def _of_the_env(detail: str) -> str:
    """Return the part of a stack (innermost first) or a traceback (innermost last) that is not multienv's own."""
    lines = detail.strip().splitlines()
    own = [place for place, line in enumerate(lines) if "/multienv/worker/" in line]
    if not own:
        return "\n".join(lines)
    if not lines[0].startswith("Traceback"):
        return "\n".join(lines[: own[0]])
    rest = lines[own[-1] + 1 :]
    begin = next((place for place, line in enumerate(rest) if line.startswith("  File ")), 0)
    return "\n".join(rest[begin:])


# --- does it run at all? --------------------------------------------------------------------------


def pickles(patient: Patient) -> Finding:
    """Send what builds the env to a process, without calling it."""
    patient.worker().close()
    return Finding("ok", f"{len(cloudpickle.dumps(patient.env_fn)):,} bytes travel to a worker")


def builds(patient: Patient) -> Finding:
    """Build it in a worker."""
    began = time.perf_counter()
    env = patient.worker(reports=None)
    with env:
        seconds, memory = time.perf_counter() - began, resident_bytes(_pid(env)) or 0
    return Finding("ok", f"a worker is ready in {duration(seconds)}, and takes {size_of(memory)}")


def steps(patient: Patient) -> Finding:
    """Walk at random: the walk that others are held against. It leaves a report if the env ends its worker."""
    with patient.worker(reports=None) as env:
        patient.first = walk(env, _STEPS, seconds=_SECONDS)
    return Finding("ok", f"{patient.first.steps} random steps")


# --- is it deterministic? -------------------------------------------------------------------------


def seeds(patient: Patient) -> Finding:
    """Walk twice in one process: a seed should begin the same again."""
    with patient.worker() as env:
        one, same, other = (walk(env, patient.first.steps, seed=seed) for seed in (0, 0, 1))
    place = one.differs_at(same)
    if place:
        return Finding(
            "note",
            f"reset(seed=0) twice is not the same twice: {place} differs",
            "Forget everything in reset(seed=…), and draw from self.np_random only.",
        )
    if not one.differs_at(other):
        return Finding("ok", "reset(seed=0) begins the same again; seed 1 makes no difference")
    return Finding("ok", "reset(seed=0) begins the same again")


def repeats(patient: Patient) -> Finding:
    """Walk the same way in another process."""
    with patient.worker() as env:
        place = patient.first.differs_at(walk(env, patient.first.steps))
    patient.again = not place
    if patient.again:
        return Finding("ok", f"two processes agree to the bit for {patient.first.steps} steps")
    return Finding(
        "note",
        f"two processes with the same seed part at {place}",
        "Does it draw from elsewhere than self.np_random: random, numpy.random, the clock, os.urandom?",
    )


def time_it_takes(patient: Patient) -> Finding:
    """Time its calls inside a process."""
    known = patient.times = in_worker(times, patient.env_fn, _SECONDS / 2, seconds=_longest(patient))
    parts = {"build": known.build, "reset": known.reset, "step": known.step, "close": known.close}
    told = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items())
    return Finding("ok", f"{told}; slowest step {duration(known.slowest_step)}")


# --- the ways back --------------------------------------------------------------------------------


def forks(patient: Patient) -> Finding:
    """Kill the worker with SIGKILL after it has taken a snapshot of itself."""
    every = max(1, patient.first.steps // 4)
    for _ in range(_TRIES):
        struck = strike(patient, "SIGKILL", [_late(patient)], restart=RestartPolicy(snapshot_every=every))
        known = struck.statistics
        by_snapshot = any(one.rung == "snapshot" for one in struck.recoveries)
        was_tried = by_snapshot or any(one.attempts > 1 for one in struck.recoveries)
        if was_tried or known.no_snapshots or sys.platform != "linux":
            break
    patient.ways["snapshot"] = struck.outcome if by_snapshot else "none"
    if by_snapshot and struck.outcome == "exact":
        return Finding("ok", f"a killed worker comes back from its snapshot, exact, in {duration(struck.seconds[0])}")
    if struck.outcome == "differs" and by_snapshot:
        return Finding(
            "note",
            f"after a snapshot was woken {struck.walk.differs_at(patient.first)} differs silently",
            "RestartPolicy(snapshots=False): this env is another one after a fork.",
        )
    if sys.platform != "linux":
        return Finding("note", "snapshots are taken on Linux only")
    if known.no_snapshots:
        advice = "Not needed where replays are exact, see the next line."
        return Finding("note", f"no snapshot can be taken: {known.no_snapshots}", advice)
    if not was_tried:
        return Finding("note", "no snapshot was ready in time: is this machine very busy?")
    if struck.outcome == "exact":
        return Finding("note", "a woken snapshot did not go on the same; a new process did", _USE_NP_RANDOM)
    return Finding("note", f"a woken snapshot does not go on the same: {struck.reason}", _USE_NP_RANDOM)


def replays(patient: Patient) -> Finding:
    """Kill the worker with SIGKILL where there are no snapshots, as on macOS or with threads."""
    struck = strike(patient, "SIGKILL", [_late(patient)], restart=RestartPolicy(snapshots=False))
    patient.ways["journal"] = struck.outcome
    if struck.outcome == "exact":
        took, most = duration(struck.seconds[0]), _longest_journal(patient, struck.statistics)
        return Finding(
            "ok",
            f"a new process repeats {struck.recoveries[0].replayed} requests from the construction, exact, in {took}; "
            f"it can do so for the first {most:,} steps",
        )
    if struck.outcome == "differs":
        return Finding(
            "truncates",
            f"after a replay {struck.walk.differs_at(patient.first)} differs silently",
            'RestartPolicy(on_crash="truncate", on_timeout="truncate"): what it knows lies outside of its process?',
        )
    meaning = f"a new process does not repeat it: {struck.reason}"
    if patient.ways.get("snapshot") == "exact":
        return Finding("note", meaning, f"It comes back from snapshots alone. {_USE_NP_RANDOM}")
    return Finding("truncates", meaning, _USE_NP_RANDOM)


def state(patient: Patient) -> Finding:
    """Take its state, and put it into a newly built one."""
    few = min(100, patient.first.steps)
    try:
        trip = in_worker(state_round_trip, patient.env_fn, few, seconds=_longest(patient))
    except MultienvError as error:  # of two envs in one process, for one
        trip = RoundTrip(str(error).splitlines()[0], 0)
    if not trip.reason:
        return Finding(
            "ok",
            f"a new env that is given it ({size_of(trip.size)}) goes on the same: replays may begin there",
        )
    return Finding(
        "note",
        f"not from its state: {trip.reason}",
        "Only episodes longer than the journal want it: get_state() and set_state(state), or register_state_hook().",
    )


# --- what it leaves behind ------------------------------------------------------------------------


def leaks(patient: Patient) -> Finding:
    """Count descriptors, threads, processes and memory over short episodes."""
    if sys.platform != "linux":
        return Finding("ok", "not looked at: this needs Linux")
    with patient.worker() as env:
        env.action_space.seed(0)
        env.reset(seed=0)
        most = min(_EPISODE_STEPS, patient.first.steps)
        rounds, until = 0, time.monotonic() + _EPISODES_SECONDS
        while rounds < _FEWEST_EPISODES or (rounds < _MOST_EPISODES and time.monotonic() < until):
            _episode(env, most)
            rounds += 1
        counts = [_usage(_pid(env))]
        for _ in range(3):
            for _ in range(rounds):
                _episode(env, most)
            counts.append(_usage(_pid(env)))
    found = []
    for place, (name, noise) in enumerate(_COUNTED.items()):
        least = min(after[place] - before[place] for before, after in pairwise(counts))
        if least > noise:
            each = least / rounds
            found.append(f"{name} by {size_of(int(each)) if name == 'memory' else f'{each:.3g}'}")
    if not found:
        return Finding("ok", f"nothing in {3 * rounds} episodes")
    patient.leaks = True
    return Finding(
        "note",
        f"grow with each episode: {', '.join(found)}",
        "RestartPolicy(recycle_after_steps=100_000) replaces the process in time, without a trace.",
    )


def orphans(patient: Patient) -> Finding:
    """Kill the worker with SIGKILL, and look for the processes that its env had started."""
    others = descendants(os.getpid())
    with patient.worker() as env:
        walk(env, min(20, patient.first.steps))
        started = descendants(os.getpid()) - others - {_pid(env)}  # also those that are no longer its children
        send(_pid(env), "SIGKILL")
        until = time.monotonic() + _GONE_WITHIN
        while any(map(is_alive, started)) and time.monotonic() < until:
            time.sleep(0.01)
        left = [pid for pid in started if is_alive(pid)]
        names = [_name(pid) for pid in left]
        kill(left)
    if left:
        return Finding("note", f"outlive their worker: {', '.join(names)}", "Have them end when their parent is gone.")
    return Finding("ok", f"none: all {len(started)} that it had started ended with it" if started else "none")


# --- what a loss costs ----------------------------------------------------------------------------


def a_dead_worker(patient: Patient) -> Finding:
    """Kill the worker three times, with the options that users have who choose none."""
    last = patient.first.steps - 1
    struck = strike(patient, "SIGKILL", [last // 4, last // 2, last], restart=RestartPolicy())
    return _cost(patient, struck, duration(_median(struck.seconds)))


def a_hung_worker(patient: Patient) -> Finding:
    """Stop the worker with SIGSTOP: it does not answer any more."""
    deadline = max(0.5, 5 * (patient.times.slowest_step if patient.times else 0.0))
    deadlines = replace(patient.deadlines, step=deadline)
    struck = strike(patient, "SIGSTOP", [_late(patient)], restart=RestartPolicy(), deadlines=deadlines)
    return _cost(patient, struck, f"its deadline, and then {duration(max(0.0, struck.seconds[0] - deadline))}")


CHECKS: tuple[Callable[[Patient], Finding], ...] = (
    pickles,
    builds,
    steps,
    seeds,
    repeats,
    time_it_takes,
    forks,
    replays,
    state,
    leaks,
    orphans,
    a_dead_worker,
    a_hung_worker,
)


def strike(patient: Patient, manner: KillManner, before: Sequence[int], **options: Any) -> Struck:
    """Walk as the first walk did, and strike the worker before these steps.

    Args:
        patient: The env.
        manner: The signal.
        before: Numbers of steps, from 0.
        **options: Of the worker.
    """
    events: list[Any] = []
    began: list[float] = []
    seconds: list[float] = []
    env = patient.worker(hooks=[events.append], **options)

    def before_step(step: int) -> None:
        if len(began) > len(seconds):
            seconds.append(time.perf_counter() - began[-1])
        if step in before:
            time.sleep(_ANNOUNCED)
            send(_pid(env), manner)
            began.append(time.perf_counter())

    with env:
        found = walk(env, patient.first.steps, before_step=before_step)
        before_step(-1)
        known = env.statistics()
    recoveries = [event for event in events if isinstance(event, Recovery)]
    outcome: Outcome = "exact"
    if known.exact_recoveries < known.losses or not recoveries:
        outcome = "truncated"
    elif patient.again and found.differs_at(patient.first):
        outcome = "differs"
    return Struck(outcome, found, recoveries, seconds, known)


def _cost(patient: Patient, struck: Struck, took: str) -> Finding:
    if struck.outcome == "exact":
        return Finding("ok", f"costs nothing; {took}")
    is_recoverable = patient.verdict == "ok"
    if struck.outcome == "differs":
        verdict: Verdict = "note" if is_recoverable else "truncates"
        return Finding(verdict, f"costs a silent difference; {took}", "Use the options below.")
    if is_recoverable:  # a snapshot was not there yet, for one
        return Finding("note", f"costs nothing where there is a snapshot, else the rest of its episode; {took}")
    return Finding("truncates", f"costs the rest of its episode (truncated=True); {took}")


def _longest_journal(patient: Patient, known: Statistics) -> int:
    """Return after about how many steps the journal has outgrown its limits."""
    limits = RestartPolicy()
    by_size = limits.journal_limit * known.steps / max(1, known.journal_bytes)
    by_time = limits.replay_limit / max(1e-7, patient.times.step if patient.times else 0.0)
    return int(float(f"{min(by_size, by_time):.1g}"))


def _late(patient: Patient) -> int:
    return patient.first.steps * 17 // 20


def _longest(patient: Patient) -> float:
    """Return the seconds in which a build, a reset and a step are done, or the env hangs."""
    known = (patient.deadlines.start, patient.deadlines.reset, patient.deadlines.step)
    return sum(one or 0.0 for one in known)


def _pid(env: SubprocessEnv) -> int:
    return env.statistics().pid or 0


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _episode(env: SubprocessEnv, most: int) -> None:
    env.reset()
    for _ in range(most):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            return


_COUNTED = {"descriptors": 0, "threads": 0, "processes": 0, "memory": _NOISE}


def _usage(pid: int) -> tuple[int, int, int, int]:
    process = Path("/proc", str(pid))
    descriptors, threads = (len(os.listdir(process / name)) for name in ("fd", "task"))
    return descriptors, threads, len(descendants(pid)), resident_bytes(pid) or 0


def _name(pid: int) -> str:
    try:
        return f"{Path('/proc', str(pid), 'comm').read_text().strip()} ({pid})"
    except OSError:
        return str(pid)


def round_up(seconds: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, 50, … seconds."""
    power = 10.0 ** math.floor(math.log10(max(seconds, 1.0)))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= seconds)


def options_for(patient: Patient) -> str:
    """Return the options to run this env with, as Python."""
    known = patient.times
    step = round_up(max(1.0, 20 * known.slowest_step)) if known else 10.0
    reset = round_up(max(5.0, 20 * known.reset)) if known else 60.0
    options = [f"deadlines=Deadlines(step={step}, reset={reset})"]
    restart = []
    if patient.ways.get("journal") == "differs":
        restart += ['on_crash="truncate"', 'on_timeout="truncate"']
    elif patient.ways.get("snapshot") == "differs":
        restart += ["snapshots=False"]
    if patient.leaks:
        restart += ["recycle_after_steps=100_000"]
    if restart:
        options.append(f"restart=RestartPolicy({', '.join(restart)})")
    return ", ".join(options)
