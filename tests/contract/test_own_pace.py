"""``send`` and ``recv``: each env goes at its own pace, and its own trajectory is that of ``step()``."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_envs import DictEnv
from gymnasium.error import NoAsyncCallError
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import iterate

from kit import (
    CounterEnv,
    Fault,
    FaultyEnv,
    ForkingPolicy,
    SlowEnv,
    SpaceEnv,
    TokenSpace,
    first_difference,
    is_alive,
    kill_worker,
    no_leaks,
)
from kit.gates import GO, WAIT, GateEnv
from kit.interruption import Interruption, Ledger, every_place
from kit.limits import set_limit
from kit.makers import multi_env, one_each
from kit.side_by_side import info_of
from kit.trainer_process import STUCK_AFTER, becomes_true
from multienv import (
    MultiEnv,
    RestartPolicy,
    SerialVectorEnv,
    SubprocessVectorEnv,
    flat_statistics,
)
from multienv._engine.asking.stream import Stream
from multienv.errors import (
    ActionError,
    CallPendingError,
    ClosedError,
    EnvsFailedError,
    ResetNeededError,
    UsageError,
    WaitTimeout,
)
from multienv.testing import Killer, worker_pids

NUM_ENVS = 4
ENV_FNS = [partial(CounterEnv, horizon=3 + index) for index in range(NUM_ENVS)]
NO_SNAPSHOTS = RestartPolicy(snapshots=False)


def shared(env_fns: Any, **options: Any) -> SubprocessVectorEnv:
    return SubprocessVectorEnv(env_fns, envs_per_worker=2, **options)


# And how many of four envs may be asked for.
FACES: dict[Any, list[int | None]] = {
    one_each: [1, 3, None],
    shared: [1, 3, None],
    SerialVectorEnv: [1, 2, None],
    multi_env: [1, 3, None],
}
EACH_BY_ITSELF = [one_each, multi_env]


def batch(envs: Any, actions: Any) -> Any:
    return list(actions) if isinstance(envs, MultiEnv) else np.array(actions)


def row_of(values: Any, place: int) -> tuple[Any, ...]:
    observation, reward, *flags = (value[place] for value in values)
    return observation.copy(), float(reward), *map(bool, flags)


def action_of(env: int, step: int) -> int:
    return (step + env) % 4


def at_own_pace(envs: Any, steps: int, k: int | None, between: Callable[[], object] = bool) -> list[list[Any]]:
    """Take steps at each env's own pace; return what each has returned, from its reset on."""
    found: list[list[Any]] = [[] for _ in range(envs.num_envs)]
    envs.reset_async(seed=3)
    while min(map(len, found)) <= steps:
        *values, infos, indices = envs.recv(k)
        assert len(indices) == (envs.num_envs if k is None else k)
        for place, env in enumerate(indices):
            found[env].append(
                (*row_of(values, place), infos[place] if isinstance(envs, MultiEnv) else info_of(infos, place))
            )
        envs.send(batch(envs, [action_of(env, len(found[env])) for env in indices]), indices)
        between()
    return [one[: steps + 1] for one in found]


def in_step(mode: str, steps: int, env_fns: Any = ENV_FNS) -> list[list[Any]]:
    """The same in gymnasium's own vector env."""
    envs = SyncVectorEnv(env_fns, autoreset_mode=mode)
    observations, infos = envs.reset(seed=3)
    found = [[(observations[env].copy(), 0.0, False, False, info_of(infos, env))] for env in range(NUM_ENVS)]
    for step in range(1, steps + 1):
        *values, infos = envs.step(np.array([action_of(env, step) for env in range(NUM_ENVS)]))
        for env in range(NUM_ENVS):
            found[env].append((*row_of(values, env), info_of(infos, env)))
    envs.close()
    return found


@pytest.mark.parametrize(
    ("face", "mode"),
    [
        (one_each, "SameStep"),
        (shared, "NextStep"),
        (shared, "SameStep"),
        (SerialVectorEnv, "NextStep"),
        (multi_env, "NextStep"),
        pytest.param(one_each, "NextStep", marks=pytest.mark.ci),
        pytest.param(SerialVectorEnv, "SameStep", marks=pytest.mark.ci),
        pytest.param(multi_env, "SameStep", marks=pytest.mark.ci),
    ],
)
def test_each_env_returns_what_it_returns_in_step(face: Any, mode: str) -> None:
    for k in FACES[face]:
        with face(ENV_FNS, autoreset_mode=mode) as envs:
            assert first_difference(at_own_pace(envs, 20, k), in_step(mode, 20)) is None, k
            if k is None:
                envs.recv()
                envs.step(batch(envs, [0] * NUM_ENVS))  # and in step again


