"""Programs that a trainer runs on simulated envs, and an oracle that knows every honest outcome.

The oracle has a bare env beside each supervised one. What is returned must be what the bare env returns, to the bit. A
truncation of multienv's own is allowed only where the schedule of faults has made an exact recovery impossible. After
one the env's generator is not known until a seeded reset; until then the counts that the env shows must go on, so that
a lost, doubled or spliced step shows all the same.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

import numpy as np

from kit import ForkingPolicy
from kit.interruption import Interruption
from kit.side_by_side import info_of
from multienv import Deadlines, MultiEnv, RestartPolicy, SubprocessEnv, SubprocessVectorEnv, create_subprocess_envs
from multienv._engine.recovery import journal, supervisor
from multienv._engine.recovery.way_back import WINDOW
from multienv.errors import (
    CallPendingError,
    EnvsFailedError,
    NotRestoredError,
    ResetNeededError,
    RestartBudgetExceeded,
    UsageError,
    WorkerLostError,
)
from multienv.events import Recovery, Recycled
from simulation.rare import Constants, constants_of
from simulation.simulation import CRASHED, KILLED, Fault, SimulatedEnv, Simulation, is_in_process

NUM_ENVS = 3
STEP_LIMIT, RECOVERY_LIMIT = 1.0, 60.0
DEADLINES = Deadlines(
    start=20.0, reset=STEP_LIMIT, step=STEP_LIMIT, call=STEP_LIMIT, close=2.0, recovery=RECOVERY_LIMIT
)
POLICIES = {
    "snapshot": ForkingPolicy(snapshot_every=2, backoff=0.0),
    "journal": RestartPolicy(snapshots=False, backoff=0.0),
    # Each slot is replayed from resets of its own as soon as that can be: see Run.play().
    "starts": RestartPolicy(snapshots=False, backoff=0.0),
    # Forgets the beginning of its journal: what it has left may not lead to the envs as they are.
    "short journal": RestartPolicy(snapshots=False, journal_limit=600, backoff=0.0),
    "truncate": RestartPolicy(on_crash="truncate", on_timeout="truncate", backoff=0.0),
    "raise": RestartPolicy(on_crash="raise", on_timeout="raise", backoff=0.0),
    "budget": RestartPolicy(snapshots=False, backoff=0.0, max_restarts=1),
    # The envs remember something across resets, which shows after a while, or never.
    "memory": ForkingPolicy(snapshot_every=2, backoff=0.0),
    # No episode ends by itself: until the first reset that is asked for nothing but the construction leads back, if a
    # snapshot is lost with its worker.
    "first episode": ForkingPolicy(snapshot_every=2, backoff=0.0),
}
# Policies whose errors the trainer answers by a reset, and "truncate".
RAISING = ("truncate", "raise", "budget")
# Policies under which a replay begins at resets.
ANEW = ("starts", "memory", "first episode")
# Kind of face → its options, and the worker of each env.
FACES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "subprocess_env": ({}, (0,)),
    "multi_env": ({}, (0, 1)),
    "DISABLED": ({"envs_per_worker": 3}, (0, 0, 0)),
    "NEXT_STEP": ({"envs_per_worker": 2}, (0, 0, 1)),
    "SAME_STEP": ({"envs_per_worker": 3}, (0, 0, 0)),
}
HORIZONS = (3, 5, 4)
ENDLESS = 1000
# Part of the envs' time that telling of resets may take: after the first it is never enough.
_HARDLY = 1e-12


class Row(NamedTuple):
    """What one env returned: ``final`` is the last observation of an episode that ended in this very step."""

    observation: Any
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Any = None
    final: Any = None


@dataclass(frozen=True)
class Case:
    """A run: its repr is a literal that runs it again.

    Args:
        face: A key of :data:`FACES`.
        policy: A key of :data:`POLICIES`.
        ops: What the trainer calls: ``("reset", seed)``, ``("step", number)``, ``("halves", number)`` (a step in two
            halves; a MultiEnv has none, and takes a whole one), ``("roll", number, steps)`` (a rollout, or so many steps
            where a face has none), ``("pace", number)`` (a step of each env, at its own pace), ``("some", number)`` (of
            two of three envs), ``("begin", seed)`` (a reset of each, likewise), ``("call", amount)``, ``("ask",)``,
            ``("set", value)``, ``("snapshot",)``, ``("restore",)``, ``("save",)``, ``("load",)``.
        faults: What goes wrong.
        eager: See :class:`Simulation`.
        chance: The envs draw from what cannot be replayed.
        asks_after: The envs ask a server, see ``SimulatedEnv``; ``None``: they do not. No program takes such an env back
            to an earlier state: the server does not go back with it.
        interrupted: At which place of the trainer's own code Ctrl-C comes, counted over all calls; -1: at none.
        rare: With what constants are drawn that are rare in life, see :mod:`simulation.rare`; 0: none is.
        rates: How often the envs crash and hang by chance, see :class:`Simulation`.
        seed: Of that chance.
    """

    face: str
    policy: str
    ops: tuple[tuple[Any, ...], ...]
    faults: tuple[Fault, ...] = ()
    eager: bool = False
    chance: bool = False
    asks_after: int | None = None
    interrupted: int = -1
    rare: int = 0
    rates: tuple[float, float] = (0.0, 0.0)
    seed: int = 0


def actions_of(number: int) -> list[np.int64]:
    return [np.int64((number * (env + 2) + env) % 4) for env in range(NUM_ENVS)]


def policy_of(number: int, observation: Any) -> Any:
    """Return an action, or a batch of them, and what they were computed from."""
    chosen = ((observation[..., 0] * 3 + observation[..., 2] * 1000).astype(np.int64) + number) % 4
    return (np.int64(chosen) if observation.ndim == 1 else chosen), {"seen": observation.copy()}


class World:
    """What one env must show.

    Attributes:
        bare: The env without processes.
        last: The last observation that was returned.
        has_ended: Its episode is over, and nothing has begun the next one.
        is_known: What it draws is that of the bare env.
        is_forgetful: The worker may forget what was called and set.
        is_lost: What the env remembers across resets, or was given, is not what the bare one does, for good.
    """

    def __init__(self, bare: SimulatedEnv, mode: str, chance: bool, is_forgetful: bool, remembers: bool) -> None:
        self.chance, self.is_forgetful, self.remembers = chance, is_forgetful, remembers
        self.bare, self.is_lost = bare, False
        self.mode = mode
        self.last: Any = None
        self.has_ended = False
        self.is_known = not chance

    def reset(self, seed: int | None, row: Row, *, is_anew: bool = False) -> None:
        """Check what a reset returned; ``is_anew``: of a new life, whose generator is another one."""
        observation, info = self.bare.reset(seed=seed)
        if is_anew:
            self.lose_memory()
        self.is_known = not self.chance and not self.is_lost and (seed is not None or (self.is_known and not is_anew))
        if is_anew and self.is_forgetful and self.bare.offset:
            self.is_known = False  # what was called and set need not have been repeated
        if self.is_known:
            assert_same(row, Row(observation, info=info))
        else:
            assert (row.observation[0], row.observation[3]) == (0, -1), f"no new episode: {row}"
        self.last, self.has_ended = row.observation, False

    def begin_anew(self) -> None:
        """Note that the env is a new one, whose generator goes on, as was planned between two episodes."""
        self.bare.episode_number, self.bare.steps_ever = -1, 0
        if self.is_forgetful and self.bare.offset:
            self.is_lost, self.is_known = True, False  # what was called and set need not have been repeated

    def lose_memory(self) -> None:
        """Note that the env goes on in another process, whose memory of earlier episodes need not be the same."""
        if self.remembers:
            self.is_lost, self.is_known = True, False

    def step(self, action: Any, row: Row) -> None:
        """Check what a step returned."""
        if self.has_ended and self.mode != "DISABLED":  # with SAME_STEP: a reset ended every process in the last step
            assert (row.reward, row.terminated, row.truncated) == (0.0, False, False)
            self.reset(None, row)
            return
        if self.is_known:
            observation, reward, terminated, truncated, info = self.bare.step(action)
            expected = Row(observation, float(reward), terminated, truncated, info)
            if (terminated or truncated) and self.mode == "SAME_STEP":
                begun, info = self.bare.reset()
                expected = Row(begun, float(reward), terminated, truncated, info, observation)
            assert_same(row, expected)
        else:
            shown = row.observation if row.final is None else row.final
            assert (shown[0], shown[3]) == (self.last[0] + 1, action), f"a step was lost, doubled or spliced: {row}"
            assert row.terminated == (shown[0] >= self.bare.horizon)
        self.last = row.observation
        self.has_ended = (row.terminated or row.truncated) and self.mode != "SAME_STEP"

    def truncate(self, row: Row) -> None:
        """Check a truncation of multienv's own."""
        assert (row.reward, row.terminated, row.truncated) == (0.0, False, True), row
        shown = row.observation if row.final is None else row.final
        assert np.array_equal(shown, self.last), f"not the last known observation: {row}"
        is_begun = row.final is not None and not np.array_equal(row.observation, row.final)  # else its reset kills
        if is_begun:
            assert row.observation[0] == 0, row
        self.last, self.is_known = row.observation, False
        self.lose_memory()
        self.has_ended = self.mode != "SAME_STEP" or not is_begun


