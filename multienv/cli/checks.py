"""The checks of ``multienv doctor``. Each check is a function that returns its finding.

The env runs only in workers with deadlines, so a crash or hang never reaches the doctor itself. A check uses the
findings of earlier checks. If a check finds the env broken, the examination ends.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import cloudpickle
import numpy as np
import psutil
from rich.filesize import decimal

from multienv import SubprocessEnv, SubprocessVectorEnv
from multienv._engine.building.building import EnvFn
from multienv._engine.recovery.journal import AFFORDABLE
from multienv._engine.recovery.verification import is_comparable
from multienv._engine.recovery.way_back import ForkingPolicy
from multienv._engine.reports.texts import foreign_frames
from multienv._engine.worker.snapshots import interval_for
from multienv.cli.env_functions import NamedEnv, arguments_advice, named
from multienv.cli.options import arguments_of
from multienv.cli.texts import duration
from multienv.cli.walking import RAISE, SEED, Walk, walk
from multienv.cli.watching import Noticed, ObservedEnv, seeded
from multienv.config import Deadlines, RestartPolicy
from multienv.errors import (
    EnvError,
    MultienvError,
    RestartBudgetExceeded,
    UsageError,
    WorkerHungError,
    WorkerLostError,
    first_line,
)
from multienv.events import Event, Loss, Recovery
from multienv.testing.killer import send

Verdict = Literal["ok", "note", "truncates", "broken"]
Outcome = Literal["exact", "replayed", "truncated", "differs", "strayed"]
Conclusion = Literal["recoverable", "truncates", "unknown", "broken"]

# Limits of the first walk. Later walks take the same number of steps.
_STEPS, _SECONDS = 200, 2.0
# An env that crashes is tried again with half the steps, so often; it is broken if it never gets so far.
_TRIES, _FEW = 5, 12
# It is not tried again after so many seconds: it may hang each time.
_TRIES_UNTIL = 25.0
# So many crashes in the same step are no chance.
_NO_CHANCE = 3
# Steps between two looks into a worker: what was learnt of an env outlives its crash.
_LOOK_EVERY = 16
# Episodes that show a memory across resets: steps in all and seconds of a walk; about how many episodes there should
# be; least number of them, and about how many begin in a new process; least and greatest number of steps of each. If
# twice as many steps fit in as these episodes need, the first half of the walk ends no episode.
_ANEW_STEPS, _ANEW_SECONDS, _ANEW_EPISODES, _ANEW_LEAST = 5000, 1.5, 8, 4
_SHORTEST, _LONGEST = 20, 100
# Steps of two envs that show whether they get along in one worker.
_SHARED_STEPS = 3
# Seconds that a snapshot has to announce itself before its worker is killed.
_ANNOUNCED = 0.2
# Short episodes that show a leak: steps of each, least and greatest number of episodes, and about how many seconds.
_EPISODE_STEPS, _LEAST_EPISODES, _MOST_EPISODES, _EPISODES_SECONDS = 20, 3, 50, 0.5
# Memory that comes and goes in a process without a leak.
_NOISE = 256 * 2**10
# A check ends when it has lost more workers than this.
_MOST_LOSSES = 4
# A check that the env itself spoils is tried once more, but not when the examination has taken so many seconds.
_SECOND_TRIES_UNTIL = 120.0
# Recommended deadlines: a multiple of the slowest step or reset, and the least value in seconds. The look is short, so
# that an env that has not hung may take much longer later.
_TIMES_THE_SLOWEST, _LEAST_DEADLINE = 10.0, 1.0
_TIMES_IF_CALM, _LEAST_IF_CALM = 100.0, 10.0
# Recommended max_rss: a multiple of a worker's memory, rounded up to a unit, and a least value; both in MiB.
_TIMES_THE_MEMORY, _MEMORY_UNIT, _LEAST_MEMORY = 4, 64, 512
# About how many leaked descriptors, threads or processes of one env may pile up; least and greatest number of steps.
_PILE, _FEWEST_STEPS, _MOST_STEPS = 300, 100, 100_000
# Snapshots whose time is measured.
_FORKS = 5
# From this many seconds on, a start is slow enough to advise a preload.
_LONG_START = 3.0
# Things outside that are shown, and what follows from each kind.
_MOST_SHOWN = 3
_NO_SNAPSHOTS = "no snapshots"
_FOLLOWS = {
    "": "put back in a copy",
    "threads": "no snapshots: a copy would not have it",
    "timers": "no snapshots: a copy would not have it",
    "locks": "no snapshots while it is held",
    "files": "no snapshots; each loss is replayed, and what was written stays",
    "sockets": "no snapshots; each loss is replayed, and the other side hears all of it again",
    "pipes": "no snapshots; what was read is gone",
}
_KEEP_OPEN = "A file that is open from the constructor on, for reading or for writing, does not forbid snapshots."
# Number of stderr lines shown of a lost worker.
_LAST_WORDS = 10
_USE_NP_RANDOM = "Take random numbers only from self.np_random."
_DOES_NOT_REPEAT = "the env does not repeat itself"
_CHANCE = "That may be chance: run the doctor again."
_OR_CHANCE = "Or does it not repeat itself? Run `multienv chaos`: it tells whether the env differs without a loss, too."
_EQUAL = "from a reset, all equal"
_MEMORY = "the env carries memory across resets"
_OFFSCREEN = "For MuJoCo, set MUJOCO_GL=egl or MUJOCO_GL=osmesa; see docs/robot_simulators.md."
_NO_DISPLAY = ("OpenGL", "DISPLAY")
_ON_THE_CPU = (
    "The CPU renders. For a GPU: install its driver's EGL library, and give each worker a device by worker_env."
)


class SpoiledError(Exception):
    """Raised when a check cannot tell anything: the env does not repeat itself, or has ended its worker by itself."""


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
        other: The walk of another process.
        again: Whether another process walks the same way, as far as is known.
        noticed: What it draws from, and whether what it returns can be compared.
        remembers: Whether the env carries memory across resets; ``None``: a check has left that open.
        batch: What a vector env can do with it: ``"shared"``: several are in a worker; ``"alone"``: one is in each;
            ``"none"``: it does not take the env.
        ways: The outcome of recovery by a snapshot and by the journal; nothing of an env that does not repeat itself.
            ``"strayed"``: repeated from a reset, and then otherwise. ``"differs"``: otherwise, though it counted as
            exact.
        memory: Bytes of a worker that has just built the env.
        recycling: The options of RestartPolicy that help against the env's leaks.
        own_losses: What became of each worker that the env itself has lost.
        victims: The processes that the doctor has killed.
        is_doomed: Whether it crashed in the same step each time: then it crashes in each replay, too.
        began: When the examination began.
        longest: Steps of the longest episode that its spec allows; 0: unknown.
        is_busy: Other programs keep all cores busy: times say little.
        steps: How many it has taken in all workers.
        exact_steps: About how many steps of a worker a replay repeats exactly, though the env carries memory across
            resets; 0: not known.
    """

    name: str
    env_fn: EnvFn
    step_deadline: float
    reset_deadline: float
    first: Walk = field(default_factory=Walk)
    other: Walk = field(default_factory=Walk)
    again: bool = True
    noticed: Noticed = field(default_factory=Noticed)
    remembers: bool | None = False
    batch: Literal["shared", "alone", "none"] = "shared"
    ways: dict[str, Outcome] = field(default_factory=dict)
    memory: int = 0
    recycling: list[str] = field(default_factory=list)
    own_losses: list[Recovery] = field(default_factory=list)
    victims: list[int] = field(default_factory=list)
    is_doomed: bool = False
    began: float = field(default_factory=time.monotonic)
    longest: int = 0
    is_busy: bool = False
    steps: int = 0
    exact_steps: int = 0

    @property
    def verdict(self) -> Verdict:
        """Return the verdict on recovery: ``"ok"`` if the env repeats itself, and one way leads back.

        A replay is no such way for an env that carries memory across resets: late in a run, it begins at a reset.
        """
        is_in_vain = not self.again or self.noticed.incomparable or self.is_doomed
        if is_in_vain or self.ways.get("journal") == "differs":
            return "truncates"
        ways = ["snapshot"] if self.remembers else ["snapshot", "journal"]
        return "ok" if any(self.ways.get(way) in ("exact", "replayed") for way in ways) else "truncates"

    @property
    def conclusion(self) -> Conclusion:
        """Return what is said of the env in the end, if it runs at all."""
        if self.verdict == "ok":
            return "recoverable"
        return "truncates" if self.ways and self.again else "unknown"

    @property
    def step_seconds(self) -> float:
        """Return how long a step of the first walk took on average, with its share of the resets."""
        return self.first.seconds / self.first.steps

    @property
    def episode_seconds(self) -> float:
        """Return about how long the longest episode takes that the env's spec allows; 0.0: unknown."""
        return self.longest * self.step_seconds

    @property
    def own_faults(self) -> str:
        """Return what the env did by itself, such as ``"crashed 3 times and hung once"``; or ``""``."""
        return " and ".join(f"{what} {_times(count)}" for what, count in self.faults.items() if count)

    @property
    def faults(self) -> dict[str, int]:
        """Return how often the env itself crashed, and how often it hung."""
        hung = [one for one in self.own_losses if one.loss.cause == "hung"]
        return {"crashed": len(self.own_losses) - len(hung), "hung": len(hung)}

    @property
    def stack(self) -> str:
        """Return where it crashed or hung last, if that is known."""
        return next(filter(None, (foreign_frames(one.loss.stack) for one in reversed(self.own_losses))), "")

    @property
    def deadlines(self) -> Deadlines:
        """Return the deadlines of a worker. If the env has hung, they are those that are recommended.

        Otherwise each further hang would take 10 s.
        """
        most = self.reset_deadline
        step, reset = self.step_deadline, most
        if self.faults["hung"] and self.first.steps:
            step, reset = min(step, _deadline(self.first.slowest_step)), min(reset, _deadline(self.first.slowest_reset))
        return Deadlines(start=most, reset=reset, step=step, call=most, recovery=most)

    def record_own_loss(self, event: Event) -> None:
        """Note what became of a worker that the env itself has lost."""
        if isinstance(event, Recovery) and event.loss.pid not in self.victims:
            self.own_losses.append(event)

    def differs_at(self, walk: Walk) -> str:
        """Return the name of the first reset or step of a walk that is not as in the first one."""
        return walk.differs_at(self.first, observations=not self.noticed.incomparable)

    @contextlib.contextmanager
    def worker(self, *, env_fn: EnvFn | None = None, **options: Any) -> Iterator[SubprocessEnv]:
        """Start a worker with the env (or another one), and close it in the end. By default a loss raises.

        All workers begin with the same states of ``random`` and ``numpy.random``.
        """
        build = seeded(env_fn or self.env_fn)
        known = {"restart": RAISE, "deadlines": self.deadlines, "hooks": [self.record_own_loss], **options}
        with SubprocessEnv(build, **known) as env:
            try:
                yield env
            finally:
                self.steps += env.statistics().steps


