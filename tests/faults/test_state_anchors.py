"""States of an env as anchors: a long episode goes on in a new process, without a fork, as if nothing had happened."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest
from gymnasium import wrappers
from interruption import Ledger, every_place
from trainer_process import becomes_true

from kit import CounterEnv, assert_no_splice, assert_same_trajectory, descendants, is_alive, rollout
from multienv import (
    Deadlines,
    MultiEnv,
    RestartPolicy,
    SubprocessEnv,
    SubprocessVectorEnv,
    create_subprocess_envs,
    register_state_hook,
)
from multienv.errors import NotRestoredError
from multienv.events import Event, Recovery
from multienv.recovery import policy as anchoring
from multienv.recovery.checkpoint import _digest_of
from multienv.worker import state_hooks

gymnasium.register_envs(ale_py)

EnvFn = Callable[[], gymnasium.Env[Any, Any]]
ENDLESS = partial(CounterEnv, horizon=None)
# The episode has long outgrown it when a worker is killed.
SMALL = RestartPolicy(snapshots=False, journal_limit=200_000)
STICKY = {"repeat_action_probability": 0.25}


class Rungs(list[str]):
    """A hook that keeps what recoveries were made of."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, Recovery):
            self.append(event.rung or event.outcome)


def pid_of(env: SubprocessEnv) -> int:
    return env.statistics().pid or 0


def kill(env: SubprocessEnv) -> None:
    os.kill(pid_of(env), signal.SIGKILL)


def outgrow(env: SubprocessEnv, steps: int = 6000) -> None:
    """Step until the journal no longer reaches back to the beginning, and there is a state with enough behind it."""
    for index in range(steps):
        env.step(np.int64(index % 4))
    assert not env._supervisor.journal.complete


# --- whatever has a state -------------------------------------------------------------------------


def cart_pole() -> gymnasium.Env[Any, Any]:
    env: Any = gymnasium.make("CartPole-v1", max_episode_steps=10**9)
    env.unwrapped.theta_threshold_radians = env.unwrapped.x_threshold = 1e9
    return env  # type: ignore[no-any-return]


def wrapped() -> gymnasium.Env[Any, Any]:
    env = wrappers.RecordEpisodeStatistics(cart_pole())
    return wrappers.TransformObservation(wrappers.FrameStackObservation(env, 3), lambda seen: seen * 2, None)


class OwnWord(CounterEnv):
    """Says itself what its state is, and could not be pickled."""

    def __init__(self, **counter: Any) -> None:
        super().__init__(**counter)
        self.endless = (number for number in [0])

    def get_state(self) -> Any:
        return self.episode_step, self.episode_number, self._running

    def set_state(self, state: Any) -> None:
        self.episode_step, self.episode_number, self._running = state


class Engine:
    """Stands for what holds its state in C: it cannot be pickled."""

    def __init__(self) -> None:
        self._lock = (number for number in [0])
        self.sum = 0


