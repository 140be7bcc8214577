"""The three modes of autoreset, held against gymnasium.vector.SyncVectorEnv step by step."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from contract_envs import MeetingEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from kit import CounterEnv, Fault, FaultError, FaultyEnv, first_difference, kill_worker
from kit.side_by_side import info_of
from multienv import AutoResetWrapper, Deadlines, MultiEnv, SerialEnv, SubprocessEnv, create_subprocess_envs

MODES = list(AutoresetMode)
STEPS = 56
ENV_FNS: dict[str, Callable[[], gymnasium.Env[Any, Any]]] = {
    # Short enough for many episodes; one ends by itself, the others by their time limit too.
    "CartPole-v1": partial(gymnasium.make, "CartPole-v1", max_episode_steps=15),
    "FrozenLake-v1": partial(gymnasium.make, "FrozenLake-v1"),
    "Counter": partial(CounterEnv, horizon=3, ending="both"),
}
HOSTS: dict[str, Callable[[Any], Any]] = {
    "process": SubprocessEnv,
    "serial": SerialEnv,
    "plain": lambda env_fn: env_fn(),
}


def without_prob(info: dict[str, Any]) -> dict[str, Any]:
    """Leave out what gymnasium's batch of FrozenLake's infos makes an integer."""
    return {key: without_prob(one) if isinstance(one, dict) else one for key, one in info.items() if key != "prob"}


@pytest.mark.parametrize(
    ("name", "host", "mode"),
    [
        *(("FrozenLake-v1", "process", mode) for mode in MODES),
        ("CartPole-v1", "process", AutoresetMode.NEXT_STEP),
        ("Counter", "process", AutoresetMode.SAME_STEP),
        ("FrozenLake-v1", "serial", AutoresetMode.SAME_STEP),
        ("FrozenLake-v1", "plain", AutoresetMode.NEXT_STEP),
        ("FrozenLake-v1", "plain", AutoresetMode.DISABLED),
    ],
)
def test_multi_env_is_what_gymnasiums_sync_vector_env_is_also_while_workers_are_killed(name, mode, host):
    env_fn = ENV_FNS[name]
    peer = SyncVectorEnv([env_fn] * 3, autoreset_mode=mode)
    peer.action_space.seed(2)
    episodes = 0
    with MultiEnv([HOSTS[host](env_fn) for _ in range(3)], autoreset_mode=mode) as m:
        assert m.metadata["autoreset_mode"] is peer.metadata["autoreset_mode"] is mode
        ours, our_infos = m.reset(seed=6)
        theirs, their_infos = peer.reset(seed=6)
        ended = np.zeros(3, bool)
        for step in range(STEPS):
            if host == "process" and step % 16 == 3:
                kill_worker(m.envs[step % 3])
            if mode is AutoresetMode.DISABLED and ended.any():
                ours, our_infos = m.reset(options={"reset_mask": ended.copy()})
                theirs, their_infos = peer.reset(options={"reset_mask": ended.copy()})
                indices, rest, peers_rest = np.flatnonzero(ended), [], []
                ended = np.zeros(3, bool)
            else:
                actions = peer.action_space.sample()
                ours, *rest, our_infos = m.step(list(actions))
                theirs, *peers_rest, their_infos = peer.step(actions)
                indices = np.arange(3)
                ended = np.logical_or(*peers_rest[1:])
                episodes += int(ended.sum())
            for one, other in zip(rest, peers_rest, strict=True):
                assert np.array_equal(np.array(one), other)
            for index in indices:
                assert np.array_equal(ours[index], theirs[index])
                np.testing.assert_equal(without_prob(our_infos[index]), without_prob(info_of(their_infos, index)))
        if host == "process":
            assert sum(one.exact_recoveries for one in m.statistics()) == 4
    peer.close()
    assert episodes > 6, "too few episodes to tell anything"


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_the_wrapper_alone_is_what_multi_env_is_also_in_halves(mode):
    env_fn = ENV_FNS["CartPole-v1"]
    with MultiEnv([env_fn()], autoreset_mode=mode) as m, SubprocessEnv(env_fn) as env:
        wrapped = AutoResetWrapper(env, mode.name)
        assert wrapped.metadata["autoreset_mode"] is mode
        wrapped.reset_async(seed=1)
        assert first_difference(wrapped.reset_wait()[0], m.reset(seed=1)[0][0]) is None
        for step in range(STEPS):
            if step % 3:
                seen = wrapped.step(step % 2)
            else:
                wrapped.step_async(step % 2)
                seen = wrapped.step_wait()
            expected = m.step([step % 2])
            assert first_difference(seen, tuple(part[0] for part in expected)) is None
            if mode is AutoresetMode.DISABLED and (seen[2] or seen[3]):
                assert first_difference(wrapped.reset()[0], m.reset()[0][0]) is None


def test_a_reset_in_between_forgets_that_one_was_due():
    with SubprocessEnv(partial(CounterEnv, horizon=1)) as env:
        wrapped = AutoResetWrapper(env)
        wrapped.reset(seed=0)
        assert wrapped.step(0)[2]
        wrapped.reset()
        assert wrapped.step(0)[2], "a step, not the reset that was due before"
        env.reset()
        assert not wrapped.ended
        assert wrapped.step(0)[2], "the env's own is one, too"


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "halves"])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=lambda mode: mode.name)
def test_after_a_reset_that_raised_the_next_step_begins_the_episode(mode, whole):
    with SubprocessEnv(partial(FaultyEnv, fault=Fault("raise", "reset", at=2), horizon=2)) as env:
        wrapped, quiet = AutoResetWrapper(env, mode), AutoResetWrapper(CounterEnv(horizon=2), mode)
        step = wrapped.step if whole else lambda action: (wrapped.step_async(action), wrapped.step_wait())[1]
        assert first_difference(wrapped.reset(seed=1), quiet.reset(seed=1)) is None
        failed = []
        for action in [1, 2, 3, 1, 2, 3]:
            expected = quiet.step(action)
            try:
                transition = step(action)
            except FaultError as error:
                failed.append(error)
                transition = step(0)
                if mode is AutoresetMode.SAME_STEP:  # the error has what the env's step had returned
                    returned = *expected[1:4], expected[4]["final_obs"]
                    expected = expected[0], 0.0, False, False, {}
            assert first_difference(transition, expected) is None
        assert len(failed) == 1
        if mode is AutoresetMode.SAME_STEP:
            assert first_difference((*failed[0].returned[1:4], failed[0].returned[0]), returned) is None


@pytest.mark.parametrize("host", HOSTS)
def test_after_a_reset_of_the_callers_between_two_episodes_that_raised_the_next_step_begins_one(host):
    env_fn = partial(FaultyEnv, fault=Fault("raise", "reset", at=2), horizon=1)
    with HOSTS[host](env_fn) as env:
        wrapped = AutoResetWrapper(env)
        wrapped.reset(seed=1)
        assert wrapped.step(1)[2]
        with pytest.raises(FaultError):
            wrapped.reset()
        assert wrapped.step(1)[1:4] == (0.0, False, False)
        assert wrapped.step(1)[2]


def test_a_reset_that_raised_in_a_step_is_due_in_another_trainer_too():
    env_fn = partial(FaultyEnv, fault=Fault("raise", "reset", at=2), horizon=1)
    with MultiEnv([SubprocessEnv(env_fn)]) as m, MultiEnv([SubprocessEnv(env_fn)]) as other:
        m.reset(seed=1)
        assert m.step([1])[2] == [True]
        with pytest.raises(FaultError):
            m.step([1])
        other.load_state_dict(m.state_dict())
        assert first_difference(other.step([1]), m.step([1])) is None


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_envs_that_end_together_begin_together(mode, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    env_fns = [partial(MeetingEnv, pipe=pipe, reads=bool(index), horizon=2) for index in range(2)]
    envs = create_subprocess_envs(env_fns, deadlines=Deadlines(reset=20.0))
    twins = MultiEnv([CounterEnv(horizon=2) for _ in envs], autoreset_mode=mode)
    with MultiEnv(envs, autoreset_mode=mode) as m, twins:
        assert first_difference(m.reset(seed=1), twins.reset(seed=1)) is None
        for _ in range(4):
            assert first_difference(m.step([1, 1]), twins.step([1, 1])) is None
        assert [one.losses for one in m.statistics()] == [0] * 2