def working_env(env: str, env_kwargs: str, step_deadline: float = 10.0) -> tuple[NamedEnv, Walk]:
    """Return the function that builds the env, and a walk in a process. Raises UsageError if there is none."""
    found = named(env, **arguments_of(env_kwargs))
    patient = Patient(env, found.env_fn, step_deadline, 60.0)
    try:
        walk = undisturbed(patient, _STEPS, tries=_TRIES, least=_FEW, seconds=1.0)
    except MultienvError as error:
        advice = arguments_advice(found.env_fn, str(error)) or f"For details, run `multienv doctor {env}`."
        raise UsageError(f"{env} does not work: {first_line(error)} {advice}") from error
    return found, walk


def examine(patient: Patient, report: Callable[[Row], object]) -> list[Row]:
    """Run all checks that make sense. Call ``report`` with the row of each check that has a finding."""
    rows: list[Row] = []
    for check in CHECKS:
        found = _tried(check, patient)
        if found is None:
            continue
        rows.append(found._replace(name=check.__name__.replace("_", " ")))
        report(rows[-1])
        if found.verdict == "broken":
            break
    return rows


def _tried(check: Callable[[Patient], Row | None], patient: Patient) -> Row | None:
    """Run a check. If the env itself crashed or hung, run it once more: that may have been chance.

    The check of many steps has one try more.
    """
    for is_last in (False, False, True) if check is begins_anew else (False, True):
        try:
            return check(patient)
        except Exception as error:  # the env caused it, and multienv raised it
            is_chance = isinstance(error, WorkerLostError | SpoiledError) and check is not steps  # it has tried itself
            is_chance = is_chance and not (check is builds and isinstance(error, WorkerHungError))
            is_chance = is_chance and not isinstance(error, RestartBudgetExceeded)
            is_chance = is_chance and (patient.again or not isinstance(error, SpoiledError))
            if is_last or not is_chance or time.monotonic() > patient.began + _SECOND_TRIES_UNTIL:
                return _failed(patient, error)
    raise AssertionError


