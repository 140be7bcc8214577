"""Exceptions that arrive from outside at any place, and a ledger that tells whether a transition got lost by them.

CPython runs signal handlers at the entry of a function, when a loop jumps back, and after a call of something written in
C. `Interruption` raises at exactly one of those places, the n-th that a block passes within multienv: with n from 0 on,
every place gets its turn, and none is left to luck.
"""

from __future__ import annotations

import dis
import inspect
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import multienv
from kit import CounterEnv, first_difference
from multienv._engine import interrupts

PACKAGE = str(Path(multienv.__file__).parent)
# Written in Python: an exception inside leaves a lock held for ever.
EVENTS_AND_LOCKS = threading.__file__
_CALLS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "CALL_METHOD", "CALL_FUNCTION", "CALL_FUNCTION_KW"}
_JUMPS = {"JUMP_BACKWARD", "JUMP_ABSOLUTE", "POP_JUMP_BACKWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_FALSE"}


# Of `sys.monitoring`, one that no debugger or profiler takes.
_TOOL = 4


class Interrupted(BaseException):
    """As KeyboardInterrupt: not an Exception."""


def disarm() -> None:
    """Stop the timer that interrupts; an interruption that is on its way comes in here.

    CPython 3.11 may overlook a signal until it has next given its lock away: the handlers of 66 of 880,000 timers ran
    only after `setitimer(…, 0)` had returned, in a loop without multienv, and then beside the next timer's.
    """
    signal.setitimer(signal.ITIMER_REAL, 0)
    time.sleep(0)


class Interruption:
    """Raises ``kind`` at the ``place``-th place of the block where a signal handler could run.

    Only the calling thread is traced, as only the main thread runs signal handlers. `fired` tells whether there was such
    a place, `where` which, `passed` how many were before. Places are not counted while ``skips()`` is true. Those of the files ``beside`` are counted too.
    From Python 3.12 on `sys.monitoring` tells of the places: there `sys.settrace` overlooks instructions of a function
    when it runs for the first time, and from 3.13 on also after an exception that a trace function has raised.
    """

    def __init__(
        self,
        place: int,
        kind: type[BaseException] = Interrupted,
        skips: Callable[[], bool] = lambda: False,
        beside: tuple[str, ...] = (),
    ) -> None:
        self.place = place
        self.fired = False
        self.where = "nowhere"
        self.passed = 0
        self._kind = kind
        self._skips = skips
        self._files = (PACKAGE, *beside)
        self._after_call: dict[FrameType, bool] = {}

    def __enter__(self) -> Interruption:
        if sys.version_info >= (3, 12):
            self._thread = threading.get_ident()
            events = sys.monitoring.events
            sys.monitoring.use_tool_id(_TOOL, "interruption")
            for event, callback in (
                (events.PY_START, self._at_start),
                (events.PY_RESUME, self._at_resume),
                (events.C_RETURN, self._at_place),
                (events.JUMP, self._at_jump),
            ):
                sys.monitoring.register_callback(_TOOL, event, callback)
            sys.monitoring.set_events(_TOOL, events.PY_START | events.PY_RESUME | events.CALL | events.JUMP)
        else:
            sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> bool:
        if sys.version_info >= (3, 12):
            sys.monitoring.set_events(_TOOL, 0)
            sys.monitoring.free_tool_id(_TOOL)
        else:
            sys.settrace(None)
            self._after_call.clear()
        return self.fired and error[0] is self._kind

    # --- Python 3.12 and later ------------------------------------------------------------------------

    def _at_start(self, code: CodeType, offset: int) -> None:
        self._at_place(code)

    def _at_resume(self, code: CodeType, offset: int) -> None:
        if not code.co_flags & inspect.CO_COROUTINE:  # which does not look at signals when an await is over
            self._at_place(code)

    def _at_jump(self, code: CodeType, offset: int, to: int) -> None:
        if to < offset:
            self._at_place(code)

    def _at_place(self, code: CodeType, *_: object) -> None:
        if threading.get_ident() != self._thread or not code.co_filename.startswith(self._files):
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        if frame is not None and _is_counted(frame, self._files) and not self._skips():
            self._pass(frame)

    # --- before ---------------------------------------------------------------------------------------

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        parent = frame.f_back
        if parent in self._after_call:
            self._after_call[parent] = False  # what it called was Python, of any file: no look at signals on return
        if _is_counted(frame, self._files) and not self._skips():
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            # A generator that is resumed looks at signals in its first instruction. One that is dropped unfinished runs
            # none: it ends by GeneratorExit, and what is raised there is swallowed. A coroutine that is resumed in an
            # await does not look at signals at all.
            flags = frame.f_code.co_flags if frame.f_lasti > 0 else 0
            self._after_call[frame] = bool(flags & inspect.CO_GENERATOR)
            if not flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE):
                self._pass(frame)
            return self._trace_inside
        return None

    def _trace_inside(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            if self._after_call.get(frame):
                self._pass(frame)
            name = _names(frame.f_code).get(frame.f_lasti, "")
            self._after_call[frame] = name in _CALLS or name in _JUMPS
        elif event == "exception":
            # A call that raised is not followed by a look at signals; raised there, ours would stay "being handled".
            self._after_call[frame] = False
        elif event == "return":
            self._after_call.pop(frame, None)
        return self._trace_inside

    def _pass(self, frame: FrameType) -> None:
        if self.fired:
            return
        if self.passed == self.place:
            self.fired = True
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
            self._strike(frame)
        self.passed += 1

    def _strike(self, frame: FrameType) -> None:
        raise self._kind(self.where)


class Sigint(Interruption):
    """Has multienv's handler of SIGINT called at that place. What it raises, there or later, is left to the test."""

    def __exit__(self, *error: object) -> bool:
        super().__exit__(*error)
        return False

    def _strike(self, frame: FrameType) -> None:
        interrupts.handle(signal.SIGINT, frame)


def _is_counted(frame: FrameType, files: tuple[str, ...]) -> bool:
    """Whether it is of these files, and not called by a finalizer: the interpreter swallows what is raised there."""
    name = frame.f_code.co_filename
    if not name.startswith(files) or "/testing/" in name:
        return False
    above: FrameType | None = frame
    while above is not None:
        code = above.f_code
        if code.co_name == "__del__" or code is weakref.finalize.__call__.__code__:
            return False
        above = above.f_back
    return True


@cache
def _names(code: CodeType) -> dict[int, str]:
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}


