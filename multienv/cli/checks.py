"""The checks of ``multienv doctor``. Each check is a function that returns its finding.

The env runs only in workers with deadlines, so a crash or hang never reaches the doctor itself. A check uses the
findings of earlier checks. If a check finds the env broken, the examination ends.
"""

from __future__ import annotations

import math
import os
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import cloudpickle
import numpy as np
import psutil
from rich.filesize import decimal

import multienv
from multienv import SubprocessEnv
from multienv.cli.rendering import drawn
from multienv.cli.texts import duration
from multienv.cli.walking import RAISE, Walk, walk
from multienv.config import Deadlines, RestartPolicy
from multienv.errors import EnvError, MultienvError, UsageError, WorkerHungError, WorkerLostError
from multienv.events import Event, Loss, Recovery, Statistics
from multienv.testing.killer import KillManner, send
from multienv.testing.side_by_side import EnvFn

Verdict = Literal["ok", "note", "truncates", "broken"]
Outcome = Literal["exact", "truncated", "differs"]

# Limits of the first walk. Later walks take the same number of steps.
_STEPS, _SECONDS = 200, 2.0
# Seconds that a snapshot has to announce itself before its worker is killed.
_ANNOUNCED = 0.2
# Short episodes that show a leak: steps of each, least and greatest number of episodes, and about how many seconds.
_EPISODE_STEPS, _LEAST_EPISODES, _MOST_EPISODES, _EPISODES_SECONDS = 20, 3, 50, 0.5
# Memory that comes and goes in a process without a leak.
_NOISE = 256 * 2**10
# A check ends if the env itself loses more workers than this in one walk, or one in a walk of so many seconds.
_OWN_LOSSES, _OWN_LOSSES_SECONDS = 3, 60.0
# A check that the env itself spoils is tried once more, but not when the examination has taken so many seconds.
_SECOND_TRIES_UNTIL = 120.0
# Recommended deadlines: so many times the slowest step or reset, and at least so many seconds.
_TIMES_THE_SLOWEST, _LEAST_DEADLINE = 10.0, 1.0
# Recommended max_rss: so many times the memory of a worker, in units of so many MiB, and at least so many MiB.
_TIMES_THE_MEMORY, _MEMORY_UNIT, _LEAST_MEMORY = 4, 64, 512
# About how many leaked descriptors, threads or processes of one env may pile up; least and greatest number of steps.
_PILE, _FEWEST_STEPS, _MOST_STEPS = 300, 100, 100_000
# Number of stderr lines shown of a lost worker.
_LAST_WORDS = 10
_USE_NP_RANDOM = "Take random numbers only from self.np_random."
_OFFSCREEN = "For MuJoCo, set MUJOCO_GL=egl or MUJOCO_GL=osmesa; see docs/robot_simulators.md."
_NO_DISPLAY = ("OpenGL", "DISPLAY")
_ON_THE_CPU = (
    "The CPU renders. For a GPU: install its driver's EGL library, and give each worker a device by worker_env."
)
# The frames of multienv's own code in a traceback or a stack of a worker.
_OUR_FRAMES = re.compile(
    rf'(?:^  File "{re.escape(str(Path(multienv.__file__).parent))}/(?:worker|processes|wire)/.*\n?(?:    .*\n?)*)+'
    r'(?:  File "<string>", line 1 in <module>\n?)?',
    re.MULTILINE,
)


class SpoiledError(Exception):
    """Raised when a check cannot tell anything: the env itself crashed or hung, and was not recovered exactly."""


class LostAgainError(Exception):
    """Raised when the env itself loses worker after worker."""


class Row(NamedTuple):
    """Holds the finding of one check.

    Attributes:
        verdict: ``"ok"``; ``"note"``: worth knowing, but recovery works; ``"truncates"``: a lost episode is truncated;
            ``"broken"``: multienv cannot run the env.
        meaning: The finding, in one line.
        advice: What the user can do about it, or ``""``.
        detail: Details such as a traceback or the stack of a crash, or ``""``.
        name: Name of the check.
    """

    verdict: Verdict
    meaning: str
    advice: str = ""
    detail: str = ""
    name: str = ""


