"""MultiEnv: lists in, lists out, over envs of every kind, and one env's failure stays its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from contract_envs import CallableAttributes
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import TimeLimit, TransformReward

from kit import CounterEnv, first_difference, kill_worker
from multienv import MultiEnv, SerialEnv, SubprocessEnv, create_subprocess_envs
from multienv._engine.asking.fanout import FanOut
from multienv.errors import (
    ActionError,
    CallPendingError,
    EnvsFailedError,
)


def of_every_kind(horizon: int | None = 5, context: str = "forkserver") -> list[gymnasium.Env[Any, Any]]:
    counter = partial(CounterEnv, horizon=horizon)
    return [
        SubprocessEnv(counter),
        counter(),
        TransformReward(SubprocessEnv(counter).initialize(), lambda reward: reward),
        SerialEnv(counter),
        SubprocessEnv(counter, context=context),
        TimeLimit(counter(), 100),
    ]


@pytest.mark.parametrize(("max_workers", "context"), [(None, "spawn"), (2, "forkserver")])
def test_envs_of_every_kind_give_what_each_would_give_alone(max_workers, context):
    twins = [CounterEnv(horizon=None) for _ in range(6)]
    with MultiEnv(of_every_kind(horizon=None, context=context), max_workers=max_workers) as m:
        assert m.num_envs == len(m) == 6
        observations, infos = m.reset(seed=3)
        assert type(observations) is type(infos) is list
        for index, twin in enumerate(twins):
            assert first_difference(observations[index], twin.reset(seed=3 + index)[0]) is None
        for step in range(12):
            actions = [(step + index) % 4 if (step + index) % 5 else None for index in range(6)]
            result = m.step(actions)
            assert [type(part) for part in result] == [list] * 5
            for index, (action, twin) in enumerate(zip(actions, twins, strict=True)):
                expected = (None,) * 5 if action is None else twin.step(action)
                assert first_difference(tuple(part[index] for part in result), expected) is None


# --- reset --------------------------------------------------------------------------------------


def test_seeds_for_all_or_one_for_each():
    with MultiEnv([CounterEnv(), SubprocessEnv(CounterEnv), SerialEnv(CounterEnv)]) as m:
        for seed, each in ((np.int64(5), (5, 6, 7)), ([9, 1, 9], (9, 1, 9)), (np.arange(3), (0, 1, 2))):
            for observation, one in zip(m.reset(seed=seed)[0], each, strict=True):
                assert first_difference(observation, CounterEnv().reset(seed=one)[0]) is None
        m.step(np.array([0, 1, 2]))
        assert [one[[0, 3]].tolist() for one in m.step((0, np.int64(1), 2))[0]] == [[2, 0], [2, 1], [2, 2]]


def test_options_for_all_or_one_for_each():
    with MultiEnv([CounterEnv(), SubprocessEnv(CounterEnv)]) as m:
        assert [one[0] for one in m.reset(seed=0, options={"start": 3})[0]] == [3, 3]
        assert [one[0] for one in m.reset(options=[{"start": 1}, None])[0]] == [1, 0]


def test_a_masked_reset_leaves_the_others_alone():
    mask = [True, False, False, True, False, True]
    with MultiEnv(of_every_kind()) as m:
        for ask in ({"mask": mask}, {"mask": np.array(mask)}, {"options": {"reset_mask": np.array(mask)}}):
            m.reset(seed=0)
            m.step([1] * 6)
            observations, infos = m.reset(seed=7, **ask)
            for index, chosen in enumerate(mask):
                assert infos[index] == ({} if chosen else None)
                expected = CounterEnv().reset(seed=7 + index)[0] if chosen else None
                assert first_difference(observations[index], expected) is None
            assert [one[0] for one in m.step([1] * 6)[0]] == [1 if chosen else 2 for chosen in mask]


# --- failures -----------------------------------------------------------------------------------


def test_a_bad_action_is_its_envs_alone():
    with MultiEnv(of_every_kind()) as m:
        m.reset(seed=0)
        with pytest.raises(ActionError) as caught:
            m.step([[1, 2], 0, 0, 0, 0, 0])
        assert list(caught.value.failures) == [0]
        assert "call step() again, with valid actions" in str(caught.value)
        assert "reset()" not in str(caught.value)
        assert [one[0] for one in m.step([0] * 6)[0]] == [1, 2, 2, 2, 2, 2]


def interrupt_after_the_answer(monkeypatch, call):
    """Have a call answered, and Ctrl-C come before the caller gets it."""

    def finish(fan):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FanOut, "finish", finish)
        with pytest.raises(KeyboardInterrupt):
            call()


def test_a_step_of_an_env_alone_that_was_interrupted_is_not_passed_over_by_a_step_of_all(monkeypatch):
    with MultiEnv(create_subprocess_envs([CounterEnv] * 2)) as m:
        m.reset(seed=0)
        alone = m.envs[0]
        interrupt_after_the_answer(monkeypatch, lambda: alone.step(1))
        with pytest.raises(CallPendingError, match="interrupted") as caught:
            m.step([2, 2])
        assert caught.value.results[1][0][0] == 1
        observation, *_, info = alone.step(3)
        assert (observation[0], observation[3], info["multienv"]["resumed"]) == (1, 1, True)
        assert [one[0] for one in m.step([0, 0])[0]] == [2, 2]
        assert [one[0] for one in (alone.step(0)[0], m.step([0, 0])[0][0])] == [3, 4]
        interrupt_after_the_answer(monkeypatch, lambda: alone.step(1))
        assert [one[0] for one in m.reset(seed=0)[0]] == [0, 0]
        assert [one[0] for one in m.step([0, 0])[0]] == [1, 1]


def test_a_step_of_all_that_was_interrupted_is_not_passed_over_by_a_step_of_an_env_alone(monkeypatch):
    with MultiEnv(create_subprocess_envs([CounterEnv] * 2)) as m:
        m.reset(seed=0)
        alone = m.envs[0]
        interrupt_after_the_answer(monkeypatch, lambda: m.step([1, 1]))
        for call in (lambda: alone.step(2), alone.reset):
            with pytest.raises(CallPendingError, match="interrupted"):
                call()
        assert [one[0] for one in m.step([3, 3])[0]] == [1, 1]
        assert alone.step(0)[0][0] == 2


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
@pytest.mark.parametrize("how", ["reset", "restore"])
@pytest.mark.parametrize("killed", [None, 3])
def test_an_episode_that_the_caller_begins_for_an_ended_env_goes_on(mode, how, killed):
    """Whether its process is lost or not, in whichever step."""
    with MultiEnv(create_subprocess_envs([partial(CounterEnv, horizon=5)] * 2), autoreset_mode=mode) as m:
        m.reset(seed=0)
        first = m.envs[0]
        token = first.snapshot()
        assert m.step([1, None])[2][0] is False
        for _ in range(4):
            ended = m.step([1, None])[2][0]
        assert ended
        first.reset() if how == "reset" else first.restore(token)
        for step in range(5):
            if step == killed:
                kill_worker(first)
            observations, _, ends, _, _ = m.step([step % 4, None])
            assert observations[0][[0, 3]].tolist() == [step + 1, step % 4]
            assert ends[0] is (step == 4)


# --- the rest -----------------------------------------------------------------------------------


def test_calls_and_attributes_reach_every_env_and_its_wrappers():
    envs = [CallableAttributes(CounterEnv()), SubprocessEnv(lambda: CallableAttributes(CounterEnv()))]
    with MultiEnv(envs) as m:
        m.reset(seed=0)
        assert m.call("amplify", 3.0, by=2.0) == [12.0, 12.0]
        m.set_attr("gain", 1.0)
        m.set_attr("horizon", [3, 4])
        assert m.get_attr("gain") == [1.0, 1.0]
        assert m.get_attr("horizon") == [3, 4]
        assert m.call("horizon") == [3, 4]
        with pytest.raises(EnvsFailedError, match="nothing") as caught:
            m.get_attr("nothing")
        assert [isinstance(error, AttributeError) for error in caught.value.failures.values()] == [True, True]
