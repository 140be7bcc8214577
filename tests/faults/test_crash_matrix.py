"""Moment × manner: a passing fault heals exactly, a lasting one is recognised. Several envs: test_vector_crash_matrix."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import pytest
from trainer_process import becomes_true

from kit import CounterEnv, Fault, FaultyEnv, assert_same_trajectory, is_alive, rollout
from kit.faults import FaultError
from multienv import Deadlines, RestartPolicy, SubprocessEnv
from multienv.errors import EnvRaisedError, MultienvError, PoisonError, WorkerLostError
from multienv.recovery.state_machine import LOSSES

DEADLINES = Deadlines(start=20, reset=0.6, step=0.6, call=0.6, close=2.0, recovery=30)
# A hang in a constructor costs this much each time.
START = {"forkserver": 1.5, "spawn": 5.0}
QUICK = ["kill", "segv", "hang_c", "exit"]
OTHERS = ["system_exit", "abort", "hang", "noise"]
SOAK = pytest.mark.soak


def make(fault: Fault, method: str, **options: Any) -> SubprocessEnv:
    options.setdefault("deadlines", replace(DEADLINES, start=START[method]) if "hang" in fault.manner else DEADLINES)
    options.setdefault("restart", RestartPolicy(backoff=0.01))
    return SubprocessEnv(partial(FaultyEnv, fault=fault), context=method, **options)


def processes_until_poison(manner: str) -> int:
    """How many processes a request ends before it is not tried again: SIGKILL may have come from anywhere."""
    return LOSSES if manner == "kill" else 2


def play(env: gymnasium.Env[Any, Any], moment: str) -> list[Any]:
    """Two episodes and the moment's own call in the second; what rollout() sees."""
    seen = rollout(env, [1, 2, 3, 0] * 4, seed=7)
    if moment == "render":
        env.render()
    if moment == "call":
        poke = getattr(env, "call", None)
        (poke("poke", 0.5) if poke else env.get_wrapper_attr("poke")(0.5))
    more = rollout(env, [3, 1] * 4)
    return [*seen, *more]


@pytest.mark.parametrize(
    ("moment", "method", "manner"),
    [
        *(
            (moment, "forkserver", manner)
            for moment in ("construct", "reset", "step", "call")
            for manner in ("kill", "hang_c")
        ),
        ("step", "spawn", "kill"),
        *(
            pytest.param(moment, method, manner, marks=SOAK)
            for moment in ("construct", "reset", "step", "render", "call")
            for method in ("forkserver", "spawn")
            for manner in ["segv", "exit", *OTHERS]
        ),
    ],
)
def test_a_passing_fault_heals_to_the_bit(moment: str, method: str, manner: str, marker: str) -> None:
    at = {"step": 13, "reset": 2}.get(moment, 1)
    env = make(Fault(manner, moment, at=at, once=marker), method)
    with env:
        seen = play(env, moment)
        statistics = env.statistics()
    expected = play(CounterEnv(), moment)
    assert_same_trajectory(seen, expected)
    assert statistics.losses == 1
    assert statistics.truncated_recoveries == 0
    assert statistics.exact_recoveries == 1


@pytest.mark.parametrize("manner", [*QUICK, *(pytest.param(one, marks=SOAK) for one in OTHERS)])
def test_a_poisonous_step_is_truncated_and_the_env_goes_on(manner: str) -> None:
    env = make(Fault(manner, "step", action=3), "forkserver")
    with env:
        env.reset(seed=1)
        last = env.step(1)[0]
        observation, reward, terminated, truncated, info = env.step(3)
        assert (observation == last).all()
        assert (reward, terminated, truncated) == (0.0, False, True)
        assert f"{processes_until_poison(manner)} processes" in info["multienv"]["reason"]
        assert env.statistics().restarts == processes_until_poison(manner)
        env.reset(seed=2)
        twin = CounterEnv()
        twin.reset(seed=2)
        assert (env.step(2)[0] == twin.step(2)[0]).all()


