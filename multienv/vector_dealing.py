"""How many envs share a process, from what their first steps take."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from multienv.errors import MultienvError
from multienv.recovery.group import GroupSupervisor
from multienv.recovery.verification import same
from multienv.vector_env import HostedVectorEnv
from multienv.vector_rounds import STEP, Round, VectorRounds
from multienv.wire.batch import Array, copied
from multienv.wire.messages import GroupOptions

# Seconds that a worker should wait for its envs in a step of the batch: to wake one costs about a fiftieth of it.
PAYS = 1e-3
# Computing is as much reason as a tenth of that in waiting: more workers than cores even out what envs differ in, but
# they disturb each other.
_COMPUTING = 0.1
# So many steps decide.
STEPS = 8
# What is taken over from the envs that have been dealt anew; spaces stay, the caller may have seeded them.
_TAKEN = ("_groups", "_slices", "_arena", "_places", "_rounds", "_loose", "_begun", "_met", "_fresh", "envs_per_worker")


def size_that_pays(largest: int, waiting: float, computing: float = 0.0) -> int:
    """How many envs a worker should have; as many as before if it makes little difference.

    Args:
        largest: So many it has.
        waiting: For so long these keep it waiting in a step, seconds.
        computing: For so long they have a core.
    """
    reason = waiting + _COMPUTING * computing
    size = max(1, int(PAYS * largest / reason)) if reason else largest
    return size if 2 * size <= largest else largest


def core_seconds(pid: int | None) -> Array:
    """For how long a process has had a core, and its main thread has wanted one; zeros where that is not known."""
    if pid is None or sys.platform != "linux":
        return np.zeros(2)
    try:
        # All its threads, up to now: the number that the system has for this clock.
        return np.array([time.clock_gettime(~pid << 3 | 2), _wanted(pid)])
    except OSError:  # it has just ended
        return np.zeros(2)


def _spent_by(groups: Sequence[GroupSupervisor]) -> Array:
    return np.array([core_seconds(group.statistics().pid) for group in groups])


def own_core_seconds() -> float:
    """For how long this thread has had a core or wanted one."""
    return time.thread_time() + _wanted("thread-self")


def _wanted(process: int | str) -> float:
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):  # this system keeps no such account
        return 0.0


class WatchedRounds(VectorRounds):
    """Rounds of which is noted what they ask, and what the time went to.

    Attributes:
        asked: The command of each, ``""`` for one that is more than a plain reset or step, in one call.
        seconds: How long each has taken.
        waits: For how much of that neither the trainer nor the slowest worker had a core or wanted one.
        computing: For how long the busiest worker has had one.
    """

    def __init__(self, groups: Sequence[GroupSupervisor], at_once: int) -> None:
        """Ask nothing yet."""
        super().__init__(groups, at_once)
        self.asked: list[str] = []
        self.seconds: list[float] = []
        self.waits: list[float] = []
        self.computing: list[float] = []
        self._before: tuple[float, float, Array] = 0.0, 0.0, np.zeros((len(groups), 2))

    def begin(self, command: str, arguments: Sequence[Any], *, whole: bool = False) -> None:
        """See :class:`VectorRounds`."""
        is_plain = whole and (
            command == STEP or (command == "reset" and arguments[0].options == GroupOptions(None, None))
        )
        self.asked.append(command if is_plain else "")
        self._before = own_core_seconds(), time.perf_counter(), _spent_by(self._groups)
        super().begin(command, arguments, whole=whole)

    def collect(self, timeout: float | None = None) -> Round:
        """See :class:`VectorRounds`."""
        current = super().collect(timeout)
        own, begun, before = self._before
        # By nothing of this class's own: a step from within this one, which is refused, may have ended the trial.
        seconds, spent = time.perf_counter() - begun, _spent_by(self._groups) - before
        self.seconds.append(seconds)
        self.waits.append(seconds - (own_core_seconds() - own) - float(spent.sum(axis=1).max()))
        self.computing.append(float(spent[:, 0].max()))
        return current


class Trial:
    """Watches the first steps of envs that have been dealt out by cores.

    Where each takes long, the envs are dealt to more processes: those that wait do so at the same time, and those that
    compute for long are spread by the system. They are built again, and brought to where they are as after a loss, by
    the same seeds and actions. Where that shows anything else than was seen, or fails, all stays as it is; so it does
    when anything but whole steps was asked after the first reset.

    Args:
        envs: They have not been reset yet.
        build: Builds them again, so many to a worker.
    """

    def __init__(self, envs: HostedVectorEnv, build: Callable[[int], HostedVectorEnv]) -> None:
        """Nothing has been asked."""
        self._build = build
        self._rounds = envs._rounds = WatchedRounds(envs._groups, envs._rounds.at_once)
        self._actions: list[Any] = []
        self._shown: list[Any] = []

    def goes_on(self, envs: HostedVectorEnv, actions: Any) -> bool:
        """To be asked before each step. False: the matter is settled, with these envs or with others."""
        rounds, steps = self._rounds, len(self._actions)
        if (
            rounds.asked == ["reset"] + [STEP] * steps
            and len(rounds.seconds) == 1 + steps
            and len(self._shown) == steps
            and rounds.current is None
            and not envs.closed
            and not envs._groups[0].is_foreign
        ):
            self._shown.append(_rows_of(envs))
            if steps < STEPS:
                self._actions.append(copy.deepcopy(actions))
                return True
            self._deal(envs)
        rounds.__class__ = VectorRounds  # type: ignore[assignment]  # with its threads, and with what is pending
        return False

    def _deal(self, envs: HostedVectorEnv) -> None:
        largest = max(envs.envs_per_worker)
        # What they have taken here, on a machine that may be busy with other things; and by the account of the workers,
        # of which the first step is most, with what is only done once.
        seconds = min(median(self._rounds.seconds[1:]), max(group.env_seconds() for group in envs._groups))
        waiting, computing = median(self._rounds.waits[1:]), median(self._rounds.computing[1:])
        size = size_that_pays(largest, max(0.0, min(seconds, waiting)), computing)
        if size == largest or any(group.statistics().losses for group in envs._groups):
            return
        try:
            others = self._build(size)
        except (MultienvError, OSError):  # they can be had once only; or the system has not so many processes
            return
        groups, arena = envs._groups, envs._arena
        try:
            if self._is_reached(others, [seed for group in groups for seed in group.seeds]) and not envs.closed:
                # At once, for an interruption. What the processes end with stays tied to the others.
                taken = {name: vars(others)[name] for name in _TAKEN}
                vars(envs).update(taken, _successor=others, _retired=groups)
        finally:
            if envs._groups is groups:
                others.close()
        if envs._groups is not groups:
            others.closed, others._places = True, None
            for group in groups:
                group.close()
            envs._retired = ()
            arena.close()
            self._rounds.close()
            if envs.closed:  # meanwhile, by another thread, which knew nothing of the others
                envs.close_extras()

    def _is_reached(self, others: HostedVectorEnv, seeds: list[int | None]) -> bool:
        """Bring them to where the envs are."""
        try:
            others.reset(seed=seeds)
            for actions, shown in zip(self._actions, self._shown, strict=False):
                if not same(_rows_of(others), shown):
                    return False
                others.step(actions)
        except MultienvError:
            return False
        return same(_rows_of(others), self._shown[-1]) and not any(
            group.statistics().losses for group in others._groups
        )


def _rows_of(envs: HostedVectorEnv) -> Any:
    """What has last been seen."""
    place = envs._place()
    observations = copied(place.observations) if envs._laid_out else copy.deepcopy(envs._loose)
    return observations, place.rewards.copy(), place.terminations.copy(), place.truncations.copy()
