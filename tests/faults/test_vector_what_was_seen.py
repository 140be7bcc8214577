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
from multienv.errors import EnvsFailedError, ResetNeededError, ResultNotPicklableError
from multienv.events import Event
from multienv.recovery import ladder

FACES = [SerialVectorEnv, SubprocessVectorEnv]
ENDLESS, ERRATIC = partial(CounterEnv, horizon=None), partial(NondeterministicEnv, horizon=None)
NO_SNAPSHOTS = RestartPolicy(snapshots=False)


def kill(envs: SubprocessVectorEnv) -> None:
    os.kill(envs.statistics()[0].pid or 0, signal.SIGKILL)


class TextEnv(CounterEnv):
    """What it shows has no arrays; some of its first resets, and one of its steps, raise."""

    def __init__(self, bad_resets: int = 0, bad_step: int = 0, **counter: Any) -> None:
        super().__init__(**counter)
        self.observation_space: Any = spaces.Dict(of=self.observation_space, text=spaces.Text(9))
        self.bad_resets, self.bad_step, self.steps = bad_resets, bad_step, 0

    def _observe(self) -> Any:
        return {"of": super()._observe(), "text": str(self.episode_step)}

    def reset(self, **arguments: Any) -> Any:
        self.bad_resets -= 1
        if self.bad_resets >= 0:
            raise ValueError("not yet")
        return super().reset(**arguments)

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == self.bad_step:
            raise ValueError("in a step")
        return super().step(action)


# --- laid out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_an_episode_that_cannot_go_on_ends_with_what_was_seen_last(mode: AutoresetMode, count: int) -> None:
    with_others = {"envs_per_worker": count, "autoreset_mode": mode}
    with contextlib.closing(SubprocessVectorEnv([ERRATIC] * count, restart=NO_SNAPSHOTS, **with_others)) as envs:
        envs.reset(seed=0)
        for _ in range(5):
            seen = envs.step([0] * count)[0]
        kill(envs)
        observations, _, _, truncated, infos = envs.step([0] * count)
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


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("shared_memory", [None, False])
def test_envs_that_ended_can_be_reset_one_by_one(face: Any, shared_memory: bool | None) -> None:
    fns = [partial(TextEnv if shared_memory is None else CounterEnv, horizon=2)] * 3
    with contextlib.closing(face(fns, shared_memory=shared_memory, autoreset_mode="Disabled")) as envs:
        envs.reset(seed=0)
        envs.step([1] * 3)
        last, _, terminated, _, _ = envs.step([1] * 3)
        assert terminated.all()
        observations, _ = envs.reset(options={"reset_mask": np.array([True, False, False])})
        pick = (lambda rows: rows) if shared_memory is False else (lambda rows: rows["of"])
        assert [row[0] for row in pick(observations)] == [0, 2, 2]
        assert pick(observations)[1:].tobytes() == pick(last)[1:].tobytes()
        with pytest.raises(ResetNeededError, match=r"\[1, 2\]"):
            envs.step([1] * 3)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_an_env_of_which_nothing_has_been_seen_costs_the_others_nothing(face: Any, mode: AutoresetMode) -> None:
    fns = [partial(TextEnv, bad_resets=2, horizon=None), TextEnv, TextEnv]
    truncating = {"restart": RestartPolicy(on_error="truncate")} if face is SubprocessVectorEnv else {}
    with contextlib.closing(face(fns, autoreset_mode=mode, **truncating)) as envs:
        with pytest.raises(EnvsFailedError) as failed:
            envs.reset(seed=0)
        assert failed.value.failures.keys() == {0}
        for step in range(1, 5):
            texts: list[Any] = [None]
            try:
                texts = envs.step([0] * 3)[0]["text"]
            except EnvsFailedError as error:  # it cannot begin yet
                texts += [error.results[index][0]["text"] for index in (1, 2)]
            assert list(texts[1:]) == [str(step)] * 2
        assert int(texts[0]) > 0


def test_a_truncation_by_an_error_in_the_same_step_has_the_last_observation() -> None:
    fns = [partial(TextEnv, bad_step=3), TextEnv]
    policy = RestartPolicy(on_error="truncate")
    with contextlib.closing(
        SubprocessVectorEnv(fns, envs_per_worker=2, autoreset_mode="SameStep", restart=policy)
    ) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            seen = envs.step([0, 0])[0]
        observations, _, _, truncated, infos = envs.step([0, 0])
        assert truncated.tolist() == [True, False]
        assert infos["final_obs"][0]["text"] == "2" == seen["text"][0]
        assert infos["final_obs"][0]["of"].tobytes() == seen["of"][0].tobytes()
        assert observations["text"] == ("0", "3")


class Illegible(str):
    """Can be had again in a worker alone."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return _only_there, (os.getpid(), str(self))


def _only_there(pid: int, text: str) -> str:
    if os.getpid() != pid:
        raise ValueError("not here")
    return Illegible(text)


class IllegibleEnv(TextEnv):
    """What it shows in its third step cannot be read in the trainer."""

    def _observe(self) -> Any:
        shown = super()._observe()
        return {**shown, "text": Illegible("3")} if self.episode_step == 3 else shown


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_an_observation_that_the_trainer_cannot_read_is_raised_once_and_the_episode_goes_on(
    mode: AutoresetMode,
) -> None:
    envs = SubprocessVectorEnv([TextEnv, IllegibleEnv], envs_per_worker=2, autoreset_mode=mode)
    with contextlib.closing(envs):
        envs.reset(seed=0)
        for _ in range(2):
            envs.step([0, 0])
        with pytest.raises(EnvsFailedError) as failed:
            envs.step([0, 0])
        assert failed.value.failures.keys() == {1}
        assert isinstance(failed.value, ResultNotPicklableError)
        observations, _, _, truncated, _ = envs.step([0, 0])
        assert not truncated.any()
        assert observations["text"] == ("4", "4")


def after_a_failed_third_step(fns: list[Any], **options: Any) -> Any:
    """What a masked reset shows of a sound env, which is reset, and of one whose third step has failed."""
    with contextlib.closing(SubprocessVectorEnv(fns, envs_per_worker=2, **options)) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            envs.step([0, 0])
        with pytest.raises(EnvsFailedError):
            envs.step([0, 0])
        return envs.reset(options={"reset_mask": np.array([True, False])})[0]


def test_a_masked_reset_shows_the_last_readable_observation_of_an_env_that_it_leaves_alone() -> None:
    assert after_a_failed_third_step([TextEnv, IllegibleEnv])["text"] == ("0", "2")


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


@pytest.mark.parametrize("recovery", [None, 6.0])
def test_a_snapshot_that_does_not_get_up_leaves_time_for_the_journal(
    monkeypatch: pytest.MonkeyPatch, recovery: float | None
) -> None:
    if recovery is None:
        monkeypatch.setattr(ladder, "_UP_WITHIN", 0.5)
    events: list[Event] = []
    policy, deadlines = RestartPolicy(snapshot_every=1), Deadlines(recovery=recovery)
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
