"""Who has caught what gymnasium's AsyncVectorEnv raises, by type or by its words, catches it here.

The words are those of gymnasium 1.4. AsyncVectorEnv itself is not asked: it leaves processes and descriptors behind.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, Sequence, Tuple

from kit import CounterEnv, SpaceEnv, TokenSpace
from multienv import SerialVectorEnv, SubprocessVectorEnv
from multienv.errors import UsageError

FACES = [SerialVectorEnv, SubprocessVectorEnv]
four = [CounterEnv] * 4


def of(*observation_spaces: Any) -> list[Callable[[], Any]]:
    return [partial(SpaceEnv, observation_space=space) for space in observation_spaces]


NO_MODE = "expected: 'same' or 'different' or tuple of single and batch observation space, actual got similar"
NO_SPACES = "Expected both elements of observation_mode to be Spaces, got <class 'int'> and <class 'int'>"
UNEQUAL = "(..., observation_mode='same') however some of the sub-environments observation spaces are not equivalent."
UNLIKE = "the sub-environment's observation spaces do not share a common shape and dtype."
OTHER_ACTIONS = "Some environments have an action space different from `Discrete(4)`."


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (2.5, "`max_concurrency` must be an integer or None, got <class 'float'>"),
        ("2", "`max_concurrency` must be an integer or None, got <class 'str'>"),
        (0, "`max_concurrency` must be a positive or None, got 0"),
        (-3, "`max_concurrency` must be a positive or None, got -3"),
    ],
)
def test_wrong_concurrency(value, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        SubprocessVectorEnv(four, max_concurrency=value)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("env_fns", "mode", "kind", "words"),
    [
        (four, "similar", ValueError, NO_MODE),
        (four, (1, 2), TypeError, NO_SPACES),
        (of(Box(0, 1, (2,)), Box(0, 2, (2,))), "same", RuntimeError, UNEQUAL),
        (of(Box(0, 1, (2,)), Box(0, 1, (3,))), (Box(0, 1, (2, 2)), Box(0, 1, (2,))), RuntimeError, UNLIKE),
        ([CounterEnv, partial(CounterEnv, num_actions=9)], "different", RuntimeError, OTHER_ACTIONS),
    ],
    ids=["no such mode", "no spaces", "other bounds", "other shapes", "other actions"],
)
def test_wrong_spaces(face, env_fns, mode, kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        face(env_fns, observation_mode=mode)


@pytest.mark.parametrize(
    "space", [Graph(Discrete(3), None), Sequence(Discrete(3)), Tuple((Discrete(2), Dict(a=Sequence(Discrete(3)))))]
)
def test_what_has_no_fixed_size_cannot_be_shared(space):
    with pytest.raises(TypeError, match="has a dynamic shape so its not possible to make a static shared memory"):
        SubprocessVectorEnv(of(space, space), shared_memory=True)


def test_nor_can_a_space_that_nobody_knows():
    with pytest.raises(ValueError, match="shared_memory") as caught:
        SubprocessVectorEnv(of(TokenSpace(), TokenSpace()), shared_memory=True)
    assert not isinstance(caught.value, TypeError)


@pytest.mark.parametrize("face", FACES)
def test_wrong_masks_and_seeds(face):
    masks = [
        ([True, False, True, True], TypeError, "must be a numpy array, got <class 'list'>"),
        (np.ones(3, bool), ValueError, "must have shape `(4,)`, got (3,)"),
        (np.ones((1, 4), bool), ValueError, "must have shape `(4,)`, got (1, 4)"),
        (np.array([1, 0, 0, 1]), TypeError, "must have `dtype=np.bool_`, got int64"),
        (
            np.zeros(4, bool),
            ValueError,
            "must contain a boolean array with at least one True value, got reset_mask=[False False False False]",
        ),
    ]
    with closing(face(four)) as envs:
        envs.reset(seed=1)
        for mask, kind, words in masks:
            with pytest.raises(kind, match=re.escape("`options['reset_mask']` " + words)):
                envs.reset(options={"reset_mask": mask})
        words = "If seeds are passed as a list the length must match num_envs=4 but got length=2."
        with pytest.raises(ValueError, match=re.escape(words)):
            envs.reset(seed=[1, 2])
        seeds = [
            (-1, "Seed must be greater or equal to zero, actual value: -1"),
            ([1, 1.5, 2, 3], "Seed must be a python integer, actual type: <class 'float'>"),
            (True, "Seed must be a python integer, actual type: <class 'bool'>"),
        ]
        for seed, words in seeds:
            with pytest.raises(UsageError, match=words):
                envs.reset(seed=seed)
        envs.step(np.ones(4, int))  # nothing was lost


def test_the_serial_one_shows_its_envs_as_gymnasiums_does():
    with closing(SerialVectorEnv([partial(CounterEnv, horizon=5 + index) for index in range(3)])) as envs:
        envs.reset(seed=1)
        envs.step(np.ones(3, int))
        assert [env.unwrapped.horizon for env in envs.envs] == [5, 6, 7]
        assert [env.unwrapped.episode_step for env in envs.envs] == [1, 1, 1]