def _failed(patient: Patient, error: Exception) -> Row:
    """Return the row of a check that raised: what happened, and in which line of the env."""
    text = first_line(error)
    if isinstance(error, SpoiledError):
        return Row("note", f"not known: {text}", _CHANCE if patient.own_faults and patient.again else "")
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
    if not patient.first.steps and isinstance(error, EnvError):
        advice = arguments_advice(patient.env_fn, text) or advice
    if isinstance(error, WorkerLostError):
        detail = _last_words(error)
        if patient.first.steps:  # the env runs, until it ends its worker by itself
            verdict, text = "note", f"not known: {text}"
            advice = advice if isinstance(error, RestartBudgetExceeded) else _CHANCE
        advice = _to_run_again(patient, error.report) or advice
    return Row(verdict, text, advice, foreign_frames(detail))


def _last_words(lost: WorkerLostError | Loss) -> str:
    """Return the stack of a lost worker, and the end of what it wrote to stderr."""
    return "\n".join([lost.stack, *lost.stderr.splitlines()[-_LAST_WORDS:]])


def _to_run_again(patient: Patient, report: str) -> str:
    """Return the command that replays a crash report; ``""`` if none was written."""
    env = f" --env {patient.name}" if ":" in patient.name else ""
    return f"To run it again: multienv replay {report}{env}" if report else ""


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


