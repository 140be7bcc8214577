"""One test for each mistake seen in a peer that a process per env invites. Named after peer and mistake."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_process import Trainer, becomes_true, run

from kit import (
    CounterEnv,
    Fault,
    FaultyEnv,
    GlobalRandomEnv,
    NondeterministicEnv,
    SlowEnv,
    assert_no_splice,
    is_alive,
    rollout,
)
from kit.faults import FaultError, TwoArgumentError
from multienv import AutoResetWrapper, Deadlines, MultiEnv, RestartPolicy, SubprocessEnv, create_subprocess_envs
from multienv.errors import (
    ActionError,
    CallPendingError,
    EnvsFailedError,
    ResetNeededError,
    WaitTimeout,
    WorkerDiedError,
)

METHODS = ["forkserver", pytest.param("spawn", marks=pytest.mark.soak)]
RAISE = RestartPolicy(on_crash="raise", on_timeout="raise")


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def three(middle: Any, **options: Any) -> MultiEnv:
    """Three envs, the one in the middle is the troublemaker. None resets by itself."""
    return MultiEnv(create_subprocess_envs([CounterEnv, middle, CounterEnv], **options), autoreset_mode="DISABLED")


def pid_of(env: Any) -> int:
    pid = env.statistics().pid
    assert pid is not None
    return int(pid)


def failed(multi: MultiEnv, actions: Any = (1, 1, 1)) -> Any:
    """The error of a step that must fail in env 1 alone."""
    with pytest.raises(EnvsFailedError) as caught:
        multi.step(list(actions))
    assert list(caught.value.failures) == [1]
    return caught.value


# --- gymnasium AsyncVectorEnv ---------------------------------------------------------------------


def test_gymnasium_stale_reply_after_a_timeout_answers_the_next_step(method: str) -> None:
    with SubprocessEnv(partial(SlowEnv, step_seconds=0.3), context=method) as env:
        env.reset(seed=0)
        env.step_async(1)
        with pytest.raises(WaitTimeout):
            env.step_wait(0.02)
        with pytest.raises(CallPendingError):
            env.step(2)
        assert env.step_wait()[0].tolist()[::3] == [1, 1]  # the first step, with the action it was given
        assert env.step(2)[0].tolist()[::3] == [2, 2]


def test_gymnasium_stale_reply_of_a_hung_worker_answers_the_next_step(tmp_path: Path, method: str) -> None:
    """The hung worker wakes up too late: SIGSTOP, a passed deadline, SIGCONT."""
    with SubprocessEnv(CounterEnv, context=method, deadlines=Deadlines(step=0.3)) as env:
        twin = CounterEnv()
        env.reset(seed=0)
        twin.reset(seed=0)
        old = pid_of(env)
        os.kill(old, signal.SIGSTOP)
        env.step_async(1)
        with contextlib.suppress(WaitTimeout):
            env.step_wait(0.2)
        with contextlib.suppress(ProcessLookupError):
            os.kill(old, signal.SIGCONT)
        results = [env.step_wait(), env.step(2), env.step(3)]
        for action, result in zip([1, 2, 3], results, strict=True):
            assert result[0].tolist() == twin.step(action)[0].tolist()


def test_gymnasium_after_one_exception_the_next_step_fails_with_nonetype_has_no_send(method: str) -> None:
    with three(partial(FaultyEnv, fault=Fault("raise", "step", at=2)), context=method) as multi:
        multi.reset(seed=0)
        multi.step([1, 1, 1])
        assert isinstance(failed(multi), FaultError)
        assert isinstance(failed(multi), ResetNeededError)  # it says what to do, and the others go on
        multi.reset(mask=[False, True, False])
        observations = multi.step([1, 1, 1])[0]
        assert [int(observation[0]) for observation in observations] == [4, 1, 4]


def test_gymnasium_killed_worker_is_a_bare_eoferror(method: str) -> None:
    with three(CounterEnv, context=method, restart=RAISE) as multi:
        multi.reset(seed=0)
        os.kill(pid_of(multi.envs[1]), signal.SIGKILL)
        error = failed(multi).failures[1]
        assert isinstance(error, WorkerDiedError)
        assert error.exit_code == -signal.SIGKILL
        assert "SIGKILL" in str(error)
        assert (error.env_index, error.command) == (1, "step")


def test_gymnasium_after_a_killed_worker_every_call_is_already_pending(method: str) -> None:
    with three(CounterEnv, context=method, restart=RAISE) as multi:
        multi.reset(seed=0)
        os.kill(pid_of(multi.envs[1]), signal.SIGKILL)
        assert failed(multi).results[0][0][0] == 1
        multi.reset(mask=[False, True, False], seed=5)
        assert [int(observation[0]) for observation in multi.step([1, 1, 1])[0]] == [2, 1, 2]
        multi.reset(seed=0)


def test_gymnasium_after_a_killed_worker_close_deadlocks(method: str) -> None:
    with three(CounterEnv, context=method, restart=RAISE) as multi:
        multi.reset(seed=0)
        os.kill(pid_of(multi.envs[1]), signal.SIGKILL)
        failed(multi)
    assert [statistics.state for statistics in multi.statistics() if statistics] == ["closed"] * 3


def test_gymnasium_with_one_env_hung_a_killed_trainer_leaves_orphans(method: str) -> None:
    with Trainer("lifecycle_trainers", "block_multi", method) as trainer:
        trainer.expect("ready")
        trainer.signal(signal.SIGKILL)
        trainer.wait()
        trainer.assert_nothing_lives()


# --- Stable-Baselines3 SubprocVecEnv --------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_stable_baselines3_a_forked_sibling_holds_the_dead_workers_end(victim: int) -> None:
    envs = create_subprocess_envs([CounterEnv] * 3, restart=RAISE)
    with MultiEnv(envs) as multi:
        multi.reset(seed=0)
        os.kill(pid_of(envs[victim]), signal.SIGKILL)
        with pytest.raises(EnvsFailedError) as caught:
            multi.step([1, 1, 1])
        assert list(caught.value.failures) == [victim]


def test_stable_baselines3_the_message_of_the_env_is_lost(method: str) -> None:
    with three(partial(FaultyEnv, fault=Fault("raise", "step")), context=method) as multi:
        multi.reset(seed=0)
        error = failed(multi)
        assert "fault at step 1" in str(error)
        assert "fault at step 1" in str(error.failures[1])
        assert "in step" in error.failures[1].remote_traceback


@pytest.mark.parametrize("manner", ["kill", "exit", "segv", "system_exit"])
def test_stable_baselines3_close_raises_eoferror_when_a_worker_is_dead(manner: Any, method: str) -> None:
    env = SubprocessEnv(partial(FaultyEnv, fault=Fault(manner, "step")), context=method).initialize()
    env.reset(seed=0)
    env.step_async(1)
    pid = pid_of(env)
    assert becomes_true(lambda: not is_alive(pid))
    env.close()


# --- OpenAI baselines -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_baselines_the_terminal_observation_is_lost(mode: str) -> None:
    twin = CounterEnv(horizon=2)
    twin.reset(seed=0)
    twin.step(1)
    terminal = twin.step(2)[0].tolist()
    with MultiEnv(create_subprocess_envs([partial(CounterEnv, horizon=2)]), autoreset_mode=mode) as multi:
        multi.reset(seed=0)
        multi.step([1])
        observations, _, terminations, _, infos = multi.step([2])
        seen = infos[0]["final_obs"] if mode == "SAME_STEP" else observations[0]
        assert terminations == [True]
        assert seen.tolist() == terminal


def test_baselines_reset_during_a_pending_step_reads_its_reply(method: str) -> None:
    with SubprocessEnv(CounterEnv, context=method) as env:
        env.reset(seed=0)
        env.step_async(3)
        with pytest.raises(CallPendingError, match=r"step_wait\(\)"):
            env.reset(seed=1)
        assert env.step_wait()[0].tolist()[::3] == [1, 3]
        assert env.reset(seed=1)[0].tolist()[::3] == [0, -1]


@pytest.mark.parametrize("count", [0, 1, 2, 4, 7])
def test_baselines_surplus_actions_are_dropped(count: int) -> None:
    with three(CounterEnv) as multi:
        multi.reset(seed=0)
        with pytest.raises(ActionError, match=f"{count} actions for 3 envs"):
            multi.step([1] * count)
        assert [int(observation[0]) for observation in multi.step([1] * 3)[0]] == [1, 1, 1]  # nothing had been sent


def test_baselines_close_after_a_failure_is_a_no_op(method: str) -> None:
    multi = three(partial(FaultyEnv, fault=Fault("raise", "step")), context=method)
    multi.reset(seed=0)
    pids = [pid_of(env) for env in multi.envs]
    failed(multi)
    multi.close()
    assert becomes_true(lambda: not any(map(is_alive, pids)))


# --- actorcritic's multi_env ----------------------------------------------------------------------


def test_actorcritic_the_reset_observation_is_thrown_away(method: str) -> None:
    twin = CounterEnv(horizon=2)
    first, second = twin.reset(seed=0)[0].tolist(), twin.reset()[0].tolist()
    assert first != second
    for mode in ("NEXT_STEP", "SAME_STEP"):
        with AutoResetWrapper(SubprocessEnv(partial(CounterEnv, horizon=2), context=method).initialize(), mode) as env:
            env.reset(seed=0)
            seen = [env.step(1)[0].tolist() for _ in range(3)]
        twin.reset(seed=0)
        twin.step(1)
        twin.step(1)
        assert seen[1 if mode == "SAME_STEP" else 2] == twin.reset()[0].tolist()


@pytest.mark.parametrize("env_fn", [CounterEnv, NondeterministicEnv, partial(NondeterministicEnv, shown_in="reward")])
@pytest.mark.parametrize("policy", [RestartPolicy(), RestartPolicy(on_crash="truncate")])
def test_actorcritic_a_restarted_episode_is_spliced_in(env_fn: Any, policy: RestartPolicy, method: str) -> None:
    with SubprocessEnv(partial(env_fn, horizon=8), context=method, restart=policy) as env:
        strikes = {3, 11, 20, 25}
        seen = rollout(
            env,
            num_steps=30,
            seed=3,
            before_step=lambda step: os.kill(pid_of(env), signal.SIGKILL) if step in strikes else None,
        )
        statistics = env.statistics()
    exact = env_fn is CounterEnv and policy.on_crash == "replay"
    # Episode numbers start again in a new process without a replay: it is what follows a truncation, after a reset.
    assert_no_splice(seen)
    truncations = sum(transition.recovery is not None for transition in seen)
    assert truncations == (0 if exact else len(strikes))
    assert statistics.truncated_recoveries == truncations


@pytest.mark.parametrize("kind", ["one", "multi"])
def test_actorcritic_ctrl_c_restarts_every_env(kind: str, method: str) -> None:
    with Trainer("interrupt_trainers", "press_ctrl_c", method, kind) as trainer:
        trainer.expect("ready")
        for _ in range(10):
            trainer.signal_group(signal.SIGINT)
            time.sleep(0.01)
        trainer.signal(signal.SIGUSR1)
        trainer.succeed()  # which checks that none was lost


def test_actorcritic_a_failing_env_fn_goes_unnoticed(method: str) -> None:
    fns = [CounterEnv, partial(FaultyEnv, fault=Fault("raise", "construct")), CounterEnv]
    with pytest.raises(FaultError, match="fault at construct 1") as caught:
        create_subprocess_envs(fns, context=method)
    assert isinstance(caught.value, EnvsFailedError)
    assert list(caught.value.failures) == [1]


def test_actorcritic_too_few_actions_step_only_the_first_envs() -> None:
    with three(CounterEnv) as multi:
        multi.reset(seed=0)
        with pytest.raises(ActionError):
            multi.step([1, 1])
        steps = multi.step([1, None, 1])
        assert steps[0][1] is None
        assert [steps[0][0][0], steps[0][2][0]] == [1, 1]


def test_actorcritic_workers_share_one_numpy_state(method: str) -> None:
    np.random.seed(0)
    envs = create_subprocess_envs([GlobalRandomEnv] * 4, context=method)
    try:
        for env in envs:
            env.reset(seed=0)
        draws = [env.call("draws") for env in envs]
        assert len({draw for draw, _ in draws}) == 4, "workers share the state of `random`"
        assert len({draw for _, draw in draws}) == 4, "workers share the state of `numpy.random`"
    finally:
        for env in envs:
            env.close()


# --- DI-engine ------------------------------------------------------------------------------------


def test_di_engine_an_exception_with_its_own_constructor_kills_the_worker(method: str) -> None:
    with SubprocessEnv(partial(FaultyEnv, fault=Fault("custom_exception", "step")), context=method) as env:
        env.reset(seed=0)
        pid = pid_of(env)
        with pytest.raises(TwoArgumentError) as caught:
            env.step(1)
        assert caught.value.detail == "fault at step 1"
        env.reset(seed=0)
        assert pid_of(env) == pid
        assert env.statistics().losses == 0


class AlarmingEnv(CounterEnv):
    """Uses SIGALRM itself, as some simulators do for their own time limits."""

    def step(self, action: Any) -> Any:
        rang = []
        signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        until = time.monotonic() + 5
        while not rang and time.monotonic() < until:
            time.sleep(0.001)
        assert rang, "SIGALRM never came"
        return super().step(action)


def test_di_engine_the_watchdog_is_sigalrm_in_the_envs_process(method: str) -> None:
    with SubprocessEnv(AlarmingEnv, context=method, deadlines=Deadlines(step=20)) as env:
        env.reset(seed=0)
        assert env.step(1)[0][0] == 1
        assert env.step(1)[0][0] == 2


def test_di_engine_stuck_envs_are_closed_one_after_another() -> None:
    fault = Fault("hang_c", "step", ignore_sigterm=True)
    envs = create_subprocess_envs([partial(FaultyEnv, fault=fault)] * 6, deadlines=Deadlines(close=1.0))
    multi = MultiEnv(envs)
    multi.reset(seed=0)
    for env in envs:
        env.step_async(1)
    began = time.monotonic()
    multi.close()
    assert time.monotonic() - began < 5.0, "six stuck envs that are given one second each took as long as one by one"


# --- PufferLib, RLlib, gym3 -----------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_pufferlib_idle_workers_burn_a_core(method: str) -> None:
    from kit import monitor_pid

    with MultiEnv(create_subprocess_envs([CounterEnv] * 3, context=method, deadlines=Deadlines(step=60))) as multi:
        multi.reset(seed=0)
        multi.step([1, 1, 1])
        pids = [monitor_pid(), *map(pid_of, multi.envs)]
        before = [cpu_seconds(pid) for pid in pids]
        time.sleep(1.0)
        assert [cpu_seconds(pid) - was for pid, was in zip(pids, before, strict=True)] == pytest.approx(
            [0] * 4, abs=0.1
        )


def test_pufferlib_a_waiting_trainer_burns_a_core(method: str) -> None:
    with MultiEnv(create_subprocess_envs([partial(SlowEnv, step_seconds=1.0)] * 3, context=method)) as multi:
        multi.reset(seed=0)
        before = cpu_seconds(os.getpid())
        multi.step([1, 1, 1])
        assert cpu_seconds(os.getpid()) - before < 0.3


def test_pufferlib_recv_spins_for_ever_when_a_worker_dies(method: str) -> None:
    with three(partial(FaultyEnv, fault=Fault("kill", "step")), context=method, restart=RAISE) as multi:
        multi.reset(seed=0)
        assert isinstance(failed(multi).failures[1], WorkerDiedError)


def test_rllib_all_envs_are_rebuilt_for_one(method: str) -> None:
    with MultiEnv(create_subprocess_envs([CounterEnv] * 3, context=method)) as multi:
        multi.reset(seed=0)
        multi.step([1, 1, 1])
        before = [pid_of(env) for env in multi.envs]
        os.kill(before[1], signal.SIGKILL)
        assert [int(observation[0]) for observation in multi.step([1, 1, 1])[0]] == [2, 2, 2]
        after = [pid_of(env) for env in multi.envs]
        assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]


def test_gym3_one_failure_makes_every_later_call_raise_it(method: str) -> None:
    with three(partial(FaultyEnv, fault=Fault("raise", "step")), context=method) as multi:
        multi.reset(seed=0)
        failed(multi)
        multi.reset(seed=1)
        assert [int(observation[0]) for observation in multi.step([1, 1, 1])[0]] == [1, 1, 1]
        assert multi.call("poke") == [1, 1, 1]


def test_a_trainer_that_closes_nothing_ends_by_itself(tmp_path: Path) -> None:
    """gymnasium's AsyncVectorEnv and PufferLib leave a trainer that forgets close() hanging at its end."""
    run("lifecycle_trainers", "hold_everything", "forkserver", "return", tmp_path)
