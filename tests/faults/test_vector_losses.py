"""Several envs in a process that dies: all are brought back exactly, or honestly ended; other processes go on.

Each test steps a batch beside an undisturbed twin in this process. Of several ways back the first on which no env strays
is taken, else the last there is, and those that stray are truncated alone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from batches import (
    CULPRIT,
    DISABLED,
    FIRST,
    NEXT_STEP,
    NO_SNAPSHOTS,
    NUM_ENVS,
    OTHERS,
    SAME_STEP,
    SECOND,
    Pair,
    counters,
)
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from kit import CounterEnv, Fault, FaultyEnv, NondeterministicEnv, SpaceEnv
from multienv import RestartPolicy, SubprocessEnv
from multienv.errors import (
    EnvsFailedError,
    PoisonError,
    RestartBudgetExceeded,
    WorkerLostError,
)
from multienv.events import Recovery, Recycled


def faulty(manner: Any, **fault: Any) -> Callable[[], Any]:
    return partial(FaultyEnv, fault=Fault(manner, "step", **fault), horizon=30)


# --- brought back ---------------------------------------------------------------------------------------


def test_recycling_in_the_middle_of_episodes_leaves_no_trace() -> None:
    with Pair(counters(), each=2, restart=RestartPolicy(recycle_after_steps=7)) as pair:
        for step in range(200):  # it is looked at every 64
            if step == 150:
                pair.reset(np.arange(NUM_ENVS) % 2 == 0)
            pair.step(strike=partial(pair.kill, step % 3) if step % 90 == 80 else None)
        recycled = [event.outcome for event in pair.events if isinstance(event, Recycled)]
        assert len(recycled) > 4
        assert set(recycled) == set(pair.outcomes()) == {"exact"}
        assert len(pair.outcomes()) == 2


SPACES = {
    "text": spaces.Text(max_length=12),
    "graph": spaces.Graph(spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3)),
    "long_sequence": spaces.Tuple((spaces.Sequence(spaces.Discrete(4)), spaces.Box(-1.0, 1.0, (40, 40), np.float64))),
}


@pytest.mark.parametrize(("name", "snapshots"), [("text", True), ("graph", False), ("long_sequence", False)])
def test_observations_without_arrays_are_brought_back(name: str, snapshots: bool) -> None:
    fns = [partial(SpaceEnv, observation_space=SPACES[name], horizon=4 + index) for index in range(4)]
    with Pair(fns, each=2, restart=RestartPolicy(snapshots=snapshots, snapshot_every=3)) as pair:
        for step in range(16):
            pair.step(strike=partial(pair.kill, 0) if step in (7, 13) else None)
        assert pair.outcomes() == ["exact"] * 2


class UndecidedEnv(SpaceEnv):
    """Large observations without arrays; the operating system decides on the reward of one step."""

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        drawn = float(os.urandom(1)[0] + 1) if self.episode_step == 2 else 0.0
        return (observation, reward + drawn, *rest)


def test_rewards_beside_large_observations_without_arrays_are_verified_for_every_step() -> None:
    fns = [partial(SpaceEnv, observation_space=SPACES["long_sequence"], horizon=50) for _ in range(3)]
    fns[CULPRIT] = partial(UndecidedEnv, observation_space=SPACES["long_sequence"], horizon=50)
    with Pair(fns, restart=NO_SNAPSHOTS) as pair:
        for step in range(8):  # the kill comes long after the step in question
            if step == 6:
                pair.kill(0)
            batch = pair.step([0, 2])
            assert batch[3].tolist() == [False, step == 6, False]
        assert pair.outcomes() == ["truncated"]


# --- whose fault it is ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_two_envs_that_end_processes_in_the_same_step_are_both_truncated(mode: AutoresetMode) -> None:
    culprit = faulty("exit", at=4, per="episode")
    with Pair(counters(env0=culprit, env2=culprit), counters(), mode=mode) as pair:
        ended = [(step, int(row)) for step in range(8) for row in np.flatnonzero(pair.step([1, *SECOND])[3])]
        assert ended[:2] == [(3, 0), (3, 2)]
        assert {row for _, row in ended} == pair.culprits() == {0, 2}


def test_an_env_that_ends_every_process_beside_one_that_cannot_be_replayed() -> None:
    stray = partial(NondeterministicEnv, since=1, horizon=1000)
    with Pair(counters(env0=faulty("exit", at=4), env2=stray), counters(), restart=NO_SNAPSHOTS) as pair:
        for _ in range(4):
            batch = pair.step([1, *SECOND])
        assert batch[3].tolist() == [True, False, True, False, False, False]
        reasons = batch[4]["multienv"]["reason"]
        assert "ended 2 processes" in reasons[0]
        assert "does not match" in reasons[2]


def test_an_exception_ends_the_episode_of_its_env_if_the_policy_says_so() -> None:
    with Pair(counters(env1=faulty("raise", at=5)), counters(), restart=RestartPolicy(on_error="truncate")) as pair:
        for step in range(12):
            batch = pair.step(OTHERS)
            assert batch[3][CULPRIT] == (step == 4)
            # The next step begins an episode, as ever.
            assert batch[0][CULPRIT, 0] == [1, 2, 3, 4, 4, *range(20)][step]


@pytest.mark.parametrize("mode", [SAME_STEP, pytest.param(NEXT_STEP, marks=pytest.mark.soak)])
def test_episodes_that_cannot_be_replayed_are_truncated_and_those_after_them_are_replayed(mode: Any) -> None:
    """The journal was trimmed, and there are no snapshots; afterwards there is a journal again."""
    policy = RestartPolicy(snapshots=False, journal_limit=40_000, state_anchors=False)
    with Pair(counters(), mode=mode, restart=policy) as pair:
        for _ in range(1100):
            pair.step()
        pair.kill(0)
        for step in range(30):
            if step == 20:
                pair.kill(0)  # episodes begun by autoreset in a new process are known from the seed on
            batch = pair.step(SECOND)
            assert batch[3][:3].all() == (step == 0)
            if step == 0:
                shown = batch[4]["final_obs"][:3] if mode is SAME_STEP else batch[0][:3]
                assert np.stack(shown).tobytes() == np.stack(pair.last[:3]).tobytes()
                assert not batch[1][:3].any()
        assert pair.outcomes() == ["truncated", "exact"]


# --- the first way back on which no env strays, else the last ---------------------------------------------
# Snapshots are taken after every third request, or fourth; kills come when there has been another since.


class ForkShyEnv(CounterEnv):
    """Is not what it was in a forked copy."""

    def __init__(self, **counter: Any) -> None:
        super().__init__(**counter)
        os.register_at_fork(after_in_child=self._be_another)

    def _be_another(self) -> None:
        self.offset += 1.0


def test_an_env_that_a_snapshot_does_not_bring_back_is_brought_back_by_the_journal() -> None:
    fns = counters(env1=partial(ForkShyEnv, horizon=6))
    with Pair(fns, counters(), restart=RestartPolicy(snapshot_every=3)) as pair:
        for step in range(25):
            if step in (11, 19):  # a step after a snapshot was taken: there is something to hold it against
                pair.kill(0)
            assert not pair.step()[3].any()
        recoveries = [event for event in pair.events if isinstance(event, Recovery)]
        assert [(one.outcome, one.rung, one.attempts) for one in recoveries] == [("exact", "journal", 2)] * 2


def test_an_env_that_strays_on_every_rung_is_truncated_alone_by_the_last() -> None:
    fns = counters(env1=partial(NondeterministicEnv, since=1, horizon=1000), env2=partial(ForkShyEnv, horizon=7))
    with Pair(fns, counters(), restart=RestartPolicy(snapshot_every=3)) as pair:
        for step in range(16):
            if step == 11:
                pair.kill(0)
            assert np.flatnonzero(pair.step(OTHERS)[3]).tolist() == ([1] if step == 11 else [])
        assert pair.outcomes() == ["truncated"]


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_an_env_that_cannot_be_replayed_is_truncated_at_each_loss_and_the_others_never(mode: AutoresetMode) -> None:
    fns = counters(env1=partial(NondeterministicEnv, since=1, horizon=1000))
    with Pair(fns, counters(), mode=mode, restart=NO_SNAPSHOTS) as pair:
        for step in range(30):
            if step in (5, 15, 20):
                pair.kill(0)
            assert np.flatnonzero(pair.step(OTHERS)[3]).tolist() == ([1] if step in (5, 15, 20) else [])
        assert pair.outcomes() == ["truncated"] * 3


def test_an_env_that_strays_in_a_recovery_of_its_own_reset_is_not_truncated() -> None:
    fns = counters(env1=partial(NondeterministicEnv, since=1, horizon=1000))
    with Pair(fns, counters(), restart=NO_SNAPSHOTS) as pair:
        for _ in range(3):
            pair.step(OTHERS)
        pair.kill(0)
        observations, _ = pair.reset([False, True, False, False, False, False], OTHERS)
        assert observations[1, 0] == 0
        for _ in range(6):
            assert not pair.step(OTHERS)[3].any()
        assert pair.outcomes() == ["fresh"]


# --- an env whose every reset ends its process, as it has come to be ---------------------------------------

DOOM = 3  # the action after which no reset succeeds


class DoomedEnv(CounterEnv):
    """Shows in its infos what has been set, and how many resets it has had."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.doomed, self.level, self.resets = False, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self.doomed:
            os.kill(os.getpid(), signal.SIGSEGV)
        self.resets += 1
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self.doomed = self.doomed or action == DOOM
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"level": self.level, "resets": self.resets}


