"""What is asked of some envs of a batch only, what is not recorded, options for each env, infos that are not merged."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from contract_envs import OddInfoEnv
from gymnasium.wrappers import TimeLimit

from kit import CounterEnv, kill_worker
from multienv import RestartPolicy, SerialVectorEnv, SubprocessVectorEnv
from multienv.errors import EnvsFailedError

NUM_ENVS = 5  # three in one worker, two in the other


@pytest.fixture(params=[SubprocessVectorEnv, SerialVectorEnv])
def envs(request: pytest.FixtureRequest) -> Any:
    options = {"envs_per_worker": 3} if request.param is SubprocessVectorEnv else {}
    made = request.param([partial(CounterEnv, horizon=100)] * NUM_ENVS, merge_infos=False, **options)
    yield made
    made.close()


def test_attributes_are_read_and_written_in_the_envs_that_are_named(envs):
    envs.set_attr("offset", [1.0, 2.0], [4, 0])
    assert envs.get_attr("offset") == (2.0, 0.0, 0.0, 0.0, 1.0)
    assert envs.get_attr("offset", [4, 1]) == (1.0, 0.0)
    envs.set_attr("offset", 3.0, [2])
    assert envs.get_attr("offset", [2, 0], calls_methods=False) == (3.0, 2.0)


def test_a_method_that_is_read_is_called_in_its_env(envs):
    poke, *_ = envs.get_attr("poke", [3], calls_methods=False)
    assert envs.get_attr("pokes") == (0,) * NUM_ENVS
    assert poke(0.5) == 1
    assert poke(amount=0.5) == 2
    assert envs.get_attr("pokes") == (0, 0, 0, 2, 0)
    assert envs.get_attr("poke", [3]) == (3,)  # as gymnasium does


def test_reading_takes_no_room_in_the_journal(envs):
    before = [one.journal_bytes for one in envs.statistics()]
    for name in ("horizon", "np_random_seed", "unwrapped.horizon", "action_space"):
        envs.get_attr(name)
    assert len(envs.np_random) == NUM_ENVS
    envs.is_wrapped(TimeLimit)
    assert envs.call("has_wrapper_attr", "poke") == (True,) * NUM_ENVS
    assert envs.call("get_wrapper_attr", "horizon") == (100,) * NUM_ENVS
    assert [one.journal_bytes for one in envs.statistics()] == before


def test_what_is_called_by_reading_it_is_called_again_after_a_loss() -> None:
    """A method of some envs, a function of others, a number elsewhere."""
    with SubprocessVectorEnv([CounterEnv] * 3, envs_per_worker=3, restart=RestartPolicy(snapshots=False)) as envs:
        envs.reset(seed=0)
        assert envs.get_attr("poke") == (1, 1, 1)
        envs.set_attr("poke", [7, len], [0, 1])  # of the inner env, where it hides the method
        with pytest.raises(TypeError, match="takes exactly one argument"):
            envs.get_attr("poke")  # which has called the third
        assert envs.get_attr("poke", [2, 0]) == (3, 7)
        kill_worker(envs)
        envs.step(np.zeros(3, int))
        assert envs.get_attr("pokes") == (1, 1, 3)


def test_each_env_is_reset_with_options_of_its_own(envs):
    observations, _ = envs.reset(seed=0, options=[{"start": 3}, None, {}, {"start": 5}, {"start": 7}])
    assert observations[:, 0].tolist() == [3, 0, 0, 5, 7]


@pytest.mark.parametrize("face", [SubprocessVectorEnv, SerialVectorEnv])
def test_infos_that_are_not_merged_are_what_each_env_gave(face):
    fns = [partial(OddInfoEnv, horizon=3), OddInfoEnv, CounterEnv]
    with face(fns, merge_infos=False, autoreset_mode="SameStep") as envs:
        _, infos = envs.reset(seed=0)
        assert infos == [{}, {}, {}]
        odd = {"number": 1, "pair": (1, 2)}
        infos = envs.step(np.zeros(3, int))[4]
        assert infos == [odd, odd, {}]
        assert type(infos[0]["number"]) is int
        assert infos[0] is not infos[1]
        assert envs.step(np.zeros(3, int))[4] == [{}, {}, {}]
        infos = envs.step(np.zeros(3, int))[4]
        assert infos[0]["final_info"] == {"number": 3, "pair": (1, 2)}
        assert infos[0]["final_obs"][0] == 3
        assert infos[1:] == [{"number": 3, "pair": (1, 2)}, {}]


@pytest.mark.parametrize("face", [SubprocessVectorEnv, SerialVectorEnv])
def test_an_env_that_two_functions_return_is_refused(face):
    env = CounterEnv()
    options = {"envs_per_worker": 2} if face is SubprocessVectorEnv else {}
    with pytest.raises(EnvsFailedError, match="returned already. Build a new env") as caught:
        face([lambda: env] * 2, **options)
    assert set(caught.value.failures) == {1}
