"""Trainers that the tests of the managers run: interrupted, then held against a quiet run. See trainer_process.py."""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

from interrupt_trainers import KINDS, explore

import multienv
from kit import CounterEnv
from kit.interruption import Interruption, Ledger
from multienv.errors import ActionError, UsageError

sys.path.append(str(Path(__file__).parent.parent / "contract"))
from manager_envs import FailingResetEnv, GatedEnv


def ctrl_c(name: str, what: str, folder: str) -> None:
    """SIGINT to the whole group while a call waits; what was asked of the envs comes afterwards, once."""
    gates = [Path(folder) / f"gate-{index}" for index in range(2)]
    errors = Path(folder) / "errors"
    for gate in gates:
        os.mkfifo(gate)
    which = "step_gate" if what == "step" else "reset_gate"
    fns: list[Any] = [partial(GatedEnv, horizon=2, **{which: str(gate)}) for gate in gates]
    if what == "retry":
        fns = [partial(FailingResetEnv, errors=str(errors), horizon=2)] * 2
    options = {"max_retry": 3, "retry_waiting_time": 1.5, "wait_num": 2}
    with getattr(multienv, name)(fns, **options) as manager:
        pids = [one.pid for one in manager.statistics()]
        if what in ("ready_obs", "retry"):
            manager.step({0: 1, 1: 1})
            if what == "retry":
                errors.write_text("once")
            manager.step({0: 1, 1: 1})
        threading.Timer(0.2, os.killpg, [os.getpgrp(), signal.SIGINT]).start()
        try:
            if what == "step":
                manager.step({0: 3, 1: 3})
            elif what == "reset":
                manager.reset()
            else:
                while len(manager.ready_obs) < 2:
                    if what == "retry":  # the other one is ready: nothing to wait for but Ctrl-C
                        signal.pause()
            raise AssertionError("it was not interrupted")
        except KeyboardInterrupt:
            pass
        for gate in gates if what != "retry" else []:
            gate.write_bytes(b"")
        if what == "step":
            timesteps = manager.step({})
            seen = {index: step.observation[[0, 3]].tolist() for index, step in timesteps.items()}
            assert seen == {0: [1, 3], 1: [1, 3]}
        elif what == "reset":
            manager.reset({0: {"options": {"start": 1}}, 1: None})
            assert [observation[0] for observation in manager.ready_obs.values()] == [1, 0]
        else:
            while len(ready := manager.ready_obs) < 2:
                pass
            assert [observation[0] for observation in ready.values()] == [0, 0]
        assert not errors.exists() or not errors.read_text()
        assert [one.pid for one in manager.statistics()] == pids
        assert [one.losses for one in manager.statistics()] == [0, 0]


class Managed:
    """Three envs of a manager, each with a ledger."""

    def __init__(self, name: str, inplace: bool = False) -> None:
        self.manager = getattr(multienv, name)(
            [partial(CounterEnv, horizon=3)] * 3, wait_num=1, step_wait_timeout=0.0, reset_inplace=inplace
        )
        self.manager.seed(0)
        self.manager.launch()
        self.hosted = self.manager._rollout.supervisors
        self.inplace = inplace
        self.given: dict[int, list[int]] = {}
        self.ledgers = [Ledger(horizon=3) for _ in range(3)]
        self.numbers = [0] * 3
        ready = self.manager.ready_obs
        for index in range(3):
            self._begun(index, ready[index])

    def _begun(self, index: int, observation: Any) -> None:
        seed = self.manager._seed_of(index, self.numbers[index])
        self.numbers[index] += 1
        self.ledgers[index].reset((observation, {}), seed)

    def take(self, timesteps: dict[int, Any]) -> None:
        """Each timestep goes on where the last one ended, with the action given for it."""
        for index, timestep in timesteps.items():
            observation = timestep.info.get("final_obs", timestep.observation)
            self.ledgers[index].step((observation, *timestep[1:]), self.given.pop(index))
            if self.inplace and timestep.done:
                self._begun(index, timestep.observation)

    def see(self, ready: dict[int, Any]) -> None:
        """Those whose episode had ended have begun another."""
        for index, observation in ready.items():
            if self.ledgers[index].ended:
                self._begun(index, observation)
            assert index not in self.given, f"env {index} is ready, and its timestep has not been seen"

    def go_on(self) -> None:
        """All is as if nothing had happened."""
        while self.given:
            self.take(self.manager.step({}))
        self.see(self.manager.ready_obs)

    def kill(self) -> None:
        os.kill(self.manager.statistics()[1].pid or 0, signal.SIGKILL)

    def close(self) -> None:
        self.manager.close()


