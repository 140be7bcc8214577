"""Several envs in a process, and several ways back: the one on which all are what they were, else the best there is."""

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

from multienv import RestartPolicy, SerialVectorEnv, SubprocessEnv, SubprocessVectorEnv
from multienv.events import Event, Recovery
from multienv.testing import CounterEnv, Fault, FaultyEnv, NondeterministicEnv, StickyStateEnv

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


class RestlessEnv(NondeterministicEnv):
    """Cannot be replayed in its first episodes, and can be from then on."""

    def __init__(self, *, until: int = 1, **counter: Any) -> None:
        super().__init__(**counter)
        self.until = until
        self.episodes = 0

    def reset(self, **arguments: Any) -> Any:
        self.episodes += 1
        self.since = 0 if self.episodes <= self.until else 1000
        return super().reset(**arguments)


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


def test_what_a_snapshot_does_not_bring_back_the_journal_may(opened, seen):
    policy = RestartPolicy(snapshot_every=3)
    envs, twin = opened(counters(env1=partial(ForkShyEnv, horizon=7)), policy), SerialVectorEnv(counters())
    assert play(envs, twin, kills=[10, 18], steps=30, rows=[0, 1, 2]) == []
    assert [(event.outcome, event.rung, event.attempts) for event in recoveries(seen)] == [("exact", "journal", 2)] * 2


def test_what_a_reset_does_not_bring_back_a_state_may(opened, seen):
    """The journal reaches back to a reset of all, before which one of them has lived an episode that shows later."""
    policy = RestartPolicy(snapshots=False, journal_limit=300_000)
    made: Fns = [partial(CounterEnv, horizon=None, count_episodes=False)] * 3
    made[1] = partial(StickyStateEnv, visible_after=3, horizon=None, count_episodes=False)
    envs, twin = opened(made, policy), SerialVectorEnv(made)
    journal = envs._groups[0]._journal
    for one in (envs, twin):
        one.reset(seed=1)
        one.step(actions_of(0))
    while journal.complete or [plan.from_state for plan in journal.plans()][:2] != [False, True]:
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


def test_where_not_all_come_back_as_few_as_can_be_are_ended(opened, seen):
    policy = RestartPolicy(snapshot_every=3)
    made = counters(env1=partial(NondeterministicEnv, horizon=1000), env2=partial(ForkShyEnv, horizon=7))
    envs, twin = opened(made, policy), SerialVectorEnv(counters())
    assert play(envs, twin, kills=[10], steps=20, rows=[0, 2]) == [(10, 1)]
    assert [(event.outcome, event.attempts) for event in recoveries(seen)] == [("truncated", 2)]


def test_the_best_that_was_tried_is_not_tried_again(opened, seen, marker):
    """Nor are others, the next time, for the sake of who has differed on all ways."""
    policy = RestartPolicy(snapshot_every=3, max_restarts=2)
    made = counters(
        env0=partial(MadeOnceEnv, marker=marker, horizon=7), env1=partial(NondeterministicEnv, horizon=1000)
    )
    envs = opened(made, policy)
    twin = SerialVectorEnv(counters())
    assert play(envs, twin, kills=[10, 18], steps=25, rows=[2]) == [(10, 1), (18, 1)]
    told = [(event.outcome, event.attempts) for event in recoveries(seen)]
    assert told == [("truncated", 2), ("truncated", 1)]


def test_one_env_alone_goes_on_from_a_state_where_it_is_not_made_twice_alike(marker):
    seen: list[Event] = []
    policy = RestartPolicy(snapshots=False, journal_limit=60_000)
    env = SubprocessEnv(partial(MadeOnceEnv, marker=marker, horizon=None), restart=policy, hooks=[seen.append])
    with contextlib.closing(env):
        env.initialize()
        env.reset(seed=1)
        journal = env._supervisor._journal
        while not journal._states() or env.statistics().steps < journal._states()[0].steps + 64:
            before = env.step(np.int64(1))
        assert journal.complete
        for _ in range(2):  # the second time it is known
            os.kill(env.statistics().pid or os.getpid(), signal.SIGKILL)
            after = env.step(np.int64(1))
            assert not after[3], after[4]
            assert after[0][0] == before[0][0] + 1
            assert after[0][2] > 1.0
            before = after
        assert [(event.outcome, event.rung) for event in recoveries(seen)] == [("exact", "state")] * 2
        assert [event.attempts for event in recoveries(seen)] == [2, 1]


