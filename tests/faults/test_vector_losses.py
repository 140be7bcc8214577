"""Several envs in a process that dies: all are brought back exactly, or honestly ended; other processes go on."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from kit import CounterEnv, Fault, FaultError, FaultyEnv, NondeterministicEnv
from multienv import Deadlines, RestartPolicy, SerialVectorEnv, SubprocessVectorEnv
from multienv.errors import (
    EnvRaisedError,
    EnvsFailedError,
    ResetNeededError,
    RestartBudgetExceeded,
    WorkerDiedError,
    WorkerHungError,
)
from multienv.events import Event, Loss, Recovery

NUM_ENVS = 6
CULPRIT = 1  # the middle one of the first worker
STEPS = 40
NO_WAY_BACK = RestartPolicy(on_crash="truncate", on_timeout="truncate", snapshots=False, journal_limit=0)
EnvFn = Callable[[], gymnasium.Env[Any, Any]]


def actions_of(step: int, num_envs: int = NUM_ENVS) -> np.ndarray[Any, Any]:
    return np.random.default_rng(step).integers(0, 4, num_envs)


def counters(num_envs: int = NUM_ENVS) -> list[EnvFn]:
    return [lambda horizon=7 + index: CounterEnv(horizon=horizon) for index in range(num_envs)]  # type: ignore[misc]


def with_culprit(fault: Fault, **options: Any) -> list[EnvFn]:
    fns = counters()
    fns[CULPRIT] = lambda: FaultyEnv(fault=fault, horizon=30, **options)
    return fns


def expect_equal(batch: Sequence[Any], reference: Sequence[Any], rows: Sequence[int], where: object = "") -> None:
    for one, other in zip(batch[:4], reference[:4], strict=True):
        assert one.dtype == other.dtype
        assert one[list(rows)].tobytes() == other[list(rows)].tobytes(), where


def kill(envs: SubprocessVectorEnv, worker: int) -> None:
    pid = envs.statistics()[worker].pid
    assert pid
    with contextlib.suppress(ProcessLookupError):  # it has just been killed
        os.kill(pid, signal.SIGKILL)


def others() -> list[int]:
    return [index for index in range(NUM_ENVS) if index != CULPRIT]


def vector(env_fns: list[EnvFn], seen: list[Event], **options: Any) -> SubprocessVectorEnv:
    return SubprocessVectorEnv(env_fns, envs_per_worker=3, hooks=[seen.append], **options)


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("manner", ["kill", "segv", "hang_c", "system_exit"])
def test_a_fault_that_strikes_once_leaves_no_trace(manner, mode, marker):
    fault, seen = Fault(manner, "step", at=5, per="episode", once=marker), []
    with_fault = with_culprit(fault)
    reference = SyncVectorEnv(with_culprit(Fault("raise", "step", at=1000)), autoreset_mode=mode)
    envs = vector(with_fault, seen, autoreset_mode=mode, deadlines=Deadlines(step=1.0))
    ended = np.zeros(NUM_ENVS, np.bool_)
    expected, batch = reference.reset(seed=1), envs.reset(seed=1)
    assert batch[0].tobytes() == expected[0].tobytes()
    for step in range(STEPS):
        if mode is AutoresetMode.DISABLED and ended.any():
            expected = reference.reset(options={"reset_mask": ended})
            batch = envs.reset(options={"reset_mask": ended})
            assert batch[0].tobytes() == expected[0].tobytes()
        expected, batch = reference.step(actions_of(step)), envs.step(actions_of(step))
        expect_equal(batch, expected, range(NUM_ENVS), step)
        assert str(batch[4]) == str(expected[4])
        ended = expected[2] | expected[3]
    envs.close()
    (loss,) = [event for event in seen if isinstance(event, Loss)]
    assert [event.outcome for event in seen if isinstance(event, Recovery)] == ["exact"]
    assert loss.env_index == CULPRIT


@pytest.mark.parametrize("snapshots", [True, False])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_step_that_ends_every_process_truncates_the_culprit_alone(mode, snapshots):
    seen: list[Event] = []
    fns = with_culprit(Fault("segv", "step", at=5, per="episode"))
    envs = vector(fns, seen, autoreset_mode=mode, restart=RestartPolicy(snapshots=snapshots))
    reference = SyncVectorEnv(counters(), autoreset_mode=mode)
    first, _ = envs.reset(seed=1)
    reference.reset(seed=1)
    last = first[CULPRIT]
    truncations = []
    for step in range(STEPS):
        batch, expected = envs.step(actions_of(step)), reference.step(actions_of(step))
        expect_equal(batch, expected, others(), step)
        if batch[3][CULPRIT]:
            truncations.append(step)
            infos = batch[4] if mode is AutoresetMode.NEXT_STEP else batch[4]["final_info"]
            final = batch[0][CULPRIT] if mode is AutoresetMode.NEXT_STEP else batch[4]["final_obs"][CULPRIT]
            assert final.tobytes() == last.tobytes()
            assert batch[1][CULPRIT] == 0.0
            assert "ended 2 processes" in infos["multienv"]["reason"][CULPRIT]
        last = batch[0][CULPRIT].copy()
    envs.close()
    gap = 6 if mode is AutoresetMode.NEXT_STEP else 5
    assert truncations == list(range(4, STEPS, gap))
    outcomes = Counter(event.outcome for event in seen if isinstance(event, Recovery))
    assert outcomes == {"exact": len(truncations), "truncated": len(truncations)}
    assert {event.env_index for event in seen if isinstance(event, Loss)} == {CULPRIT}


@pytest.mark.parametrize("moment", ["step", "reset"])
def test_garbage_on_every_descriptor_of_a_worker_is_harmless(moment):
    """Nothing but wake-ups travels through its pipe, and those may come at any time."""
    seen: list[Event] = []
    envs = vector(with_culprit(Fault("garbage", moment, at=2)), seen, deadlines=Deadlines(step=5.0))
    reference = SyncVectorEnv([*counters()[:CULPRIT], lambda: CounterEnv(horizon=30), *counters()[CULPRIT + 1 :]])
    assert envs.reset(seed=1)[0].tobytes() == reference.reset(seed=1)[0].tobytes()
    for step in range(STEPS):
        expect_equal(envs.step(actions_of(step)), reference.step(actions_of(step)), range(NUM_ENVS), step)
    envs.close()
    assert seen == []


class ManyFilesEnv(CounterEnv):
    """Holds more files than select() can look at, and exits in its third step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
        self._files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]

    def step(self, action: Any) -> Any:
        if self.episode_step == 2:
            os._exit(9)
        return super().step(action)