@pytest.mark.parametrize(("mode", "snapshots"), [(NEXT_STEP, True), (SAME_STEP, False)])
def test_an_env_that_cannot_begin_again_is_truncated_and_costs_the_others_nothing(mode: Any, snapshots: bool) -> None:
    policy = RestartPolicy(snapshots=snapshots, backoff=0)
    fns = counters(env1=partial(DoomedEnv, horizon=4))
    ends = 0
    with Pair(fns, counters(), each=6, mode=mode, restart=policy) as pair:
        pair.actions = lambda: np.array([1, DOOM, 1, 1, 1, 1])  # type: ignore[method-assign]
        for _ in range(5):
            truncated = pair.step(OTHERS)[3]
            assert not truncated[OTHERS].any()
            ends += int(truncated[CULPRIT])
        assert pair.culprits() == {CULPRIT}
    assert ends


def test_an_env_whose_reset_is_poison_raises_and_the_others_keep_their_episodes() -> None:
    fns = counters(env1=partial(DoomedEnv, horizon=4))
    with Pair(fns, each=6, mode=DISABLED, restart=RestartPolicy(snapshots=False, backoff=0)) as pair:
        pair.actions = lambda: np.array([1, DOOM, 1, 1, 1, 1])  # type: ignore[method-assign]
        for _ in range(4):
            batch = pair.step()
        assert np.flatnonzero(batch[2]).tolist() == [CULPRIT]
        for _ in range(2):
            with pytest.raises(EnvsFailedError) as caught:
                pair.envs.reset(options={"reset_mask": np.arange(NUM_ENVS) == CULPRIT})
            assert list(caught.value.failures) == [CULPRIT]
            assert isinstance(caught.value.failures[CULPRIT], PoisonError)
            assert [int(caught.value.results[row][0]) for row in OTHERS] == [4] * 5


