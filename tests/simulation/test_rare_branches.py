"""Random programs with random faults and constants, and each branch that ``sometimes`` names: it must have been taken."""

from __future__ import annotations

import ast
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import multienv
from multienv._engine import sometimes
from simulation.managers import ENVS, ManagerCase, ManagerRun, manager_bases
from simulation.programs import FACES, Case, Run
from simulation.schedules import BRANCHES, CALLS, EPISODES, PACES, REPLAYS, ROLLOUTS, WITHOUT_REPLAY, bases, faults_of
from simulation.simulation import CRASHED, Fault, Simulation

SEED = 1
CHUNKS, RUNS = 10, 20
ROLLOUTS_WITHOUT_CALLS, PACES_WITHOUT_CALLS = (tuple(op for op in ops if op[0] != "call") for ops in (ROLLOUTS, PACES))
HANGS = [Fault(0, "build", nth, "hang") for nth in (2, 3, 4, 5)]
# Branches that random programs take once in hundreds of runs, or less: a program that leads there.
DIRECTED: dict[str, Case | ManagerCase] = {
    "a recovery passes its deadline": Case(
        "subprocess_env", "journal", EPISODES[:4], (Fault(0, "request", 3, "before"), *HANGS), rare=5
    ),
    "a build that raises is tried again": Case(
        "NEXT_STEP",
        "journal",
        EPISODES,
        (Fault(0, "request", 4, "before"), Fault(0, "build", 2, "raises"), Fault(0, "build", 3, "raises", slot=1)),
    ),
    "the code has changed since the lost process imported it": Case(
        "SAME_STEP", "journal", EPISODES, (Fault(0, "request", 4, "before"), Fault(0, "build", 2, "edited"))
    ),
    "a slot is left out and not even reset": Case(
        "subprocess_env",
        "truncate",
        ROLLOUTS_WITHOUT_CALLS,
        (Fault(0, "request", 4, "in the env", times=4),),
        rare=791743,
    ),
    "what follows a woken snapshot differs": Case(
        "NEXT_STEP",
        "snapshot",
        ROLLOUTS,
        (Fault(1, "request", 6, "before"), Fault(1, "replay", 1, "raises")),
        rare=430622,
    ),
    "a replay differs, and another one is tried": Case(
        "DISABLED",
        "snapshot",
        EPISODES,
        (Fault(0, "request", 4, "in the env", code=CRASHED, times=2), Fault(0, "replay", 2, "raises")),
    ),
    "an env has asked outside after its snapshot": Case(
        "subprocess_env", "snapshot", EPISODES, (Fault(0, "request", 9, "torn"),), asks_after=2
    ),
    "a woken snapshot is killed before it is handed over": Case(
        "subprocess_env", "snapshot", EPISODES, (Fault(0, "request", 4, "before"), Fault(0, "wake", 1, "dead"))
    ),
    "a woken snapshot fails by chance in a request that it repeats": Case(
        "subprocess_env",
        "snapshot",
        EPISODES,
        (Fault(0, "request", 4, "before"), Fault(0, "replay", 1, "in the env", code=CRASHED)),
    ),
    "a woken snapshot fails, and a copy goes on that it has forked on its way": Case(
        "DISABLED",
        "snapshot",
        EPISODES,
        (
            Fault(0, "request", 6, "before"),
            *(Fault(0, "replay", nth, "in the env", code=CRASHED) for nth in (1, 3)),
        ),
        rare=3,
    ),
    "no descriptor is left to wake a snapshot": Case(
        "subprocess_env",
        "snapshot",
        EPISODES,
        (Fault(0, "request", 5, "before"), Fault(0, "wake", 1, "no descriptors")),
    ),
    "the snapshot of a lost process is gone": Case(
        "subprocess_env", "snapshot", EPISODES, (Fault(0, "request", 5, "before"), Fault(0, "wake", 1, "skipped"))
    ),
    "a snapshot is newer than the last answer": Case(
        "SAME_STEP", "snapshot", ROLLOUTS, (Fault(0, "request", 4, "garbage"),), eager=True, rare=466814
    ),
    "a snapshot is broken off while it is taken": Case(
        "DISABLED", "starts", BRANCHES, (Fault(0, "ask", 1, "garbage"),), rare=377552
    ),
    "a repeated call ends the process of new envs": Case(
        "subprocess_env", "budget", WITHOUT_REPLAY, (Fault(0, "ask", 3, "hang"),), rare=433906
    ),
    "a process is lost before it is replaced by plan": Case(
        "multi_env", "starts", PACES, (Fault(1, "ask", 3, "before"),), eager=True, rare=341163
    ),
    "a process that has ended first is not replaced": Case(
        "SAME_STEP", "budget", PACES_WITHOUT_CALLS, (Fault(0, "launch", 2, "no descriptors"),), eager=True, rare=483725
    ),
    "an env whose reset ends processes is built anew": Case(
        "SAME_STEP", "starts", CALLS, (Fault(0, "request", 6, "in the env", code=CRASHED, times=4),), rare=198390
    ),
    "a reset or a call ends process after process": Case(
        "SAME_STEP", "journal", ROLLOUTS, (Fault(0, "request", 6, "garbage", times=4),), eager=True, rare=64512
    ),
    "the process of new envs is killed from outside while calls are repeated": Case(
        "multi_env",
        "memory",
        EPISODES,
        (Fault(0, "request", 15, "replied"), Fault(0, "ask", 3, "executed", times=4)),
        eager=True,
        rare=576534,
    ),
    "the reply to a rollout is unreadable": Case(
        "subprocess_env", "truncate", ROLLOUTS_WITHOUT_CALLS, (Fault(0, "request", 5, "garbage", times=2),), rare=510400
    ),
    "a thread cannot recover the envs now": ManagerCase(
        "sync",
        "raise",
        tuple(op for op in ManagerCase("sync", "raise").ops if op[0] != "call"),
        (Fault(2, "request", 9, "in the env", code=CRASHED), Fault(2, "launch", 2, "no descriptors", times=2)),
        eager=True,
        rare=214000,
    ),
}