def test_an_env_with_more_files_than_select_can_look_at_is_found_to_be_the_culprit():
    seen: list[Event] = []
    fns = counters()
    fns[CULPRIT] = partial(ManyFilesEnv, horizon=1000)
    envs, reference = vector(fns, seen), SyncVectorEnv(counters())
    envs.reset(seed=1)
    reference.reset(seed=1)
    truncations = []
    for step in range(6):
        batch = envs.step(actions_of(step))
        expect_equal(batch, reference.step(actions_of(step)), others(), step)
        truncations += [step] if batch[3][CULPRIT] else []
    envs.close()
    assert truncations == [2]  # and at the sixth there is a step of the next episode
    assert {event.env_index for event in seen if isinstance(event, Loss)} == {CULPRIT}


def test_a_slot_left_out_of_a_step_begins_one_episode_in_it():
    fns: list[EnvFn] = [partial(CountingResets, fault=Fault("kill", "step", at=1000), horizon=1000)] * NUM_ENVS
    fns[CULPRIT] = partial(CountingResets, fault=Fault("segv", "step", at=3, per="episode"), horizon=1000)
    envs = vector(fns, [], autoreset_mode=AutoresetMode.SAME_STEP)
    envs.reset(seed=1)
    for step in range(2):
        envs.step(actions_of(step))
    assert envs.step(actions_of(2))[3].tolist() == [index == CULPRIT for index in range(NUM_ENVS)]
    assert envs.call("count_resets")[CULPRIT] == 2
    envs.step(actions_of(3))
    assert envs.call("count_resets")[CULPRIT] == 2
    envs.close()


class CountingResets(FaultyEnv):
    """Counts its resets."""

    resets = 0

    def reset(self, **arguments: Any) -> Any:
        self.resets += 1
        return super().reset(**arguments)

    def count_resets(self) -> int:
        return self.resets


