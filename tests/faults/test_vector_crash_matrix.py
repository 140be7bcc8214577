"""Moment × manner × start method, several envs a process: the others go on to the bit, whatever becomes of the one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from kit import CounterEnv, Fault, FaultyEnv
from multienv import Deadlines, RestartPolicy, SerialVectorEnv, SubprocessVectorEnv
from multienv.errors import EnvsFailedError, MultienvError, PoisonError, WorkerLostError
from multienv.events import Event, Loss, Recovery
from multienv.recovery.state_machine import LOSSES

NUM_ENVS = 5  # three in one worker, two in the other
CULPRIT = 1
OTHERS = [index for index in range(NUM_ENVS) if index != CULPRIT]
OF_ITS_WORKER, OF_THE_OTHER = [0, 1, 2], [3, 4]
HORIZON = 6
# Those that take different paths through the code; the others when there is time.
CASES: list[Any] = [("forkserver", "kill"), ("forkserver", "segv")]
CASES += [
    pytest.param(method, manner, marks=pytest.mark.soak)
    for method in ("forkserver", "spawn")
    for manner in ("exit", "system_exit", "kill", "segv", "abort", "hang", "hang_c", "noise")
    if (method, manner) not in CASES
]
MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]
Fns = list[Callable[[], gymnasium.Env[Any, Any]]]


def counter(index: int) -> gymnasium.Env[Any, Any]:
    return CounterEnv(horizon=HORIZON + index, render_mode="rgb_array")


def fns(culprit: Callable[[], gymnasium.Env[Any, Any]] | None = None) -> Fns:
    made: Fns = [partial(counter, index) for index in range(NUM_ENVS)]
    if culprit is not None:
        made[CULPRIT] = culprit
    return made


def faulty(fault: Fault, env_class: Any = FaultyEnv) -> gymnasium.Env[Any, Any]:
    return env_class(fault=fault, horizon=HORIZON + CULPRIT, render_mode="rgb_array")  # type: ignore[no-any-return]


def actions_of(step: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(step).integers(0, 4, NUM_ENVS)


def open_envs(culprit: Callable[[], Any], method: str, seen: list[Event], **options: Any) -> SubprocessVectorEnv:
    deadlines = Deadlines(start=30.0, reset=2.0, step=2.0, call=2.0, close=2.0, recovery=60)
    options.setdefault("deadlines", deadlines)
    return SubprocessVectorEnv(fns(culprit), envs_per_worker=3, context=method, hooks=[seen.append], **options)


def play(envs: Any, moment: str = "") -> list[Any]:
    """Some episodes and, in the middle, the moment's own call."""
    seen = [envs.reset(seed=3)]
    for step in range(22):
        if step == 10 and moment == "render":
            seen.append(envs.render())
        if step == 10 and moment == "call":
            seen.append(envs.call("poke", 0.5))
        if step == 15 and moment == "mask":
            seen.append(envs.reset(options={"reset_mask": np.arange(NUM_ENVS) < 2}))
        seen.append(envs.step(actions_of(step)))
    return seen


def expect_same(one: Sequence[Any], other: Sequence[Any], rows: Sequence[int]) -> None:
    assert len(one) == len(other)
    for place, (mine, own) in enumerate(zip(one, other, strict=True)):
        for part, reference in zip(mine, own, strict=True):
            if isinstance(reference, np.ndarray) and len(reference) == NUM_ENVS:
                assert part.dtype == reference.dtype
                assert part[list(rows)].tobytes() == reference[list(rows)].tobytes(), place
            elif not isinstance(reference, dict):
                assert np.array_equal(part, reference), place
            elif len(rows) == NUM_ENVS:
                assert str(part) == str(reference), place


def expected_play(moment: str, mode: AutoresetMode) -> list[Any]:
    twin = SerialVectorEnv(fns(), autoreset_mode=mode)
    try:
        return play(twin, moment)
    finally:
        twin.close()


