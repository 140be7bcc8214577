"""What one trainer saved, another goes on with: in the middle of an episode, bit for bit."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from kit import (
    CounterEnv,
    GlobalRandomEnv,
    MemoryEnv,
    Transition,
    first_difference,
    kill_worker,
)
from kit.trainer_process import run
from multienv import MultiEnv, RestartPolicy, SerialEnv, SubprocessEnv, SubprocessVectorEnv, create_subprocess_envs
from multienv.errors import (
    EnvsFailedError,
    ResetNeededError,
    UsageError,
)

ENVS: dict[str, Callable[[], gymnasium.Env[Any, Any]]] = {
    "global generators": GlobalRandomEnv,
    "memory": partial(MemoryEnv, 0),
    "LunarLander": partial(gymnasium.make, "LunarLander-v3"),
}


def go_on(env: gymnasium.Env[Any, Any], actions: list[Any], *, ended: bool) -> list[Transition]:
    """Steps, and a reset whenever it is time, without seeds."""
    record = []
    for action in actions:
        if ended:
            observation, _ = env.reset()
            record.append((observation, 0.0, False, False))
            ended = False
            continue
        observation, reward, terminated, truncated, _ = env.step(action)
        record.append((observation, reward, terminated, truncated))
        ended = bool(terminated or truncated)
    return record


@pytest.mark.parametrize(("name", "steps"), [*((name, 45) for name in ENVS), ("memory", 0)])
def test_another_env_goes_on_bit_for_bit(name: str, steps: int) -> None:
    env_fn = ENVS[name]
    with SubprocessEnv(env_fn) as env:
        actions = [env.action_space.sample() for _ in range(60)]
        env.reset(seed=4)
        before = go_on(env, actions[:steps], ended=False)
        ended = bool(before) and any(before[-1][2:])
        state = pickle.loads(pickle.dumps(env.state_dict()))
        taken = env.statistics().steps
        expected = go_on(env, actions, ended=ended)
    with SubprocessEnv(env_fn) as other:
        other.reset(seed=99)
        other.load_state_dict(state)
        assert other.statistics().steps == taken
        kill_worker(other)  # it can be recovered as any other
        actual = go_on(other, actions, ended=ended)
        assert other.statistics().exact_recoveries == 1
    assert first_difference(actual, expected) is None


def resume(path: str) -> None:
    """Be another trainer, which goes on with what one has saved; leave in its place what comes of it."""
    state, actions = pickle.loads(Path(path).read_bytes())
    with SubprocessEnv(ENVS["LunarLander"]) as env:
        env.load_state_dict(state)
        Path(path).write_bytes(pickle.dumps(go_on(env, actions, ended=False)))


def test_another_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with SubprocessEnv(ENVS["LunarLander"]) as env:
        env.reset(seed=8)
        actions = [env.action_space.sample() for _ in range(60)]
        go_on(env, actions[:20], ended=False)
        saved.write_bytes(pickle.dumps((env.state_dict(), actions[20:])))
        expected = go_on(env, actions[20:], ended=False)
    run("test_checkpoints", "resume", saved)
    assert first_difference(pickle.loads(saved.read_bytes()), expected) is None


def damaged(state: Any) -> Iterator[Any]:
    """It, with one thing in it that is not as it was, or missing; each in turn."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield {name: one for name, one in state.items() if name != key}
            yield from ({**state, key: worse} for worse in damaged(value))
    elif isinstance(state, list | tuple):
        yield (*state, b"")
        for place, value in enumerate(state):
            yield (*state[:place], *state[place + 1 :])
            yield from ((*state[:place], worse, *state[place + 1 :]) for worse in damaged(value))
    elif isinstance(state, bytes):
        yield from (state[:-1], state + b"x", state[:-1] + bytes([state[-1] ^ 1])) if state else (b"x",)
        yield None
    else:
        yield from (None, "x") if state is not None else (0,)


