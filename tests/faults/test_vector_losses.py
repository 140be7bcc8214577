"""Several envs in a process that dies: the one to blame is treated by policy, every other one goes on exactly."""

from __future__ import annotations

import contextlib
import fcntl
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

from multienv import Deadlines, RestartPolicy, SerialVectorEnv, SubprocessVectorEnv
from multienv.errors import (
    EnvRaisedError,
    EnvsFailedError,
    PoisonError,
    RestartBudgetExceeded,
    WorkerDiedError,
    WorkerHungError,
)
from multienv.events import Event, Loss, Recovery
from multienv.testing import CounterEnv, Fault, FaultError, FaultyEnv, NondeterministicEnv

NUM_ENVS = 6
CULPRIT = 1  # the middle one of the first group
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


def kill(envs: SubprocessVectorEnv, group: int) -> None:
    pid = envs.statistics()[group].pid
    assert pid
    with contextlib.suppress(ProcessLookupError):  # it has just been killed
        os.kill(pid, signal.SIGKILL)


def others() -> list[int]:
    return [index for index in range(NUM_ENVS) if index != CULPRIT]


def vector(env_fns: list[EnvFn], seen: list[Event], **options: Any) -> SubprocessVectorEnv:
    return SubprocessVectorEnv(env_fns, envs_per_worker=3, hooks=[seen.append], **options)


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("manner", ["kill", "segv", "hang_c", "garbage", "system_exit"])
def test_a_passing_fault_leaves_no_trace(manner, mode, marker):
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
    assert loss.env_index in (CULPRIT, None)


@pytest.mark.parametrize("snapshots", [True, False])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_poison_ends_the_episode_of_the_culprit_alone(mode, snapshots):
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
            assert "killed 2 processes" in infos["multienv"]["reason"][CULPRIT]
        last = batch[0][CULPRIT].copy()
    envs.close()
    gap = 6 if mode is AutoresetMode.NEXT_STEP else 5
    assert truncations == list(range(4, STEPS, gap))
    outcomes = Counter(event.outcome for event in seen if isinstance(event, Recovery))
    assert outcomes == {"exact": len(truncations), "truncated": len(truncations)}
    assert {(event.env_index, event.step) for event in seen if isinstance(event, Loss)} == {(CULPRIT, 4)}


def test_poison_in_a_reset_is_raised_and_the_others_step_on():
    envs = vector(with_culprit(Fault("kill", "reset", at=2)), [])
    reference = SyncVectorEnv([*counters()[:CULPRIT], lambda: CounterEnv(horizon=30), *counters()[CULPRIT + 1 :]])
    envs.reset(seed=1)
    reference.reset(seed=1)
    for step in range(30):
        expect_equal(envs.step(actions_of(step)), reference.step(actions_of(step)), range(NUM_ENVS))
    with pytest.raises(EnvsFailedError) as caught:  # the culprit's second reset
        envs.step(actions_of(30))
    assert list(caught.value.failures) == [CULPRIT]
    assert isinstance(caught.value.failures[CULPRIT], PoisonError)
    expected = reference.step(actions_of(30))
    for index in others():
        observation, reward, terminated, truncated = caught.value.results[index]
        assert observation.tobytes() == expected[0][index].tobytes()
        assert (reward, terminated, truncated) == (expected[1][index], expected[2][index], expected[3][index])
    envs.close()


def test_garbage_in_the_reset_that_begins_an_episode_is_found_out():
    envs = vector(with_culprit(Fault("garbage", "reset", at=2)), [])
    reference = SyncVectorEnv([*counters()[:CULPRIT], lambda: CounterEnv(horizon=30), *counters()[CULPRIT + 1 :]])
    envs.reset(seed=1)
    reference.reset(seed=1)
    for step in range(30):
        expect_equal(envs.step(actions_of(step)), reference.step(actions_of(step)), range(NUM_ENVS))
    reference.step(actions_of(30))
    with pytest.raises(EnvsFailedError) as caught:
        envs.step(actions_of(30))
    assert list(caught.value.failures) == [CULPRIT]
    assert isinstance(caught.value.failures[CULPRIT], PoisonError)
    envs.close()


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


class OnPipesEnv(CounterEnv):
    """Does something to each pipe of its process that can be written to, in its third step."""

    def step(self, action: Any) -> Any:
        if self.episode_step == 2:
            for name in os.listdir("/proc/self/fd"):
                descriptor = int(name)
                with contextlib.suppress(OSError):
                    kind = os.readlink(f"/proc/self/fd/{name}")
                    if descriptor > 2 and kind.startswith("pipe:") and is_writable(descriptor):
                        self.treat(descriptor)
        return super().step(action)

    def treat(self, descriptor: int) -> None:
        raise NotImplementedError


class FloodingEnv(OnPipesEnv):
    """Writes more than it takes."""

    def treat(self, descriptor: int) -> None:
        os.write(descriptor, b"\0" * 200_000)


class ClosingEnv(OnPipesEnv):
    """Closes it."""

    def treat(self, descriptor: int) -> None:
        os.close(descriptor)


def is_writable(descriptor: int) -> bool:
    return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY


@pytest.mark.parametrize(
    ("env_fn", "told"), [(ManyFilesEnv, ""), (FloodingEnv, ""), (ClosingEnv, "It closed the pipe")]
)
def test_whose_fault_it_is_shows(env_fn, told):
    seen: list[Event] = []
    fns = counters()
    fns[CULPRIT] = partial(env_fn, horizon=1000)
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
    losses = [event for event in seen if isinstance(event, Loss)]
    assert losses[-1].env_index == CULPRIT
    assert told in losses[-1].stderr


