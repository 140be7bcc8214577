"""Invariant 3, of the outcomes: exact is what was shown, a replay from a reset says what it is, and a memory that shows
is remembered."""

from __future__ import annotations

import logging
import math
import os
import signal
from functools import partial
from typing import Any

import numpy as np
import pytest
from faces import Face, assert_as_without_losses, counts
from invariant_envs import CountsResets, with_thread

from kit import CounterEnv, ForkingPolicy, MemoryEnv, kill_worker
from kit.limits import set_limit
from kit.monitor import monitor_pid
from kit.replays import prefer_resets
from multienv import (
    Recovery,
    Recycled,
    RestartPolicy,
    SubprocessEnv,
    flat_statistics,
)
from multienv.errors import NotRestoredError

NO_SNAPSHOTS = {"snapshots": False, "backoff": 0.0}


@pytest.fixture
def dear(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_resets(monkeypatch)


class Play:
    """Walks through an env beside a bare one.

    Attributes:
        events: All that the hooks were told.
        differs: The first step that was not as the bare env's; ``None``: all were.
    """

    def __init__(self, env_fn: Any, seed: int = 3, **options: Any) -> None:
        self.events: list[Any] = []
        self.env = SubprocessEnv(env_fn, hooks=[self.events.append], **options)
        self.twin, self.differs = env_fn(), None
        self.steps = 0
        self.truncated: list[str] = []
        self.env.initialize()
        self.env.reset(seed=seed)
        self.twin.reset(seed=seed)

    def walk(self, steps: int, *, kills: Any = (), victims: Any = lambda pid: [pid]) -> Play:
        for _ in range(steps):
            if self.steps in kills:
                for victim in victims(self.env.statistics().pid):
                    assert victim, "there is no worker to kill"
                    os.kill(victim, signal.SIGKILL)
            self.steps += 1
            one, other = self.env.step(self.steps % 4), self.twin.step(self.steps % 4)
            reason = one[4].get("multienv", {}).get("reason")
            if reason:
                self.truncated.append(reason)
            elif self.differs is None and not (np.array_equal(one[0], other[0]) and one[1:4] == other[1:4]):
                self.differs = self.steps
            if one[2] or one[3]:
                self.env.reset()
            if other[2] or other[3] or reason:
                self.twin.reset()
        return self

    def close(self) -> Play:
        self.env.close()
        return self

    def outcomes(self, kind: type = Recovery) -> list[str]:
        return [event.outcome for event in self.events if isinstance(event, kind)]


# --- replayed, and what a user may say of it ------------------------------------------------------------


def test_replay_from_a_reset_counts_as_replayed_and_says_so_everywhere(dear: None, caplog: Any) -> None:
    play = Play(partial(MemoryEnv, shows_after=60), restart=RestartPolicy(**NO_SNAPSHOTS))
    play.walk(45, kills=[41])
    (recovery,) = [event for event in play.events if isinstance(event, Recovery)]
    assert (recovery.outcome, recovery.method) == ("replayed", "journal")
    assert "remembers something from before the reset" in recovery.reason
    statistics = play.env.statistics()
    assert (statistics.exact_recoveries, statistics.replayed_recoveries, statistics.truncated_recoveries) == (0, 1, 0)
    assert flat_statistics(statistics)["replayed_recoveries"] == 1
    assert "Outcome: replayed, from the journal" in caplog.text
    assert play.differs is None
    assert play.walk(40).close().differs == 60, "what it remembers was lost, as the outcome says"


def test_a_user_who_accepts_exact_recoveries_alone_gets_a_truncation_instead(dear: None) -> None:
    # The construction soon lies too far back.
    policy = RestartPolicy(accept="exact", journal_limit=3000, **NO_SNAPSHOTS)
    play = Play(MemoryEnv, restart=policy).walk(90, kills=[85]).close()
    assert play.outcomes() == ["truncated"]
    assert "RestartPolicy(accept='exact')" in play.truncated[0]


def test_accepting_exact_recoveries_alone_changes_nothing_where_the_construction_is_known(dear: None) -> None:
    play = Play(partial(MemoryEnv, 20), restart=RestartPolicy(accept="exact", **NO_SNAPSHOTS))
    play.walk(80, kills=[23, 24, 61]).close()
    assert (play.outcomes(), play.differs) == (["exact"] * 3, None)


def test_replay_of_an_env_that_begins_anew_is_short_and_counts_as_replayed(dear: None) -> None:
    play = Play(partial(CounterEnv, horizon=5, count_episodes=False), restart=RestartPolicy(**NO_SNAPSHOTS))
    play.walk(100, kills=[31, 77]).close()
    assert (play.outcomes(), play.differs) == (["replayed"] * 2, None)
    assert max(event.replayed for event in play.events if isinstance(event, Recovery)) <= 12, "not the shortest replay"


@pytest.mark.parametrize("kind", ["subprocess_env", "vector_env"])
def test_start_is_proven_by_a_whole_episode(kind: str, dear: None) -> None:
    """In an episode that has lasted for long, the replay begins with the one before."""
    restart = RestartPolicy(snapshots=False, journal_limit=2**20, replay_limit=10.0)
    events: list[Any] = []
    with Face(kind, [partial(MemoryEnv, horizon=700)] * 2, restart=restart, hooks=[events.append]) as face:
        face.record(counts(1351, 2), 1, lambda step: face.signal() if step == 1350 else None)
    (recovery,) = [event for event in events if isinstance(event, Recovery)]
    assert recovery.outcome == "exact"
    assert recovery.replayed > 1300


# --- where exact can be had, it is had ------------------------------------------------------------------


def test_deaths_of_an_env_that_can_be_forked_are_exact_in_any_run(dear: None) -> None:
    """Many episodes begin between two snapshots, and what it remembers shows at once."""
    play = Play(partial(MemoryEnv, 1), restart=ForkingPolicy(snapshot_every=40, backoff=0.0))
    play.walk(420, kills=[7, 8, 55, *range(200, 420, 13)]).close()
    assert (set(play.outcomes()), play.differs) == ({"exact"}, None)
    assert len(play.outcomes()) == 20


def test_deaths_however_soon_after_each_other_are_exact(dear: None) -> None:
    """Each recovered worker is killed before the call that recovered it returns, and once more while it waits."""
    play = Play(partial(MemoryEnv, 1), restart=ForkingPolicy(snapshot_every=25, backoff=0.0))
    left = [6]

    def strike(event: Any) -> None:
        if isinstance(event, Recovery) and left[0]:
            left[0] -= 1
            kill_worker(play.env)

    play.env._supervisor.reporter._hooks += (strike,)
    play.walk(180, kills=[*range(60, 180, 50)]).close()
    assert (set(play.outcomes()), play.differs, left) == ({"exact"}, None, [0])
    assert len(play.outcomes()) == 6 + 3


def test_replay_that_strays_is_tried_from_the_construction(dear: None, caplog: Any) -> None:
    play = Play(partial(MemoryEnv, 20), restart=RestartPolicy(**NO_SNAPSHOTS))
    play.walk(80, kills=[61]).close()
    assert (play.outcomes(), play.differs) == (["exact"], None)
    assert caplog.text.count("carries memory across resets") == 1


def test_env_that_cannot_be_forked_is_replayed_from_its_construction_while_that_is_affordable() -> None:
    play = Play(partial(with_thread, 1), restart=RestartPolicy(backoff=0.0))
    play.walk(400, kills=range(90, 400, 60)).close()
    assert (set(play.outcomes()), play.differs) == ({"exact"}, None)


def test_loss_of_worker_and_snapshot_is_replayed_or_truncated_and_never_called_exact(dear: None) -> None:
    for shows_after, expected in ((math.inf, "replayed"), (90, "replayed"), (20, "truncated")):
        play = Play(partial(MemoryEnv, shows_after), restart=ForkingPolicy(snapshot_every=10, backoff=0.0))
        play.walk(120, kills=[61], victims=lambda pid: [pid, monitor_pid()]).close()
        assert play.outcomes() == [expected], shows_after
        assert (play.differs is None) == (shows_after == math.inf) or expected == "truncated"


@pytest.mark.parametrize("horizons", [(None,), (None, None), (5, None)], ids=["alone", "two", "one of two"])
def test_worker_and_snapshot_lost_in_the_first_episode_of_an_env_are_replayed_from_the_construction(
    horizons: Any, dear: None
) -> None:
    """Though that took longer than is affordable: there is no other way back for the env whose first episode goes on."""
    events: list[Any] = []
    env_fns = [partial(MemoryEnv, 20, horizon) for horizon in horizons]
    kind = "vector_env" if len(horizons) > 1 else "subprocess_env"
    options: dict[str, Any] = {"restart": ForkingPolicy(snapshot_every=10, backoff=0.0), "hooks": [events.append]}

    def strike(step: int) -> None:
        if step == 140:
            assert face.statistics()[0].no_snapshots == ""
            os.kill(monitor_pid(), signal.SIGKILL)  # the kernel kills its workers, and their snapshots end

    with Face(kind, env_fns, **options) as face:
        actions = counts(150, 2)
        records = face.record(actions, 1, strike)
        (recovery,) = [event for event in events if isinstance(event, Recovery)]
        assert (recovery.outcome, recovery.method) == ("exact", "journal")
        assert_as_without_losses(face, records, actions, 1)


@pytest.mark.parametrize("kind", ["subprocess_env", "vector_env"])
def test_replay_from_the_construction_repeats_resets_that_raised(kind: str) -> None:
    with Face(kind, [CountsResets] * 2, restart=RestartPolicy(accept="exact", snapshots=False)) as face:
        with pytest.raises(ValueError, match="no such map"):
            face.envs.reset(options={"bad": 1})
        records = face.record(counts(15, 2), 1, lambda step: face.signal() if step == 5 else None)
        assert [(record[-1].ended, record[-1].reward) for record in records] == [(True, 2.0)] * face.num_envs
        assert face.statistics()[0].exact_recoveries == 1


def test_replay_from_the_construction_that_has_forgotten_an_attribute_set_there_is_not_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attribute was repeated in the process that has replaced the first one, and shows only later."""
    set_limit(monkeypatch, "MOST_CALLS", 3)
    set_limit(monkeypatch, "LARGE_SHARE", math.inf)  # every reset is told of
    play = Play(MemoryEnv, restart=RestartPolicy(recycle_after_steps=20, **NO_SNAPSHOTS))
    play.env.set_attr("shows_after", 60)
    play.walk(22)
    assert play.outcomes(Recycled) == ["reset"]
    for _ in range(5):
        play.env.call("poke", 0.0)
    play.walk(16, kills=[37]).close()
    assert play.outcomes() == ["replayed"]


@pytest.mark.parametrize("accept", ["replayed", "exact"])
def test_kept_snapshot_that_is_gone_is_replayed_from_a_reset_with_a_warning_or_refused(
    accept: Any, dear: None, caplog: Any
) -> None:
    limit = 3000 if accept == "exact" else 2**18  # the construction lies too far back: nothing else takes its place
    restart = ForkingPolicy(accept=accept, snapshot_every=10, journal_limit=limit, backoff=0.0)
    play = Play(MemoryEnv, restart=restart).walk(60)
    token = play.env.snapshot()
    os.kill(monitor_pid(), signal.SIGKILL)
    if accept == "exact":
        with pytest.raises(NotRestoredError, match="accept='exact'"):
            play.env.restore(token)
    else:
        play.env.restore(token)
        assert "restored by a replay from a reset" in caplog.text
    play.close()


# --- a memory that shows is remembered ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["multi_env", "vector_env"])
def test_memory_that_has_shown_in_one_worker_is_known_to_all_of_its_batch(kind: str, dear: None, caplog: Any) -> None:
    events: list[Any] = []
    env_fns = [partial(MemoryEnv, shows_after) for shows_after in (20, math.inf)]
    options: dict[str, Any] = {"restart": RestartPolicy(**NO_SNAPSHOTS), "hooks": [events.append]}
    victims = {30: 1, 60: 0, 75: 0, 90: 1}
    with Face(kind, env_fns, "NEXT_STEP", envs_per_worker=1, **options) as face:
        face.reset(seed=1)
        for step in range(120):
            if step in victims:
                face.signal(worker=victims[step])
            face.step([0, 0])
    told = [event for event in events if isinstance(event, Recovery)]
    outcomes = [(event.loss.envs[0], event.outcome) for event in told]
    assert outcomes[0] == (1, "replayed"), "from a reset"
    assert outcomes[1] == (0, "exact"), "not from a reset, which strays, but from the construction"
    assert outcomes[3] == (1, "replayed")
    assert "remembers something" in told[0].reason
    assert "This env carries memory across resets" in told[3].reason
    warnings = [one for one in caplog.records if "From now on" in one.getMessage()]
    assert [one.levelno for one in warnings] == [logging.WARNING]
    assert "env 0" in warnings[0].getMessage()


def test_truncation_says_that_a_known_memory_is_lost(dear: None) -> None:
    """No replay from a reset leads back, and the construction lies too far back."""
    play = Play(partial(MemoryEnv, 20), restart=RestartPolicy(journal_limit=3000, **NO_SNAPSHOTS))
    play.walk(90, kills=[85]).close()
    assert play.outcomes() == ["truncated"]
    assert play.truncated[0].endswith(". What the env remembered from earlier episodes is lost.")


def test_recycling_of_an_env_with_a_memory_waits_for_a_reset(dear: None, caplog: Any) -> None:
    play = Play(partial(MemoryEnv, 20, horizon=200), restart=RestartPolicy(recycle_after_steps=64, **NO_SNAPSHOTS))
    while "carries memory across resets" not in caplog.text:  # the construction is tried next, and leads back
        play.walk(1)
    assert set(play.outcomes(Recycled)) <= {"exact"}
    assert play.differs is None
    before = len(play.outcomes(Recycled))
    play.walk(300).close()
    assert set(play.outcomes(Recycled)[before:]) == {"put off", "reset"}


def test_a_memory_that_recycling_loses_between_two_episodes_is_told_once_for_a_batch(dear: None, caplog: Any) -> None:
    events: list[Any] = []
    options: dict[str, Any] = {"restart": RestartPolicy(recycle_after_steps=64, **NO_SNAPSHOTS)}
    with Face(
        "vector_env", [partial(MemoryEnv, 20, 50)] * 2, "NEXT_STEP", envs_per_worker=1, hooks=[events.append], **options
    ) as face:
        face.reset(seed=1)
        for _ in range(1000):
            face.step([0, 0])
    resets = [event for event in events if isinstance(event, Recycled) and event.outcome == "reset"]
    told = [one for one in resets if one.reason]
    assert told == resets[-len(told) :], "from the first replay that differs on"
    assert {one.env_index for one in told} == {0, 1}
    assert {one.reason for one in told} == {"What the env remembered from earlier episodes is lost."}
    warnings = [one for one in caplog.records if "accept='exact'" in one.getMessage() and "is lost" in one.getMessage()]
    assert [one.levelno for one in warnings] == [logging.WARNING]


@pytest.mark.parametrize("is_short", [False, True])
def test_recycling_never_loses_a_memory_if_exact_recoveries_alone_are_accepted(
    is_short: bool, dear: None, caplog: Any
) -> None:
    """If the construction lies too far back, the process goes on."""
    limits: dict[str, Any] = {"journal_limit": 3000} if is_short else {}
    restart = RestartPolicy(accept="exact", recycle_after_steps=70, **limits, **NO_SNAPSHOTS)
    play = Play(partial(MemoryEnv, 20), restart=restart).walk(600).close()
    assert play.differs is None
    outcomes = play.outcomes(Recycled)
    if is_short:
        assert set(outcomes) == {"put off"}
        assert len(outcomes) <= 7, "each time after twice as many episodes"
        assert "recycle_after_episodes" in caplog.text
    else:
        assert set(outcomes) == {"exact"}


def test_new_envs_after_some_episodes_are_had_whichever_recoveries_are_accepted(dear: None) -> None:
    restart = RestartPolicy(accept="exact", recycle_after_episodes=10, **NO_SNAPSHOTS)
    play = Play(MemoryEnv, restart=restart).walk(120).close()
    assert set(play.outcomes(Recycled)) == {"reset"}
