"""Every state × event of the state machine, without a process; and the rules that a loss must keep."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from multienv._engine.recovery import state_machine
from multienv._engine.recovery.state_machine import (
    TABLE,
    Asked,
    BudgetSpent,
    BuildFailed,
    Built,
    Closed,
    Discarded,
    Episode,
    Instruction,
    Interrupted,
    Kind,
    Launched,
    Lost,
    NotRecovered,
    Process,
    Recovered,
    Replied,
    Request,
    Rules,
    State,
    decide,
    instruction_of,
    refusal,
)

ROOT = Path(__file__).parents[2]
STEP, RESET, CALL = Request(Kind.STEP, "step"), Request(Kind.RESET, "reset"), Request(Kind.CALL, "render")
STEP_OF_ONE = STEP._replace(touched=(True, False))
RULES = [
    Rules(slots, resets, action, action)
    for (slots, resets), action in itertools.product(
        ((1, False), (2, False), (2, True)), ("replay", "truncate", "raise")
    )
]


@pytest.fixture
def few_losses(monkeypatch):
    """More than POISON_AFTER, which is enough for all that is decided by it."""
    monkeypatch.setattr(state_machine, "MOST_LOSSES", 3)


def events(rules):
    yield from (
        Launched(),
        Built(),
        BuildFailed(),
        Interrupted(),
        BudgetSpent(),
        Discarded(),
        Closed(),
        NotRecovered("no way"),
    )
    yield from (Asked(request) for request in (STEP, RESET, CALL))
    if rules.resets_itself:
        yield Asked(STEP_OF_ONE)
    yield from (Replied(ended, failed) for ended in (False, True) for failed in (False, True))
    yield from (
        Lost(cause, slot, outside, "It died.")
        for cause in ("died", "hung")
        for slot in (-1, 0)
        for outside in (False, True)
    )
    yield Lost("died", 0, what="It died.", long_past=True)
    yield from (
        Recovered(mismatches) for mismatches in ({}, {0: "the reward differs"}, dict.fromkeys(range(rules.slots), "x"))
    )


def transitions(rules):
    """Yield (state, event, state after, instruction) for all that can happen to a worker, up to the counts of deaths."""
    found, todo = {State()}, [State()]
    while todo:
        state = todo.pop()
        for event in events(rules):
            if can_happen(state, event, rules):
                after, instruction = decide(state, event, rules)
                yield state, event, after, instruction
                if after.losses <= state_machine.MOST_LOSSES and after not in found:
                    found.add(after)
                    todo.append(after)


def can_happen(state, event, rules):
    if (state.process, type(event)) not in TABLE or state.process is Process.CLOSED:
        return False
    if isinstance(event, Asked):
        return refusal(state, event.request.kind, event.request.name, is_built=True) is None
    if isinstance(event, Replied):
        waits = instruction_of(state, rules) in (Instruction.ASK, Instruction.TRUNCATE)
        return state.request is not None and waits
    if isinstance(event, Lost) and state.process is Process.READY:
        return state.request is not None and state.losses < state_machine.MOST_LOSSES
    if isinstance(event, Lost) and state.process is Process.LOST:
        return state.losses == 0  # how a process ended that an interruption has made lost
    return True


RAISED = {Instruction.RAISE_LOST, Instruction.RAISE_POISON, Instruction.RAISE_BUDGET, Instruction.DELIVER}


# The largest of the tables, but for one, are looked through where time is no matter.
LARGE = (Rules(2, False, "replay", "replay"), Rules(2, True, "truncate", "truncate"))


@pytest.mark.parametrize(
    "rules", [pytest.param(one, marks=pytest.mark.ci if one in LARGE else (), id=str(one)) for one in RULES]
)
def test_every_event_in_every_reachable_state_leads_where_the_table_says(rules, few_losses):
    """What ends a call leaves no request behind; any other instruction can be told again from the state alone.

    So that an interrupted call finds in the state what it was about to do. And no splice: once nothing brings a process
    back, its running episode goes on in no other without a truncation, now or owed.
    """
    everyone = set(range(rules.slots))
    seen = set()
    for state, event, after, instruction in transitions(rules):
        assert after.process in TABLE[state.process, type(event)]
        assert isinstance(instruction, Instruction)
        is_lost = isinstance(event, NotRecovered) and state.process is Process.LOST
        if is_lost and state.request is not None and state.episode is Episode.RUNNING:
            told, owed = {slot for slot, _ in after.skipped}, {slot for slot, _ in after.pending_truncations}
            if state.request.kind is Kind.STEP:
                assert told == set(filter(state.request.touches, everyone))
                assert owed >= everyone - told
            elif state.request.kind is Kind.CALL:
                assert instruction is Instruction.RAISE_LOST
                assert owed == everyone
            seen.add((NotRecovered, state.request.kind))
        seen.add((state.process, type(event)))
        if state.request is not None and state.episode is Episode.RUNNING and not isinstance(event, Closed | Discarded):
            owed = {slot for slot, _ in state.pending_truncations if not state.request.touches(slot)}
            is_lost = instruction in (Instruction.RAISE_LOST, Instruction.RAISE_BUDGET)
            is_lost = is_lost and state.process in (Process.READY, Process.LOST)
            owed |= {slot for slot in everyone if is_lost and not state.request.touches(slot)}
            assert {slot for slot, _ in after.pending_truncations} >= owed, (state, event, after)
        if instruction in RAISED:
            assert (after.request, bool(after.skipped), bool(after.deaths)) == (None, False, False)
        elif (type(event), state.process) != (Lost, Process.BUILDING):
            assert instruction is instruction_of(after, rules), (state, event)
    assert {process for process, _ in seen} >= {Process.NONE, Process.BUILDING, Process.READY}
    if "replay" in (rules.on_crash, rules.on_timeout):
        assert seen >= {(NotRecovered, Kind.STEP), (NotRecovered, Kind.CALL)}


def test_an_event_that_cannot_happen_is_refused():
    with pytest.raises(ValueError, match="Recovered cannot happen while the process is none"):
        decide(State(), Recovered(), Rules())


@pytest.mark.parametrize("tries", [2, 3, 4])
def test_a_request_is_poison_after_as_many_deaths_as_the_loss_says(tries):
    rules, state = Rules(), State(Process.READY, Episode.RUNNING)
    state, _ = decide(state, Asked(Request(Kind.STEP, "step")), rules)
    for death in range(1, tries + 1):
        state, _ = decide(state, Lost("died", 0, what="It died.", tries=tries), rules)
        state, instruction = decide(state, Recovered(), rules)
        assert instruction is (Instruction.TRUNCATE if death == tries else Instruction.ASK)
    assert "The same step() ended" in dict(state.skipped)[0]


def test_a_masked_reset_pays_only_what_its_slots_owe():
    rules = Rules(slots=3, resets_itself=True)
    state = State(Process.READY, Episode.RUNNING, pending_truncations=((0, "lost"), (2, "lost")))
    state, _ = decide(state, Asked(Request(Kind.RESET, "reset", touched=(True, False, False))), rules)
    state, _ = decide(state, Replied(), rules)
    assert state.pending_truncations == ((2, "lost"),)


def test_the_diagram_and_the_tables_in_the_docs_are_those_of_the_state_machine(tmp_path):
    drawn = tmp_path / "states.svg"
    printed = subprocess.run(
        [sys.executable, ROOT / "docs" / "states.py", drawn], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    assert printed in (ROOT / "docs" / "design.md").read_text(), (
        "run: python docs/states.py, and put what it prints into docs/design.md"
    )
    assert drawn.read_text() == (ROOT / "docs" / "states.svg").read_text(), "run: python docs/states.py"