@pytest.mark.parametrize("manner", ["kill", "hang_c"])
def test_policy_truncate_ends_the_episodes_of_the_lost_worker_alone(manner, marker):
    seen: list[Event] = []
    policy = RestartPolicy(on_crash="truncate", on_timeout="truncate")
    fns = with_culprit(Fault(manner, "step", at=5, once=marker))
    envs = vector(fns, seen, restart=policy, deadlines=Deadlines(step=1.0))
    reference = SyncVectorEnv(counters())
    envs.reset(seed=1)
    reference.reset(seed=1)
    for step in range(STEPS):
        last, batch = (None if step == 0 else batch), envs.step(actions_of(step))  # noqa: F821 - of the round before
        expect_equal(batch, reference.step(actions_of(step)), range(3, NUM_ENVS), step)
        if step == 4:
            assert batch[3].tolist() == [True] * 3 + [False] * 3
            assert batch[0][:3].tobytes() == last[0][:3].tobytes()
            assert not batch[1][:3].any()
            assert set(batch[4]["multienv"]["recovery"][:3]) == {"truncated"}
        else:
            assert not batch[3].any()
    envs.close()
    assert [event.outcome for event in seen if isinstance(event, Recovery)] == ["truncated"]


@pytest.mark.parametrize("manner", ["kill", "hang_c"])
def test_policy_raise_fails_all_envs_of_the_lost_worker_until_they_are_reset(manner, marker):
    policy = RestartPolicy(on_crash="raise", on_timeout="raise")
    fns = with_culprit(Fault(manner, "step", at=5, once=marker))
    envs = vector(fns, [], restart=policy, deadlines=Deadlines(step=1.0))
    reference = SyncVectorEnv(counters())
    envs.reset(seed=1)
    reference.reset(seed=1)
    for step in range(4):
        expect_equal(envs.step(actions_of(step)), reference.step(actions_of(step)), range(NUM_ENVS), step)
    for step in (4, 5):
        expected = reference.step(actions_of(step))
        with pytest.raises(EnvsFailedError) as caught:
            envs.step(actions_of(step))
        assert list(caught.value.failures) == [0, 1, 2]
        lost = WorkerHungError if manner == "hang_c" else WorkerDiedError
        assert isinstance(caught.value, lost if step == 4 else ResetNeededError)
        assert step > 4 or caught.value.failures[0].env_index == CULPRIT
        for index in range(3, NUM_ENVS):
            assert caught.value.results[index][0].tobytes() == expected[0][index].tobytes()
    observations, _ = envs.reset(options={"reset_mask": np.arange(NUM_ENVS) < 3})
    assert observations[:3, 0].tolist() == [0, 0, 0]
    for step in range(6, STEPS):
        expect_equal(envs.step(actions_of(step)), reference.step(actions_of(step)), range(3, NUM_ENVS), step)
    envs.close()


def test_an_env_that_cannot_be_replayed_is_truncated_and_the_others_go_on():
    seen: list[Event] = []
    fns = counters()
    fns[CULPRIT] = lambda: NondeterministicEnv(horizon=1000)
    envs = vector(fns, seen, restart=RestartPolicy(snapshots=False))
    reference = SyncVectorEnv(counters())
    envs.reset(seed=1)
    reference.reset(seed=1)
    truncated = []
    for step in range(STEPS):
        if step in (10, 25):
            kill(envs, 0)
        batch = envs.step(actions_of(step))
        expect_equal(batch, reference.step(actions_of(step)), others(), step)
        if batch[3][CULPRIT]:
            truncated.append(step)
            assert "does not match" in batch[4]["multienv"]["reason"][CULPRIT]
    envs.close()
    assert truncated == [10, 25]


def test_an_exception_of_one_env_is_raised_for_it_alone():
    envs = vector(with_culprit(Fault("raise", "step", at=5)), [])
    reference = SyncVectorEnv(counters())
    envs.reset(seed=1)
    reference.reset(seed=1)
    for step in range(STEPS):
        expected = reference.step(actions_of(step))
        if step == 4:
            with pytest.raises(FaultError) as caught:
                envs.step(actions_of(step))
            assert isinstance(caught.value, EnvsFailedError)
            assert isinstance(caught.value.failures[CULPRIT], EnvRaisedError)
            assert caught.value.failures[CULPRIT].env_index == CULPRIT
            assert "Traceback" in caught.value.failures[CULPRIT].remote_traceback
        else:
            expect_equal(envs.step(actions_of(step)), expected, others(), step)
    envs.close()


