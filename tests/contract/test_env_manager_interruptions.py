"""Exceptions of signal handlers at the places of a manager's calls: nothing is lost, doubled or left locked."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

import multienv
from kit import CounterEnv
from kit.interruption import Interruption, Ledger, every_place
from multienv.errors import ActionError, UsageError

# The interpreter swallows what is raised while a generator ends that was not exhausted, and says so.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <generator object:pytest.PytestUnraisableExceptionWarning"
)


class Managed:
    """Three envs of a manager, each with a ledger."""

    def __init__(self, name: str, inplace: bool = False) -> None:
        self.manager = getattr(multienv, name)(
            [partial(CounterEnv, horizon=3)] * 3, wait_num=1, step_wait_timeout=0.0, reset_inplace=inplace
        )
        self.manager.seed(0)
        self.manager.launch()
        self.inplace = inplace
        self.given: dict[int, list[int]] = {}
        self.ledgers = [Ledger(horizon=3) for _ in range(3)]
        self.numbers = [0] * 3
        ready = self.manager.ready_obs if name != "StackedSubprocessEnvManager" else list(self.manager.ready_obs)
        for index in range(3):
            self._begun(index, ready[index])

    def _begun(self, index: int, observation: Any) -> None:
        seed = self.manager._seed_of(index, self.numbers[index])
        self.numbers[index] += 1
        self.ledgers[index].reset((observation, {}), seed)

    def take(self, timesteps: Iterable[Any]) -> None:
        """Check that each timestep goes on where the last one ended, with the action given for it."""
        for timestep in timesteps:
            index = timestep.env_id
            observation = timestep.info.get("final_obs", timestep.observation)
            self.ledgers[index].step((observation, *timestep[1:]), self.given.pop(index))
            if self.inplace and timestep.done:
                self._begun(index, timestep.observation)

    def see(self, ready: dict[int, Any]) -> None:
        """Check that those whose episode had ended have begun another."""
        for index, observation in ready.items():
            if self.ledgers[index].ended:
                self._begun(index, observation)
            assert index not in self.given, f"env {index} is ready, and its timestep has not been seen"

    def give(self, ids: Iterable[int], action: int) -> dict[int, int]:
        """Note the actions of these envs, each another one; return them."""
        actions = {index: (action + index) % 4 for index in ids}
        self.given.update({index: [one] for index, one in actions.items()})
        return actions

    def go_on(self) -> None:
        """Check that all is as if nothing had happened."""
        while self.given:
            self.take(self.manager.step({}).values())
        self.see(self.manager.ready_obs)


def step(managed: Managed, interruption: Interruption) -> None:
    """Interrupt step() or ready_obs: what was sent comes with the next ones, once; what was not is ready still."""
    manager, timesteps, observations = managed.manager, None, None
    ready = manager.ready_obs
    managed.see(ready)
    actions = managed.give(ready, interruption.place)
    with interruption:
        timesteps = manager.step(actions)
        observations = manager.ready_obs
    for index in manager.ready_env if timesteps is None else ():  # not sent
        managed.given.pop(index, None)
    managed.take((timesteps or {}).values())
    managed.see(observations or {})
    managed.go_on()


def stacked_step(managed: Managed, interruption: Interruption) -> None:
    """Interrupt step(); the same again is taken or refused, with what to do said."""
    manager, timesteps = managed.manager, None

    def see() -> list[int]:
        batch, ids = manager.ready_obs, manager.ready_obs_id
        managed.see(dict(zip(ids, batch, strict=True)))
        return list(ids)

    ids = see()
    actions = managed.give(ids, interruption.place)
    with interruption:
        timesteps = manager.step(list(actions.values()))
    if timesteps is None:
        for index in manager.ready_env:  # not sent
            managed.given.pop(index, None)
        refusal = "ready_obs"
        try:
            timesteps = manager.step(list(actions.values()))
            managed.give(ids, interruption.place)
        except (UsageError, ActionError) as error:
            refusal = str(error)
        assert "ready_obs" in refusal
    managed.take(timesteps or [])
    while managed.given:
        ids = see()
        managed.take(manager.step(list(managed.give(ids, 1).values())))
    see()


def reset(managed: Managed, interruption: Interruption) -> None:
    """Interrupt reset() with steps under way; then reset() and steps work."""
    manager = managed.manager
    managed.see(manager.ready_obs)
    manager.step(dict.fromkeys(manager.ready_env, 1))
    with interruption:
        manager.reset({0: {"seed": interruption.place}, 1: None})
    manager.reset({index: {"seed": 7 * index} for index in range(3)})
    managed.given.clear()
    for index, observation in manager.ready_obs.items():
        managed.ledgers[index].reset((observation, {}), 7 * index)
    for action in range(2):
        assert list(manager.ready_obs) == [0, 1, 2]
        managed.take(manager.step(managed.give(range(3), action)).values())
        while managed.given:
            managed.take(manager.step({}).values())


def call(managed: Managed, interruption: Interruption) -> None:
    """Interrupt get_attr() with steps under way; then another call, steps and resets work."""
    manager = managed.manager
    sent = manager.ready_obs  # not ready_env: others may have become ready since
    managed.see(sent)
    managed.take(manager.step(managed.give(sent, 1)).values())
    with interruption:
        manager.get_attr("horizon")
    if interruption.place % 2:
        assert manager.get_attr("horizon") == [3] * 3
    managed.go_on()


@pytest.mark.parametrize(
    ("trial", "name", "inplace", "stride"),
    [
        (step, "AsyncSubprocessEnvManager", False, 5),
        (step, "SyncSubprocessEnvManager", True, 3),
        (stacked_step, "StackedSubprocessEnvManager", False, 7),
        (reset, "AsyncSubprocessEnvManager", False, 7),
        (call, "AsyncSubprocessEnvManager", False, 7),
    ],
    ids=["asynchronous step", "synchronous step", "stacked step", "reset", "call"],
)
def test_interrupted_call_of_a_manager_loses_and_doubles_nothing(
    trial: Any, name: str, inplace: bool, stride: int
) -> None:
    managed, fired = Managed(name, inplace), 0
    with managed.manager:
        for interruption in every_place(stride=stride):
            try:
                trial(managed, interruption)
            except Exception as error:
                raise AssertionError(f"{interruption.where}: {type(error).__name__}: {error}") from error
            fired += interruption.fired
        for one in managed.manager.statistics():
            assert one.truncated_recoveries == 0
            assert one.exact_recoveries <= one.losses < fired
    assert fired > 5
