"""Envs that are registered in the trainer and only there are made known to a worker that does not find them."""

from __future__ import annotations

import threading
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec

from kit import CounterEnv
from multienv.worker.registrations import built, register, registrations


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, EnvSpec]:
    fresh = dict(gymnasium.registry)
    monkeypatch.setattr(gymnasium.envs.registration, "registry", fresh)
    monkeypatch.setattr(gymnasium, "registry", fresh)
    return fresh


def make() -> Any:
    return gymnasium.make("unit/Counter-v0")


def test_an_unknown_id_is_registered_with_its_arguments_and_built(registry):
    gymnasium.register("unit/Counter-v0", CounterEnv, kwargs={"horizon": 7}, max_episode_steps=5)
    specs = registrations()
    del registry["unit/Counter-v0"]
    with pytest.raises(gymnasium.error.UnregisteredEnv):
        built(make, b"")
    env = built(make, specs)
    assert env.unwrapped.horizon == 7
    assert env.spec.max_episode_steps == 5


def test_what_a_worker_knows_already_is_not_replaced(registry):
    registry["unit/Counter-v0"] = EnvSpec("unit/Counter-v0", "trainer:Env")
    specs = registrations()
    registry["unit/Counter-v0"] = own = EnvSpec("unit/Counter-v0", "worker:Env")
    register(specs)
    assert registry["unit/Counter-v0"] is own


def test_the_package_of_an_entry_point_registers_its_envs_itself(registry, monkeypatch, tmp_path):
    (tmp_path / "unit_package.py").write_text(
        "import gymnasium\ngymnasium.register('unit/Own-v0', 'unit_package:Env', kwargs={'by': 'itself'})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry["unit/Own-v0"] = EnvSpec("unit/Own-v0", "unit_package:Env", kwargs={"by": "trainer"})
    registry["unit/Absent-v0"] = EnvSpec("unit/Absent-v0", "unit_package_that_is_not_there:Env")
    specs = registrations()
    del registry["unit/Own-v0"], registry["unit/Absent-v0"]
    register(specs)
    assert registry["unit/Own-v0"].kwargs == {"by": "itself"}
    assert "unit/Absent-v0" in registry


def test_a_spec_that_cannot_be_pickled_keeps_no_other_from_travelling(registry):
    lock = threading.Lock()
    registry["unit/Locked-v0"] = EnvSpec("unit/Locked-v0", lambda: lock)
    registry["unit/Counter-v0"] = EnvSpec("unit/Counter-v0", CounterEnv)
    specs = registrations()
    del registry["unit/Locked-v0"], registry["unit/Counter-v0"]
    register(specs)
    assert "unit/Counter-v0" in registry
    assert "unit/Locked-v0" not in registry


@pytest.mark.parametrize("result", [None, CounterEnv, "CartPole-v1"])
def test_what_is_no_env_is_refused(result):
    with pytest.raises(TypeError, match="not a gymnasium.Env"):
        built(lambda: result, b"")
