"""What envs of a batch return or raise that is out of the ordinary, and what becomes of the batch."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from kit import CounterEnv, Fault, FaultyEnv, no_leaks
from multienv import MultiEnv, RestartPolicy, SerialVectorEnv, SubprocessEnv, SubprocessVectorEnv, make_vec
from multienv.errors import EnvFnError, EnvRaisedError, EnvsFailedError, UsageError, WorkerLostError

FACES = [SerialVectorEnv, SubprocessVectorEnv]
ACTIONS = np.array([1, 2])


class InfoEnv(CounterEnv):
    """Its info is one dict, of all instances, that changes with each step."""

    shared: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, number: int, kind: str = "shared") -> None:
        super().__init__(horizon=3)
        self.number, self.kind = number, kind

    def _info(self) -> dict[str, Any]:
        if self.kind == "mixed":
            return {"x": None if self.number else 3} if self.episode_step == 2 else {}
        self.shared["number"] = self.number
        self.shared["step"] = self.episode_step
        return self.shared


class InterruptedEnv(CounterEnv):
    """Ctrl-C comes in its third step, once."""

    interrupted = False

    def step(self, action: Any) -> Any:
        if self.episode_step == 2 and not InterruptedEnv.interrupted:
            InterruptedEnv.interrupted = True
            raise KeyboardInterrupt
        return super().step(action)


class LateSeedEnv(CounterEnv):
    """The first reset raises, before it seeds."""

    calls = 0

    def reset(self, **arguments: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise ValueError("not yet")
        return super().reset(**arguments)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("face", FACES)
def test_infos_that_the_env_uses_again(face, mode):
    fns = [partial(InfoEnv, 0), partial(InfoEnv, 1)]
    envs, reference = (
        face(fns, autoreset_mode=mode),
        SyncVectorEnv([partial(CounterEnv, horizon=3)] * 2, autoreset_mode=mode),
    )
    envs.reset(seed=0)
    reference.reset(seed=0)
    for step in range(8):
        observations, _, _, _, infos = envs.step(ACTIONS)
        assert observations.tobytes() == reference.step(ACTIONS)[0].tobytes()
        assert infos["number"].tolist() == [0, 1]
        assert infos["step"].tolist() == observations[:, 0].tolist(), step
        if "final_info" in infos:
            assert infos["final_info"]["step"].tolist() == [3, 3]
            assert infos["final_info"]["number"].tolist() == [0, 1]
    envs.close()


@pytest.mark.parametrize("face", FACES)
def test_infos_that_cannot_be_merged_cost_one_step_and_no_more(face):
    envs = face([partial(InfoEnv, 0, "mixed"), partial(InfoEnv, 1, "mixed")])
    envs.reset(seed=0)
    envs.step(ACTIONS)
    with pytest.raises(TypeError):
        envs.step(ACTIONS)
    assert envs.step(ACTIONS)[0][:, 0].tolist() == [3, 3]
    envs.close()


def test_an_error_taken_for_an_end_has_a_final_observation():
    """Or the next episode would follow the last one without a word."""
    fns = [lambda: FaultyEnv(fault=Fault("raise", "step", at=3, per="episode")), CounterEnv]
    envs = SubprocessVectorEnv(
        fns, envs_per_worker=2, restart=RestartPolicy(on_error="truncate"), autoreset_mode=AutoresetMode.SAME_STEP
    )
    envs.reset(seed=0)
    for step in range(1, 10):
        observations, _, _, truncations, infos = envs.step(ACTIONS)
        assert truncations[0] == (step % 3 == 0)
        if step % 3 == 0:
            assert infos["final_obs"][0][0] == 2
            assert "FaultError" in infos["final_info"]["multienv"]["reason"][0]
        assert observations[0, 0] == step % 3
    envs.close()


def test_ctrl_c_in_an_env_of_this_process_steps_none_twice():
    envs = SerialVectorEnv([CounterEnv, InterruptedEnv])
    envs.reset(seed=0)
    envs.step(ACTIONS)
    envs.step(ACTIONS)
    with pytest.raises(KeyboardInterrupt):
        envs.step(ACTIONS)
    with pytest.raises(WorkerLostError):
        envs.step(ACTIONS)
    assert envs.reset(seed=0)[0][:, 0].tolist() == [0, 0]
    assert envs.step(ACTIONS)[0][:, 0].tolist() == [1, 1]
    envs.close()


def test_an_env_that_raises_before_it_seeds_can_be_brought_back():
    envs = SubprocessVectorEnv([LateSeedEnv, CounterEnv], envs_per_worker=2, restart=RestartPolicy(snapshots=False))
    with pytest.raises(ValueError, match="not yet"):
        envs.reset(seed=0)
    for _ in range(3):
        batch = envs.step(ACTIONS)
    pid = envs.statistics()[0].pid
    assert pid
    os.kill(pid, signal.SIGKILL)
    batch = envs.step(ACTIONS)
    assert not batch[3].any()
    assert envs.statistics()[0].exact_recoveries == 1
    envs.close()


@pytest.mark.parametrize("face", FACES)
def test_a_reset_that_raises_does_not_take_the_end_of_the_episode_with_it(face):
    """With autoreset in the same step it comes with the error."""
    fns = [partial(FaultyEnv, fault=Fault("raise", "reset", at=2), horizon=3), partial(CounterEnv, horizon=30)]
    envs = face(fns, autoreset_mode=AutoresetMode.SAME_STEP)
    reference = CounterEnv(horizon=3)
    envs.reset(seed=0)
    reference.reset(seed=0)
    for _ in range(2):
        envs.step(ACTIONS)
        reference.step(ACTIONS[0])
    expected = reference.step(ACTIONS[0])
    with pytest.raises(EnvsFailedError) as caught:
        envs.step(ACTIONS)
    failure = caught.value.failures[0]
    assert isinstance(failure, EnvRaisedError)
    assert "FaultError" in str(failure)
    assert failure.returned is not None
    assert failure.returned[0].tobytes() == expected[0].tobytes()
    assert failure.returned[1:] == expected[1:]
    assert caught.value.results[0] is None
    assert caught.value.results[1][0][0] == 3
    observations, rewards, terminations, _, _ = envs.step(ACTIONS)  # it is tried again
    assert observations[:, 0].tolist() == [0, 4]
    assert (rewards[0], terminations[0]) == (0.0, False)
    envs.close()


def test_told_to_end_episodes_where_envs_raise_such_a_reset_raises_all_the_same():
    """The episode has ended already, and the next one has no observation to be truncated at."""
    fns = [partial(FaultyEnv, fault=Fault("raise", "reset", at=2), horizon=3), partial(CounterEnv, horizon=30)]
    policy = RestartPolicy(on_error="truncate")
    envs = SubprocessVectorEnv(fns, envs_per_worker=2, restart=policy, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.reset(seed=0)
    for _ in range(2):
        envs.step(ACTIONS)
    with pytest.raises(EnvsFailedError) as caught:
        envs.step(ACTIONS)
    assert caught.value.failures[0].returned[2:4] == (True, False)  # type: ignore[union-attr]
    assert envs.step(ACTIONS)[0][:, 0].tolist() == [0, 4]
    envs.close()


@pytest.mark.parametrize("face", FACES)
def test_a_reward_that_is_no_number(face):
    class RewardEnv(CounterEnv):
        def _reward(self) -> Any:
            return None

    envs = face([RewardEnv, CounterEnv])
    envs.reset(seed=0)
    with pytest.raises(TypeError, match="as reward") as caught:
        envs.step(ACTIONS)
    assert isinstance(caught.value, EnvsFailedError)
    assert list(caught.value.failures) == [0]
    envs.close()


def test_episodes_of_a_process_are_not_counted():
    with pytest.raises(UsageError, match="recycle_after_steps"):
        SubprocessVectorEnv([CounterEnv], restart=RestartPolicy(recycle_after_episodes=3))


@pytest.mark.parametrize("size", [1, 2, 3, 300, 2000])
def test_many_envs_with_small_observations_are_told_apart(size):
    """Digests of rows, at once and one by one: a replay that differs in one env is found out."""
    fns = [partial(WideEnv, size)] * 20
    envs = SubprocessVectorEnv(fns, envs_per_worker=20, restart=RestartPolicy(snapshots=False))
    twin = SerialVectorEnv(fns)
    assert envs.reset(seed=0)[0].tobytes() == twin.reset(seed=0)[0].tobytes()
    for step in range(6):
        if step == 3:
            os.kill(envs.statistics()[0].pid or os.getpid(), signal.SIGKILL)
        assert envs.step(np.zeros(20, np.int64))[0].tobytes() == twin.step(np.zeros(20, np.int64))[0].tobytes()
    assert envs.statistics()[0].exact_recoveries == 1
    envs.close()


class WideEnv(gymnasium.Env[Any, Any]):
    """Observes so many draws."""

    def __init__(self, size: int) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (size, 300 // size + 1), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action: Any) -> Any:
        return self._draw(), 0.5, False, False, {}

    def _draw(self) -> Any:
        return self.np_random.random(self.observation_space.shape).astype(np.float32)


# --- what gymnasium takes, or refuses by a type of its own --------------------------------------------


def test_numbers_may_be_numpys() -> None:
    two = np.int64(2)
    envs = make_vec("CartPole-v1", two, vector_kwargs={"envs_per_worker": np.int32(1), "native_threads": two})
    assert (
        envs.reset(seed=np.array(3))[0].tobytes()
        == SyncVectorEnv([partial(gymnasium.make, "CartPole-v1")] * 2).reset(seed=3)[0].tobytes()
    )
    envs.step_async(ACTIONS[:2] % 2)
    assert len(envs.step_wait(np.float32(60))[1]) == 2
    envs.call_async("get_wrapper_attr", "spec")
    assert len(envs.call_wait(np.float32(60))) == 2
    envs.close()
    single = MultiEnv([CounterEnv()], max_workers=np.int64(1))
    single.close()


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("seed", "words"),
    [
        (-1, "Seed must be greater or equal to zero, actual value: -1"),
        ([1, 1.5], "Seed must be a python integer, actual type: <class 'float'>"),
        (True, "Seed must be a python integer, actual type: <class 'bool'>"),
    ],
)
def test_a_wrong_seed_is_gymnasiums_error(face: Any, seed: Any, words: str) -> None:
    with contextlib.closing(face([CounterEnv] * 2)) as envs:
        with pytest.raises(gymnasium.error.Error, match=words) as refused:
            envs.reset(seed=seed)
        assert isinstance(refused.value, UsageError)
        envs.reset(seed=1)


@pytest.mark.parametrize("envs_per_worker", [1, 2])
def test_of_values_of_which_one_cannot_be_sent_none_is_set(envs_per_worker: int) -> None:
    with contextlib.closing(SubprocessVectorEnv([CounterEnv] * 4, envs_per_worker=envs_per_worker)) as envs:
        envs.set_attr("mark", 0)
        with pytest.raises(UsageError, match=r"set_attr\(\).*Nothing was sent"):
            envs.set_attr("mark", [1, 2, 3, threading.Lock()])
        assert envs.get_attr("mark") == (0,) * 4
        envs.set_attr("mark", [1, 2, 3, 4])
        assert envs.get_attr("mark") == (1, 2, 3, 4)


@pytest.mark.parametrize("envs_per_worker", [1, 3])
def test_an_env_fn_that_cannot_be_sent_leaves_nothing_behind(envs_per_worker: int) -> None:
    lock = threading.Lock()
    with SubprocessEnv(CounterEnv), no_leaks():
        for _ in range(3):
            with pytest.raises(EnvFnError):
                SubprocessVectorEnv([CounterEnv, CounterEnv, lambda: lock], envs_per_worker=envs_per_worker)


@pytest.mark.parametrize(("mode", "face"), [("sync", SerialVectorEnv), ("async", SubprocessVectorEnv)])
def test_a_spec_that_gymnasiums_make_vec_has_made(mode: str, face: Any) -> None:
    theirs = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    spec: Any = theirs.spec
    theirs.close()
    spec.kwargs["vectorization_mode"] = mode
    with contextlib.closing(make_vec(spec)) as envs:
        assert type(envs) is face
        assert envs.num_envs == 3