@pytest.mark.parametrize("on_crash", ["replay", "raise"])
def test_a_single_env_that_cannot_begin_again_begins_in_a_new_process(on_crash: Any) -> None:
    policy = RestartPolicy(backoff=0, on_crash=on_crash)
    with SubprocessEnv(partial(DoomedEnv, horizon=4), restart=policy) as env:
        env.reset(seed=1)
        env.set_attr("level", 5)
        env.step(DOOM)
        with pytest.raises(WorkerLostError, match=r"next reset\(\) starts a new process"):
            env.reset(seed=2)
        observation, _ = env.reset(seed=3)
        assert observation.tobytes() == CounterEnv(horizon=4).reset(seed=3)[0].tobytes()
        assert env.step(0)[4] == {"level": 5, "resets": 1}


# --- no restarts left -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_a_worker_without_restarts_left_does_not_put_the_others_out_of_step(mode: AutoresetMode) -> None:
    with Pair(counters(), mode=mode, restart=RestartPolicy(max_restarts=0)) as pair:
        pair.step()
        pair.kill(0)
        for step in range(7):
            actions = pair.actions()
            expected = pair.twin.step(actions)
            with pytest.raises(EnvsFailedError) as caught:
                pair.envs.step(actions)
            assert isinstance(caught.value, RestartBudgetExceeded) or step
            assert sorted(caught.value.failures) == FIRST
            for index in SECOND:
                observation, *rest = caught.value.results[index]
                assert observation.tobytes() == expected[0][index].tobytes()
                assert rest == [part[index] for part in expected[1:4]]
        # A reset begins a new life of the envs; nothing is restarted for it.
        assert pair.envs.reset(seed=5)[0].tobytes() == pair.twin.reset(seed=5)[0].tobytes()
        for _ in range(4):
            pair.step()
