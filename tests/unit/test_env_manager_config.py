"""The options of the env managers, and the timesteps they hand out."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest

from kit import CounterEnv
from multienv import AsyncSubprocessEnvManager, StackedSubprocessEnvManager, SyncSubprocessEnvManager
from multienv.errors import UsageError
from multienv.managers.config import EnvManagerConfig, EnvState, Timestep

# DI-engine 0.5.3, but for the start method.
DEFAULTS = {
    "episode_num": math.inf, "max_retry": 1, "retry_type": "reset", "retry_waiting_time": 0.1, "auto_reset": True,
    "step_timeout": None, "reset_timeout": None, "connect_timeout": 60, "wait_num": 2, "step_wait_timeout": 0.01,
    "reset_inplace": False, "shared_memory": True, "copy_on_get": True, "context": None,
}  # fmt: skip


def test_names_defaults_and_states_are_those_of_di_engine():
    assert dataclasses.asdict(AsyncSubprocessEnvManager.default_config()) == DEFAULTS
    synchronous = {**DEFAULTS, "wait_num": math.inf, "step_wait_timeout": None}
    assert dataclasses.asdict(SyncSubprocessEnvManager.default_config()) == synchronous
    assert dataclasses.asdict(StackedSubprocessEnvManager.default_config()) == synchronous
    names = ["VOID", "INIT", "RUN", "RESET", "DONE", "ERROR", "NEED_RESET"]
    assert [(state.name, int(state)) for state in EnvState] == [(name, place) for place, name in enumerate(names)]


def test_unknown_options_are_refused_and_a_near_miss_is_told():
    for cfg in ({"wait_nums": 3}, {"cfg_types": "X"}, {3: 4}):
        with pytest.raises(UsageError, match="is no option"):
            AsyncSubprocessEnvManager([CounterEnv], cfg)
    with pytest.raises(TypeError, match="Did you mean episode_num="):
        AsyncSubprocessEnvManager([CounterEnv], episodes_num=3)


WRONG = {
    "episode_num": [0, 1.5, math.nan], "max_retry": [math.inf, 0], "retry_type": ["again"],
    "retry_waiting_time": [-1, None], "step_timeout": [0], "reset_timeout": [math.inf], "connect_timeout": ["1"],
    "wait_num": [0, True], "step_wait_timeout": [-0.1], "context": ["thread"],
}  # fmt: skip


def test_options_that_make_no_sense_are_refused():
    for options in [{name: value} for name, values in WRONG.items() for value in values]:
        with pytest.raises(UsageError):
            EnvManagerConfig(**options)
    with pytest.raises(UsageError):
        EnvManagerConfig(reset_inplace=True, auto_reset=False)


def test_config_dict_and_keywords_can_be_given_together():
    config = EnvManagerConfig(episode_num=3)
    both = AsyncSubprocessEnvManager([CounterEnv], config, wait_num=1).config
    assert both == EnvManagerConfig(episode_num=3, wait_num=1)
    cfg = {"cfg_type": "AsyncSubprocessEnvManagerDict", "type": "async_subprocess", "episode_num": 3}
    assert AsyncSubprocessEnvManager(env_fn=[CounterEnv], cfg=cfg).config == config
    with pytest.raises(TypeError):
        AsyncSubprocessEnvManager([CounterEnv], 3)


def test_a_timestep_is_gymnasiums_five_values_and_an_id():
    step = Timestep(3, "o", 1.0, False, True, {"a": 1})
    observation, reward, terminated, truncated, info = step
    assert (observation, reward, terminated, truncated, info) == tuple(step) == ("o", 1.0, False, True, {"a": 1})
    assert (step.env_id, step.obs, step.observation, step.done) == (3, "o", "o", True)
    assert not step._replace(truncated=False).done
    for copy in (step._replace(reward=1.0), pickle.loads(pickle.dumps(step))):
        assert (copy, type(copy), copy.env_id) == (step, Timestep, 3)
