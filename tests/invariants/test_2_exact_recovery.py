"""Invariant 2: a run whose workers are killed at any moments is, to the bit, the run without kills.

Observations, rewards, flags, infos, what calls return, and what the env draws from its generator afterwards. At random
moments: ``test_nemesis.py``.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from faces import AND_ASYNC, Face, assert_as_without_losses, counts
from invariant_envs import pong

from kit import CounterEnv, Fault, FaultyEnv, ForkingPolicy, SlowEnv, first_difference
from kit.replays import prefer_resets
from multienv import Deadlines, RestartPolicy

POLICIES = {"snapshot": ForkingPolicy(snapshot_every=4, backoff=0.0), "journal": RestartPolicy(snapshots=False)}


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
    deadlines = Deadlines(step=1.2 if manner == "hang_c" else 60.0)
    with Face(kind, env_fns, deadlines=deadlines, restart=POLICIES["journal"]) as face:
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