PASSING = {
    "construct": Fault("kill", "construct"),
    "reset": Fault("kill", "reset", at=1),
    "autoreset": Fault("kill", "reset", at=2),
    "mask": Fault("kill", "reset", at=3),  # with SAME_STEP one more
    "step": Fault("kill", "step", at=12),
    "render": Fault("kill", "render"),
    "call": Fault("kill", "call"),
    "pickle": Fault("kill", "pickle", at=12),
}


def fault_of(moment: str, manner: str, mode: AutoresetMode = AutoresetMode.NEXT_STEP, **options: Any) -> Fault:
    fault = PASSING[moment]
    at = fault.at + (moment == "mask" and mode is AutoresetMode.SAME_STEP)
    return Fault(manner, fault.moment, at=at, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("method", "manner"), CASES)
@pytest.mark.parametrize("moment", PASSING)
def test_a_fault_that_strikes_once_leaves_no_trace(method: str, manner: str, moment: str, marker: str) -> None:
    mode = MODES[len(method + manner + moment) % 2]  # either with either, without doubling the matrix
    seen: list[Event] = []
    envs = open_envs(partial(faulty, fault_of(moment, manner, mode, once=marker)), method, seen, autoreset_mode=mode)
    try:
        mine = play(envs, moment)
    finally:
        envs.close()
    expected = expected_play(moment, mode)
    if moment == "pickle":  # the bomb, defused
        mine = [part[:4] if len(part) == 5 else part for part in mine]
        expected = [part[:4] if len(part) == 5 else part for part in expected]
    expect_same(mine, expected, range(NUM_ENVS))
    (loss,) = [event for event in seen if isinstance(event, Loss)]
    assert loss.cause == ("hung" if "hang" in manner else "died")
    assert loss.env_index == CULPRIT
    command = {"construct": "initialize", "mask": "reset", "autoreset": "step", "pickle": "step"}
    assert loss.command == command.get(moment, moment)
    assert [event.outcome for event in seen if isinstance(event, Recovery)] == ["exact"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("method", "manner", "moment"),
    [
        ("forkserver", "kill", "step"),
        ("forkserver", "segv", "pickle"),
        pytest.param("forkserver", "hang_c", "step", marks=pytest.mark.soak),
        pytest.param("forkserver", "hang_c", "pickle", marks=pytest.mark.soak),
        pytest.param("spawn", "exit", "step", marks=pytest.mark.soak),
    ],
)
def test_a_step_that_ends_every_process_truncates_the_culprit_alone(
    method: str, manner: str, moment: str, mode: AutoresetMode
) -> None:
    seen: list[Event] = []
    restart = RestartPolicy(backoff=0.0)
    culprit = partial(faulty, fault_of(moment, manner))
    envs = open_envs(culprit, method, seen, autoreset_mode=mode, restart=restart)
    try:
        mine = play(envs)
    finally:
        envs.close()
    truncated = [row for batch in mine[1:] for row in np.flatnonzero(batch[3])]
    assert truncated
    assert set(truncated) == {CULPRIT}
    expect_same(mine, expected_play("", mode), OTHERS)
    end = next(batch for batch in mine[1:] if batch[3].any())
    infos = end[4]["final_info"] if mode is AutoresetMode.SAME_STEP else end[4]
    # SIGKILL may have come from anywhere, so that it takes more of them.
    assert f"ended {LOSSES if manner == 'kill' else 2} processes" in infos["multienv"]["reason"][CULPRIT]
    assert end[1][CULPRIT] == 0.0
    assert {event.env_index for event in seen if isinstance(event, Loss)} == {CULPRIT}
    assert "truncated" in [event.outcome for event in seen if isinstance(event, Recovery)]


