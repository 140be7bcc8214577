"""Workers with several envs whose processes are killed at any moment, held against the same host code in this process."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from test_agreement import DEFAULT, KILLS, PATIENT, SEEDS, SOAK, STEP_DEADLINE

from kit import CounterEnv, descendants, first_difference
from multienv import Deadlines, SerialVectorEnv, SubprocessVectorEnv

NUM_ENVS = 5
ACTIONS = st.lists(st.integers(0, 3), min_size=NUM_ENVS, max_size=NUM_ENVS)
STRIKES = st.none() | st.tuples(st.integers(0, 2), KILLS, st.booleans())


class VectorAgreement(RuleBasedStateMachine):
    """Five envs in three processes, twofold."""

    @initialize(
        mode=st.sampled_from(list(AutoresetMode)),
        every=st.sampled_from([None, 1, 3]),
        seed=st.integers(0, 999),
    )
    def open(self, mode: AutoresetMode, every: int | None, seed: int) -> None:
        fns = [partial(CounterEnv, horizon=3 + index) for index in range(NUM_ENVS)]
        self.mode = mode
        self.envs = SubprocessVectorEnv(
            fns,
            envs_per_worker=2,
            autoreset_mode=mode,
            restart=replace(PATIENT, snapshot_every=every, snapshots=every is not None),
            deadlines=Deadlines(step=STEP_DEADLINE, reset=30, call=30),
        )
        self.twin = SerialVectorEnv(fns, autoreset_mode=mode)
        self.ended = np.zeros(NUM_ENVS, np.bool_)
        self.agree("reset", self.envs.reset(seed=seed), self.twin.reset(seed=seed))

    def agree(self, what: str, seen: Any, own: Any) -> None:
        difference = first_difference(seen, own)
        assert difference is None, f"{what}: {difference}"

    def strike(self, blow: tuple[int, int, bool] | None) -> None:
        if blow is None:
            return
        place, number, with_snapshot = blow
        worker = self.envs.statistics()[place].pid
        assert worker is not None
        for victim in [worker, *(sorted(descendants(worker))[-1:] if with_snapshot else [])]:
            with contextlib.suppress(ProcessLookupError):  # it is dead already
                os.kill(victim, number)

    @rule(actions=ACTIONS, blow=STRIKES)
    def step(self, actions: list[int], blow: Any) -> None:
        if self.mode is AutoresetMode.DISABLED and self.ended.any():
            self.masked_reset(self.ended.tolist(), None, None)
        self.envs.step_async(np.array(actions))
        self.strike(blow)
        expected = self.twin.step(np.array(actions))
        self.agree("step", self.envs.step_wait(), expected)
        self.ended = expected[2] | expected[3]

    @rule(many=st.lists(ACTIONS, min_size=2, max_size=8))
    def steps(self, many: list[list[int]]) -> None:
        for actions in many:
            self.step(actions, None)

    @rule(mask=st.lists(st.booleans(), min_size=NUM_ENVS, max_size=NUM_ENVS).filter(any), seed=SEEDS, blow=STRIKES)
    def masked_reset(self, mask: list[bool], seed: int | None, blow: Any) -> None:
        self.envs.reset_async(seed=seed, options={"reset_mask": np.array(mask)})
        self.strike(blow)
        own = self.twin.reset(seed=seed, options={"reset_mask": np.array(mask)})
        self.agree("reset", self.envs.reset_wait(), own)
        self.ended = self.ended & ~np.array(mask)

    @rule(seed=SEEDS)
    def reset(self, seed: int | None) -> None:
        self.agree("reset", self.envs.reset(seed=seed), self.twin.reset(seed=seed))
        self.ended[:] = False

    @rule(amount=st.floats(-1, 1), blow=STRIKES)
    def call(self, amount: float, blow: Any) -> None:
        self.envs.call_async("poke", amount)
        self.strike(blow)
        self.agree("poke", self.envs.call_wait(), self.twin.call("poke", amount))

    @rule(offsets=st.lists(st.floats(-1, 1), min_size=NUM_ENVS, max_size=NUM_ENVS))
    def set_and_get_attr(self, offsets: list[float]) -> None:
        self.envs.set_attr("offset", offsets)
        self.twin.set_attr("offset", offsets)
        assert list(self.envs.get_attr("offset")) == offsets

    @rule(blow=STRIKES)
    def kill(self, blow: Any) -> None:
        self.strike(blow)

    @rule(place=st.integers(0, 2), actions=ACTIONS)
    def hang(self, place: int, actions: list[int]) -> None:
        if self.mode is AutoresetMode.DISABLED and self.ended.any():
            return  # there would be a reset first, whose deadline is long
        self.strike((place, signal.SIGSTOP, False))  # before it is asked, so that the deadline is that of a step
        self.step(actions, None)

    @invariant()
    def recoveries_are_exact(self) -> None:
        for statistics in self.envs.statistics() if hasattr(self, "envs") else ():
            assert statistics.truncated_recoveries == 0, statistics.last_recovery
            assert statistics.exact_recoveries == statistics.losses

    def teardown(self) -> None:
        if hasattr(self, "envs"):
            self.envs.close()
            self.twin.close()


def test_vector_agreement() -> None:
    run_state_machine_as_test(VectorAgreement, settings=settings(DEFAULT, max_examples=3))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_vector_agreement_for_long() -> None:
    run_state_machine_as_test(VectorAgreement, settings=SOAK)
