"""What several envs in a process make harder: two culprits, two workers lost, spaces without arrays, recycling."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate
from trainer_process import becomes_true

from kit import CounterEnv, Fault, FaultyEnv, NondeterministicEnv, SpaceEnv, descendants, first_difference, is_alive
from multienv import Deadlines, RestartPolicy, SerialVectorEnv, SubprocessVectorEnv
from multienv.events import Event, Loss, Recovery, Recycled

NUM_ENVS = 6
Fns = list[Callable[[], gymnasium.Env[Any, Any]]]


def fns(**others: Callable[[], Any]) -> Fns:
    made: Fns = [partial(CounterEnv, horizon=5 + index) for index in range(NUM_ENVS)]
    for place, env_fn in others.items():
        made[int(place.removeprefix("env"))] = env_fn
    return made


def actions_of(step: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(step).integers(0, 4, NUM_ENVS)


def kill(envs: SubprocessVectorEnv, place: int, *, snapshot: bool = False) -> None:
    worker = envs.statistics()[place].pid or 0
    victims = [worker, *(sorted(descendants(worker))[-1:] if snapshot else [])]
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def expect_same(one: Sequence[Any], other: Sequence[Any], rows: Any = slice(None), where: object = "") -> None:
    for mine, own in zip(one[:4], other[:4], strict=True):
        if isinstance(own, np.ndarray):
            assert mine[rows].tobytes() == own[rows].tobytes(), where


def faulty(*faults: Fault, horizon: int = 6) -> Callable[[], Any]:
    return partial(FaultyEnv, fault=faults, horizon=horizon)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_two_envs_that_end_processes_in_the_same_step_are_both_truncated(mode: AutoresetMode) -> None:
    culprits = {f"env{slot}": faulty(Fault("exit", "step", at=4, per="episode")) for slot in (0, 2)}
    envs = SubprocessVectorEnv(fns(**culprits), envs_per_worker=3, autoreset_mode=mode)
    twin = SerialVectorEnv(fns(), autoreset_mode=mode)
    envs.reset(seed=1)
    twin.reset(seed=1)
    ended = []
    for step in range(12):
        batch = envs.step(actions_of(step))
        expect_same(batch, twin.step(actions_of(step)), [1, 3, 4, 5], step)
        ended += [(step, int(row)) for row in np.flatnonzero(batch[3])]
    assert ended[:2] == [(3, 0), (3, 2)]
    assert {row for _, row in ended} == {0, 2}
    envs.close()
    twin.close()


@pytest.mark.parametrize("snapshot", [False, True])
def test_all_workers_killed_in_the_same_step_are_brought_back(snapshot: bool) -> None:
    envs = SubprocessVectorEnv(fns(), envs_per_worker=2, restart=RestartPolicy(snapshot_every=3))
    twin = SerialVectorEnv(fns())
    envs.reset(seed=1)
    twin.reset(seed=1)
    for step in range(40):
        envs.step_async(actions_of(step))
        if step % 7 == 5:
            for worker in range(3):
                kill(envs, worker, snapshot=snapshot)
        expect_same(envs.step_wait(), twin.step(actions_of(step)), where=step)
    assert [statistics.truncated_recoveries for statistics in envs.statistics()] == [0, 0, 0]
    envs.close()
    twin.close()


def test_an_env_that_ends_every_process_beside_one_that_cannot_be_replayed() -> None:
    culprit, stray = faulty(Fault("exit", "step", at=4)), partial(NondeterministicEnv, horizon=1000)
    policy = RestartPolicy(snapshots=False)
    envs = SubprocessVectorEnv(fns(env0=culprit, env2=stray), envs_per_worker=3, restart=policy)
    twin = SerialVectorEnv(fns())
    envs.reset(seed=1)
    twin.reset(seed=1)
    for step in range(4):
        batch = envs.step(actions_of(step))
        expect_same(batch, twin.step(actions_of(step)), [1, 3, 4, 5], step)
    assert batch[3].tolist() == [True, False, True, False, False, False]
    reasons = batch[4]["multienv"]["reason"]
    assert "ended 2 processes" in reasons[0]
    assert "does not match" in reasons[2]
    envs.close()
    twin.close()


@pytest.mark.parametrize("snapshots", [False, True])
def test_envs_left_out_of_a_reset_in_which_their_process_is_killed_keep_their_episodes(snapshots: bool) -> None:
    policy = RestartPolicy(snapshots=snapshots, snapshot_every=2)
    envs = SubprocessVectorEnv(fns(), envs_per_worker=3, restart=policy)
    twin = SerialVectorEnv(fns())
    envs.reset(seed=1)
    twin.reset(seed=1)
    mask = np.array([True, False, False, False, True, False])
    for step in range(30):
        if step % 6 == 3:
            envs.reset_async(options={"reset_mask": mask.copy()})
            kill(envs, step % 2)
            expect_same(envs.reset_wait(), twin.reset(options={"reset_mask": mask.copy()}), where=step)
        expect_same(envs.step(actions_of(step)), twin.step(actions_of(step)), where=step)
    assert [statistics.truncated_recoveries for statistics in envs.statistics()] == [0, 0]
    envs.close()
    twin.close()


@pytest.mark.parametrize("autoreset", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_episodes_that_cannot_be_replayed_are_truncated_and_those_after_them_are_replayed(autoreset: Any) -> None:
    """The journal was trimmed, and there are no snapshots; afterwards there is a journal again."""
    policy = RestartPolicy(snapshots=False, journal_limit=40_000, state_anchors=False)
    seen: list[Event] = []
    envs = SubprocessVectorEnv(fns(), envs_per_worker=3, restart=policy, hooks=[seen.append], autoreset_mode=autoreset)
    twin = SerialVectorEnv(fns(), autoreset_mode=autoreset)
    envs.reset(seed=1)
    twin.reset(seed=1)
    for step in range(1100):
        batch = envs.step(actions_of(step))
        expect_same(batch, twin.step(actions_of(step)), where=step)
    kill(envs, 0)
    for step in range(1100, 1140):
        last = batch
        batch = envs.step(actions_of(step))
        expect_same(batch, twin.step(actions_of(step)), [3, 4, 5], step)
        assert batch[3][:3].all() == (step == 1100)
        if step == 1100:
            shown = batch[0] if autoreset is AutoresetMode.NEXT_STEP else batch[4]["final_obs"]
            assert all(shown[row].tobytes() == last[0][row].tobytes() for row in range(3))
            assert not batch[1][:3].any()
        if step == 1120:
            kill(envs, 0)  # episodes begun by autoreset in a new process are known from the seed on
    outcomes = [event.outcome for event in seen if isinstance(event, Recovery)]
    assert outcomes == ["truncated", "exact"]
    envs.close()
    twin.close()


SPACES = {
    "text": spaces.Text(max_length=12),
    "graph": spaces.Graph(spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3)),
    "long_sequence": spaces.Tuple((spaces.Sequence(spaces.Discrete(4)), spaces.Box(-1.0, 1.0, (40, 40), np.float64))),
}


@pytest.mark.parametrize(
    ("way_back", "snapshots"),
    [(True, True), (False, False), *[pytest.param(way, not way, marks=pytest.mark.soak) for way in (True, False)]],
)
@pytest.mark.parametrize("name", SPACES)
def test_observations_without_arrays_are_brought_back(name: str, snapshots: bool, way_back: bool) -> None:
    made: Fns = [partial(SpaceEnv, observation_space=SPACES[name], horizon=4 + index) for index in range(4)]
    policy = RestartPolicy(snapshots=snapshots, snapshot_every=3)
    if not way_back:
        policy = RestartPolicy(on_crash="truncate", on_timeout="truncate", snapshots=False, journal_limit=0)
    envs, twin = SubprocessVectorEnv(made, envs_per_worker=2, restart=policy), SerialVectorEnv(made)
    observations = each(envs, envs.reset(seed=1))
    assert first_difference(observations, each(twin, twin.reset(seed=1))) is None
    for step in range(20):
        last = observations
        if step in (7, 13):
            kill(envs, 0)
        batch, expected = envs.step(actions_of(step)[:4]), twin.step(actions_of(step)[:4])
        observations, own = each(envs, batch), each(twin, expected)
        if not way_back and step == 7:
            assert batch[3].tolist() == [True, True, False, False]
            assert first_difference(observations[:2], last[:2]) is None
        rows = slice(0 if way_back or step < 7 else 2, 4)
        assert first_difference(observations[rows], own[rows]) is None, step
        for mine, reference in zip(batch[1:4], expected[1:4], strict=True):
            assert mine[rows].tobytes() == reference[rows].tobytes()
    envs.close()
    twin.close()


def each(envs: Any, batch: Sequence[Any]) -> list[Any]:
    return list(iterate(envs.observation_space, batch[0]))


class DriftingEnv(SpaceEnv):
    """Large observations without arrays, of which one element is the operating system's."""

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return ((observation[0], observation[1] + float(os.urandom(1)[0] + 1)), *rest)