def places_of_a_managers_step(name: str, kind: str, inplace: str, kills: str, stride: str = "1") -> None:
    """step() and ready_obs interrupted; what was sent comes with the next ones, once; what was not is ready still."""

    def trial(managed: Managed, interruption: Interruption, number: int) -> None:
        manager = managed.manager
        ready = manager.ready_obs
        managed.see(ready)
        if int(kills):
            managed.kill()
        actions = {index: (number + index) % 4 for index in ready}
        timesteps = observations = None
        with interruption:
            timesteps = manager.step(actions)
            observations = manager.ready_obs
        if timesteps is None:  # which of them were sent?
            still = set(manager.ready_env)
            actions = {index: action for index, action in actions.items() if index not in still}
        managed.given.update({index: [action] for index, action in actions.items()})
        managed.take(timesteps or {})
        managed.see(observations or {})
        managed.go_on()

    assert kind in KINDS
    explore(  # type: ignore[type-var]
        lambda: Managed(name, inplace == "1"), kind, trial, kills=int(kills), stride=int(stride)
    )


def places_of_a_managers_reset(name: str, kind: str, stride: str) -> None:
    """reset() interrupted, with steps under way; then reset() and steps work."""

    def trial(managed: Managed, interruption: Interruption, number: int) -> None:
        manager = managed.manager
        managed.see(manager.ready_obs)
        manager.step(dict.fromkeys(manager.ready_env, 1))
        with interruption:
            manager.reset({0: {"seed": number}, 1: None})
        manager.reset({index: {"seed": 7 * index} for index in range(3)})
        managed.given.clear()
        for index, observation in manager.ready_obs.items():
            managed.ledgers[index].reset((observation, {}), 7 * index)
        for action in range(2):
            sent = list(manager.ready_obs)
            assert sent == [0, 1, 2]
            managed.given = {index: [action] for index in sent}
            managed.take(manager.step(dict.fromkeys(sent, action)))
            while managed.given:
                managed.take(manager.step({}))

    explore(lambda: Managed(name), kind, trial, stride=int(stride))  # type: ignore[type-var]


def places_of_a_managers_call(name: str, kind: str, stride: str) -> None:
    """get_attr() interrupted, with steps under way; then another call, steps and resets work."""

    def trial(managed: Managed, interruption: Interruption, number: int) -> None:
        manager = managed.manager
        sent = manager.ready_obs  # not ready_env: others may have become ready since
        managed.see(sent)
        managed.given = {index: [1] for index in sent}
        managed.take(manager.step(dict.fromkeys(sent, 1)))
        with interruption:
            manager.get_attr("horizon")
        if number % 2:
            assert manager.get_attr("horizon") == [3] * 3
        managed.go_on()

    explore(lambda: Managed(name), kind, trial, stride=int(stride))  # type: ignore[type-var]


def places_of_a_stacked_step(kind: str, stride: str) -> None:
    """step() interrupted; the same again is taken or refused, with what to do said; ready_obs says what can be stepped."""

    def trial(managed: Managed, interruption: Interruption, number: int) -> None:
        manager = managed.manager

        def see(batch: Any) -> list[int]:
            ids = manager.ready_obs_id
            managed.see(dict(zip(ids, batch, strict=True)))
            return ids

        def give(ids: list[int], actions: list[int]) -> None:
            managed.given.update({index: [action] for index, action in zip(ids, actions, strict=True)})

        def take(timesteps: list[Any]) -> None:
            managed.take({timestep.env_id: timestep for timestep in timesteps})

        ids = see(manager.ready_obs)
        actions = [(number + index) % 4 for index in ids]
        timesteps = None
        with interruption:
            timesteps = manager.step(actions)
        if timesteps is None:  # which of them were sent?
            still = set(manager.ready_env)
            give(ids, actions)
            for index in still:
                managed.given.pop(index, None)
            timesteps, refusal = [], "ready_obs"
            try:
                timesteps = manager.step(actions)
                give(ids, actions)
            except (UsageError, ActionError) as error:
                refusal = str(error)
            assert "ready_obs" in refusal
        else:
            give(ids, actions)
        take(timesteps)
        while managed.given:
            ids = see(manager.ready_obs)
            give(ids, [1] * len(ids))
            take(manager.step([1] * len(ids)))
        see(manager.ready_obs)

    explore(lambda: Managed("StackedSubprocessEnvManager"), kind, trial, stride=int(stride))  # type: ignore[type-var]
