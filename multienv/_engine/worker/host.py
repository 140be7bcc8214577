"""Execute the requests of a segment, one in each call.

The same host runs in a worker process and, for the serial classes, in the trainer. It knows nothing of sockets and
processes: ``main`` and ``processes/serial`` wait for requests and call it.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from time import perf_counter, time_ns
from typing import Any

import cloudpickle
import numpy as np

from multienv._engine.wire.banks import (
    FAILED,
    HEAD,
    MESSAGE,
    NOT_RESET,
    PICKLED_ROWS,
    RAISED,
    RESET,
    SKIPPED,
    STEPPED,
    U32,
    VALUE,
    BankLayout,
    Entry,
    entry_of,
    is_plain,
    split_entries,
)
from multienv._engine.wire.codecs import payload_of
from multienv._engine.wire.messages import (
    PLAIN_RESET,
    Build,
    Close,
    GetGenerators,
    KeepSnapshot,
    Message,
    Question,
    Replay,
    Reset,
    Rollout,
    dumps,
    is_recorded,
)
from multienv._engine.wire.segment import BUSY, REPLAYING, SLOT, Segment
from multienv._engine.worker import seeding
from multienv._engine.worker.env_group import ASK, EnvGroup
from multienv._engine.worker.imports import watched_imports
from multienv._engine.worker.registrations import built
from multienv._engine.worker.replies import answer, answer_failure, failure_of, pickled
from multienv._engine.worker.rollouts import RolloutRunner
from multienv._engine.worker.stepper import Handle, Stepper


class Host:
    """Holds the envs of a worker and executes what is asked of them.

    Args:
        segment: Where requests are read and replies are written.
        on_build: Called with the message before the envs are built, to set ``sys.path``, the working directory and so
            on.
        on_keep: Takes a snapshot to come back to, given the number of the last request and a token, or one for
            recoveries (token 0); returns the obstacle, or ``""``.
        load: Returns what builds the envs, given what travels with the message.
        code: Returns from which files the process has imported, given when the imports for the envs began, in ns; see
            ``imports.noted_files``.

    Attributes:
        handle: Executes the request with this number; raises only exceptions that end the process. It may be another
            function after each request that is not a step. For a rollout it returns the number of the last request and
            the seconds that the envs took for a step, else ``None``.
        closing: There was a request to close the envs.
        came: What came of a replay so far, which copies go on with that are forked meanwhile.
    """

    def __init__(
        self,
        segment: Segment,
        *,
        on_build: Callable[[Build], None] = lambda message: None,
        on_keep: Callable[[int, int], str] = lambda number, token: "the trainer's own process",
        load: Callable[[Any], Sequence[Callable[[], Any]]] = cloudpickle.loads,
        code: Callable[[int], bytes] = lambda began: b"",
    ) -> None:
        self.closing = False
        self.came: list[bytes] = []
        self.handle: Handle = self._handle
        self._segment = segment
        self._on_build = on_build
        self._on_keep = on_keep
        self._load, self._code = load, code
        self._group: EnvGroup | None = None
        self._stepper: Stepper | None = None
        self._runner: RolloutRunner | None = None  # made when it is first needed

    def move(self, segment: Segment) -> None:
        """Go on with another segment, which has the same layout: this process is a snapshot that was woken."""
        layout, self._segment = self._segment.layout, segment
        if self._group is not None:
            self._lay_out(layout)

    def close_envs(self) -> None:
        """Close the envs, once. Raises what one of them raises, when all are closed."""
        group, self._group, self._stepper, self.handle = self._group, None, None, self._handle
        self._runner = None
        if group is not None:
            group.close()

    def _handle(self, number: int) -> tuple[int, float] | None:
        """Execute a request that is not a step."""
        words, rolled, began = self._segment.words, None, perf_counter()
        words[BUSY] = number
        try:
            if self._segment.banks[number & 1].view[0] == RESET:
                message: Message = PLAIN_RESET
            else:
                payload = self._segment.read_request_payload(number)
                message = pickle.loads(payload)
                if self._group is not None:
                    self._group.replay_points.with_payload += len(payload)
            rolled = _HANDLERS[type(message)](self, number, message)
            if self._group is not None:
                if is_recorded(message):
                    self._group.replay_points.count(perf_counter() - began)
                self._group.update_calls()
        except Exception as error:
            answer_failure(self._segment, number, error)
        words[SLOT] = 0
        words[BUSY] = 0
        return rolled

    def _lay_out(self, layout: BankLayout) -> None:
        """Use banks with this layout, and compile what executes steps."""
        group, segment = self._envs(), self._segment
        segment.lay_out(layout)
        group.move(segment)
        self._stepper = Stepper(group, segment)
        self.handle = self._stepper.compile(self._handle)
        self._runner = None

    def _envs(self) -> EnvGroup:
        if self._group is None:
            raise RuntimeError("There are no envs: they have not been built, or are closed.")
        return self._group

    def _answer(self, number: int, value: Any, name: str = "") -> None:
        """Reply with a value; ``name`` says where it is from if it cannot be pickled."""
        answer(self._segment, number, VALUE, pickled(name, value))

    # --- one method per message -------------------------------------------------------------------

    def _build(self, number: int, message: Build) -> None:
        segment = self._segment
        self._on_build(message)
        imports_since = watched_imports() if message.tells_imports else lambda: None
        if message.seeds is not None:
            seeding.seed_process(message.seeds)
        specs = b"" if message.setting is None else message.setting.registrations
        began, began_at = perf_counter(), time_ns()
        envs: list[Any] = []
        for env_fn in self._load(message.env_fns):
            segment.words[SLOT] = len(envs) + 1
            try:
                envs.append(built(env_fn, specs, envs))
            except Exception as error:
                for env in envs:
                    with contextlib.suppress(Exception):  # the first error is the one to tell
                        env.close()
                answer(segment, number, FAILED, dumps(replace(failure_of(error), slot=len(envs))))
                return
        segment.words[SLOT] = 0
        group = EnvGroup(envs, message, segment)
        # The reply lies in the small bank: the trainer knows no other yet.
        seconds = perf_counter() - began
        imports, code = imports_since(), self._code(began_at)
        described = replace(group.describe(), seconds=seconds, imports=imports, code=code)
        self._answer(number, described, "its constructor (spaces, metadata, spec)")
        self._group = group
        self._lay_out(group.codec.layout)

    def _reset(self, number: int, message: Reset) -> None:
        assert self._stepper is not None
        self._stepper.reset(number, message)

    def _rollout(self, number: int, message: Rollout) -> tuple[int, float]:
        group, bank = self._envs(), self._segment.banks[number & 1]
        if self._runner is None:
            self._runner = RolloutRunner(group, self._segment)
        skipped = bank.skipped.copy() if bank.view[1] & SKIPPED else np.zeros(group.slots, np.uint8)
        rolled, seconds = self._runner.run(number, message, skipped)
        self._answer(number, rolled, "rollout")
        return number + max(0, len(rolled.banks) // self._segment.layout.size - 1), seconds

    def _ask_each(self, number: int, message: Question) -> None:
        answers = self._envs().ask(message)
        answer(self._segment, number, VALUE, answers, flags=RAISED if self._envs().raised else 0)

    def _keep_snapshot(self, number: int, message: KeepSnapshot) -> None:
        self._answer(number, self._on_keep(message.number, message.token))

    def _get_generators(self, number: int, message: GetGenerators) -> None:
        envs = self._envs().envs
        self._answer(number, {slot: seeding.states_of(envs[slot]) for slot in message.slots})

    def _close(self, number: int, message: Close) -> None:
        self.closing = True
        self.close_envs()
        self._answer(number, None)

    # --- replays ----------------------------------------------------------------------------------

    def _replay(self, number: int, message: Replay) -> None:
        group = self._envs()
        try:
            for payload in message.calls:
                group.ask(pickle.loads(payload))
            came = self._run(number, message)
        finally:
            group.replay_points.replaying, group.waiting = None, frozenset()
            # Its bank was used for other requests meanwhile.
            HEAD.pack_into(self._segment.banks[number & 1].view, 0, MESSAGE, 0, VALUE, 0, 0, number & U32, 0)
        self._answer(number, came)

    def _run(self, number: int, message: Replay) -> bytes:
        """Execute the requests of journal entries, each slot from its start on; return the new entries.

        Args:
            number: That of the replay.
            message: The replay.
        """
        segment, words, group, again = self._segment, self._segment.words, self._envs(), 0
        del self.came[message.repeated :]
        skipped = group.waiting = {start.slot for start in message.starts if start.waits}
        group.replay_points.begin_replay()
        for index, entry in enumerate(split_entries(message.entries, segment.layout.end)):
            if index < message.repeated:
                continue
            if message.every and again and not index % message.every:
                self._on_keep(again, 0)
            starting = {start.slot: start.generators for start in message.starts if start.entry == index}
            skipped.difference_update(starting)
            group.replay_points.replaying = starting
            words[REPLAYING] = index + 1
            again = entry.number
            self._ask_again(entry, skipped)
            self.handle(again)
            words[BUSY] = number
            bank = segment.banks[again & 1]
            if skipped:  # the entry is compared with that of the original request, in which these slots took part
                bank.view[1] = entry.record[1]
                bank.view[bank.layout.skipped : bank.layout.rewards] = entry.record[
                    bank.layout.skipped : bank.layout.rewards
                ]
            evidence = payload_of(segment, again).evidence if bank.view[3] & PICKLED_ROWS else b""
            self.came.append(entry_of(bank, entry.request_payload, evidence))
        words[REPLAYING] = 0
        if skipped:
            group.replay_points.look_at_generators()
        if group.replay_points.has_drawn:
            # These draws were not repeated, so later numbers may differ, though nothing has shown it yet.
            raise RuntimeError(
                "several envs of a process draw from random or numpy.random, and not all of them were replayed from "
                "the same request on. Draw from self.np_random, or give envs_per_worker=1"
            )
        for slot in skipped:
            seeding.renew(group.envs[slot])
        came, self.came = self.came, []
        return b"".join(came)

    def _ask_again(self, entry: Entry, skipped: AbstractSet[int]) -> None:
        """Put the request of an entry into its bank, as the trainer did; slots in ``skipped`` take no part."""
        number = entry.number
        bank = self._segment.banks[number & 1]
        end = bank.layout.rewards
        bank.view[:end] = entry.record[:end]
        kind, tag = entry.record[:2]
        if skipped:
            tag |= SKIPPED
            bank.skipped[list(skipped)] = NOT_RESET
        HEAD.pack_into(bank.view, 0, kind, tag, STEPPED, 0, 0, number, 0)
        if not is_plain(entry.record):
            self._segment.write_request_payload(number, entry.request_payload)


_HANDLERS: dict[type, Callable[[Host, int, Any], tuple[int, float] | None]] = {
    Build: Host._build,
    Reset: Host._reset,
    Rollout: Host._rollout,
    **dict.fromkeys(ASK, Host._ask_each),
    KeepSnapshot: Host._keep_snapshot,
    GetGenerators: Host._get_generators,
    Replay: Host._replay,
    Close: Host._close,
}
