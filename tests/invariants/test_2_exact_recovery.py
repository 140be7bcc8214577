"""Invariant 2: a run whose workers are killed at any moments is, to the bit, the run without kills.

Observations, rewards, flags, infos, what calls return, and what the env draws from its generator afterwards.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from faces import AND_ASYNC, Face, assert_as_without_losses, counts
from invariant_envs import DrawingEnv, pong

from kit import CounterEnv, Fault, FaultyEnv, SlowEnv, first_difference
from kit.replays import prefer_resets
from multienv import Deadlines, Recovery, RestartPolicy
from multienv.testing import Killer

POLICIES = {"snapshot": RestartPolicy(snapshot_every=4, backoff=0.0), "journal": RestartPolicy(snapshots=False)}


def run_program(face: Face, seed: int, goes_on: Callable[[int], bool]) -> list[Any]:
    """Step, reset, call and set as the seed says; return all that was seen, and a draw from each env at the end."""
    dice = random.Random(seed)
    rows = face.reset(seed)
    said: list[Any] = [[astuple(row) for row in rows]]
    while goes_on(len(said)):
        what = dice.choices(["step", "reset", "draw", "set"], [30, 1, 4, 2])[0]
        actions, number = [np.int64(dice.randrange(4)) for _ in range(face.num_envs)], dice.randrange(1000)
        ended = [row.ended for row in rows]
        if any(ended):
            begun = face.reset(mask=ended)
            rows = [new if is_new else old for new, old, is_new in zip(begun, rows, ended, strict=True)]
        elif what == "step":
            rows = face.step(actions)
        elif what == "reset":
            rows = face.reset(number)
        elif what == "set":
            face.set_attr("offset", number / 8)
        drawn = face.call("draw", number * 100) if what == "draw" else []
        said.append([drawn, *map(astuple, rows)])
    return [*said, face.call("draw", 3)]


@pytest.mark.parametrize(
    ("kind", "rung"),
    [
        ("subprocess_env", "journal"),
        ("multi_env", "snapshot"),
        ("vector_env", "journal"),
        ("async_env", "snapshot"),
    ],
)
def test_a_program_with_kills_at_random_moments_is_the_program_without(kind: str, rung: str) -> None:
    env_fns = [partial(DrawingEnv, horizon=9)] * 3
    events: list[Any] = []
    with Face(kind, env_fns, restart=POLICIES[rung], hooks=[events.append]) as face:
        # Fewer kills than an innocent request is allowed to meet, so that nothing excuses a truncation.
        with Killer(face.envs, interval=(0.01, 0.05), kills=5, seed=3) as killer:
            seen = run_program(face, 6, lambda done: killer.delivered < 5)
        recoveries = [event for event in events if isinstance(event, Recovery)]
        assert {event.outcome for event in recoveries} == {"exact"}
        quiet = gymnasium.vector.SyncVectorEnv(env_fns[: face.num_envs], autoreset_mode="Disabled")
        expected = run_program(Face.around("vector_env", quiet, face.num_envs), 6, lambda done: done < len(seen) - 1)
        quiet.close()
    assert first_difference(seen, expected) is None


@pytest.mark.parametrize(
    ("kind", "manner"),
    [
        ("subprocess_env", "segv"),
        ("multi_env", "exit"),
        ("async_env", "hang_c"),
        ("vector_env", "hang_c"),
    ],
)
def test_every_way_to_lose_a_worker_is_made_good(kind: str, manner: Any, marker: str) -> None:
    env_fns: list[Any] = [CounterEnv, CounterEnv, CounterEnv]
    culprit = kind not in ("subprocess_env", "async_env")
    env_fns[culprit] = partial(FaultyEnv, fault=Fault(manner, "step", at=14, once=marker))
    with Face(kind, env_fns, deadlines=Deadlines(step=0.6), restart=POLICIES["journal"]) as face:
        actions = counts(25)
        records = face.record(actions, 8)
        assert Path(marker).exists()
        assert face.losses() == 1
        assert_as_without_losses(face, records, actions, 8)


@pytest.mark.parametrize("kind", ["subprocess_env", "vector_env"])
def test_a_journal_that_has_forgotten_its_beginning_recovers_the_envs(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer_resets(monkeypatch)
    policy = RestartPolicy(snapshots=False)
    with Face(kind, [partial(SlowEnv, step_seconds=0.001, horizon=None)] * 2, restart=policy) as face:
        actions, lost = counts(6, 2), (20, 29)
        for seed in range(30):
            kill = face.signal if seed in lost else int
            records = face.record(actions, seed, lambda step, kill=kill: kill() if step == 4 else None)  # type: ignore[misc]
            assert_as_without_losses(face, records, actions, seed)
        assert face.losses() == 2
        (told, *_) = [one for one in face.statistics() if one.losses]
        assert told.replayed_recoveries == 2
        # Of some 200 requests those of two episodes have been replayed, in each of the two recoveries.
        assert told.replayed_steps < 40


@pytest.mark.parametrize("kind", AND_ASYNC)
def test_what_has_been_returned_stays_as_it_was(kind: str) -> None:
    """Steps and resets write into the shared memory that the observations came from."""
    with Face(kind, [CounterEnv] * 2) as face:
        action = 1 if face.kind == "subprocess_env" else [1, 1]
        returned = [face.envs.reset(seed=0)[:1], *(face.envs.step(action)[:4] for _ in range(3))]
        kept = copy.deepcopy(returned)
        face.record(counts(12, 2), 1)
        assert first_difference(returned, kept) is None


@pytest.mark.parametrize(
    ("kind", "rung", "env_fn", "num_envs"),
    [
        ("vector_env", "journal", partial(gymnasium.make, "HalfCheetah-v5"), 2),
        ("subprocess_env", "snapshot", pong, 1),
    ],
    ids=["HalfCheetah", "Pong"],
)
def test_a_real_simulator_goes_on_exactly(kind: str, rung: str, env_fn: Any, num_envs: int) -> None:
    with Face(kind, [env_fn] * num_envs, restart=POLICIES[rung]) as face:
        bare = env_fn()
        space = bare.action_space
        bare.close()
        space.seed(2)
        actions = [[space.sample() for _ in range(num_envs)] for _ in range(60)]
        records = face.record(actions, 11, lambda step: face.signal() if step in (0, 47) else None)
        assert face.losses() == 2
        assert_as_without_losses(face, records, actions, 11)
