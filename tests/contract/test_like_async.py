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


def test_the_serial_one_shows_its_envs_as_gymnasiums_does():
    with closing(SerialVectorEnv([partial(CounterEnv, horizon=5 + index) for index in range(3)])) as envs:
        envs.reset(seed=1)
        envs.step(np.ones(3, int))
        assert [env.unwrapped.horizon for env in envs.envs] == [5, 6, 7]
        assert [env.unwrapped.episode_step for env in envs.envs] == [1, 1, 1]
