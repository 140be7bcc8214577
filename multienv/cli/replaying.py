"""Run the journal of a crash report again, in this very process, by the host that a worker runs."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pdb
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from multienv.cli.env_functions import EnvFn
from multienv.errors import ReportError
from multienv.processes.environment import worker_environment
from multienv.recovery.journal import Journal, Plan
from multienv.recovery.verification import differences
from multienv.reports.crash import action_of
from multienv.reports.read import Report
from multienv.wire.actions import PICKLED
from multienv.wire.banks import (
    ABSENT,
    FAILED,
    HEAD,
    IRREGULAR,
    MESSAGE,
    STEP,
    STEPPED,
    Entry,
    entry_of,
    split_entries,
)
from multienv.wire.codecs import Codec, ExactCodec, codec_of, mail_of
from multienv.wire.infos import unpack_extras
from multienv.wire.messages import Build, Description, Failure, Message, Replay, Reset, pack_message
from multienv.wire.segment import Segment
from multienv.worker.host import Host

_TRUST = (
    "is known as a pickle only. To load a pickle is to run whatever code it asks for: if you know who wrote this "
    "report, give --trust."
)


@dataclass(frozen=True)
class Outcome:
    """Tells what the fatal request came to, where the process outlived it.

    Attributes:
        text: In words.
        failure: The exception, where it raised one.
    """

    text: str
    failure: Failure | None = None


class Rerun:
    """Runs the requests of a report.

    Args:
        report: The report.
        env_fns: What builds the env of each slot.

    Attributes:
        envs: Once they are built.
        fatal: The request the process was lost in; ``None``: the envs were being built, or nothing was asked.
        was_building: The envs were being built.
        length: How many requests come before the fatal one.
        differences: Where the answers were others than recorded, in words.
        unknown: How many answers could be compared in part only, because they were pickled.
        observation: The last one.

    Raises:
        ReportError: There is no journal, or it cannot be replayed without trust.
    """

    def __init__(self, report: Report, env_fns: Sequence[EnvFn]) -> None:
        self.envs: list[Any] = []
        self.observation: Any = None
        self.differences: list[str] = []
        self.unknown = 0
        self.fatal = report.pending
        self.was_building = report.document["loss"].get("command") == "initialize"
        self._report, self._is_trusted = report, report.build is not None
        self._plan = Plan(b"") if self.was_building else _plan_of(report)
        end = 0 if report.layout is None else report.layout.end
        self._before = list(split_entries(self._plan.entries, end))
        self.length = len(self._before)
        total = 0 if report.journal is None else report.document["journal"]["requests"]
        self._mails = self._allowed_mails(total - self.length)
        self._exact: bool = report.document["build"]["exact"]
        self._segment = Segment(-1)
        self._codec: Codec | None = None
        self._description: Description | None = None
        self._host = Host(self._segment, env_fns=[partial(self._build_one, env_fn) for env_fn in env_fns])

    def _build_one(self, env_fn: EnvFn) -> Any:
        env = env_fn()
        self.envs.append(env)
        return env

    def _allowed_mails(self, first: int) -> list[bytes]:
        """Return the mail of each request; without trust resets are pickled anew and any other pickle is refused."""
        requests = self._before if self.fatal is None else [*self._before, self.fatal]
        if self._is_trusted:
            return [entry.request_mail for entry in requests]
        if self._plan.generators or self._plan.state or self._plan.lasting:
            raise ReportError(f"{self._report.path}: where its journal begins {_TRUST}")
        mails = []
        for index, entry in enumerate(requests):
            kind, tag = entry.stretch[:2]
            reset = self._report.resets.get(first + index)
            if kind == MESSAGE and reset is not None:
                mails.append(pack_message(reset))
            elif kind == STEP and tag & ~ABSENT != PICKLED:
                mails.append(b"")
            else:
                raise ReportError(f"{self._report.path}: request {index + 1} {_TRUST}")
        return mails

    # --- running ----------------------------------------------------------------------------------

    def build(self) -> Outcome:
        """Build the envs, as a worker does; the outcome has a failure if they cannot be built."""
        told = self._report.document["build"]
        if self._report.build is not None:
            message = replace(self._report.build, env_fns=b"", snapshots=-1, replacement=False)
        else:
            if told["own_space"]:
                raise ReportError(f"{self._report.path}: the observation space of the batch {_TRUST}")
            seeds = told["seeds"] and (told["seeds"][0], told["seeds"][1])
            message = Build(
                env_fns=b"",
                exact=self._exact,
                autoreset=told["autoreset"],
                seeds=seeds,
                draws=tuple(told["draws"]),
                setting=None,
                truncates_errors=told["truncates_errors"],
            )
        os.environ.update(worker_environment())
        bank = self._segment.banks[1]
        self._ask(-1, message)
        answer = pickle.loads(self._segment.read_reply_mail(-1))
        if bank.view[2] == FAILED:
            return Outcome(f"env_fn raised {answer.type_name}: {answer.text}", answer)
        self._description = answer
        self._codec = codec_of(answer, self._exact, message.space)
        if self._report.layout not in (None, self._segment.layout):
            raise ReportError(
                f"{self._report.path}: the env that was built has other spaces than the one that was lost; "
                "is it the same env?"
            )
        return Outcome("the env was built")

    def run(self) -> Iterator[int]:
        """Run all requests but the fatal one; yield how many have been run."""
        plan, step = self._plan, 0
        if plan.generators or plan.state or plan.lasting:
            self._ask(-2, Replay(b"", plan.state, plan.generators, plan.lasting))
        for place, entry in enumerate(self._before):
            came = self._again(entry, self._mails[place])
            step = step + 1 if entry.is_step else 0 if self._is_reset(self._mails[place]) else step
            told = self._difference(entry, came)
            if told:
                self.differences.append(f"{told} at request {place + 1} of {self.length} (step {step} of its episode)")
            yield place + 1

    def _is_reset(self, mail: bytes) -> bool:
        return isinstance(pickle.loads(mail), Reset)

    def _ask(self, number: int, message: Message) -> None:
        HEAD.pack_into(self._segment.banks[number & 1].view, 0, MESSAGE, 0, 0, 0, 0, number & 0xFFFFFFFF, 0)
        self._segment.write_request_mail(number, pack_message(message))
        self._host.handle(number)

    def _again(self, entry: Entry, mail: bytes) -> Entry:
        """Execute the request of a journal entry; return the entry that comes of it."""
        number, segment = entry.number, self._segment
        bank = segment.banks[number & 1]
        request = bank.layout.rewards
        bank.view[:request] = entry.stretch[:request]
        HEAD.pack_into(bank.view, 0, entry.stretch[0], entry.stretch[1], STEPPED, 0, 0, number, 0)
        segment.write_request_mail(number, mail)
        segment.write_reply_mail(number, b"")
        self._host.handle(number)
        evidence = mail_of(segment, number)[0] if bank.view[3] & IRREGULAR else b""
        if bank.view[2] == STEPPED:
            self.observation = self._observation(number, evidence)
        (came,) = split_entries(entry_of(bank, entry.request_mail, evidence, exact=self._exact), bank.layout.end)
        return came

    def _observation(self, number: int, evidence: bytes) -> Any:
        if isinstance(self._codec, ExactCodec):
            return self._codec.transition(self._segment, number, evidence)[0]
        if evidence:
            return [pickle.loads(one) for one in pickle.loads(evidence)]
        assert self._codec is not None
        leaves = [leaf.copy() for leaf in self._codec.rows(self._segment, number).leaves]
        return leaves[0] if len(leaves) == 1 else leaves

    def _difference(self, recorded: Entry, came: Entry) -> str:
        if recorded == came:
            return ""
        if not self._is_trusted and recorded.evidence != came.evidence:
            # Equal values do not always pickle to equal bytes, and these must not be unpickled.
            self.unknown += 1
            recorded, came = replace(recorded, evidence=b""), replace(came, evidence=b"")
        found = differences(recorded.packed(), came.packed(), self._segment.layout, exact=self._exact)
        for slot, text in found.items():
            what = text.partition(" at request")[0]
            return what if self._exact else f"env {slot}: {what}"
        return ""

    # --- the fatal request ------------------------------------------------------------------------

    @property
    def action(self) -> Any:
        """The action of the fatal request; ``None`` if that is not a step."""
        if self.fatal is None or not self.fatal.is_step or self._description is None:
            return None
        return action_of(self.fatal, self._segment.layout, self._description, exact=self._exact)

    @property
    def request(self) -> str:
        """The fatal request, and where it came, in words."""
        loss = self._report.document["loss"]
        if self.fatal is None:
            return "building the env" if self.was_building else "nothing was asked"
        if self.fatal.is_step:
            what = f"step({self.action!r})"
        else:
            what = f"{loss.get('command')}: {pickle.loads(self._mails[-1])!r:.500}"
        after = "" if loss.get("step") is None else f", after {loss['step']} steps of its episode"
        return f"{what}{after}" + ("" if loss.get("seed") is None else f", last seed {loss['seed']}")

    def run_fatal(self) -> Outcome:
        """Run the request that the process was lost in; if the fault comes again, this is the end of this process."""
        assert self.fatal is not None
        number = self.fatal.number
        with self._bounded():
            came = self._again(self.fatal, self._mails[-1])
        kind = came.stretch[2]
        if kind == FAILED:
            failure = pickle.loads(self._segment.read_reply_mail(number))
            return Outcome(f"it raised {failure.type_name}: {failure.text}", failure)
        if kind != STEPPED:
            return Outcome("it returned")
        for slot, failure in unpack_extras(mail_of(self._segment, number)[1])[0].failures.items():
            return Outcome(f"env {slot} raised {failure.type_name}: {failure.text}", failure)
        if isinstance(self._codec, ExactCodec):
            return Outcome(
                f"it returned, with reward {self._codec.transition(self._segment, number, came.evidence)[1]!r}"
            )
        return Outcome(f"it returned, with rewards {self._segment.banks[number & 1].rewards.tolist()}")

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[None]:
        """End this process with its stack told if a request that hung hangs again; needs no interpreter."""
        document = self._report.document
        deadline = document["request"].get("deadline")
        hung = document["loss"].get("cause") == "hung" and isinstance(deadline, int | float)
        if hung:
            faulthandler.dump_traceback_later(2 * deadline + 1, exit=True)
        try:
            yield
        finally:
            if hung:
                faulthandler.cancel_dump_traceback_later()

    def stop(self) -> None:
        """Stop in a debugger with ``env``, ``action`` and ``observation`` at hand."""
        env, action, observation = self.envs[0] if self._exact else self.envs, self.action, self.observation
        pdb.Pdb().set_trace(sys._getframe())
        del env, action, observation  # the debugger stands here: `env.step(action)` is what comes next

    def close(self) -> None:
        """Close the envs."""
        self._host.close_envs()


def _plan_of(report: Report) -> Plan:
    """Return the replay that reaches back furthest."""
    if report.journal is None:
        if report.pending is None:
            return Plan(b"")
        raise ReportError(
            f"{report.path} holds no journal to be replayed: the RestartPolicy's journal_limit is 0, or too many "
            "workers were lost at once."
        )
    journal = Journal(recording=True)
    journal.load(report.journal)
    plans = journal.plans()
    if not plans:
        raise ReportError(
            f"{report.path} holds no journal that can be replayed: it has outgrown the RestartPolicy's journal_limit "
            "or replay_limit, and begins where no replay can begin."
        )
    return plans[0]
