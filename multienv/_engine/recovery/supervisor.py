"""Keeps the envs of one worker alive: what is sent, what is answered, and what happens when the process is lost.

A plain step does not come here, not even that of a single env: the module ``hot_path`` sends and commits it. Any other:
``send_step`` sends it, ``collect`` waits for its reply, and ``_commit`` stores answer and state in one assignment.

A death: a wait raises ``Gone``. The hot path leaves it to ``collect``, where ``_do_ask`` meets it again, and
``_handle_loss`` asks the module ``state_machine`` what follows. ``_do_recover`` has the envs brought back, from one of
the sources that ``way_back`` lists, and verified; ``take_over`` makes their process the worker's. ``_do_ask`` sends the
request again, without the slots that are truncated, and ``_commit_reply`` commits.

**Interruptions.** Ctrl-C is raised in a wait, or at the end of the call (``interrupts``): the next call collects the
answer. If another signal handler raises, anywhere, the process is lost (``mark_lost``), and recovered like others.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gymnasium.error import NoAsyncCallError

from multienv._engine import interrupts
from multienv._engine.processes.channel import Channel, Gone, SystemErrors
from multienv._engine.processes.endings import SOON, Closing, let_go
from multienv._engine.recovery import checkpoint, hot_path
from multienv._engine.recovery.answers import Answers, Reply
from multienv._engine.recovery.hot_path import MISSING, SAMPLE, buffers_of, collect_plain, send_plain, set_plain_reset
from multienv._engine.recovery.journal import Journal
from multienv._engine.recovery.loss_recovery import LossRecovery
from multienv._engine.recovery.maintenance import Maintenance, Replacement
from multienv._engine.recovery.pending import Pending, RequestDeadlines, request_of
from multienv._engine.recovery.position import Position, ReplayPoints
from multienv._engine.recovery.recoverer import (
    BudgetSpentError,
    Launcher,
    Recoverer,
    RequestFailedError,
    Revived,
    Unrecoverable,
)
from multienv._engine.recovery.reporter import Reporter
from multienv._engine.recovery.rollouts import RolloutReader
from multienv._engine.recovery.state_machine import (
    PLAIN_PENDING,
    STEPPING,
    STEPPING_ASYNC,
    Asked,
    BudgetSpent,
    BuildFailed,
    Built,
    Closed,
    Discarded,
    Episode,
    Event,
    Instruction,
    Interrupted,
    Kind,
    Launched,
    Process,
    RecoveryDue,
    Replied,
    Request,
    Rules,
    State,
    decide,
    instruction_of,
    name_of,
    refusal,
    slots_beginning,
)
from multienv._engine.recovery.way_back import NewEnvs, sources_of_new_envs
from multienv._engine.sometimes import sometimes
from multienv._engine.threads import Lock
from multienv._engine.wire.codecs import Codec
from multienv._engine.wire.messages import (
    PLAIN_RESET,
    Build,
    Close,
    Description,
    GetGenerators,
    KeepSnapshot,
    Message,
    Reset,
    Rollout,
    pack_message,
)
from multienv._engine.wire.segment import ASKED_OUTSIDE, REQUEST
from multienv._engine.worker.replay_points import LARGE_SHARE, SHARE
from multienv.config import Deadlines, RestartPolicy, check_seconds
from multienv.errors import ClosedError, MultienvError, UsageError, WaitTimeout
from multienv.events import Hook, Statistics

logger = logging.getLogger("multienv")

# Seconds that a request of our own between two of the caller's may last; a fork of a large process takes some of them.
ASIDE = 30.0
_INTERRUPTED = "it was ended, because an exception of a signal handler struck in a call that had asked it"
# Instructions that block for long: a caller that has other workers to wait for leaves them to a thread.
_LONG = (Instruction.LAUNCH, Instruction.AWAIT_BUILD, Instruction.RECOVER)
_RAISED = (Instruction.RAISE_LOST, Instruction.RAISE_POISON, Instruction.RAISE_BUDGET)

# All there are in this process.
_supervisors: weakref.WeakSet[Supervisor] = weakref.WeakSet()


def _refuse_in_child() -> None:
    """In a forked child of the trainer: no step gets past the first branch, which says whose the env is."""
    for supervisor in list(_supervisors):
        supervisor._is_foreign = True
        supervisor._commit(Closed())


os.register_at_fork(after_in_child=_refuse_in_child)


def abandon_all(workers: Iterable[Supervisor]) -> None:
    """Release workers that nobody refers to any more; their envs are closed, but not waited for. For finalizers."""
    let_go([channel for channel in [worker.abandon() for worker in workers] if channel is not None])


class Supervisor:
    """Keeps the envs of one worker alive.

    Args:
        launcher: Where processes come from.
        build: The request that builds the envs.
        policy, deadlines: What happens when a process is lost, and when it counts as hung.
        index: Env index of the first env in its batch, or ``None``.
        hooks: Called with each event by ``reporter.call_hooks()``: the env classes do so when their own call is done.
        reports: Where crash reports are written; ``None``: nowhere.

    Attributes:
        state: What the worker is doing.
        position: All that the caller has seen of the worker.
        last_answer: Of the last request, until the next one is collected; an exception if it is one to raise.
        core: The core it should run on, or ``None``.
        lock: Held by whatever reads and changes the state.
        buffers: What the hot path touches of the present process; ``None``: there is none.
        asked_by: A weak reference to the fan-out that sent the last request; several may ask one worker in turn.
        channel: To the present process, or to the last one that was lost.
        loss_recovery: The loss whose envs are being recovered; ``None``: there is none.
        reporter: Counts and reports what happens to the envs.
        on_spaces: A weak reference to what is called with the spaces that a single env has set in its reset.
        seeds: What holds the seeds of the worker's processes while it lives; ``None``: nothing does.
        closing: Ends the process by plan.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "answers",
        "asked_by",
        "buffers",
        "last_answer",
        "lock",
        "maintenance",
        "pending",
        "position",
        "state",
    )  # the hot path reads these, native code by offset

    def __init__(
        self,
        launcher: Launcher,
        build: Build,
        *,
        policy: RestartPolicy,
        deadlines: Deadlines,
        index: int | None = None,
        hooks: tuple[Hook, ...] = (),
        reports: Path | None = None,
    ) -> None:
        self.state = State()
        self.last_answer: Any = None
        self.core: int | None = None
        self.asked_by: Any = None
        self.seeds: Any = None
        self.on_spaces: Callable[[], Callable[[tuple[Any, Any]], object] | None] = lambda: None
        self._sharing = 0  # workers on its core; 0: it does not spin
        self.policy, self.deadlines = policy, deadlines
        self._owner = os.getpid()
        self._is_foreign = False  # this process was forked from the trainer that owns the worker
        self.lock = Lock()
        self._closed = False  # not an Event: an interruption inside set() would leave its lock held for ever
        resets_itself = build.autoreset in ("NEXT_STEP", "SAME_STEP")
        recording = policy.replays or (reports is not None and policy.journal_limit > 0)
        journal = Journal(recording=recording, policy=policy)
        share = 0.0 if not recording else LARGE_SHARE if policy.recycles else SHARE
        self.position = Position(replace(build, replay_point_share=share), journal)
        self.reporter = Reporter(self.position, index, hooks, reports)
        self._envs = self.reporter.env_in(-1)
        self.maintenance = Maintenance(policy, self.position, resets_itself=resets_itself)
        limits = RequestDeadlines(deadlines, resets_in_steps=resets_itself)
        self.pending = Pending(self.position, self.reporter.env_in, limits, replays=policy.on_timeout == "replay")
        self.recoverer = Recoverer(launcher, policy, deadlines, journal, self.reporter.log_doing, self.reporter.env_in)
        self.closing = Closing(partial(self.recoverer.send, message=Close()), deadlines.close)
        self.channel: Channel | None = None
        self.loss_recovery: LossRecovery | None = None
        self._build_number = 0  # number of the request that builds the envs for the first time
        self._long_past = False  # the process has repeated more of the past than a recovery has to
        self._why_lost = ""  # the process was ended to be replaced, and no new one could be had
        self.rules = Rules(resets_itself=resets_itself, on_crash=policy.on_crash, on_timeout=policy.on_timeout)
        self.codec: Codec | None = None
        self.answers: Any = None  # Answers
        self._rollout_reader: RolloutReader | None = None  # made when it is first needed
        self._kept = checkpoint.KeptSnapshots(self.recoverer.free)
        self.segment: Any = None  # of the present process, as the buffers
        self.buffers: Any = None  # StepBuffers
        _supervisors.add(self)

    def share_knowledge(self, other: Supervisor) -> None:
        """Share with the first worker of the batch what is known of the env: memory across resets, code, losses."""
        self.position.journal.memory = other.position.journal.memory
        self.recoverer.code, self.recoverer.losses = other.recoverer.code, other.recoverer.losses

    # --- start ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Launch the process, which builds the envs; does not wait. Again does nothing."""
        with self.lock:
            self._refuse_if_unusable("start")
            if self.state.process is Process.NONE and self.codec is None:
                interrupts.users.add(self)
                interrupts.take_over()
                self._launch()

    def initialize(self, timeout: float | None = None) -> Description:
        """Wait until the envs are built; start first if need be. Again does nothing."""
        with self.lock:
            self._refuse_if_unusable("initialize")
            if self.codec is None:
                check_seconds("timeout", timeout, zero=True)
                self.start()
                self._run_until_answered(timeout, recover=True)
            assert self.recoverer.description is not None
            return self.recoverer.description

    def _launch(self) -> Instruction:
        """Launch the first process, which builds the envs; one that replaces a lost one is charged to the budget."""
        loss_recovery = self.loss_recovery
        progress = self.recoverer.new_progress(planned=True) if loss_recovery is None else loss_recovery.progress
        try:
            self.recoverer.charge_budget(progress, self.position.steps)
            self.channel, self._build_number = self.recoverer.launch(self.position.build, progress)
        except (BudgetSpentError, Unrecoverable):
            self._refuse_if_unusable("initialize")
            return self._commit_budget_spent()
        self.recoverer.mark_owned()
        self.pending.set_deadline(self.deadlines.start)
        return self._commit(Launched())

    # --- requests ---------------------------------------------------------------------------------

    def send_step(self, action: Any, waits: bool = True, touched: tuple[bool, ...] | None = None) -> None:
        """Send a step; does not block.

        Args:
            action: Of the action space; of several envs the batch of their actions.
            waits: The caller collects the answer in the same call.
            touched: Which of several envs are stepped; ``None``: all.
        """
        with self.lock:
            state = STEPPING if waits else STEPPING_ASYNC
            if touched is not None or not send_plain((self,), (0,), 0, (action,), state, self.asked_by):
                self._send_any_step(action, waits, touched)

    def _send_any_step(self, action: Any, waits: bool, touched: tuple[bool, ...] | None) -> None:
        """Send a step that the hot path has left: something else is to be done first, or some envs are left alone."""
        self.check("step", Kind.STEP)
        if self.maintenance.is_due:
            self._replace_if_due(resetting=False)
        number = self.position.number + 1
        if self.state.process is Process.READY:
            self._make_buffers()
            self.buffers.encode(number, action)
            self.pending.set_step()
        else:
            assert self.codec is not None
            self.pending.set_step_without_process(number, action, self.codec)
        if self._commit(Asked(Request(Kind.STEP, "step", waits, touched))) is Instruction.ASK:
            self._publish()

    def send(self, name: str, message: Message, waits: bool = True) -> None:
        """Send a request that is not a step; a lost process is not waited for here.

        Args:
            name: What the caller called, for messages.
            message: The request.
            waits: The caller collects the answer in the same call.
        """
        with self.lock:
            if message is PLAIN_RESET and self.state.episode is Episode.ENDED and set_plain_reset(self, waits):
                self._publish()
                return
            request = request_of(name, message, waits)
            self.check(name, request.kind)
            is_reset = request.kind is Kind.RESET
            resets_all = is_reset and request.touched is None
            if is_reset and self.maintenance.recycling.wanted and self.state.process is Process.READY:
                self.apply_limits(resetting=resets_all)
            if self.maintenance.is_due or (resets_all and self.maintenance.why_recycle):
                self._replace_if_due(resetting=resets_all)
            if isinstance(message, Reset):
                self.reporter.seeds_asked = message.seeds
            if isinstance(message, Rollout):
                message = replace(message, shown=self.position.shown(self.segment))
            payload = b"" if message is PLAIN_RESET else pack_message(message, name)
            self.pending.set_request(message, payload, self.pending.limit_of(request.kind, request.steps))
            if self._commit(Asked(request)) is Instruction.ASK:
                self._publish()

    def _make_buffers(self) -> None:
        """Make what the hot path touches of the present process, for the first request to it."""
        if self.buffers is None:
            self.buffers = buffers_of(self)

    def _publish(self) -> None:
        self._make_buffers()
        assert self.channel is not None
        self.pending.publish(self.channel, self.position.number + 1, self.state, self._slots_beginning(self.state))

    def _slots_beginning(self, state: State) -> tuple[int, ...]:
        """Return the slots that begin their next episode in the pending step, which they take no other part in."""
        return slots_beginning(state, self.position.ended(self.segment), self.rules) if state.skipped else ()

    # --- answers ----------------------------------------------------------------------------------

    def collect(self, timeout: float | None = None, recover: bool = True) -> Any:
        """Wait for the answer to the pending request and return it; see the module ``answers`` for what it is.

        Args:
            timeout: Seconds to wait for the process.
            recover: Recover the envs of a lost process in this call; else :class:`RecoveryDue` is raised.

        Raises:
            WaitTimeout: The answer is not there within ``timeout``; the request stays pending.
            EnvError: The env of a worker with one env raised.
            WorkerLostError: The process was lost, and the policy says ``"raise"``, or its budget is spent.
        """
        with self.lock:
            found: list[Any] = [MISSING]
            if timeout is None and self.state in PLAIN_PENDING and not collect_plain((self,), (0,), found, self.state):
                return found[0]
            return self._run_until_answered(timeout, recover)

    def collect_again(self) -> Any:
        """Return the answer to the pending request; if none is pending, return the last answer again."""
        with self.lock:
            if self.state.request is not None:
                return self.collect()
            self._refuse_if_unusable("collect")
            if isinstance(self.last_answer, BaseException):
                raise self.last_answer
            return self.last_answer

    def wait_plain(self, number: int, until: float | None) -> bool:
        """Wait for the reply to a step or a plain reset, for the hot path; tell whether it is there.

        False also means that the process has ended: :meth:`collect` waits once more, finds that again, and handles the
        loss. With ``until`` nothing is done about the deadline of the request, either.
        """
        if until is not None and time.monotonic() >= until:
            return False
        if self.channel is None or self.segment.words[REQUEST] != number:  # recovered, and not asked again yet
            return False
        try:
            return self._wait(number, until, ends_overdue=until is None)
        except Gone:
            return False

    def with_infos(self, number: int) -> Any:
        """Return the plain answer with pickled infos; ``None`` if they cannot be read, which the slow path tells of."""
        return self.answers.answer_with_pickled_infos(self.segment, number)

    def _wait(self, number: int, until: float | None, *, ends_overdue: bool = True) -> bool:
        channel = self.channel
        assert channel is not None
        try:
            if not ends_overdue:
                return channel.wait(number, until)
            brief = self.pending.brief_wait(self.state.request, number) if until is None else 0.0
            if brief and channel.wait(number, time.monotonic() + brief):
                return True
            return self.pending.await_reply(channel, number, until, self.state.request)
        except BaseException:
            if self._closed:  # by a signal handler above this call, which has left the rest to it
                self._release()
            raise

    def record_time(self) -> None:
        """Record how long the pending request took, when a wait for it has ended, to find deadlines by that."""
        if self.segment is not None:
            self.pending.record_time(self.segment, self.state.request)

    def wait_target(self) -> tuple[Channel, int, float] | None:
        """Return what to wait for: channel, number of the request, and when ``collect()`` has something to do anyway.

        ``None``: it has now. Does not wait.
        """
        with self.lock:
            instruction, channel = instruction_of(self.state, self.rules), self.channel
            if channel is None or instruction not in (Instruction.ASK, Instruction.AWAIT_BUILD):
                return None
            number = self.position.number + 1 if instruction is Instruction.ASK else self._build_number
            self.pending.set_found_deadline(self.state.request)
            return channel, number, self.pending.due(channel, number, self.state.request)

    def set_deadline(self, seconds: float) -> None:
        """Set the deadline of the pending request: so many seconds from now, and so many in each further process."""
        with self.lock:
            self.pending.set_deadline(seconds, self.position.number + 1)

    # --- carrying out -----------------------------------------------------------------------------

    def _run_until_answered(self, timeout: float | None, recover: bool) -> Any:
        """Carry out one instruction after the other until there is an answer, and return or raise it."""
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
        self._refuse_if_unusable("collect")
        until = None if timeout is None else time.monotonic() + timeout
        instruction, request = instruction_of(self.state, self.rules), self.state.request
        if instruction is Instruction.NOTHING and self.codec is None:
            instruction = Instruction.LAUNCH  # initialize() whose first process was lost
        elif instruction is Instruction.NOTHING:
            raise NoAsyncCallError("There is no request whose answer could be collected.", "collect")
        while instruction not in (Instruction.DELIVER, Instruction.NOTHING):
            if instruction in _LONG and not recover:
                raise RecoveryDue
            if instruction in _RAISED:
                if instruction is Instruction.RAISE_POISON and request is not None and request.kind is Kind.RESET:
                    self._discard()  # it may end every process in which the env is as it was
                break
            instruction = self._methods[instruction](self, until)
            self._refuse_if_unusable("collect")
        if instruction is Instruction.NOTHING:
            return None
        self.loss_recovery = None
        if isinstance(self.last_answer, BaseException):
            raise self.last_answer
        return self.last_answer

    def _do_launch(self, until: float | None) -> Instruction:
        """Launch the first process, or begin a new life of envs that cannot be recovered."""
        if self.codec is None:
            return self._launch()
        journal, build = self.position.journal, self.position.build.with_new_seeds()
        self.position.build = build  # first: another try draws other numbers
        progress = self.recoverer.new_progress(planned=self.loss_recovery is None)
        try:
            revived = self.recoverer.bring_back(build, sources_of_new_envs(journal), progress)
        except Unrecoverable as why:
            self._refuse_if_unusable("collect")
            error = self.last_answer = self.reporter.build_error(str(why), why.failure)  # also for a caller in a thread
            if self._commit(BuildFailed()) is Instruction.TRUNCATE:
                return Instruction.TRUNCATE
            self.position.number += 2
            raise error from error.__cause__ or why.with_traceback(None)  # what env_fn raised, if it did
        self.take_over(revived)
        return self._commit(Launched(), Built())

    def _do_await_build(self, until: float | None) -> Instruction:
        """Wait until the envs are built for the first time."""
        assert self.channel is not None
        error = None  # raised below: its traceback must not keep the segment mapped as long as the caller keeps it
        try:
            if not self._wait(self._build_number, until):
                raise WaitTimeout("initialize() has not answered in time. It is still running: wait again, or close().")
            self.recoverer.await_build(self.position.build, self.channel, self._build_number, self.pending.until)
        except Gone as gone:
            self._refuse_if_unusable("initialize")
            return self._handle_loss(gone)
        except RequestFailedError as failed:
            error = self.reporter.error_of(-1, failed.failure, "initialize")
        self._refuse_if_unusable("initialize")
        if error is not None:
            self._end_process()
            self._commit(BuildFailed())
            raise error
        if self.loss_recovery is not None:
            self.loss_recovery.report("exact")
            self.loss_recovery = None
        progress = self.recoverer.new_progress(planned=True)
        self.take_over(Revived(self.channel, NewEnvs(), self.position.build, {}, progress))
        return self._commit(Built())

    def _do_ask(self, until: float | None) -> Instruction:
        """Publish the request, unless this process has it already, and wait for its answer."""
        number, state = self.position.number + 1, self.state
        try:
            self._publish()
            if until is None and state.steps_all_slots and not collect_plain((self,), (0,), [MISSING], state):
                return Instruction.DELIVER  # as if no process had been lost
            if not self._wait(number, until):
                raise WaitTimeout(
                    f"{self.state.command}() has not answered in time. It is still running: wait again, or close()."
                )
            self._commit_reply(number)
        except Gone as gone:  # wait_plain() has swallowed it there: the channel raises it again in each wait
            self._refuse_if_unusable("collect")
            return self._handle_loss(gone)
        return Instruction.DELIVER

    def _handle_loss(self, gone: Gone) -> Instruction:
        """Commit the loss of the process, and report it; return what the policy says to do."""
        state, request, channel, number = self.state, self.state.request, self.channel, self.position.number + 1
        assert channel is not None
        if request is not None and request.is_single_step:
            self.pending.save_step(channel.segment, number)
        self.position.journal.drop_after(number - 1)
        earlier = self.loss_recovery.progress if self.loss_recovery is not None and state.losses else None
        parts = self.recoverer, self.reporter, self.pending, self.position
        self.loss_recovery = LossRecovery(gone, channel, state, earlier, *parts, long_past=self._long_past)
        instruction = self._commit(self.loss_recovery.event)
        if gone.cause == "hung" and request is not None:
            self.pending.lengthen_after_hang(request, number, gone.slot)
        if instruction is not Instruction.RECOVER:
            self._end_process()
            if instruction is not Instruction.LAUNCH or self.codec is not None:  # else the envs are not built yet
                self.loss_recovery.report_without_recovery(instruction, self.state, self._slots_beginning(self.state))
        return instruction

    def _do_recover(self, until: float | None) -> Instruction:
        """Recover the envs, or end their episodes."""
        loss_recovery = self.loss_recovery
        if loss_recovery is None:
            assert self.channel is not None
            gone = self.channel.kill(detail=_INTERRUPTED)
            gone.detail, self._why_lost = self._why_lost or gone.detail, ""
            return self._handle_loss(gone)
        try:
            found, event = loss_recovery.recover()
        except BudgetSpentError:
            return self._commit_budget_spent()
        self._refuse_if_unusable("collect")
        if found is None:
            self._end_process()  # there may be one that an earlier try has adopted
        else:
            self.take_over(found, long_past=self.position.journal.can_be_shorter(found.plan))
        before = self.state
        instruction = self._commit(event)
        beginning = self._slots_beginning(self.state)
        loss_recovery.report(*loss_recovery.outcome(event, instruction, before, self.state, beginning))
        return instruction

    def _commit_budget_spent(self) -> Instruction:
        """Commit that no restart is left, and report it."""
        assert self.loss_recovery is not None
        self.loss_recovery.report("raised", "the budget of restarts is spent")
        self._end_process()
        return self._commit(BudgetSpent())

    def _do_truncate(self, until: float | None) -> Instruction:
        """End all episodes without asking a process."""
        sometimes("a step is truncated without a process")
        assert self.state.request is not None
        answer = self.answers.truncation(self.segment, self.state.skipped)
        skipped, left_alone = dict(self.state.skipped), self.state.request.left_alone
        instruction = self._commit(Replied(ended=True), number=self.position.number + 2, answer=answer)
        self.position.count_truncation(skipped, left_alone)
        return instruction

    # Instruction → the method that carries it out; each returns the next instruction.
    _methods = {  # noqa: RUF012 - never written to
        Instruction.ASK: _do_ask,
        Instruction.LAUNCH: _do_launch,
        Instruction.AWAIT_BUILD: _do_await_build,
        Instruction.RECOVER: _do_recover,
        Instruction.TRUNCATE: _do_truncate,
    }

    # --- committing an answer ---------------------------------------------------------------------

    def _commit(self, *events: Event, number: int = 0, answer: Any = None, read: Reply | None = None) -> Instruction:
        """Commit the state after these events, with an answer that has this number, if there is one, all or nothing.

        An error for the caller is an answer, too. ``read``: what the answer has shown. Returns what to do next.
        """
        at, state, instruction = self.position, self.state, Instruction.NOTHING
        for event in events:
            state, instruction = decide(state, event, self.rules)
            self.reporter.transitions.append((event, state))
        if instruction in _RAISED:
            assert self.loss_recovery is not None
            number, answer = at.number + 2, self.loss_recovery.error(instruction, state, self.state.losses, self.policy)
        if not number:
            self.state = state
            return instruction
        seen, rows = (at.seen, at.pickled_rows) if read is None else (read.seen, read.pickled_rows)
        # This line calls nothing: a signal handler runs before it, or after it.
        self.last_answer, at.seen, at.pickled_rows, at.number, self.state = answer, seen, rows, number, state
        return instruction

    def _commit_reply(self, number: int) -> None:
        """Read, record, commit and count the reply to the pending request. Raises ``Gone`` if it cannot be decoded."""
        state, channel, position, loss_recovery = self.state, self.channel, self.position, self.loss_recovery
        request = state.request
        assert request is not None
        assert channel is not None
        if request.steps:
            self._commit_rollout(number)
            return
        lost = None if loss_recovery is None else partial(self.reporter.lost_error, loss_recovery.loss)
        is_step = request.kind is Kind.STEP
        message = None if is_step else self.pending.message
        payload = self.pending.payload_of(channel.segment, number, request)
        read = self.answers.read_reply(channel, number, state, message, payload, lost)
        if state.skipped and not position.build.verbatim and not read.failed:
            self.maintenance.mark_for_rebuild(state, position.ended(channel.segment))
        if read.entry:
            position.journal.record(number, read.entry, read.call)
        self._commit(Replied(ended=read.ended, failed=read.failed), number=read.last, answer=read.answer, read=read)
        if read.truncated_errors:
            self.reporter.report_truncated_errors(read.truncated_errors.items(), channel.pid)
        if is_step:
            position.count_step(read.answer, channel.segment, number, request.left_alone)
        elif isinstance(message, Reset) and not read.failed:
            position.count_reset(message.seed_by_slot, number)
        # Between other requests the numbers of steps may all be odd ones, and none the 64th.
        if not is_step or read.ended or not position.number & SAMPLE or self.answers.points_in == number:
            self.apply_limits(number)

    def _commit_rollout(self, number: int) -> None:
        """Read, record, commit and count the answer to a rollout. Raises ``Gone`` if it cannot be decoded."""
        channel, position, message = self.channel, self.position, self.pending.message
        assert channel is not None
        assert isinstance(message, Rollout)
        if self._rollout_reader is None:
            self._rollout_reader = RolloutReader(self.answers, position)
        reply = self._rollout_reader.read_reply(channel, number, message, self.state.skipped)
        position.journal.record_rollout(number, reply.entries)
        position.set_shown(channel.segment, reply.shown)
        channel.segment.banks[number & 1].skipped[:] = 0
        self._commit(Replied(ended=reply.is_over), number=position.seen, answer=reply.answer)
        self.reporter.report_truncated_errors(reply.truncated_errors, channel.pid)
        position.count_rollout(reply.steps, reply.ends)
        self.apply_limits(number, reply.replay_points)

    def count_plain(self, answer: Any, number: int, meaning: int) -> None:
        """Count a plain answer, if there is more to count than a step, and see what is due."""
        if meaning == hot_path.BEGINS:  # a single env was reset
            self.position.count_reset({0: None}, number)
        else:
            self.position.count_step(answer, self.segment, number)
        if not number & SAMPLE or self.answers.points_in == number or self.maintenance.recycling.wanted:
            self.apply_limits(number)

    # --- the present process ----------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Lay out what depends on the envs, once they are known."""
        codec, description = self.recoverer.codec, self.recoverer.description
        assert codec is not None
        assert description is not None
        self.position.journal.lay_out(codec.layout.end, codec.slots, description.seconds)
        self.rules = replace(self.rules, slots=codec.slots)
        self.answers = Answers(
            codec,
            self.position,
            lambda slot, failure: self.reporter.error_of(slot, failure, self.state.command),
            self.reporter.truncation_info,
            self._set_spaces,
        )
        self.codec = self.reporter.codec = codec
        self.reporter.description = description

    def _set_spaces(self, spaces: bytes) -> None:
        """Show spaces that a single env has set, pickled; ``b""``: those that it was built with."""
        self.position.spaces, self.answers.codec.checks_actions = spaces, not spaces
        show = self.on_spaces()
        if show is not None:
            show(self.answers.spaces_in(spaces))

    def take_over(self, revived: Revived, *, long_past: bool = False) -> None:
        """Take over a process in which the envs are back, and end the one before. Every way back ends here."""
        if self.codec is None:
            self._lay_out()
        position, channel, old = self.position, revived.channel, self.channel
        code = self.recoverer.code.shared(channel.code) if channel.code else revived.build.code
        position.build = replace(revived.build, code=code)
        revived.trim_journal(position.journal, position.number)
        position.move_to(channel.segment, self.segment)
        self.answers.points_in, self._long_past = 0, long_past
        self.channel, self.segment, self.buffers = channel, channel.segment, None  # made for the first request
        self.recoverer.mark_owned()
        if self.maintenance.recycling.wanted or self.maintenance.needs_rebuild:  # else there is nothing to begin anew
            self.maintenance.restart_counts(revived.progress.replayed, is_over=self.is_between_episodes())
        channel.prefer(self.core, sharing=self._sharing)
        channel.envs, channel.patience = self._envs, self.deadlines.close
        if old is not None and old is not channel:
            old.kill()
            old.release()

    def prefer(self, core: int | None, *, sharing: int) -> None:
        """Bind the worker, and each process after it, to this core while steps are short."""
        self.core, self._sharing = core, sharing
        if self.channel is not None:
            self.channel.prefer(core, sharing=sharing)

    def _end_process(self) -> None:
        """End the process; its segment stays, with what the caller saw last."""
        if self.channel is not None:
            self.channel.kill()
            self.channel.release(keep_memory=True)

    def _discard(self) -> None:
        """End the process, and the episodes of its envs."""
        self._end_process()
        self.loss_recovery = None
        if self.state.process is not Process.NONE:
            self._commit(Discarded())

    def discard(self) -> None:
        """End the process, whatever state the envs are in: the next reset begins in a new one."""
        with self.lock:
            self.check("discard")
            self._discard()

    # --- by plan ----------------------------------------------------------------------------------

    def apply_limits(self, number: int = 0, points: ReplayPoints = (), *, resetting: bool = False) -> None:
        """Trim the journal, free dropped snapshots, and find out whether something is due before the next request.

        Args:
            number: Of the request that was answered now; 0: none.
            points: Resets where a replay can begin, of a rollout; the others are known.
            resetting: The next request resets all envs.
        """
        if self._kept.dropped:
            self._kept.free_dropped()
        channel, position = self.channel, self.position
        if channel is not None:
            self.recoverer.losses.seconds += position.count_time(channel.segment)
            self.recoverer.write_loss_interval(channel)
            position.record_replay_points(
                self.answers.points if number and self.answers.points_in == number else points
            )
            position.journal.apply_limits(position.seconds, channel.segment.words)
            if self.maintenance.recycling.wanted or self.maintenance.needs_rebuild:
                self.maintenance.update_due(channel, partial(self.may_build_new_envs, resetting=resetting))
            self.pending.find_deadlines()

    def may_build_new_envs(self, *, resetting: bool) -> bool:
        """Tell whether new envs may replace all; ``resetting``: the next request resets all."""
        return self.maintenance.takes_new_envs and (resetting or self.is_between_episodes())

    def is_between_episodes(self) -> bool:
        """Tell whether the episodes of all envs have ended, and none has begun since."""
        if self.position.build.verbatim:
            return self.state.episode is Episode.ENDED
        return bool(self.position.ended(self.segment).all())

    @interrupts.shielded
    def _replace(self, *, is_anew: bool) -> None:
        """Replace the process: with new envs if ``is_anew``, else if they can be replayed."""
        plan = Replacement(self.recoverer, self.position, self.maintenance, self.reporter, is_anew=is_anew)
        try:
            generators = self.ask_aside(GetGenerators(plan.new_slots)) if plan.new_slots else {}
        except (MultienvError, RequestFailedError) as error:
            if self.state.process in (Process.NONE, Process.CLOSED) and not self.state.pending_truncations:
                raise  # the policy says so; the caller's request has no envs to go to
            plan.report_lost(error)
            return
        before, channel = self.state, self.channel
        assert channel is not None
        has_asked = bool(channel.segment.words[ASKED_OUTSIDE])
        if plan.ends_first:
            self.mark_lost_meanwhile()
            self.closing.end(channel, self.closing.time()[1], keep_memory=True)
        try:
            revived = plan.bring_back(generators, has_asked=has_asked)
        except (Unrecoverable, OSError) as reason:
            if isinstance(reason, OSError) and reason.errno is None:  # a signal handler's
                raise
            self._refuse_if_unusable("step")
            self._why_lost = plan.put_off(reason)
            return
        self._refuse_if_unusable("step")
        self.mark_lost_meanwhile()
        self.take_over(revived)
        self.state = before
        plan.report(revived.source)

    def _replace_if_due(self, *, resetting: bool) -> None:
        """Replace the process if that is due; ``resetting``: the next request resets all envs."""
        maintenance = self.maintenance
        is_anew = self.may_build_new_envs(resetting=resetting)
        is_due = maintenance.why_recycle and (maintenance.is_due or is_anew)
        if self.state.process is Process.READY and (maintenance.needs_rebuild or is_due):
            self._replace(is_anew=is_anew)
        maintenance.is_due = False

    # --- states to come back to -------------------------------------------------------------------

    def snapshot(self) -> checkpoint.Snapshot:
        """Keep the envs as they are now, to come back to with :meth:`restore`, any number of times."""
        with self.lock:
            self.check("snapshot")
            token = self._kept.new_token()
            if self.state.process is Process.NONE:
                raise UsageError("snapshot(): the worker was lost. Call reset(): it starts a new one.")
            try:
                obstacle = self.ask_aside(KeepSnapshot(token, self.position.number))
                where = checkpoint.dump_position(self.position, self.state, self.segment)
                snapshot = checkpoint.Snapshot(token, where, self._kept, self.reporter.env_in(-1))
            except BaseException:
                sometimes("a snapshot is broken off while it is taken")
                if self.channel is not None:
                    self.channel.kill()  # else it might take the snapshot later
                self.recoverer.free(token)
                raise
            if obstacle:
                raise checkpoint.not_forked(obstacle)
            return snapshot

    def restore(self, snapshot: checkpoint.Snapshot) -> None:
        """Bring the envs back to where they were when this snapshot was taken. Raises UsageError, NotRestoredError."""
        with self.lock:
            self.check("restore")
            self._kept.check(snapshot)
            # First: else this process is the parent of the woken one, and the monitor does not see that one end.
            self._discard()
            self._return_to(snapshot.position, snapshot.token)

    def state_dict(self) -> dict[str, Any]:
        """Return what it takes to go on from here in another trainer: plain data. Raises UsageError."""
        with self.lock:
            self.check("state_dict")
            where = checkpoint.dump_position(self.position, self.state, self.segment)
            return checkpoint.pack_state(where, self.position.journal)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was called, in a new process. Raises UsageError, NotRestoredError."""
        with self.lock:
            self.check("load_state_dict")
            self._return_to(checkpoint.unpack_state(state, self.position.journal, self.rules.slots))

    def _return_to(self, where: Mapping[str, Any], token: int | None = None) -> None:
        """Go on where a worker stood; ``token``: of the process that was frozen there."""
        position = self.position
        revived = checkpoint.bring_back_to(self.recoverer, where, position, self.reporter, token)
        self._refuse_if_unusable("restore")
        self._discard()
        spaces = position.spaces
        position.load(where)
        self.take_over(revived)
        position.set_shown(revived.channel.segment, where["shown"])
        if position.spaces != spaces:
            self._set_spaces(position.spaces)
        self.state = checkpoint.state_at(where)

    @interrupts.shielded
    def ask_aside(self, message: Message) -> Any:
        """Return the answer to an internal request between two of the caller's.

        After a loss, the envs are recovered and the request is sent again.
        """
        while True:
            while self.state.process is Process.LOST:
                if self._do_recover(None) not in (Instruction.RECOVER, Instruction.NOTHING):
                    raise self.last_answer from None
            before, channel = self.state, self.channel
            assert channel is not None
            self.pending.set_request(message, b"", ASIDE)
            self.mark_lost_meanwhile()
            try:
                number = self.recoverer.send(channel, message)
                answer = self.recoverer.collect_answer(channel, number, self.pending.until)
            except Gone as gone:
                sometimes("a process is lost in a request of our own between two calls")
                instruction = self._handle_loss(gone)
                if instruction is not Instruction.RECOVER:
                    raise self.last_answer from None
            else:
                self.state = before
                return answer

    def mark_lost(self, *, keeps_request: bool) -> None:
        """Mark the process as lost if a request is pending; ``keeps_request``: see :class:`Interrupted`."""
        with self.lock:
            if self.state.request is not None:
                if self.state.process is Process.READY:  # else it is lost already, and its envs are recovered next
                    self.loss_recovery = None
                self._commit(Interrupted(keeps_request))

    def mark_lost_meanwhile(self) -> None:
        """Mark the process as lost until another state is committed: an exception in between leaves it so."""
        self.loss_recovery = None
        self.state = decide(self.state, Interrupted(), self.rules)[0]

    # --- wrong calls ------------------------------------------------------------------------------

    def _refuse_if_unusable(self, name: str) -> None:
        if self._is_foreign:
            raise UsageError(f"{name}(): this env belongs to process {self._owner}; make one in each process.")
        if self._closed:
            self._release()
            raise ClosedError(f"{'' if name == 'collect' else name + '(): '}This env has been closed. Make a new one.")

    def check(self, name: str, kind: Kind = Kind.CALL) -> None:
        """Raise what is wrong with calling ``name`` now, if anything is."""
        self._refuse_if_unusable(name)
        error = refusal(self.state, kind, name, is_built=self.codec is not None)
        if error is not None:
            raise error

    # --- the end ----------------------------------------------------------------------------------

    def close(self, patience: float | None = None) -> None:
        """End the process, by asking and then by force. Again does nothing. Never raises.

        From another thread, or a signal handler below a call of this very worker, the process is killed; the call that
        waits for it raises ClosedError and lets go of the rest.

        Args:
            patience: Seconds that the process is asked for at the most; ``Deadlines.close`` if that is less.
        """
        self._closed = True
        if self._is_foreign:
            self._release()
            return
        self.recoverer.close()
        limit, until = self.closing.time(patience)
        mine = self.lock._is_owned()  # type: ignore[attr-defined]
        try:
            if mine or not self.lock.acquire(blocking=False):
                channel = self.channel
                if channel is not None:
                    channel.kill()
                # Held by a call that sees the end of its process at once, unless this is a signal handler above it.
                if mine or not self.lock.acquire(timeout=min(limit, SOON)):
                    self.reporter.events.append((lambda _: self.close(0.0), None))  # when that call is done
                    return
            self._close_process(limit, until)  # again does nothing, unless it was interrupted
            self.reporter.log_rest()
            self._release()
        finally:
            if not mine:  # whether acquire() has returned cannot be known: an interruption may come right after it
                try:  # noqa: SIM105 - suppress() is written in Python, where another interruption could come in between
                    self.lock.release()
                except RuntimeError:
                    pass

    def _close_process(self, limit: float, until: float) -> None:
        """End a process by a request to close its envs, after the answer to the pending one; else kill it."""
        channel, state, number = self.channel, self.state, self.position.number + 1
        self._commit(Closed())
        if channel is None or state.process is Process.NONE:
            return
        try:
            is_idle = state.process is Process.READY and limit > 0
            if is_idle and state.request is not None:
                self.pending.publish(channel, number, state)  # again, if it was asked
                is_idle = self.closing.finish(channel, number, until)
            if is_idle:
                self.closing.end(channel, until)
            else:
                channel.kill()
        except Gone:
            channel.kill()
        except OSError:  # close() never raises; the monitor ends what is left
            logger.exception("close() could not end process %s", channel.pid)

    def abandon(self) -> Channel | None:
        """Release all without waiting; return the channel to the process, if there is one, for ``let_go()``."""
        if self._is_foreign:  # a forked child leaves the trainer's workers alone
            return None
        self._closed = True
        channel, self.channel = self.channel, None
        self._release()
        return channel

    def _release(self) -> None:
        """Release the process, snapshots, and what keeps memory mapped."""
        self._commit(Closed())
        self._kept.free_all()
        self.reporter.reports.drop()
        channel, self.seeds = self.channel, None
        self.channel = self.last_answer = self.segment = self.buffers = None
        with SystemErrors():
            if channel is not None:
                channel.release()
            self.recoverer.release()
        interrupts.users.discard(self)
        interrupts.put_back()

    def statistics(self) -> Statistics:
        """Return counters and state at this moment."""
        name = name_of(self.state, started=self.codec is not None)
        is_there = self.state.process in (Process.BUILDING, Process.READY)
        return self.reporter.statistics(self.channel, name, self.recoverer.restarts, is_there=is_there)