# --- who has differed once --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_what_an_env_was_before_it_was_truncated_does_not_condemn_it(opened, seen, mode):
    made = counters(env1=partial(RestlessEnv, horizon=7))
    envs = opened(made, RestartPolicy(snapshots=False), autoreset_mode=mode)
    twin = SerialVectorEnv(counters(), autoreset_mode=mode)
    assert play(envs, twin, kills=[5, 30, 40], steps=50, rows=[0, 2]) == [(5, 1)]
    assert [event.outcome for event in recoveries(seen)] == ["truncated", "exact", "exact"]


def test_what_shows_too_little_since_is_not_passed_off_as_exact(opened, seen):
    made = counters(env1=partial(RestlessEnv, horizon=7))
    envs, twin = opened(made, RestartPolicy(snapshots=False)), SerialVectorEnv(counters())
    # Two steps of its new episode, then one whole; the last is held against that.
    assert play(envs, twin, kills=[5, 9, 30], steps=40, rows=[0, 2]) == [(5, 1), (9, 1)]
    truncated, again, exact = recoveries(seen)
    assert "does not match" in truncated.reason
    assert "too little has been seen" in again.reason
    assert exact.outcome == "exact"


def test_who_differs_again_since_is_truncated_again(opened, seen):
    made = counters(env1=partial(RestlessEnv, until=3, horizon=7))
    envs, twin = opened(made, RestartPolicy(snapshots=False)), SerialVectorEnv(counters())
    assert play(envs, twin, kills=[5, 22, 50], steps=60, rows=[0, 2]) == [(5, 1), (22, 1)]
    assert "does not match" in recoveries(seen)[1].reason


def test_lost_in_the_reset_that_begins_it_anew(opened, seen):
    """Nobody is truncated then, and what went before does not count either."""
    made = counters(env1=partial(RestlessEnv, horizon=7))
    envs = opened(made, RestartPolicy(snapshots=False))
    envs.reset(seed=1)
    for step in range(5):
        envs.step(actions_of(step))
    kill(envs)
    envs.reset(options={"reset_mask": np.array([False, True, False])})
    for step in range(30):
        if step == 25:
            kill(envs)
        assert not envs.step(actions_of(step))[3].any(), step
    assert [event.outcome for event in recoveries(seen)] == ["exact", "exact"]


def test_who_was_truncated_by_policy_is_held_against_all_that_was_seen(opened, seen, marker):
    fault = Fault("kill", "step", at=5, once=marker)
    made = counters(env1=partial(FaultyEnv, fault=fault, horizon=7))
    envs = opened(made, RestartPolicy(snapshots=False, on_crash="truncate"))
    twin = SerialVectorEnv(counters())
    assert play(envs, twin, kills=[7], steps=20, rows=[0, 2]) == [(4, 1)]
    assert [event.outcome for event in recoveries(seen)] == ["truncated", "exact"]


def test_what_begins_after_the_doubtful_part_is_exact_without_more_to_show(opened, seen):
    made = counters(env1=partial(RestlessEnv, horizon=7))
    envs, twin = opened(made, RestartPolicy(snapshot_every=4)), SerialVectorEnv(counters())
    assert play(envs, twin, kills=[6, 10], steps=20, rows=[0, 2]) == [(6, 1)]
    assert [(event.outcome, event.rung) for event in recoveries(seen)] == [("truncated", ""), ("exact", "snapshot")]