@dataclass
class Patient:
    """Holds an env, and the findings of the checks about it.

    Attributes:
        name: The env's name on the command line.
        env_fn: Builds the env.
        step_deadline, reset_deadline: Seconds until a step, or any other request, counts as hung.
        first: The first walk. All others are compared with it.
        again: Whether another process walks the same way.
        ways: The outcome of recovery by a snapshot and by the journal.
        memory: Bytes of a worker that has just built the env.
        recycling: The options of RestartPolicy that help against the env's leaks.
        crashed, hung: How often the env itself crashed or hung; the doctor's own strikes do not count.
        obstacle: Why the env has no snapshots, or ``""``.
        began: When the examination began.
        episode_seconds: Env time of the longest episode that its spec allows; 0.0: unknown.
        variables: Environment variables that the env needs to render frames.
    """

    name: str
    env_fn: EnvFn
    step_deadline: float
    reset_deadline: float
    first: Walk = field(default_factory=Walk)
    again: bool = True
    ways: dict[str, Outcome] = field(default_factory=dict)
    memory: int = 0
    recycling: list[str] = field(default_factory=list)
    crashed: int = 0
    hung: int = 0
    obstacle: str = ""
    began: float = field(default_factory=time.monotonic)
    episode_seconds: float = 0.0
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """Return the verdict on recovery: ``"ok"`` if one way of recovery is exact."""
        return "ok" if "exact" in self.ways.values() and self.ways.get("journal") != "differs" else "truncates"

    @property
    def own_faults(self) -> str:
        """Return what the env did by itself: ``"crashed"``, ``"hung"``, ``"crashed and hung"`` or ``""``."""
        return " and ".join(["crashed"] * bool(self.crashed) + ["hung"] * bool(self.hung))

    def note_own_loss(self, *, hung: bool) -> None:
        """Count a crash or a hang of the env itself."""
        self.hung += hung
        self.crashed += not hung

    def worker(
        self, *, env_fn: EnvFn | None = None, step_deadline: float | None = None, **options: Any
    ) -> SubprocessEnv:
        """Return the env (or another one) in a worker that is not yet started. By default a loss raises.

        If the env has hung, the recommended deadlines apply: otherwise each further hang would take 10 s.
        """
        most = self.reset_deadline
        step, reset = step_deadline or self.step_deadline, most
        if self.hung and self.first.steps:
            step, reset = min(step, _deadline(self.first.slowest_step)), min(reset, _deadline(self.first.slowest_reset))
        deadlines = Deadlines(start=most, reset=reset, step=step, call=most, recovery=most)
        return SubprocessEnv(env_fn or self.env_fn, **{"restart": RAISE, "deadlines": deadlines, **options})


def examine(patient: Patient, told: Callable[[Row], object]) -> list[Row]:
    """Run all checks that make sense. Call ``told`` with the row of each check that has a finding."""
    rows: list[Row] = []
    for check in CHECKS:
        found = _tried(check, patient)
        if found is None:
            continue
        rows.append(found._replace(name=check.__name__.replace("_", " ")))
        told(rows[-1])
        if found.verdict == "broken":
            break
    return rows


def _tried(check: Callable[[Patient], Row | None], patient: Patient) -> Row | None:
    """Run a check. If the env itself crashed or hung, run it once more: that may have been chance."""
    for is_last in (False, True):
        try:
            return check(patient)
        except LostAgainError as error:
            return Row("note", f"not known: {error}")
        except Exception as error:  # the env caused it, and multienv raised it
            if isinstance(error, WorkerLostError) and check is not renders:
                patient.note_own_loss(hung=isinstance(error, WorkerHungError))
            is_chance = isinstance(error, WorkerLostError | SpoiledError) and check is not builds
            if is_last or not is_chance or time.monotonic() > patient.began + _SECOND_TRIES_UNTIL:
                return _failed(patient, error)
    raise AssertionError


