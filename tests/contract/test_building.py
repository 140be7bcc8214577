"""env_fn: how it travels, what may be wrong with it, and that a failed build leaves nothing behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from functools import partial
from typing import Any

import gymnasium
import pytest
from contract_envs import (
    EndlessFailure,
    LicensedEnv,
    exit_at_build,
    raise_at_build,
    return_a_lock_as_metadata,
    return_none,
)

from kit import CounterEnv, FailsNthTime, OnlyEnv, SpaceEnv, kill_worker, no_leaks
from kit.makers import manager, multi_env, one_each
from multienv import (
    Deadlines,
    MultiEnv,
    RestartPolicy,
    SerialEnv,
    SerialVectorEnv,
    SubprocessEnv,
    SubprocessVectorEnv,
    create_subprocess_envs,
    make_vec,
)
from multienv.cli.env_functions import named
from multienv.errors import (
    EnvError,
    EnvsFailedError,
    ResultNotPicklableError,
    UsageError,
    WorkerLostError,
)
from multienv.testing import worker_pids

pytestmark = pytest.mark.usefixtures("monitor_stays")


class Builder:
    """A callable object."""

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon

    def __call__(self) -> CounterEnv:
        return CounterEnv(horizon=self.horizon)

    def build(self) -> CounterEnv:
        return self()


def local_class() -> type[CounterEnv]:
    class Local(CounterEnv):
        def __init__(self) -> None:
            super().__init__(horizon=7)

    return Local


def test_any_callable_will_do():
    horizon = 7
    built = [
        lambda: CounterEnv(horizon=horizon),
        partial(CounterEnv, horizon=7),
        Builder(7),
        Builder(7).build,
        local_class(),
    ]
    for context, chosen in (("forkserver", built), (multiprocessing.get_context("spawn"), built[::4])):
        envs = create_subprocess_envs(chosen, context=context)
        assert [env.get_attr("horizon") for env in envs] == [7] * len(chosen)
        for env in envs:
            env.close()


def test_what_cannot_be_pickled_is_refused_at_once_and_says_how_to_mend_it():
    lock = threading.Lock()
    with pytest.raises(UsageError, match="inside the function") as caught:
        SubprocessEnv(lambda: CounterEnv(horizon=1 if lock else 2))
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("context", ["forkserver", "serial"])
def test_an_env_fn_that_raises(context):
    env: Any = SerialEnv(raise_at_build) if context == "serial" else SubprocessEnv(raise_at_build, context=context)
    with pytest.raises(EndlessFailure, match="knee broke") as caught:
        env.initialize()
    error = caught.value
    assert isinstance(error, EnvError)
    assert (error.command, error.code, error.joint) == ("initialize", 7, "knee")
    assert "raise_at_build" in error.remote_traceback
    assert type(error.__cause__) is EndlessFailure
    printed = "".join(traceback.format_exception(error.__cause__))
    assert ("raise_at_build" in printed, "worker/host.py" in printed) == (True, False)
    with pytest.raises(UsageError):
        env.reset()
    with pytest.raises(EndlessFailure):
        env.initialize()
    env.close()
    with pytest.raises(UsageError, match="closed"):
        env.initialize()


def test_an_env_that_cannot_be_described_is_named():
    env = SubprocessEnv(return_a_lock_as_metadata)
    with pytest.raises(ResultNotPicklableError, match="metadata.*lock"):
        env.initialize()
    env.close()


# --- several ------------------------------------------------------------------------------------


def test_every_cause_is_told_and_the_others_are_closed():
    fns = [CounterEnv, raise_at_build, return_none, CounterEnv, exit_at_build]
    with pytest.raises(EnvsFailedError) as caught:
        create_subprocess_envs(fns, restart=RestartPolicy(backoff=0.0))
    failures = caught.value.failures
    assert {index: type(error.__cause__ or error) for index, error in failures.items()} == {
        1: EndlessFailure,
        2: TypeError,
        4: WorkerLostError,
    }
    assert [error.env_index for error in failures.values()] == [1, 2, 4]
    for text in ("3 of 5 envs", "env 1", "knee broke", "env 2", "not a gymnasium.Env", "env 4", "code 5"):
        assert text in str(caught.value)
    assert not isinstance(caught.value, EndlessFailure), "there is more than one cause"
    assert [result is None for result in caught.value.results] == [False, True, True, False, True]
    for env in caught.value.results:
        assert env is None or env.statistics().state == "closed"


@pytest.mark.parametrize("segfaults", [False, True])
def test_envs_of_which_a_process_can_hold_only_one_get_one_each(segfaults, caplog):
    env_fn = partial(OnlyEnv, segfaults=segfaults)
    with SubprocessVectorEnv([env_fn] * 4, restart=RestartPolicy(backoff=0.0)) as envs:
        assert envs.envs_per_worker == [1] * 4
        assert envs.reset(seed=3)[0].shape == (4, 4)
        assert len(worker_pids(envs)) == 4
    told = [record.message for record in caplog.records if "envs_per_worker=1" in record.message]
    assert len(told) == 1
    for refused in ({"envs_per_worker": 2}, {"max_concurrency": 2}):
        with pytest.raises(EnvsFailedError, match="envs? 1"):
            SubprocessVectorEnv([env_fn] * 4, restart=RestartPolicy(backoff=0.0), **refused)


# --- MultiEnv over what it is given -------------------------------------------------------------


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_spaces_that_differ_are_refused_and_named(name):
    small, large = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Box(-1, 1, (3,))
    envs = [SubprocessEnv(partial(SpaceEnv, **{name: space})) for space in (small, small, large)]
    with pytest.raises(UsageError, match=f"env 2 has {name}"):
        MultiEnv(envs)
    for env in envs:
        env.close()


# --- the index of the env -----------------------------------------------------------------------


class Numbered:
    """Builds an env that has the number as its horizon."""

    def build(self, number: int, lower: int = 10) -> CounterEnv:
        return CounterEnv(horizon=lower + number)


NUMBERED: list[Any] = [
    lambda index: CounterEnv(horizon=10 + index),
    Numbered().build,
    partial(Numbered().build, lower=10),
]


def horizons(envs: Any) -> list[int]:
    with contextlib.closing(envs):
        return list(envs.get_attr("horizon"))


def test_a_function_that_needs_an_argument_gets_the_index_of_its_env():
    assert horizons(MultiEnv(create_subprocess_envs(NUMBERED))) == [10, 11, 12]
    assert horizons(SubprocessVectorEnv(NUMBERED, envs_per_worker=2)) == [10, 11, 12]
    assert horizons(SerialVectorEnv(NUMBERED)) == [10, 11, 12]
    assert horizons(manager(NUMBERED)) == [10, 11, 12]
    for kind in (SubprocessEnv, SerialEnv):
        for index, expected in ((None, 10), (4, 14)):
            assert horizons_of_one(kind(NUMBERED[0], env_index=index)) == expected


def horizons_of_one(env: Any) -> int:
    with env:
        env.initialize()
        return int(env.get_attr("horizon"))


def test_a_replacement_gets_the_same_index():
    with SubprocessVectorEnv(NUMBERED, envs_per_worker=1, restart=RestartPolicy(snapshots=False)) as envs:
        envs.reset(seed=0)
        for pid in worker_pids(envs):
            os.kill(pid, signal.SIGKILL)
        assert list(envs.get_attr("horizon")) == [10, 11, 12]


def test_the_command_line_builds_the_first_of_them():
    assert named("contract_envs:numbered").env_fn().horizon == 10  # type: ignore[attr-defined]


@pytest.mark.parametrize("vectorization", ["subprocess", "serial"])
def test_make_vec_gives_the_index_too(vectorization):
    make = partial(make_vec, num_envs=2, vectorization=vectorization)
    assert horizons(make(NUMBERED[0])) == [10, 11]
    assert horizons(make(Numbered().build, lower=20)) == [20, 21]
    assert horizons(make(NUMBERED[0], wrappers=[gymnasium.wrappers.RecordEpisodeStatistics])) == [10, 11]
    with pytest.raises(UsageError, match="needs the arguments number, more"):
        make(lambda number, more, lower: None, lower=20, wrappers=[Numbered])


@pytest.mark.parametrize("function", [lambda first, second: CounterEnv(), lambda *, first: CounterEnv()])
def test_a_function_that_needs_more_is_refused(function):
    for make in (SubprocessEnv, SerialEnv, lambda one: SerialVectorEnv([one]), lambda one: make_vec(one, 2)):
        with no_leaks(), pytest.raises(UsageError, match="needs the arguments first.*only the index"):
            make(function)


# --- so many at a time --------------------------------------------------------------------------


def envs_that_are_built_by_a_multi_env(env_fns: Any, **options: Any) -> Any:
    return MultiEnv([SubprocessEnv(env_fn, **options) for env_fn in env_fns])


@pytest.mark.parametrize(
    ("make", "most"), [(one_each, 2), (multi_env, 1), (envs_that_are_built_by_a_multi_env, 1), (manager, 1)]
)
def test_no_more_workers_build_at_a_time_than_may(make, most, tmp_path):
    restart = RestartPolicy(snapshots=False, backoff=0.0)
    with contextlib.closing(make([partial(LicensedEnv, tmp_path)] * 4, starts_at_once=most, restart=restart)) as envs:
        assert all(1 <= held <= most for held in envs.get_attr("held"))
        for pid in worker_pids(envs):
            os.kill(pid, signal.SIGKILL)
        assert all(1 <= held <= most for held in envs.get_attr("held")), "replacements wait, too"
        assert [one.restarts for one in envs.statistics()] == [1] * 4


def test_those_that_wait_for_their_turn_are_let_go_of_when_one_hangs(tmp_path):
    hung = partial(time.sleep, 600)
    with no_leaks(), pytest.raises(EnvsFailedError) as caught:
        deadlines, restart = Deadlines(start=1.0), RestartPolicy(on_timeout="raise")
        one_each([hung, CounterEnv], starts_at_once=1, deadlines=deadlines, restart=restart)
    assert list(caught.value.failures) == [0]


def test_env_fn_that_raised_for_all_of_the_recovery_is_called_once_by_the_next_reset(tmp_path):
    built = tmp_path / "built"
    env_fn = FailsNthTime(counter=str(built), nth=range(2, 1000))
    options = {"restart": RestartPolicy(snapshots=False, backoff=0.0), "deadlines": Deadlines(recovery=4.0)}
    with SubprocessEnv(env_fn, **options) as env:  # type: ignore[arg-type]
        env.reset(seed=0)
        kill_worker(env)
        assert env.step(0)[3]
        for _ in range(2):
            calls, began = built.stat().st_size, time.monotonic()
            with pytest.raises(EnvError):
                env.reset(seed=0)
            assert time.monotonic() - began < 3.5
            assert built.stat().st_size == calls + 1
        built.write_bytes(bytes(1000))
        env.reset(seed=0)
        assert env.step(1)[0][0] == 1


def test_env_fn_that_raises_when_a_lost_env_is_built_anew_is_told_with_its_cause(tmp_path):
    built = tmp_path / "built"
    env_fn = FailsNthTime(counter=str(built), nth=range(2, 1000))
    with SubprocessEnv(env_fn, restart=RestartPolicy(on_crash="raise"), deadlines=Deadlines(recovery=4.0)) as env:
        env.reset(seed=0)
        kill_worker(env)
        with pytest.raises(WorkerLostError):
            env.step(0)
        with pytest.raises(EnvError) as caught:
            env.reset(seed=0)
        assert type(caught.value.__cause__) in type(caught.value).__mro__
        assert built.stat().st_size > 2, "not tried again"
        built.write_bytes(bytes(1000))
        env.reset(seed=0)
        assert env.step(1)[0][0] == 1
