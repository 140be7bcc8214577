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
from typing import Any, Literal, NamedTuple

import cloudpickle
import numpy as np
import psutil
from rich.filesize import decimal

from multienv import SubprocessEnv
from multienv.cli.rendering import drawn
from multienv.cli.texts import duration
from multienv.cli.walking import RAISE, Walk, walk
from multienv.config import Deadlines, RestartPolicy
from multienv.errors import EnvError, MultienvError, UsageError, WorkerLostError
from multienv.events import Recovery, Statistics
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
# Number of stderr lines shown of a lost worker.
_LAST_WORDS = 10
_USE_NP_RANDOM = "Take random numbers only from self.np_random."
_OFFSCREEN = "For MuJoCo, set MUJOCO_GL=egl or MUJOCO_GL=osmesa; see docs/robot_simulators.md."
_NO_DISPLAY = ("OpenGL", "DISPLAY")
_ON_THE_CPU = (
    "The CPU renders. For a GPU: install its driver's EGL library, and give each worker a device by worker_env."
)
# The frames of multienv's own worker code in a traceback or a stack.
_FRAMES_OF_THE_WORKER = re.compile(r'^  File "[^"\n]*/multienv/worker/.*\n?(?:    .*\n?)*', re.MULTILINE)


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
        leaks: Whether the env leaks.
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
    leaks: bool = False
    episode_seconds: float = 0.0
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """Return the verdict on recovery: ``"ok"`` if one way of recovery is exact."""
        return "ok" if "exact" in self.ways.values() and self.ways.get("journal") != "differs" else "truncates"

    def worker(
        self, *, env_fn: EnvFn | None = None, step_deadline: float | None = None, **options: Any
    ) -> SubprocessEnv:
        """Return the env (or another one) in a worker that is not yet started. By default a loss raises."""
        most = self.reset_deadline
        deadlines = Deadlines(
            start=most, reset=most, step=step_deadline or self.step_deadline, call=most, recovery=most
        )
        return SubprocessEnv(env_fn or self.env_fn, **{"restart": RAISE, "deadlines": deadlines, **options})


def examine(patient: Patient, told: Callable[[Row], object]) -> list[Row]:
    """Run all checks that make sense. Call ``told`` with the row of each check that has a finding."""
    rows: list[Row] = []
    for check in CHECKS:
        try:
            found = check(patient)
        except Exception as error:  # the env caused it, and multienv raised it
            found = _failed(patient, error)
        if found is None:
            continue
        rows.append(found._replace(name=check.__name__.replace("_", " ")))
        told(rows[-1])
        if found.verdict == "broken":
            break
    return rows


def _failed(patient: Patient, error: Exception) -> Row:
    """Return the row of a check that raised: what happened, and in which line of the env."""
    text = (str(error) or type(error).__name__).splitlines()[0]
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
    return Row(verdict, text, advice, _FRAMES_OF_THE_WORKER.sub("", detail).strip("\n"))


# --- does it run at all? --------------------------------------------------------------------------


def builds(patient: Patient) -> Row:
    """Send ``env_fn`` to a worker, and build the env there."""
    began = time.perf_counter()
    with patient.worker() as env:
        ready, memory = duration(time.perf_counter() - began), decimal(env.statistics().rss or 0)
    size = decimal(len(cloudpickle.dumps(patient.env_fn)))
    return Row("ok", f"env_fn takes {size}; its worker is ready after {ready}, and takes {memory}")


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
            detail = _FRAMES_OF_THE_WORKER.sub("", error.remote_traceback).strip("\n")
            return Row("note", text, f"Is there no display? {_OFFSCREEN}", detail)
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
    recovery, obstacle = struck.recovery, struck.statistics.no_snapshots
    if recovery.method == "snapshot":
        patient.ways["snapshot"] = struck.outcome
        if struck.outcome == "exact":
            return Row("ok", f"a killed worker is recovered exactly from its snapshot, in {duration(recovery.seconds)}")
        advice = "Use RestartPolicy(snapshots=False): this env changes when its process is forked."
        return Row("note", f"after a recovery from a snapshot, {struck.difference} differs silently", advice)
    if obstacle:
        advice = "No snapshot is needed if replays are exact: see the next line."
        return Row("note", f"no snapshot can be taken: {obstacle}", advice)
    if struck.outcome == "truncated":
        return Row("note", f"a recovery from a snapshot is not exact: {struck.reason}", _USE_NP_RANDOM)
    return Row("note", "no snapshot was ready, or it was not exact; a new process was exact", _USE_NP_RANDOM)


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
    advice = f"Only snapshots recover it. {_USE_NP_RANDOM}" if patient.verdict == "ok" else _USE_NP_RANDOM
    return Row(_unless_recoverable(patient), f"a new process does not repeat it: {struck.reason}", advice)


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
        episodes = int(min(max(_LEAST_EPISODES, wanted), _MOST_EPISODES))
        for _ in range(4):  # the first round allocates what the env keeps for good
            for _ in range(episodes):
                _episode(env, most)
            counts.append(_usage(env))
    found = []
    for name in counts[0]:
        each = min(after[name] - before[name] for before, after in pairwise(counts)) / episodes
        if each > (_NOISE / episodes if name == "memory" else 0):
            found.append(f"{decimal(int(each)) if name == 'memory' else f'{each:.3g}'} {name}")
    if not found:
        return Row("ok", f"no leak in {3 * episodes} episodes")
    patient.leaks = True
    return Row(
        "note",
        f"each episode leaks: {', '.join(found)}",
        "RestartPolicy(recycle_after_steps=100_000) replaces the process in time; its episode goes on.",
    )


def _episode(env: SubprocessEnv, most: int) -> None:
    env.reset()
    for _ in range(most):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            return


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


def strike(patient: Patient, manner: KillManner, **options: Any) -> Struck:
    """Walk like the first walk, and send the worker a signal when most of the steps are done.

    Args:
        patient: The env.
        manner: The signal.
        **options: Options of the worker.
    """
    late = patient.first.steps * 17 // 20

    def before_step(step: int) -> None:
        if step == late:
            time.sleep(_ANNOUNCED)
            send(_pid(env), manner)

    with patient.worker(reports="", **options) as env:
        found = walk(env, patient.first.steps, before_step=before_step)
        known = env.statistics()
    assert known.last_recovery is not None
    difference = found.differs_at(patient.first) if patient.again else ""
    outcome: Outcome = "differs" if difference else "exact"
    if known.exact_recoveries < known.losses:
        outcome = "truncated"
    return Struck(outcome, difference, known.last_recovery, known)


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
    if patient.variables:
        options.append(f"worker_env={patient.variables!r}".replace("'", '"'))
    restart = []
    if patient.ways.get("journal") == "differs":
        restart += ['on_crash="truncate"', 'on_timeout="truncate"']
    elif patient.ways.get("snapshot") == "differs":
        restart += ["snapshots=False"]
    if patient.ways.get("journal") == "exact" and _outgrows_replays(patient):
        restart += [f"replay_limit={math.ceil(4 * patient.episode_seconds):.1f}"]
    if patient.leaks:
        restart += ["recycle_after_steps=100_000"]
    if restart:
        options.append(f"restart=RestartPolicy({', '.join(restart)})")
    return ", ".join(options)