# --- does it run at all? --------------------------------------------------------------------------


def builds(patient: Patient) -> Row:
    """Send ``env_fn`` to a worker, and build the env there."""
    began = time.perf_counter()
    with patient.worker() as env:
        start, patient.memory = time.perf_counter() - began, env.statistics().rss or 0
        patient.longest = (env.spec and env.spec.max_episode_steps) or 0
    size, ready = decimal(len(cloudpickle.dumps(patient.env_fn))), duration(start)
    advice = 'Are its imports slow? Try preload="auto": also each loss then costs less time.'
    means = f"env_fn takes {size}; its worker is ready after {ready}, and takes {decimal(patient.memory)}"
    return Row("ok", means, advice if start > _LONG_START else "")


def steps(patient: Patient) -> Row:
    """Walk at random. All later walks are compared with this one."""
    first = patient.first = undisturbed(patient, _STEPS, tries=_TRIES, least=_FEW, seconds=_SECONDS)
    slowest = f"the slowest step {duration(first.slowest_step)}, the slowest reset {duration(first.slowest_reset)}"
    means = f"{first.steps} random steps of {duration(patient.step_seconds)} each, {slowest}"
    if not patient.own_losses:
        return Row("ok", means)
    last = patient.own_losses[-1]
    means += f"; it {patient.own_faults} by itself"
    if len(first.lost_in) > 1 and len(set(first.lost_in)) == 1:
        means += f", each time in step {first.lost_in[0]}"
        patient.is_doomed = len(first.lost_in) >= _NO_CHANCE
    means += ": its episode is truncated there" if patient.is_doomed else ""
    verdict: Verdict = "truncates" if patient.is_doomed else "note"
    return Row(verdict, means, _to_run_again(patient, last.report), foreign_frames(_last_words(last.loss)))


def compares(patient: Patient) -> Row | None:
    """Walk the same way in another process, and look there whether all that the env returns can be compared."""

    def look(env: SubprocessEnv) -> None:
        patient.noticed = env.call("noticed")

    patient.other = undisturbed(patient, patient.first.steps, env_fn=partial(ObservedEnv, patient.env_fn), look=look)
    kind = patient.noticed.incomparable
    if not kind:
        return None
    return Row(
        "truncates",
        f"it returns values of type {kind}, which cannot be compared: the episode of a lost worker is truncated",
        "Return arrays, numbers, strings, containers of them or dataclasses.",
    )


def spaces(patient: Patient) -> Row | None:
    """Tell whether an observation was not in its space, as gymnasium's checker does."""
    if not patient.noticed.misfit:
        return None
    return Row(
        "note",
        patient.noticed.misfit,
        "multienv hands it on as it is, and a policy may fail because of it. Correct the env or its observation_space.",
    )


def repeats(patient: Patient) -> Row:
    """Compare with the walk of another process: the same seed should give the same walk."""
    if not patient.other.steps:
        patient.other = undisturbed(patient, patient.first.steps)
    difference = patient.differs_at(patient.other)
    patient.again = not difference
    if difference:
        return Row(
            "note",
            f"two processes with the same seed differ at {difference}",
            "Does it draw from anything but self.np_random: the clock, os.urandom, a generator that is not seeded?",
        )
    what = "rewards and flags in " if patient.noticed.incomparable else ""
    return Row("ok", f"the same seed gives the same {what}{patient.other.steps} steps in another process")


