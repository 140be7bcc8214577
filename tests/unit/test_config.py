"""Options: what is not a sensible value is refused where it is written, by name."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
import pydoc
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import multienv
from kit import CounterEnv
from multienv import Deadlines, RestartPolicy, SubprocessEnv
from multienv.errors import UsageError
from multienv.events import Loss, Recovery

NOT_SECONDS = [math.nan, math.inf, -1.0, True, "1", 1j, [1.0], object(), 2e15, 10**400]
NOT_COUNTS = [True, 1.0, math.nan, "1", -1]
DEADLINES = [field.name for field in dataclasses.fields(Deadlines)]
COUNTS = ("max_restarts", "journal_limit")
LIMITS = ("recycle_after_steps", "recycle_after_episodes", "max_rss")
ON_LOSS = "'replay', 'truncate', 'raise'"
WRONG: dict[str, list[Any]] = {
    **{name: [*NOT_SECONDS, None] for name in ("backoff", "replay_limit")},
    **{name: ["Replay", "", None, True, ["replay"]] for name in ("on_crash", "on_timeout")},
    "on_error": ["replay", "retry", None],
    **{name: [*NOT_COUNTS, None] for name in COUNTS},
    **{name: [0, -1, math.nan, "many", True] for name in LIMITS},
    "max_rss": [0, -1, math.nan, "2GiB", True, 100, 2_000, 2_000_000],  # MiB and KiB
}
RIGHT: dict[str, list[Any]] = {
    **{name: [0, 1.5, np.float32(1)] for name in ("backoff", "replay_limit")},
    "on_crash": ["replay", "truncate", "raise"],
    "on_error": ["truncate", "raise"],
    **{name: [0, np.int64(5)] for name in COUNTS},
    **{name: [None, 1] for name in LIMITS},
    "max_rss": [None, 100 * 2**20],
}


@pytest.mark.parametrize("name", WRONG)
def test_policies_refuse_what_makes_no_sense_by_name(name):
    for value in WRONG[name]:
        with pytest.raises(UsageError, match=f"RestartPolicy.{name} .*{ON_LOSS if name == 'on_crash' else ''}"):
            RestartPolicy(**{name: value})
    for value in RIGHT.get(name, []):
        assert getattr(RestartPolicy(**{name: value}), name) == value


def test_a_limit_of_memory_in_another_unit_than_bytes_is_refused_with_the_right_one():
    with pytest.raises(UsageError, match=r"max_rss is 100, and counts bytes.*max_rss=2 \* 2\*\*30 for 2 GiB"):
        RestartPolicy(max_rss=100)


@pytest.mark.parametrize("name", DEADLINES)
def test_deadlines_are_positive_seconds_and_all_but_that_of_close_may_be_left_open(name):
    for value in [*NOT_SECONDS, 0, *([None] if name == "close" else [])]:
        with pytest.raises(UsageError, match=f"Deadlines.{name} "):
            Deadlines(**{name: value})
    for value in [1, 0.001, np.float32(1), np.int64(1), Fraction(1, 2), 1e15, *([] if name == "close" else [None])]:
        assert getattr(Deadlines(**{name: value}), name) == value


@pytest.mark.parametrize("config", [Deadlines, RestartPolicy])
def test_options_are_named_known_frozen_and_comparable(config):
    for arguments, options in (((1.0,), {}), ((), {"on_fire": "run"})):
        with pytest.raises(TypeError):
            config(*arguments, **options)
    assert pickle.loads(pickle.dumps(config())) == copy.copy(config()) == config()
    assert hash(config()) == hash(config())
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config(), dataclasses.fields(config)[0].name, 1)


@pytest.mark.parametrize(
    ("name", "values"),
    [("restart", [Deadlines(), None, "replay"]), ("deadlines", [RestartPolicy(), 5.0, None]),
     ("context", ["thread", 7]), ("native_threads", [0, -1, True, 1.5, "1"]),
     ("preload", ["torch", None, 3, [b"torch"], {"torch"}]),
     ("worker_seed", [-1, 1.5, True, "1"]),
     ("starts_at_once", [0, -1, 1.5, True, "1"]),
     ("worker_env", [{"DEVICE": 1}, {1: "egl"}, {"": ""}, {"A=B": "C"}, {"A": "\0"},
                     lambda worker: {"DEVICE": worker}])],
)  # fmt: skip
def test_an_env_refuses_options_of_the_wrong_kind(name, values):
    for value in values:
        with pytest.raises(UsageError, match=name):
            SubprocessEnv(CounterEnv, **{name: value})


WORKER_OPTIONS = {
    *("restart", "deadlines", "context", "native_threads", "worker_env", "preload", "worker_seed", "starts_at_once"),
    *("hooks", "reports"),
}
BATCH_OPTIONS = {"shared_memory", "copy", "observation_mode", "autoreset_mode", "merge_infos"}


@pytest.mark.parametrize(
    ("function", "handed_on"),
    [
        (multienv.SubprocessEnv, WORKER_OPTIONS),
        (multienv.AsyncEnv, {*WORKER_OPTIONS, "env_index"}),
        (multienv.create_subprocess_envs, WORKER_OPTIONS),
        (multienv.SubprocessVectorEnv, WORKER_OPTIONS | BATCH_OPTIONS),
        (multienv.SerialVectorEnv, {*BATCH_OPTIONS, "hooks"}),
        (multienv.RayEnv, WORKER_OPTIONS),
        (multienv.create_ray_envs, WORKER_OPTIONS),
        (multienv.RayVectorEnv, WORKER_OPTIONS | BATCH_OPTIONS),
    ],
)
def test_help_shows_each_option_by_name_and_unknown_ones_are_refused_by_the_callers_own_name(function, handed_on):
    shown = inspect.signature(function).parameters
    assert handed_on <= set(shown)
    for name in handed_on:
        assert shown[name].default is not inspect.Parameter.empty
        assert re.search(rf"\b{name}\b", pydoc.render_doc(function, renderer=pydoc.plaintext))
    assert "options" not in shown
    with pytest.raises(TypeError, match=rf"{function.__name__}.*unexpected keyword argument 'share_memory'"):
        function([CounterEnv], share_memory=True)


def test_the_options_that_are_typed_and_described_are_those_that_are_taken():
    for described, names in ((multienv.WorkerOptions, WORKER_OPTIONS), (multienv.BatchOptions, BATCH_OPTIONS)):
        assert set(described.__annotations__) == names
        for name in names:
            assert re.search(rf"^ +{name}: ", described.__doc__ or "", re.MULTILINE)


def test_options_show_what_is_chosen_and_no_more():
    assert repr(RestartPolicy()) == "RestartPolicy()"
    policy = RestartPolicy(on_crash="raise", max_rss=10**9)
    assert repr(policy) == "RestartPolicy(on_crash='raise', max_rss=1000000000)"
    assert repr(Deadlines(step=None, close=5.0, start=1)) == "Deadlines(start=1, step=None)"


def test_a_recovery_is_shown_in_a_line_without_stacks_and_output():
    loss = Loss(0, "died", "step", 3, None, 7, stack="File 1\n" * 50, stderr="said\n" * 50)
    shown = repr(Recovery(loss, "exact", "", 1, 1, 0.1))
    assert "File 1" not in shown
    assert "said" not in shown
