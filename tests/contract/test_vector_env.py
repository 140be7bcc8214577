"""SubprocessVectorEnv and SerialVectorEnv against gymnasium's SyncVectorEnv, over every env that gymnasium registers."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
from contract_envs import WideEnv
from gymnasium.vector import AutoresetMode

from kit import CounterEnv, SameArrayEnv
from kit.side_by_side import beside_gymnasium, expect_same, run_side_by_side
from multienv import SerialVectorEnv, SubprocessVectorEnv
from multienv.errors import ActionError, EnvsFailedError

FAMILIES = ("classic_control", "toy_text", "box2d", "mujoco")
IDS = sorted(
    name
    for name, spec in gymnasium.registry.items()
    if str(spec.entry_point).startswith(tuple(f"gymnasium.envs.{family}." for family in FAMILIES))
)
FACES = [SubprocessVectorEnv, SerialVectorEnv]
both_faces = pytest.mark.parametrize("face", FACES)
all_modes = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)


def env_fns_of(name: str, count: int) -> list[partial[gymnasium.Env]]:
    """Their episodes end after 5, 6, 7, … steps, each at another time."""
    try:
        gymnasium.make(name).close()
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:  # Pusher-v4 wants an old MuJoCo
        pytest.skip(f"{name}: {error}")
    return [partial(gymnasium.make, name, max_episode_steps=5 + index) for index in range(count)]


# Some of each family by default, each in another mode or in all; the rest in the soak.
BY_DEFAULT = {
    *((name, mode) for name in ("CartPole-v1", "Blackjack-v1") for mode in AutoresetMode),
    *((name, AutoresetMode.NEXT_STEP) for name in ("Pendulum-v1", "FrozenLake-v1", "BipedalWalker-v3")),
    *((name, AutoresetMode.SAME_STEP) for name in ("Acrobot-v1", "Taxi-v4", "HalfCheetah-v5")),
    *((name, AutoresetMode.DISABLED) for name in ("MountainCar-v0", "LunarLanderContinuous-v3", "Reacher-v5")),
}
ROWS = [
    pytest.param(name, mode, marks=[] if (name, mode) in BY_DEFAULT else pytest.mark.soak)
    for mode in AutoresetMode
    for name in IDS
]


@pytest.mark.parametrize(("name", "mode"), ROWS)
def test_every_registered_env_equals_gymnasiums(name, mode):
    with beside_gymnasium(
        SubprocessVectorEnv, env_fns_of(name, 3), {"envs_per_worker": 2}, autoreset_mode=mode
    ) as pair:
        assert run_side_by_side(*pair, 20) >= 3


@both_faces
@pytest.mark.parametrize(("mode", "kind"), [*zip(AutoresetMode, (list, np.array, np.uint64), strict=True)])
def test_discrete_actions_out_of_range_reach_the_envs(face, mode, kind):
    """gymnasium's own test of ``final_obs`` gives a ``Discrete(4)`` a 4."""
    given = [1, 4, 5, 3, 8, 2**62]
    with beside_gymnasium(face, [WideEnv] * 3, autoreset_mode=mode) as pair:
        assert run_side_by_side(*pair, len(given), actions=lambda step: kind([given[step], 1, given[step - 1]])) == 2


@both_faces
def test_an_env_that_raises_on_its_action_raises_alone(face):
    envs = face([CounterEnv] * 3)
    envs.reset(seed=0)
    for others, actions in ((2, [1, 4, 1]), (4, np.array([1, -1, 1]))):
        with pytest.raises(ValueError, match="is not in Discrete") as caught:
            envs.step(actions)
        assert isinstance(caught.value, EnvsFailedError)
        assert list(caught.value.failures) == [1]
        assert envs.step([1, 1, 1])[0][:, 0].tolist() == [others, 0, others]
    for actions in ([1, 1.5, 1], [1, 10**30, 1], np.ones(3)):
        with pytest.raises(ActionError, match="integer of 64 bits"):
            envs.step(actions)
    envs.close()


