"""Options: what is not a sensible value is refused where it is written, by name."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest

from kit import CounterEnv
from multienv import Deadlines, RestartPolicy, SerialEnv, SubprocessEnv
from multienv.config import check_seconds
from multienv.errors import UsageError

NOT_SECONDS = [
    math.nan,
    math.inf,
    -math.inf,
    -1.0,
    -1e-9,
    True,
    False,
    "1",
    b"1",
    1j,
    [1.0],
    (),
    object(),
    2e15,
    10**400,
]
DEADLINES = [field.name for field in dataclasses.fields(Deadlines)]
DURATIONS = ["window", "backoff", "max_backoff", "replay_limit"]
_ON_LOSS = "'replay', 'truncate', 'raise'"
REACTIONS = {"on_crash": _ON_LOSS, "on_timeout": _ON_LOSS, "on_error": "'raise', 'truncate'"}
COUNTS = {"max_restarts": 0, "poison_after": 1, "journal_limit": 0, "max_snapshots": 0}


@pytest.mark.parametrize("value", NOT_SECONDS, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("name", DEADLINES)
def test_deadlines_refuse_what_is_no_number_of_seconds(name, value):
    with pytest.raises(UsageError, match=f"Deadlines.{name} "):
        Deadlines(**{name: value})


@pytest.mark.parametrize("name", DEADLINES)
def test_deadlines_are_positive(name):
    with pytest.raises(UsageError, match=name):
        Deadlines(**{name: 0})
    for value in (1, 0.001, np.float32(1), np.int64(1), Fraction(1, 2), 1e15):
        assert getattr(Deadlines(**{name: value}), name) == value


@pytest.mark.parametrize("name", DEADLINES)
def test_every_deadline_but_that_of_close_may_be_left_open(name):
    if name == "close":
        with pytest.raises(UsageError, match="close"):
            Deadlines(close=None)
    else:
        assert getattr(Deadlines(**{name: None}), name) is None


@pytest.mark.parametrize("value", [*NOT_SECONDS, None], ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("name", DURATIONS)
def test_policies_refuse_what_is_no_number_of_seconds(name, value):
    with pytest.raises(UsageError, match=f"RestartPolicy.{name} "):
        RestartPolicy(**{name: value})


@pytest.mark.parametrize("name", DURATIONS)
def test_all_durations_but_the_window_may_be_zero(name):
    if name == "window":
        with pytest.raises(UsageError, match="window"):
            RestartPolicy(window=0)
    else:
        assert getattr(RestartPolicy(**{name: 0}), name) == 0


@pytest.mark.parametrize("value", ["Replay", "", None, True, 1, "retry", ["replay"]])
@pytest.mark.parametrize("name", REACTIONS)
def test_policies_refuse_unknown_reactions_and_name_the_known(name, value):
    with pytest.raises(UsageError, match=f"RestartPolicy.{name}.*{REACTIONS[name]}"):
        RestartPolicy(**{name: value})


def test_an_exception_of_the_env_is_raised_or_truncates_and_is_never_replayed():
    assert RestartPolicy(on_error="truncate").on_error == "truncate"
    with pytest.raises(UsageError, match="on_error is 'replay'"):
        RestartPolicy(on_error="replay")


@pytest.mark.parametrize("name", ["recycle_after_steps", "recycle_after_episodes", "recycle_after", "max_rss"])
@pytest.mark.parametrize("value", [0, -1, math.nan, "many", True])
def test_limits_of_a_process_are_positive_or_none(name, value):
    assert getattr(RestartPolicy(**{name: None}), name) is None
    with pytest.raises(UsageError, match=name):
        RestartPolicy(**{name: value})


@pytest.mark.parametrize(
    ("crash", "timeout", "replays"),
    [("replay", "raise", True), ("truncate", "replay", True), ("raise", "truncate", False)],
)
def test_a_policy_replays_if_any_loss_is_to_be_made_good(crash, timeout, replays):
    assert RestartPolicy(on_crash=crash, on_timeout=timeout).replays == replays


@pytest.mark.parametrize("value", [True, False, 1.0, 1.5, math.nan, "1", None, -1])
@pytest.mark.parametrize("name", COUNTS)
def test_policies_refuse_what_is_no_count(name, value):
    with pytest.raises(UsageError, match=f"RestartPolicy.{name} "):
        RestartPolicy(**{name: value})


@pytest.mark.parametrize(("name", "least"), COUNTS.items())
def test_counts_have_a_least_value(name, least):
    assert getattr(RestartPolicy(**{name: least}), name) == least
    assert getattr(RestartPolicy(**{name: np.int64(5)}), name) == 5
    with pytest.raises(UsageError, match=name):
        RestartPolicy(**{name: least - 1})


@pytest.mark.parametrize("config", [Deadlines, RestartPolicy])
def test_options_are_named_known_frozen_and_comparable(config):
    with pytest.raises(UsageError, match="say which it is"):
        config(1.0)
    with pytest.raises(TypeError):
        config(on_fire="run")
    assert pickle.loads(pickle.dumps(config())) == copy.copy(config()) == config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config(), dataclasses.fields(config)[0].name, 1)
    assert config() == config()
    assert hash(config()) == hash(config())


@pytest.mark.parametrize("value", [0, 0.0])
def test_zero_seconds_where_they_are_allowed(value):
    check_seconds("timeout", value, zero=True)
    with pytest.raises(UsageError, match="timeout"):
        check_seconds("timeout", value)


@pytest.mark.parametrize(
    "options",
    [{"restart": Deadlines()}, {"restart": None}, {"restart": "replay"}, {"deadlines": RestartPolicy()}, {"deadlines": 5.0},
     {"deadlines": None}, {"context": "thread"}, {"context": 7}],
    ids=repr,
)  # fmt: skip
def test_an_env_refuses_options_of_the_wrong_kind(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        SubprocessEnv(CounterEnv, **options)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "1"])
def test_a_number_of_native_threads_is_one(value):
    with pytest.raises(UsageError, match="native_threads"):
        SubprocessEnv(CounterEnv, native_threads=value)


@pytest.mark.parametrize("env_class", [SubprocessEnv, SerialEnv])
@pytest.mark.parametrize("env_fn", [None, 5, "CartPole-v1", CounterEnv()], ids=["None", "int", "id", "env"])
def test_an_env_fn_is_a_function(env_class, env_fn):
    with pytest.raises(UsageError, match="env_fn") as caught:
        env_class(env_fn)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("env_class", [SubprocessEnv, SerialEnv])
def test_options_are_keyword_only_and_known(env_class):
    with pytest.raises(TypeError):
        env_class(CounterEnv, RestartPolicy())
    with pytest.raises(TypeError):
        env_class(CounterEnv, sharedmemory=True)
