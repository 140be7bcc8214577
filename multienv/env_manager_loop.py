"""What goes on between a manager and its envs: whichever answers first is heard first, and nothing spins.

All that has come back is taken up by the thread that calls the manager, in one ``poll()`` over the pipes of all envs
and the bell of the threads that recover, retry or resume. Nothing is shared with those but what they have been given.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any, NoReturn

from multienv.env_lane import Crew, Lane
from multienv.env_states import EnvState, Timestep
from multienv.errors import ClosedError, EnvsFailedError
from multienv.processes.launch import milliseconds
from multienv.recovery.record import refuse_in_hook
from multienv.subprocess_env import close_all
from multienv.threads import Task

_ADVICE = (
    "Reset those that are in EnvState.ERROR: reset({id: None}). What others have returned is in `results`; "
    "what they have still to return, the next step() gives."
)


class Loop:
    """The lanes of a manager while it is launched; survives Ctrl-C at any line.

    Args:
        lanes: One for each env.
        crew: Theirs.
    """

    def __init__(self, lanes: list[Lane], crew: Crew) -> None:
        """Ask nothing yet."""
        self.lanes, self.crew = lanes, crew
        self.closed = False
        self._handed = 0  # what has a number up to this has been handed over
        self._inside = False  # a call has begun, and neither returned nor raised an error of ours
        self._calls: list[Task] = []

    # --- calls ------------------------------------------------------------------------------------

    def enter(self, what: str) -> None:
        """A call begins. If the last one was interrupted, what is under way goes on."""
        if self.closed:
            raise ClosedError(f"{what}: the manager has been closed. Call launch() first.")
        refuse_in_hook((lane.supervisor for lane in self.lanes), what)
        if self._inside:
            for task in self._calls:
                task.drop()
            for lane in self.lanes:
                lane.resume()
        self._calls = []
        self._inside = True

    def leave(self) -> None:
        """A call ends without an interruption."""
        self._inside = False

    def hand_over(self, what: str, shape: Callable[[dict[int, Timestep]], Any]) -> Any:
        """The timesteps that have come, in the shape in which they are wanted; or an error that holds them."""
        steps = {lane.index: lane.now.timestep[1] for lane in self.lanes if lane.has_news(self._handed)}  # type: ignore[index]
        if self.failed():
            self.tell_failures(what, [steps.get(lane.index) for lane in self.lanes])
        shaped, handed = shape(steps), self._latest()
        # No call from here on: a signal handler finds it handed over, or not.
        self._handed = handed
        self._inside = False
        return shaped

    def tell_failures(self, what: str, results: list[Any]) -> NoReturn:
        """Raise what has failed; nothing is taken up between ``results`` and this."""
        failures = {lane.index: lane.now.failure[1] for lane in self.lanes if lane.has_failed(self._handed)}  # type: ignore[index]
        error, handed = EnvsFailedError.collect(what, failures, results, _ADVICE), self._latest()
        self._handed = handed
        self._inside = False
        raise error

    def _latest(self) -> int:
        return max((number for lane in self.lanes for number in _numbers(lane)), default=0)

    # --- what has come ----------------------------------------------------------------------------

    def ready(self) -> list[Lane]:
        """The envs that can be stepped."""
        return [lane for lane in self.lanes if lane.is_ready(self._handed)]

    def news(self) -> int:
        """How many timesteps have not been handed over."""
        return sum(lane.has_news(self._handed) for lane in self.lanes)

    def failed(self) -> bool:
        """Some failure has not been told."""
        return any(lane.has_failed(self._handed) for lane in self.lanes)

    def stepping(self) -> int:
        """How many timesteps are under way."""
        return sum(lane.is_stepping for lane in self.lanes)

    def is_busy(self) -> bool:
        """Something is under way, or has not been handed over."""
        return bool(self.news()) or self.failed() or any(lane.now.request is not None for lane in self.lanes)

    def done(self) -> bool:
        """All envs are done, and all of it has been handed over."""
        return not self.news() and all(lane.now.state == EnvState.DONE for lane in self.lanes)

    # --- waiting ----------------------------------------------------------------------------------

    def turn(self, timeout: float | None) -> None:
        """Take up what there is; if there is nothing, wait for something, at most ``timeout`` seconds."""
        ready: list[Lane] = []
        lanes: dict[int, Lane] = {}
        poller = select.poll()
        poller.register(self.crew.ear, select.POLLIN)
        for lane in self.lanes:
            request = lane.now.request
            if request is None:
                continue
            if request.task is not None:
                if request.told:
                    ready.append(lane)
                continue
            interests = lane.supervisor.interests()
            if not interests:
                ready.append(lane)
            for descriptor, events in interests:
                lanes[descriptor] = lane
                poller.register(descriptor, events)
        self._refuse_if_closed()
        found = poller.poll(0 if ready else None if timeout is None else milliseconds(timeout))
        self._refuse_if_closed()
        for descriptor, _ in found:
            if descriptor == self.crew.ear:
                self.crew.listen()
            else:
                ready.append(lanes[descriptor])
        for lane in ready:
            if lane.answered():
                lane.collect()

    def until(self, satisfied: Callable[[], bool]) -> None:
        """Take up what comes until this is so; at least once."""
        self.turn(0.0)
        while not satisfied():
            self.turn(None)

    def until_some_are_ready(self) -> None:
        """Until an env can be stepped, if there is any that will be without being asked."""
        self.until(
            lambda: (
                any(lane.is_ready(self._handed) or lane.has_news(self._handed) for lane in self.lanes)
                or self.failed()
                or not any(lane.now.request is not None and not lane.is_stepping for lane in self.lanes)
            )
        )

    def until_stepped(self, wait_num: float, patience: float | None) -> None:
        """Until so many timesteps are there and ``patience`` is over; or all. ``None``: all."""
        begin = time.monotonic()
        self.turn(0.0)
        wanted = min(wait_num, self.stepping() + self.news())
        while self.stepping():
            left = None
            failed = sum(lane.has_failed(self._handed) for lane in self.lanes)
            if patience is not None and self.news() + failed >= wanted:
                left = max(0.0, begin + patience - time.monotonic())
                if not left and (failed or any(lane.is_idle for lane in self.lanes)):
                    return
            self.turn(left or None)

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise ClosedError("The manager was closed in the middle of the call. Call launch() first.")

    # --- anything else ----------------------------------------------------------------------------

    def reset(self, chosen: list[Lane]) -> None:
        """Reset these envs, and wait for that. What they were doing is given up."""
        for lane in chosen:
            lane.dropped = True
        self.until(lambda: all(lane.now.request is None for lane in chosen))
        for lane in chosen:
            lane.ask_reset()
        self.until(lambda: all(lane.now.request is None for lane in chosen))
        failures = {lane.index: lane.now.failure[1] for lane in chosen if lane.now.failure is not None}
        if failures:
            results = [lane.observation() if lane in chosen and lane.is_idle else None for lane in self.lanes]
            error = EnvsFailedError.collect("reset()", failures, results, _ADVICE)
            for lane in chosen:
                lane.now = lane.now._replace(failure=None)
            raise error

    def each(self, what: str, calls: dict[int, Callable[[], Any]]) -> dict[int, Any]:
        """Make these calls to envs, side by side, once they are doing nothing else."""
        self.until(lambda: all(self.lanes[index].now.request is None for index in calls))
        tasks = self._calls = [Task(call) for call in calls.values()]
        for task in tasks:
            task.start(self.crew.pool)
        for task in tasks:
            task.wait()
        self._refuse_if_closed()
        failures = {index: task.error for index, task in zip(calls, tasks, strict=True) if task.error is not None}
        results = {index: task.result for index, task in zip(calls, tasks, strict=True)}
        if failures:
            every = [results.get(lane.index) for lane in self.lanes]
            raise EnvsFailedError.collect(what, failures, every, "The others answered; all episodes go on.")
        return results

    def close(self) -> None:
        """End all processes side by side, then the threads; again does nothing, unless it was interrupted."""
        self.closed = True
        self.crew.closing.set()
        self.crew.ring()
        close_all([lane.env for lane in self.lanes])
        self.crew.dismiss()


def _numbers(lane: Lane) -> list[int]:
    return [news[0] for news in (lane.now.timestep, lane.now.failure) if news is not None]
