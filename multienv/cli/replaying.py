"""Run the journal of a crash report again, in this very process, by the host that a worker runs."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pdb
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from multienv.cli.env_functions import EnvFn
from multienv.errors import ReportError
from multienv.processes.environment import worker_environment
from multienv.recovery.verification import differences
from multienv.reports.crash import action_of
from multienv.reports.plain import made_anew, plain_value, reset_made_anew
from multienv.reports.read import Report
from multienv.wire.actions import PICKLED
from multienv.wire.banks import (
    ABSENT,
    BEGIN,
    FAILED,
    HEAD,
    MESSAGE,
    STEP,
    STEPPED,
    U32,
    Entry,
    are_digests,
    slot_digests,
    split_entries,
)
from multienv.wire.codecs import mail_of
from multienv.wire.infos import unpack_extras
from multienv.wire.messages import Description, Failure, Message, Replay, message_of, pack_message
from multienv.wire.segment import Segment
from multienv.worker.host import Host

_TRUST = (
    "is known as a pickle only. To load a pickle is to run whatever code it asks for: if you know who wrote this "
    "report, give --trust."
)


class EnvRaised(Exception):  # noqa: N818 - what it says is no error of the command
    """Raised when the env raised, as it was built or in the fatal request; ``failure`` says what."""

    def __init__(self, text: str, failure: Failure) -> None:
        super().__init__(text)
        self.failure = failure


class Rerun:
    """Runs the requests of a report.

    Args:
        report: The report.
        env_fns: What builds the env of each slot.

    Attributes:
        was_building: The process was lost while the envs were built.
        length: How many requests come before the fatal one.

    Raises:
        ReportError: There is no journal, or it cannot be replayed without trust.
    """

    def __init__(self, report: Report, env_fns: Sequence[EnvFn]) -> None:
        self.was_building = report.loss.get("command") == "initialize"
        self._report, self._fatal, self._exact = report, report.pending, report.build.exact
        replay = report.replay
        if replay is None:
            if self._fatal is not None:
                raise ReportError(
                    f"{report.path} holds no journal that can be replayed: it has outgrown the RestartPolicy's "
                    "journal_limit or replay_limit, and begins where no replay can begin; or too many workers were "
                    "lost at once."
                )
            replay = Replay(b"")
        end = 0 if report.layout is None else report.layout.end
        before = list(split_entries(replay.entries, end))
        if not report.is_trusted:
            if replay.generators or replay.state or replay.lasting:
                raise ReportError(f"{report.path}: where its journal begins {_TRUST}")
            before = [self._plain(place, entry) for place, entry in enumerate(before, 1)]
            self._fatal = self._fatal and self._plain(len(before) + 1, self._fatal)
            replay = Replay(b"".join(entry.packed() for entry in before))
        self.length = len(before)
        self._replay = replay
        self._envs: list[Any] = []
        self._segment = Segment(-1)
        self._description: Description
        self._host = Host(self._segment, env_fns=[partial(self._build_one, env_fn) for env_fn in env_fns])

    def _plain(self, place: int, entry: Entry) -> Entry:
        """Return an entry whose pickles this process has made itself; raise ReportError if not all of it is plain."""
        kind, tag = entry.stretch[:2]
        mail, evidence = entry.request_mail, entry.evidence
        try:
            if kind == MESSAGE:
                mail = reset_made_anew(mail)
            elif kind == STEP and tag & ~ABSENT == PICKLED:
                mail = made_anew(mail)
            elif kind not in (BEGIN, STEP):
                raise ValueError(f"there is no request of kind {kind}")
            return replace(entry, request_mail=mail, evidence=evidence and self._plain_evidence(evidence))
        except Exception as error:  # any damage; or what is not plain
            raise ReportError(f"{self._report.path}: request {place} {_TRUST}") from error

    def _plain_evidence(self, evidence: bytes) -> bytes:
        """Return evidence whose pickles this process has made itself. Raises if it is not plain."""
        if self._exact:
            return made_anew(evidence)
        if are_digests(evidence):
            if self._report.layout is None or len(slot_digests(evidence)) != self._report.layout.slots:
                raise ValueError("there is not one digest for each env")
            return evidence
        return pickle.dumps([one and made_anew(one) for one in plain_value(evidence)], protocol=5)

    def _build_one(self, env_fn: EnvFn) -> Any:
        env = env_fn()
        self._envs.append(env)
        return env

    def _ask(self, number: int, message: Message) -> Any:
        """Have the host execute a message; return its answer, which may be a ``Failure``."""
        HEAD.pack_into(self._segment.banks[number & 1].view, 0, MESSAGE, 0, 0, 0, 0, number & U32, 0)
        self._segment.write_request_mail(number, pack_message(message))
        self._host.handle(number)
        return pickle.loads(self._segment.read_reply_mail(number))

    def build(self) -> None:
        """Build the envs, as a worker does. Raises :class:`EnvRaised`."""
        os.environ.update(worker_environment())
        build = replace(self._report.build, env_fns=b"", snapshots=-1, replacement=False)
        answer = self._ask(-1, build)
        if isinstance(answer, Failure):
            raise EnvRaised(f"env_fn raised {answer.type_name}: {answer.text}", answer)
        self._description = answer
        if self._report.layout not in (None, self._segment.layout):
            raise ReportError(
                f"{self._report.path}: the env that was built has other spaces than the one that was lost; "
                "is it the same env?"
            )

    def run(self) -> list[str]:
        """Run all requests but the fatal one; return a line for each env that does not answer as recorded."""
        answer = self._ask(-1, self._replay)
        if isinstance(answer, Failure):
            raise ReportError(f"{self._report.path}: where its journal begins cannot be had: {answer.text}")
        found = differences(self._replay.entries, answer, self._segment.layout, exact=self._exact)
        return [f"env {slot}: {what}" for slot, what in found.items()]

    # --- the fatal request ------------------------------------------------------------------------

    @property
    def _action(self) -> Any:
        if self._fatal is None or not self._fatal.is_step:
            return None
        try:
            return action_of(self._fatal, self._segment.layout, self._description, exact=self._exact)
        except Exception as error:  # damage has many faces
            raise ReportError(
                f"{self._report.path}: the action that was fatal cannot be read: {type(error).__name__}: {error}."
            ) from error

    def request(self) -> str:
        """Return the fatal request and its place in the episode, in words; ``""`` if no request was pending."""
        loss, fatal = self._report.loss, self._fatal
        if fatal is None:
            return ""
        if fatal.is_step:
            what = f"step({self._action!r})"
        else:
            what = f"{loss.get('command')}: {message_of(fatal.stretch[0], fatal.request_mail)!r:.500}"
        after = "" if loss.get("step") is None else f", after {loss['step']} steps of its episode"
        return f"{what}{after}" + ("" if loss.get("seed") is None else f", last seed {loss['seed']}")

    def run_fatal(self) -> None:
        """Run the request that the process was lost in; if the fault happens again, it ends this process.

        Raises:
            EnvRaised: The env raised.
        """
        fatal, segment = self._fatal, self._segment
        assert fatal is not None
        with self._bounded():
            # The number leaves the bank of the fatal request alone.
            self._ask(~fatal.number, Replay(fatal.packed()))
        kind = segment.banks[fatal.number & 1].view[2]
        failures: dict[int, Failure] = {}
        if kind == FAILED:
            failures = {0: pickle.loads(segment.read_reply_mail(fatal.number))}
        elif kind == STEPPED and not self._exact:
            _, extras = mail_of(segment, fatal.number)
            failures = unpack_extras(extras)[0].failures
        for slot, failure in failures.items():
            who = "it" if self._exact else f"env {slot}"
            raise EnvRaised(f"{who} raised {failure.type_name}: {failure.text}", failure)

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[None]:
        """Print the stack and end this process if a request that hung hangs again; this works without the GIL."""
        deadline = self._report.deadline
        if self._report.loss.get("cause") == "hung" and deadline is not None:
            faulthandler.dump_traceback_later(2 * deadline + 1, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def stop(self) -> None:
        """Stop in a debugger with ``env`` and ``action`` at hand."""
        env, action = self._envs[0] if self._exact else self._envs, self._action
        pdb.Pdb().set_trace(sys._getframe())
        del env, action  # the debugger stands here: `env.step(action)` is what comes next

    def close(self) -> None:
        """Close the envs."""
        self._host.close_envs()
