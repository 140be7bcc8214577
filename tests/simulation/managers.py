"""Programs that a trainer runs on an env manager over simulated processes, and an oracle for what it hands out.

Each env of a manager goes on by itself: its timesteps come in any order, and its next episode begins in the background.
So the oracle keeps, for each env, what its newest step must return and what its next episode must begin with.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from kit.interruption import Interruption
from multienv import AsyncSubprocessEnvManager, StackedSubprocessEnvManager, SyncSubprocessEnvManager
from multienv.errors import EnvsFailedError, WorkerLostError
from simulation.programs import ANEW, HORIZONS, POLICIES, STEP_LIMIT, Row, assert_same, is_forced, of_worker
from simulation.rare import constants_of
from simulation.simulation import Fault, SimulatedEnv, Simulation, is_in_process

MANAGERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "async": (AsyncSubprocessEnvManager, {"wait_num": 1, "step_wait_timeout": 0.0}),
    "sync": (SyncSubprocessEnvManager, {}),
    "in place": (SyncSubprocessEnvManager, {"reset_inplace": True}),
    "stacked": (StackedSubprocessEnvManager, {}),
}
ENVS, SEED = 3, 7
# What breaks a call off: Ctrl-C, and that no descriptor is left. What was asked is completed later.
BROKEN_OFF = (KeyboardInterrupt, OSError)
OPS = (
    *(("step", number) for number in range(6)),
    ("reset", 1),
    *(("step", number) for number in range(6, 9)),
    ("call", 0.5),
    ("step", 9),
    ("step", 10),
)


@dataclass(frozen=True)
class ManagerCase:
    """A run: its repr is a literal that runs it again.

    Args:
        manager: A key of :data:`MANAGERS`.
        policy: A key of ``POLICIES``.
        ops: ``("step", number)`` all envs that are ready, ``("reset", env)``, ``("call", amount)``.
        faults: What goes wrong; worker ``n`` is that of env ``n``.
        eager: See :class:`Simulation`.
        interrupted: At which place of the trainer's own code Ctrl-C comes, counted over all calls; -1: at none.
        rare: As for ``Case``.
    """

    manager: str
    policy: str
    ops: tuple[tuple[Any, ...], ...] = OPS
    faults: tuple[Fault, ...] = ()
    eager: bool = False
    interrupted: int = -1
    rare: int = 0


class Oracle:
    """What one env must show.

    Attributes:
        is_known: What the env shows is that of the bare env, to the bit.
    """

    def __init__(self, who: int) -> None:
        self.bare = SimulatedEnv(who, horizon=HORIZONS[who])
        self.seed, self.is_dynamic, self.resets = SEED + who, True, 0
        self.is_known = True
        self.last: Any = None
        self.expected: Row | None = None  # what the step under way must return
        self.begun: Any = None  # what the next episode must begin with
        self.has_ended = True
        self._begin()

    def restart(self, seed: int) -> None:
        """Note that the caller has reset the env with a seed, which counts for the resets after it, too."""
        self.seed, self.is_dynamic, self.has_ended, self.expected = seed, False, True, None
        self._begin()

    def _begin(self) -> None:
        """Note that an episode begins, in the background or not."""
        seed = self.seed
        if self.is_dynamic and self.resets:
            seed = int(np.random.SeedSequence(seed, spawn_key=(self.resets,)).generate_state(1)[0] >> 1)
        self.resets += 1
        self.begun, _ = self.bare.reset(seed=seed)

    def ready(self, observation: Any) -> None:
        """Check an observation to act on."""
        if not self.has_ended:
            assert np.array_equal(observation, self.last), "not the observation of the last timestep"
        elif self.is_known:
            assert observation.tobytes() == self.begun.tobytes(), f"{observation} in place of {self.begun}"
        else:
            assert (observation[0], observation[3]) == (0, -1), f"no new episode: {observation}"
        self.last, self.has_ended = observation, False

    def ask(self, action: Any) -> None:
        """Note that a step was sent."""
        observation, reward, terminated, truncated, info = self.bare.step(action)
        self.expected = Row(observation, float(reward), terminated, truncated, info)
        if terminated or truncated:
            self._begin()

    def deliver(self, row: Row, is_excused: bool) -> None:
        """Check a timestep."""
        expected, self.expected = self.expected, None
        assert expected is not None, f"a timestep that nobody asked for: {row}"
        ours = row.info.get("multienv", {})
        if ours.get("recovery") == "truncated":
            assert is_excused, "truncated without need"
            assert row.info["abnormal"]
            assert (row.reward, row.terminated, row.truncated) == (0.0, False, True), row
            assert np.array_equal(row.observation, self.last), f"not the last known observation: {row}"
            if not (expected.terminated or expected.truncated):
                self._begin()
            # What was called is not called again in a new life; the seed of an episode makes all else known.
            self.is_known &= not self.bare.pokes
        elif self.is_known:
            assert_same(row._replace(info={key: row.info[key] for key in row.info if key != "multienv"}), expected)
        else:
            shown = row.observation[0], row.observation[3], row.terminated
            assert shown == (expected.observation[0], expected.observation[3], expected.terminated), row
        self.last, self.has_ended = row.observation, row.terminated or row.truncated


class ManagerRun:
    """One run of a case."""

    def __init__(self, case: ManagerCase) -> None:
        self.case = case
        # These envs remember earlier episodes; and a reset in the background may begin a new life, of which nothing is
        # told, but in which calls are repeated.
        constants = replace(constants_of(case.rare), most_calls=1000, journal_limit=None)
        is_forgetful = constants.forgets or case.policy == "short journal"
        self.constants = replace(constants, recycle_after_steps=None) if is_forgetful else constants
        self.simulation = Simulation(case.faults, case.eager)
        self.oracles = [Oracle(env) for env in range(ENVS)]
        kind, options = MANAGERS[case.manager]
        self.manager = kind(
            [partial(SimulatedEnv, env, horizon=HORIZONS[env]) for env in range(ENVS)],
            restart=self.constants.policy(POLICIES[case.policy]),
            step_timeout=STEP_LIMIT,
            reset_timeout=STEP_LIMIT,
            connect_timeout=20.0,
            reports="",
            **options,
        )
        self._seeds = iter(range(50, 1_000))
        self.interruption = Interruption(case.interrupted, KeyboardInterrupt, skips=is_in_process)

    def play(self) -> Simulation:
        """Run the program and check all that it returns; return the world as it is then."""
        with self.simulation.running(), self.constants.in_force():
            try:
                self.manager.seed(SEED)
                self._launch()
                for name, value in self.case.ops:
                    getattr(self, f"_do_{name}")(value)
                while any(oracle.expected is not None for oracle in self.oracles):
                    self._collect()
            except Exception as error:
                error.add_note(f"\nTo see this again, add it to regressions.py:\n    {self.case!r},\n")
                raise
            finally:
                try:
                    self.manager.close()
                except KeyboardInterrupt:
                    self.manager.close()
            assert not set(self.simulation.live), "a channel was not released"
        return self.simulation

    def _call(self, call: Any) -> Any:
        """Call, and be interrupted if it is time."""
        if self.case.interrupted < 0 or self.interruption.fired:
            return call()
        with self.interruption:
            return call()
        raise KeyboardInterrupt  # it came in here

    def _launch(self) -> None:
        """Launch until it succeeds: a launch that fails leaves nothing."""
        for _ in range(len(self.case.faults) + 2):
            try:
                return self._call(self.manager.launch)
            except KeyboardInterrupt:
                assert self.manager.closed
            except (EnvsFailedError, WorkerLostError, OSError):
                assert self.simulation.struck
                assert self.manager.closed
            self.manager.seed(SEED)  # the seeds are counted anew
        raise AssertionError("launch() failed more often than faults came")

    def _do_step(self, number: int) -> None:
        ready = self._again(self._read)
        for env, observation in (ready or {}).items():
            self.oracles[env].ready(observation)
        self._step({env: np.int64((number * (env + 2) + env) % 4) for env in ready or {}})

    def _collect(self) -> None:
        """Collect steps under way; a batch must be read before it is stepped, be it empty."""
        if self.case.manager == "stacked":
            self._do_step(0)
        else:
            self._step({})

    def _read(self) -> dict[int, Any]:
        observations = self.manager.ready_obs
        if self.case.manager == "stacked":
            return dict(zip(self.manager.ready_obs_id, map(np.copy, observations), strict=True))
        return dict(observations)

    def _step(self, actions: dict[int, Any]) -> None:
        """Step these envs, or collect what is under way, and check the timesteps."""
        is_stacked, before = self.case.manager == "stacked", copy.deepcopy(self.oracles)
        try:
            for env, action in actions.items():
                self.oracles[env].ask(action)
            told = self._call(partial(self.manager.step, list(actions.values()) if is_stacked else actions))
        except EnvsFailedError as error:
            steps = {env: step for env, step in enumerate(error.results) if step is not None}
            self._deliver(steps, error.failures)
            self._reset_failed(error)
            return
        except BROKEN_OFF:
            unsent = [env for env in self._again(lambda: self.manager.ready_env) if env in actions]
            assert unsent in ([], list(actions)), "sent in part"
            assert not unsent or self.case.eager or self.interruption.fired, "it comes while an answer is awaited"
            if unsent:
                self.oracles = before
            return
        self._deliver({step.env_id: step for step in told} if is_stacked else told)

    def _deliver(self, steps: Mapping[int, Any], failed: Collection[int] = ()) -> None:
        for env, step in steps.items():
            row = Row(*step)._replace(terminated=bool(step.terminated), truncated=bool(step.truncated))
            begun, final = None, row.info.pop("final_obs", None)
            if final is not None:
                begun, row = row.observation, row._replace(observation=final)
            self.oracles[env].deliver(row, self._is_forced(env))
            if begun is not None and env not in failed:  # else the reset has failed, after the step
                self.oracles[env].ready(begun)

    def _do_reset(self, env: int) -> None:
        seed = next(self._seeds)
        self._again(partial(self.manager.reset, {env: {"seed": seed}}))
        self.oracles[env].restart(seed)

    def _do_call(self, amount: float) -> None:
        """Call a method of all envs, once: an interrupted call was made, or was not."""
        try:
            told = self._call(partial(self.manager.call, "poke", amount))
        except EnvsFailedError as error:
            self._check_failed(error)
            told = [answer or 0 for answer in error.results]
            for env in error.failures:
                self._do_reset(env)
                self.oracles[env].is_known = False
        except BROKEN_OFF:
            told = self._again(partial(self.manager.get_attr, "pokes"))
            assert set(told) <= {0, 1}
        for oracle, pokes in zip(self.oracles, told, strict=True):
            if pokes:
                oracle.bare.poke(amount)

    def _again(self, call: Any) -> Any:
        """Call until it returns; reset envs that have failed, which is allowed where it must be."""
        while True:
            try:
                return self._call(call)
            except EnvsFailedError as error:
                self._reset_failed(error)
            except BROKEN_OFF:
                assert self.simulation.struck or self.interruption.fired

    def _reset_failed(self, error: EnvsFailedError) -> None:
        self._check_failed(error)
        for env in error.failures:
            self._do_reset(env)

    def _check_failed(self, error: EnvsFailedError) -> None:
        for env in error.failures:
            assert self._struck(env)
            assert self.case.policy == "raise" or self._is_forced(env), f"failed without need: {error}"

    def _is_forced(self, env: int) -> bool:
        return is_forced(self._struck(env), self.case.policy, self.constants)

    def _struck(self, env: int) -> list[Fault]:
        """Return what has happened to an env; launched again it has another worker."""
        struck = [replace(fault, worker=fault.worker % ENVS) for fault in self.simulation.struck]
        return of_worker(struck, env, eager=self.case.eager)


def manager_bases() -> Iterator[ManagerCase]:
    """Yield a program for each manager, policy and timing."""
    policies = [policy for policy in POLICIES if policy not in ("budget", *ANEW)]
    for manager, policy, eager in product(MANAGERS, policies, (False, True)):
        ops = tuple(op for op in OPS if op[0] != "call") if policy in ("truncate", "raise") else OPS
        yield ManagerCase(manager, policy, ops, eager=eager)


def manager_name(case: ManagerCase) -> str:
    """Return the name of such a program in a list of tests."""
    return f"{case.manager}-{case.policy}-{'eager' if case.eager else 'lazy'}"


def with_fault(case: ManagerCase, fault: Fault) -> ManagerCase:
    """Return the case with one fault more."""
    return replace(case, faults=(*case.faults, fault))