def test_an_exception_ends_the_episode_of_its_env_if_the_policy_says_so():
    envs = vector(with_culprit(Fault("raise", "step", at=5)), [], restart=RestartPolicy(on_error="truncate"))
    reference = SyncVectorEnv(counters())
    envs.reset(seed=1)
    reference.reset(seed=1)
    for step in range(20):
        batch = envs.step(actions_of(step))
        expect_equal(batch, reference.step(actions_of(step)), others(), step)
        assert batch[3][CULPRIT] == (step == 4)
        # The next step begins an episode, as ever.
        assert batch[0][CULPRIT, 0] == [1, 2, 3, 4, 4, *range(20)][step]
    envs.close()


def test_a_worker_that_cannot_be_brought_back_ends_all_its_episodes_and_no_others():
    seen: list[Event] = []
    envs = vector(counters(), seen, restart=NO_WAY_BACK)
    reference = SyncVectorEnv(counters())
    before, _ = envs.reset(seed=1)
    reference.reset(seed=1)
    for step in range(12):
        if step == 10:
            kill(envs, 0)
        batch = envs.step(actions_of(step))
        expected = reference.step(actions_of(step))
        expect_equal(batch, expected, range(NUM_ENVS) if step < 10 else range(3, NUM_ENVS), step)
        assert batch[3][:3].all() == (step == 10)
        if step == 10:
            assert batch[0][:3].tobytes() == before[:3].tobytes()
            assert not batch[1][:3].any()
        before = batch[0]
    assert not batch[0][:3, 0].any()  # new episodes
    envs.close()


def test_episodes_lost_in_a_call_end_with_the_next_step():
    envs = vector(counters(), [], restart=NO_WAY_BACK)
    envs.reset(seed=1)
    before = envs.step(actions_of(0))[0]
    kill(envs, 0)
    with pytest.raises(EnvsFailedError) as caught:
        envs.get_attr("pokes")
    assert sorted(caught.value.failures) == [0, 1, 2]
    observations, _, _, truncations, _ = envs.step(actions_of(1))
    assert truncations.tolist() == [True] * 3 + [False] * 3
    assert observations[:3].tobytes() == before[:3].tobytes()
    envs.close()


def test_a_spent_budget_fails_the_envs_of_the_process():
    envs = vector(counters(), [], restart=RestartPolicy(max_restarts=0))
    envs.reset(seed=1)
    kill(envs, 0)
    with pytest.raises(RestartBudgetExceeded) as caught:
        envs.step(actions_of(0))
    assert sorted(caught.value.failures) == [0, 1, 2]  # type: ignore[attr-defined]
    assert caught.value.results[3] is not None  # type: ignore[attr-defined]
    envs.close()


@pytest.mark.parametrize("start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.soak)])
@pytest.mark.parametrize("snapshots", [False, True])
def test_random_kills_of_whole_workers_leave_no_trace(start_method, snapshots):
    dice, seen = random.Random(7), []
    policy = RestartPolicy(snapshots=snapshots, snapshot_every=9)
    envs = vector(counters(), seen, context=start_method, restart=policy)
    twin = SerialVectorEnv(counters())
    assert envs.reset(seed=1)[0].tobytes() == twin.reset(seed=1)[0].tobytes()
    for step in range(60):
        envs.step_async(actions_of(step))
        if dice.random() < 0.2:
            kill(envs, dice.randrange(2))
        if step % 20 == 10:
            expect_equal(envs.step_wait(), twin.step(actions_of(step)), range(NUM_ENVS), step)
            envs.set_attr("offset", [float(index) for index in range(NUM_ENVS)])
            twin.set_attr("offset", [float(index) for index in range(NUM_ENVS)])
            assert envs.call("poke", 0.5) == twin.call("poke", 0.5)
            mask = np.arange(NUM_ENVS) % 2 == 0
            one, other = (each.reset(options={"reset_mask": mask}) for each in (envs, twin))
            assert one[0].tobytes() == other[0].tobytes()
        else:
            expect_equal(envs.step_wait(), twin.step(actions_of(step)), range(NUM_ENVS), step)
    assert [generator.random() for generator in envs.np_random] == [one.random() for one in twin.np_random]
    envs.close()
    twin.close()
    assert {event.outcome for event in seen if isinstance(event, Recovery)} == {"exact"}
    assert len([event for event in seen if isinstance(event, Loss)]) > 5
