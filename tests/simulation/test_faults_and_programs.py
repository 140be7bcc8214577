"""Pairs of faults, faults that last, random programs; see ``simulation`` for the world, ``programs`` for the oracle.

A failure ends with a literal that runs it again: see ``regressions``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multienv._engine import sometimes
from simulation import programs
from simulation.programs import FACES, Case, Run
from simulation.rare import Constants
from simulation.regressions import REGRESSIONS
from simulation.schedules import BRANCHING, EPISODES, PACING, REPLAYS, ROLLING, bases, name_of, singles
from simulation.simulation import CRASHED, KILLED, POINTS, Fault, Simulation


def run(case: Case) -> Simulation:
    """Run a case; fail unless all its faults have struck."""
    simulation = Run(case).play()
    assert set(simulation.struck) == set(case.faults), case
    return simulation


def pairs(base: Case) -> Iterator[Case]:
    for case in singles(base):
        yield from singles(case)


@pytest.mark.soak
@pytest.mark.parametrize("base", [case for case in bases() if case.policy in REPLAYS], ids=name_of)
def test_all_pairs_of_faults_leave_the_trajectory_whole(base: Case) -> None:
    for case in pairs(base):
        Run(case).play()


@pytest.mark.parametrize("face", list(FACES))
@pytest.mark.parametrize(("code", "limit"), [(KILLED, 6), (CRASHED, 2)])
def test_a_step_that_ends_every_process_is_truncated(face: str, code: int, limit: int) -> None:
    """Up to the limit it is tried again; the others of its worker go on to the bit."""
    ops = (("reset", 7), ("step", 0), ("step", 1), ("step", 2), ("reset", 9), ("step", 3))
    fault = Fault(0, "request", 3, "in the env", code=code, times=limit)
    play = Run(Case(face, "journal", ops, (fault,)))
    simulation = play.play()
    assert play.truncated == 1
    assert len(simulation.struck) == limit


@pytest.mark.parametrize("face", ROLLING)
@pytest.mark.parametrize(("deaths", "truncated"), [(2, 1), (3, 4)])
def test_an_env_that_ends_process_after_process_sits_the_rollout_out(face: str, deaths: int, truncated: int) -> None:
    """Its next episode begins in the same rollout, unless that ends a process too; each of its steps says what it is."""
    ops = (("reset", 7), ("step", 0), ("roll", 1, 4), ("reset", 9), ("step", 3))
    play = Run(Case(face, "journal", ops, (Fault(0, "request", 3, "in the env", code=CRASHED, times=deaths),)))
    assert len(play.play().struck) == deaths
    assert play.truncated == truncated


@pytest.mark.parametrize("face", ["DISABLED", "NEXT_STEP", "SAME_STEP"])
def test_two_envs_that_end_every_process_in_the_same_step_are_truncated_and_no_other(face: str) -> None:
    ops = (("reset", 7), ("step", 0), ("reset", 9), ("step", 3), ("step", 1))
    faults = tuple(Fault(0, "request", 4, "in the env", slot, CRASHED, times=2) for slot in (0, 1))
    play = Run(Case(face, "journal", ops, faults))
    simulation = play.play()
    assert len(simulation.struck) == 4
    assert play.truncated == 2


STEPS = 300


@pytest.mark.parametrize(
    "rates", [pytest.param((1 / 300, 1 / 500), marks=pytest.mark.soak), (1 / 60, 1 / 200)], ids=str
)
@pytest.mark.parametrize("face", list(FACES))
def test_envs_that_crash_and_hang_by_chance_go_on(
    face: str, rates: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step, in its repeat, and in what a copy repeats of ten steps: no healthy step is given up."""
    monkeypatch.setattr(programs, "constants_of", lambda seed: Constants(snapshot_every=10))
    ops = (("reset", 7), *[("step", step % 10) for step in range(STEPS)])
    play = Run(Case(face, "snapshot", ops, rates=rates))
    losses = len(play.play().struck)
    assert losses > STEPS * sum(rates)
    assert play.truncated == 0


