"""An env whose every reset ends its process, as it has come to be: its failure stays its own, and it can be had again."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from kit import CounterEnv
from multienv import MultiEnv, RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv.errors import EnvsFailedError, PoisonError, WorkerLostError

NUM_ENVS, CULPRIT = 3, 1
OTHERS = [0, 2]
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


def actions_of(step: int) -> np.ndarray[Any, Any]:
    """The culprit is doomed with its third step."""
    actions = np.random.default_rng(step).integers(0, 3, NUM_ENVS)
    if step == 2:
        actions[CULPRIT] = DOOM
    return actions


def vector(mode: AutoresetMode, snapshots: bool) -> SubprocessVectorEnv:
    fns: list[Any] = [partial(DoomedEnv, horizon=20)] * NUM_ENVS
    fns[CULPRIT] = partial(DoomedEnv, horizon=4)
    policy = RestartPolicy(snapshots=snapshots, backoff=0)
    return SubprocessVectorEnv(fns, envs_per_worker=NUM_ENVS, autoreset_mode=mode, restart=policy)


@pytest.mark.parametrize("snapshots", [True, False])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_an_env_of_a_batch_that_cannot_begin_again_is_truncated_and_costs_the_others_nothing(
    mode: AutoresetMode, snapshots: bool
) -> None:
    with contextlib.closing(vector(mode, snapshots)) as envs:
        envs.reset(seed=1)
        twins = [DoomedEnv(horizon=20) for _ in OTHERS]
        for row, twin in zip(OTHERS, twins, strict=True):
            twin.reset(seed=1 + row)
        ends = 0
        for step in range(7):
            observations, _, _, truncated, _ = envs.step(actions_of(step))
            for row, twin in zip(OTHERS, twins, strict=True):
                assert observations[row].tobytes() == twin.step(actions_of(step)[row])[0].tobytes()
            assert not truncated[OTHERS].any()
            ends += int(truncated[CULPRIT])
        assert ends


def test_an_env_of_a_batch_whose_reset_is_poison_raises_and_the_others_keep_their_episodes() -> None:
    with contextlib.closing(vector(AutoresetMode.DISABLED, snapshots=False)) as envs:
        envs.reset(seed=1)
        for step in range(4):
            batch = envs.step(actions_of(step))
        assert batch[2].tolist() == [False, True, False]
        for _ in range(2):
            with pytest.raises(EnvsFailedError) as caught:
                envs.reset(options={"reset_mask": np.array([False, True, False])})
            assert list(caught.value.failures) == [CULPRIT]
            assert isinstance(caught.value.failures[CULPRIT], PoisonError)
            assert [int(caught.value.results[row][0]) for row in OTHERS] == [4, 4]


@pytest.mark.parametrize("on_crash", ["replay", "raise"])
def test_a_single_env_begins_in_a_new_process(on_crash):
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


def test_so_does_one_of_a_multi_env():
    envs = [SubprocessEnv(partial(DoomedEnv, horizon=4), restart=RestartPolicy(backoff=0)) for _ in range(NUM_ENVS)]
    with MultiEnv(envs) as m:
        m.reset(seed=1)
        failed = []
        for step in range(9):
            try:
                m.step(actions_of(step))
            except EnvsFailedError as error:
                failed.append((step, list(error.failures)))
        assert failed == [(4, [CULPRIT])]
