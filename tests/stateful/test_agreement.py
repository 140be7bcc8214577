"""Envs in processes that are killed and stopped at any moment, held against the same envs in this process.

A state machine of hypothesis thinks up what a caller may do, and what may befall the worker meanwhile. Three
implementations do it side by side: a `SubprocessEnv`, a `SerialEnv`, and the plain env. They must agree to the bit.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kit import CounterEnv, SpaceEnv, descendants, first_difference
from multienv import (
    AutoResetWrapper,
    Deadlines,
    MultiEnv,
    RestartPolicy,
    SerialEnv,
    SubprocessEnv,
    create_subprocess_envs,
)

DEFAULT = settings(
    max_examples=2,
    stateful_step_count=30,
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
SOAK = settings(DEFAULT, max_examples=400, stateful_step_count=80)

SEEDS = st.none() | st.integers(0, 2**31 - 1)
KILLS = st.sampled_from([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT])
# Patient with replacements: the machine kills far more often than a simulator dies.
PATIENT = RestartPolicy(backoff=0.0)
STEP_DEADLINE = 0.25


class NestedEnv(SpaceEnv):
    """Observations of nested Dict and Tuple, too large in part to travel inline; renders; has an attribute."""

    metadata: dict[str, Any] = {"render_modes": ["ansi"]}  # noqa: RUF012 - gymnasium's

    def __init__(self) -> None:
        inner = spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(4), spaces.Box(-1.0, 1.0, (40, 40), np.float64)))
        super().__init__(
            observation_space=spaces.Dict({"a": inner, "b": spaces.Dict({"c": spaces.Discrete(9)})}), horizon=6
        )
        self.render_mode = "ansi"
        self.offset = 0.0
        self.pokes = 0

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward + self.offset, terminated, truncated, info

    def render(self) -> Any:
        return f"step {self.episode_step} offset {self.offset}"

    def poke(self, amount: float = 0.0) -> int:
        self.offset += amount
        self.pokes += 1
        return self.pokes


def plain_call(env: Any, name: str, *arguments: Any) -> Any:
    return env.get_wrapper_attr(name)(*arguments)


def agree(what: str, results: list[Any]) -> None:
    for name, result in zip(["SubprocessEnv", "SerialEnv"], results, strict=False):
        difference = first_difference(result, results[-1])
        assert difference is None, f"{what}: {name} against the plain env: {difference}"


class Agreement(RuleBasedStateMachine):
    """One env, threefold."""

    env_fn: Callable[[], Any] = CounterEnv
    policy = PATIENT

    def __init__(self) -> None:
        super().__init__()
        env_fn = type(self).env_fn
        self.subprocess = SubprocessEnv(
            env_fn,
            restart=self.policy,
            deadlines=Deadlines(step=STEP_DEADLINE, reset=30, call=30),
        ).initialize()
        self.serial = SerialEnv(env_fn).initialize()
        self.plain = env_fn()
        self.running = False
        self.seeded = False

    @property
    def worker(self) -> int:
        pid = self.subprocess.statistics().pid
        assert pid is not None
        return pid

    def strike(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it is dead already
            os.kill(self.worker, number)

    # --- what a caller does -------------------------------------------------------------------

    @rule(seed=SEEDS)
    def reset(self, seed: int | None) -> None:
        if seed is None and not self.seeded:
            seed = 1  # each would draw a seed of its own, and rightly differ
        self.seeded = True
        envs = (self.subprocess, self.serial, self.plain)
        agree(f"reset(seed={seed})", [env.reset(seed=seed) for env in envs])
        self.running = True

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        action = data.draw(st.integers(0, 3))
        self.check_step(action, [env.step(action) for env in (self.subprocess, self.serial, self.plain)])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), number=st.none() | KILLS, count=st.integers(1, 4))
    def several_steps_in_halves(self, data: st.DataObject, number: int | None, count: int) -> None:
        """With, perhaps, a death between the halves of the first."""
        for place in range(count):
            if not self.running:
                return
            action = data.draw(st.integers(0, 3))
            self.subprocess.step_async(action)
            self.serial.step_async(action)
            if number is not None and not place:
                self.strike(number)
            self.check_step(action, [self.subprocess.step_wait(), self.serial.step_wait(), self.plain.step(action)])

    def check_step(self, action: int, results: list[Any]) -> None:
        agree(f"step({action})", results)
        self.running = not (results[-1][2] or results[-1][3])

    @rule(amount=st.floats(-1, 1), number=st.none() | KILLS)
    def call(self, amount: float, number: int | None) -> None:
        self.subprocess.call_async("poke", amount)
        if number is not None:
            self.strike(number)
        results = [
            self.subprocess.call_wait(),
            self.serial.call("poke", amount),
            plain_call(self.plain, "poke", amount),
        ]
        agree("poke()", results)

    @rule(offset=st.floats(-1, 1))
    def set_attr(self, offset: float) -> None:
        self.subprocess.set_attr("offset", offset)
        self.serial.set_attr("offset", offset)
        self.plain.set_wrapper_attr("offset", offset)

    @rule()
    def get_attr(self) -> None:
        for name in ("offset", "pokes"):
            hosted = [self.subprocess.get_attr(name), self.serial.get_attr(name)]
            agree(name, [*hosted, self.plain.get_wrapper_attr(name)])

    @precondition(lambda self: self.seeded)
    @rule()
    def generator(self) -> None:
        generators = [env.get_attr("np_random") for env in (self.subprocess, self.serial)]
        generators.append(self.plain.get_wrapper_attr("np_random"))
        agree("np_random", [generator.bit_generator.state["state"] for generator in generators])

    @precondition(lambda self: self.running)
    @rule()
    def render(self) -> None:
        agree("render()", [env.render() for env in (self.subprocess, self.serial, self.plain)])

    # --- what befalls the worker --------------------------------------------------------------

    @rule(number=KILLS)
    def kill(self, number: int) -> None:
        self.strike(number)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def hang(self, data: st.DataObject) -> None:
        """It stops, and the deadline of the step passes."""
        self.strike(signal.SIGSTOP)
        self.step(data)

    # --- what holds at any time ---------------------------------------------------------------

    @invariant()
    def recoveries_are_exact(self) -> None:
        statistics = self.subprocess.statistics()
        assert statistics.truncated_recoveries == 0, statistics.last_recovery
        assert statistics.exact_recoveries == statistics.losses
        assert self.serial.statistics().losses == 0

    def teardown(self) -> None:
        for env in (self.subprocess, self.serial, self.plain):
            env.close()


class CounterAgreement(Agreement):
    env_fn = staticmethod(partial(CounterEnv, render_mode="rgb_array"))


class SnapshotAgreement(CounterAgreement):
    """With a frozen copy nearly always at hand, which may be struck too."""

    policy = replace(PATIENT, snapshot_every=2)

    @rule(number=KILLS, first=st.booleans())
    def kill_with_snapshot(self, number: int, first: bool) -> None:
        snapshots = sorted(descendants(self.worker))[-1:]
        if not first:
            self.strike(number)
        for pid in snapshots:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if first:
            self.strike(number)


class NestedAgreement(Agreement):
    env_fn = NestedEnv


# --- several envs -----------------------------------------------------------------------------


class SeveralAgreement(RuleBasedStateMachine):
    """A MultiEnv of three against three AutoResetWrappers around the plain env."""

    env_fn: Callable[[], Any] = staticmethod(partial(CounterEnv, horizon=4))
    max_workers: int | None = None

    @initialize(mode=st.sampled_from(list(gymnasium.vector.AutoresetMode)), workers=st.sampled_from([None, 1, 2, 3]))
    def open(self, mode: Any, workers: int | None) -> None:
        deadlines = Deadlines(step=STEP_DEADLINE, reset=30, call=30)
        envs = create_subprocess_envs([self.env_fn] * 3, restart=PATIENT, deadlines=deadlines)
        self.mode = mode
        self.multi = MultiEnv(envs, autoreset_mode=mode, max_workers=workers)
        self.plain = [AutoResetWrapper(self.env_fn(), mode) for _ in range(3)]
        self.running = [False] * 3
        self.check_reset(7, None)

    def worker(self, index: int) -> int:
        statistics = self.multi.statistics()[index]
        assert statistics is not None
        assert statistics.pid is not None
        return statistics.pid

    def strike(self, index: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it is dead already
            os.kill(self.worker(index), number)

    def check_reset(self, seed: Any, mask: list[bool] | None) -> None:
        observations, infos = self.multi.reset(seed=seed, mask=mask)
        for index, plain in enumerate(self.plain):
            if mask is not None and not mask[index]:
                assert observations[index] is None
                assert infos[index] is None
                continue
            one = seed[index] if isinstance(seed, list) else None if seed is None else seed + index
            difference = first_difference((observations[index], infos[index]), plain.reset(seed=one))
            assert difference is None, f"reset of env {index}: {difference}"
            self.running[index] = True

    @rule(
        seed=SEEDS | st.lists(SEEDS, min_size=3, max_size=3),
        mask=st.none() | st.lists(st.booleans(), min_size=3, max_size=3),
    )
    def reset(self, seed: Any, mask: list[bool] | None) -> None:
        self.check_reset(seed, mask)

    @rule(actions=st.lists(st.none() | st.integers(0, 3), min_size=3, max_size=3))
    def step(self, actions: list[int | None]) -> None:
        given = [action if running else None for action, running in zip(actions, self.running, strict=True)]
        lists = self.multi.step(given)
        for index, (plain, action) in enumerate(zip(self.plain, given, strict=True)):
            transition = tuple(part[index] for part in lists)
            if action is None:
                assert transition == (None,) * 5
                continue
            expected = plain.step(action)
            difference = first_difference(transition, expected)
            assert difference is None, f"step of env {index} with {action}: {difference}"
            if self.mode is gymnasium.vector.AutoresetMode.DISABLED:
                self.running[index] = not (expected[2] or expected[3])

    @rule(actions=st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=6))
    def several_steps(self, actions: list[list[int | None]]) -> None:
        for one in actions:
            self.step(one)

    @rule(amount=st.floats(-1, 1))
    def call(self, amount: float) -> None:
        assert self.multi.call("poke", amount) == [plain_call(env, "poke", amount) for env in self.plain]

    @rule(offsets=st.lists(st.floats(-1, 1), min_size=3, max_size=3))
    def set_and_get_attr(self, offsets: list[float]) -> None:
        self.multi.set_attr("offset", offsets)
        for env, offset in zip(self.plain, offsets, strict=True):
            env.set_wrapper_attr("offset", offset)
        assert self.multi.get_attr("offset") == offsets

    @rule(victims=st.sets(st.integers(0, 2), min_size=1), number=KILLS)
    def kill(self, victims: set[int], number: int) -> None:
        for index in victims:
            self.strike(index, number)

    @rule(index=st.integers(0, 2), actions=st.lists(st.integers(0, 3), min_size=3, max_size=3))
    def hang(self, index: int, actions: list[int | None]) -> None:
        # In a step: a reset has a long deadline here.
        if self.running[index] and not self.plain[index].ended:
            self.strike(index, signal.SIGSTOP)
            self.step(actions)

    @invariant()
    def recoveries_are_exact(self) -> None:
        for statistics in self.multi.statistics() if hasattr(self, "multi") else ():
            assert statistics is not None
            assert statistics.truncated_recoveries == 0, statistics.last_recovery
            assert statistics.exact_recoveries == statistics.losses

    def teardown(self) -> None:
        if hasattr(self, "multi"):
            self.multi.close()


LONG = (CounterAgreement, NestedAgreement)
MACHINES = [CounterAgreement, SnapshotAgreement, NestedAgreement, SeveralAgreement]


@pytest.mark.parametrize(
    "machine", [pytest.param(one, marks=pytest.mark.soak) if one in LONG else one for one in MACHINES]
)
def test_agreement(machine: Any) -> None:
    run_state_machine_as_test(machine, settings=DEFAULT)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", MACHINES)
def test_agreement_for_long(machine: Any) -> None:
    run_state_machine_as_test(machine, settings=SOAK)
