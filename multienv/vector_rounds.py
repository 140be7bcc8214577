"""One call to all groups of a vector env, in two halves, which survives Ctrl-C at any line."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from multienv.errors import MultienvError, WaitTimeout
from multienv.recovery.group import GroupSupervisor
from multienv.recovery.phases import RecoveryDue
from multienv.threads import Pool, Task
from multienv.turns import Turns

STEP = "step"


class Round:
    """A request to each group, and what has come back.

    Attributes:
        command: What is asked.
        arguments: A batch of actions for each group if it is a step, else a message.
        whole: It is asked and collected in one call: who finds it here later knows that this was interrupted.
        failures: What the groups have raised, as a whole.
        disturbed: An exception from outside came through; nothing is known of how far it got.
    """

    __slots__ = ("answers", "arguments", "command", "disturbed", "failures", "marks", "tasks", "whole")

    def __init__(self, command: str, arguments: Sequence[Any], marks: list[int], *, whole: bool) -> None:
        """Nothing has been sent."""
        self.command = command
        self.arguments = arguments
        self.whole = whole
        self.marks = marks
        self.answers: list[Any] = [None] * len(arguments)
        self.failures: dict[int, BaseException] = {}
        self.tasks: dict[int, Task] = {}
        self.disturbed = False

    @property
    def interrupted(self) -> bool:
        """Its caller has not had its outcome, and asks for something else, or again."""
        return self.whole or self.disturbed

    def is_unanswered(self, index: int) -> bool:
        """Whether nothing is known yet of this group's answer."""
        return self.answers[index] is None and index not in self.failures

    def is_open(self, index: int) -> bool:
        """Whether nobody is after it either."""
        return self.is_unanswered(index) and index not in self.tasks

    def disturb(self) -> None:
        """To be called when an exception comes through. The caller may reuse its arrays before all is sent."""
        self.disturbed = True
        self.arguments = copy.deepcopy(self.arguments) if self.command == STEP else self.arguments


class Parted(Round):
    """In the place of a round when the envs are stepped in parts: it never ends."""

    __slots__ = ()

    def __init__(self) -> None:
        """Nothing is sent."""
        super().__init__("split", (), [], whole=True)


class Refused(Round):
    """A round of which nothing has been sent; whoever collects it gets the error."""

    __slots__ = ("error",)

    def __init__(self, command: str, groups: int, error: Exception) -> None:
        """All have failed."""
        super().__init__(command, [None] * groups, [0] * groups, whole=False)
        self.error = error
        self.failures = dict.fromkeys(range(groups), error)


