"""The rounds of a MultiEnv: one call to all envs, which survives Ctrl-C at any line."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from multienv.autoreset import AutoResetWrapper
from multienv.errors import MultienvError
from multienv.hosted_env import HostedEnv
from multienv.recovery.phases import LOST, RUNNING, RecoveryDue
from multienv.recovery.supervisor import Supervisor
from multienv.threads import Pool, Task
from multienv.turns import Turns

# The envs with calls in two halves that one thread steps: index, autoreset, supervisor.
_Share = list[tuple[int, AutoResetWrapper, Supervisor]]

_sequence = attrgetter("seq")


class Round:
    """One call to all envs: what was asked and what has come back. Survives Ctrl-C."""

    __slots__ = ("arguments", "failures", "marks", "results", "shares", "tasks")

    def __init__(self, arguments: Sequence[Any], marks: list[int]) -> None:
        self.arguments = arguments
        self.marks = marks
        self.results: list[Any] = [None] * len(arguments)
        self.failures: dict[int, BaseException] = {}
        self.shares: list[Task] = []
        self.tasks: dict[int, Task] = {}

    def keep_arguments(self) -> None:
        """The call is interrupted: the caller may reuse what it has given, before all of it is sent."""
        self.arguments = [_copied(argument) for argument in self.arguments]


class Rounds:
    """Makes one call to all envs at a time. What was interrupted is kept: by itself nothing is lost or forgotten.

    Args:
        lanes: The envs, with their autoreset.
        pool: The threads for what only blocks, for what takes long, and for all shares but the first.
        shares: Into how many shares the envs with calls in two halves are dealt.

    Attributes:
        supervisors: Of the envs that have one.
        unfinished: The call whose outcome has not been handed over, and its round, or its tasks.
    """

    def __init__(self, lanes: list[AutoResetWrapper], pool: Pool, shares: int) -> None:
        """Call nothing yet."""
        self.unfinished: tuple[str, Any] | None = None
        self._lanes = lanes
        self._pool = pool
        self._blocking = [index for index, lane in enumerate(lanes) if not lane.splits]
        members = [
            (index, lane, lane.env._supervisor) for index, lane in enumerate(lanes) if isinstance(lane.env, HostedEnv)
        ]
        self.supervisors: list[Supervisor] = [supervisor for _, _, supervisor in members]
        shares = min(shares, max(1, len(members)))
        dealt: list[_Share] = [members[share::shares] for share in range(shares)]
        self._shares = [(share, Turns([supervisor.core for _, _, supervisor in share])) for share in dealt]

    # --- step -----------------------------------------------------------------------------------

    def step(self, actions: Sequence[Any]) -> Round:
        """Step every env whose action is not None. Unfinished until the caller says otherwise."""
        current = Round(actions, list(map(_sequence, self.supervisors)))
        # Until the outcome is handed over: whatever raises in between, the next call takes up this round.
        self.unfinished = ("step", current)
        try:
            self._run_steps(current)
        except BaseException as error:
            current.keep_arguments()
            if not current.shares:
                self._let_rest(current, error)
            raise
        return current

    def _run_steps(self, current: Round) -> None:
        tasks, shares = current.tasks, current.shares
        for index in self._blocking:
            if current.arguments[index] is not None:
                self._begin(current, index, partial(self._step_one, current, index))
        for share, turns in self._shares[1:]:
            shares.append(Task(partial(self._step_share, share, turns, current)))
            shares[-1].start(self._pool)
        self._step_share(*self._shares[0], current)
        if shares or tasks:
            self._gather(current)

    def _step_one(self, current: Round, index: int) -> Any:
        return self._lanes[index].step(current.arguments[index])

    def _begin(self, current: Round, index: int, call: Callable[[], Any]) -> None:
        """Have an env's part in the round done by another thread."""
        task = current.tasks[index] = Task(call)  # noted first: an interruption does not lose it
        task.start(self._pool)

    def _step_share(self, share: _Share, turns: Turns, current: Round) -> None:
        arguments, results = current.arguments, current.results
        sent: list[tuple[int, AutoResetWrapper, Supervisor | None]] = []
        for turn in turns.now():
            index, lane, supervisor = member = share[turn]
            action = arguments[index]
            if action is not None:
                try:
                    if supervisor.phase == RUNNING:
                        supervisor.send_step(action)
                        sent.append(member)
                    elif supervisor.due or (lane.ended and supervisor.phase == LOST):  # that may take a while
                        self._begin(current, index, partial(self._step_one, current, index))
                    else:
                        lane.step_async(action)
                        sent.append((index, lane, None))
                except Exception as error:
                    self._fail(current, index, error)
        sent.reverse()
        for index, lane, stepping in sent:
            try:
                if stepping is None:
                    results[index] = lane.step_wait(defer=True)
                    continue
                transition = stepping.receive_step(None, True)
                if not (transition[2] or transition[3]) or not lane.end(transition):
                    results[index] = transition
                elif stepping.due or stepping.phase == LOST:
                    self._begin(current, index, lane.step_wait)
                else:
                    lane.step_async(None)
                    sent.append((index, lane, None))  # to be awaited behind the others
            except RecoveryDue:
                self._begin(current, index, lane.step_wait)
            except Exception as error:
                self._fail(current, index, error)

    def _gather(self, current: Round) -> None:
        for share in current.shares:
            share.wait()
            error, share.error = share.error, None  # raised once: the round is resumable
            if error is not None:
                raise error
        tasks = current.tasks
        for index, task in tasks.items():
            task.wait()
            if task.error is None:
                current.results[index] = task.result
            elif not self._is_resumable(index, task.error):
                # No signal handler's, in a thread of ours; SystemExit and KeyboardInterrupt are the env's as well.
                current.failures[index] = task.error
        broken_off = [tasks.pop(index) for index in [*tasks] if tasks[index].error and index not in current.failures]
        if broken_off and broken_off[0].error is not None:
            raise broken_off[0].error  # the next call asks them once more

    def _fail(self, current: Round, index: int, error: Exception) -> None:
        """To be called in an except clause: it is the env's failure, or raised again."""
        # In the main thread it may be a signal handler's. If not, it comes again when another thread resumes the round.
        in_main_thread = threading.current_thread() is threading.main_thread()
        if (in_main_thread and not isinstance(error, MultienvError)) or self._is_resumable(index, error):
            raise
        current.failures[index] = error

    def _is_resumable(self, index: int, error: BaseException) -> bool:
        lane = self._lanes[index]
        return lane.splits and lane.env._supervisor.is_resumable(error)  # type: ignore[attr-defined]

    # --- anything else ----------------------------------------------------------------------------

    def reset(self, arguments: list[dict[str, Any] | None]) -> Round:
        """Reset every env whose arguments are not None."""
        current = Round(arguments, list(map(_sequence, self.supervisors)))
        self.unfinished = ("reset", current)
        try:
            self._reset_chosen(current)
        except BaseException as error:
            current.keep_arguments()
            for supervisor in self.supervisors:
                supervisor.note_interruption(error)
            self._let_rest(current, error)
            raise
        self.unfinished = None
        return current

    def _let_rest(self, current: Round, error: BaseException) -> None:
        """Interrupted: nobody waits for those for whom no other thread does."""
        if not isinstance(error, MultienvError):
            for share, _ in self._shares:
                for index, _, supervisor in share:
                    if index not in current.tasks:
                        supervisor.rest()

    def _reset_chosen(self, current: Round) -> None:
        sent = []
        for index, lane in enumerate(self._lanes):
            chosen = current.arguments[index]
            if chosen is None:
                continue
            if not lane.splits or lane.env._supervisor.takes_long_to_reset():  # type: ignore[attr-defined]
                self._begin(current, index, partial(lane.reset, **chosen))
                continue
            try:
                lane.reset_async(**chosen)
                sent.append((index, lane))
            except Exception as error:
                self._fail(current, index, error)
        for index, lane in sent:
            try:
                current.results[index] = lane.reset_wait(defer=True)
            except RecoveryDue:
                self._begin(current, index, lane.reset_wait)
            except Exception as error:
                self._fail(current, index, error)
        self._gather(current)

    def each(self, calls: list[Callable[[], Any]]) -> list[Task]:
        """Make these calls, one for each env, side by side."""
        tasks = list(map(Task, calls))
        self.unfinished = ("each", tasks)
        for task in tasks:
            task.start(self._pool)
        for task in tasks:
            task.wait()
        self.unfinished = None
        return tasks

    # --- after an interrupted call ----------------------------------------------------------------

    def step_is_unfinished(self) -> bool:
        """Whether a step was interrupted."""
        return self.unfinished is not None and self.unfinished[0] == "step"

    def resume_steps(self) -> Round:
        """Complete the step that was interrupted. Unfinished until the caller says otherwise."""
        assert self.unfinished is not None
        return self._resume(self.unfinished[1], self._resume_step)

    def forget(self) -> None:
        """Complete what was interrupted; nobody asks for its outcome."""
        if self.unfinished is None:
            return
        kind, pending = self.unfinished
        if kind == "each":
            for task in pending:
                task.drop()
        else:
            self._resume(pending, self._resume_step if kind == "step" else self._resume_reset)
        self.unfinished = None

    def _resume(self, current: Round, resume_one: Callable[[Round, int, int | None], Any]) -> Round:
        """Bring an interrupted round to its end, whichever line it was interrupted at."""
        for task in (*current.shares, *current.tasks.values()):
            task.start(self._pool)
        self._gather(current)
        marks = iter(current.marks)
        for index, lane in enumerate(self._lanes):
            mark = next(marks) if lane.splits else None
            if current.arguments[index] is None or index in current.tasks or index in current.failures:
                continue
            if current.results[index] is None:
                self._begin(current, index, partial(resume_one, current, index, mark))
        self._gather(current)
        return current

    def _resume_step(self, current: Round, index: int, mark: int | None) -> Any:
        lane = self._lanes[index]
        if mark is None or not lane.env._supervisor.has_asked_since(mark):  # type: ignore[attr-defined]
            return lane.step(current.arguments[index])
        try:
            return lane.resume()
        except Exception as error:
            lane.env._supervisor.note_interruption(error)  # type: ignore[attr-defined]
            raise

    def _resume_reset(self, current: Round, index: int, mark: int | None) -> Any:
        lane = self._lanes[index]
        if mark is None or not lane.env._supervisor.has_asked_since(mark):  # type: ignore[attr-defined]
            return lane.reset(**current.arguments[index])
        return lane.resume_reset()


def _copied(argument: Any) -> Any:
    with contextlib.suppress(Exception):  # what cannot be copied is kept as it is
        return copy.deepcopy(argument)
    return argument
