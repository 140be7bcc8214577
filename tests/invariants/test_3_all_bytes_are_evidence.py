"""Invariant 3, of what is compared: all bytes that the caller saw, whatever type they have, however many there are.

A recovery of an env that draws another world each time is never exact, though the world shows in one place alone.
"""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from world_envs import WAYS, FinalWorld, VectorRewards, WorldEnv

from kit import ForkingPolicy, kill_worker
from multienv import Recovery, RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv._engine.recovery.verification import same

pytestmark = pytest.mark.usefixtures("monitor_stays")
IN_ROWS = ("a dict in another order", "float64 in a float32 Box", "one pixel", "one of many pixels", "long doubles")


# By a replay alone, and by a snapshot that stands some steps before the death.
POLICIES = {
    "replay": (RestartPolicy(snapshots=False), 5),
    "snapshot": (ForkingPolicy(snapshot_every=16), 24),
}


def lost(way: str, chance: str, policy: str, *, batch: bool, **options: Any) -> tuple[Any, Any, list[Recovery]]:
    """Kill a worker; return what the next step returned, what it would have returned, and the recoveries."""
    restart, steps = POLICIES[policy]
    events: list[Any] = []
    options = {"restart": restart, "hooks": [events.append], **options}
    env_fn = partial(WorldEnv, way, chance)
    if batch:
        env: Any = SubprocessVectorEnv([env_fn] * 2, envs_per_worker=2, **options)
        twin: Any = gymnasium.vector.SyncVectorEnv([env_fn] * 2)
        action: Any = np.zeros(2, np.int64)
    else:
        env, twin, action = SubprocessEnv(env_fn, **options), env_fn(), 0
    with env:
        for one in (env, twin):
            one.reset(seed=1)
        for _ in range(steps):
            env.step(action)
            twin.step(action)
        kill_worker(env)
        found, expected = env.step(action), twin.step(action)
    return found, expected, [event for event in events if isinstance(event, Recovery)]


# A replay that begins at a snapshot is compared by the same code: once for each form that evidence has.
FORMS = [
    ("a dict in another order", False),
    ("float64 in a float32 Box", True),
    ("one pixel", True),
    ("a tensor", False),
]
CASES = [
    *((way, batch, "replay") for way in WAYS for batch in (False, True) if not batch or way in IN_ROWS),
    *((way, batch, "snapshot") for way, batch in FORMS),
]
all_cases = pytest.mark.parametrize(
    ("way", "batch", "policy"), CASES, ids=lambda value: {True: "batch", False: "one"}.get(value, value)
)


@all_cases
def test_another_world_is_never_taken_for_the_same_wherever_it_shows(way: str, batch: bool, policy: str) -> None:
    chance = "reset" if policy == "replay" else "step"  # a snapshot keeps what a reset has drawn
    (_, rewards, _, truncated, infos), _, (recovery,) = lost(way, chance, policy, batch=batch)
    assert recovery.outcome == "truncated"
    assert np.all(truncated)
    assert not np.any(rewards)
    assert "the observation differs" in str(infos["multienv"]["reason"])


@all_cases
def test_the_same_world_is_recovered_exactly_however_it_is_shown(way: str, batch: bool, policy: str) -> None:
    found, expected, (recovery,) = lost(way, "", policy, batch=batch)
    assert (recovery.outcome, recovery.reason) == ("exact", "")
    assert recovery.method == {"replay": "journal"}.get(policy, policy)
    if way.startswith("a tensor"):
        unpacked = lambda seen: seen["x"].values if isinstance(seen, dict) else [seen.values, seen.goal]  # noqa: E731
        found, expected = ((unpacked(values[0]), *values[1:4]) for values in (found, expected))
    if way == "a list that pickles to more":
        found, expected = ((values[0].goal, *values[1:4]) for values in (found, pickle.loads(pickle.dumps(expected))))
    assert same(tuple(found[:4]), tuple(expected[:4]))


@pytest.mark.parametrize("policy", list(POLICIES))
def test_what_cannot_be_compared_is_never_exact_and_the_reason_names_its_type(policy: str) -> None:
    found, _, (recovery,) = lost("opaque", "", policy, batch=False)
    assert recovery.outcome == "truncated"
    assert found[3]
    assert "a value of type Opaque, which cannot be compared" in found[4]["multienv"]["reason"]


@pytest.mark.parametrize("way", IN_ROWS)
def test_observation_that_ended_an_episode_is_compared_though_the_next_one_began_in_the_same_step(way: str) -> None:
    for chance, expected in (("", "exact"), ("end", "truncated")):
        events: list[Any] = []
        with SubprocessVectorEnv(
            [partial(FinalWorld, way, chance, horizon) for horizon in (3, 5)],
            envs_per_worker=2,
            autoreset_mode="SAME_STEP",
            restart=RestartPolicy(snapshots=False),
            hooks=[events.append],
        ) as envs:
            envs.reset(seed=1)
            for step in range(9):
                if step == 8:
                    kill_worker(envs)
                *_, infos = envs.step(np.zeros(2, np.int64))
        (recovery,) = [event for event in events if isinstance(event, Recovery)]
        assert recovery.outcome == expected, chance
        if chance:
            assert "the final observation differs" in str(infos["final_info"]["multienv"]["reason"])


@pytest.mark.parametrize("chance", ["", "reset"])
def test_a_vector_reward_is_compared(chance: str) -> None:
    events: list[Any] = []
    env_fn = partial(VectorRewards, "float64 in a float32 Box", chance)
    with SubprocessEnv(env_fn, restart=RestartPolicy(snapshots=False), hooks=[events.append]) as env:
        env.reset(seed=1)
        for _ in range(3):
            env.step(0)
        kill_worker(env)
        env.step(0)
    (recovery,) = [event for event in events if isinstance(event, Recovery)]
    assert recovery.outcome == ("truncated" if chance else "exact")
