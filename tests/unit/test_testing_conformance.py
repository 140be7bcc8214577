"""The recovery check judges rightly: held against envs whose virtues and vices are known."""

from __future__ import annotations

import os
from functools import partial

import gymnasium
import pytest

from kit import CounterEnv, Fault, FaultyEnv, NondeterministicEnv
from multienv import RestartPolicy, SubprocessEnv
from multienv.testing import RecoveryCheck, check_env_recovers

Quiet = partial(SubprocessEnv, reports="")
Truncating = partial(Quiet, restart=RestartPolicy(on_crash="truncate"))
check_endless = partial(check_env_recovers, partial(CounterEnv, horizon=None), steps=30, seed=1)


class Dishonest(gymnasium.Wrapper):
    def statistics(self):
        return self.env.statistics()


class Splicing(Dishonest):
    """Goes on in another episode, and does not say so."""

    def __init__(self, env_fn):
        super().__init__(Truncating(env_fn))

    def step(self, action):
        result = self.env.step(action)
        if result[3]:
            self.env.reset()
            result = self.env.step(action)
        return result


class Drifting(Dishonest):
    """Goes on with a state that is not the one that was lost, which shows one step later than one would wish."""

    def __init__(self, env_fn):
        super().__init__(Quiet(env_fn))
        self.seen = 0

    def step(self, action):
        result = self.env.step(action)
        if self.statistics().restarts > self.seen:
            self.seen += 1
            self.env.call("poke", 1.0)
        return result


def test_an_exact_env_passes():
    check = check_env_recovers(CounterEnv, make_env=Quiet, steps=30, kills=4, seed=1)
    assert check == RecoveryCheck(asked=4, kills=4, steps=30, episodes=2, losses=4, exact=4)
    assert check.is_exact
    check.raise_if_inexact()
    check.raise_if_dishonest()


def test_a_truncating_env_is_honest_but_not_exact():
    check = check_endless(make_env=Truncating, kills=3)
    assert (check.kills, check.losses, check.exact, len(check.truncated)) == (3, 3, 0, 3)
    check.raise_if_dishonest()
    with pytest.raises(AssertionError, match="3 by truncation"):
        check.raise_if_inexact()


@pytest.mark.parametrize("env_class", [Splicing, Drifting])
def test_a_dishonest_env_is_found_out(env_class):
    check = check_endless(make_env=env_class, kills=3)
    assert len(check.mismatches) == 3
    assert not check.is_honest
    with pytest.raises(AssertionError, match="observation"):
        check.raise_if_dishonest()


class AlwaysAsked(SubprocessEnv):
    """Is not struck where its undisturbed twin dies: it is the twin that ends the comparison."""

    def __init__(self, env_fn):
        super().__init__(CounterEnv, reports="")


def test_an_env_that_crashes_by_itself_is_told_and_does_not_take_this_process_with_it():
    crashes = partial(FaultyEnv, fault=Fault("kill", "step", at=4, per="episode"))
    check = check_env_recovers(crashes, steps=9, kills=1, make_env=AlwaysAsked)
    assert check.is_honest
    assert len(check.truncated) == 2


def test_a_crash_of_the_env_itself_is_recovered_and_counted_apart_from_the_kills(tmp_path):
    for number, kills in enumerate((0, 3)):
        crashes = partial(FaultyEnv, fault=Fault("segv", "step", at=4, once=tmp_path / str(number)))
        check = check_env_recovers(crashes, steps=20, kills=kills, seed=1)
        assert (check.kills, check.own_losses) == (kills, 1)
        assert check.losses - kills in (0, 1)  # the undisturbed env may be the one that crashes
        check.raise_if_inexact()


def test_a_crash_of_an_undisturbed_env_ends_no_comparison(tmp_path):
    """The env in AlwaysAsked is another one, so that only its twin crashes."""
    crashes = partial(FaultyEnv, fault=Fault("segv", "step", at=4, once=tmp_path / "once"))
    check = check_env_recovers(crashes, steps=20, kills=2, seed=1, make_env=AlwaysAsked)
    assert (check.losses, check.own_losses, check.steps, check.truncated) == (2, 1, 20, ())
    check.raise_if_inexact()


def test_envs_killed_at_any_moment_until_the_last_kill():
    check = check_env_recovers(CounterEnv, num_envs=2, kills=3, interval=(0.0, 0.02), manners=("SIGKILL", "SIGSEGV"))
    assert check.kills == 3
    assert 1 <= check.exact == check.losses <= 3
    check.raise_if_inexact()


def test_an_env_that_is_not_deterministic_is_told_as_such_and_recovery_is_not_blamed():
    check = check_env_recovers(NondeterministicEnv, steps=10, kills=1)
    assert check.undisturbed
    assert not check.mismatches
    with pytest.raises(AssertionError, match="not deterministic: without any kill"):
        check.raise_if_dishonest()


def test_the_undisturbed_env_has_the_same_variables():
    def build():
        return CounterEnv(horizon=int(os.environ["HORIZON"]))

    check_env_recovers(build, steps=10, kills=1, worker_env={"HORIZON": "5"}).raise_if_inexact()
