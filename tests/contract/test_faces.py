"""SubprocessEnv, MultiEnv and AutoResetWrapper as a user meets them."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from multienv import (
    AutoResetWrapper,
    Deadlines,
    MultiEnv,
    RestartPolicy,
    SerialEnv,
    SubprocessEnv,
    create_subprocess_envs,
)
from multienv.errors import (
    ActionError,
    CallPendingError,
    ClosedError,
    EnvFnError,
    EnvsFailedError,
    NothingPendingError,
    NotInitializedError,
    ResetNeededError,
    RestartBudgetExceeded,
    SpaceMismatchError,
    UsageError,
    WaitTimeout,
    WorkerDiedError,
    WorkerHungError,
)
from multienv.testing import (
    CounterEnv,
    FailsNthTime,
    Fault,
    FaultyEnv,
    NondeterministicEnv,
    SlowEnv,
    SpaceEnv,
    assert_no_splice,
    assert_same_trajectory,
    example_spaces,
    observations_equal,
    rollout,
)

CARTPOLE = partial(gymnasium.make, "CartPole-v1")


def kill(env: Any) -> None:
    os.kill(env.statistics().pid, signal.SIGKILL)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1", "Pendulum-v1", "Blackjack-v1"])
def test_passes_gymnasiums_checker(env_id: str) -> None:
    with SubprocessEnv(partial(gymnasium.make, env_id)) as env:
        check_env(env, skip_render_check=True)


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("name", sorted(example_spaces()))
def test_every_space_both_ways_to_the_bit(name: str, shared_memory: bool) -> None:
    space = example_spaces()[name]
    env_fn = partial(SpaceEnv, observation_space=space, action_space=space)
    space.seed(3)
    actions = [space.sample() for _ in range(12)]
    expected = rollout(env_fn(), actions, seed=1)
    for face in (SubprocessEnv, SerialEnv):
        with face(env_fn, shared_memory=shared_memory) as env:
            seen = rollout(env, actions, seed=1)
        assert_same_trajectory(seen, expected, compare_info=True)


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


def test_calls_in_the_wrong_order_say_what_to_call() -> None:
    env = SubprocessEnv(CounterEnv)
    with pytest.raises(NotInitializedError, match="initialize"):
        env.step(0)
    with pytest.raises(NotInitializedError, match="initialize"):
        _ = env.observation_space
    env.start()
    env.start()
    with pytest.raises(NotInitializedError):
        env.reset()
    env.initialize()
    with pytest.raises(ResetNeededError, match="reset"):
        env.step(0)
    env.reset()
    with pytest.raises(NothingPendingError, match="step_async"):
        env.step_wait()
    env.step_async(1)
    with pytest.raises(CallPendingError, match="step_wait"):
        env.step_async(1)
    with pytest.raises(CallPendingError):
        env.get_attr("horizon")
    assert env.step_wait()[0][0] == 1
    env.close()
    env.close()
    with pytest.raises(ClosedError):
        env.reset()
    for error in (NotInitializedError, ResetNeededError, CallPendingError, NothingPendingError, ClosedError):
        assert issubclass(error, ValueError)


@pytest.mark.parametrize("action", [None, [0, 1], np.zeros(2), np.zeros((1,), np.int64)])
def test_an_action_of_another_shape_is_refused_and_nothing_is_lost(action: Any) -> None:
    with SubprocessEnv(CounterEnv) as env:
        env.reset(seed=0)
        env.step(1)
        with pytest.raises(ActionError, match="action"):
            env.step(action)
        assert env.step(1)[0][0] == 2


@pytest.mark.parametrize("timeout", [float("nan"), -1.0, float("inf"), "1", True])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout: Any) -> None:
    with pytest.raises(UsageError):
        Deadlines(step=timeout)
    with SubprocessEnv(CounterEnv) as env:
        env.reset()
        env.step_async(0)
        with pytest.raises(UsageError):
            env.step_wait(timeout)
        assert env.step_wait()[0][0] == 1


def test_waiting_in_vain_loses_nothing() -> None:
    with SubprocessEnv(partial(SlowEnv, step_seconds=0.4)) as env:
        env.reset()
        env.step_async(0)
        with pytest.raises(WaitTimeout, match="wait again"):
            env.step_wait(0.01)
        assert env.step_wait(30)[0][0] == 1


def test_what_is_wrong_with_an_env_fn() -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(EnvFnError, match="fork"):
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


def test_lists_in_lists_out_and_none_leaves_an_env_untouched() -> None:
    twins = [CounterEnv() for _ in range(3)]
    with MultiEnv(create_subprocess_envs([CounterEnv] * 3)) as m:
        observations, infos = m.reset(seed=5)
        for index, twin in enumerate(twins):
            assert observations_equal(observations[index], twin.reset(seed=5 + index)[0])
        assert infos == [{}, {}, {}]
        result = m.step([1, None, 2])
        assert [part[1] for part in result] == [None] * 5
        for index, action in ((0, 1), (2, 2)):
            expected = twins[index].step(action)
            assert observations_equal(result[0][index], expected[0])
            assert result[1][index] == expected[1]
        assert observations_equal(m.step([0, 3, 0])[0][1], twins[1].step(3)[0])
        for wrong in ([], [0, 0], [0, 0, 0, 0]):
            with pytest.raises(ActionError, match="actions for 3 envs"):
                m.step(wrong)
        before = m.step([None, None, None])
        assert before == ([None] * 3,) * 5
        observations, infos = m.reset(seed=[7, 8, 9], mask=[False, True, False])
        assert observations[0] is None
        assert infos[2] is None
        assert observations_equal(observations[1], CounterEnv().reset(seed=8)[0])
        assert m.reset(options={"reset_mask": np.array([True, False, False])})[0][1] is None
    m.close()
    with pytest.raises(ClosedError):
        m.step([0, 0, 0])


def test_envs_of_every_kind_step_together() -> None:
    envs = [
        SubprocessEnv(CARTPOLE),
        CARTPOLE(),
        gymnasium.wrappers.TimeLimit(SubprocessEnv(CARTPOLE).initialize(), 30),
        SerialEnv(CARTPOLE),
    ]
    with MultiEnv(envs, max_workers=3) as m:
        m.reset(seed=[1, 1, 1, 1])
        for _ in range(25):
            observations, *_ = m.step([1, 1, 1, 1])
            assert all((observation == observations[0]).all() for observation in observations)


def test_empty_and_unequal_are_refused() -> None:
    with pytest.raises(UsageError):
        MultiEnv([])
    envs = [CARTPOLE(), gymnasium.make("Acrobot-v1")]
    with pytest.raises(SpaceMismatchError, match="env 1"):
        MultiEnv(envs)
    for env in envs:
        env.close()


@pytest.mark.parametrize("max_workers", [None, 2])
def test_one_envs_failure_leaves_the_others_results_delivered(max_workers: int | None) -> None:
    fault = Fault("raise", "step", at=2)
    envs = create_subprocess_envs([CounterEnv, partial(FaultyEnv, fault=fault), CounterEnv])
    with MultiEnv(envs, max_workers=max_workers) as m:
        m.reset(seed=0)
        m.step([1, 1, 1])
        with pytest.raises(EnvsFailedError) as caught:
            m.step([1, 1, 1])
        assert list(caught.value.failures) == [1]
        assert caught.value.results[1] is None
        assert caught.value.results[0][0][0] == 2
        with pytest.raises(EnvsFailedError) as again:
            m.step([1, 1, 1])
        assert again.value.results[2][0][0] == 3
        m.reset(mask=[False, True, False])
        assert [observation[0] for observation in m.step([0, 0, 0])[0]] == [4, 1, 4]


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1", "Taxi-v4"])
def test_autoreset_equals_gymnasiums(mode: AutoresetMode, env_id: str) -> None:
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


def test_siblings_have_seeds_of_their_own_and_the_trainers_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIENV_TEST", "here")
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    class Surroundings(CounterEnv):
        def tell(self) -> tuple[Any, ...]:
            import random

            return random.random(), np.random.random(), os.getcwd(), dict(os.environ)

    with MultiEnv(create_subprocess_envs([Surroundings] * 2)) as m:
        one, two = m.call("tell")
    assert one[0] != two[0]
    assert one[1] != two[1]
    assert one[2] == os.getcwd()
    assert one[3]["MULTIENV_TEST"] == "here"
    assert "PMI_RANK" not in one[3]
    assert one[3]["OMP_NUM_THREADS"] == "1"
