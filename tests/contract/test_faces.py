"""SubprocessEnv, MultiEnv and AutoResetWrapper as a user meets them."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from kit import (
    CounterEnv,
    FailsNthTime,
    Fault,
    FaultyEnv,
    NondeterministicEnv,
    SpaceEnv,
    assert_no_splice,
    assert_same_trajectory,
    example_spaces,
    observations_equal,
    rollout,
)
from multienv import (
    AutoResetWrapper,
    Deadlines,
    MultiEnv,
    RestartPolicy,
    SubprocessEnv,
    create_subprocess_envs,
)
from multienv.errors import (
    EnvFnError,
    EnvRaisedError,
    EnvsFailedError,
    RestartBudgetExceeded,
    SpaceMismatchError,
    UsageError,
    WorkerDiedError,
    WorkerHungError,
)

CARTPOLE = partial(gymnasium.make, "CartPole-v1")


def kill(env: Any) -> None:
    os.kill(env.statistics().pid, signal.SIGKILL)


@pytest.mark.parametrize("name", sorted(example_spaces()))
def test_every_space_survives_a_kill(name: str) -> None:
    space = example_spaces()[name]
    env_fn = partial(SpaceEnv, observation_space=space, action_space=space)
    space.seed(3)
    actions = [space.sample() for _ in range(8)]
    with SubprocessEnv(env_fn) as env:
        seen = rollout(env, actions, seed=1, before_step=lambda step: kill(env) if step == 5 else None)
        assert env.statistics().exact_recoveries == 1
    assert_same_trajectory(seen, rollout(env_fn(), actions, seed=1))


def test_large_observations_and_actions() -> None:
    space = gymnasium.spaces.Box(0, 1, (512, 512), np.float32)
    env_fn = partial(SpaceEnv, observation_space=space, action_space=space)
    action = space.sample()
    with SubprocessEnv(env_fn) as env:
        seen = rollout(env, [action] * 4, seed=1, before_step=lambda step: kill(env) if step == 2 else None)
    assert_same_trajectory(seen, rollout(env_fn(), [action] * 4, seed=1), compare_info=True)


def test_what_is_wrong_with_an_env_fn() -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(EnvFnError, match="Build what it needs inside"):
        SubprocessEnv(lambda: lock)
    with pytest.raises(EnvFnError, match="function"):
        SubprocessEnv(CounterEnv())  # type: ignore[arg-type]
    with pytest.raises(EnvFnError):
        SubprocessEnv("CartPole-v1")  # type: ignore[arg-type]
    env = SubprocessEnv(lambda: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match=r"gymnasium\.Env"):
        env.initialize()
    env.close()


def test_one_failing_env_fn_closes_the_others_and_names_every_cause(tmp_path: Any) -> None:
    bad = [FailsNthTime(counter=str(tmp_path / str(index))) for index in range(2)]
    with pytest.raises(EnvsFailedError) as caught:
        create_subprocess_envs([CounterEnv, bad[0], CounterEnv, bad[1]])
    assert sorted(caught.value.failures) == [1, 3]
    with pytest.raises(ZeroDivisionError) as single:
        create_subprocess_envs([CounterEnv, lambda: 1 // 0])  # type: ignore[list-item,return-value]
    assert "1 // 0" in str(single.value.failures[1].remote_traceback)
    with pytest.raises(UsageError):
        create_subprocess_envs([])


def test_env_fn_that_raises_when_a_lost_env_is_built_anew_is_told_with_its_cause(tmp_path: Any) -> None:
    env_fn = FailsNthTime(counter=str(tmp_path / "built"), nth=2)
    with SubprocessEnv(env_fn, restart=RestartPolicy(on_crash="raise")) as env:
        env.reset(seed=0)
        kill(env)
        with pytest.raises(WorkerDiedError):
            env.step(0)
        with pytest.raises(EnvRaisedError) as caught:
            env.reset(seed=0)
        assert isinstance(caught.value.__cause__, Exception)
        assert type(caught.value.__cause__) in type(caught.value).__mro__
        env.reset(seed=0)
        assert env.step(1)[0][0] == 1


def test_empty_and_unequal_are_refused() -> None:
    with pytest.raises(UsageError):
        MultiEnv([])
    envs = [CARTPOLE(), gymnasium.make("Acrobot-v1")]
    with pytest.raises(SpaceMismatchError, match="env 1"):
        MultiEnv(envs)
    for env in envs:
        env.close()


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1", "Taxi-v4"])
def test_autoreset_equals_gymnasiums_while_workers_are_killed(mode: AutoresetMode, env_id: str) -> None:
    env_fn = partial(gymnasium.make, env_id, max_episode_steps=9)
    peer = SyncVectorEnv([env_fn] * 3, autoreset_mode=mode)
    peer.action_space.seed(1)
    with MultiEnv(create_subprocess_envs([env_fn] * 3), autoreset_mode=mode) as m:
        assert m.metadata["autoreset_mode"] is mode
        ours, theirs = m.reset(seed=4)[0], peer.reset(seed=4)[0]
        done = np.zeros(3, bool)
        for step in range(60):
            assert (np.asarray(ours) == theirs).all()
            if mode is AutoresetMode.DISABLED and done.any():
                ours = [new if new is not None else old for new, old in zip(m.reset(mask=done)[0], ours, strict=True)]
                theirs, _ = peer.reset(options={"reset_mask": done})
                done = np.zeros(3, bool)
                continue
            if step % 7 == 3:
                kill(m.envs[step % 3])
            actions = peer.action_space.sample()
            ours, rewards, terminations, truncations, infos = m.step(list(actions))
            theirs, *rest, peer_infos = peer.step(actions)
            for mine, other in zip((rewards, terminations, truncations), rest, strict=True):
                assert (np.asarray(mine) == other).all()
            done = rest[1] | rest[2]
            if mode is AutoresetMode.SAME_STEP:
                for index in np.flatnonzero(done):
                    assert np.array_equal(infos[index]["final_obs"], peer_infos["final_obs"][index])
    peer.close()


def test_the_autoreset_wrapper_on_any_env() -> None:
    env = AutoResetWrapper(CounterEnv(horizon=2), "SameStep")
    env.reset(seed=0)
    env.step(0)
    observation, reward, terminated, truncated, info = env.step(3)
    assert observation[0] == 0
    assert info["final_obs"][0] == 2
    assert terminated or truncated
    assert reward != 0.0
    with pytest.raises(UsageError, match="AutoresetMode"):
        AutoResetWrapper(CounterEnv(), "sometimes")


def test_attributes_and_calls_reach_env_and_wrappers_and_survive_a_kill() -> None:
    with SubprocessEnv(partial(CounterEnv, render_mode="rgb_array")) as env:
        env.reset(seed=0)
        env.set_attr("offset", 2.5)
        env.call("poke", 0.5)
        kill(env)
        assert env.get_attr("offset") == 3.0
        assert env.get_wrapper_attr("offset") == 3.0
        assert env.statistics().exact_recoveries == 1
        twin = CounterEnv(render_mode="rgb_array")
        twin.reset(seed=0)
        twin.offset = 3.0
        assert observations_equal(env.step(1)[0], twin.step(1)[0])
        assert (env.render() == twin.render()).all()
        with pytest.raises(ValueError, match="step"):
            env.call("step", 1)
        with pytest.raises(AttributeError):
            env.get_attr("no_such_thing")
        assert env.step(1)[0][0] == 2


def test_what_cannot_be_replayed_is_truncated_never_spliced() -> None:
    with SubprocessEnv(NondeterministicEnv) as env:
        seen = rollout(env, [1] * 30, seed=0, before_step=lambda step: kill(env) if step in (4, 17) else None)
        statistics = env.statistics()
    assert statistics.truncated_recoveries == 2
    assert_no_splice(seen)
    broken = [transition for transition in seen if transition.recovery]
    assert len(broken) == 2
    for transition in broken:
        assert transition.truncated
        assert transition.reward == 0.0
        assert "does not match" in transition.info["multienv"]["reason"]


def test_policies_truncate_and_raise() -> None:
    with SubprocessEnv(CounterEnv, restart=RestartPolicy(on_crash="truncate")) as env:
        env.reset(seed=0)
        last = env.step(1)[0]
        kill(env)
        observation, reward, terminated, truncated, info = env.step(1)
        assert (observation == last).all()
        assert (reward, terminated, truncated) == (0.0, False, True)
        assert "SIGKILL" in info["multienv"]["reason"]
        env.reset(seed=1)
        assert env.step(1)[0][0] == 1
    with SubprocessEnv(CounterEnv, restart=RestartPolicy(on_crash="raise"), env_index=3) as env:
        env.reset(seed=11)
        env.step(1)
        kill(env)
        with pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
            env.step(1)
        error = caught.value
        assert (error.exit_code, error.env_index, error.command, error.step, error.seed) == (-9, 3, "step", 1, 11)
        env.reset()
        assert env.step(1)[0][0] == 1
    with SubprocessEnv(CounterEnv, restart=RestartPolicy(max_restarts=1)) as env:
        env.reset()
        kill(env)
        env.step(1)
        kill(env)
        with pytest.raises(RestartBudgetExceeded):
            env.step(1)


def test_a_hangs_error_shows_where_it_hung() -> None:
    env_fn = partial(FaultyEnv, fault=Fault("hang_c", "step", at=2))
    policy = RestartPolicy(on_timeout="raise")
    with SubprocessEnv(env_fn, restart=policy, deadlines=Deadlines(step=0.4)) as env:
        env.reset()
        env.step(0)
        with pytest.raises(WorkerHungError, match="faults.py"):
            env.step(0)


def test_a_segfaults_error_has_stack_and_last_words() -> None:
    env_fn = partial(FaultyEnv, fault=[Fault("segv", "step", at=2)])
    with SubprocessEnv(env_fn, restart=RestartPolicy(on_crash="raise")) as env:
        env.reset()
        env.step(0)
        with pytest.raises(WorkerDiedError, match="SIGSEGV") as caught:
            env.step(0)
        assert "faults.py" in caught.value.stack


class RegisteredHere(CounterEnv):
    pass


def test_an_env_registered_in_the_trainer_is_found_in_the_worker() -> None:
    gymnasium.register("tests/RegisteredHere-v0", RegisteredHere, disable_env_checker=True)
    try:
        with SubprocessEnv(lambda: gymnasium.make("tests/RegisteredHere-v0")) as env:
            env.reset(seed=0)
            assert env.step(1)[0][0] == 1
    finally:
        del gymnasium.registry["tests/RegisteredHere-v0"]
