"""Invariant 10: each worker has its own, recorded seeds for ``random`` and ``numpy.random``.

Workers that are forked from one process share the state of both generators unless somebody sees to it. That they are
recorded shows twice: in the crash report, and in a recovery after which the env draws what it would have drawn.
"""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faces import KINDS, Face, counts

from kit import ForkingPolicy, GlobalRandomEnv, Transition, assert_same_trajectory, kill_worker
from kit.trainer_process import becomes_true
from multienv import (
    AsyncSubprocessEnvManager,
    MultiEnv,
    Recovery,
    RestartPolicy,
    SubprocessEnv,
    SubprocessVectorEnv,
    create_subprocess_envs,
)

ENV = partial(GlobalRandomEnv, horizon=7)


def draws_of_workers(kind: str, context: str, num_envs: int, **options: Any) -> list[tuple[float, float]]:
    """Return a draw of ``random`` and one of ``numpy.random`` of each of so many workers."""
    if kind == "manager":
        with AsyncSubprocessEnvManager([ENV] * num_envs, context=context, **options) as manager:
            return [tuple(drawn) for drawn in manager.call("draws")]
    if kind == "vector_env":
        envs: Any = SubprocessVectorEnv([ENV] * num_envs, envs_per_worker=1, context=context, **options)
    else:
        envs = MultiEnv(create_subprocess_envs([ENV] * num_envs, context=context, **options))
    try:
        envs.reset(seed=[0] * num_envs)  # the env's own seed has nothing to do with it
        return [tuple(drawn) for drawn in envs.call("draws")]
    finally:
        envs.close()


@pytest.mark.parametrize(
    ("kind", "context", "num_envs"),
    [
        ("multi_env", "forkserver", 4),
        ("vector_env", "forkserver", 4),
        pytest.param("manager", "forkserver", 3, marks=pytest.mark.ci),
        pytest.param("multi_env", "spawn", 2, marks=pytest.mark.ci),
    ],
)
def test_no_two_workers_share_a_global_generator(kind: str, context: str, num_envs: int) -> None:
    drawn = draws_of_workers(kind, context, num_envs)
    with SubprocessEnv(ENV) as living:
        living.reset(seed=0)
        drawn.append(tuple(living.call("draws")))
        drawn += draws_of_workers(kind, context, num_envs)
    for draws in zip(*drawn, strict=True):
        assert len(set(draws[num_envs:])) == num_envs + 1, "two of the workers that live have the same seeds"
        assert len(set(draws[:num_envs])) == num_envs


@pytest.mark.parametrize("kind", ["multi_env", "vector_env", "manager"])
def test_a_seeded_script_gives_the_same_run_each_time(kind: str) -> None:
    def seeded(number: int, **options: Any) -> list[tuple[float, float]]:
        random.seed(number)
        np.random.seed(number)
        return draws_of_workers(kind, "forkserver", 2, **options)

    first = seeded(3)
    assert seeded(3) == first
    assert set(seeded(4)).isdisjoint(first)
    assert seeded(3, worker_seed=8) == seeded(4, worker_seed=8)
    assert set(seeded(3, worker_seed=8)).isdisjoint(first)
    random.random()
    again = draws_of_workers(kind, "forkserver", 2)
    assert set(again).isdisjoint(first)
    assert [of_numpy for _, of_numpy in again] == [of_numpy for _, of_numpy in first], "nothing else need be seeded"


def test_a_new_life_of_the_envs_is_the_same_in_each_run_too() -> None:
    """After a loss that ends the episode, the replacement draws other numbers than the lost worker, but recorded ones."""

    def run() -> list[Any]:
        random.seed(3)
        np.random.seed(3)
        with SubprocessEnv(ENV, restart=RestartPolicy(on_crash="truncate")) as env:
            env.reset(seed=1)
            drawn = [env.call("draws")]
            kill_worker(env)
            assert env.step(1)[3]
            env.reset(seed=1)
            return [*drawn, env.call("draws")]

    first, second = run()
    assert first != second
    assert run() == [first, second]


@pytest.mark.parametrize("kind", KINDS)
def test_the_generators_of_the_trainer_are_left_alone(kind: str) -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    with Face(kind, [ENV] * 2) as face:
        face.record(counts(9, 2), 0, lambda step: face.signal() if step == 5 else None)
        assert face.losses() == 1
    assert (random.random(), np.random.random()) == expected


@pytest.mark.parametrize(
    ("rung", "policy"),
    [("journal", RestartPolicy(snapshots=False)), ("snapshot", ForkingPolicy(snapshot_every=3))],
    ids=["journal", "snapshot"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_recovery_a_worker_draws_what_it_would_have_drawn(
    kind: str, rung: str, policy: RestartPolicy, reports: Path
) -> None:
    events: list[Any] = []
    with Face(kind, [ENV] * 2, restart=policy, hooks=[events.append]) as face:
        records = face.record(counts(20, 2), 3, lambda step: face.signal() if step in (4, 16) else None)
        after = face.call("draws")
        assert face.losses() == 2
        recoveries = [event for event in events if isinstance(event, Recovery)]
        assert [(event.outcome, event.method) for event in recoveries] == [("exact", rung)] * 2
    assert becomes_true(lambda: len(list(reports.glob("*.json"))) == 2)  # they are written a moment later
    seeds = seeds_in(reports)
    assert len(seeds) == 1
    # The same in this process, under the seeds that the reports have.
    ours = random.getstate(), np.random.get_state()
    try:
        expected, draws = again(seeds.pop(), face.num_envs if kind == "vector_env" else 1)
    finally:
        random.setstate(ours[0])
        np.random.set_state(ours[1])
    for record, own in zip(records, expected, strict=False):
        assert_same_trajectory(record, own)
    assert [tuple(one) for one in after][: len(draws)] == draws


def seeds_in(reports: Path) -> set[tuple[int, int]]:
    """Return the seeds of processes that the crash reports tell of, of env 0."""
    found = [json.loads(path.read_text()) for path in reports.glob("*.json")]
    assert found
    return {tuple(report["build"]["seeds"]) for report in found}


def again(seeds: tuple[int, int], num_envs: int) -> tuple[list[list[Transition]], list[tuple[float, float]]]:
    """Do what the worker of env 0 did, with as many envs as it has, in this process."""
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    envs = [ENV() for _ in range(num_envs)]
    records = []
    for place, env in enumerate(envs):
        records.append([Transition(env.reset(seed=3 + place)[0], is_reset=True)])
    for row in counts(20, 2):
        for env, record in zip(envs, records, strict=True):
            if record[-1].ended:
                record.append(Transition(env.reset()[0], is_reset=True))
        for env, record, action in zip(envs, records, row, strict=False):
            record.append(Transition(*env.step(action), action=action))
    return records, [env.draws() for env in envs]