class Driven(CounterEnv):
    """Has an engine, made anew with each seeded reset."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self.engine = Engine()
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        engine = self.engine
        engine.sum = (engine.sum * 7 + int(action)) % 1009
        observation, *others = super().step(action)
        observation[3] = engine.sum
        return (observation, *others)


@pytest.fixture
def engine_hook() -> Iterator[None]:
    before = dict(state_hooks._registered)
    register_state_hook(Engine, lambda engine: engine.sum, lambda engine, state: setattr(engine, "sum", state))
    yield
    state_hooks._registered.clear()
    state_hooks._registered.update(before)
    state_hooks.hook_of.cache_clear()


# What builds it, bytes and seconds that the journal may take, and steps to go.
REAL: dict[str, tuple[EnvFn, int, float, int]] = {
    "endless": (ENDLESS, 200_000, 10.0, 12_000),
    "remembers more than an episode": (partial(CounterEnv, horizon=40), 200_000, 10.0, 12_000),
    "CartPole": (cart_pole, 200_000, 10.0, 10_000),
    "wrapped": (wrapped, 300_000, 10.0, 10_000),
    "Pong": (partial(gymnasium.make, "ALE/Pong-v5", **STICKY), 2**24, 0.4, 2500),
    "Breakout": (partial(gymnasium.make, "ALE/Breakout-v5", **STICKY), 2**24, 0.4, 2500),
    "HalfCheetah": (partial(gymnasium.make, "HalfCheetah-v5", max_episode_steps=10**6), 400_000, 10.0, 4500),
    "Humanoid": (
        partial(gymnasium.make, "Humanoid-v5", max_episode_steps=10**6, terminate_when_unhealthy=False),
        2**24,
        0.5,
        2500,
    ),
    "its own word": (partial(OwnWord, horizon=None), 200_000, 10.0, 12_000),
    "a registered type": (partial(Driven, horizon=None), 200_000, 10.0, 12_000),
}


QUICK = {"CartPole"}
ROWS = [
    pytest.param(rounds, name, marks=[] if rounds == 1 and name in QUICK else pytest.mark.soak)
    for name in REAL
    for rounds in (1, 10)
]


@pytest.mark.usefixtures("engine_hook")
@pytest.mark.parametrize(("rounds", "name"), ROWS)
def test_kills_leave_no_trace(name: str, rounds: int) -> None:
    env_fn, journal_limit, replay_limit, count = REAL[name]
    policy = RestartPolicy(snapshots=False, journal_limit=journal_limit, replay_limit=replay_limit)
    plain, rungs = env_fn(), Rungs()
    plain.action_space.seed(3)
    actions = [plain.action_space.sample() for _ in range(rounds * count)]
    expected = rollout(plain, actions, seed=5)
    moments = set(random.Random(5).sample(range(count // 2, len(actions)), 6 * rounds))
    with SubprocessEnv(env_fn, restart=policy, hooks=[rungs]) as env:
        seen = rollout(env, actions, seed=5, before_step=lambda step: step in moments and kill(env))
        statistics = env.statistics()
        assert env.get_attr("np_random").random() == plain.unwrapped.np_random.random()
    assert_same_trajectory(seen, expected)
    assert set(rungs) <= {"state", "journal"}
    assert rungs.count("state") >= 3 * rounds
    assert statistics.exact_recoveries == 6 * rounds
    assert statistics.state_anchors > 0
    assert statistics.no_state_anchors == ""


def test_with_another_start_method(engine_hook: None) -> None:
    rungs, expected = Rungs(), Driven(horizon=None)
    expected.reset(seed=1)
    with SubprocessEnv(partial(Driven, horizon=None), restart=SMALL, context="spawn", hooks=[rungs]) as env:
        env.reset(seed=1)
        outgrow(env)
        kill(env)
        for index in range(6000):
            expected.step(np.int64(index % 4))
        for _ in range(100):
            np.testing.assert_array_equal(env.step(np.int64(3))[0], expected.step(np.int64(3))[0])
    assert rungs == ["state"]


def test_a_hook_may_be_registered_where_the_env_is_built() -> None:
    def env_fn() -> Any:
        register_state_hook(Engine, lambda engine: engine.sum, lambda engine, state: setattr(engine, "sum", state))
        return Driven(horizon=None)

    rungs = Rungs()
    with SubprocessEnv(env_fn, restart=SMALL, hooks=[rungs]) as env:
        env.reset(seed=1)
        outgrow(env)
        kill(env)
        assert env.step(np.int64(1))[0][0] == 6001
    assert rungs == ["state"]


def test_where_a_snapshot_is_lost_with_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchoring, "_CHEAP_BESIDE", math.inf)  # on a busy machine no state would be cheap enough
    rungs = Rungs()
    policy = RestartPolicy(journal_limit=200_000, snapshot_every=500)
    with SubprocessEnv(ENDLESS, restart=policy, hooks=[rungs]) as env:
        env.reset(seed=1)
        outgrow(env)
        assert env.statistics().snapshots
        alive = [pid for pid in descendants(pid_of(env)) if is_alive(pid)]
        for pid in (*alive, pid_of(env)):
            os.kill(pid, signal.SIGKILL)
        assert env.step(np.int64(1))[0][0] == 6001
    assert rungs == ["state"]


def test_several_at_once_with_losses_among_them() -> None:
    policy = RestartPolicy(snapshots=False, journal_limit=200_000)
    with MultiEnv(create_subprocess_envs([ENDLESS] * 3, restart=policy)) as m:
        m.reset(seed=0)
        dice = random.Random(1)
        for step in range(9000):
            if step > 4000 and step % 900 == 0:
                os.kill(m.statistics()[dice.randrange(3)].pid or 0, signal.SIGKILL)
            observations, _, _, truncations, _ = m.step([np.int64(step % 4)] * 3)
            assert [int(one[0]) for one in observations] == [step + 1] * 3
            assert not any(truncations)
        assert sum(one.exact_recoveries for one in m.statistics()) == 5
        assert all(one.state_anchors for one in m.statistics())


@pytest.mark.parametrize(
    "name",
    [
        "remembers more than an episode",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("HalfCheetah", "Pong")),
    ],
)
def test_several_in_one_process(name: str) -> None:
    """Their episodes end at different times, and so none of their requests is a reset to begin with."""
    env_fn, _, replay_limit, count = REAL[name]
    runs, rungs = [], Rungs()
    limit = 2**20 if name == "HalfCheetah" else 500_000
    policy = RestartPolicy(snapshots=False, journal_limit=limit, replay_limit=min(replay_limit, 1.0))
    count = min(count, 8000)
    for moments in (set(), set(random.Random(2).sample(range(count // 2, count), 5))):
        envs = SubprocessVectorEnv([env_fn] * 3, envs_per_worker=3, restart=policy, hooks=[rungs])
        with contextlib.closing(envs):
            envs.reset(seed=4)
            envs.action_space.seed(0)
            run = []
            for step in range(count):
                if step in moments:
                    os.kill(envs.statistics()[0].pid or 0, signal.SIGKILL)
                run.append([part.copy() for part in envs.step(envs.action_space.sample())[:4]])
            runs.append(run)
    for step, (one, other) in enumerate(zip(*runs, strict=True)):
        for before, after in zip(one, other, strict=True):
            np.testing.assert_array_equal(before, after, err_msg=f"step {step}")
    assert len(rungs) == 5
    assert rungs.count("state") >= 2
    assert set(rungs) <= {"state", "journal"}


# --- what has none, and what says it has ------------------------------------------------------------


class Forgetful(OwnWord):
    """Leaves out of its state what shows a little later."""

    def __init__(self, **counter: Any) -> None:
        super().__init__(**counter)
        self.total = 0

    def reset(self, **options: Any) -> Any:
        self.total = 0
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        self.total += int(action)
        observation, *others = super().step(action)
        observation[3] = self.total // 50
        return (observation, *others)


class InTheClass(Forgetful):
    """Keeps its total where no attribute of the env is."""

    totals: list[int] = [0]  # noqa: RUF012
    total = property(lambda self: self.totals[0], lambda self, value: self.totals.__setitem__(0, value))  # type: ignore[assignment]
    get_state = set_state = None  # type: ignore[assignment]

    def __init__(self, **counter: Any) -> None:
        super().__init__(**counter)
        del self.endless


class CannotGoBack(OwnWord):
    """Its state can be told, and no more."""

    def set_state(self, state: Any) -> None:
        raise RuntimeError("no way back")


class DiesGoingBack(OwnWord):
    def set_state(self, state: Any) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


SOAKED = [pytest.param(kind, marks=pytest.mark.soak) for kind in (CannotGoBack, DiesGoingBack)]


@pytest.mark.parametrize("kind", [pytest.param(Forgetful, marks=pytest.mark.soak), InTheClass, *SOAKED])
def test_a_state_that_does_not_hold_is_found_out(kind: Callable[..., Any]) -> None:
    rungs, actions = Rungs(), [np.int64(index % 4) for index in range(10_500)]
    env_fn = partial(kind, horizon=None)
    with SubprocessEnv(env_fn, restart=SMALL, hooks=[rungs]) as env:
        seen = rollout(env, actions, seed=5, before_step=lambda step: step in (5000, 9900) and kill(env))
        assert env.statistics().state_anchors
        assert env.statistics().truncated_recoveries == 2
    assert set(rungs) == {"truncated"}
    assert_no_splice(seen)
    cut = next(index for index, one in enumerate(seen) if one.truncated)
    assert "cannot be brought back" in seen[cut].info["multienv"]["reason"]
    expected = rollout(env_fn(), actions[: cut - 1], seed=5)
    assert_same_trajectory(seen[:cut], expected)


@pytest.mark.parametrize("env_id", ["LunarLander-v3", "BipedalWalker-v3"])
def test_an_env_without_a_state_is_truncated_as_ever(env_id: str) -> None:
    policy, rungs = RestartPolicy(snapshots=False, journal_limit=2000), Rungs()
    with SubprocessEnv(partial(gymnasium.make, env_id), restart=policy, hooks=[rungs]) as env:
        env.reset(seed=1)
        action = np.int64(2) if env_id.startswith("Lunar") else np.zeros(4, np.float32)
        for _ in range(66):
            last, _, terminated, truncated, _ = env.step(action)
            assert not terminated
            assert not truncated
        env.set_attr("any", 1)  # the journal is looked at whenever one is noted
        kill(env)
        observation, reward, terminated, truncated, info = env.step(action)
        np.testing.assert_array_equal(observation, last)
        assert (reward, terminated, truncated) == (0.0, False, True)
        assert "not all known" in info["multienv"]["reason"]
        assert "SwigPyObject" in env.statistics().no_state_anchors
        assert env.statistics().state_anchors == 0
    assert rungs == ["truncated"]


# --- when the asking goes wrong -------------------------------------------------------------------


class Troubled(CounterEnv):
    """Fails the first time it is asked for its state."""

    def __init__(self, mark: Path, manner: str) -> None:
        super().__init__(horizon=None)
        self.mark, self.manner = mark, manner

    def get_state(self) -> Any:
        self.mark.write_text(f"{self.mark.read_text() if self.mark.exists() else ''}.")
        if len(self.mark.read_text()) == 1:
            if self.manner == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.manner == "hangs":
                time.sleep(1000)
            if self.manner == "exits":
                raise SystemExit(3)
            if self.manner == "raises":
                raise RuntimeError("not now")
            if self.manner == "unpicklable":
                return (number for number in [0])
            if self.manner == "large":
                return random.Random(1).randbytes(60_000)
        return self.episode_step, self.episode_number

    def set_state(self, state: Any) -> None:
        self.episode_step, self.episode_number = state


@pytest.mark.parametrize("manner", ["killed", "hangs", "exits", "raises", "unpicklable", "large"])
@pytest.mark.parametrize("snapshots", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_the_episode_goes_on(tmp_path: Path, manner: str, snapshots: bool) -> None:
    mark, rungs = tmp_path / "asked", Rungs()
    # Enough room for the patience after a failure.
    policy = RestartPolicy(snapshots=snapshots, journal_limit=200_000)
    with SubprocessEnv(
        partial(Troubled, mark, manner), restart=policy, deadlines=Deadlines(call=0.3), hooks=[rungs]
    ) as env:
        env.reset(seed=1)
        expected = CounterEnv(horizon=None)
        expected.reset(seed=1)
        asked_at = 0
        for step in range(1, 3001):
            action = np.int64(step % 4)
            np.testing.assert_array_equal(env.step(action)[0], expected.step(action)[0])
            if not asked_at and mark.exists():
                asked_at = step
            if asked_at and step < asked_at + 1000:
                assert mark.read_text() == ".", "asked again too soon"
        assert asked_at
        lost = manner in ("killed", "hangs", "exits")
        assert env.statistics().losses == lost
        assert env.statistics().truncated_recoveries == 0
        if lost:
            assert "lost" in env.statistics().no_state_anchors
        assert env.get_attr("np_random").random() == expected.np_random.random()


def test_a_loss_by_asking_is_not_held_against_the_step(tmp_path: Path) -> None:
    """It would be poison after two."""
    policy = RestartPolicy(snapshots=False, journal_limit=200_000, poison_after=1)
    with SubprocessEnv(partial(Troubled, tmp_path / "asked", "killed"), restart=policy) as env:
        env.reset(seed=1)
        for step in range(1, 1501):
            observation, _, _, truncated, _ = env.step(np.int64(1))
            assert (int(observation[0]), truncated) == (step, False)
        assert env.statistics().losses == 1


def test_it_can_be_switched_off() -> None:
    policy = RestartPolicy(snapshots=False, journal_limit=200_000, state_anchors=False)
    with SubprocessEnv(ENDLESS, restart=policy) as env:
        env.reset(seed=1)
        outgrow(env)
        assert env.statistics().state_anchors == 0
        kill(env)
        assert env.step(np.int64(1))[3]


# --- interruptions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["step", "call", "reset"])
@pytest.mark.parametrize(
    ("dies", "stride"),
    [(False, 13), *[pytest.param(dies, 61 if dies else 1, marks=pytest.mark.soak) for dies in (False, True)]],
)
def test_every_place_of_a_step_that_asks(then: str, dies: bool, stride: int) -> None:
    policy = RestartPolicy(snapshots=False, max_restarts=10**6)
    with SubprocessEnv(ENDLESS, restart=policy) as env:
        supervisor, ledger, fired = env._supervisor, Ledger(horizon=None), 0
        ledger.reset(env.reset(seed=0), 0)
        for interruption in every_place(stride=stride):
            supervisor.maintenance.state_due = supervisor.maintenance.is_due = True
            before = supervisor.maintenance.pacing.taken
            if dies:
                kill(env)
            with interruption:
                ledger.step(env.step(np.int64(1)), [1])
            if not interruption.fired:
                assert dies or supervisor.maintenance.pacing.taken > before
                break
            fired += 1
            if then == "call":
                with contextlib.suppress(Exception):
                    assert env.call("poke", 0.0) > 0
            if then == "reset":
                ledger.reset(env.reset(seed=0), 0)
            else:
                ledger.step(env.step(np.int64(2)), [1, 2])
            if dies:  # or the journal grows with each
                ledger.reset(env.reset(seed=0), 0)
        assert fired > 2
        assert env.statistics().truncated_recoveries == 0


# --- what else a journal is for ---------------------------------------------------------------------


def test_a_checkpoint_of_a_long_episode() -> None:
    env_fn = REAL["HalfCheetah"][0]
    policy = RestartPolicy(snapshots=False, journal_limit=400_000)
    actions = [np.full(6, 0.1 * (index % 7 - 3), np.float32) for index in range(200)]
    with SubprocessEnv(env_fn, restart=policy) as env:
        env.reset(seed=1)
        for index in range(3200):
            env.step(actions[index % 200])
        assert not env._supervisor.journal.complete
        state = pickle.loads(pickle.dumps(env.state_dict()))
        expected = [env.step(action)[:4] for action in actions]
    rungs = Rungs()
    with SubprocessEnv(env_fn, restart=policy, hooks=[rungs]) as other:
        other.reset(seed=9)
        other.load_state_dict(state)
        kill(other)
        actual = [other.step(action)[:4] for action in actions]
        assert other.statistics().steps == 3400
        entries = bytearray(state["journal"]["entries"])
        entries[-20] ^= 1  # of the last observation
        elsewhere = {**state, "journal": {**state["journal"], "entries": bytes(entries)}}
        with pytest.raises(NotRestoredError):
            other.load_state_dict({**elsewhere, "digest": _digest_of(elsewhere)})
    assert rungs == ["state"]
    for one, two in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(one[0], two[0])
        assert one[1:] == two[1:]


def test_a_checkpoint_of_an_env_that_remembers_more_than_an_episode() -> None:
    """What lies furthest back is a reset, and does not lead there."""
    env_fn = partial(CounterEnv, horizon=900)
    with SubprocessEnv(env_fn, restart=SMALL) as env:
        rollout(env, [np.int64(index % 4) for index in range(9000)], seed=5)
        assert not env._supervisor.journal.complete
        plans = env._supervisor.journal.plans()
        assert [bool(plan.state) for plan in plans] in ([False, True], [False, True, True]) or plans[0].state
        state = env.state_dict()
        expected = env.reset()[0], env.step(np.int64(1))[0]
    with SubprocessEnv(env_fn, restart=SMALL) as other:
        other.initialize()
        other.load_state_dict(state)
        for one, two in zip(expected, (other.reset()[0], other.step(np.int64(1))[0]), strict=True):
            np.testing.assert_array_equal(one, two)


def test_a_process_is_replaced_in_the_middle_of_a_long_episode() -> None:
    policy = RestartPolicy(snapshots=False, journal_limit=200_000, recycle_after_steps=2500)
    with SubprocessEnv(ENDLESS, restart=policy) as env:
        env.reset(seed=1)
        before = pid_of(env)
        outgrow(env, 8000)
        assert env.statistics().recycled >= 2
        assert pid_of(env) != before
        assert env.step(np.int64(1))[0][0] == 8001


def test_a_branch_whose_frozen_process_is_gone() -> None:
    with SubprocessEnv(ENDLESS, restart=RestartPolicy(journal_limit=200_000)) as env:
        env.reset(seed=1)
        outgrow(env)
        token = env.snapshot()
        expected = [env.step(np.int64(2))[0] for _ in range(5)]
        alive = [pid for pid in descendants(os.getpid()) if pid != pid_of(env) and is_alive(pid)]
        frozen = [pid for pid in alive if pid in descendants(pid_of(env))]
        for pid in frozen:
            os.kill(pid, signal.SIGKILL)
        assert becomes_true(lambda: not any(map(is_alive, frozen)))
        env.restore(token)
        for one in expected:
            np.testing.assert_array_equal(env.step(np.int64(2))[0], one)
