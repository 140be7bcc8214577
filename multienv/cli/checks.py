"""What ``multienv doctor`` tries with an env: each check is a function that returns what was found.

The env runs only in workers with deadlines, so that no check takes the doctor with it. A check uses what those before
it have learnt. One that finds the env broken ends the examination.
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

# Of the first walk; the later ones take as many steps as that took.
_STEPS, _SECONDS = 200, 2.0
# Given to a snapshot to be announced before its worker is killed, seconds.
_ANNOUNCED = 0.2
# Short episodes in which an env may leak: their steps, how many at least and at the most, and about how many seconds.
_EPISODE_STEPS, _LEAST_EPISODES, _MOST_EPISODES, _EPISODES_SECONDS = 20, 3, 50, 0.5
# Memory that comes and goes in a process that leaks nothing.
_NOISE = 256 * 2**10
# Lines of what a worker that was lost had written on stderr.
_LAST_WORDS = 10
_USE_NP_RANDOM = "Draw from self.np_random only."
_OFFSCREEN = "MuJoCo draws with MUJOCO_GL=egl or MUJOCO_GL=osmesa; see docs/robot_simulators.md."
_NO_DISPLAY = ("OpenGL", "DISPLAY")
_ON_THE_CPU = "Drawn by the CPU. With a GPU: its driver's EGL library, and a device for each worker by worker_env."
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
        ways: What recovery by a snapshot and by the journal came to.
        leaks: Whether it leaks.
        episode_seconds: Env time of an episode of as many steps as its spec allows; 0.0: not known.
        variables: Environment variables that its frames are drawn with.
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
        """Return what recovery comes to: ``"ok"`` if there is a way back that is exact."""
        return "ok" if "exact" in self.ways.values() and self.ways.get("journal") != "differs" else "truncates"

    def worker(
        self, *, env_fn: EnvFn | None = None, step_deadline: float | None = None, **options: Any
    ) -> SubprocessEnv:
        """Return the env, or another, in a worker that is yet to be started; without other options a loss raises."""
        most = self.reset_deadline
        deadlines = Deadlines(
            start=most, reset=most, step=step_deadline or self.step_deadline, call=most, recovery=most
        )
        return SubprocessEnv(env_fn or self.env_fn, **{"restart": RAISE, "deadlines": deadlines, **options})


def examine(patient: Patient, told: Callable[[Row], object]) -> list[Row]:
    """Run all checks, as far as they make sense; call ``told`` with the row of each that has something to say."""
    rows: list[Row] = []
    for check in CHECKS:
        try:
            found = check(patient)
        except Exception as error:  # the env's doing, through multienv
            found = _failed(patient, error)
        if found is None:
            continue
        rows.append(found._replace(name=check.__name__.replace("_", " ")))
        told(rows[-1])
        if found.verdict == "broken":
            break
    return rows


def _failed(patient: Patient, error: Exception) -> Row:
    """Return the row of a check that raised: what happened, and where in the env."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    verdict: Verdict = "broken"
    advice, detail = "Run it without multienv, and mend that first.", str(getattr(error, "remote_traceback", ""))
    if not isinstance(error, MultienvError):
        detail = "".join(traceback.format_exception(error))
    if isinstance(error, WorkerLostError | UsageError):
        text, _, told = text.partition(". ")
        text = text.rstrip(".")
        if isinstance(error, UsageError) and told:
            advice = told  # that of a lost worker is for the caller of multienv
    if any(sign in text for sign in _NO_DISPLAY):
        advice = _OFFSCREEN
    if isinstance(error, WorkerLostError):
        detail = "\n".join([error.stack, *error.stderr.splitlines()[-_LAST_WORDS:]])
        if patient.first.steps:  # it runs, until it ends its worker by itself
            verdict, text = "note", f"not known: {text}"
        if error.report:
            env = f" --env {patient.name}" if ":" in patient.name else ""
            advice = f"This runs it again: multienv replay {error.report}{env}"
    return Row(verdict, text, advice, _FRAMES_OF_THE_WORKER.sub("", detail).strip("\n"))


# --- does it run at all? --------------------------------------------------------------------------


def builds(patient: Patient) -> Row:
    """Send what builds the env to a worker, and build it there."""
    began = time.perf_counter()
    with patient.worker() as env:
        ready, memory = duration(time.perf_counter() - began), decimal(env.statistics().rss or 0)
    size = decimal(len(cloudpickle.dumps(patient.env_fn)))
    return Row("ok", f"{size} travel to a worker; it is ready in {ready}, and takes {memory}")