@both_faces
def test_the_final_observation_is_the_final_one_although_the_env_writes_over_it(face):
    """SyncVectorEnv shows the first of the next episode there, if the env returns the same array each time."""
    envs = face([partial(SameArrayEnv, horizon=2)] * 2, autoreset_mode="SameStep")
    envs.reset(seed=0)
    envs.step(np.zeros(2, int))
    observations, _, terminations, _, infos = envs.step(np.zeros(2, int))
    assert terminations.all()
    assert [final[0] for final in infos["final_obs"]] == [2, 2]
    assert observations[:, 0].tolist() == [0, 0]
    envs.close()


@pytest.mark.parametrize(
    "own",
    [
        *({"envs_per_worker": share} for share in (1, 100, "auto")),
        {"max_concurrency": np.int64(2), "daemon": False, "context": "spawn"},
    ],
)
def test_whatever_share_a_process_changes_nothing(own):
    with beside_gymnasium(SubprocessVectorEnv, env_fns_of("CartPole-v1", 5), own) as pair:
        assert sum(pair[0].envs_per_worker) == 5
        assert len(pair[0].envs_per_worker) <= own.get("max_concurrency", 5)
        run_side_by_side(*pair, 30)


@both_faces
def test_seeds(face):
    with beside_gymnasium(face, env_fns_of("CartPole-v1", 3)) as (ours, theirs):
        for seed in (3, [5, None, 9], None, [1, 2, 3], (4, 5, 6)):
            mine, other = ours.reset(seed=seed), theirs.reset(seed=seed)
            if seed is not None and None not in np.atleast_1d(np.array(seed, object)):
                expect_same(mine, other, seed)
                expect_same(ours.np_random_seed, theirs.np_random_seed, seed)
        assert ours.np_random_seed == (4, 5, 6)
        assert [one.random() for one in ours.np_random] == [one.random() for one in theirs.np_random]


@both_faces
@all_modes
def test_some_are_reset_in_the_middle_of_their_episodes(face, mode):
    """What the others return then is what they returned last; their episodes go on."""
    with beside_gymnasium(
        face, [partial(CounterEnv, horizon=4 + index) for index in range(5)], autoreset_mode=mode
    ) as pair:
        ours, theirs = pair
        expect_same(ours.reset(seed=1), theirs.reset(seed=1))
        for step in range(40):
            actions = np.full(5, step % 3)
            mine, other = ours.step(actions), theirs.step(actions)
            expect_same(mine, other, step)
            mask = np.arange(5) == step % 5
            if mode is AutoresetMode.DISABLED:
                mask |= other[2] | other[3]
            if step % 3 == 0 or mode is AutoresetMode.DISABLED:
                ours.call("get_wrapper_attr", "horizon")  # in between, and not to be seen
                seed = step if step % 2 else None
                options = {"reset_mask": mask, "more": step}
                expect_same(
                    ours.reset(seed=seed, options=dict(options)), theirs.reset(seed=seed, options=options), step
                )


@both_faces
def test_halves(face):
    with beside_gymnasium(face, env_fns_of("CartPole-v1", 4)) as (ours, theirs):
        ours.reset_async(seed=5)
        expect_same(ours.reset_wait(timeout=60), theirs.reset(seed=5))
        for step in range(20):
            actions = np.random.default_rng(step).integers(0, 2, 4)
            ours.step_async(actions)
            actions[:] = 1 - actions  # they have been sent
            expect_same(ours.step_wait(timeout=60), theirs.step(1 - actions), step)
            ours.call_async("get_wrapper_attr", "length")
            expect_same(ours.call_wait(timeout=60), theirs.call("get_wrapper_attr", "length"))


def test_a_subclass_that_overrides_a_half_alone_is_warned_of():
    with pytest.warns(UserWarning, match=r"Scaled overrides step_wait\(\), which step\(\) does not call"):

        class Scaled(SubprocessVectorEnv):
            def step_wait(self, timeout=None):
                return super().step_wait(timeout)
