"""The way back, decided without processes: which source is tried next, and when it is given up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multienv._engine.recovery.journal import Plan
from multienv._engine.recovery.state_machine import MOST_LOSSES
from multienv._engine.recovery.way_back import (
    CameBack,
    Died,
    Failed,
    GiveUp,
    KeptSnapshot,
    NewEnvs,
    NewestSnapshot,
    NothingBuilt,
    Replayed,
    Source,
    TakeOver,
    Try,
    Way,
    WayEvent,
    WayRules,
    decide_way,
)

RULES = WayRules(slots=3, tries=2, takes_some=True)
FAR, NEAR = Replayed(Plan(b"far")), Replayed(Plan(b"near"))
PROCESS: Any = object()  # nothing of it is looked at
COPY = NewestSnapshot(PROCESS, 7, Plan(b""))
OTHER_PROCESS: Any = object()
OTHER_COPY = NewestSnapshot(OTHER_PROCESS, 7, Plan(b""))
KEPT = KeptSnapshot(1, 7)


def walk(sources: list[Source], *events: WayEvent, rules: WayRules = RULES) -> tuple[Way, Any]:
    """Return the way and the instruction after these events."""
    way = Way(tuple(sources), "there is no source")
    instruction: Any = way.next
    for event in events:
        assert isinstance(instruction, Try), f"{event} comes after {instruction}"
        way, instruction = decide_way(way, event, rules)
    return way, instruction


def test_without_sources_nothing_is_tried() -> None:
    assert walk([])[1] == GiveUp("there is no source")


@pytest.mark.parametrize("source", [COPY, KEPT, FAR, NewEnvs()])
def test_envs_that_are_as_they_were_are_taken_over(source: Source) -> None:
    assert walk([source, NEAR], CameBack({}))[1] == TakeOver({})


def test_a_snapshot_whose_replay_differs_is_given_up_and_says_why() -> None:
    way, instruction = walk([COPY, FAR, NEAR], CameBack({1: "differs"}))
    assert instruction == Try(FAR, is_last=False)
    assert way.snapshot_failure == "differs"


def test_a_woken_copy_that_is_killed_is_followed_by_its_own_copy() -> None:
    killed = Died(-1, outside=True, copy=OTHER_COPY)
    way, instruction = walk([COPY, FAR], *[killed] * (MOST_LOSSES - 1))
    assert instruction.source.of is OTHER_PROCESS
    assert decide_way(way, killed, RULES)[1] == Try(FAR, is_last=True)
    assert walk([COPY, FAR], Died(-1, outside=True))[1] == Try(FAR, is_last=True)


def test_two_deaths_in_the_same_repeated_request_are_no_chance() -> None:
    crashed = Died(4, outside=False, copy=OTHER_COPY)
    elsewhere = Died(5, outside=False, copy=OTHER_COPY)
    assert walk([COPY, FAR], crashed, elsewhere)[1].source.of is OTHER_PROCESS
    way, instruction = walk([COPY, FAR], crashed, elsewhere, crashed)
    assert instruction.source is FAR
    assert way.snapshot_failure == "2 processes ended while running request 5 of its replay"


def test_where_deaths_come_by_chance_more_of_them_in_one_request_are_allowed() -> None:
    crashed = Died(4, outside=False, copy=OTHER_COPY)
    rules = replace(RULES, tries=3)
    assert walk([COPY, FAR], crashed, crashed, rules=rules)[1].source.of is OTHER_PROCESS
    assert walk([COPY, FAR], crashed, crashed, crashed, rules=rules)[1].source is FAR


def test_copies_are_forked_on_the_way_and_the_newest_goes_on() -> None:
    """All since the first copy is compared; and what is not repeated any more is no reason to give up."""
    whole, rest = Plan(b"whole", requests=32), Plan(b"rest", requests=20)
    first, again = NewestSnapshot(PROCESS, 7, whole), NewestSnapshot(OTHER_PROCESS, 7, whole)
    newer = NewestSnapshot(OTHER_PROCESS, 19, rest)
    _, instruction = walk([first, FAR], Died(30, outside=False, copy=again))
    assert instruction.source == NewestSnapshot(OTHER_PROCESS, 7, replace(whole, every=8))
    _, instruction = walk([first, FAR], *[Died(at, outside=False, copy=again) for at in (30, 20)])
    assert instruction.source.plan.every == 4
    way, instruction = walk(
        [first, FAR], *[Died(at, outside=False, copy=again) for at in (30, 20)], Died(14, outside=False, copy=newer)
    )
    assert instruction.source == NewestSnapshot(OTHER_PROCESS, 19, replace(whole, repeated=12, every=5))
    assert way.deaths == (((14, False), 1),)
    assert decide_way(way, Died(14, outside=False, copy=newer), RULES)[1].source is FAR  # type: ignore[union-attr]


def test_deaths_by_chance_leave_a_shorter_replay_only_after_several() -> None:
    by_chance = [Died(at, outside=False) for at in range(MOST_LOSSES)]
    assert walk([FAR, NEAR], *by_chance[1:])[1].source is FAR
    assert walk([FAR, NEAR], *by_chance)[1] == Try(NEAR, is_last=True)
    assert walk([FAR, NEAR], *[Died(1, outside=False)] * 2)[1] == Try(NEAR, is_last=True)
    assert walk([NEAR], *by_chance)[1] == Try(NEAR, is_last=True)
    assert walk([FAR, NEAR], *[Died(1, outside=True)] * (MOST_LOSSES - 1))[1].source is FAR


def test_the_last_replay_is_taken_with_the_slots_that_differ_unless_all_do() -> None:
    differ: dict[int, str] = {0: "one", 2: "other"}
    assert walk([FAR, NEAR], CameBack(differ))[1] == Try(NEAR, is_last=True)
    assert walk([NEAR], CameBack(differ))[1] == TakeOver(differ)
    assert walk([NEAR], CameBack({**differ, 1: "last"}))[1] == GiveUp("one")
    none_lost = WayRules(slots=3, tries=2, new_slots=(0,))
    assert walk([NEAR], CameBack({0: "new"}), rules=none_lost)[1] == TakeOver({0: "new"})
    assert walk([NEAR], CameBack(differ), rules=none_lost)[1] == GiveUp("one")


def test_what_cannot_be_built_leaves_only_snapshots() -> None:
    way, instruction = walk([NEAR, COPY, FAR], NothingBuilt("no memory"))
    assert instruction == Try(COPY, is_last=True)
    assert decide_way(way, Failed(), RULES)[1] == GiveUp("no memory")


def test_a_replay_beside_the_old_process_is_tried_once() -> None:
    rules = WayRules(slots=1, tries=2, replay_limit=10.0)
    ended = GiveUp("its replay ended the new process")
    assert walk([FAR, NEAR], Died(0, outside=True), rules=rules)[1] == ended
    told = walk([FAR], Died(0, outside=False, hung=True), rules=rules)[1].reason
    assert told == "its replay hung, or took longer than RestartPolicy.replay_limit (10 s)"


def test_a_replay_that_takes_too_long_makes_way_for_the_next() -> None:
    way, instruction = walk([FAR, NEAR], Died(3, outside=False, hung=True, late=True))
    assert (instruction, way.reason) == (Try(NEAR, is_last=True), "its replay took too long (see Deadlines.recovery)")


def test_calls_that_end_new_envs_are_not_repeated_again() -> None:
    assert walk([NewEnvs((b"call",))], Died(-1, outside=False))[1] == Try(NewEnvs(), is_last=True)
    assert walk([NewEnvs((b"call",))], Died(-1, outside=True))[1].source == NewEnvs((b"call",))


SOURCES = st.lists(st.sampled_from([COPY, KEPT, FAR, NEAR]), max_size=4)
EVENTS = st.one_of(
    st.builds(CameBack, st.dictionaries(st.integers(0, 2), st.just("differs"), max_size=3)),
    st.builds(
        Died,
        st.integers(-1, 2),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.sampled_from([None, OTHER_COPY]),
    ),
    st.builds(Failed, st.sampled_from(["", "why"])),
    st.builds(NothingBuilt, st.just("why")),
)


@given(SOURCES, st.lists(EVENTS, min_size=200, max_size=200))
def test_every_way_ends_and_only_equal_envs_of_a_snapshot_are_taken(sources: list[Source], events: Any) -> None:
    way = Way(tuple(sources), "why")
    instruction: Any = way.next
    for event in events:
        if not isinstance(instruction, Try):
            break
        way, instruction = decide_way(way, event, RULES)
    assert not isinstance(instruction, Try), "it goes on for ever"
    if isinstance(instruction, TakeOver):
        assert not instruction.mismatches or isinstance(way.sources[0], Replayed)
        assert len(instruction.mismatches) < RULES.slots
