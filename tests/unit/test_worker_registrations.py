"""What is registered in the trainer, and only in it."""

from __future__ import annotations

import pickle

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec

from multienv.worker.registrations import registrations


@pytest.mark.parametrize("env_id", ["unit/Anew-v0", "CartPole-v1"], ids=["unknown", "override"])
def test_what_is_registered_is_told_whatever_was_there_before(monkeypatch: pytest.MonkeyPatch, env_id: str) -> None:
    monkeypatch.setattr(gymnasium.envs.registration, "registry", registry := dict(gymnasium.registry))
    monkeypatch.setattr(gymnasium, "registry", registry)
    for horizon in range(20):
        registry.pop(env_id, None)  # and its spec is freed
        registry[env_id] = EnvSpec(env_id, "here:Env", kwargs={"horizon": horizon})
        specs = {spec.id: spec for told in registrations() for spec in pickle.loads(told)}
        assert specs[env_id].kwargs == {"horizon": horizon}
