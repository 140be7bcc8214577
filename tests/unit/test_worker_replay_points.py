"""Resets at which a replay can begin: when they are told of."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest

from multienv._engine.wire.messages import Build
from multienv._engine.wire.segment import BUSY, STEP_SECONDS, Segment
from multienv._engine.worker import replay_points as module
from multienv._engine.worker.env_group import EnvGroup


class Drawing(gymnasium.Env[float, int]):
    """Draws at each reset; ``outcome`` is what the reset then returns, or raises."""

    observation_space = gymnasium.spaces.Box(0, 1)
    action_space = gymnasium.spaces.Discrete(2)
    outcome: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        drawn = float(self.np_random.random()), random.random()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return (drawn, {}) if self.outcome is None else self.outcome


@pytest.fixture(autouse=True)
def telling_takes_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**9))
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(ticks) / 1000))


def group_with(share: float) -> EnvGroup:
    return EnvGroup(
        [Drawing(), Drawing()], Build(b"", False, "", None, (1, 2), None, replay_point_share=share), Segment(-1)
    )


def told_by_resets(group: EnvGroup, number: int, *slots: int) -> list[int]:
    """Reset slots in the request with this number; return those of which the reply tells."""
    group.words[BUSY] = number
    for slot in slots:
        group.reset(slot)
    return list(group.replay_points.pop_generators())


def test_resets_are_told_of_so_often_that_it_takes_a_fixed_part_of_the_time_of_the_envs():
    group, share, step, told = group_with(share=0.01), 0.01, 0.002, 0
    group.replay_points.segment.times[STEP_SECONDS] = step
    for number in range(1, 20_001):
        ended = [slot for slot, length in enumerate((7, 12)) if number % length == 0]
        told += len(told_by_resets(group, number, *ended))
    assert 0.9 * share < told * 0.001 / (20_000 * step) <= share


def test_an_env_that_was_reset_after_a_short_time_is_told_of_at_a_later_reset():
    group = group_with(share=0.01)
    group.replay_points.segment.times[STEP_SECONDS] = 0.002
    assert told_by_resets(group, 5, 0, 1) == [0, 1]
    # Each is taken to cost a tenth of a millisecond at first, and a tenth more each time: two slots, of which each
    # may take a hundredth of the time, have 12.1 steps between.
    assert [told_by_resets(group, *one) for one in ((17, 0), (18, 0), (19, 1))] == [[], [0], [1]]


@pytest.mark.parametrize("outcome", [ValueError("no episode"), "no pair"], ids=["raises", "is no pair"])
def test_a_reset_that_fails_is_not_told_of_but_the_next_one_is(outcome: Any):
    group = group_with(share=1e-9)
    group.envs[0].outcome = outcome  # type: ignore[attr-defined]
    group.words[BUSY] = 1
    with pytest.raises((ValueError, TypeError)):
        group.reset(0)
    assert told_by_resets(group, 1, 1) == [1]
    group.envs[0].outcome = None  # type: ignore[attr-defined]
    assert told_by_resets(group, 2, 0) == [0]
