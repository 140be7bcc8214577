"""The journal against a plain list of requests, and of starts and ends of each slot: whatever is asked, repeated,
interrupted, forgotten or copied."""

from __future__ import annotations

import contextlib
import gc
import pickle
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kit.interruption import Interruption
from multienv._engine.recovery import journal as journal_module
from multienv._engine.recovery.journal import Journal, Plan, ReplayPoint, replays_of
from multienv.config import RestartPolicy

STRIDE, SLOTS = 16, 2
AFFORDABLE, MOST_CALLS = 2.0, 2
POLICIES = [RestartPolicy(), RestartPolicy(accept="exact")]


@pytest.fixture(autouse=True, scope="module")
def small_numbers():
    """A few requests are enough for all that the journal decides."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (("AFFORDABLE", AFFORDABLE), ("MOST_CALLS", MOST_CALLS), ("OVERHEAD", 0)):
            patched.setattr(journal_module, name, value)
        yield


def interrupted(call: Callable[[], Any], place: int | None) -> None:
    """Make a call, which is interrupted at this place if it gets there."""
    with contextlib.nullcontext() if place is None else Interruption(place):
        call()


def copy_of(journal: Journal) -> Journal:
    copy = Journal(recording=True, policy=journal._policy)
    copy.memory = journal.memory
    copy.load(pickle.loads(pickle.dumps(journal.dump())))
    return copy


class Asked(NamedTuple):
    """What the model knows of a request: its entry, or its payload."""

    number: int
    data: bytes


CUTS = st.lists(st.none() | st.integers(0, 15), max_size=2)
SOME_SLOTS = st.sets(st.integers(0, SLOTS - 1))


class Model(RuleBasedStateMachine):
    """Asks the journal, and a list that forgets nothing, the same."""

    @initialize(number=st.integers(1, 2**33), episodes=st.integers(0, 3), policy=st.sampled_from(POLICIES))
    def build(self, number: int, episodes: int, policy: RestartPolicy) -> None:
        self.journal, self.number, self.seconds = Journal(recording=True, policy=policy), number, 10.0
        self.policy = policy
        self.journal.lay_out(STRIDE, SLOTS)
        self.calls: list[Asked] = []
        self.begin()
        self.episodes(episodes, {*range(SLOTS)})

    def begin(self) -> None:
        payloads = [one.data for one in self.calls]
        assert self.journal.kept_calls() == tuple(payloads)
        self.journal.clear(self.number, payloads)
        self.calls = [Asked(self.number, payload) for payload in payloads]
        self.all_calls = list(self.calls)  # those too that trim() has let go
        self.asked: list[Asked] = []
        self.starts: list[list[ReplayPoint]] = [[] for _ in range(SLOTS)]
        self.ended = [0] * SLOTS
        self.whole, self.built, self.is_affordable = [True] * SLOTS, None, True
        self.construction = self.number
        self.front = self.snapshot = self.trimmed = 0  # numbers

    def repeat(self, call: Callable[[], Any], cuts: list[int | None]) -> None:
        """Make a call again and again; only the last time is sure to come to its end."""
        for place in cuts:
            interrupted(call, place)
        call()

    # --- what happens -----------------------------------------------------------------------------

    @rule(count=st.integers(1, 6), byte=st.integers(0, 255))
    def step(self, count: int, byte: int) -> None:
        """Put plain steps there, as the hot path does."""
        for _ in range(count):
            self.number += 1
            self.asked.append(Asked(self.number, bytes([byte, *range(STRIDE - 1)])))
            self.journal.entries[self.number] = self.asked[-1].data

    @rule(
        skipped=st.integers(0, 2),
        entry=st.binary(min_size=2, max_size=2 * STRIDE),
        payload=st.sampled_from([b"", b"call", b"set another attribute"]),
        ended=SOME_SLOTS,
        started=SOME_SLOTS,
        cuts=CUTS,
    )
    def ask(self, skipped: int, entry: bytes, payload: bytes, ended: set[int], started: set[int], cuts: Any) -> None:
        """Log another request, in which episodes end and begin; some before it were not recorded."""
        self.number = number = self.number + skipped + 1
        self.repeat(lambda: self.journal.record(number, entry, payload), cuts)
        self.asked.append(Asked(number, entry))
        self.calls += [Asked(number, payload)] * bool(payload)
        self.all_calls += [Asked(number, payload)] * bool(payload)
        self.repeat(lambda: self.journal.record_ends(sorted(ended), number), cuts)
        for slot in ended:
            self.ended[slot] = number
        for slot in started:
            start = ReplayPoint(number, self.seconds, b"%d of %d" % (number, slot))
            self.repeat(partial(self.journal.record_replay_point, slot, number, start.generators, start.seconds), cuts)
            self.starts[slot].append(start)

    @rule(count=st.integers(1, 3), slots=SOME_SLOTS | st.just({*range(SLOTS)}))
    def episodes(self, count: int, slots: set[int]) -> None:
        """Have whole episodes of some slots."""
        for _ in range(count):
            self.ask(0, b"reset", b"", set(), slots, [])
            self.ask(0, b"step", b"", slots, set(), [])

    @rule(
        length=st.integers(1, 2 * STRIDE), payload=st.binary(max_size=3), place=st.none() | st.integers(0, 9), cuts=CUTS
    )
    def lose_what_was_not_committed(self, length: int, payload: bytes, place: int | None, cuts: Any) -> None:
        """The process is lost when some requests, as of a rollout, were logged, and not all of that was done."""
        interrupted(lambda: self.journal.record(self.number + 1, bytes(length), payload), place)
        if place is None:
            self.journal.record(self.number + 2, bytes(length))
        self.repeat(lambda: self.journal.drop_after(self.number), cuts)

    @rule(slots=SOME_SLOTS, cuts=CUTS)
    def lose(self, slots: set[int], cuts: Any) -> None:
        """Go on with envs of which some are others."""
        self.repeat(lambda: self.journal.drop_replay_points(sorted(slots)), cuts)
        for slot in slots:
            self.starts[slot], self.whole[slot] = [], False

    @rule(near=st.booleans(), index=st.integers(0, 1), cuts=CUTS)
    def drop_before(self, near: bool, index: int, cuts: Any) -> None:
        """Go on with what a replay has led to."""
        for plan in self.journal.plans(near=near)[index : index + 1]:
            self.repeat(partial(self.journal.drop_before, plan), cuts)
            for slot, begun in plan.replay_points.items():
                later = [one for one in self.starts[slot] if one.number >= begun.number]
                self.whole[slot] &= later == self.starts[slot]
                self.starts[slot] = later

    @rule(
        passed=st.integers(0, 3),
        longest=st.integers(1, 12),
        limit=st.just(10**9) | st.integers(0, 150),
        snapshot=st.integers(0, 9),
        forks=st.booleans(),
        place=st.none() | st.integers(0, 200),
    )
    def trim(self, passed: int, longest: int, limit: int, snapshot: int, forks: bool, place: int | None) -> None:
        self.seconds += passed
        self.built = self.built or self.seconds
        taken = [self.snapshot, *(one.number for one in self.asked if one.number >= self.trimmed)]
        newest = self.snapshot = taken[min(snapshot, len(taken) - 1)]
        self.trimmed = self.asked[-1].number if self.asked else 0
        trim = lambda journal: journal.trim(limit, self.seconds, longest, newest, forks=forks)  # noqa: E731
        expected = copy_of(self.journal)
        trim(expected)

        while len(self.calls) > MOST_CALLS or sum(len(one.data) for one in self.calls) > limit // 4:
            if self.calls.pop(0).number <= self.construction:  # a replay from there would lack it
                self.whole = [False] * SLOTS
        since_built, sizes = self.seconds - self.built, [len(one.data) for one in self.asked]
        room = next(index for index in range(len(sizes) + 1) if sum(sizes[index:]) <= limit)
        forced = self.asked[room - 1].number + 1 if room else 0
        self.is_affordable = since_built <= min(AFFORDABLE, longest)
        stands = self.policy.accept == "replayed" and all(map(self.proven, range(SLOTS)))
        if newest and stands and not self.journal.memory.has_shown:
            is_kept = self.is_affordable
        else:
            is_kept = since_built <= longest or (forks and not newest)
        self.whole = [whole and is_kept and not room for whole in self.whole]
        if place is not None:  # what is right after an interruption is right at any moment of the call
            interrupted(partial(trim, self.journal), place)
            self.plans_are_right()
            copy = copy_of(self.journal)
            trim(copy)
            assert copy.dump() == expected.dump()
        self.front = max(self.front, forced)
        self.starts = [
            [one for place, one in enumerate(of)
             if (one.number >= self.front and self.seconds - one.seconds <= longest) or (whole and not place)]
            for of, whole in zip(self.starts, self.whole, strict=True)
        ]  # fmt: skip
        trim(self.journal)
        assert self.journal.dump() == expected.dump()

        # What is held is bounded by the limits, and by episodes.
        assert sum(map(len, self.journal.entries.values())) <= limit
        wanted = [newest + 1] if newest else []
        for slot, history in enumerate(self.journal.histories):
            assert all(one in self.starts[slot] for one in history.replay_points)
            wanted += [one.number for one in history.replay_points[:1]]
            if not self.whole[slot]:
                assert list(history.proven()) == self.proven(slot)[-2:]
        if not any(self.whole) and self.journal.entries:
            assert next(iter(self.journal.entries)) >= min(wanted)
        # And what the newest snapshot needs is there.
        if newest:
            assert (self.journal.plan_since(newest) is None) == (newest + 1 < self.front)

    @rule()
    def show_a_memory(self) -> None:
        """Another worker of the batch finds that the env remembers something across resets."""
        self.journal.memory.has_shown = True

    @rule()
    def begin_anew(self) -> None:
        """In a new life of the envs, where calls were repeated."""
        self.begin()

    @rule()
    def go_on_with_a_copy(self) -> None:
        old, self.journal = self.journal, copy_of(self.journal)
        assert self.journal.dump() == old.dump()
        old.record(self.number + 1, b"other", b"other")
        old.record_replay_point(0, self.number + 1, b"other", 0.0)
        old.record_ends(range(SLOTS), self.number + 1)

    # --- what the list says -----------------------------------------------------------------------

    def proven(self, slot: int) -> list[ReplayPoint]:
        return [one for one in self.starts[slot] if one.number < self.ended[slot]]

    @invariant()
    def plans_are_right(self) -> None:
        for near in (False, True):
            for plan in self.journal.plans(near=near):
                self.plan_is_right(plan)

    def plan_is_right(self, plan: Plan) -> None:
        whole = [history.is_whole for history in self.journal.histories]  # not self.whole: trim may be interrupted
        before = len(self.asked) - plan.requests
        replayed = self.asked[before:]
        assert plan.entries == b"".join([one.data for one in replayed]), "not the requests from its front on"
        assert {start.slot for start in plan.message.starts if start.entry == plan.requests} == {*plan.missing}
        assert [start.slot for start in plan.starts] == [*plan.replay_points]
        for slot, entry, generators, waits in plan.starts:
            start = plan.replay_points[slot]
            assert waits == (slot in plan.resets)
            assert (replayed[entry].number, generators) == (start.number, start.generators)
            assert start in (self.starts[slot] if whole[slot] else self.proven(slot)), "believed too early"
            assert (slot in plan.resets) == (not whole[slot] or start != self.starts[slot][0])
            assert slot in plan.resets or not before, "not from the construction on"
        for slot in {
            *range(SLOTS)
        } - plan.replay_points.keys():  # it takes part from the construction on, or not at all
            assert (slot in plan.missing) == (not whole[slot])
            assert slot in plan.missing or not before
        assert not plan.replay_points.keys() & {*plan.missing}
        assert len(plan.missing) < SLOTS
        kept = self.all_calls[len(self.all_calls) - len(self.journal.kept_calls()) :]  # trim() may be interrupted
        front = replayed[0].number if replayed else self.number + 1
        assert plan.calls == tuple(one.data for one in kept if one.number < front)

    @invariant()
    def nothing_that_a_plan_needs_is_forgotten(self) -> None:
        journal = self.journal
        assert [history.is_whole for history in journal.histories] == self.whole
        assert journal.kept_calls() == tuple(one.data for one in self.calls)
        takes_resets = self.policy.accept == "replayed"
        proven = {slot: found for slot in range(SLOTS) if takes_resets and (found := self.proven(slot))}
        plans, near = journal.plans(), journal.plans(near=True)
        if not any(self.whole) and not proven:
            assert plans == near == []
            assert ("accept" in journal.why_no_plan()) == any(map(self.proven, range(SLOTS)))
            return
        prefers_whole = any(self.whole) and (
            self.is_affordable or journal.memory.has_shown or near[0].requests == len(self.asked)
        )
        far = plans[0 if prefers_whole else -1]
        if any(self.whole):
            assert far.requests == len(self.asked)
            for slot in range(SLOTS):  # those proven: see plan_is_right, and below
                assert not self.whole[slot] or far.replay_points.get(slot) == next(iter(self.starts[slot]), None)
            assert [*far.missing] == [slot for slot in range(SLOTS) if not self.whole[slot] and slot not in proven]
        for slot, starts in proven.items():
            assert near[0].replay_points[slot] == starts[-1]
            assert far.replay_points[slot].number <= starts[-2:][0].number
        if self.policy == RestartPolicy() and not journal.memory.has_shown:
            furthest, *later = replays_of(journal.dump())
            assert furthest == max(plans, key=lambda plan: plan.requests).message or not all(self.whole)
            for one in later:
                starts = {start.slot: start.generators for start in one.starts if start.generators}
                assert starts == {slot: self.starts[slot][-1].generators for slot in starts}

    @invariant()
    def since_any_request_is_the_rest_of_the_list_or_not_known(self) -> None:
        for index, one in enumerate(self.asked):
            plan = self.journal.plan_since(one.number)
            assert plan is None or plan.entries == b"".join([later.data for later in self.asked[index + 1 :]])

    @invariant()
    def the_bytes_that_it_says_it_holds_are_held(self) -> None:
        starts = [start.generators for history in self.journal.histories for start in history.replay_points]
        held = [*self.journal.entries.values(), *self.journal.kept_calls(), *starts]
        assert len(self.journal) == sum(map(len, held))


TestJournal = Model.TestCase
TestJournal.settings = settings(
    max_examples=200,
    stateful_step_count=25,
    print_blob=False,
    deadline=None,
    report_multiple_bugs=False,
    derandomize=True,
)


# --- what the list does not show ----------------------------------------------------------------


def in_first_episode(*, ended: tuple[int, ...] = (), policy: RestartPolicy = POLICIES[0]) -> Journal:
    """Return a journal of one reset and nine steps, after which a snapshot stands, and is affordable no more."""
    journal = Journal(recording=True, policy=policy)
    journal.lay_out(STRIDE, SLOTS)
    journal.clear(0)
    journal.trim(10**9, 0.0, 10.0, 0)
    for number in range(1, 11):
        journal.record(number, bytes(STRIDE))
    for slot in range(SLOTS):
        journal.record_replay_point(slot, 1, b"", 0.0)
    journal.record_ends(ended, 5)
    for slot in ended:
        journal.record_replay_point(slot, 6, b"", 1.0)
    journal.record_ends(ended, 8)
    return journal


def test_construction_is_kept_after_a_snapshot_until_each_slot_has_a_proven_start_or_a_limit_is_reached():
    for ended, policy, passed, limit, is_kept in [
        ((), POLICIES[0], 9.0, 10**9, True),
        ((0,), POLICIES[0], 9.0, 10**9, True),
        ((0, 1), POLICIES[0], 9.0, 10**9, False),
        ((0, 1), POLICIES[1], 9.0, 10**9, True),  # no start takes the place of the construction
        ((), POLICIES[0], 11.0, 10**9, False),
        ((), POLICIES[0], 9.0, 9 * STRIDE, False),
    ]:
        journal = in_first_episode(ended=ended, policy=policy)
        journal.trim(limit, passed, 10.0, 9, forks=True)
        assert [history.is_whole for history in journal.histories] == [is_kept] * SLOTS, (ended, passed, limit)
        assert any(not plan.resets and not plan.missing for plan in journal.plans()) == is_kept


def test_construction_is_kept_until_the_first_snapshot_stands_as_long_as_the_worker_can_be_forked():
    for forks in (True, False):
        journal = in_first_episode(ended=(0, 1))
        journal.trim(10**9, 11.0, 10.0, 0, forks=forks)
        assert journal.is_whole == forks


def test_replay_that_repeats_all_requests_for_one_slot_is_first_tried_from_the_construction_of_all():
    journal = in_first_episode(ended=(0,))
    journal.trim(10**9, 9.0, 10.0, 9, forks=True)
    assert [plan.resets for plan in journal.plans()] == [(), (0,)]
    assert [plan.resets for plan in journal.plans(near=True)] == [(0,), ()]


def test_a_look_costs_the_same_however_many_odd_entries_there_are():
    def instructions_of_a_look(entries: int) -> int:
        journal, count = Journal(recording=True), 0
        journal.lay_out(STRIDE, SLOTS)
        journal.clear(0)
        for number in range(1, entries + 1):
            journal.record(number, bytes(STRIDE + 8))
        journal.trim(10**9, 0.0, 100.0, 0)

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal count
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

        before = sys.gettrace()
        gc.disable()  # else what a collection calls would count, too
        sys.settrace(trace)
        try:
            journal.trim(10**9, 0.1, 100.0, 0)
        finally:
            sys.settrace(before)
            gc.enable()
        return count

    instructions_of_a_look(10)  # Python 3.12 counts none when a function is traced for the first time
    assert instructions_of_a_look(10) == instructions_of_a_look(1000) > 0