@pytest.mark.parametrize("on_error", ["raise", "truncate"])
@pytest.mark.parametrize("on_crash", ["replay", "truncate", "raise"])
def test_who_is_left_out_begins_one_episode_and_who_is_raised_none(on_error, on_crash):
    fns: list[EnvFn] = [partial(CountingResets, fault=Fault("kill", "step", at=1000), horizon=1000)] * NUM_ENVS
    fns[CULPRIT] = partial(CountingResets, fault=Fault("segv", "step", at=3, per="episode"), horizon=1000)
    policy = RestartPolicy(on_error=on_error, on_crash=on_crash)
    envs = vector(fns, [], autoreset_mode=AutoresetMode.SAME_STEP, restart=policy)
    envs.reset(seed=1)
    for step in range(2):
        envs.step(actions_of(step))
    if on_crash == "raise":
        with pytest.raises(WorkerDiedError):
            envs.step(actions_of(2))
    else:
        assert envs.step(actions_of(2))[3][CULPRIT]
    assert envs.call("count_resets")[CULPRIT] == (1 if on_crash == "raise" else 2)
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
@pytest.mark.parametrize("on_loss", ["truncate", "raise"])
def test_policy_is_for_the_culprit(manner, on_loss, marker):
    seen: list[Event] = []
    policy = RestartPolicy(on_crash=on_loss, on_timeout=on_loss)
    fns = with_culprit(Fault(manner, "step", at=5, once=marker))
    envs = vector(fns, seen, restart=policy, deadlines=Deadlines(step=1.0))
    reference = SyncVectorEnv(counters())
    envs.reset(seed=1)
    reference.reset(seed=1)
    told, failed = 0, None
    for step in range(STEPS):
        expected = reference.step(actions_of(step))
        try:
            batch = envs.step(actions_of(step))
        except EnvsFailedError as error:
            failed = error
            told += 1
            continue
        expect_equal(batch, expected, others(), step)
        if batch[3][CULPRIT] and step == 4:
            assert on_loss == "truncate"
            told += 1
    assert told == 1
    assert (failed is None) == (on_loss == "truncate")
    if failed is not None:
        assert list(failed.failures) == [CULPRIT]
        assert isinstance(failed, WorkerHungError if manner == "hang_c" else WorkerDiedError)
    envs.close()


def test_one_that_cannot_be_replayed_is_ended_and_the_others_go_on():
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


def test_an_exception_of_one_is_its_own():
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
            assert caught.value.failures[CULPRIT].step == 4
            assert "Traceback" in caught.value.failures[CULPRIT].remote_traceback
        else:
            expect_equal(envs.step(actions_of(step)), expected, others(), step)
    envs.close()


@pytest.mark.parametrize("on_error", ["truncate", "replay"])
def test_an_exception_by_policy(on_error, marker):
    fault = Fault("raise", "step", at=5, once=marker if on_error == "replay" else None)
    envs = vector(with_culprit(fault), [], restart=RestartPolicy(on_error=on_error))
    reference = SyncVectorEnv([*counters()[:CULPRIT], lambda: CounterEnv(horizon=30), *counters()[CULPRIT + 1 :]])
    envs.reset(seed=1)
    reference.reset(seed=1)
    rows = range(NUM_ENVS) if on_error == "replay" else others()
    for step in range(20):
        batch = envs.step(actions_of(step))
        expect_equal(batch, reference.step(actions_of(step)), rows, step)
        if on_error == "truncate":
            assert batch[3][CULPRIT] == (step == 4)
            # The next step begins an episode, as ever.
            assert batch[0][CULPRIT, 0] == [1, 2, 3, 4, 4, *range(20)][step]
    envs.close()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_an_error_ends_the_count_of_the_steps(mode, marker):
    faults = [Fault("raise", "step", at=5), Fault("kill", "step", at=9, once=marker)]
    seen: list[Event] = []
    fns = counters()
    fns[CULPRIT] = lambda: FaultyEnv(fault=faults, horizon=30)
    envs = vector(fns, seen, autoreset_mode=mode)
    envs.reset(seed=1)
    for step in range(4):
        envs.step(actions_of(step))
    with pytest.raises(EnvsFailedError) as caught:
        envs.step(actions_of(4))
    assert caught.value.failures[CULPRIT].step == 4
    for step in range(5, 20):
        envs.step(actions_of(step))
    envs.close()
    (loss,) = [event for event in seen if isinstance(event, Loss)]
    assert (loss.env_index, loss.step) == (CULPRIT, 3)  # five before the error, one of them raised; a reset; four


def test_what_cannot_be_brought_back_ends_all_of_the_process_and_none_of_the_others():
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


def test_lost_between_two_steps_by_a_call_the_episodes_end_with_the_next_step():
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


@pytest.mark.parametrize("start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.soak), "fork"])
@pytest.mark.parametrize("snapshots", [False, True])
def test_random_kills_of_whole_groups(start_method, snapshots):
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


@pytest.mark.parametrize("on_crash", ["raise", "truncate"])
def test_without_a_journal_nobody_says_how_far_it_was(on_crash):
    """Rather than a wrong number."""
    policy = RestartPolicy(on_crash=on_crash, on_timeout=on_crash, journal_limit=0)
    told: list[Event] = []
    envs = SubprocessVectorEnv(with_culprit(Fault("kill", "step", at=4)), restart=policy, hooks=[told.append])
    with contextlib.closing(envs):
        envs.reset(seed=1)
        with contextlib.suppress(EnvsFailedError):
            for step in range(4):
                envs.step(actions_of(step))
    losses = [event for event in told if isinstance(event, Loss)]
    assert losses
    assert {(loss.command, loss.step) for loss in losses} == {("step", None)}