def every_place(
    kind: type[BaseException] = Interrupted,
    stride: int = 1,
    *,
    skips: Callable[[], bool] = lambda: False,
    beside: tuple[str, ...] = (),
    strikes: type[Interruption] = Interruption,
) -> Iterator[Interruption]:
    """Interruptions at place 0, 1, 2, … until one finds no place any more: for use as ``with interruption:``."""
    place = 0
    while True:
        interruption = strikes(place, kind, skips, beside=beside)
        yield interruption
        if not interruption.fired:
            return
        place += stride


class Ledger:
    """Holds the transitions of a `CounterEnv` that came back against one in this process.

    The action that was taken shows in the observation. Each step must continue where the last one ended, with an action
    that the caller has given for it.
    """

    def __init__(self, **counter: Any) -> None:
        self._twin = CounterEnv(**counter)
        self.ended = True
        self.transitions = 0

    def reset(self, result: tuple[Any, Any], seed: int | None) -> None:
        """A reset came back."""
        self._agree("reset", result[0], self._twin.reset(seed=seed)[0])
        self.ended = False

    def step(self, transition: Sequence[Any], allowed: Sequence[int]) -> int:
        """A step came back; ``allowed`` are the actions it may have taken. Returns which it was."""
        action = int(transition[0][3])
        assert action in allowed, f"the step took action {action}, the caller gave {allowed}: {transition}"
        own = self._twin.step(action)  # type: ignore[arg-type]
        self._agree("observation", transition[0], own[0])
        self._agree("reward and flags", tuple(transition[1:4]), own[1:4])
        self.ended = own[2] or own[3]
        self.transitions += 1
        return action

    def _agree(self, what: str, seen: Any, own: Any) -> None:
        difference = first_difference(seen, own)
        assert difference is None, f"after {self.transitions} transitions: {what}: {difference}"
