"""Run the journal of a crash report again, in this process, with the same host as in a worker."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pdb
import pickle
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from multienv._engine.building.building import EnvFn
from multienv._engine.processes.environment import worker_environment
from multienv._engine.recovery.verification import differences
from multienv._engine.reports.crash import Report, action_of
from multienv._engine.wire.banks import FAILED, HEAD, MESSAGE, STEPPED, U32, split_entries
from multienv._engine.wire.codecs import payload_of
from multienv._engine.wire.infos import unpack_extras
from multienv._engine.wire.messages import Description, Failure, Message, Replay, message_of, pack_message
from multienv._engine.wire.segment import Segment
from multienv._engine.worker.host import Host
from multienv.errors import UsageError

# Seconds that a request before the fatal one has at most by default, and those that a build has.
_MOST, _BUILD = 30.0, 120.0


class EnvRaised(Exception):  # noqa: N818 - it is not an error of the command
    """Raised when the env raised, while it was built or in the fatal request. ``failure`` has the details."""

    def __init__(self, text: str, failure: Failure) -> None:
        super().__init__(text)
        self.failure = failure


@contextlib.contextmanager
def _ended_after(seconds: float, file: int = 2) -> Iterator[None]:
    """Print the stack to a file and end this process if the block takes so many seconds, or at Ctrl-C.

    Both also work in C code that holds the GIL and never returns.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.register(signal.SIGINT, file, chain=True)
    faulthandler.dump_traceback_later(seconds, file=file, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGINT)
        signal.signal(signal.SIGINT, handler)