class VectorRounds:
    """Makes one call to all groups at a time.

    Args:
        groups: The groups.
        at_once: How many of them may be busy at a time.
        pool: The threads to recover in, somebody else's to end; its own by default, once they are needed.

    Attributes:
        current: What has been asked and not been handed over.
        at_once: As given.
    """

    def __init__(self, groups: Sequence[GroupSupervisor], at_once: int, pool: Pool | None = None) -> None:
        """Ask nothing yet."""
        self.current: Round | None = None
        self._groups = list(groups)
        self.at_once = at_once
        self._at_once = min(at_once, len(groups))
        self._turns = Turns([group.core for group in groups])
        self._pool = pool

    def begin(self, command: str, arguments: Sequence[Any], *, whole: bool = False) -> None:
        """Send to as many groups as may be busy."""
        if self._at_once < len(arguments) and not whole:
            arguments = copy.deepcopy(arguments)  # some are sent later, when the caller may have reused its arrays
        current = self.current = Round(command, arguments, [group.seq for group in self._groups], whole=whole)
        try:
            if command == STEP:
                groups = self._groups
                for index in self._turns.now() if self._at_once == len(groups) else range(self._at_once):
                    groups[index].send_step(arguments[index])
            else:
                for index in range(self._at_once):
                    self._send(current, index)
        except MultienvError as error:
            self._note_refusal(current, error)
        except BaseException:
            self._disturb(current)
            raise

    def _disturb(self, current: Round) -> None:
        """It was interrupted; nobody waits for those for whom no other thread does."""
        current.disturb()
        for index, group in enumerate(self._groups):
            if index not in current.tasks:
                group.rest()

    def refuse(self, command: str, error: Exception) -> None:
        """Send nothing; the error is raised when the round is collected."""
        self.current = Refused(command, len(self._groups), error)

    def _note_refusal(self, current: Round, error: MultienvError) -> None:
        """One of the groups could not be asked; the others are."""
        if self._groups[0].is_foreign:
            self.current = None
            raise error
        try:
            for index in range(self._at_once):
                self._send_if_open(current, index)
        except BaseException:
            self._disturb(current)
            raise

    def _send_if_open(self, current: Round, index: int) -> None:
        # It may have been sent before an earlier wait ran into its timeout.
        if current.is_open(index) and not self._groups[index].has_asked_since(current.marks[index]):
            try:
                self._send(current, index)
            except MultienvError as refusal:
                current.failures[index] = refusal

    def _send(self, current: Round, index: int) -> None:
        if current.command == STEP:
            self._groups[index].send_step(current.arguments[index])
        else:
            self._groups[index].send(current.command, current.arguments[index])

    def collect(self, timeout: float | None = None) -> Round:
        """Wait for all of them. The round stays the current one until :meth:`end`."""
        current = self.current
        assert current is not None
        until = None if timeout is None else time.monotonic() + timeout
        if current.disturbed:
            self._complete(current, until)
            return current
        answers, command, waiting, groups = current.answers, current.command, self._at_once, self._groups
        try:
            for index in reversed(self._turns.now()) if waiting == len(groups) else range(len(groups)):
                group = groups[index]
                if answers[index] is None and current.is_open(index):
                    try:
                        left = None if until is None else max(0.0, until - time.monotonic())
                        if command == STEP:
                            answers[index] = group.receive_step(left, True)
                        else:
                            answers[index] = group.receive(command, left, defer=True)
                    except WaitTimeout:
                        raise
                    except RecoveryDue:
                        self._in_background(current, index, partial(self._receive, current, index))
                    except MultienvError as error:
                        current.failures[index] = error
                if waiting < len(groups):
                    self._send_if_open(current, waiting)
                    waiting += 1
            if current.tasks or current.failures:
                self._gather(current, until)
        except WaitTimeout:
            raise
        except BaseException:
            self._disturb(current)
            raise
        return current

    def _receive(self, current: Round, index: int) -> Any:
        if current.command == STEP:
            return self._groups[index].receive_step()
        return self._groups[index].receive(current.command)

    def _complete(self, current: Round, until: float | None = None) -> None:
        """Bring a disturbed round to its end, whichever line it was disturbed at."""
        for task in current.tasks.values():
            task.start(self.threads())
        for index in range(len(self._groups)):
            if current.is_open(index):
                self._in_background(current, index, partial(self._complete_one, current, index))
        self._gather(current, until)

    def _complete_one(self, current: Round, index: int) -> Any:
        group = self._groups[index]
        if group.has_asked_since(current.marks[index]):
            return group.resume()
        self._send(current, index)
        return self._receive(current, index)

    def _in_background(self, current: Round, index: int, call: Any) -> None:
        task = current.tasks[index] = Task(call)  # noted first: an interruption does not lose it
        task.start(self.threads())

    def _gather(self, current: Round, until: float | None = None) -> None:
        for index, task in current.tasks.items():
            if not task.wait(None if until is None else max(0.0, until - time.monotonic())):
                raise WaitTimeout(
                    f"{current.command}() has not been answered in time: a lost worker is being brought back. "
                    "Wait again, or close()."
                )
            if task.error is None:
                current.answers[index] = task.result
            elif not self._groups[index].is_resumable(task.error):
                current.failures[index] = task.error
        unanswered = [current.tasks.pop(index) for index in [*current.tasks] if current.is_unanswered(index)]
        if unanswered and unanswered[0].error is not None:
            raise unanswered[0].error  # the next call asks them once more
        if current.failures:
            self._keep_in_step(current)

    def _keep_in_step(self, current: Round) -> None:
        """Who could not be asked counts on all the same: the places in the arena alternate for all together."""
        moves = any(
            (group.seq ^ mark) & 1 for group, mark in zip(self._groups, current.marks, strict=True)
        )  # a step or a reset has been sent to some
        for group, mark in zip(self._groups, current.marks, strict=True):
            group.keep_in_step(mark + moves)

    def threads(self) -> Pool:
        """Where recoveries run side by side."""
        if self._pool is None:
            self._pool = Pool(len(self._groups), "multienv-vector")
        return self._pool

    def end(self) -> None:
        """What has been collected is handed over."""
        self.current = None

    def completed(self) -> Round | None:
        """The round that was interrupted, brought to its end; it stays the current one until :meth:`end`."""
        current = self.current
        if current is None or not current.interrupted:
            return None
        self._complete(current)
        return current

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