def test_large_observations_without_arrays_are_verified() -> None:
    made: Fns = [partial(SpaceEnv, observation_space=SPACES["long_sequence"], horizon=50) for _ in range(2)]
    made[1] = partial(DriftingEnv, observation_space=SPACES["long_sequence"], horizon=50)
    envs = SubprocessVectorEnv(made, envs_per_worker=2, restart=RestartPolicy(snapshots=False))
    envs.reset(seed=1)
    for step in range(6):
        if step == 5:
            kill(envs, 0)
        batch = envs.step(actions_of(step)[:2])
    assert batch[3].tolist() == [False, True]
    envs.close()


class UndecidedEnv(SpaceEnv):
    """Large observations without arrays; the operating system decides on the reward of one step."""

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        drawn = float(os.urandom(1)[0] + 1) if self.episode_step == 2 else 0.0
        return (observation, reward + drawn, *rest)


def test_rewards_beside_large_observations_without_arrays_are_verified_for_every_step() -> None:
    seen: list[Event] = []
    made: Fns = [partial(SpaceEnv, observation_space=SPACES["long_sequence"], horizon=50) for _ in range(3)]
    made[1] = partial(UndecidedEnv, observation_space=SPACES["long_sequence"], horizon=50)
    policy = RestartPolicy(snapshots=False)
    envs = SubprocessVectorEnv(made, envs_per_worker=3, restart=policy, hooks=[seen.append])
    envs.reset(seed=1)
    for step in range(8):
        if step == 6:  # long after the step in question
            kill(envs, 0)
        batch = envs.step(actions_of(step)[:3])
        assert batch[3].tolist() == [False, step == 6, False]
    assert [event.outcome for event in seen if isinstance(event, Recovery)] == ["truncated"]
    envs.close()