def named() -> list[str]:
    """Return what the package says is sometimes the case, in its order."""
    found = []
    for path in sorted(Path(multienv.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "sometimes":
                assert isinstance(node.args[0], ast.Constant), f"{path}: the name is to be found by a search"
                found.append(node.args[0].value)
    return found


NAMED = named()


@pytest.fixture(scope="module")
def taken() -> Counter[str]:
    return Counter()


@pytest.fixture(autouse=True)
def counting(taken: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sometimes, "listener", lambda what: taken.update([what]))


def play(case: Case | ManagerCase) -> Simulation:
    return (Run(case) if isinstance(case, Case) else ManagerRun(case)).play()


def drawn_case(dice: random.Random) -> Any:
    """Return a random program with up to three faults that can happen in it, or a Ctrl-C, or both."""
    case: Any = dice.choice(list(manager_bases() if dice.random() < 0.3 else bases()))
    case = replace(case, rare=dice.randrange(1, 1_000_000))
    workers = FACES[case.face][1] if isinstance(case, Case) else range(ENVS)
    for _ in range(dice.choice([0, 1, 1, 2, 2, 3])):
        # The kind first: most faults are those of requests, and the rare ones come after others.
        kinds: dict[tuple[str, str], list[Fault]] = {}
        for fault in faults_of(play(case), workers):
            kinds.setdefault((fault.event, fault.point), []).append(fault)
        event = dice.choice(sorted({event for event, _ in kinds}))
        fault = dice.choice(kinds[dice.choice([kind for kind in kinds if kind[0] == event])])
        if fault not in case.faults:
            times = 1 if fault.point == "monitor ends" else dice.choice([1, 1, 1, 2, 4])  # three monitors are tried
            case = replace(case, faults=(*case.faults, replace(fault, times=times)))
    # An interrupted launch of a manager makes other workers, which faults do not know.
    is_interrupted = case.policy in REPLAYS and (isinstance(case, Case) or not case.faults) and dice.random() < 0.2
    return replace(case, interrupted=dice.randrange(4000)) if is_interrupted else case


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_faults_with_random_constants_leave_the_trajectory_whole(chunk: int) -> None:
    dice = random.Random(f"{SEED} {chunk}")
    for _ in range(RUNS):
        play(drawn_case(dice))


@pytest.mark.soak
def test_thousands_of_random_faults_with_random_constants_leave_the_trajectory_whole() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(20_000):
        play(drawn_case(dice))


@pytest.mark.parametrize("what", list(DIRECTED))
def test_program_that_leads_to_a_rare_branch_stays_whole_there(what: str, taken: Counter[str]) -> None:
    before = taken[what]
    play(DIRECTED[what])
    assert taken[what] > before


def test_each_rare_branch_is_named_once() -> None:
    assert [what for what, number in Counter(NAMED).items() if number > 1] == []


def test_each_rare_branch_was_taken(taken: Counter[str]) -> None:
    if not taken:
        pytest.skip("the tests before this one were not run")
    print(*(f"{taken[what]:6} {what}" for what in NAMED), sep="\n")
    assert [what for what in NAMED if not taken[what]] == []