@pytest.mark.parametrize("manner", ["exit", *[pytest.param(one, marks=pytest.mark.soak) for one in ("kill", "hang")]])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masked", [False, True])
def test_a_reset_that_ends_every_process_is_raised_for_the_culprit_alone(
    masked: bool, mode: AutoresetMode, manner: str
) -> None:
    restart = RestartPolicy(backoff=0.0)
    fault = fault_of("mask" if masked else "reset", manner, mode)
    envs = open_envs(partial(faulty, fault), "forkserver", [], autoreset_mode=mode, restart=restart)
    twin = SerialVectorEnv(fns(), autoreset_mode=mode)
    if masked:
        expect_same([envs.reset(seed=3)], [twin.reset(seed=3)], range(NUM_ENVS))
        for step in range(15):
            expect_same([envs.step(actions_of(step))], [twin.step(actions_of(step))], range(NUM_ENVS))
    arguments: Any = {"options": {"reset_mask": np.arange(NUM_ENVS) < 2}} if masked else {"seed": 3}
    own = twin.reset(**arguments)
    with pytest.raises(EnvsFailedError) as caught:
        envs.reset(**arguments)
    assert list(caught.value.failures) == [CULPRIT]
    assert isinstance(caught.value.failures[CULPRIT], PoisonError)
    assert caught.value.failures[CULPRIT].env_index == CULPRIT
    for index in OTHERS:
        assert caught.value.results[index].tobytes() == own[0][index].tobytes()
    seen = [envs.step(actions_of(step)) for step in range(15, 18)]
    expect_same(seen, [twin.step(actions_of(step)) for step in range(15, 18)], OTHERS)
    envs.close()
    twin.close()


@pytest.mark.parametrize("manner", ["exit", *[pytest.param(one, marks=pytest.mark.soak) for one in ("kill", "hang")]])
@pytest.mark.parametrize("mode", MODES)
def test_a_reset_by_a_step_that_ends_every_process_truncates_the_culprit_alone(
    mode: AutoresetMode, manner: str
) -> None:
    """With SAME_STEP too: such an env shows its last observation once more, and its next step tries the reset again."""
    restart = RestartPolicy(backoff=0.0)
    fault = fault_of("autoreset", manner, mode)
    envs = open_envs(partial(faulty, fault), "forkserver", [], autoreset_mode=mode, restart=restart)
    twin = SerialVectorEnv(fns(), autoreset_mode=mode)
    expect_same([envs.reset(seed=3)], [twin.reset(seed=3)], range(NUM_ENVS))
    ending = HORIZON + CULPRIT - (mode is AutoresetMode.SAME_STEP)
    for step in range(ending):
        last = envs.step(actions_of(step))
        expect_same([last], [twin.step(actions_of(step))], range(NUM_ENVS))
    for step in range(ending, ending + 2):
        batch = envs.step(actions_of(step))
        expect_same([batch], [twin.step(actions_of(step))], OTHERS)
        assert batch[3][CULPRIT]
        assert batch[0][CULPRIT].tobytes() == last[0][CULPRIT].tobytes()
        infos = batch[4]["final_info"] if mode is AutoresetMode.SAME_STEP else batch[4]
        assert "it was not tried again" in infos["multienv"]["reason"][CULPRIT]
    envs.close()
    twin.close()


@pytest.mark.parametrize("manner", ["exit", "hang"])
@pytest.mark.parametrize("moment", ["render", "call"])
def test_a_call_that_ends_every_process_is_raised_and_no_episode_is_lost(manner: str, moment: str) -> None:
    seen: list[Event] = []
    envs = open_envs(partial(faulty, fault_of(moment, manner)), "forkserver", seen)
    twin = SerialVectorEnv(fns())
    for one in (envs, twin):
        one.reset(seed=3)
        one.step(actions_of(0))
    own = [env.render() if moment == "render" else env.poke(0.0) for env in twin.envs]
    with pytest.raises(EnvsFailedError) as caught:
        envs.render() if moment == "render" else envs.call("poke", 0.0)
    assert list(caught.value.failures) == OF_ITS_WORKER  # nobody of its process was asked for good
    for index in OF_ITS_WORKER:
        assert isinstance(caught.value.failures[index], PoisonError)
        assert caught.value.failures[index].env_index == CULPRIT
    for index in OF_THE_OTHER:
        assert np.array_equal(caught.value.results[index], own[index])
    for step in range(1, 4):
        mine = envs.step(actions_of(step))
        expect_same([mine], [twin.step(actions_of(step))], range(NUM_ENVS))
    os.kill(envs.statistics()[0].pid or 0, signal.SIGKILL)  # a replay leaves the call out
    for step in range(4, 9):
        mine = envs.step(actions_of(step))
        expect_same([mine], [twin.step(actions_of(step))], OTHERS)
        assert not mine[3].any()
    envs.close()
    twin.close()