def test_recycling_in_the_middle_of_episodes_leaves_no_trace() -> None:
    seen: list[Event] = []
    policy = RestartPolicy(recycle_after_steps=7)
    envs = SubprocessVectorEnv(fns(), envs_per_worker=2, restart=policy, hooks=[seen.append])
    twin = SerialVectorEnv(fns())
    envs.reset(seed=1)
    twin.reset(seed=1)
    for step in range(300):  # it is looked at every 64
        if step == 150:
            mask = np.arange(NUM_ENVS) % 2 == 0
            expect_same(
                envs.reset(options={"reset_mask": mask.copy()}), twin.reset(options={"reset_mask": mask.copy()})
            )
        expect_same(envs.step(actions_of(step)), twin.step(actions_of(step)), where=step)
        if step % 45 == 40:
            kill(envs, step % 3)
    recycled = [event.outcome for event in seen if isinstance(event, Recycled)]
    assert len(recycled) > 6
    assert set(recycled) == {"exact"}
    assert {event.outcome for event in seen if isinstance(event, Recovery)} == {"exact"}
    envs.close()
    twin.close()


@pytest.mark.parametrize("moment", ["step", "reset"])
def test_a_slot_that_hangs_past_the_deadline_is_named_and_brought_back(moment: str, marker: str) -> None:
    seen: list[Event] = []
    culprit = faulty(Fault("hang_c", moment, at=2, once=marker))  # type: ignore[arg-type]
    deadlines = Deadlines(step=0.6, reset=0.6)
    envs = SubprocessVectorEnv(fns(env4=culprit), envs_per_worker=3, deadlines=deadlines, hooks=[seen.append])
    twin = SerialVectorEnv(fns(env4=faulty(horizon=6)))
    for one in (envs, twin):
        one.reset(seed=1)
    expect_same(envs.reset(seed=2), twin.reset(seed=2))
    for step in range(5):
        expect_same(envs.step(actions_of(step)), twin.step(actions_of(step)), where=step)
    (loss,) = [event for event in seen if isinstance(event, Loss)]
    assert (loss.cause, loss.env_index, loss.command) == ("hung", 4, moment)
    assert "counter" in loss.stack or "faults" in loss.stack
    envs.close()
    twin.close()


class Closes(CounterEnv):
    """Closes descriptors that are not its own, and so has its process end as soon as that waits for a request."""

    def step(self, action: Any) -> Any:
        if self.episode_step == 2:
            os.closerange(3, 256)
        return super().step(action)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_an_env_that_closes_the_descriptors_of_its_worker_ends_the_episodes_of_that_worker_alone(mode: Any) -> None:
    """The step is answered; the process ends afterwards, and so does each that replays it: nobody is to blame."""
    made = fns(env1=partial(Closes, horizon=6))
    envs = SubprocessVectorEnv(made, envs_per_worker=3, autoreset_mode=mode)
    twin = SerialVectorEnv(fns(), autoreset_mode=mode)
    with contextlib.closing(envs), contextlib.closing(twin):
        envs.reset(seed=3)
        twin.reset(seed=3)
        worker = envs.statistics()[0].pid or 0
        for step in range(5):
            if step == 3:
                assert becomes_true(lambda: not is_alive(worker))
            batch, expected = envs.step(actions_of(step)), twin.step(actions_of(step))
            expect_same(batch, expected, slice(3, None))
            assert batch[3].tolist() == [step == 3 and index < 3 for index in range(NUM_ENVS)]
            if step == 3:
                infos = batch[4]["final_info"] if mode is AutoresetMode.SAME_STEP else batch[4]
                assert "cannot be brought back" in infos["multienv"]["reason"][0]
        assert envs.statistics()[1].losses == 0
