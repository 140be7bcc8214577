"""Several envs in a process, and several ways back: the first on which no env strays, else the last there is."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from kit import CounterEnv, NondeterministicEnv, StickyStateEnv
from multienv import RestartPolicy, SerialVectorEnv, SubprocessEnv, SubprocessVectorEnv
from multienv.events import Event, Recovery

Fns = list[Callable[[], gymnasium.Env[Any, Any]]]


class ForkShyEnv(CounterEnv):
    """Is not what it was in a forked copy."""

    def __init__(self, **counter: Any) -> None:
        super().__init__(**counter)
        os.register_at_fork(after_in_child=self._be_another)

    def _be_another(self) -> None:
        self.offset += 1.0


class MadeOnceEnv(CounterEnv):
    """Is not made twice alike."""

    def __init__(self, *, marker: str, **counter: Any) -> None:
        super().__init__(**counter)
        with Path(marker).open("a") as file:
            file.write("x")
        self.offset = float(Path(marker).stat().st_size)


@pytest.fixture
def seen() -> list[Event]:
    return []


@pytest.fixture
def opened(seen: list[Event]) -> Iterator[Callable[..., SubprocessVectorEnv]]:
    with contextlib.ExitStack() as stack:

        def open_envs(fns: Fns, policy: RestartPolicy, **options: Any) -> SubprocessVectorEnv:
            envs = SubprocessVectorEnv(fns, envs_per_worker=len(fns), restart=policy, hooks=[seen.append], **options)
            stack.callback(envs.close)
            return envs

        yield open_envs


def counters(**others: Callable[[], Any]) -> Fns:
    made: Fns = [partial(CounterEnv, horizon=7) for _ in range(3)]
    for place, env_fn in others.items():
        made[int(place.removeprefix("env"))] = env_fn
    return made


def actions_of(step: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(step).integers(0, 4, 3)


def kill(envs: SubprocessVectorEnv) -> None:
    os.kill(envs.statistics()[0].pid or os.getpid(), signal.SIGKILL)


def recoveries(seen: Sequence[Event]) -> list[Recovery]:
    return [event for event in seen if isinstance(event, Recovery)]


def play(envs: SubprocessVectorEnv, twin: SerialVectorEnv, *, kills: Sequence[int], steps: int, rows: Any) -> Any:
    """Step both, killing before some steps, and hold some rows against each other; who is truncated, and when."""
    assert envs.reset(seed=1)[0][rows].tobytes() == twin.reset(seed=1)[0][rows].tobytes()
    truncated = []
    for step in range(steps):
        if step in kills:
            kill(envs)
        batch, expected = envs.step(actions_of(step)), twin.step(actions_of(step))
        for mine, own in zip(batch[:4], expected[:4], strict=True):
            assert mine[rows].tobytes() == own[rows].tobytes(), step
        truncated += [(step, int(row)) for row in np.flatnonzero(batch[3])]
    return truncated


# --- strict first -----------------------------------------------------------------------------------
# Snapshots are taken after every third request, or fourth; kills come when there has been another since.


def test_an_env_that_a_snapshot_does_not_bring_back_is_brought_back_by_the_journal(opened, seen):
    policy = RestartPolicy(snapshot_every=3)
    envs, twin = opened(counters(env1=partial(ForkShyEnv, horizon=7)), policy), SerialVectorEnv(counters())
    assert play(envs, twin, kills=[10, 18], steps=30, rows=[0, 1, 2]) == []
    assert [(event.outcome, event.rung, event.attempts) for event in recoveries(seen)] == [("exact", "journal", 2)] * 2


def test_envs_that_a_replay_from_a_reset_does_not_bring_back_are_brought_back_from_a_state(opened, seen):
    """The journal reaches back to a reset of all, before which one of them has lived an episode that shows later."""
    policy = RestartPolicy(snapshots=False, journal_limit=300_000)
    made: Fns = [partial(CounterEnv, horizon=None, count_episodes=False)] * 3
    made[1] = partial(StickyStateEnv, visible_after=3, horizon=None, count_episodes=False)
    envs, twin = opened(made, policy), SerialVectorEnv(made)
    journal = envs._workers[0].journal
    for one in (envs, twin):
        one.reset(seed=1)
        one.step(actions_of(0))
    while journal.complete or [plan.rung for plan in journal.plans()][:2] != ["journal", "state"]:
        for one in (envs, twin):
            one.reset()
            for step in range(700):
                one.step(actions_of(step))
    kill(envs)
    for step in range(20):
        batch, expected = envs.step(actions_of(step)), twin.step(actions_of(step))
        for mine, own in zip(batch[:4], expected[:4], strict=True):
            assert mine.tobytes() == own.tobytes(), step
    assert [(event.outcome, event.rung) for event in recoveries(seen)] == [("exact", "state")]


def test_an_env_that_strays_on_every_rung_is_truncated_alone_by_the_last(opened, seen):
    policy = RestartPolicy(snapshot_every=3)
    made = counters(env1=partial(NondeterministicEnv, horizon=1000), env2=partial(ForkShyEnv, horizon=7))
    envs, twin = opened(made, policy), SerialVectorEnv(counters())
    assert play(envs, twin, kills=[10], steps=20, rows=[0, 2]) == [(10, 1)]
    assert [(event.outcome, event.attempts) for event in recoveries(seen)] == [("truncated", 2)]


def test_an_env_that_is_not_built_twice_alike_goes_on_from_a_state(marker):
    seen: list[Event] = []
    policy = RestartPolicy(snapshots=False, journal_limit=60_000)
    env = SubprocessEnv(partial(MadeOnceEnv, marker=marker, horizon=None), restart=policy, hooks=[seen.append])
    with contextlib.closing(env):
        env.initialize()
        env.reset(seed=1)
        journal = env._supervisor.journal
        while [plan.rung for plan in journal.plans()] != ["journal", "state"]:
            before = env.step(np.int64(1))
        assert journal.complete
        for _ in range(2):
            os.kill(env.statistics().pid or os.getpid(), signal.SIGKILL)
            after = env.step(np.int64(1))
            assert not after[3], after[4]
            assert after[0][0] == before[0][0] + 1
            assert after[0][2] > 1.0
            before = after
        assert [(event.outcome, event.rung) for event in recoveries(seen)] == [("exact", "state")] * 2
        assert [event.attempts for event in recoveries(seen)] == [2, 2]


# --- strays and resets ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_an_env_that_cannot_be_replayed_is_truncated_at_each_loss_and_the_others_never(opened, seen, mode):
    envs = opened(
        counters(env1=partial(NondeterministicEnv, horizon=7)), RestartPolicy(snapshots=False), autoreset_mode=mode
    )
    twin = SerialVectorEnv(counters(), autoreset_mode=mode)
    assert play(envs, twin, kills=[5, 30, 40], steps=50, rows=[0, 2]) == [(5, 1), (30, 1), (40, 1)]
    assert [event.outcome for event in recoveries(seen)] == ["truncated"] * 3


def test_an_env_that_strays_in_a_recovery_of_its_own_reset_is_not_truncated(opened, seen):
    envs = opened(counters(env1=partial(NondeterministicEnv, horizon=7)), RestartPolicy(snapshots=False))
    twin = SerialVectorEnv(counters())
    for one in (envs, twin):
        one.reset(seed=1)
        for step in range(5):
            one.step(actions_of(step))
    kill(envs)
    mask = np.array([False, True, False])
    shown, own = (one.reset(options={"reset_mask": mask.copy()})[0] for one in (envs, twin))
    assert shown[[0, 2]].tobytes() == own[[0, 2]].tobytes()
    assert shown[1, 0] == 0
    for step in range(5, 11):
        batch, expected = envs.step(actions_of(step)), twin.step(actions_of(step))
        assert batch[0][[0, 2]].tobytes() == expected[0][[0, 2]].tobytes()
        assert not batch[3].any(), step
    assert [event.outcome for event in recoveries(seen)] == ["fresh"]