def assert_same(row: Row, expected: Row) -> None:
    for name, one, other in zip(Row._fields, row, expected, strict=True):
        same = one.tobytes() == other.tobytes() if isinstance(other, np.ndarray) and one is not None else one == other
        assert same, f"{name} is {one!r} in place of {other!r}"


class Run:
    """One run of a case.

    Attributes:
        simulation: Its world.
        truncated: Truncations of multienv's own, and errors of lost workers.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.constants = constants_of(case.rare)
        self.simulation = Simulation(case.faults, case.eager, case.rates, random.Random(case.seed))
        self.workers = FACES[case.face][1]
        mode = case.face if case.face.isupper() else "DISABLED"
        remembers, is_forgetful = case.policy == "memory", self.constants.forgets or case.policy == "short journal"
        shows_after = self.constants.shows_after if remembers else None
        horizons = (ENDLESS,) * NUM_ENVS if case.policy == "first episode" else HORIZONS
        self.options_of_env = [
            (env, case.chance, horizons[env], case.policy in ANEW, shows_after, case.asks_after)
            for env in range(len(self.workers))
        ]
        self.worlds = [
            World(SimulatedEnv(*options), mode, case.chance, is_forgetful, remembers) for options in self.options_of_env
        ]
        self.truncated = 0
        self.interruption = Interruption(case.interrupted, skips=is_in_process)
        self.envs: Any = None
        self._kept: dict[str, Any] = {}
        self._interrupted = 0  # how often Ctrl-C came in the last call
        self._failed: list[set[int]] = []  # envs that failed in each try of the last call; the others answered
        self._replayed_without_need: list[Any] = []
        self._falsely_exact: list[Any] = []
        self._waited = 0.0  # seconds in which the trainer itself did nothing
        self._struck = 0  # faults before the last op: the loss of a process may be noticed in the next one

    def play(self) -> Simulation:
        """Run the program and check all that it returns; return the world as it is then."""
        with self.simulation.running(), self.constants.in_force(), self._own_starts():
            try:
                self._make()
                for op in self.case.ops:
                    self._do(op)
            except Exception as error:
                error.add_note(f"\nTo see this again, add it to regressions.py:\n    {self.case!r},\n")
                raise
            finally:
                if self.envs is not None:
                    self.envs.close()
                    self._kept.clear()
            assert not self._replayed_without_need, f"{self._replayed_without_need[0]}: {self.case}"
            assert not self._falsely_exact, f"by edited code: {self._falsely_exact[0]}: {self.case}"
            if self.interruption.fired:
                gc.collect()
            assert not set(self.simulation.live), f"a channel was not released: {self.case}"
            # That of an interrupted snapshot() ends with the worker, which is not simulated.
            assert self.interruption.fired or not self.simulation.kept, f"a snapshot was not freed: {self.case}"
        return self.simulation

    @contextlib.contextmanager
    def _own_starts(self) -> Iterator[None]:
        """Have each reset told of, and the journal forget the construction at once, where the policy is about that.

        Else only the first: an env that remembers earlier episodes, on a slow machine, could not be replayed from a
        later reset. Nothing in here depends on how long something takes.
        """
        before = journal.AFFORDABLE, supervisor.SHARE, supervisor.LARGE_SHARE
        affordable, share = (0.0, inf) if self.case.policy in ANEW else (inf, _HARDLY)
        journal.AFFORDABLE, supervisor.SHARE, supervisor.LARGE_SHARE = affordable, share, share
        try:
            yield
        finally:
            journal.AFFORDABLE, supervisor.SHARE, supervisor.LARGE_SHARE = before

    def _make(self) -> None:
        case, (options, _) = self.case, FACES[self.case.face]
        env_fns = [partial(SimulatedEnv, *options) for options in self.options_of_env]
        settings = {
            "restart": self.constants.policy(POLICIES[case.policy]),
            "deadlines": self.constants.deadlines(DEADLINES),
            "reports": "",
            "hooks": [self._note],
            **options,
        }
        if case.face == "subprocess_env":
            self.envs = SubprocessEnv(env_fns[0], **settings)
            make: Any = partial(self._initialized, self.envs)
        elif case.face == "multi_env":
            make = lambda: MultiEnv(create_subprocess_envs(env_fns, **settings), autoreset_mode="DISABLED")  # noqa: E731
        else:
            make = partial(SubprocessVectorEnv, env_fns, autoreset_mode=case.face, **settings)
        made = None
        while made is None:
            struck = len(self.simulation.struck)
            try:
                made = self._again(make)
            except (WorkerLostError, EnvsFailedError):
                assert case.policy in RAISING or len(self.simulation.struck) >= min(2, self.constants.poison_after)
                assert len(self.simulation.struck) > struck
                self._await_budget()
        self.envs = made

    def _note(self, event: Any) -> None:
        """Note what multienv says of a recovery, before it returns what the env went on with."""
        if isinstance(event, Recovery) and event.method == "journal" and event.outcome == "exact":
            edited = self.simulation.edited[self.workers[(event.loss.envs[:1] or (0,))[0]]]
            if len(edited) > 1 and edited[-1] and edited.count(True) == 1:  # the lost process ran the other code
                self._falsely_exact.append(event)
        is_replayed = isinstance(event, Recovery | Recycled) and event.outcome == "replayed"
        if not is_replayed and not (isinstance(event, Recycled) and event.outcome == "reset"):
            return
        first = (event.loss.envs[:1] or (0,))[0] if isinstance(event, Recovery) else event.env_index or 0
        worker = self.workers[first]
        mine = [world for env, world in enumerate(self.worlds) if self.workers[env] == worker]
        if event.outcome == "reset":
            for world in mine:
                world.begin_anew()
            return
        is_excused = self.constants.forgets or self.constants.recycle_after_steps
        is_excused = is_excused or self.case.policy != "memory" or may_be_replayed(self._struck_by(worker))
        if isinstance(event, Recovery) and not is_excused:
            self._replayed_without_need.append(event)  # what a hook raises is only logged
        for world in mine:
            world.lose_memory()

    @staticmethod
    def _initialized(env: Any) -> Any:
        env.initialize()
        return env

    def _again(self, call: Any) -> Any:
        """Call until it returns, as a trainer does that handles Ctrl-C and errors which say that nothing is lost."""
        self._interrupted, self._failed = 0, []
        while True:
            struck = len(self.simulation.struck)
            try:
                if self.case.interrupted < 0 or self.envs is None or self.interruption.fired:
                    return call()
                with self.interruption:
                    return call()
                self._interrupted += 1  # it came in here
            except KeyboardInterrupt:
                self._interrupted += 1
                self.simulation.now += 2 * STEP_LIMIT  # no deadline passes while nobody waits
                self._waited += 2 * STEP_LIMIT
            except WorkerLostError:
                raise
            except OSError as error:  # no descriptor is left
                failures = getattr(error, "failures", {0: error})
                assert {one.errno for one in failures.values()} == {errno.EMFILE}
                assert len(self.simulation.struck) > struck
                self._interrupted += 1  # what was asked is completed later
            except NotRestoredError:  # the env is as it was before
                since = [self._struck_by(worker, struck) for worker in self.workers]
                assert any(is_forced(one, self.case.policy, self.constants) for one in since)

    def _do(self, op: tuple[Any, ...]) -> None:
        ended = [world.has_ended for world in self.worlds]
        if (
            any(ended)
            and self.worlds[0].mode == "DISABLED"
            and op[0] in ("step", "pace", "some", "halves", "roll", "call", "set")
        ):
            self._do_reset(None, ended)
        began, struck = self.simulation.now - self._waited, len(self.simulation.struck)
        getattr(self, f"_do_{op[0]}")(*op[1:])
        if op[0] != "some":  # which may ask nothing of a worker
            self._struck = struck
        if len(self.simulation.struck) > struck:
            limit = self.constants.step_limit(STEP_LIMIT) * (op[2] if op[0] == "roll" else 1)
            took = self.simulation.now - self._waited - began
            assert took < limit + RECOVERY_LIMIT + 1.0, f"{op} took {took:.0f} s, longer than its deadlines allow"

    def _do_reset(self, seed: int | None, mask: Sequence[bool] | None = None) -> None:
        face = self.case.face
        if face == "subprocess_env":
            call = partial(self.envs.reset, seed=seed)
        elif face == "multi_env":
            call = partial(self.envs.reset, seed=seed, mask=mask)
        else:
            call = partial(self.envs.reset, seed=seed, options=None if mask is None else {"reset_mask": np.array(mask)})
        told = self._told(call)
        if told is None:
            return
        rows = [Row(observation, info=info) for observation, info in self._split(*told)]
        for env, (world, row) in enumerate(zip(self.worlds, rows, strict=True)):
            if mask is None or mask[env]:
                is_anew = self._is_begun_anew(self.workers[env])
                for nth in range(self._interrupted):  # completed before the next call did its own
                    if self._was_begun(
                        nth, lambda bare: row.observation.tobytes() != bare.reset(seed=seed)[0].tobytes(), env
                    ):
                        world.bare.reset(seed=None if seed is None else seed + env)
                world.reset(None if seed is None else seed + env, row, is_anew=is_anew)
            elif face != "multi_env":
                assert np.array_equal(row.observation, world.last), "an env that is left out shows what it showed"

    def _is_begun_anew(self, worker: int) -> bool:
        """Tell whether a reset may have begun in a new life of the envs."""
        struck = self._struck_by(worker)
        if struck and self.case.policy in ("raise", "budget"):
            return True  # the error may have been that of a reset that was interrupted, which is dropped
        return self._is_forced(worker)

    def _was_begun(self, nth: int, differs: Any, env: int) -> bool:
        """Tell whether an interrupted call, the ``nth`` in a row, counts as begun.

        It does if it was broken off while it waited, and not if it was while it sent: an eager process is executed then.
        All are honest: an interruption adds a possible world, and what the next call returns says which it is.
        """
        is_certain = nth == 0 and not self.interruption.fired and not self.case.eager
        return is_certain or bool(differs(copy.deepcopy(self.worlds[env].bare)))

    def _do_halves(self, number: int) -> None:
        self._do_step(number, self._step_in_halves if self.case.face != "multi_env" else None)

    def _step_in_halves(self, action: Any) -> Any:
        with contextlib.suppress(CallPendingError):  # an interruption came when it had been sent
            self.envs.step_async(action)
        return self.envs.step_wait()

    def _do_pace(self, number: int) -> None:
        """Step each env by itself, in an order that depends on the number."""
        order = list(range(len(self.worlds)))
        self._step_each(number, order[number % len(order) :] + order[: number % len(order)])

    def _do_some(self, number: int) -> None:
        """Step some envs by themselves; others of their worker are left alone."""
        self._step_each(number, [env for env in range(len(self.worlds)) if (number + env) % 3])

    def _step_each(self, number: int, order: Sequence[int]) -> None:
        actions = actions_of(number)

        def send(envs: list[int]) -> None:
            for env in envs:
                given = [actions[env]]
                with contextlib.suppress(CallPendingError):  # an interruption came when it had been given
                    self.envs.send(given if self.case.face == "multi_env" else np.array(given), [env])

        for env, row in self._at_own_pace(send, order, 1 if number % 2 else None).items():
            self._check_step(env, actions[env], row)

    def _do_begin(self, seed: int) -> None:
        def reset(envs: list[int]) -> None:
            with contextlib.suppress(CallPendingError):
                self.envs.reset_async(seed=seed)

        before = self.truncated
        for env, row in self._at_own_pace(reset, range(len(self.worlds)), 2).items():
            if self.truncated == before:
                self.worlds[env].reset(seed + env, row, is_anew=self._is_begun_anew(self.workers[env]))

    def _at_own_pace(self, give: Any, order: Sequence[int], most: int | None) -> dict[int, Row]:
        """Return what each env returned; nothing if some raised what the policy has them raise."""
        rows: dict[int, Row] = {}

        def pace() -> bool:
            give([env for env in order if env not in rows])
            while len(rows) < len(order):
                *values, infos, envs = self.envs.recv(most and min(most, len(order) - len(rows)))
                for place, env in enumerate(envs):
                    info = infos[place] if self.case.face == "multi_env" else info_of(infos, place)
                    rows[int(env)] = self._row([copy.copy(value[place]) for value in values], info)
            return True

        return rows if self._told(pace, name=give.__name__) else {}

    def _do_step(self, number: int, step: Any = None) -> None:
        actions = actions_of(number)[: len(self.worlds)]
        face = self.case.face
        argument: Any = actions if face == "multi_env" else np.array(actions)
        told = self._told(partial(step or self.envs.step, actions[0] if face == "subprocess_env" else argument))
        if told is None:
            return
        for env, row in enumerate(self._rows(told)):
            self._check_step(env, actions[env], row)

    def _check_step(self, env: int, action: Any, row: Row) -> None:
        info = {key: value for key, value in (row.info or {}).items() if key != "multienv"}
        ours = (row.info or {}).get("multienv", {})
        row = row._replace(info=info, terminated=bool(row.terminated), truncated=bool(row.truncated))
        world = self.worlds[env]
        if ours.get("recovery") == "truncated":
            self._excuse(env)
            kills = is_blamed(self._struck_by(self.workers[env]), self.constants)
            assert kills or world.mode != "NEXT_STEP" or not world.has_ended, "an episode without a step"
            world.truncate(row)
        elif ours.get("recovery") == "reset":
            self._excuse(env)
            assert world.has_ended, "an episode went on, and a new one has begun"
            assert (row.reward, row.terminated, row.truncated) == (0.0, False, False), row
            world.reset(None, row, is_anew=True)
        else:
            self.worlds[env].step(action, row)

    def _do_roll(self, number: int, steps: int) -> None:
        one = self.case.face == "subprocess_env"
        if self.case.face in ("multi_env", "DISABLED"):
            for step in range(steps):
                self._do(("step", number + step))
            return
        told = self._told(partial(self.envs.rollout, partial(policy_of, number), steps))
        if told is None:
            return
        assert len(told) == steps
        assert np.array_equal(told.extras["seen"], told.observations)
        assert np.array_equal(told.actions, policy_of(number, told.observations)[0])
        seen = [*told.observations, told.final_observations]
        for world, first in zip(self.worlds, [seen[0]] if one else seen[0], strict=True):
            assert np.array_equal(first, world.last), "it does not begin where the last call ended"
        for step in range(steps):
            values = told.rewards[step], told.terminations[step], told.truncations[step], told.infos.get(step, {})
            if not one:
                for env, row in enumerate(self._rows((seen[step + 1], *values))):
                    self._check_step(env, told.actions[step, env], row)
                continue
            info = dict(values[3])  # as with SAME_STEP
            final, last = info.pop("final_obs", None), info.pop("final_info", {})
            info |= {"multienv": last["multienv"]} if "multienv" in last else {}
            self.worlds[0].mode = "SAME_STEP"
            self._check_step(
                0, told.actions[step], Row(seen[step + 1], *map(float, values[:1]), *values[1:3], info, final)
            )
            self.worlds[0].mode = "DISABLED"

    def _do_call(self, amount: float) -> None:
        call = partial(self.envs.call, "poke", amount)
        told = self._told(call)
        for nth, failed in enumerate([set() for _ in range(self._interrupted)] + self._failed):  # called all the same
            for env, world in enumerate(self.worlds):
                was_begun = told is None or self._was_begun(
                    nth, lambda bare, env=env: np.atleast_1d(told)[env] != bare.poke(amount), env
                )
                if env not in failed and was_begun:
                    world.bare.poke(amount)
        if told is not None:
            assert list(np.atleast_1d(told)) == [world.bare.poke(amount) for world in self.worlds]

    def _do_ask(self) -> None:
        told = self._told(partial(self.envs.call, "ask"))
        if told is not None:
            assert list(np.atleast_1d(told)) == list(range(len(self.worlds)))

    def _do_set(self, value: float) -> None:
        one = self.case.face == "subprocess_env"
        told = self._told(
            partial(self.envs.set_attr, "offset", value if one else [value] * len(self.worlds)), done=True
        )
        for env, world in enumerate(self.worlds):
            if told or env not in self._failed[-1]:
                world.bare.offset = value

    def _do_snapshot(self) -> None:
        try:
            token = self._told(partial(self.envs.snapshot))
        except UsageError:  # the episode is lost, which the next step tells
            assert any(map(self._is_forced, self.workers))
            token = None
        self._kept["snapshot"] = token, copy.deepcopy(self.worlds)

    def _do_restore(self) -> None:
        token, worlds = self._kept["snapshot"]
        if token is None:
            return
        self._again(partial(self.envs.restore, token))
        self.worlds = copy.deepcopy(worlds)

    def _do_save(self) -> None:
        try:
            state = self._again(self.envs.state_dict)
        except (UsageError, EnvsFailedError):  # what drove the envs is not all known
            assert self.constants.forgets or any(map(self._is_forced, self.workers))
            state = None
        self._kept["state"] = state, copy.deepcopy(self.worlds)

    def _do_load(self) -> None:
        state, worlds = self._kept["state"]
        if state is None:
            return
        self._again(partial(self.envs.load_state_dict, state))
        self.worlds = copy.deepcopy(worlds)

    def _told(self, call: Any, done: Any = None, name: str = "") -> Any:
        """Return what a call returns, or ``done``; ``None`` if it raised the loss of a worker, as the policy has it."""
        struck = self._struck
        try:
            told = self._again(call)
            return told if done is None else done
        except (WorkerLostError, EnvsFailedError) as error:
            assert len(self.simulation.struck) > struck or self.interruption.fired
            if self._is_spent(error):
                self._await_budget()
            elif self.case.policy != "raise":
                if not any(map(self._is_forced, self.workers)):
                    raise
                name = name or getattr(call, "func", call).__name__
                assert name in ("reset", "call", "set_attr", "snapshot"), "only what cannot be truncated is raised"
                if name != "reset":
                    self._failed.append(set(getattr(error, "failures", {0: error})))
                    return None
        self.truncated += 1
        for world in self.worlds:
            world.bare.reset(seed=0)
        self._do_reset(50 + self.truncated)
        return None

    def _struck_by(self, worker: int, first: int = 0) -> list[Fault]:
        """Return what has happened to a worker, from that fault on; envs that are made again have other workers."""
        workers = len(set(self.workers))
        struck = [replace(fault, worker=fault.worker % workers) for fault in self.simulation.struck[first:]]
        if self.interruption.fired:  # in any line: that may be a loss, too
            struck.append(Fault(worker, "request", 0, "interrupted before"))
        return of_worker(struck, worker, eager=self.case.eager)

    def _await_budget(self) -> None:
        """Wait until all restarts are allowed again."""
        self._waited += WINDOW + 1.0
        self.simulation.now += WINDOW + 1.0

    def _is_spent(self, error: Exception) -> bool:
        """Tell whether no restart is left, which only a policy with a small budget allows."""
        failures = getattr(error, "failures", {0: error})
        kinds = {type(one) for one in failures.values()}
        # Other envs of the worker that had been sent an action, too, have no episode any more.
        is_spent = RestartBudgetExceeded in kinds and kinds <= {RestartBudgetExceeded, ResetNeededError}
        return self.case.policy == "budget" and is_spent

    def _excuse(self, env: int) -> None:
        """Fail unless the schedule of faults forced a truncation of this env."""
        self.truncated += 1
        struck = self._struck_by(self.workers[env])
        assert struck, "truncated, and nothing has happened to its worker"
        assert self._is_forced(self.workers[env]), f"truncated without need: {struck}"

    def _is_forced(self, worker: int) -> bool:
        struck = self._struck_by(worker)
        return is_forced(struck, self.case.policy, self.constants, chance=self.case.chance)

    def _split(self, observations: Any, infos: Any) -> list[tuple[Any, Any]]:
        if self.case.face == "subprocess_env":
            return [(observations, infos)]
        if self.case.face != "multi_env":
            infos = [info_of(infos, env) for env in range(len(self.worlds))]
        return list(zip(map(copy.copy, observations), infos, strict=True))

    def _rows(self, told: Any) -> list[Row]:
        if self.case.face == "subprocess_env":
            return [Row(*told)]
        *values, infos = told
        if self.case.face == "multi_env":
            return [Row(*row) for row in zip(*values, infos, strict=True)]
        return [
            self._row([value[env].copy() for value in values], info_of(infos, env)) for env in range(len(self.worlds))
        ]

    def _row(self, values: Sequence[Any], info: dict[str, Any]) -> Row:
        observation, reward, terminated, truncated = values
        if self.case.face == "multi_env":
            return Row(observation, reward, terminated, truncated, info)
        final, last = info.pop("final_obs", None), info.pop("final_info", {})
        if "multienv" in last:
            info["multienv"] = last["multienv"]
        return Row(observation, float(reward), terminated, truncated, info, final)


def of_worker(struck: Sequence[Fault], worker: int, *, eager: bool) -> list[Fault]:
    """Return what has happened to a worker: an exception that strikes while several are asked loses all of them."""
    return [fault for fault in struck if fault.worker == worker or (eager and fault.point.startswith("interrupted"))]


def is_forced(struck: Sequence[Fault], policy: str, constants: Constants, *, chance: bool = False) -> bool:
    """Tell whether what has happened to a worker makes an exact recovery impossible."""
    if not struck or policy in ("truncate", "short journal") or chance or constants.forgets:
        return bool(struck)
    if policy == "memory" and may_be_replayed(struck):
        return True  # nothing else may lead back to what the envs remember
    if any(fault.point == "hang" and fault.event in ("ask", "build") for fault in struck):
        return True  # a replay may take as long as Deadlines.recovery, and no other follows
    if any(fault.point == "raises" and fault.event != "build" for fault in struck):
        return True  # it does otherwise than before
    return is_blamed(struck, constants)


def is_blamed(struck: Sequence[Fault], constants: Constants) -> bool:
    """Tell whether a request, or a build, has ended so many processes that it is given up."""
    # By SIGKILL from outside, as far as anybody knows; but so many times in the same request is no chance.
    deaths = Counter((fault.event, fault.nth) for fault in struck)
    blamed = Counter(
        (fault.event, fault.nth if fault.event == "request" else 0)
        for fault in struck
        if fault.code == CRASHED or (fault.event == "request" and fault.point in ("hang", "late", "garbage"))
    )
    return (
        max(deaths.values(), default=0) >= constants.losses or max(blamed.values(), default=0) >= constants.poison_after
    )


def may_be_replayed(struck: Sequence[Fault]) -> bool:
    """Tell whether more than a worker may be lost: its snapshot too, or what the snapshot would lead to."""
    is_more = any(fault.event != "request" or fault.point == "garbage" for fault in struck)
    is_more |= any(fault.point.startswith("interrupted") for fault in struck)
    from_outside = ("before", "in the env", "executed", "torn", "replied")
    is_killed = all(fault.code == KILLED and fault.point in from_outside for fault in struck)
    return is_more or len(struck) > (3 if is_killed else 1)