def steps(patient: Patient) -> Row:
    """Walk at random: the walk that others are held against."""
    with patient.worker() as env:
        patient.first = first = walk(env, _STEPS, seconds=_SECONDS)
        each = env.statistics().step_seconds or first.slowest_step
        patient.episode_seconds = each * ((env.spec and env.spec.max_episode_steps) or 0)
    slowest = f"the slowest {duration(first.slowest_step)}, a reset up to {duration(first.slowest_reset)}"
    return Row("ok", f"{first.steps} random steps of {duration(each)} each, {slowest}")


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


def renders(patient: Patient) -> Row | None:
    """Draw frames in a worker, if the env has a render mode that makes any; tell what draws them."""
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
            return Row("note", text, f"Without a display: {_OFFSCREEN}", detail)
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
    """Return a frame, or the last of several, as an array; and the seconds that it took."""
    began = time.perf_counter()
    frame: Any = env.render()
    seconds = time.perf_counter() - began
    return np.asarray(frame[-1] if isinstance(frame, list) and frame else frame), seconds


# --- the ways back --------------------------------------------------------------------------------


def forks(patient: Patient) -> Row:
    """Kill the worker with SIGKILL after it has taken a snapshot of itself."""
    struck = strike(patient, "SIGKILL", restart=RestartPolicy(snapshot_every=max(1, patient.first.steps // 4)))
    recovery, obstacle = struck.recovery, struck.statistics.no_snapshots
    if recovery.method == "snapshot":
        patient.ways["snapshot"] = struck.outcome
        if struck.outcome == "exact":
            return Row("ok", f"a killed worker comes back from its snapshot, exact, in {duration(recovery.seconds)}")
        advice = "RestartPolicy(snapshots=False): this env is another one after a fork."
        return Row("note", f"after a snapshot was woken {struck.difference} differs silently", advice)
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
        means = f"a new process repeats {struck.recovery.replayed} requests, exact, in {took}"
        if not _outgrows_replays(patient):
            return Row("ok", means)
        most = f"{RestartPolicy().replay_limit:.0f} s"
        return Row(
            "note",
            f"{means}; an episode may take {duration(patient.episode_seconds)}, a replay {most}; no snapshot helps",
            "Raise replay_limit, as below, or a worker that is lost late in its episode truncates it.",
        )
    if struck.outcome == "differs":
        return Row(
            "truncates",
            f"after a replay {struck.difference} differs silently",
            'RestartPolicy(on_crash="truncate", on_timeout="truncate"): what it knows lies outside of its process?',
        )
    advice = f"It comes back from snapshots alone. {_USE_NP_RANDOM}" if patient.verdict == "ok" else _USE_NP_RANDOM
    return Row(_unless_recoverable(patient), f"a new process does not repeat it: {struck.reason}", advice)


def a_hung_worker(patient: Patient) -> Row:
    """Stop the worker with SIGSTOP, with the options that users have who choose none: it does not answer any more."""
    deadline = max(0.5, 5 * patient.first.slowest_step)
    struck = strike(patient, "SIGSTOP", restart=RestartPolicy(), step_deadline=deadline)
    took = f"its deadline, and then {duration(struck.recovery.seconds)}"
    if struck.outcome == "exact":
        return Row("ok", f"costs {took}")
    if struck.outcome == "differs":
        return Row(_unless_recoverable(patient), f"costs a silent difference; {took}", "Use the options below.")
    return Row(_unless_recoverable(patient), f"costs the rest of its episode (truncated=True); {took}")


# --- what it leaves behind ------------------------------------------------------------------------


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
        for _ in range(4):  # after the first round an env has what it keeps for good
            for _ in range(episodes):
                _episode(env, most)
            counts.append(_usage(env))
    found = []
    for name in counts[0]:
        each = min(after[name] - before[name] for before, after in pairwise(counts)) / episodes
        if each > (_NOISE / episodes if name == "memory" else 0):
            found.append(f"{name} by {decimal(int(each)) if name == 'memory' else f'{each:.3g}'}")
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


def _usage(env: SubprocessEnv) -> dict[str, int]:
    process = psutil.Process(_pid(env))
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "processes": len(process.children(recursive=True)),
        "memory": process.memory_info().rss,
    }


CHECKS: tuple[Callable[[Patient], Row | None], ...] = (
    builds, steps, repeats, renders, forks, replays, a_hung_worker, leaks,
)  # fmt: skip


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
    """Tell whether an episode may take longer than a replay, where nothing else brings it back."""
    return patient.ways.get("snapshot") != "exact" and patient.episode_seconds > RestartPolicy().replay_limit


def _unless_recoverable(patient: Patient) -> Verdict:
    """Return the verdict of a check in which a loss was not recovered from: there may be another way back."""
    return "note" if patient.verdict == "ok" else "truncates"


def _pid(env: SubprocessEnv) -> int:
    return env.statistics().pid or 0


# --- what to write --------------------------------------------------------------------------------


def options_for(patient: Patient) -> str:
    """Return the options to run this env with, as Python."""
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
