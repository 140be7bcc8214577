"""States of the env as anchors of the journal: kept within bounds, and begun with only where enough was seen since."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_recovery_journal import ANCHOR_EVERY, UNLIMITED, Caller

from multienv.config import Deadlines, RestartPolicy
from multienv.recovery.anchoring import Anchoring
from multienv.recovery.journal import PROOF, Journal, Plan
from multienv.recovery.preserver import CAPTURE_DEADLINE, capture_deadline
from multienv.recovery.verification import first_difference
from multienv.wire.messages import (
    KIND_OF_REQUEST_AT,
    STEP,
    Reset,
    RestoreState,
    pack_value,
    unpack_message,
)


class Keeper(Caller):
    """Keeps a state now and then."""

    def keep(self, state: bytes = b"state") -> None:
        self.journal.keep_state(state, self.steps)

    def steps_(self, count: int) -> None:
        for index in range(count):
            self.step(index % 9)


@pytest.fixture
def caller() -> Keeper:
    return Keeper()


def begins_with(plan: Plan) -> Any:
    return unpack_message(plan.frames[0])


def test_a_long_episode_goes_on_from_a_state(caller: Keeper) -> None:
    caller.reset(seed=1)
    caller.steps_(100)
    caller.keep(b"one")
    caller.steps_(100)
    caller.keep(b"two")
    caller.steps_(100)
    caller.trim(step_limit=250)
    (plan,) = caller.journal.plans()
    assert plan.from_state
    assert not plan.from_construction
    assert begins_with(plan) == RestoreState(b"one" if len(plan.frames) == 201 else b"two")
    kept = len(plan.frames) - 1
    assert kept == 100, "half of what may be held"
    assert plan.frames[1:] == tuple(caller.requests[-kept:])
    assert plan.evidence[1:] == tuple(caller.replies[-kept:])


def test_the_evidence_of_a_restored_state_is_what_the_worker_answers(caller: Keeper) -> None:
    caller.reset(seed=1)
    caller.keep()
    caller.steps_(PROOF)
    caller.journal.complete = False
    plan = caller.journal.plans()[-1]
    answered = [pack_value(5, None), *plan.evidence[1:]]
    assert first_difference(plan.evidence, answered) == ""


def test_no_replay_begins_at_a_state_with_little_to_hold_against_it(caller: Keeper) -> None:
    caller.reset(seed=1)
    caller.steps_(50)
    caller.trim(step_limit=20)
    assert not caller.journal.usable
    caller.keep()
    for _ in range(PROOF):
        assert caller.journal.plans() == []
        caller.step()
    (plan,) = caller.journal.plans()
    assert len(plan.frames) == PROOF + 1


def test_unusable_it_begins_again_at_a_state(caller: Keeper) -> None:
    caller.reset(seed=1)
    caller.call("kept")
    caller.steps_(50)
    seen = caller.replies[-1]
    caller.trim(step_limit=20)
    caller.step()
    caller.keep()
    assert caller.journal.usable
    assert caller.journal.last_observed() == caller.replies[-1] != seen
    caller.steps_(PROOF)
    with_call, without = caller.journal.plans()
    assert with_call.frames[0] == caller.requests[1]
    assert with_call.frames[1:] == without.frames
    assert with_call.evidence[1:] == without.evidence


def test_what_reaches_back_further_comes_first(caller: Keeper) -> None:
    caller.reset()
    caller.steps_(ANCHOR_EVERY)
    assert caller.reset()
    caller.steps_(10)
    caller.keep()
    caller.steps_(ANCHOR_EVERY - 148)
    caller.trim(step_limit=2 * ANCHOR_EVERY - 146)
    reset, state = caller.journal.plans()
    assert isinstance(begins_with(reset), Reset)
    assert isinstance(begins_with(state), RestoreState)
    caller.journal.learn([reset], state)
    assert caller.journal.plans() == [state, reset], "a reset was in vain once"


def test_states_are_no_reason_not_to_anchor_a_reset(caller: Keeper) -> None:
    caller.reset()
    caller.steps_(ANCHOR_EVERY)
    caller.keep()
    assert caller.reset()


def test_a_short_replay_has_an_episode_or_an_interval_to_hold_against(caller: Keeper) -> None:
    caller.reset()
    for name in (b"one", b"two"):
        caller.steps_(PROOF)
        caller.keep(name)
    caller.steps_(PROOF)
    first, complete, youngest = caller.journal.plans(short=True)
    assert youngest.from_state
    assert begins_with(first) == RestoreState(b"one")
    assert complete.from_construction
    caller.steps_(ANCHOR_EVERY)
    caller.reset()
    caller.steps_(10)
    caller.keep()
    first, complete, *_ = caller.journal.plans(short=True)
    assert youngest.from_state
    assert isinstance(begins_with(first), Reset)
    assert len(first.frames) > ANCHOR_EVERY, "not what came since the last reset alone"


def test_a_state_that_a_replay_may_begin_at_is_kept(caller: Keeper) -> None:
    """Though what lies in the half to keep begins with a reset, and a state too new to be of use."""
    caller.reset()
    caller.steps_(ANCHOR_EVERY)
    caller.keep(b"one")
    caller.steps_(ANCHOR_EVERY)
    assert caller.reset()
    caller.steps_(10)
    caller.keep(b"two")
    caller.steps_(PROOF - 1)
    caller.trim(step_limit=2 * ANCHOR_EVERY)
    (state,) = caller.journal.plans()
    assert begins_with(state) == RestoreState(b"one")
    caller.reset()  # and now a whole episode tells whether a replay from the one before is the same
    state, reset = caller.journal.plans()
    assert begins_with(state) == RestoreState(b"one")
    assert isinstance(begins_with(reset), Reset)


def test_states_count(caller: Keeper) -> None:
    caller.reset(seed=1)
    caller.steps_(10)
    before = len(caller.journal)
    caller.keep(bytes(1000))
    assert len(caller.journal) == before + 1000
    caller.steps_(10)
    caller.trim(limit=1100)
    assert len(caller.journal) <= 1100


def test_a_state_told_twice_is_one(caller: Keeper) -> None:
    caller.reset(seed=1)
    caller.keep(b"one")
    caller.keep(b"one")
    assert len(caller.journal._states()) == 1


def test_with_a_call_at_every_step_a_state_still_serves(caller: Keeper) -> None:
    caller.reset(seed=1)
    for index in range(600):
        if index % 100 == 0:
            caller.keep(b"state %d" % index)
        caller.call(bytes(50))
        caller.step()
        caller.trim(limit=40_000)
    plans = caller.journal.plans()
    assert plans
    assert all(isinstance(begins_with(plan), RestoreState) for plan in plans if plan is not plans[0])


@pytest.mark.parametrize("what", ["construction", "state"])
def test_what_is_loaded_is_what_was_held(caller: Keeper, what: str) -> None:
    caller.reset(seed=1)
    caller.call("x")
    caller.steps_(10)
    caller.keep()
    caller.steps_(PROOF)
    caller.journal.complete = what == "construction"
    plan = next(one for one in caller.journal.plans() if one.from_construction or one.from_state)
    other = Journal(recording=True)
    other.load(plan, caller.steps)
    assert other.complete == plan.from_construction
    assert other.plans()[0] == plan
    assert other.last_observed() == caller.replies[-1]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("step"), st.integers(1, 300)),
            st.tuples(st.just("call"), st.integers(0, 3000)),
            st.tuples(st.just("reset"), st.integers(0, 3000)),
            st.tuples(st.just("keep"), st.integers(1, 3000)),
            st.tuples(st.just("trim"), st.integers(0, 40_000)),
        ),
        max_size=20,
    )
)
def test_whatever_came_the_limit_holds_and_plans_end_with_what_was(operations: list[tuple[str, int]]) -> None:
    caller = Keeper()
    caller.reset(seed=0)
    for what, amount in operations:
        if what == "step":
            caller.steps_(amount)
        elif what == "call":
            caller.call(bytes(amount))
        elif what == "reset":
            caller.reset(options=bytes(amount))
        elif what == "keep":
            caller.keep(bytes(amount))
        else:
            caller.trim(limit=amount)
            assert len(caller.journal) <= amount
        for plan in caller.journal.plans():
            tail = 0
            while tail < len(plan.frames) and plan.frames[-1 - tail] == caller.requests[-1 - tail]:
                tail += 1
            assert plan.evidence[len(plan.evidence) - tail :] == tuple(caller.replies[len(caller.replies) - tail :])
            if plan.from_state:
                message = unpack_message(plan.frames[-1 - tail])
                assert isinstance(message, RestoreState)
                assert sum(frame[KIND_OF_REQUEST_AT] == STEP for frame in plan.frames) >= PROOF
        assert caller.journal.last_observed() == next(reply for reply in reversed(caller.replies) if reply[12] == 16)


# --- when ---------------------------------------------------------------------------------------


def test_a_state_is_wanted_when_the_last_one_gets_far(caller: Keeper) -> None:
    caller.reset(seed=1)
    assert not caller.journal.wants_state(UNLIMITED, 400, caller.steps)
    caller.steps_(101)
    assert caller.journal.wants_state(UNLIMITED, 400, caller.steps)
    assert caller.journal.wants_state(4 * len(caller.journal) - 4, UNLIMITED, caller.steps)
    assert not caller.journal.wants_state(4 * len(caller.journal), UNLIMITED, caller.steps)
    caller.keep()
    assert not caller.journal.wants_state(UNLIMITED, 400, caller.steps)
    caller.reset()
    caller.steps_(101)
    assert caller.journal.wants_state(UNLIMITED, 400, caller.steps), "resets do not do for every env"
    assert not caller.journal.wants_state(0, UNLIMITED, caller.steps), "nothing may be kept"
    assert not Journal(recording=False).wants_state(UNLIMITED, 0, 100)


def test_asking_takes_one_percent_of_the_time_but_in_a_hurry() -> None:
    anchoring = Anchoring(RestartPolicy())
    assert anchoring.may_ask(0, hurry=False)
    anchoring.took(1000, seconds=0.002, step_seconds=1e-5)
    assert not anchoring.may_ask(20_990, hurry=False)
    assert anchoring.may_ask(21_010, hurry=False)
    assert anchoring.may_ask(1001, hurry=True)
    anchoring.took(30_000, seconds=0.001, step_seconds=1e-5)
    anchoring.took(40_000, seconds=0.009, step_seconds=1e-5)
    assert anchoring.may_ask(50_010, hurry=False), "a new process is slow at first"
    assert anchoring.taken == 3


def test_beside_a_snapshot_only_what_is_cheap_is_hurried() -> None:
    for seconds, may in ((1e-3, True), (20e-3, False)):
        anchoring = Anchoring(RestartPolicy())
        anchoring.took(1000, seconds, 1e-4)
        assert anchoring.may_ask(1001, hurry=True)
        assert anchoring.may_ask(1001, hurry=True, beside=True) is may
        assert not anchoring.may_ask(1001, hurry=False, beside=True)
        assert anchoring.may_ask(1000 + int(101 * seconds / 1e-4), hurry=True, beside=True)


def test_what_takes_long_may_take_ten_percent_in_a_hurry() -> None:
    anchoring = Anchoring(RestartPolicy())
    anchoring.took(1000, seconds=0.5, step_seconds=0.001)
    assert not anchoring.may_ask(5990, hurry=True)
    assert anchoring.may_ask(6010, hurry=True)
    assert not anchoring.may_ask(50_990, hurry=False)
    assert anchoring.may_ask(51_010, hurry=False)


def test_what_fails_is_tried_again_ever_later() -> None:
    anchoring = Anchoring(RestartPolicy())
    steps, waits = 0, []
    for _ in range(4):
        anchoring.refused(steps, "why")
        assert anchoring.obstacle == "why"
        wait = next(2**n for n in range(40) if anchoring.may_ask(steps + 2**n, hurry=True))
        waits.append(wait)
        steps += wait
    assert waits == sorted(set(waits))
    assert waits[0] >= 1024
    anchoring.refused(steps, "it died", lost=True)
    assert not anchoring.may_ask(steps + 16 * waits[-1], hurry=True)
    anchoring.took(steps, 0.001, 0.001)
    assert anchoring.obstacle == ""


@pytest.mark.parametrize(
    "options", [{"state_anchors": False}, {"on_crash": "raise"}, {"on_timeout": "truncate"}, {"on_crash": "truncate"}]
)
def test_nobody_asks_where_a_loss_by_asking_would_not_be_made_good(options: dict[str, Any]) -> None:
    assert not Anchoring(RestartPolicy(**options)).may_ask(10**9, hurry=True)


@pytest.mark.parametrize(
    ("deadlines", "seconds"),
    [
        (Deadlines(), CAPTURE_DEADLINE),
        (Deadlines(step=5.0), 5.0),
        (Deadlines(step=0.01), 1.0),
        (Deadlines(step=100.0), CAPTURE_DEADLINE),
        (Deadlines(call=2.0), 2.0),
        (Deadlines(step=0.01, call=0.5), 0.5),
    ],
)
def test_an_env_that_is_stopped_while_it_tells_its_state_holds_up_the_step_as_a_step_would(deadlines, seconds):
    assert capture_deadline(deadlines) == seconds