@pytest.mark.parametrize("face", list(FACES))
@pytest.mark.parametrize("nth", [9, 11])
def test_kills_in_one_request_cost_an_env_nothing_of_what_it_remembers(
    face: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do those of the woken snapshots. It has not shown yet: nothing would tell that it is lost."""
    monkeypatch.setattr(programs, "constants_of", lambda seed: Constants(shows_after=None))
    for faults in (
        (Fault(0, "request", nth, "in the env", times=3),),
        tuple(Fault(0, "request", nth + more, "before") for more in range(3)),
    ):
        play = Run(Case(face, "memory", EPISODES, faults))
        assert len(play.play().struck) == 3
        assert not any(world.is_lost for world in play.worlds)


@pytest.mark.parametrize("op", [("step", 1), ("roll", 1, 5)], ids=["steps", "rollouts"])
@pytest.mark.parametrize("face", list(FACES))
def test_an_env_that_cannot_be_replayed_is_truncated_and_never_passed_off_as_exact(face: str, op: Any) -> None:
    ops = (("reset", 7), ("step", 0), op, op, ("reset", 9), ("step", 2))
    for point, nth in product(("before", "executed", "replied", "late"), (2, 3)):
        play = Run(Case(face, "journal", ops, (Fault(0, "request", nth, point),), chance=True))
        simulation = play.play()
        assert simulation.struck
        assert play.truncated == FACES[face][1].count(0), "one of each env in the worker that was lost"


@pytest.mark.parametrize("face", list(FACES))
def test_a_server_is_not_asked_again_by_a_woken_copy(face: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from before the env asked is there, and what it would repeat compares equal."""
    ops = (("reset", 7), *(("step", number) for number in range(2)), ("call", 0.5), ("step", 2), ("step", 3))
    taken = Counter[str]()
    monkeypatch.setattr(sometimes, "listener", lambda what: taken.update([what]))
    for nth, point in product((5, 6), ("before", "in the env", "executed", "replied", "late")):
        faults = (Fault(0, "request", nth, point),)
        run(Case(face, "snapshot", ops, faults, asks_after=2, rare=SNAPSHOT_AFTER_EACH_STEP))
    assert taken["an env has asked outside after its snapshot"]


@pytest.mark.parametrize("face", ["NEXT_STEP", "SAME_STEP"])
def test_a_replacement_by_plan_does_not_ask_the_server_of_envs_that_go_on(
    face: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay beside the old process would, and the old envs go on if it fails."""
    monkeypatch.setattr(programs, "constants_of", lambda seed: Constants(recycle_after_steps=3))
    for nth in range(1, 10):
        Run(Case(face, "starts", EPISODES, (Fault(0, "replay", nth, "raises"),), asks_after=2)).play()


@pytest.mark.parametrize("name", list(REGRESSIONS))
def test_regression(name: str) -> None:
    run(REGRESSIONS[name])


# --- programs that nobody has thought of --------------------------------------------------------------

seeds = st.one_of(st.none(), st.integers(0, 5))
plain_ops: st.SearchStrategy[Any] = st.one_of(
    *[st.tuples(st.just("step"), st.integers(0, 9))] * 3,
    st.tuples(st.just("halves"), st.integers(0, 9)),
    st.tuples(st.just("roll"), st.integers(0, 9), st.integers(1, 7)),
    st.tuples(st.just("reset"), seeds),
    st.tuples(st.just("call"), st.sampled_from([0.0, 0.5])),
    st.tuples(st.just("set"), st.sampled_from([0.25, 1.5])),
    st.tuples(st.just("ask")),
)
branch_ops: st.SearchStrategy[Any] = st.sampled_from([("snapshot",), ("restore",), ("save",), ("load",)])
pace_ops: st.SearchStrategy[Any] = st.tuples(st.sampled_from(["pace", "some"]), st.integers(0, 9))


# With this seed; all else is as in life. So there are copies from before an env asked its server.
SNAPSHOT_AFTER_EACH_STEP = 152


@st.composite
def cases(draw: Any) -> Case:
    face = draw(st.sampled_from(list(FACES)))
    asks_after = draw(st.sampled_from([None, None, 0, 1, 2]))
    branches = face in BRANCHING and asks_after is None
    kinds = [plain_ops, plain_ops, *[branch_ops] * branches, *[pace_ops] * (face in PACING)]
    ops = draw(st.lists(st.one_of(kinds), max_size=14))
    kept: set[str] = set()
    program: list[tuple[Any, ...]] = [("reset", draw(st.integers(0, 5)))]
    for op in ops:
        kept.add(op[0])
        if {"restore": "snapshot", "load": "save"}.get(op[0], op[0]) in kept:
            program.append(op)
    base = Case(face, draw(st.sampled_from(REPLAYS)), tuple(program), eager=draw(st.booleans()), asks_after=asks_after)
    base = base if asks_after is None else replace(base, rare=SNAPSHOT_AFTER_EACH_STEP)
    workers = FACES[face][1]
    for _ in range(draw(st.integers(0, 3))):
        worker = draw(st.sampled_from(workers))
        event = draw(st.sampled_from(list(POINTS)))
        point = draw(st.sampled_from(POINTS[event]))
        fault = Fault(
            worker,
            event,
            draw(st.integers(1, 6)),
            point,
            draw(st.integers(0, workers.count(worker) - 1)) if point == "in the env" else 0,
            draw(st.sampled_from([KILLED, CRASHED])),
        )
        if fault not in base.faults:
            base = replace(base, faults=(*base.faults, fault))
    return base


def check_programs(case: Case) -> None:
    Run(case).play()


SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": False}
test_random_programs = settings(max_examples=60, derandomize=True, **SETTINGS)(given(cases())(check_programs))
test_many_random_programs = pytest.mark.soak(settings(max_examples=20_000, **SETTINGS)(given(cases())(check_programs)))
