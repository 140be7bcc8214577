"""Moment × manner, several envs a process: the others go on to the bit, whatever becomes of the one."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from batches import CULPRIT, FIRST, NEXT_STEP, NUM_ENVS, OTHERS, SAME_STEP, SECOND, Pair, counters
from gymnasium.vector import AutoresetMode

from kit import CounterEnv, Fault, FaultyEnv
from multienv import Deadlines, RestartPolicy
from multienv.errors import EnvsFailedError, MultienvError, PoisonError, WorkerLostError
from multienv.events import Loss
from multienv.recovery.state_machine import LOSSES

SOAK = pytest.mark.soak
MODES = [NEXT_STEP, SAME_STEP]
MASK = np.arange(NUM_ENVS) < 2  # who is reset in the middle of episodes
# A method and the number of the event at which the fault strikes.
MOMENTS: dict[str, tuple[Any, int]] = {
    "construct": ("construct", 1),
    "reset": ("reset", 1),
    "autoreset": ("reset", 2),
    "mask": ("reset", 4),
    "step": ("step", 12),
    "render": ("render", 1),
    "call": ("call", 1),
    "pickle": ("pickle", 12),
}
COMMANDS = {"construct": "initialize", "mask": "reset", "autoreset": "step", "pickle": "step"}
MATRIX: list[Any] = [("forkserver", "kill", moment) for moment in MOMENTS]
MATRIX += [("forkserver", manner, one) for manner in ("segv", "hang_c", "exit") for one in ("construct", "step")]
MATRIX += [
    pytest.param(method, manner, moment, marks=SOAK)
    for method in ("forkserver", "spawn")
    for manner in ("segv", "hang_c", "exit", "system_exit", "abort", "hang", "noise")
    for moment in MOMENTS
]


def pair_with(fault: Fault, **options: Any) -> Pair:
    """Two processes of three envs each; one of the first has the fault."""
    building = (8.0 if options.get("context") == "spawn" else 3.0) if "hang" in fault.manner else 30.0
    options.setdefault("deadlines", Deadlines(start=building, reset=0.7, step=0.7, call=0.7, close=2.0, recovery=60))
    options.setdefault("restart", RestartPolicy(backoff=0.0))
    culprit = partial(FaultyEnv, fault=fault, horizon=5 + CULPRIT, render_mode="rgb_array")
    return Pair(counters(env1=culprit), counters(), **options)


def fault_of(moment: str, manner: Any, **options: Any) -> Fault:
    method, at = MOMENTS[moment]
    return Fault(manner, method, at=at, **options)


@pytest.mark.parametrize(("method", "manner", "moment"), MATRIX)
def test_a_fault_that_strikes_once_leaves_no_trace(method: str, manner: str, moment: str, marker: str) -> None:
    mode = MODES[len(method + manner + moment) % 2]  # either with either, without doubling the matrix
    with pair_with(fault_of(moment, manner, once=marker), context=method, mode=mode) as pair:
        for step in range(20):
            if step == 10 and moment == "render":
                for shown, own in zip(pair.envs.render(), pair.twin.render(), strict=True):  # type: ignore[arg-type]
                    assert np.array_equal(shown, own)
            if step == 10 and moment == "call":
                assert pair.envs.call("poke", 0.5) == pair.twin.call("poke", 0.5)
            if step == 15 and moment == "mask":
                pair.reset(MASK)
            pair.step()
        (loss,) = [event for event in pair.events if isinstance(event, Loss)]
        assert loss.cause == ("hung" if "hang" in manner else "died")
        assert (loss.env_index, loss.command) == (CULPRIT, COMMANDS.get(moment, moment))
        assert pair.outcomes() == ["exact"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("manner", "moment"), [("kill", "step"), ("segv", "pickle"), pytest.param("hang_c", "step", marks=SOAK)]
)
def test_a_step_that_ends_every_process_truncates_the_culprit_alone(manner: str, moment: str, mode: Any) -> None:
    with pair_with(fault_of(moment, manner), mode=mode) as pair:
        batches = [pair.step(OTHERS) for _ in range(20)]
        (end, *_) = [batch for batch in batches if batch[3].any()]
        assert {int(row) for batch in batches for row in np.flatnonzero(batch[3])} == {CULPRIT} == pair.culprits()
        infos = end[4]["final_info"] if mode is SAME_STEP else end[4]
        # SIGKILL may have come from anywhere, so that it takes more of them.
        assert f"ended {LOSSES if manner == 'kill' else 2} processes" in infos["multienv"]["reason"][CULPRIT]
        assert end[1][CULPRIT] == 0.0
        assert "truncated" in pair.outcomes()


@pytest.mark.parametrize(("mode", "masked"), [(NEXT_STEP, True), (SAME_STEP, True), (NEXT_STEP, False)])
def test_a_reset_that_ends_every_process_is_raised_for_the_culprit_alone(mode: AutoresetMode, masked: bool) -> None:
    with pair_with(Fault("exit", "reset", at=4 if masked else 2), mode=mode) as pair:
        for _ in range(15 if masked else 3):
            pair.step()
        arguments: Any = {"options": {"reset_mask": MASK}} if masked else {"seed": 3}
        own = pair.twin.reset(**arguments)
        with pytest.raises(EnvsFailedError) as caught:
            pair.envs.reset(**arguments)
        assert list(caught.value.failures) == [CULPRIT]
        assert isinstance(caught.value.failures[CULPRIT], PoisonError)
        assert caught.value.failures[CULPRIT].env_index == CULPRIT
        for index in OTHERS:
            assert caught.value.results[index].tobytes() == own[0][index].tobytes()
        for _ in range(3):
            pair.step(OTHERS)


@pytest.mark.parametrize("mode", MODES)
def test_a_reset_by_a_step_that_ends_every_process_truncates_the_culprit_alone(mode: AutoresetMode) -> None:
    """With SAME_STEP too: such an env shows its last observation once more, and its next step tries the reset again."""
    with pair_with(fault_of("autoreset", "exit"), mode=mode) as pair:
        for _ in range(5 + CULPRIT - (mode is SAME_STEP)):
            last = pair.step()
        for _ in range(2):
            batch = pair.step(OTHERS)
            assert batch[3][CULPRIT]
            assert batch[0][CULPRIT].tobytes() == last[0][CULPRIT].tobytes()
            infos = batch[4]["final_info"] if mode is SAME_STEP else batch[4]
            assert "it was not tried again" in infos["multienv"]["reason"][CULPRIT]


@pytest.mark.parametrize(("moment", "manner"), [("render", "exit"), ("call", "hang")])
def test_a_call_that_ends_every_process_is_raised_and_no_episode_is_lost(moment: str, manner: str) -> None:
    with pair_with(fault_of(moment, manner)) as pair:
        pair.step()
        own: list[Any] = [env.render() if moment == "render" else env.poke(0.0) for env in pair.twin.envs]  # type: ignore[attr-defined]
        with pytest.raises(EnvsFailedError) as caught:
            pair.envs.render() if moment == "render" else pair.envs.call("poke", 0.0)
        assert list(caught.value.failures) == FIRST  # nobody of its process was asked for good
        for index in FIRST:
            assert isinstance(caught.value.failures[index], PoisonError)
            assert caught.value.failures[index].env_index == CULPRIT
        for index in SECOND:
            assert np.array_equal(caught.value.results[index], own[index])
        for _ in range(3):
            pair.step()
        os.kill(pair.envs.statistics()[0].pid or 0, signal.SIGKILL)  # a replay leaves the call out
        for _ in range(5):
            assert not pair.step(OTHERS)[3].any()


@pytest.mark.parametrize("manner", ["kill", "hang"])
def test_an_env_whose_construction_ends_every_process_is_named(manner: Any) -> None:
    with pytest.raises(WorkerLostError) as caught:
        pair_with(Fault(manner, "construct"), deadlines=Deadlines(start=1.5 if manner == "hang" else 30.0))
    assert list(caught.value.failures) == [CULPRIT]  # type: ignore[attr-defined]


@pytest.mark.parametrize("manner", ["raise", "kill", "segv", "hang_c", "exit"])
def test_close_is_bounded_and_never_raises(manner: Any) -> None:
    with pair_with(Fault(manner, "close"), deadlines=Deadlines(close=0.5)) as pair:
        pair.step()
        pair.envs.close()
        pair.envs.close()
        with pytest.raises(MultienvError):
            pair.envs.step(pair.actions())


def die_once(path: str) -> None:
    if not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def dies_forking(side: str, path: str) -> gymnasium.Env[Any, Any]:
    os.register_at_fork(**{side: partial(die_once, path)})
    return CounterEnv(horizon=5 + CULPRIT, render_mode="rgb_array")


@pytest.mark.parametrize("side", ["before", "after_in_parent", "after_in_child"])
def test_a_process_lost_while_a_snapshot_is_taken_is_brought_back(side: str, marker: str) -> None:
    fns = counters(env1=partial(dies_forking, side, marker))
    with Pair(fns, counters(), restart=RestartPolicy(snapshot_every=4)) as pair:
        for step in range(30):
            if step == 20:
                pair.kill(0)
            pair.step()
        assert Path(marker).exists()
        assert pair.outcomes() == ["exact"] * (1 if side == "after_in_child" else 2)
