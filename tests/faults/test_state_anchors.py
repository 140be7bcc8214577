"""States of an env as anchors: a long episode goes on in a new process, without a fork, as if nothing had happened."""

from __future__ import annotations

import os
import pickle
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest

from kit import CounterEnv, assert_no_splice, assert_same_trajectory, rollout
from multienv import (
    Deadlines,
    RestartPolicy,
    SubprocessEnv,
)
from multienv.errors import NotRestoredError
from multienv.events import Event, Recovery
from multienv.recovery.checkpoint import _digest_of

gymnasium.register_envs(ale_py)

ENDLESS = partial(CounterEnv, horizon=None)
# The episode has long outgrown it when a worker is killed.
SMALL = RestartPolicy(snapshots=False, journal_limit=200_000)


class Rungs(list[str]):
    """A hook that keeps what recoveries were made of."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, Recovery):
            self.append(event.rung or event.outcome)


def pid_of(env: SubprocessEnv) -> int:
    return env.statistics().pid or 0


def kill(env: SubprocessEnv) -> None:
    os.kill(pid_of(env), signal.SIGKILL)


# --- what has none, and what says it has ------------------------------------------------------------


class Forgetful(CounterEnv):
    """Keeps a total where no attribute of the env is, which shows a little later."""

    totals: list[int] = [0]  # noqa: RUF012

    def reset(self, **options: Any) -> Any:
        self.totals[0] = 0
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        self.totals[0] += int(action)
        observation, *others = super().step(action)
        observation[3] = self.totals[0] // 50
        return (observation, *others)


def test_a_state_that_does_not_hold_is_found_out() -> None:
    rungs, actions = Rungs(), [np.int64(index % 4) for index in range(10_500)]
    env_fn = partial(Forgetful, horizon=None)
    with SubprocessEnv(env_fn, restart=SMALL, hooks=[rungs]) as env:
        seen = rollout(env, actions, seed=5, before_step=lambda step: step in (5000, 9900) and kill(env))
        assert env.statistics().state_anchors
        assert env.statistics().truncated_recoveries == 2
    assert set(rungs) == {"truncated"}
    assert_no_splice(seen)
    cut = next(index for index, one in enumerate(seen) if one.truncated)
    assert "cannot be brought back" in seen[cut].info["multienv"]["reason"]
    expected = rollout(env_fn(), actions[: cut - 1], seed=5)
    assert_same_trajectory(seen[:cut], expected)


def test_an_env_whose_state_cannot_be_had_is_truncated_as_ever() -> None:
    policy, rungs = RestartPolicy(snapshots=False, journal_limit=2000), Rungs()
    with SubprocessEnv(partial(gymnasium.make, "LunarLander-v3"), restart=policy, hooks=[rungs]) as env:
        env.reset(seed=1)
        action = np.int64(2)
        for _ in range(66):
            last, _, terminated, truncated, _ = env.step(action)
            assert not terminated
            assert not truncated
        env.set_attr("any", 1)  # the journal is looked at whenever one is noted
        kill(env)
        observation, reward, terminated, truncated, info = env.step(action)
        np.testing.assert_array_equal(observation, last)
        assert (reward, terminated, truncated) == (0.0, False, True)
        assert "not all known" in info["multienv"]["reason"]
        assert "SwigPyObject" in env.statistics().no_state_anchors
        assert env.statistics().state_anchors == 0
    assert rungs == ["truncated"]


# --- when the asking goes wrong -------------------------------------------------------------------


class Troubled(CounterEnv):
    """Fails the first time it is asked for its state."""

    def __init__(self, mark: Path, manner: str) -> None:
        super().__init__(horizon=None)
        self.mark, self.manner = mark, manner

    def get_state(self) -> Any:
        self.mark.write_text(f"{self.mark.read_text() if self.mark.exists() else ''}.")
        if len(self.mark.read_text()) == 1:
            if self.manner == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.manner == "hangs":
                time.sleep(1000)
            if self.manner == "raises":
                raise RuntimeError("not now")
            if self.manner == "unpicklable":
                return (number for number in [0])
        return self.episode_step, self.episode_number

    def set_state(self, state: Any) -> None:
        self.episode_step, self.episode_number = state


@pytest.mark.parametrize(
    "manner",
    [
        "killed",
        "hangs",
        "raises",
        "unpicklable",
    ],
)
def test_the_episode_goes_on_though_the_env_could_not_give_its_state(tmp_path: Path, manner: str) -> None:
    mark, rungs = tmp_path / "asked", Rungs()
    # Enough room for the patience after a failure.
    policy = RestartPolicy(snapshots=False, journal_limit=200_000)
    with SubprocessEnv(
        partial(Troubled, mark, manner), restart=policy, deadlines=Deadlines(call=0.3), hooks=[rungs]
    ) as env:
        env.reset(seed=1)
        expected = CounterEnv(horizon=None)
        expected.reset(seed=1)
        asked_at = 0
        for step in range(1, 2001):
            action = np.int64(step % 4)
            np.testing.assert_array_equal(env.step(action)[0], expected.step(action)[0])
            if not asked_at and mark.exists():
                asked_at = step
            if asked_at and step < asked_at + 1000:
                assert mark.read_text() == ".", "asked again too soon"
        assert asked_at
        lost = manner in ("killed", "hangs")
        assert env.statistics().losses == lost
        assert env.statistics().truncated_recoveries == 0
        if lost:
            assert "lost" in env.statistics().no_state_anchors
        assert env.get_attr("np_random").random() == expected.np_random.random()


# --- what else a journal is for ---------------------------------------------------------------------


def test_a_checkpoint_of_a_long_episode_is_loaded_from_its_state() -> None:
    env_fn = partial(gymnasium.make, "HalfCheetah-v5", max_episode_steps=10**6)
    policy = RestartPolicy(snapshots=False, journal_limit=400_000)
    actions = [np.full(6, 0.1 * (index % 7 - 3), np.float32) for index in range(200)]
    with SubprocessEnv(env_fn, restart=policy) as env:
        env.reset(seed=1)
        for index in range(3200):
            env.step(actions[index % 200])
        assert not env._supervisor.journal.complete
        state = pickle.loads(pickle.dumps(env.state_dict()))
        expected = [env.step(action)[:4] for action in actions]
    rungs = Rungs()
    with SubprocessEnv(env_fn, restart=policy, hooks=[rungs]) as other:
        other.reset(seed=9)
        other.load_state_dict(state)
        kill(other)
        actual = [other.step(action)[:4] for action in actions]
        assert other.statistics().steps == 3400
        entries = bytearray(state["journal"]["entries"])
        entries[-20] ^= 1  # of the last observation
        elsewhere = {**state, "journal": {**state["journal"], "entries": bytes(entries)}}
        with pytest.raises(NotRestoredError):
            other.load_state_dict({**elsewhere, "digest": _digest_of(elsewhere)})
    assert rungs == ["state"]
    for one, two in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(one[0], two[0])
        assert one[1:] == two[1:]