class Rerun:
    """Runs the requests of a report.

    Args:
        report: The report.
        env_fns: The function that builds the env of each slot.
        short: Begin at a later reset, if the report has a replay that does.
        step_deadline: Seconds after which a request counts as hung; ``None``: found by the deadline in the report.
        quiet: Print no stack if a request before the fatal one hangs.

    Attributes:
        was_building: The process was lost while the envs were built.
        is_short: It begins at a later reset than the whole record.
        length: Number of requests before the fatal one.
        seconds: Seconds after which one of these counts as hung.
        hang_seconds: Seconds after which the fatal request, or the fatal build, counts as hung.
    """

    def __init__(
        self, report: Report, env_fns: Sequence[EnvFn], step_deadline: float | None, *, short: bool, quiet: bool
    ) -> None:
        self.was_building = report.loss.command == "initialize"
        self._report, self._verbatim = report, report.build.verbatim
        known = None if report.deadline is None else 2 * report.deadline + 1
        self.seconds = step_deadline or min(known or _MOST, _MOST)
        self.hang_seconds = (known or _BUILD) if self.was_building else step_deadline or known or _MOST
        self._fatal = next(split_entries(report.pending, report.end), None)
        self.is_short = short and len(report.replays) > 1
        # The host has a snapshot taken between two requests: that is when the next one gets its time.
        self._replay = replace((report.replays or (Replay(b""),))[-1 if self.is_short else 0], every=1)
        self._since, self._stacks = 0.0, os.open(os.devnull, os.O_WRONLY) if quiet else 2
        self.length = sum(1 for _ in split_entries(self._replay.entries, report.end))
        self._envs: list[Any] = []
        self._segment = Segment(-1)
        self._description: Description
        builders = [partial(self._build_one, env_fn) for env_fn in env_fns]
        self._host = Host(self._segment, load=lambda _: builders, on_keep=self._begin_request)

    def _build_one(self, env_fn: EnvFn) -> Any:
        env = env_fn()
        self._envs.append(env)
        return env

    def _ask(self, number: int, message: Message) -> Any:
        """Return the host's answer to a message, which may be a ``Failure``."""
        HEAD.pack_into(self._segment.banks[number & 1].view, 0, MESSAGE, 0, 0, 0, 0, number & U32, 0)
        self._segment.write_request_payload(number, pack_message(message))
        self._host.handle(number)
        return pickle.loads(self._segment.read_reply_payload(number))

    def build(self) -> None:
        """Build the envs, as a worker does. Raises :class:`EnvRaised`."""
        os.environ.update(worker_environment())
        build = replace(self._report.build, env_fns=b"", snapshots=-1, replacement=False)
        with _ended_after(self.hang_seconds if self.was_building else _BUILD):
            answer = self._ask(-1, build)
        if isinstance(answer, Failure):
            raise EnvRaised(f"env_fn raised {answer.type_name}: {answer.text}", answer)
        self._description = answer
        if self._report.layout not in (None, self._segment.layout):
            raise UsageError(
                f"{self._report.path}: the env that was built has other spaces than the lost env. Is it the same env?"
            )

    def run(self) -> list[str]:
        """Run all requests before the fatal one. Return a line for each env whose answers differ from the record.

        The fault may happen again even if answers differ.
        """
        with _ended_after(self.seconds, self._stacks):
            answer = self._ask(-1, self._replay)
        if isinstance(answer, Failure):
            return [answer.text]
        starts = {one.slot: one.entry for one in self._replay.starts if one.waits}
        layout = self._segment.layout
        found = differences(self._replay.entries, answer, layout, verbatim=self._verbatim, starts=starts)
        return [f"env {slot}: {what}" for slot, what in found.items()]

    def _begin_request(self, *last: int) -> str:
        """Give the next request its time. It may be a tenth less: a new timer takes as long as several quick steps."""
        if time.monotonic() > self._since + self.seconds / 10:
            self._since = time.monotonic()
            faulthandler.dump_traceback_later(self.seconds, file=self._stacks, exit=True)
        return ""

    # --- the fatal request ------------------------------------------------------------------------

    def _asked(self) -> Any:
        """Return the action, or the message, of the fatal request; ``None`` if no request was pending."""
        fatal = self._fatal
        if fatal is None:
            return None
        if fatal.is_step:
            return action_of(fatal, self._segment.layout, self._description, verbatim=self._verbatim)
        return message_of(fatal.record[0], fatal.request_payload)

    def request(self) -> str:
        """Return the fatal request and its place in the episode, as text; ``""`` if no request was pending."""
        loss, fatal = self._report.loss, self._fatal
        if fatal is None:
            return ""
        what = f"step({self._asked()!r})" if fatal.is_step else f"{loss.command}: {self._asked()!r:.500}"
        after = "" if loss.step is None else f", after {loss.step} steps of its episode"
        return f"{what}{after}" + ("" if loss.seed is None else f", last seed {loss.seed}")

    def run_fatal(self) -> None:
        """Run the request in which the process was lost. If the fault happens again, it ends this process.

        Raises:
            EnvRaised: The env raised.
        """
        fatal, segment = self._fatal, self._segment
        assert fatal is not None
        with _ended_after(self.hang_seconds):
            self._ask(~fatal.number, Replay(fatal.packed()))  # this number does not use the bank of the fatal request
        kind = segment.banks[fatal.number & 1].view[2]
        failures: dict[int, Failure] = {}
        if kind == FAILED:
            failures = {0: pickle.loads(segment.read_reply_payload(fatal.number))}
        elif kind == STEPPED and not self._verbatim:
            failures = unpack_extras(payload_of(segment, fatal.number).rest)[0].failures
        for slot, failure in failures.items():
            who = "it" if self._verbatim else f"env {slot}"
            raise EnvRaised(f"{who} raised {failure.type_name}: {failure.text}", failure)

    def stop(self) -> None:
        """Stop in a debugger with ``env`` and ``action``. If the request is not a step, ``action`` is the message."""
        env, action = self._envs[0] if self._verbatim else self._envs, self._asked()
        pdb.Pdb().set_trace(sys._getframe())
        del env, action  # the debugger stops here: the next thing to try is `env.step(action)`

    def close(self) -> None:
        """Close the envs."""
        with _ended_after(self.seconds):
            self._host.close_envs()