@pytest.mark.parametrize("manner", ["kill", "hang"])
def test_an_env_whose_construction_ends_every_process_is_named(manner: str) -> None:
    with pytest.raises(MultienvError) as caught:
        fault = Fault(manner, "construct")  # type: ignore[arg-type]
        open_envs(
            partial(faulty, fault), "forkserver", [], deadlines=Deadlines(start=3.0 if manner == "hang" else 30.0)
        )
    (index,) = caught.value.failures  # type: ignore[attr-defined]
    assert index == CULPRIT
    assert isinstance(caught.value, WorkerLostError)


@pytest.mark.parametrize("manner", ["raise", "hang_c", "segv"])
def test_close_is_bounded_and_never_raises(manner: str) -> None:
    fault = Fault(manner, "close")  # type: ignore[arg-type]
    envs = open_envs(partial(faulty, fault), "forkserver", [], deadlines=Deadlines(close=0.5))
    envs.reset(seed=1)
    envs.close()
    envs.close()
    with pytest.raises(MultienvError):
        envs.step(actions_of(0))


class DiesReplaying(CounterEnv):
    """Ends its process, once for each time the file is there."""

    def __init__(self, path: str, **counter: Any) -> None:
        self.path = path
        super().__init__(**counter)

    def step(self, action: Any) -> Any:
        if Path(self.path).exists() and self.episode_step == 2:
            Path(self.path).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.soak)])
def test_a_process_killed_during_its_replay_is_replaced_once_more(method: str, marker: str) -> None:
    culprit = partial(DiesReplaying, marker, horizon=HORIZON + CULPRIT, render_mode="rgb_array")
    seen: list[Event] = []
    envs = open_envs(culprit, method, seen, restart=RestartPolicy(snapshots=False))
    twin = SerialVectorEnv(fns())
    expect_same([envs.reset(seed=3)], [twin.reset(seed=3)], range(NUM_ENVS))
    for step in range(20):
        if step == 10:
            Path(marker).touch()
            os.kill(envs.statistics()[0].pid or 0, signal.SIGKILL)
        expect_same([envs.step(actions_of(step))], [twin.step(actions_of(step))], range(NUM_ENVS))
    envs.close()
    twin.close()
    (recovery,) = [event for event in seen if isinstance(event, Recovery)]
    assert (recovery.outcome, recovery.attempts) == ("exact", 2)
    assert not Path(marker).exists()


def die_once(path: str) -> None:
    if not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def dies_forking(side: str, path: str) -> gymnasium.Env[Any, Any]:
    os.register_at_fork(**{side: partial(die_once, path)})
    return counter(CULPRIT)


@pytest.mark.parametrize("side", ["before", "after_in_parent", "after_in_child"])
def test_a_process_lost_while_a_snapshot_is_taken_is_brought_back(side: str, marker: str) -> None:
    seen: list[Event] = []
    policy = RestartPolicy(snapshot_every=4)
    envs = open_envs(partial(dies_forking, side, marker), "forkserver", seen, restart=policy)
    twin = SerialVectorEnv(fns())
    expect_same([envs.reset(seed=3)], [twin.reset(seed=3)], range(NUM_ENVS))
    for step in range(30):
        if step == 20:
            os.kill(envs.statistics()[0].pid or 0, signal.SIGKILL)
        expect_same([envs.step(actions_of(step))], [twin.step(actions_of(step))], range(NUM_ENVS))
    envs.close()
    twin.close()
    assert Path(marker).exists()
    outcomes = [event.outcome for event in seen if isinstance(event, Recovery)]
    assert outcomes == ["exact"] * (1 if side == "after_in_child" else 2)