def _failed(patient: Patient, error: Exception) -> Row:
    """Return the row of a check that raised: what happened, and in which line of the env."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    if isinstance(error, SpoiledError):
        return Row("note", f"not known: {text}")
    verdict: Verdict = "broken"
    advice, detail = "Run the env without multienv, and fix it first.", str(getattr(error, "remote_traceback", ""))
    if not isinstance(error, MultienvError):
        detail = "".join(traceback.format_exception(error))
    if isinstance(error, WorkerLostError | UsageError):
        text, _, told = text.partition(". ")
        text = text.rstrip(".")
        if isinstance(error, UsageError) and told:
            advice = told  # the advice about a lost worker is for a caller of multienv
    if any(sign in text for sign in _NO_DISPLAY):
        advice = _OFFSCREEN
    if isinstance(error, WorkerLostError):
        detail = "\n".join([error.stack, *error.stderr.splitlines()[-_LAST_WORDS:]])
        if patient.first.steps:  # the env runs, until it ends its worker by itself
            verdict, text = "note", f"not known: {text}"
        if error.report:
            env = f" --env {patient.name}" if ":" in patient.name else ""
            advice = f"To run it again: multienv replay {error.report}{env}"
    return Row(verdict, text, advice, _foreign_frames(detail))


def _foreign_frames(text: str) -> str:
    """Return a traceback or a stack without the frames of multienv; a stack keeps them if it has no others."""
    left = _OUR_FRAMES.sub("", text)
    is_bare = "most recent call first" in text and '  File "' not in left
    return (text if is_bare else left).strip("\n")


# --- does it run at all? --------------------------------------------------------------------------


def builds(patient: Patient) -> Row:
    """Send ``env_fn`` to a worker, and build the env there."""
    began = time.perf_counter()
    with patient.worker() as env:
        ready, patient.memory = duration(time.perf_counter() - began), env.statistics().rss or 0
    size = decimal(len(cloudpickle.dumps(patient.env_fn)))
    return Row("ok", f"env_fn takes {size}; its worker is ready after {ready}, and takes {decimal(patient.memory)}")


def steps(patient: Patient) -> Row:
    """Walk at random. All later walks are compared with this one."""
    with patient.worker() as env:
        patient.first = first = walk(env, _STEPS, seconds=_SECONDS)
        each = env.statistics().step_seconds or first.slowest_step
        patient.episode_seconds = each * ((env.spec and env.spec.max_episode_steps) or 0)
    slowest = f"the slowest step {duration(first.slowest_step)}, the slowest reset {duration(first.slowest_reset)}"
    return Row("ok", f"{first.steps} random steps of {duration(each)} each, {slowest}")


def repeats(patient: Patient) -> Row:
    """Walk the same way twice in another process: the same seed should give the same walk."""
    with patient.worker() as env:
        other, again = (walk(env, patient.first.steps) for _ in range(2))
    place = patient.first.differs_at(other)
    patient.again = not place
    if place:
        return Row(
            "note",
            f"two processes with the same seed differ at {place}",
            "Does it use other randomness than self.np_random: random, numpy.random, the clock, os.urandom?",
        )
    place = other.differs_at(again)
    if place:
        return Row(
            "note",
            f"two calls of reset(seed=0) in one process give different results: {place} differs",
            f"Clear all state in reset(seed=…). {_USE_NP_RANDOM}",
        )
    return Row("ok", f"the same seed gives the same {patient.first.steps} steps, in one process and in another")


def renders(patient: Patient) -> Row | None:
    """Render frames in a worker, if the env has a render mode for frames. Report what renders them."""
    with patient.worker(env_fn=partial(drawn, patient.env_fn)) as env:
        if env.render_mode in (None, "human", "ansi", "ansi_list"):
            return None
        env.reset(seed=0)
        try:
            frame, first = _frame(env)
            _, other = _frame(env)
        except EnvError as error:
            text = f"no frame. {error}".splitlines()[0]
            advice = f"Is there no display? {_OFFSCREEN}"
            return Row("note", text, advice, _foreign_frames(error.remote_traceback))
        known = env.call("drawn_by")
        name = "MUJOCO_GL"
        if f"{name}={os.environ.get(name)}" in known:
            patient.variables = {name: os.environ[name]}
    if frame.ndim < 2:
        return Row("note", f"render() returned no frame, but {frame!r:.100}")
    size = " × ".join(map(str, frame.shape))
    means = f"frames of {size}, the first in {duration(first)}, another in {duration(other)}"
    means += f"; {', '.join(known)}" if known else ""
    if frame.min() == frame.max():
        return Row("note", f"{means}; all of one colour", f"Is that right? {_OFFSCREEN}")
    return Row("ok", means, _ON_THE_CPU if "llvmpipe" in means or "softpipe" in means else "")


def _frame(env: SubprocessEnv) -> tuple[Any, float]:
    """Return a frame (or the last of several) as an array, and the seconds that it took."""
    began = time.perf_counter()
    frame: Any = env.render()
    seconds = time.perf_counter() - began
    return np.asarray(frame[-1] if isinstance(frame, list) and frame else frame), seconds


# --- the ways of recovery -------------------------------------------------------------------------


def forks(patient: Patient) -> Row:
    """Kill the worker with SIGKILL after it has forked a snapshot of itself."""
    struck = strike(patient, "SIGKILL", restart=RestartPolicy(snapshot_every=max(1, patient.first.steps // 4)))
    recovery, patient.obstacle = struck.recovery, struck.statistics.no_snapshots
    if recovery.method == "snapshot":
        patient.ways["snapshot"] = struck.outcome
        if struck.outcome == "exact":
            return Row("ok", f"a killed worker is recovered exactly from its snapshot, in {duration(recovery.seconds)}")
        advice = "Use RestartPolicy(snapshots=False): this env changes when its process is forked."
        return Row("note", f"after a recovery from a snapshot, {struck.difference} differs silently", advice)
    if patient.obstacle:
        advice = "No snapshot is needed if replays are exact: see the next line."
        return Row("note", f"no snapshot can be taken: {patient.obstacle}", advice)
    if struck.outcome == "truncated":
        return Row("note", f"a recovery from a snapshot is not exact: {struck.reason}", struck.advice)
    advice = "" if patient.own_faults else _USE_NP_RANDOM  # a copy that crashes or hangs is not exact either
    return Row("note", "no snapshot was ready, or it was not exact; a new process was exact", advice)


def replays(patient: Patient) -> Row:
    """Kill the worker with SIGKILL, without snapshots. So it is on macOS, or if the env has threads."""
    struck = strike(patient, "SIGKILL", restart=RestartPolicy(snapshots=False))
    patient.ways["journal"] = struck.outcome
    if struck.outcome == "exact":
        took = duration(struck.recovery.seconds)
        means = f"a new process repeats {struck.recovery.replayed} requests exactly, in {took}"
        if not _outgrows_replays(patient):
            return Row("ok", means)
        most = f"{RestartPolicy().replay_limit:.0f} s"
        return Row(
            "note",
            f"{means}; but an episode may take {duration(patient.episode_seconds)}, and a replay at most {most}",
            "Raise replay_limit, as below. Otherwise a worker that is lost late in its episode truncates it.",
        )
    if struck.outcome == "differs":
        return Row(
            "truncates",
            f"after a replay, {struck.difference} differs silently",
            'Use RestartPolicy(on_crash="truncate", on_timeout="truncate"). Is its state outside its process?',
        )
    advice = f"Only snapshots recover it. {struck.advice}" if patient.verdict == "ok" else struck.advice
    return Row(_unless_recoverable(patient), f"a new process does not repeat it: {struck.reason}", advice.rstrip())


def hangs(patient: Patient) -> Row:
    """Stop the worker with SIGSTOP, with default options: it does not answer any more."""
    deadline = max(0.5, 5 * patient.first.slowest_step)
    struck = strike(patient, "SIGSTOP", restart=RestartPolicy(), step_deadline=deadline)
    took = f"{duration(struck.recovery.seconds)} after its deadline"
    if struck.outcome == "exact":
        return Row("ok", f"a hung worker is recovered exactly, {took}")
    if struck.outcome == "differs":
        return Row(_unless_recoverable(patient), f"after a hang, {struck.difference} differs", "Use the options below.")
    return Row(_unless_recoverable(patient), f"the episode of a hung worker is truncated, {took}")


# --- leaks ----------------------------------------------------------------------------------------


def leaks(patient: Patient) -> Row:
    """Count descriptors, threads, processes and memory before and after three rounds of short episodes."""
    most = min(_EPISODE_STEPS, patient.first.steps)
    counts = []
    with patient.worker() as env:
        env.action_space.seed(0)
        env.reset(seed=0)
        began = time.perf_counter()
        _episode(env, most)
        wanted = _EPISODES_SECONDS / (time.perf_counter() - began)
        most_episodes = _LEAST_EPISODES if patient.own_faults else _MOST_EPISODES  # few, so that it may get through
        episodes = int(min(max(_LEAST_EPISODES, wanted), most_episodes))
        taken = 0
        for _ in range(4):  # the first round allocates what the env keeps for good
            taken += sum(_episode(env, most) for _ in range(episodes))
            counts.append(_usage(env))
    found, recycling, piling = [], [], 0.0
    for name in counts[0]:
        each = min(after[name] - before[name] for before, after in pairwise(counts)) / episodes
        if each <= (_NOISE / episodes if name == "memory" else 0):
            continue
        if name == "memory":
            found.append(f"{decimal(int(each))} {name}")
            recycling.append(_max_rss(max(patient.memory, counts[0][name] - each * episodes)))
        else:
            found.append(f"{each:.3g} {name}")
            piling = max(piling, each * 4 * episodes / taken)
    if not found:
        return Row("ok", f"no leak in {3 * episodes} episodes")
    if piling:
        recycling.append(_recycle_after_steps(piling))
    patient.recycling = recycling
    advice = f"RestartPolicy({', '.join(recycling)}) replaces the process in time; its episode goes on."
    advice += " max_rss counts a worker: all its envs together." if "max_rss" in advice else ""
    return Row("note", f"each episode leaks: {', '.join(found)}", advice)


def _episode(env: SubprocessEnv, most: int) -> int:
    """Reset, and step at random until the episode ends, or this many times; return the number of steps."""
    env.reset()
    for step in range(most):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            return step + 1
    return most


def _max_rss(memory: float) -> str:
    """Return the option for an env that leaks memory. A worker without leaked memory has so many bytes."""
    mebibytes = _MEMORY_UNIT * math.ceil(_TIMES_THE_MEMORY * memory / 2**20 / _MEMORY_UNIT)
    return f"max_rss={max(_LEAST_MEMORY, mebibytes)} * 2**20"


def _recycle_after_steps(piling: float) -> str:
    """Return the option for an env that leaks so many descriptors, threads or processes with each step."""
    steps = int(min(max(_FEWEST_STEPS, _PILE / piling), _MOST_STEPS))
    unit = 10 ** (len(str(steps)) - 1)
    return f"recycle_after_steps={steps // unit * unit:_}"


def _usage(env: SubprocessEnv) -> dict[str, int]:
    process = psutil.Process(_pid(env))
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "processes": len(process.children(recursive=True)),
        "memory": process.memory_info().rss,
    }


CHECKS: tuple[Callable[[Patient], Row | None], ...] = (
    builds, steps, repeats, renders, forks, replays, hangs, leaks,
)  # fmt: skip


@dataclass
class Struck:
    """Holds the outcome of a walk whose worker was killed or stopped.

    Attributes:
        outcome: ``"differs"``: the recovery counted as exact, but the walk differs from the undisturbed walk.
        difference: The reset or step at which the walk differs.
        recovery: The recovery from the loss.
        statistics: The worker's statistics at the end.
    """

    outcome: Outcome
    difference: str
    recovery: Recovery
    statistics: Statistics

    @property
    def reason(self) -> str:
        """Return why the recovery was not exact; leave out that the process was killed."""
        reason = self.recovery.reason
        return reason.partition("It cannot be brought back: ")[2] or reason

    @property
    def advice(self) -> str:
        """Return what the user can do about it: a replay that crashed or hung says nothing about random numbers."""
        return _USE_NP_RANDOM if "does not match" in self.reason else ""


def strike(patient: Patient, manner: KillManner, **options: Any) -> Struck:
    """Walk like the first walk, and send the worker a signal when most of the steps are done.

    Args:
        patient: The env.
        manner: The signal.
        **options: Options of the worker.

    Raises:
        LostAgainError: The env itself lost worker after worker.
        SpoiledError: The env itself crashed or hung, and was not recovered exactly.
    """
    late, began = patient.first.steps * 17 // 20, time.monotonic()
    events: list[Event] = []
    victims: list[int] = []

    def own_losses() -> list[Loss]:
        return [event for event in events if isinstance(event, Loss) and event.pid not in victims]

    def before_step(step: int) -> None:
        lost, took = len(own_losses()), time.monotonic() - began
        if lost > _OWN_LOSSES or (lost and took > _OWN_LOSSES_SECONDS):
            raise LostAgainError(f"its workers are lost again and again ({lost} in {duration(took)})")
        if step == late:
            time.sleep(_ANNOUNCED)
            victims.append(_pid(env))
            send(victims[0], manner)

    try:
        with patient.worker(reports="", hooks=[events.append], **options) as env:
            found = walk(env, patient.first.steps, before_step=before_step)
            known = env.statistics()
    finally:
        for loss in own_losses():
            patient.note_own_loss(hung=loss.cause == "hung")
    recoveries = [event for event in events if isinstance(event, Recovery)]
    ours = next((one for one in recoveries if one.loss.pid in victims), None)
    if ours is None or any(one.outcome != "exact" for one in recoveries if one is not ours):
        raise SpoiledError("the env itself crashed or hung during this check, and was not recovered exactly")
    difference = found.differs_at(patient.first) if patient.again else ""
    outcome: Outcome = "differs" if difference else "exact"
    if ours.outcome != "exact":
        outcome = "truncated"
    return Struck(outcome, difference, ours, known)


def _outgrows_replays(patient: Patient) -> bool:
    """Tell whether an episode may take longer than a replay may, while only a replay recovers it."""
    return patient.ways.get("snapshot") != "exact" and patient.episode_seconds > RestartPolicy().replay_limit


def _unless_recoverable(patient: Patient) -> Verdict:
    """Return the verdict of a check without an exact recovery: another way of recovery may be exact."""
    return "note" if patient.verdict == "ok" else "truncates"


def _pid(env: SubprocessEnv) -> int:
    return env.statistics().pid or 0


# --- recommended options --------------------------------------------------------------------------


def options_for(patient: Patient) -> str:
    """Return the recommended options for this env, as Python."""
    options = ['deadlines=Deadlines(step="auto", reset="auto")']
    if patient.hung:
        step, reset = _deadline(patient.first.slowest_step), _deadline(patient.first.slowest_reset)
        options = [f"deadlines=Deadlines(step={step:.1f}, reset={reset:.1f})"]
    if patient.own_faults:
        options.append("envs_per_worker=1")
    if patient.variables:
        options.append(f"worker_env={patient.variables!r}".replace("'", '"'))
    restart = []
    if patient.ways.get("journal") == "differs":
        restart += ['on_crash="truncate"', 'on_timeout="truncate"']
    elif patient.ways.get("snapshot") == "differs":
        restart += ["snapshots=False"]
    elif patient.own_faults and not patient.obstacle:
        restart += ["snapshot_every=20"]
    if patient.ways.get("journal") == "exact" and _outgrows_replays(patient):
        restart += [f"replay_limit={math.ceil(4 * patient.episode_seconds):.1f}"]
    restart += patient.recycling
    if restart:
        options.append(f"restart=RestartPolicy({', '.join(restart)})")
    return ", ".join(options)


def _deadline(slowest: float) -> float:
    """Return the recommended deadline, in seconds, if the slowest step or reset took so long."""
    return float(max(_LEAST_DEADLINE, math.ceil(_TIMES_THE_SLOWEST * slowest)))