@pytest.mark.parametrize("face", [one_each, shared, multi_env])
def test_a_change_that_an_exception_breaks_off_is_carried_out_by_the_next_call(
    face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HandlerError(Exception):
        pass

    calls, hand_over = iter(range(10)), Stream._apply_delivered

    def broken_off(stream: Stream, envs: Any, in_round: Any) -> None:
        if next(calls) == 0:
            raise HandlerError
        hand_over(stream, envs, in_round)

    with face(ENV_FNS) as envs:
        envs.reset(seed=0)
        envs.send(batch(envs, [0] * NUM_ENVS))
        monkeypatch.setattr(Stream, "_apply_delivered", broken_off)
        envs.recv()
        with pytest.raises(HandlerError):
            envs.idle_envs  # noqa: B018
        assert sorted(envs.idle_envs) == list(range(NUM_ENVS))


@pytest.mark.parametrize(
    ("face", "spins"), [(one_each, 400), pytest.param(one_each, 0, marks=pytest.mark.ci), (shared, 400), (multi_env, 0)]
)
def test_each_env_returns_what_it_returns_in_step_while_workers_are_killed(
    face: Any, spins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the trainer sees the answer or is woken by a byte."""
    set_limit(monkeypatch, "SPINS", spins)
    with face(ENV_FNS, restart=ForkingPolicy(snapshot_every=5)) as envs:
        killer, calls = Killer(envs, seed=1), iter(range(10_000))
        found = at_own_pace(envs, 60, 1, between=lambda: next(calls) % 20 == 7 and killer.strike())
        assert first_difference(found, in_step("NextStep", 60)) is None
        assert sum(one.losses for one in envs.statistics()) >= 5


@pytest.mark.parametrize(
    ("face", "mode"),
    [(one_each, "NextStep"), pytest.param(one_each, "SameStep", marks=pytest.mark.ci), (multi_env, "SameStep")],
)
def test_each_env_returns_what_it_returns_in_step_while_workers_are_replaced_by_plan(face: Any, mode: str) -> None:
    """With SAME_STEP the reset is a request of its own, which the new process answers."""
    env_fns = [partial(CounterEnv, horizon=3 + index, count_episodes=False) for index in range(NUM_ENVS)]
    with face(env_fns, autoreset_mode=mode, restart=RestartPolicy(recycle_after_steps=5)) as envs:
        assert first_difference(at_own_pace(envs, 60, 1), in_step(mode, 60, env_fns)) is None
        assert sum(one.recycled for one in envs.statistics()) >= 5


@pytest.mark.parametrize("face", EACH_BY_ITSELF)
def test_a_slow_env_holds_up_no_other(face: Any, tmp_path: Path) -> None:
    with face([partial(GateEnv, tmp_path)] * 3) as envs:
        envs.reset_async(seed=3)
        envs.recv()
        envs.send(batch(envs, [WAIT, GO, GO]))
        for step in range(1, 50):
            observations, *_, indices = envs.recv(2)
            assert sorted(indices) == [1, 2]
            assert [one[0] for one in observations] == [step, step]
            envs.send(batch(envs, [GO, GO]), indices)
        came: list[int] = []
        while len(came) < 2:  # on a busy machine not all may be ready by then
            came += list(envs.recv(3 - len(came), timeout=0.5)[-1])
        assert sorted(came) == [1, 2], "what is ready by then"
        with pytest.raises(WaitTimeout, match="no env is ready"):
            envs.recv(1, timeout=0.1)
        (tmp_path / "gate").touch()
        observations, *_, indices = envs.recv()
        assert list(indices) == [0]
        assert observations[0][[0, 3]].tolist() == [1, WAIT]


@pytest.mark.parametrize("face", EACH_BY_ITSELF)
def test_recv_returns_up_to_as_many_as_are_ready(face: Any, tmp_path: Path) -> None:
    with face([partial(GateEnv, tmp_path)] * 5) as envs:
        envs.reset_async(seed=3)
        envs.recv()
        envs.send(batch(envs, [WAIT, GO, GO, GO, GO]))
        first = list(envs.recv(3, at_most=3)[-1])
        rest = list(envs.recv(1, at_most=9)[-1])
        assert (sorted(first + rest), len(rest)) == ([1, 2, 3, 4], 1), "the gate holds the other"
        envs.send(batch(envs, [GO] * 4), [4, 2, 1, 3])
        time.sleep(0.2)  # most often all are ready then
        several = list(envs.recv(1, at_most=2)[-1])
        assert len(several) <= 2
        one_by_one = [list(envs.recv(1, at_most=1)[-1]) for _ in range(4 - len(several))]
        assert sorted([*several, *(one for (one,) in one_by_one)]) == [1, 2, 3, 4], "what is left is the next call's"
        with pytest.raises(WaitTimeout):
            envs.recv(1, at_most=3, timeout=0.1)
        (tmp_path / "gate").touch()
        assert list(envs.recv(1, at_most=3)[-1]) == [0]


def test_statistics_tell_whether_the_envs_or_the_policy_are_waited_for() -> None:
    with multi_env([partial(SlowEnv, step_seconds=0.2), partial(SlowEnv)]) as envs:
        envs.reset(seed=3)

        def seconds() -> tuple[float, ...]:
            first, second = envs.statistics()
            assert first.recv_seconds == second.recv_seconds
            numbers = flat_statistics([first, second])
            for name in ("recv_seconds", "ready_seconds", "idle_seconds"):
                assert numbers[name] == max(getattr(first, name), getattr(second, name)), "not added up"
            return first.recv_seconds, first.ready_seconds, first.idle_seconds

        assert seconds() == (0.0, 0.0, 0.0)
        envs.send([1, 1], [0, 1])
        for _ in range(5):  # the envs are waited for, a second; on a busy machine the trainer comes late to some of it
            envs.recv(2)
            envs.send([1, 1], [0, 1])
        waited, ready, idle = seconds()
        assert waited > 0.5
        assert idle < 0.5
        envs.recv(2)
        envs.set_attr("step_seconds", 0.0)
        envs.send([1, 1], [0, 1])
        waited, ready, idle = seconds()
        for _ in range(5):  # the policy is, a second
            time.sleep(0.1)
            (first,) = envs.recv(1)[-1]
            time.sleep(0.1)
            (second,) = envs.recv(1)[-1]
            envs.send([1, 1], [first, second])
        more = seconds()
        assert more[0] - waited < 0.5
        assert more[1] - ready > 0.1, "one of two lay ready for half a second"
        assert more[2] - idle > 0.1, "the caller had one of two for half a second"
        envs.recv()
        envs.step([1, 1])
        assert seconds() >= more


@pytest.mark.parametrize("face", list(FACES))
def test_a_loop_that_ctrl_c_breaks_off_anywhere_goes_on_with_the_idle_envs(face: Any) -> None:
    with face(ENV_FNS) as envs:
        assert list(envs.idle_envs) == [0, 1, 2, 3]
        envs.reset_async(seed=3)
        assert list(envs.idle_envs) == []
        counts = [-1] * NUM_ENVS
        for turn in range(20):
            try:
                indices = envs.recv()[-1]
                assert sorted(envs.idle_envs) == sorted(indices)
                for env in indices:
                    counts[env] += 1
                if turn % 2:
                    raise KeyboardInterrupt  # before send()
                envs.send(batch(envs, [0] * len(indices)), indices)
                assert list(envs.idle_envs) == []
                raise KeyboardInterrupt  # after it
            except KeyboardInterrupt:
                idle = envs.idle_envs
                assert isinstance(idle, list) or idle.dtype == np.int64
                envs.send(batch(envs, [0] * len(idle)), idle)
        assert counts == [19] * NUM_ENVS
        envs.recv()
    with pytest.raises(ClosedError, match="idle_envs"):
        envs.idle_envs  # noqa: B018


def test_envs_that_a_pending_reset_leaves_out_are_idle() -> None:
    for face in (one_each, shared):
        with face(ENV_FNS) as envs:
            envs.reset(seed=3)
            envs.reset_async(options={"reset_mask": np.array([True, False, False, False])})
            assert envs.idle_envs.tolist() == [1, 2, 3]
            envs.reset_wait()
            envs.step_async(np.array([0] * NUM_ENVS))
            with pytest.raises(CallPendingError, match="step_wait"):
                envs.idle_envs  # noqa: B018
            envs.step_wait()


def test_a_second_reset_is_told_of_both_calls_that_end_the_first() -> None:
    with one_each(ENV_FNS) as envs:
        envs.reset_async(seed=3)
        with pytest.raises(CallPendingError, match=r"reset_wait\(\), or recv\(\)"):
            envs.reset_async(seed=3)
        envs.recv()


@pytest.mark.parametrize("face", EACH_BY_ITSELF)
def test_another_thread_in_recv_is_told_to_the_call_that_was_made(face: Any, tmp_path: Path) -> None:
    with face([partial(GateEnv, tmp_path)] * 2) as envs:
        envs.reset(seed=3)
        envs.send(batch(envs, [WAIT]), [0])
        reader = threading.Thread(target=envs.recv)
        reader.start()
        assert becomes_true(lambda: envs._stream.reader != 0)
        mask = np.array([False, True])
        with pytest.raises(CallPendingError, match=r"^send\(\): another thread"):
            envs.send(batch(envs, [GO]), [1])
        with pytest.raises(CallPendingError, match=r"^reset_async\(\): another thread"):
            envs.reset_async(options={"reset_mask": mask})
        (tmp_path / "gate").touch()
        reader.join()


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
@pytest.mark.parametrize("face", EACH_BY_ITSELF)
def test_the_advice_names_the_calls_of_envs_at_their_own_pace(face: Any, mode: str) -> None:
    raises = partial(FaultyEnv, fault=Fault("raise", "step", action=3), horizon=None)
    advice = {
        "NextStep": r"The next send\(\) begins .* after any other, reset_async\(options=",
        "Disabled": r": reset_async\(options=\{'reset_mask': mask\}\)",
    }
    with face([raises, CounterEnv], autoreset_mode=mode) as envs:
        envs.reset(seed=3)
        envs.send(batch(envs, [3, 1]))
        with pytest.raises(EnvsFailedError, match=advice[mode]):
            envs.recv()


@pytest.mark.parametrize("face", EACH_BY_ITSELF)
def test_an_env_that_is_replaced_by_plan_holds_up_no_other(face: Any, tmp_path: Path) -> None:
    """The process that replaces it waits for the gate while it is replayed."""
    with face([partial(GateEnv, tmp_path)] * 2, restart=RestartPolicy(snapshots=False)) as envs:
        envs.reset(seed=3)
        (tmp_path / "gate").touch()
        envs.step(batch(envs, [WAIT, GO]))
        (tmp_path / "gate").unlink()
        kill_worker(envs)
        envs.send(batch(envs, [GO, GO]))
        for step in range(2, 30):
            observations, *_, indices = envs.recv(1)
            assert (indices[0], observations[0][0]) == (1, step)
            envs.send(batch(envs, [GO]), indices)
        (tmp_path / "gate").touch()
        observations, *_, indices = envs.recv()
        assert sorted(indices) == [0, 1]
        assert observations[list(indices).index(0)][0] == 2


@pytest.mark.parametrize("face", [one_each, shared, multi_env])
def test_an_env_that_raises_fails_alone(face: Any) -> None:
    raises = partial(FaultyEnv, fault=Fault("raise", "step", action=3), horizon=None)
    with face([raises, CounterEnv, CounterEnv, CounterEnv]) as envs:
        envs.reset_async(seed=3)
        envs.recv()
        envs.send(batch(envs, [3, 1, 1, 1]))
        failed, seen = None, []
        while failed is None or len(seen) < 3:
            try:
                seen += list(envs.recv(1)[-1])
            except EnvsFailedError as error:
                failed = error
        assert list(failed.failures) == [0]
        assert sorted(seen) == [1, 2, 3]
        envs.send(batch(envs, [1] * 4))
        (observations, *_, indices), place = envs.recv(), 0
        place = list(indices).index(0)
        assert observations[place][0] == 0, "the next step begins an episode"


def test_what_the_others_returned_is_in_the_error() -> None:
    with one_each([partial(FaultyEnv, fault=Fault("raise", "step")), CounterEnv, CounterEnv]) as envs:
        envs.reset_async(seed=3)
        envs.recv()
        envs.send(np.array([1, 2]), [0, 2])
        with pytest.raises(EnvsFailedError) as caught:
            envs.recv(2)
        assert caught.value.results[:2] == [None, None]
        observation, reward, terminated, truncated, info = caught.value.results[2]
        assert (observation[0], observation[3], terminated, truncated, info) == (1, 2, False, False, {})
        assert reward == pytest.approx(3 * observation[2])


@pytest.mark.parametrize("envs_per_worker", [1, 2, 4])
def test_without_autoreset_the_caller_resets_those_that_have_ended(envs_per_worker: int) -> None:
    options = {"autoreset_mode": "Disabled", "envs_per_worker": envs_per_worker}
    with SubprocessVectorEnv(ENV_FNS, **options) as envs:
        counts, episodes, has_ended = np.zeros(NUM_ENVS, int), np.zeros(NUM_ENVS, int), np.ones(NUM_ENVS, bool)
        envs.reset_async(seed=3)
        while episodes.min() < 4:
            observations, rewards, terminations, truncations, _, indices = envs.recv(1)
            env = indices[0]
            counts[env] = 0 if has_ended[env] else counts[env] + 1
            assert (observations[0][0], terminations[0], truncations[0]) == (counts[env], counts[env] == 3 + env, False)
            assert (rewards[0] == 0) == has_ended[env]
            has_ended[env] = terminations[0]
            if has_ended[env]:
                episodes[env] += 1
                envs.reset_async(options={"reset_mask": np.arange(NUM_ENVS) == env})
            else:
                envs.send(np.array([1]), [env])
        envs.reset(seed=3)
        for _ in range(3):
            envs.send(np.array([1]), [0])
            envs.recv(1)
        envs.send(np.array([1]), [0])
        with pytest.raises(ResetNeededError, match="no episode in this env"):
            envs.recv(1)


@pytest.mark.parametrize("envs_per_worker", [1, 2, 4])
def test_some_envs_are_reset_while_none_is_under_way(envs_per_worker: int) -> None:
    """Whatever is called next: a reset that leaves out all envs of a worker is asked of it, and nobody receives it."""
    options = {"autoreset_mode": "Disabled", "envs_per_worker": envs_per_worker}
    mask = np.array([True, False, False, False])
    with SubprocessVectorEnv(ENV_FNS, **options) as envs:
        envs.reset(seed=3)
        for number in range(30):
            envs.reset_async(options={"reset_mask": mask})
            if number % 3 == 2:
                envs.reset_async(options={"reset_mask": mask[::-1].copy()})
            assert sorted(envs.recv()[-1]) == ([0, 3] if number % 3 == 2 else [0])
            (envs.reset, lambda: envs.call("poke", 0.0), envs.state_dict)[number % 3]()
        assert not envs.step(np.array([1] * NUM_ENVS))[2].any()


@pytest.mark.parametrize("envs_per_worker", [1, 2, 4])
def test_envs_that_a_reset_leaves_out_are_stepped_meanwhile(envs_per_worker: int) -> None:
    """Their workers may not have answered that they have nothing to reset."""
    mask = np.array([True, True, False, False])
    options = {"autoreset_mode": "Disabled", "envs_per_worker": envs_per_worker}
    with SubprocessVectorEnv([partial(CounterEnv, horizon=None)] * NUM_ENVS, **options) as envs:
        envs.reset(seed=3)
        for number in range(1, 31):
            envs.reset_async(options={"reset_mask": mask})
            envs.send(np.array([1, 1]), [2, 3])
            observations, *_, indices = envs.recv()
            steps = {env: row[0] for env, row in zip(indices.tolist(), observations, strict=True)}
            assert steps == {0: 0, 1: 0, 2: number, 3: number}


@pytest.mark.parametrize("face", EACH_BY_ITSELF)
def test_a_dead_worker_is_noticed_while_others_are_always_ready(face: Any) -> None:
    with face([partial(CounterEnv, horizon=None)] * 3, restart=NO_SNAPSHOTS) as envs:
        envs.reset(seed=3)
        kill_worker(envs)
        envs.send(batch(envs, [1] * 3))
        until, seen = time.monotonic() + STUCK_AFTER, set[int]()
        while 0 not in seen:
            assert time.monotonic() < until, "it was never recovered"
            time.sleep(0.02)  # a policy that takes longer than the envs
            indices = envs.recv(1)[-1]
            seen.update(indices)
            envs.send(batch(envs, [1]), indices)


@pytest.mark.parametrize(
    "env_fn", [DictEnv, partial(SpaceEnv, observation_space=TokenSpace())], ids=["dict", "without rows"]
)
def test_observations_of_all_kinds(env_fn: Any) -> None:
    with one_each([env_fn] * 2) as envs, closing(SyncVectorEnv([env_fn] * 2)) as theirs:
        expected = theirs.reset(seed=3)[0]
        theirs.action_space.seed(1)
        envs.reset_async(seed=3)
        for _ in range(6):
            observations, *_, indices = envs.recv()
            pairs = [list(iterate(envs.observation_space, one)) for one in (observations, expected)]
            for place, env in enumerate(indices):
                assert first_difference(pairs[0][place], pairs[1][env]) is None
            actions = theirs.action_space.sample()
            envs.send(actions)
            expected = theirs.step(actions)[0]


@pytest.mark.parametrize("merges", [True, False])
def test_infos_have_a_place_for_each_env_that_is_received(merges: bool) -> None:
    with one_each(ENV_FNS, merge_infos=merges) as envs:
        envs.reset_async(seed=3)
        for k in (1, 2, 1):
            infos, _ = envs.recv(k)[-2:]
            assert len(infos) == k if not merges else all(len(value) == k for value in infos.values())


class NowAndThenEnv(CounterEnv):
    """Has an info in some steps alone: a number, or an object."""

    def step(self, action: Any) -> Any:
        observation, *others, _ = super().step(action)
        step = int(observation[0])
        return (observation, *others, {1: {"number": step}, 2: {"object": str(step)}}.get(step % 4, {}))


@pytest.mark.parametrize(
    ("envs_per_worker", "merges"),
    [(1, False), (3, True), pytest.param(1, True, marks=pytest.mark.ci), pytest.param(3, False, marks=pytest.mark.ci)],
)
def test_infos_of_all_are_those_of_step(envs_per_worker: int, merges: bool) -> None:
    env_fns = [partial(NowAndThenEnv, horizon=9 + index) for index in range(4)]
    options: Any = {"envs_per_worker": envs_per_worker, "merge_infos": merges}
    with SubprocessVectorEnv(env_fns, **options) as envs, SubprocessVectorEnv(env_fns, **options) as others:
        envs.reset(seed=3)
        others.reset(seed=3)
        for _ in range(20):
            infos = others.step(batch(others, [0] * NUM_ENVS))[4]
            envs.send(batch(envs, [0] * NUM_ENVS))
            found, indices = envs.recv()[4:]
            for place, env in enumerate(indices):
                one, other = (info_of(found, place), info_of(infos, env)) if merges else (found[place], infos[env])
                assert first_difference(one, other) is None


@pytest.mark.parametrize("face", list(FACES))
def test_wrong_calls_are_refused_and_lose_nothing(face: Any) -> None:
    with face(ENV_FNS) as envs:
        with pytest.raises(UsageError, match="no env is under way"):
            envs.recv()
        envs.reset_async(seed=3)
        for k, refused in ((5, "1 to 4"), (0, "at least 1"), (1.5, "at least 1"), (True, "at least 1")):
            with pytest.raises(UsageError, match=refused):
                envs.recv(k)
        for at_most, refused in ((0, "at_most is 0; give"), (1, "at_most=1 is less than k=2")):
            with pytest.raises(UsageError, match=refused):
                envs.recv(2, at_most=at_most)
        with pytest.raises(UsageError, match="timeout"):
            envs.recv(1, timeout=-1)
        had = sorted(envs.recv(2)[-1])
        others = sorted({0, 1, 2, 3} - set(had))
        for refused in (
            lambda: envs.step(batch(envs, [1] * NUM_ENVS)),
            lambda: envs.call("poke", 0.5),
            lambda: envs.reset_async(seed=1),
        ):
            with pytest.raises(CallPendingError, match=rf"envs \[{others[0]}, {others[1]}\] are under way; recv"):
                refused()
        if face is not multi_env:
            with pytest.raises(CallPendingError, match="under way"):
                envs.snapshot()
            with pytest.raises(NoAsyncCallError, match="recv"):
                envs.step_wait()
        with pytest.raises(CallPendingError, match=rf"envs \[{others[0]}\] are under way"):
            envs.send(batch(envs, [1, 1]), [had[0], others[0]])
        with pytest.raises(ActionError, match="Nothing was sent"):
            envs.send(batch(envs, [1, 1, 1]), had)
        for indices in ([0, 0], [0, 4], [-1, 0], 0):
            with pytest.raises(UsageError, match="indices"):
                envs.send(batch(envs, [1, 1]), indices)
        assert sorted(envs.recv()[-1]) == others
        envs.send(batch(envs, [1] * NUM_ENVS), [3, 1, 0, 2])
        assert [one[0] for one in envs.recv()[0]] == [1] * NUM_ENVS
        envs.call("poke", 0.5)


def test_a_checkpoint_is_taken_while_no_env_is_under_way() -> None:
    with one_each(ENV_FNS) as envs:
        envs.reset_async(seed=3)
        envs.recv(2)
        with pytest.raises(CallPendingError, match="under way"):
            envs.state_dict()
        envs.recv()
        kept, state = envs.snapshot(), envs.state_dict()
        for bring_back in (lambda: envs.restore(kept), lambda: envs.load_state_dict(state)):
            envs.send(np.array([1] * NUM_ENVS))
            assert [one[0] for one in envs.recv()[0]] == [1] * NUM_ENVS
            bring_back()


@pytest.mark.parametrize("face", list(FACES))
def test_reset_drops_what_is_under_way(face: Any) -> None:
    with face(ENV_FNS) as envs:
        envs.reset_async(seed=3)
        envs.recv()
        envs.send(batch(envs, [1] * NUM_ENVS))
        observations, _ = envs.reset(seed=3)
        assert [one[0] for one in observations] == [0] * NUM_ENVS
        observations, *_ = envs.step(batch(envs, [1] * NUM_ENVS))
        assert [one[0] for one in observations] == [1] * NUM_ENVS


@pytest.mark.parametrize("face", list(FACES))
def test_reset_of_some_envs_drops_nothing_of_others(face: Any) -> None:
    with face(ENV_FNS) as envs:
        envs.reset_async(seed=3)
        envs.recv()
        envs.send(batch(envs, [1] * NUM_ENVS))
        mask = np.array([True, False, False, False])
        with pytest.raises(CallPendingError, match="are under way"):
            envs.reset(options={"reset_mask": mask})
        envs.recv()
        assert envs.reset(options={"reset_mask": mask})[0][0][0] == 0


def test_an_env_of_a_multi_env_that_is_under_way_is_not_stepped_by_itself(tmp_path: Path) -> None:
    with multi_env([partial(GateEnv, tmp_path)] * 2) as envs:
        envs.reset(seed=3)
        envs.send([WAIT], [0])
        with pytest.raises(CallPendingError, match="recv"):
            envs.envs[0].step(GO)
        assert envs.envs[1].step(GO)[0][0] == 1
        (tmp_path / "gate").touch()
        assert envs.recv()[-1] == [0]
        assert envs.envs[0].step(GO)[0][0] == 2


@pytest.mark.parametrize("face", EACH_BY_ITSELF)
def test_hooks_are_told_of_a_loss_although_recv_returns_nothing(face: Any, tmp_path: Path) -> None:
    events: list[Any] = []
    with face([partial(GateEnv, tmp_path)] * 2, restart=NO_SNAPSHOTS, hooks=[events.append]) as envs:
        envs.reset(seed=3)
        envs.send(batch(envs, [WAIT]), [1])
        while not (tmp_path / "waits").exists():
            time.sleep(0.01)
        kill_worker(envs, 1)
        until = time.monotonic() + STUCK_AFTER
        while not events:
            assert time.monotonic() < until
            with pytest.raises(WaitTimeout):
                envs.recv(1, timeout=0.1)
        (tmp_path / "gate").touch()
        envs.recv(1)
        assert [type(one).__name__ for one in events] == ["Loss", "Recovery"]


def test_statistics_in_another_thread_change_nothing() -> None:
    with one_each(ENV_FNS) as envs:
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                envs.statistics()

        reader = threading.Thread(target=read)
        reader.start()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            assert first_difference(at_own_pace(envs, 300, 1), in_step("NextStep", 300)) is None
        finally:
            sys.setswitchinterval(interval)
            stop.set()
            reader.join()


def test_envs_in_this_process_go_at_their_own_pace_in_threads(tmp_path: Path) -> None:
    with MultiEnv([GateEnv(tmp_path), GateEnv(tmp_path, "other"), GateEnv(tmp_path, "third")]) as envs:
        envs.reset_async(seed=3)
        envs.recv()
        envs.send([WAIT, GO, GO])
        for step in range(1, 20):
            observations, *_, indices = envs.recv(2)
            assert (sorted(indices), observations[0][0]) == ([1, 2], step)
            envs.send([GO, GO], indices)
        (tmp_path / "gate").touch()
        assert sorted(envs.recv()[-1]) == [0, 1, 2]


@pytest.mark.parametrize("kind", [memoryview, np.asfortranarray, list, np.ma.array])
def test_send_takes_what_step_takes_and_what_is_written_to_it_later_does_not_matter(kind: Any) -> None:
    with one_each([CounterEnv] * 3) as envs:
        envs.reset(seed=3)
        envs.step(kind(np.array([1, 2, 3])))
        actions = np.array([1, 2, 3])
        envs.send(kind(actions))
        actions[:] = 0
        observations, *_, indices = envs.recv()
        assert {env: row[3] for env, row in zip(indices, observations, strict=True)} == {0: 1, 1: 2, 2: 3}


@pytest.mark.parametrize("face", EACH_BY_ITSELF)
def test_recv_and_reset_in_a_signal_handler_inside_of_recv_are_refused_and_the_outer_one_goes_on(
    face: Any, tmp_path: Path
) -> None:
    refusals: list[CallPendingError] = []

    def receive(*_: object) -> None:
        for call in (partial(envs.recv, 1), envs.reset):
            try:
                call()
            except CallPendingError as error:
                refusals.append(error)
        (tmp_path / "gate").touch()

    def strike() -> None:
        assert becomes_true(lambda: envs._stream.reader != 0)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    before, striker = signal.signal(signal.SIGALRM, receive), threading.Thread(target=strike)
    try:
        with face([partial(GateEnv, tmp_path)] * 2) as envs:
            envs.reset(seed=3)
            envs.send(batch(envs, [WAIT, WAIT]))
            striker.start()
            assert sorted(envs.recv(2, timeout=STUCK_AFTER)[-1]) == [0, 1]
            striker.join()
            envs.send(batch(envs, [GO, GO]))
            assert sorted(envs.recv(2)[-1]) == [0, 1]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ["is in recv() of these envs" in str(error) for error in refusals] == [True, True]


@pytest.mark.parametrize("call", ["send", "recv"])
@pytest.mark.parametrize("face", [*EACH_BY_ITSELF, shared])
def test_a_signal_handler_that_sends_at_any_place_of_a_call_is_served_or_refused(face: Any, call: str) -> None:
    ledgers, taken = [Ledger(horizon=None) for _ in range(3)], list[str]()

    def receive(k: int | None = None) -> None:
        *values, _, indices = envs.recv(k)
        for place, env in enumerate(indices):
            ledgers[env].step((*row_of(values, place), {}), [env])

    class Handler(Interruption):
        def _strike(self, frame: Any) -> None:
            with suppress(CallPendingError):
                envs.state_dict()
            with suppress(CallPendingError):
                envs.send(batch(envs, [2]), [2])
                taken.append(self.where)

    with face([partial(CounterEnv, horizon=None)] * 3) as envs:
        *values, _ = envs.reset(seed=[0, 1, 2])
        for env in range(3):
            ledgers[env].reset((values[0][env], {}), env)
        for handler in every_place(stride=3, strikes=Handler):
            before = len(taken)
            try:
                with handler if call == "send" else nullcontext():
                    envs.send(batch(envs, [0, 1]), [0, 1])
            except CallPendingError:  # no env was under way: it has had a state_dict()
                envs.send(batch(envs, [0, 1]), [0, 1])
            with handler if call == "recv" else nullcontext():
                receive(2)
            if len(taken) == before:
                envs.send(batch(envs, [2]), [2])
            receive()
            assert len({one.transitions for one in ledgers}) == 1, handler.where
    assert ledgers[0].transitions > 10
    assert len(taken) > 3


@pytest.mark.parametrize("face", EACH_BY_ITSELF)
def test_close_ends_a_recv_that_waits(face: Any, tmp_path: Path) -> None:
    envs = face([partial(GateEnv, tmp_path)] * 2)
    envs.reset(seed=3)
    envs.send(batch(envs, [WAIT, WAIT]))
    while not (tmp_path / "waits").exists():
        time.sleep(0.01)
    closer = threading.Timer(0.2, envs.close)
    closer.start()
    with pytest.raises(ClosedError):
        envs.recv(1)
    closer.join()


@pytest.mark.parametrize("face", [one_each, multi_env])
def test_closed_envs_hold_no_descriptors_while_somebody_holds_them(face: Any) -> None:
    with face([CounterEnv]), no_leaks():  # the monitor is there before and after
        envs = face(ENV_FNS)
        envs.reset_async(seed=3)
        envs.recv(1)
        envs.close()
    assert envs.num_envs == NUM_ENVS


@pytest.mark.parametrize("face", [one_each, shared, multi_env])
def test_envs_that_are_dropped_at_their_own_pace_end_with_the_last_reference(face: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        envs = face(ENV_FNS)
        envs.reset_async(seed=3)
        envs.recv()
        envs.send(batch(envs, [1] * NUM_ENVS))
        pids = worker_pids(envs)
        del envs
        assert becomes_true(lambda: not any(map(is_alive, pids)))
    finally:
        gc.enable()
