"""Invariant 3, of what is compared: all bytes that the caller saw, whatever type they have, however many there are.

A recovery of an env that draws another world each time is never exact, though the world shows in one place alone.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from multienv import Recovery, RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv.recovery.verification import same

LARGE = 5000  # what took more than 4 KiB was not compared once


class AnySpace(spaces.Space[Any]):
    """Has any value: such observations have no fixed layout."""

    def contains(self, x: Any) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnySpace)

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass
class Seen:
    frame: Any
    words: str


class Tensor:
    """As torch's: it is read through numpy, and its pickle has the address of its memory in it."""

    def __init__(self, values: Any) -> None:
        self.values, self.address = np.asarray(values), id(self)
        self.shape, self.dtype = self.values.shape, self.values.dtype

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.values

    def __dlpack__(self) -> None:
        raise NotImplementedError


class Opaque:
    """Pickles to other bytes each time."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return Opaque, (self.value,), {"nonce": os.urandom(8)}


def zeros(value: float, shape: Any = LARGE, dtype: Any = np.float64) -> Any:
    """Return an array that shows the value in its last place but one."""
    array = np.zeros(shape, dtype)
    array.reshape(-1)[-2] = value
    return array


BOX = spaces.Box(-1, 1, (LARGE,), np.float32)
# What an env returns to show a number between 0 and 1, and the space that it says it has.
WAYS: dict[str, tuple[Callable[[float], Any], Any]] = {
    "a dict in another order": (
        lambda value: {"b": zeros(value, dtype=np.float32), "a": zeros(0, dtype=np.float32)},
        spaces.Dict(a=BOX, b=BOX),
    ),
    "float64 in a float32 Box": (zeros, BOX),
    "a small float64": (lambda value: zeros(value, 3), spaces.Box(-1, 1, (3,), np.float32)),
    "one pixel": (
        lambda value: zeros(int(255 * value), (300, 200, 3), np.uint8),
        spaces.Box(0, 255, (300, 200, 3), np.uint8),
    ),
    "one of many pixels": (
        lambda value: zeros(int(255 * value), (700, 500, 3), np.uint8),
        spaces.Box(0, 255, (700, 500, 3), np.uint8),
    ),
    "a tuple of a number and an array": (
        lambda value: (3, zeros(value, dtype=np.float32)),
        spaces.Tuple([spaces.Discrete(9), BOX]),
    ),
    "a list": (lambda value: zeros(value, dtype=np.float32).tolist(), BOX),
    "text": (lambda value: "x" * LARGE + str(value), spaces.Text(2 * LARGE)),
    "a sequence": (lambda value: (zeros(value, dtype=np.float32),) * 2, spaces.Sequence(BOX)),
    "bytes and None": (lambda value: [None, bytes(LARGE) + np.float64(value).tobytes()], AnySpace()),
    "nested containers": (lambda value: {"a": [{"b": (1, {2: zeros(value)})}, {3, 1}]}, AnySpace()),
    "a dataclass": (lambda value: Seen(zeros(value), "words"), AnySpace()),
    "a tensor": (lambda value: {"x": Tensor(zeros(value))}, AnySpace()),
    "numpy's scalars": (lambda value: [np.float32(1), np.float64(value), "x" * LARGE], AnySpace()),
}
IN_ROWS = ("a dict in another order", "float64 in a float32 Box", "a small float64", "one pixel", "one of many pixels",
           "a tuple of a number and an array", "a list", "text", "a sequence")  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def monitor_stays() -> Iterator[None]:
    """Keep a worker, and with it the monitor, which would end and be launched again between many of these tests."""
    with SubprocessEnv(partial(WorldEnv, "text", "")):
        yield


class WorldEnv(gymnasium.Env[Any, Any]):
    """Shows a number that is drawn in each reset, or in each step, and nowhere else but in its observations.

    Args:
        way: How it is shown, a key of :data:`WAYS`; or ``"opaque"``.
        chance: Drawn from what no replay can know: ``"reset"``, ``"step"``; ``""``: from the env's own generator.
        horizon: Steps in an episode.
    """

    def __init__(self, way: str, chance: str, horizon: int = 1000) -> None:
        self.show, self.observation_space = WAYS.get(way, (Opaque, AnySpace()))
        self.action_space = spaces.Discrete(2)
        self.chance, self.horizon, self.world, self.steps = chance, horizon, 0.0, 0

    def _draw(self, when: str) -> None:
        known = float(self.np_random.random())
        self.world = int.from_bytes(os.urandom(6), "little") / 2**48 if self.chance == when else known

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._draw("reset")
        self.steps = 0
        return self.show(self.world), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.chance != "reset":
            self._draw("step")
        return self.show(self.world), 1.0, self.steps >= self.horizon, False, {}


# By a replay alone, and by a snapshot that stands some steps before the death.
POLICIES = {
    "replay": (RestartPolicy(snapshots=False), 5),
    "snapshot": (RestartPolicy(snapshot_every=16), 24),
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
        told = env.statistics()[0] if batch else env.statistics()
        kill(told.pid)
        found, expected = env.step(action), twin.step(action)
    return found, expected, [event for event in events if isinstance(event, Recovery)]


def kill(worker: int | None) -> None:
    assert worker
    os.kill(worker, signal.SIGKILL)


CASES = [(way, batch) for way in WAYS for batch in (False, True) if not batch or way in IN_ROWS]


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize(("way", "batch"), CASES, ids=lambda value: {True: "batch", False: "one"}.get(value, value))
def test_another_world_is_never_taken_for_the_same_wherever_it_shows(way: str, batch: bool, policy: str) -> None:
    chance = "reset" if policy == "replay" else "step"  # a snapshot keeps what a reset has drawn
    (_, rewards, _, truncated, infos), _, (recovery,) = lost(way, chance, policy, batch=batch)
    assert recovery.outcome == "truncated"
    assert np.all(truncated)
    assert not np.any(rewards)
    assert "the observation differs" in str(infos["multienv"]["reason"])


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize(("way", "batch"), CASES, ids=lambda value: {True: "batch", False: "one"}.get(value, value))
def test_the_same_world_is_recovered_exactly_however_it_is_shown(way: str, batch: bool, policy: str) -> None:
    found, expected, (recovery,) = lost(way, "", policy, batch=batch)
    assert (recovery.outcome, recovery.reason) == ("exact", "")
    assert recovery.method == {"replay": "journal"}.get(policy, policy)
    if way == "a tensor":
        found, expected = ((values[0]["x"].values, *values[1:4]) for values in (found, expected))
    assert same(tuple(found[:4]), tuple(expected[:4]))


@pytest.mark.parametrize("policy", list(POLICIES))
def test_what_cannot_be_compared_is_never_exact_and_the_reason_names_its_type(policy: str) -> None:
    found, _, (recovery,) = lost("opaque", "", policy, batch=False)
    assert recovery.outcome == "truncated"
    assert found[3]
    assert "a value of type Opaque, which cannot be compared" in found[4]["multienv"]["reason"]


class FinalWorld(WorldEnv):
    """Draws the last number of each episode from what no replay can know; all others, and what follows, are known."""

    def step(self, action: Any) -> Any:
        told = super().step(action)
        if told[2] and self.chance == "end":
            self.world = int.from_bytes(os.urandom(6), "little") / 2**48
        return (self.show(self.world), *told[1:])


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
                    kill(envs.statistics()[0].pid)
                *_, infos = envs.step(np.zeros(2, np.int64))
        (recovery,) = [event for event in events if isinstance(event, Recovery)]
        assert recovery.outcome == expected, chance
        if chance:
            assert "the final observation differs" in str(infos["final_info"]["multienv"]["reason"])


class VectorRewards(WorldEnv):
    """Gives vectors as rewards, as mo-gymnasium does, beside an observation that does not fit its space."""

    def step(self, action: Any) -> Any:
        _, _, *rest = super().step(action)
        return (self.show(0.0), np.array([1.0, self.world]), *rest)


@pytest.mark.parametrize("chance", ["", "reset"])
def test_a_vector_reward_is_compared(chance: str) -> None:
    events: list[Any] = []
    env_fn = partial(VectorRewards, "a small float64", chance)
    with SubprocessEnv(env_fn, restart=RestartPolicy(snapshots=False), hooks=[events.append]) as env:
        env.reset(seed=1)
        for _ in range(3):
            env.step(0)
        kill(env.statistics().pid)
        env.step(0)
    (recovery,) = [event for event in events if isinstance(event, Recovery)]
    assert recovery.outcome == ("truncated" if chance else "exact")
