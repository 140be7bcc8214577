"""Three modes of autoreset, with an env that takes the seed of its reset for the count that it begins with.

Such an env can tell a reset without a seed from one with a drawn seed; as gymnasium's own test of the modes does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode
from vector_pairs import expect_same

from multienv import SerialVectorEnv, SubprocessVectorEnv

LAST = (2, 3, 3)  # the count that ends an episode, for each env
ACTIONS = np.array([1, 2, 3])


class CountFromSeedEnv(gymnasium.Env[int, int]):
    """Observes its count, which begins with the seed; the reward is the action."""

    observation_space = Discrete(5)
    action_space = Discrete(5)
    last = 0
    count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.count = 0 if seed is None else seed
        return self.count, {}

    def step(self, action: int) -> Any:
        self.count += 1
        return self.count, int(action), self.count == self.last, False, {}


@pytest.fixture(params=[SerialVectorEnv, SubprocessVectorEnv, "killed"])
def make(request: pytest.FixtureRequest) -> Any:
    """Return a function that makes a vector env in the given mode, and one that is called before each step."""

    def made(mode: AutoresetMode) -> Any:
        killed = request.param == "killed"
        envs = (SubprocessVectorEnv if killed else request.param)([CountFromSeedEnv] * 3, autoreset_mode=mode)
        envs.set_attr("last", LAST)

        def before_each_step() -> None:
            if killed:
                for one in envs.statistics():
                    os.kill(one.pid, signal.SIGKILL)

        return envs, before_each_step

    return made


def transitions(envs: Any, before_each_step: Any, steps: int) -> Iterator[tuple[Any, ...]]:
    """Yield observations, terminations, infos and the rewards' difference from the actions of each step."""
    for _ in range(steps):
        before_each_step()
        observations, rewards, terminated, truncated, infos = envs.step(ACTIONS)
        assert not truncated.any()
        yield observations.tolist(), terminated.tolist(), infos, (ACTIONS - rewards).tolist()


def test_next_step(make: Any) -> None:
    envs, before_each_step = make(AutoresetMode.NEXT_STEP)
    with closing(envs):
        assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        expect_same(envs.reset(), (np.zeros(3, np.int64), {}))
        assert list(transitions(envs, before_each_step, 5)) == [
            ([1, 1, 1], [False, False, False], {}, [0, 0, 0]),
            ([2, 2, 2], [True, False, False], {}, [0, 0, 0]),
            ([0, 3, 3], [False, True, True], {}, [1, 0, 0]),
            ([1, 0, 0], [False, False, False], {}, [0, 2, 3]),
            ([2, 1, 1], [True, False, False], {}, [0, 0, 0]),
        ]


def test_same_step(make: Any) -> None:
    envs, before_each_step = make(AutoresetMode.SAME_STEP)
    with closing(envs):
        expect_same(envs.reset(), (np.zeros(3, np.int64), {}))
        seen = list(transitions(envs, before_each_step, 4))
        assert [(observations, terminated) for observations, terminated, _, _ in seen] == [
            ([1, 1, 1], [False, False, False]),
            ([0, 2, 2], [True, False, False]),
            ([1, 0, 0], [False, True, True]),
            ([0, 1, 1], [True, False, False]),
        ]
        assert not np.any([rest for *_, rest in seen])
        first, *others = (infos for _, _, infos, _ in seen)
        assert first == {}
        for infos, final in zip(others, ([2, None, None], [None, 3, 3], [2, None, None]), strict=True):
            assert infos["final_obs"].tolist() == final
            assert infos["final_info"] == {}
            assert infos["_final_obs"].tolist() == infos["_final_info"].tolist() == [one is not None for one in final]


def test_disabled(make: Any) -> None:
    envs, before_each_step = make(AutoresetMode.DISABLED)
    with closing(envs):
        expect_same(envs.reset(), (np.zeros(3, np.int64), {}))
        seen: list[Any] = []
        for _ in range(3):
            *_, (observations, terminated, infos, _) = transitions(envs, before_each_step, 1 + (not seen))
            began, more = envs.reset(options={"reset_mask": np.array(terminated)})
            assert infos == more == {}
            seen.append((observations, terminated, began.tolist()))
        assert seen == [
            ([2, 2, 2], [True, False, False], [0, 2, 2]),
            ([1, 3, 3], [False, True, True], [1, 0, 0]),
            ([2, 1, 1], [True, False, False], [0, 1, 1]),
        ]


def test_a_seed_that_is_given_is_the_count(make: Any) -> None:
    envs, before_each_step = make(AutoresetMode.NEXT_STEP)
    with closing(envs):
        assert envs.reset(seed=0)[0].tolist() == [0, 1, 2]
        assert [observations for observations, *_ in transitions(envs, before_each_step, 3)] == [
            [1, 2, 3],
            [2, 3, 0],
            [0, 0, 1],
        ]
