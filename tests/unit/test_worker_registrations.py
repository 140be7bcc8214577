"""What is registered in the trainer, and only in it."""

from __future__ import annotations

import pickle

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec

from multienv.worker import registrations as worker_registrations
from multienv.worker.registrations import adopt, registrations


@pytest.mark.parametrize("env_id", ["unit/Anew-v0", "CartPole-v1"], ids=["unknown", "override"])
def test_what_is_registered_is_told_whatever_was_there_before(monkeypatch: pytest.MonkeyPatch, env_id: str) -> None:
    monkeypatch.setattr(gymnasium.envs.registration, "registry", registry := dict(gymnasium.registry))
    monkeypatch.setattr(gymnasium, "registry", registry)
    for horizon in range(20):
        registry.pop(env_id, None)  # and its spec is freed
        registry[env_id] = EnvSpec(env_id, "here:Env", kwargs={"horizon": horizon})
        specs = {spec.id: spec for told in registrations() for spec in pickle.loads(told)}
        assert specs[env_id].kwargs == {"horizon": horizon}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, EnvSpec]:
    fresh = dict(gymnasium.registry)
    monkeypatch.setattr(gymnasium.envs.registration, "registry", fresh)
    monkeypatch.setattr(gymnasium, "registry", fresh)
    return fresh


# Of the last, gymnasium itself registers a function that refuses to make it.
@pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetah-v3"])
def test_an_id_of_gymnasiums_means_what_it_means_in_the_trainer(registry: dict[str, EnvSpec], env_id: str) -> None:
    before = registry[env_id]
    registry[env_id] = EnvSpec(env_id, "here:Env")
    told = registrations()
    registry[env_id] = before
    adopt(*told)
    assert registry[env_id].entry_point == "here:Env"


def test_where_nothing_was_changed_nothing_is_done(
    registry: dict[str, EnvSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_registrations, "_FOUND", registrations()[1])  # other tests may have changed it
    before = dict(registry)
    registry["unit/New-v0"] = EnvSpec("unit/New-v0", "here:Env")
    adopt(*registrations())
    assert all(registry[env_id] is spec for env_id, spec in before.items())


def test_an_id_that_is_gone_is_gone(registry: dict[str, EnvSpec]) -> None:
    spec = registry.pop("CartPole-v1")
    told = registrations()
    registry["CartPole-v1"] = spec
    adopt(*told)
    assert "CartPole-v1" not in registry