def begins_anew(patient: Patient) -> Row:
    """Take the steps of several episodes again, some of which begin in a new process: does a memory show?"""
    if not patient.again or patient.noticed.incomparable:
        return Row("note", f"not known: {_DOES_NOT_REPEAT if not patient.again else 'see the line compares'}")
    fit_in = _ANEW_SECONDS / patient.step_seconds
    longest = int(min(max(_SHORTEST, fit_in / _ANEW_EPISODES), _LONGEST))
    most = _ANEW_STEPS // (5 if patient.own_faults else 1)  # or it crashes before the end
    cut_from = min(fit_in, most) / 2 if fit_in > 2 * _ANEW_EPISODES * _LONGEST else 0.0
    patient.remembers = None
    first = undisturbed(patient, most, seconds=_ANEW_SECONDS, longest=longest, cut_from=cut_from)
    lengths = [longest] if not first.ends else [end - begin for begin, end in pairwise([0, *first.ends])]
    episodes = f"{len(first.ends)} episodes of at most {max(lengths)} steps"
    if len(first.ends) < _ANEW_LEAST:
        if first.lost_in:
            raise SpoiledError(f"only {episodes} before the env itself crashed or hung")
        return Row("note", f"not known: only {episodes} fit into {_ANEW_SECONDS} s")
    policy = replace(RAISE, recycle_after_episodes=len(first.ends) // _ANEW_LEAST)
    with patient.worker(restart=policy, reports="") as env:
        again = walk(env, first.steps, longest=longest, cut_from=cut_from)
        replaced = env.statistics().recycled
    if not replaced:
        raise SpoiledError("no process was replaced")
    if again.differs_at(first):
        patient.remembers = True
        return Row(
            "note",
            f"{_MEMORY}: {episodes} differ if some of them begin in a new process",
            'A replay from a reset counts as "replayed", and may go on otherwise. Give RestartPolicy(accept="exact") '
            f"to have none. To have them exact, begin anew in reset(): clear all state there. {_OR_CHANCE}",
        )
    same = f"the same, though {replaced} of them begin in a new process"
    if not first.ended:
        episodes = f"{len(first.ends)} episodes, each cut off after at most {max(lengths)} steps"
        means = f"{episodes}, are {same}; what an end of an episode changes was not seen"
        return Row("note", means, "`multienv chaos` walks longer, and counts the episodes that end.")
    patient.remembers = False
    return Row("ok", f"{episodes} are {same}")


def draws(patient: Patient) -> Row | None:
    """Tell whether the env draws from the generators that all envs of a worker share."""
    drawn_from = patient.noticed.drawn_from
    if not drawn_from:
        return None
    return Row(
        "note",
        f"it draws from {' and '.join(drawn_from)}, which the envs of a worker share: a replay may mix up their draws",
        f"Give each env a worker of its own, by envs_per_worker=1 as below. Or: {_USE_NP_RANDOM}",
    )


def undisturbed(
    patient: Patient,
    steps: int,
    *,
    env_fn: EnvFn | None = None,
    tries: int = 2,
    least: int = 1,
    look: Callable[[SubprocessEnv], object] = lambda env: None,
    **limits: float,
) -> Walk:
    """Walk in a worker that is left alone. If the env itself crashes or hangs, return the longest of several tries.

    Args:
        patient: The env.
        steps: Largest number of steps; each further try takes half of the last one's.
        env_fn: Builds another env than the patient's.
        tries: How many workers may be lost.
        least: If no try has got so far, raise the WorkerLostError of the last one.
        look: Called with the env now and then, and at the end.
        **limits: Further limits of the walk.
    """
    longest, lost_in, began = Walk(), list[int](), time.monotonic()
    for left in reversed(range(tries)):
        found = Walk(lost_in=lost_in)
        try:
            with patient.worker(env_fn=env_fn) as env:
                walk(env, steps, before_step=lambda step: step % _LOOK_EVERY or look(env), found=found, **limits)
                look(env)
                return found
        except WorkerLostError:
            longest = max(longest, found, key=lambda one: one.steps)
            lost_in.append(found.steps + 1)
            if not left or time.monotonic() > began + _TRIES_UNTIL:
                if longest.steps < least:
                    raise
                break
        steps //= 2
    return longest


def shares(patient: Patient) -> Row | None:
    """Step two of the env in one worker, else in two workers, as the recommended code would."""
    if patient.own_faults:  # it gets a worker of its own in any case
        return None
    errors = []
    options: Any = {"restart": RAISE, "deadlines": patient.deadlines, "reports": ""}
    for each in (2, 1):
        try:
            with SubprocessVectorEnv([patient.env_fn] * 2, envs_per_worker=each, **options) as envs:
                envs.reset(seed=SEED)
                for _ in range(_SHARED_STEPS):
                    envs.step(envs.action_space.sample())
        except MultienvError as error:
            errors.append(first_line(error))
        else:
            break
    if not errors:
        return None
    patient.batch = "alone" if len(errors) == 1 else "none"
    if patient.batch == "alone":
        return Row("note", f"two of them in one worker fail: {errors[0]}", "Each gets its own, by envs_per_worker=1.")
    return Row(
        "note", f"a vector env does not take it: {errors[1]}", "MultiEnv hands on what an env returns, as below."
    )


def renders(patient: Patient) -> Row | None:
    """Render frames in a worker, if the env has a render mode for frames. Report what renders them."""
    with patient.worker(env_fn=partial(ObservedEnv, patient.env_fn), hooks=[]) as env:  # the frames may be to blame
        if env.render_mode in (None, "human", "ansi", "ansi_list"):
            return None
        env.reset(seed=SEED)
        try:
            frame, first = _frame(env)
            _, other = _frame(env)
        except EnvError as error:
            text = f"no frame. {first_line(error)}"
            advice = f"Is there no display? {_OFFSCREEN}"
            return Row("note", text, advice, foreign_frames(error.remote_traceback))
        known = env.call("drawn_by")
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


def outside(patient: Patient) -> Row:
    """Tell what the env has beyond its memory, and what follows from each."""
    found = patient.noticed.outside
    if not found:
        return Row("ok", "nothing beyond its memory: a forked copy has all of it")
    obstacles = [one for one in found if one.obstacle]
    shown = (obstacles or list(found))[:_MOST_SHOWN]
    means = "; ".join(f"{one.when} {one.what}: {_FOLLOWS.get(one.obstacle, _NO_SNAPSHOTS)}" for one in shown)
    if len(found) > len(shown):
        means += f"; and {len(found) - len(shown)} more"
    if not obstacles:
        return Row("ok", means)
    is_written = any(one.obstacle == "files" and one.when.startswith("in ") for one in obstacles)
    return Row("note", means, _KEEP_OPEN if is_written else "")


def forks(patient: Patient) -> Row:
    """Kill the worker with SIGKILL after it has forked a snapshot of itself."""
    struck = strike(patient, ForkingPolicy(snapshot_every=max(1, patient.first.steps // 4)))
    recovery = struck.recovery
    if recovery.method == "snapshot":
        patient.ways["snapshot"] = struck.outcome
        if struck.outcome == "exact":
            return Row("ok", f"a killed worker is recovered exactly from its snapshot, in {duration(recovery.seconds)}")
        advice = f"Use RestartPolicy(snapshots=False): this env changes when its process is forked. {_OR_CHANCE}"
        return Row("note", f"after a recovery from a snapshot, {struck.difference} differs silently", advice)
    if struck.obstacle:
        advice = "No snapshot is needed if replays work: see the next line."
        return Row("note", f"no snapshot can be taken: {struck.obstacle}", advice)
    if struck.outcome == "truncated":
        return Row("note", f"no snapshot brings a killed worker back: {struck.reason}", struck.advice)
    advice = "" if patient.own_faults else _USE_NP_RANDOM  # a copy that crashes or hangs is not taken either
    return Row("note", f"no snapshot was ready, or it went on otherwise; {struck.replay}", advice)


def replays(patient: Patient) -> Row:
    """Kill the worker with SIGKILL, without snapshots. So it is on macOS, or if the env has threads."""
    struck = strike(patient, RestartPolicy(snapshots=False))
    patient.ways["journal"] = struck.outcome
    verdict: Verdict = "note" if patient.verdict == "ok" else "truncates"  # another way may lead back
    means, advice = struck.replay, ""
    if struck.outcome == "truncated":
        advice = f"{'Only snapshots recover it. ' * (verdict == 'note')}{struck.advice}".rstrip()
    elif struck.outcome == "differs":
        verdict = "truncates"
        advice = 'Use RestartPolicy(on_crash="truncate", on_timeout="truncate"). Is its state outside its process?'
        advice += f" {_OR_CHANCE}"
    elif struck.outcome == "strayed":
        advice = f'RestartPolicy(accept="exact") takes no replay from a reset. Or begin anew in reset(). {_OR_CHANCE}'
    elif patient.remembers:
        patient.exact_steps = int(float(f"{AFFORDABLE / patient.step_seconds:.1g}"))
        means += f"; but from about step {patient.exact_steps:,} of a worker on it begins at a reset, and {_MEMORY}"
        advice = "See the line begins anew."
    elif _outgrows_replays(patient):
        verdict, most = "note", f"{RestartPolicy().replay_limit:.0f} s"
        means += f"; but an episode may take {duration(patient.episode_seconds)}, and a replay at most {most}"
        advice = "Raise replay_limit, as below. Otherwise a worker that is lost late in its episode truncates it."
    else:
        verdict = "ok"
    return Row(verdict, means, advice)


# --- leaks ----------------------------------------------------------------------------------------


def leaks(patient: Patient) -> Row:
    """Count descriptors, threads, processes and memory before and after three rounds of short episodes."""
    longest = min(_EPISODE_STEPS, patient.first.steps)
    most = _LEAST_EPISODES if patient.own_faults else _MOST_EPISODES  # few, so that it may get through
    fit_in = int(_EPISODES_SECONDS / patient.step_seconds / longest)
    counts = []
    with patient.worker() as env:
        for _ in range(4):  # the first round allocates what the env keeps for good
            taken = walk(env, longest * min(max(_LEAST_EPISODES, fit_in), most), longest=longest)
            counts.append(_usage(env))
    episodes = 1 + len(taken.ends)
    found, recycling, piling = [], [], 0.0
    for name in counts[0]:
        grown = min(after[name] - before[name] for before, after in pairwise(counts))
        if name == "memory" and grown > _NOISE:
            found.append(f"{decimal(grown // episodes)} {name}")
            recycling.append(_max_rss(max(patient.memory, counts[0][name] - grown)))
        elif name != "memory" and grown > 0:
            found.append(f"{grown / episodes:.3g} {name}")
            piling = max(piling, grown / taken.steps)
    if not found:
        return Row("ok", f"no leak in {3 * episodes} episodes")
    if piling:
        recycling.append(_recycle_after_steps(piling))
    patient.recycling = recycling
    advice = f"RestartPolicy({', '.join(recycling)}) replaces the process in time; its episode goes on."
    advice += " max_rss counts a worker: all its envs together." if "max_rss" in advice else ""
    if patient.remembers:
        advice += " What this env remembers across resets is lost with its process: later episodes may differ."
    return Row("note", f"each episode leaks: {', '.join(found)}", advice)


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
    try:
        process = psutil.Process(_pid(env))
        return {
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "processes": len(process.children(recursive=True)),
            "memory": process.memory_info().rss,
        }
    except psutil.Error as error:
        raise SpoiledError("the env ended its worker between two steps") from error


def snapshots(patient: Patient) -> Row | None:
    """Tell how often workers take a snapshot, if the env crashes or hangs by itself; measure what one costs."""
    if not patient.own_losses or patient.ways.get("snapshot") != "exact":
        return None
    with patient.worker() as env:
        env.reset(seed=SEED)
        began = time.perf_counter()
        for _ in range(_FORKS):
            env.snapshot()
        cost = (time.perf_counter() - began) / _FORKS
    faults = patient.steps / len(patient.own_losses)
    interval = interval_for(cost, faults * patient.step_seconds) / patient.step_seconds
    means = f"each takes {duration(cost)}. A crash or hang comes about once in {faults:,.0f} steps: after the first "
    return Row("ok", f"{means}one, workers take a snapshot every {max(1, interval):,.0f}, which is best")


CHECKS: tuple[Callable[[Patient], Row | None], ...] = (
    builds, steps, compares, spaces, repeats, begins_anew, draws, shares, renders, outside, forks, replays, leaks,
    snapshots,
)  # fmt: skip


@dataclass
class Struck:
    """Holds the outcome of a walk whose worker was killed.

    Attributes:
        outcome: See ``Patient.ways``.
        difference: The reset or step at which the walk differs from the undisturbed walk.
        recovery: The recovery from the loss.
        obstacle: Why the env has no snapshots, or ``""``.
    """

    outcome: Outcome
    difference: str
    recovery: Recovery
    obstacle: str

    @property
    def reason(self) -> str:
        """Return why the recovery was not exact."""
        text = self.recovery.reason
        return text.partition("It cannot be recovered: ")[2] or text  # the doctor has killed the process

    @property
    def advice(self) -> str:
        """Return what the user can do about it: a replay that crashed or hung says nothing about random numbers."""
        is_other = "does not match" in self.reason and is_comparable(self.reason)
        return _USE_NP_RANDOM if is_other else ""

    @property
    def replay(self) -> str:
        """Return what became of the replay in a new process."""
        repeated = f"a new process repeats {self.recovery.replayed} requests"
        took = duration(self.recovery.seconds)
        return {
            "exact": f"{repeated} exactly, in {took}",
            "replayed": f"{repeated} {_EQUAL}, in {took}",
            "differs": f"after a replay, {self.difference} differs silently",
            "strayed": f"{repeated} {_EQUAL}, but then {self.difference} differs: {_MEMORY}",
            "truncated": f"a new process does not repeat it: {self.reason}",
        }[self.outcome]


def strike(patient: Patient, restart: RestartPolicy) -> Struck:
    """Walk like the first walk, and kill the worker when most of the steps are done.

    Args:
        patient: The env.
        restart: The policy of the worker.

    Raises:
        WorkerLostError: The env itself lost worker after worker.
        SpoiledError: The env does not repeat itself; or it crashed or hung, and its episode did not go on.
    """
    if not patient.again:
        raise SpoiledError(_DOES_NOT_REPEAT)
    late, found = patient.first.steps * 17 // 20, Walk()
    heard: list[Event] = []

    def before_step(step: int) -> None:
        if step == late:
            time.sleep(_ANNOUNCED)  # nobody tells the trainer that a snapshot has announced itself to the monitor
            patient.victims.append(_pid(env))
            send(patient.victims[-1], "SIGKILL")

    options: Any = {"reports": "", "restart": replace(restart, max_restarts=_MOST_LOSSES)}
    with patient.worker(hooks=[patient.record_own_loss, heard.append], **options) as env:
        walk(env, patient.first.steps, before_step=before_step, found=found)
        obstacle = env.statistics().no_snapshots
    recoveries = [event for event in heard if isinstance(event, Recovery)]
    ours = next((one for one in recoveries if one.loss.pid in patient.victims), None)
    went_on = ("exact", "replayed")
    if ours is None or any(one.outcome not in went_on for one in recoveries if one is not ours):
        raise SpoiledError("the env itself crashed or hung during this check, and its episode did not go on")
    difference = patient.differs_at(found)
    names = [name for name, _ in found.seen]
    is_early = bool(difference) and names.index(difference) < names.index(f"step {late + 1}")
    if is_early and ours.outcome in went_on:
        patient.again = len(recoveries) > 1  # the recovery of another loss may differ there
        raise SpoiledError(f"{difference} differs before the worker is killed: {_DOES_NOT_REPEAT}")
    outcome: Outcome = ours.outcome if ours.outcome in ("exact", "replayed") else "truncated"
    if difference and outcome in went_on:
        outcome = "differs" if all(one.outcome == "exact" for one in recoveries) else "strayed"
    return Struck(outcome, difference, ours, obstacle)


def _outgrows_replays(patient: Patient) -> bool:
    """Tell whether an episode may take longer than a replay may, while only a replay recovers it."""
    is_long = patient.episode_seconds > RestartPolicy().replay_limit and not patient.is_busy
    return is_long and patient.ways.get("snapshot") != "exact"


def _pid(env: SubprocessEnv) -> int:
    return env.statistics().pid or 0


# --- recommended options --------------------------------------------------------------------------


def options_for(patient: Patient) -> str:
    """Return the recommended options for this env, as Python."""
    slowest = patient.first.slowest_step
    deadlines = f"step={max(_LEAST_IF_CALM, math.ceil(_TIMES_IF_CALM * slowest)):.1f}"
    if patient.is_busy:
        deadlines = 'step="auto"'
    if patient.faults["hung"]:
        deadlines = f"step={_deadline(slowest):.1f}, reset={_deadline(patient.first.slowest_reset):.1f}"
    options = [f"deadlines=Deadlines({deadlines})"]
    if (patient.own_faults or patient.noticed.drawn_from or patient.batch == "alone") and patient.batch != "none":
        options.append("envs_per_worker=1")
    restart = []
    if patient.ways.get("journal") == "differs":
        restart += ['on_crash="truncate"', 'on_timeout="truncate"']
    elif patient.ways.get("snapshot") == "differs":
        restart += ["snapshots=False"]
    if patient.ways.get("journal") == "strayed":
        restart += ['accept="exact"']
    if patient.ways.get("journal") in ("exact", "replayed") and _outgrows_replays(patient):
        restart += [f"replay_limit={math.ceil(4 * patient.episode_seconds):.1f}"]
    restart += patient.recycling
    if restart:
        options.append(f"restart=RestartPolicy({', '.join(restart)})")
    return ", ".join(options)


def _deadline(slowest: float) -> float:
    """Return the recommended deadline, in seconds, if the slowest step or reset took so long."""
    return float(max(_LEAST_DEADLINE, math.ceil(_TIMES_THE_SLOWEST * slowest)))
