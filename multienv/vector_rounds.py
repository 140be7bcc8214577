"""One call to all groups of a vector env, in two halves, which survives Ctrl-C at any line."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from multienv.errors import MultienvError, WaitTimeout
from multienv.recovery.group import GroupSupervisor
from multienv.recovery.phases import RecoveryDue
from multienv.threads import Pool, Task

STEP = "step"


class Round:
    """A request to each group, and what has come back.

    Attributes:
        command: What is asked.
        arguments: A batch of actions for each group if it is a step, else a message.
        failures: What the groups have raised, as a whole.
        disturbed: An exception from outside came through; nothing is known of how far it got.
    """

    __slots__ = ("answers", "arguments", "command", "disturbed", "failures", "marks", "tasks")

    def __init__(self, command: str, arguments: Sequence[Any], marks: list[int]) -> None:
        """Nothing has been sent."""
        self.command = command
        self.arguments = arguments
        self.marks = marks
        self.answers: list[Any] = [None] * len(arguments)
        self.failures: dict[int, BaseException] = {}
        self.tasks: dict[int, Task] = {}
        self.disturbed = False


class VectorRounds:
    """Makes one call to all groups at a time.

    Args:
        groups: The groups.
        at_once: How many of them may be busy at a time.

    Attributes:
        current: What has been asked and not been handed over.
    """

    def __init__(self, groups: Sequence[GroupSupervisor], at_once: int) -> None:
        """Ask nothing yet."""
        self.current: Round | None = None
        self._groups = list(groups)
        self._at_once = min(at_once, len(groups))
        self._pool: Pool | None = None

    def begin(self, command: str, arguments: Sequence[Any]) -> None:
        """Send to as many groups as may be busy."""
        current = self.current = Round(command, arguments, [group.seq for group in self._groups])
        try:
            if command == STEP:
                for group, actions in zip(self._groups[: self._at_once], arguments, strict=False):
                    group.send_step(actions)
            else:
                for index in range(self._at_once):
                    self._send(current, index)
        except MultienvError as error:
            self._note_refusal(current, error)
        except BaseException:
            current.disturbed = True
            raise

    def _note_refusal(self, current: Round, error: MultienvError) -> None:
        """One of the groups could not be asked; the others are."""
        for index in range(self._at_once):
            if not self._groups[index].has_asked_since(current.marks[index]):
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
        if current.disturbed:
            self._complete(current)
            return current
        until = None if timeout is None else time.monotonic() + timeout
        answers, command, waiting = current.answers, current.command, self._at_once
        try:
            for index, group in enumerate(self._groups):
                if answers[index] is not None or index in current.failures or index in current.tasks:
                    continue
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
                if waiting < len(self._groups):
                    self._send_next(current, waiting)
                    waiting += 1
            if current.tasks:
                self._gather(current)
        except WaitTimeout:
            raise
        except BaseException:
            current.disturbed = True
            raise
        return current

    def _send_next(self, current: Round, index: int) -> None:
        if self._groups[index].has_asked_since(current.marks[index]):
            return  # it was sent before an earlier wait ran into its timeout
        try:
            self._send(current, index)
        except MultienvError as refusal:
            current.failures[index] = refusal

    def _receive(self, current: Round, index: int) -> Any:
        if current.command == STEP:
            return self._groups[index].receive_step()
        return self._groups[index].receive(current.command)

    def _complete(self, current: Round) -> None:
        """Bring a disturbed round to its end, whichever line it was disturbed at."""
        for task in current.tasks.values():
            task.start(self._threads())
        self._gather(current)
        for index in range(len(self._groups)):
            if current.answers[index] is None and index not in current.failures and index not in current.tasks:
                self._in_background(current, index, partial(self._complete_one, current, index))
        self._gather(current)

    def _complete_one(self, current: Round, index: int) -> Any:
        group = self._groups[index]
        if not group.has_asked_since(current.marks[index]):
            self._send(current, index)
            return self._receive(current, index)
        try:
            return group.resume()
        except Exception as error:
            group.note_interruption(error)
            raise

    def _in_background(self, current: Round, index: int, call: Any) -> None:
        task = current.tasks[index] = Task(call)  # noted first: an interruption does not lose it
        task.start(self._threads())

    def _gather(self, current: Round) -> None:
        for index, task in current.tasks.items():
            task.wait()
            if task.error is None:
                current.answers[index] = task.result
            else:
                current.failures[index] = task.error

    def _threads(self) -> Pool:
        if self._pool is None:
            self._pool = Pool(len(self._groups), "multienv-vector")
        return self._pool

    def end(self) -> None:
        """What has been collected is handed over."""
        self.current = None

    def forget(self) -> None:
        """Bring what was disturbed to its end; nobody asks for its outcome."""
        if self.current is not None and self.current.disturbed:
            self._complete(self.current)
            self.current = None

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
