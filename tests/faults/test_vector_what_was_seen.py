"""An env that does not come back as it was, or is not to be reset, shows what the caller saw last of it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from trainer_process import becomes_true

from kit import CounterEnv, NondeterministicEnv, SlowEnv, SpaceEnv, descendants, is_alive
from multienv import Deadlines, RestartPolicy, SerialVectorEnv, SubprocessEnv, SubprocessVectorEnv
from multienv.errors import EnvsFailedError
from multienv.events import Event

ENDLESS, ERRATIC = partial(CounterEnv, horizon=None), partial(NondeterministicEnv, horizon=None)
NO_SNAPSHOTS = RestartPolicy(snapshots=False)


def kill(envs: SubprocessVectorEnv) -> None:
    os.kill(envs.statistics()[0].pid or 0, signal.SIGKILL)


# --- laid out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_an_episode_that_cannot_go_on_ends_with_what_was_seen_last(mode: AutoresetMode) -> None:
    make = partial(SubprocessVectorEnv, [ERRATIC] * 3, envs_per_worker=3, restart=NO_SNAPSHOTS)
    with contextlib.closing(make(autoreset_mode=mode)) as envs:
        envs.reset(seed=0)
        for _ in range(5):
            seen = envs.step([0] * 3)[0]
        kill(envs)
        observations, _, _, truncated, infos = envs.step([0] * 3)
        assert truncated.all()
        told = np.stack(infos["final_obs"]) if mode is AutoresetMode.SAME_STEP else observations
        assert told.tobytes() == seen.tobytes()


@pytest.mark.parametrize(
    ("env_fn", "policy"),
    [
        (ENDLESS, RestartPolicy(snapshots=False, journal_limit=0)),
        (ENDLESS, RestartPolicy(on_crash="truncate")),
        (ERRATIC, NO_SNAPSHOTS),
    ],
    ids=["no journal", "truncate", "erratic"],
)
@pytest.mark.parametrize("views", [False, True])
def test_an_env_left_out_of_a_reset_shows_what_it_showed_though_its_process_was_lost(
    env_fn: Any, policy: RestartPolicy, views: bool
) -> None:
    with contextlib.closing(
        SubprocessVectorEnv([env_fn] * 3, envs_per_worker=3, restart=policy, copy=not views)
    ) as envs:
        envs.reset(seed=0)
        for _ in range(5):
            seen = envs.step([0] * 3)[0]
        before = seen.copy()
        kill(envs)
        observations, _ = envs.reset(options={"reset_mask": np.array([True, False, False])})
        assert envs.statistics()[0].losses == 1
        assert observations[0][0] == 0
        assert observations[1:].tobytes() == before[1:].tobytes() == seen[1:].tobytes()
        observations, _, _, truncated, _ = envs.step([0] * 3)
        if truncated.any():
            assert truncated.tolist() == [False, True, True]
            assert observations[1:].tobytes() == before[1:].tobytes()


@pytest.mark.parametrize("snapshots", [False, True])
@pytest.mark.parametrize("size", [2, 500], ids=["shown", "digested"])
def test_writing_to_the_views_of_copy_false_does_not_spoil_a_recovery(snapshots: bool, size: int) -> None:
    env_fn = partial(SpaceEnv, observation_space=spaces.Box(-1, 1, (size,)), horizon=100)
    policy = RestartPolicy(snapshots=snapshots, snapshot_every=1 if snapshots else None)
    events: list[Event] = []
    envs = SubprocessVectorEnv([env_fn] * 4, envs_per_worker=2, copy=False, restart=policy, hooks=[events.append])
    twin = SerialVectorEnv([env_fn] * 4)
    with contextlib.closing(envs), contextlib.closing(twin):
        envs.reset(seed=0)
        twin.reset(seed=0)
        for step in range(12):
            observations, *others = envs.step([0] * 4)
            same, *same_others = twin.step([0] * 4)
            assert observations.tobytes() == same.tobytes()
            for one, other in zip(others[:3], same_others[:3], strict=True):
                assert one.tobytes() == other.tobytes()
            if step % 3 == 1:
                observations[:3] /= 10
                kill(envs)
    assert [event.outcome for event in events if hasattr(event, "outcome")] == ["exact"] * 4


# --- travelling -------------------------------------------------------------------------------------


class Illegible(str):
    """Can be had again in a worker alone."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return _only_there, (os.getpid(), str(self))


def _only_there(pid: int, text: str) -> str:
    if os.getpid() != pid:
        raise ValueError("not here")
    return Illegible(text)


def after_a_failed_third_step(fns: list[Any], **options: Any) -> Any:
    """What a masked reset shows of a sound env, which is reset, and of one whose third step has failed."""
    with contextlib.closing(SubprocessVectorEnv(fns, envs_per_worker=2, **options)) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            envs.step([0, 0])
        with pytest.raises(EnvsFailedError):
            envs.step([0, 0])
        return envs.reset(options={"reset_mask": np.array([True, False])})[0]


@pytest.mark.parametrize("shared_memory", [True, False])
def test_the_observation_of_a_step_that_failed_has_not_been_seen(shared_memory: bool) -> None:
    observations = after_a_failed_third_step([CounterEnv, LockInTheThird], shared_memory=shared_memory)
    assert observations[:, 0].tolist() == [0, 2]


class LockInTheThird(CounterEnv):
    def _info(self) -> dict[str, Any]:
        return {"lock": threading.Lock()} if self.episode_step == 3 else {}


# --- time -------------------------------------------------------------------------------------------


def test_past_the_deadline_of_the_recovery_the_step_is_truncated_and_the_envs_go_on() -> None:
    slow = partial(SlowEnv, step_seconds=0.02, horizon=None)
    policy = RestartPolicy(snapshots=False, state_anchors=False)
    envs = SubprocessVectorEnv([slow] * 2, envs_per_worker=2, restart=policy, deadlines=Deadlines(recovery=0.5))
    with contextlib.closing(envs):
        envs.reset(seed=0)
        for _ in range(60):
            seen = envs.step([0, 0])[0]
        kill(envs)
        observations, _, _, truncated, infos = envs.step([0, 0])
        assert truncated.all()
        assert "longer than Deadlines.recovery" in infos["multienv"]["reason"][0]
        assert observations.tobytes() == seen.tobytes()
        for step in range(3):
            observations, _, _, truncated, _ = envs.step([0, 0])
            assert not truncated.any()
            assert [row[0] for row in observations] == [step, step]


def test_a_snapshot_that_does_not_get_up_leaves_time_for_the_journal() -> None:
    events: list[Event] = []
    policy, deadlines = RestartPolicy(snapshot_every=1), Deadlines(recovery=4.0)
    with SubprocessEnv(ENDLESS, restart=policy, deadlines=deadlines, hooks=[events.append]) as env:
        env.reset(seed=0)
        for _ in range(4):
            env.step(1)
        worker = env.statistics().pid or 0
        assert becomes_true(lambda: env.statistics().snapshots >= 4 and sum(map(is_alive, descendants(worker))) == 1)
        for snapshot in descendants(worker):
            os.kill(snapshot, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)
        observation, _, _, truncated, _ = env.step(1)
        assert (observation[0], truncated) == (5, False)
    assert [event.rung for event in events if hasattr(event, "rung")] == ["journal"]
