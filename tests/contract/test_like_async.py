"""Who has caught what gymnasium's AsyncVectorEnv raises, by type or by its words, catches it here.

The words are those of gymnasium 1.4. AsyncVectorEnv itself is not asked: it leaves processes and descriptors behind.
"""

from __future__ import annotations

import re
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, Sequence, Tuple

from kit import CounterEnv, SpaceEnv, TokenSpace
from multienv import SerialVectorEnv, SubprocessVectorEnv

FACES = [SerialVectorEnv, SubprocessVectorEnv]
four = [CounterEnv] * 4


def of(*observation_spaces: Any) -> list[Any]:
    return [partial(SpaceEnv, observation_space=space) for space in observation_spaces]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("env_fns", "mode", "kind", "words"),
    [
        (four, "similar", ValueError, "expected: 'same' or 'different' or tuple of single and batch observation space"),
        (four, (1, 2), TypeError, "Expected both elements of observation_mode to be Spaces, got <class 'int'>"),
        (of(Box(0, 1, (2,)), Box(0, 2, (2,))), "same", RuntimeError, "observation spaces are not equivalent."),
        (
            of(Box(0, 1, (2,)), Box(0, 1, (3,))),
            (Box(0, 1, (2, 2)), Box(0, 1, (2,))),
            RuntimeError,
            "do not share a common shape and dtype.",
        ),
        (
            [CounterEnv, partial(CounterEnv, num_actions=9)],
            "different",
            RuntimeError,
            "Some environments have an action space different from `Discrete(4)`.",
        ),
    ],
)
def test_wrong_spaces(face, env_fns, mode, kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        face(env_fns, observation_mode=mode)


@pytest.mark.parametrize(
    ("space", "kind", "words"),
    [
        *(
            (space, TypeError, "has a dynamic shape so its not possible to make a static shared memory")
            for space in (
                Graph(Discrete(3), None),
                Sequence(Discrete(3)),
                Tuple((Discrete(2), Dict(a=Sequence(Discrete(3))))),
            )
        ),
        (TokenSpace(), ValueError, "shared_memory"),  # that nobody knows
    ],
)
def test_what_has_no_fixed_size_cannot_be_shared(space, kind, words):
    with pytest.raises(kind, match=words):
        SubprocessVectorEnv(of(space, space), shared_memory=True)


@pytest.mark.parametrize("face", FACES)
def test_wrong_masks_and_seeds(face):
    mask = "`options['reset_mask']` must "
    wrong = [
        ({"options": {"reset_mask": [True, False, True, True]}}, TypeError, mask + "be a numpy array"),
        ({"options": {"reset_mask": np.ones(3, bool)}}, ValueError, mask + "have shape `(4,)`, got (3,)"),
        ({"options": {"reset_mask": np.ones((1, 4), bool)}}, ValueError, mask + "have shape `(4,)`, got (1, 4)"),
        ({"options": {"reset_mask": np.array([1, 0, 0, 1])}}, TypeError, mask + "have `dtype=np.bool_`, got int64"),
        ({"options": {"reset_mask": np.zeros(4, bool)}}, ValueError, "with at least one True value"),
        ({"seed": [1, 2]}, ValueError, "the length must match num_envs=4 but got length=2."),
        ({"seed": -1}, ValueError, "Seed must be greater or equal to zero, actual value: -1"),
        ({"seed": [1, 1.5, 2, 3]}, ValueError, "Seed must be a python integer, actual type: <class 'float'>"),
        ({"seed": True}, ValueError, "Seed must be a python integer, actual type: <class 'bool'>"),
    ]
    with closing(face(four)) as envs:
        envs.reset(seed=1)
        for arguments, kind, words in wrong:
            with pytest.raises(kind, match=re.escape(words)):
                envs.reset(**arguments)
        envs.step(np.ones(4, int))  # nothing was lost


@pytest.mark.parametrize(("value", "words"), [(2.5, "be an integer or None"), (0, "be a positive or None, got 0")])
def test_wrong_concurrency(value, words):
    with pytest.raises(ValueError, match=f"`max_concurrency` must {words}"):
        SubprocessVectorEnv(four, max_concurrency=value)


def test_the_serial_one_shows_its_envs_as_gymnasiums_does():
    with closing(SerialVectorEnv([partial(CounterEnv, horizon=5 + index) for index in range(3)])) as envs:
        envs.reset(seed=1)
        envs.step(np.ones(3, int))
        assert [env.unwrapped.horizon for env in envs.envs] == [5, 6, 7]
        assert [env.unwrapped.episode_step for env in envs.envs] == [1, 1, 1]
