"""Schedules of faults: every single one that can happen in a program, and pairs of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from simulation.programs import FACES, POLICIES, RAISING, Case, Run
from simulation.simulation import CRASHED, IN_ENV, KILLED, POINTS, Fault, Simulation

# Policies that bring an env back, and faces with snapshots to come back to.
REPLAYS = ("snapshot", "journal", "starts")
BRANCHING = [face for face in FACES if face != "multi_env"]
# A program with all that a trainer calls: whole and partial resets, ends of episodes, calls, attributes.
EPISODES = (
    ("reset", 7),
    *(("step", number) for number in range(4)),
    ("call", 0.5),
    *(("step", number) for number in range(4, 7)),
    ("reset", None),
    ("halves", 8),
    ("set", 0.25),
    ("step", 9),
)
# The same for policies that replay nothing: what was called and set is not repeated in a new process.
WITHOUT_REPLAY = tuple(("ask",) if op[0] == "call" else op for op in EPISODES if op[0] != "set")
# One of many episodes after a call and an attribute that all of them show.
CALLS = (
    ("reset", 7),
    ("step", 0),
    ("call", 0.5),
    ("set", 0.25),
    *(("step", number) for number in range(1, 10)),
    ("reset", None),
    *(("step", number) for number in range(3)),
)
# One that comes back to earlier states.
BRANCHES = (
    ("reset", 3),
    ("step", 0),
    ("snapshot",),
    ("step", 1),
    ("restore",),
    ("halves", 1),
    ("save",),
    ("step", 2),
    ("load",),
    ("step", 3),
)
# One of rollouts, which end episodes, among steps.
ROLLOUTS = (
    ("reset", 5),
    ("roll", 0, 3),
    ("step", 1),
    ("roll", 2, 4),
    ("roll", 3, 1),
    ("call", 0.5),
    ("roll", 4, 6),
    ("step", 5),
)
# One whose envs go at their own pace in between.
PACES = (
    ("reset", 7),
    ("pace", 0),
    ("pace", 1),
    ("step", 2),
    ("pace", 3),
    ("begin", 9),
    ("some", 4),
    ("call", 0.5),
    ("some", 5),
    ("some", 5),
    ("pace", 6),
    ("reset", None),
    ("pace", 7),
    ("step", 8),
)
PACING = [face for face in FACES if face != "subprocess_env"]
ROLLING = ("subprocess_env", "NEXT_STEP", "SAME_STEP")


def singles(case: Case) -> Iterator[Case]:
    """Yield the case with each fault that can happen in it, one at a time."""
    for fault in possible(case):
        yield replace(case, faults=(*case.faults, fault))


def possible(case: Case) -> Iterator[Fault]:
    """Yield each fault that can happen after those of the case, told by running it."""
    return faults_of(Run(case).play(), FACES[case.face][1])


def faults_of(simulation: Simulation, workers: Sequence[int]) -> Iterator[Fault]:
    """Yield each fault that can happen in a run that was played; ``workers``: that of each env."""
    for (worker, event), number in sorted(simulation.events.items()):
        for nth, point in product(range(1, number + 1), POINTS[event]):
            if point.startswith("interrupted") and (worker, nth) in simulation.in_threads:
                continue
            if point not in IN_ENV:
                yield Fault(worker, event, nth, point)
                continue
            for slot, code in product(range(workers.count(worker)), (KILLED, CRASHED)):
                if point == "raises" and (code == CRASHED or (event, nth) == ("build", 1)):
                    continue  # the first construction raises what it raises
                if (worker, event, nth, slot) in simulation.called:
                    yield Fault(worker, event, nth, point, slot, code)


def bases() -> Iterator[Case]:
    """Yield a program for each face, policy and timing."""
    policies = [policy for policy in POLICIES if policy not in ("memory", "first episode")]
    for face, policy, eager in product(FACES, policies, (False, True)):
        yield Case(face, policy, WITHOUT_REPLAY if policy in RAISING else EPISODES, eager=eager)
    for face, policy, eager in product(BRANCHING, REPLAYS, (False, True)):
        yield Case(face, policy, BRANCHES, eager=eager)
    for face, policy, eager in product(ROLLING, policies, (False, True)):
        ops = tuple(op for op in ROLLOUTS if op[0] != "call" or policy in REPLAYS)
        yield Case(face, policy, ops, eager=eager)
    for face, policy, eager in product(PACING, policies, (False, True)):
        ops = tuple(op for op in PACES if op[0] != "call" or policy in REPLAYS)
        yield Case(face, policy, ops, eager=eager)
    for face in FACES:
        yield Case(face, "starts", CALLS)
    for face, eager in product(FACES, (False, True)):
        for ops in (EPISODES, CALLS, *[ROLLOUTS] * (face in ROLLING), *[PACES] * (face in PACING)):
            yield Case(face, "memory", ops, eager=eager)
    for face in FACES:
        for ops in (EPISODES, *[ROLLOUTS] * (face in ROLLING), *[PACES] * (face in PACING)):
            yield Case(face, "snapshot", ops, asks_after=2)
        yield Case(face, "starts", EPISODES, asks_after=2)


def name_of(case: Case) -> str:
    """Return the name of such a program in a list of tests."""
    named = {BRANCHES: "branches", CALLS: "calls"}
    program = "rollouts" if ("roll", 0, 3) in case.ops else named.get(case.ops, "episodes")
    program = "own pace" if ("pace", 0) in case.ops else program
    asks = "" if case.asks_after is None else "-asks"
    return f"{case.face}-{case.policy}-{program}-{'eager' if case.eager else 'lazy'}{asks}"


def check_each_single_fault(base: Case, first: int = 0, stride: int = 1) -> None:
    """Run a program with each fault that can happen in it; fail unless it strikes and the oracle agrees.

    Args:
        base: The program.
        first, stride: Of all faults, which are run.
    """
    cases = list(singles(base))
    assert len(cases) > 50
    for case in cases[first::stride]:
        assert set(Run(case).play().struck) == set(case.faults), case