class ClosingEnv(CounterEnv):
    """With action 3 it closes the descriptors of its process, which ends of that as soon as it waits for a request."""

    def step(self, action: Any) -> Any:
        transition = super().step(action)
        if action == 3:
            os.closerange(3, 100)
        return transition


def test_a_step_that_closes_the_workers_descriptors_is_answered_and_the_next_one_truncated() -> None:
    with SubprocessEnv(ClosingEnv, deadlines=DEADLINES, restart=RestartPolicy(backoff=0.01)) as env:
        seen = rollout(env, [1, 3], seed=1)
        assert_same_trajectory(seen, rollout(CounterEnv(), [1, 3], seed=1))
        pid = env.statistics().pid or -1
        assert becomes_true(lambda: not is_alive(pid))  # until it sleeps it would answer another step, too
        observation, _, _, truncated, info = env.step(1)
        assert truncated
        assert (observation == seen[-1].observation).all()
        # In its replays, or each time that the step was asked again: it depends on when a worker goes to sleep.
        assert re.search("2 processes ended|ended 6 processes", info["multienv"]["reason"])
        try:
            env.reset(seed=2)
        except PoisonError:  # the replay closes them in each process that is to be reset; the next one is a new life
            env.reset(seed=2)
        assert env.step(2)[0][0] == 1


@pytest.mark.parametrize(
    ("manner", "moment"),
    [
        ("exit", "construct"),
        ("exit", "reset"),
        ("exit", "call"),
        ("kill", "reset"),
        ("hang", "construct"),
        ("hang", "render"),
    ],
)
def test_a_lasting_fault_elsewhere_is_a_typed_error(manner: str, moment: str) -> None:
    env = make(
        Fault(manner, moment),
        "forkserver",
        deadlines=Deadlines(start=1.5 if manner == "hang" else 20.0, reset=0.6, call=0.6, close=2),
    )
    try:
        with pytest.raises(WorkerLostError) as caught:
            env.initialize()
            env.reset(seed=0)
            env.render() if moment == "render" else env.call("poke", 1.0)
        if moment != "construct":
            assert isinstance(caught.value, PoisonError)
        assert caught.value.command == {"construct": "initialize"}.get(moment, moment)
        assert env.statistics().restarts <= processes_until_poison(manner)
        if moment in ("call", "render"):
            assert env.step(1)[3] is False  # the episode goes on as if the call had not been made
    finally:
        env.close()


@pytest.mark.parametrize(
    ("manner", "moment"),
    [
        ("custom_exception", "construct"),
        ("raise", "reset"),
        ("custom_exception", "step"),
        ("raise", "render"),
        ("raise", "call"),
    ],
)
def test_an_exception_arrives_and_costs_no_process(manner: str, moment: str) -> None:
    env = make(Fault(manner, moment, at=2 if moment in ("step", "reset") else 1), "forkserver")
    try:
        with pytest.raises(EnvRaisedError) as caught:
            env.initialize()
            env.reset(seed=0)
            env.step(1)
            if moment == "reset":
                env.reset()
            if moment == "step":
                env.step(1)
            env.render() if moment == "render" else env.call("poke", 1.0)
        assert caught.value.remote_traceback
        assert manner != "raise" or isinstance(caught.value, FaultError)
        if moment != "construct":
            assert env.statistics().losses == 0
            assert env.statistics().state != "lost"
            env.reset(seed=1)
            assert env.step(1)[0][0] == 1
    finally:
        env.close()


def test_a_death_while_the_result_is_pickled_heals(marker: str) -> None:
    env = make(Fault("kill", "pickle", at=1, once=marker), "forkserver")
    with env:
        seen = play(env, "step")
        assert env.statistics().losses == 1
    assert_same_trajectory(seen, play(CounterEnv(), "step"))


@pytest.mark.parametrize("manner", [*QUICK, "raise"])
def test_close_is_bounded_and_never_raises(manner: str) -> None:
    env = make(Fault(manner, "close"), "forkserver", deadlines=Deadlines(close=0.5))
    env.initialize()
    env.reset()
    env.close()
    env.close()
    with pytest.raises(MultienvError):
        env.step(0)