def test_a_damaged_one_is_refused() -> None:
    env_fn = partial(gymnasium.make, "CartPole-v1")
    with SubprocessEnv(env_fn) as env:
        env.reset(seed=0)
        for _ in range(3):
            env.step(1)
        state = env.state_dict()
        pid = env.statistics().pid
        worse = list(damaged(state))
        assert len(worse) > 10
        for one in worse:
            with pytest.raises(UsageError, match="state_dict"):
                env.load_state_dict(one)
        assert env.statistics().pid == pid
        env.load_state_dict({name: state[name] for name in reversed(state)})


def test_state_is_refused_by_an_env_that_does_not_replay() -> None:
    with SubprocessEnv(CounterEnv) as env, SerialEnv(CounterEnv) as other:
        env.reset(seed=0)
        with pytest.raises(UsageError, match="does not replay"):
            other.load_state_dict(env.state_dict())


@pytest.mark.parametrize("mode", ["SAME_STEP", "DISABLED"])
def test_of_several(mode: str) -> None:
    def make() -> MultiEnv:
        return MultiEnv(
            create_subprocess_envs([partial(CounterEnv, horizon=5 + i) for i in range(3)]), autoreset_mode=mode
        )

    with make() as m:
        m.reset(seed=3)
        for _ in range(5):
            m.step([1, 2, 3])
        state = pickle.loads(pickle.dumps(m.state_dict()))
        rounds = 1 if mode == "DISABLED" else 12
        actions = [[t % 4, 1, None if mode == "DISABLED" else 2] for t in range(rounds)]
        if mode == "DISABLED":
            m.reset(mask=[True, False, False])
        expected = [m.step(row) for row in actions]
    with make() as m:
        m.load_state_dict(state)
        if mode == "DISABLED":
            m.reset(mask=[True, False, False])
        assert repr([m.step(row) for row in actions]) == repr(expected)
        for envs in (state["envs"][:2], 3, None):
            with pytest.raises(UsageError, match="3 such envs"):
                m.load_state_dict({"envs": envs})
        broken = {"envs": [state["envs"][0], {}, state["envs"][2]]}
        with pytest.raises(EnvsFailedError) as failed:
            m.load_state_dict(broken)
        assert list(failed.value.failures) == [1]


def test_a_batch_whose_own_journal_is_outgrown_loads_a_state() -> None:
    """The checkpoint is all that it takes."""
    endless, actions = partial(CounterEnv, horizon=None), np.array([1, 2, 3])
    with SubprocessVectorEnv([endless] * 3, envs_per_worker=2) as envs:
        envs.reset(seed=4)
        envs.step(actions)
        state = pickle.loads(pickle.dumps(envs.state_dict()))
        expected = envs.step(actions)
    policy = RestartPolicy(journal_limit=2000)
    with SubprocessVectorEnv([endless] * 3, envs_per_worker=2, restart=policy) as envs:
        envs.reset(seed=5)
        for _ in range(200):
            envs.step(actions)
        with pytest.raises(EnvsFailedError, match="outgrown"):
            envs.state_dict()
        envs.load_state_dict(state)
        np.testing.assert_equal(envs.step(actions), expected)


def test_of_a_batch_that_is_loaded_in_part_the_rest_stays_and_the_part_wants_a_reset() -> None:
    with SubprocessVectorEnv([partial(CounterEnv, horizon=None)] * 4, envs_per_worker=2) as envs:
        envs.reset(seed=4)
        state = envs.state_dict()
        envs.step(np.ones(4, int))
        with pytest.raises(EnvsFailedError, match="as they were before") as failed:
            envs.load_state_dict({**state, "workers": [state["workers"][0], {}]})
        assert list(failed.value.failures) == [2]
        with pytest.raises(ResetNeededError) as refused:
            envs.step(np.ones(4, int))
        assert list(refused.value.failures) == [0, 1]
        assert [result[0][0] for result in refused.value.results[2:]] == [2, 2]
        envs.reset(options={"reset_mask": np.arange(4) < 2})
        assert envs.step(np.ones(4, int))[0][:, 0].tolist() == [1, 1, 3, 3]
        envs.load_state_dict(state)
        assert envs.step(np.ones(4, int))[0][:, 0].tolist() == [1] * 4
