"""Several envs, stepped together: lists in, lists out."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.vector import AutoresetMode

from multienv.autoreset import AutoResetWrapper, mode_of
from multienv.errors import (
    ActionError,
    ClosedError,
    EnvsFailedError,
    MultienvError,
    SpaceMismatchError,
    UsageError,
)
from multienv.events import Statistics
from multienv.hosted_env import HostedEnv
from multienv.recovery.phases import LOST, RUNNING, STARTING, RecoveryDue
from multienv.recovery.supervisor import Supervisor
from multienv.subprocess_env import close_all
from multienv.threads import Pool, Task, side_by_side

if TYPE_CHECKING:
    from typing_extensions import Self

Lists = tuple[list[Any], list[Any], list[Any], list[Any], list[dict[str, Any] | None]]

# The envs with calls in two halves that one thread steps: index, autoreset, supervisor.
_Share = list[tuple[int, AutoResetWrapper, Supervisor]]

_sequence = attrgetter("seq")
_UNTOUCHED = (None, None, None, None, None)


class _Round:
    """One call to all envs: what was asked and what has come back. Survives Ctrl-C."""

    __slots__ = ("arguments", "failures", "marks", "results", "shares", "tasks")

    def __init__(self, arguments: Sequence[Any], marks: list[int]) -> None:
        self.arguments = arguments
        self.marks = marks
        self.results: list[Any] = [None] * len(arguments)
        self.failures: dict[int, BaseException] = {}
        self.shares: list[Task] = []
        self.tasks: dict[int, Task] = {}

    def keep_arguments(self) -> None:
        """The call is interrupted: the caller may reuse what it has given, before all of it is sent."""
        self.arguments = [_copied(argument) for argument in self.arguments]

    def fail(self, index: int, error: Exception) -> None:
        """To be called in an except clause: it is the env's failure, or raised again."""
        # In the main thread it may be a signal handler's. If not, it comes again when another thread resumes the round.
        if not isinstance(error, MultienvError) and threading.current_thread() is threading.main_thread():
            raise
        self.failures[index] = error


class MultiEnv:
    """Steps and resets several envs at once.

    ::

        m = MultiEnv(create_subprocess_envs([lambda: gymnasium.make("CartPole-v1")] * 8))
        observations, infos = m.reset(seed=0)
        observations, rewards, terminations, truncations, infos = m.step(actions)

    Envs whose calls come in two halves are stepped in shares: a share sends all its requests before it
    awaits the first answer. The calling thread takes the first share, the threads of the executor the others;
    envs that only block, and envs that are being brought back, get a thread each. One share is the default
    because it is the fastest: handing a step to another thread and back costs about as much as stepping
    eight CartPoles (``benchmarks/throughput.py`` prints both).

    Args:
        envs: Any gymnasium.Env each; :class:`SubprocessEnv` gains most. They are initialized if they need it.
        autoreset_mode: What happens when an episode ends; see :class:`AutoResetWrapper`.
        bind_cores: Where there are at least as many envs as cores, have workers whose steps are shorter than 0.2 ms
            run on one core each in turn, which is faster by a third for CartPole. They free themselves while
            somebody else wants their core. Linux only.
        max_workers: Threads of the executor, and shares the envs are dealt to. ``None``: one share, and
            threads for one env each where a thread is needed.

    Raises:
        UsageError: No envs.
        SpaceMismatchError: Their spaces differ.
    """

    def __init__(
        self,
        envs: Iterable[gymnasium.Env[Any, Any]],
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        max_workers: int | None = None,
        bind_cores: bool = True,
    ) -> None:
        """Initialize what needs it, and compare the spaces."""
        self.envs: list[gymnasium.Env[Any, Any]] = list(envs)
        if not self.envs:
            raise UsageError("MultiEnv: envs is empty; give at least one env.")
        if len(set(map(id, self.envs))) < len(self.envs):
            raise UsageError("MultiEnv: the same env is given twice; give each its own.")
        if max_workers is not None and (type(max_workers) is not int or max_workers < 1):
            raise UsageError(f"MultiEnv: max_workers is {max_workers!r}; give an integer of at least 1, or None.")
        self.autoreset_mode = mode_of(autoreset_mode)
        self._lanes = [AutoResetWrapper(env, self.autoreset_mode) for env in self.envs]
        self._closed = self._all_closed = False
        self._unfinished: tuple[str, Any] | None = None  # a round of steps or resets, or the tasks of another call
        self._pool = Pool(max_workers or len(self.envs), "multienv")
        try:
            self._initialize()
        except BaseException:
            # An interruption leaves some half built, with a thread waiting for each.
            close_all([env for env in self.envs if isinstance(env, HostedEnv) and env._supervisor.phase == STARTING])
            self._pool.shutdown()
            raise
        self.num_envs = len(self.envs)
        self._blocking = [index for index, lane in enumerate(self._lanes) if not lane.splits]
        self._supervisors: list[Supervisor] = [env._supervisor for env in self.envs if isinstance(env, HostedEnv)]
        if bind_cores:
            self._spread()
        shares = min(max_workers or 1, max(1, len(self._supervisors)))
        members = [
            (index, lane, env._supervisor)
            for index, (lane, env) in enumerate(zip(self._lanes, self.envs, strict=True))
            if isinstance(env, HostedEnv)
        ]
        self._shares: list[_Share] = [members[share::shares] for share in range(shares)]

    def _spread(self) -> None:
        """Deal the envs to the cores; with fewer envs than cores the scheduler knows better which are idle."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if 1 < len(cores) <= len(self._supervisors):
            for place, supervisor in enumerate(self._supervisors):
                supervisor.prefer(cores[place % len(cores)])

    def _initialize(self) -> None:
        hosted = [(index, env) for index, env in enumerate(self.envs) if isinstance(env, HostedEnv)]
        for _, env in hosted:
            env.start()
        tasks = side_by_side(self._pool, [env.initialize for _, env in hosted])
        failures = {index: task.error for (index, _), task in zip(hosted, tasks, strict=True) if task.error}
        if failures:
            results = [None if index in failures else env for index, env in enumerate(self.envs)]
            raise EnvsFailedError.collect("initialize()", failures, results, "Mend what the causes below name.")
        first = self.envs[0]
        for index, one in enumerate(self.envs):
            for name in ("observation_space", "action_space"):
                if getattr(one, name) != getattr(first, name):
                    raise SpaceMismatchError(
                        f"MultiEnv: env {index} has {name} {getattr(one, name)}, env 0 has {getattr(first, name)}. "
                        "Put envs of one kind together, or wrap them to the same spaces."
                    )
        self.observation_space = first.observation_space
        self.action_space = first.action_space
        self.metadata: dict[str, Any] = {**(first.metadata or {}), "autoreset_mode": self.autoreset_mode}
        self.spec = first.spec
        self.render_mode = first.render_mode

    def __len__(self) -> int:
        """The number of envs."""
        return len(self.envs)

    # --- step -----------------------------------------------------------------------------------

    def step(self, actions: Sequence[Any]) -> Lists:
        """Step every env.

        A step interrupted by Ctrl-C has been sent all the same: the next call completes it and returns its
        outcome, whatever its own actions.

        Args:
            actions: One for each env; ``None`` leaves that env untouched and gives ``None`` in its five places.

        Returns:
            Five lists: observations, rewards, terminations, truncations, infos.

        Raises:
            ActionError: A wrong number of actions; nothing was sent.
            EnvsFailedError: Some envs raised. The others have stepped: their outcomes are in its ``results``.
        """
        if self._closed:
            raise ClosedError("step(): this MultiEnv has been closed. Make a new one.")
        if self._unfinished is not None:
            self._resume_or_drop("step")
        if self._unfinished is None:
            if not hasattr(actions, "__len__") or len(actions) != len(self._lanes):
                given = len(actions) if hasattr(actions, "__len__") else repr(actions)[:100]
                raise ActionError(
                    f"step(): {given} actions for {len(self._lanes)} envs; give one for each, "
                    "None for an env to leave untouched. Nothing was sent."
                )
            current = _Round(actions, list(map(_sequence, self._supervisors)))
            # Until the outcome is handed over: whatever raises in between, the next call takes up this round.
            self._unfinished = ("step", current)
            try:
                self._run_steps(current)
            except BaseException:
                current.keep_arguments()
                raise
        else:
            current = self._resume(self._unfinished[1], self._resume_step)
        results = current.results
        if current.failures:
            error = EnvsFailedError.collect("step()", current.failures, results)
            self._unfinished = None
            raise error
        if None in results:
            results = [_UNTOUCHED if result is None else result for result in results]
        lists: Any = tuple(map(list, zip(*results, strict=True)))
        self._unfinished = None
        return lists  # type: ignore[no-any-return]

    def _run_steps(self, current: _Round) -> None:
        tasks, shares = current.tasks, current.shares
        for index in self._blocking:
            if current.arguments[index] is not None:
                self._begin(current, index, partial(self._step_one, current, index))
        for share in self._shares[1:]:
            shares.append(Task(partial(self._step_share, share, current)))
            shares[-1].start(self._pool)
        self._step_share(self._shares[0], current)
        if shares or tasks:
            self._gather(current)

    def _step_one(self, current: _Round, index: int) -> Any:
        return self._lanes[index].step(current.arguments[index])

    def _begin(self, current: _Round, index: int, call: Callable[[], Any]) -> None:
        """Have an env's part in the round done by another thread."""
        task = current.tasks[index] = Task(call)  # noted first: an interruption does not lose it
        task.start(self._pool)

    def _step_share(self, share: _Share, current: _Round) -> None:
        arguments, results = current.arguments, current.results
        sent: list[tuple[int, AutoResetWrapper, Supervisor | None]] = []
        for member in share:
            index, lane, supervisor = member
            action = arguments[index]
            if action is not None:
                try:
                    if supervisor.phase == RUNNING:
                        supervisor.send_step(action)
                        sent.append(member)
                    elif supervisor.due or (lane.ended and supervisor.phase == LOST):  # that may take a while
                        self._begin(current, index, partial(self._step_one, current, index))
                    else:
                        lane.step_async(action)
                        sent.append((index, lane, None))
                except Exception as error:
                    current.fail(index, error)
        for index, lane, stepping in sent:
            try:
                if stepping is None:
                    results[index] = lane.step_wait(defer=True)
                    continue
                transition = stepping.receive_step(None, True)
                if not (transition[2] or transition[3]) or not lane.end(transition):
                    results[index] = transition
                elif stepping.due or stepping.phase == LOST:
                    self._begin(current, index, lane.step_wait)
                else:
                    lane.step_async(None)
                    sent.append((index, lane, None))  # to be awaited behind the others
            except RecoveryDue:
                self._begin(current, index, lane.step_wait)
            except Exception as error:
                current.fail(index, error)

    def _gather(self, current: _Round) -> None:
        for share in current.shares:
            share.wait()
            error, share.error = share.error, None  # raised once: the round is resumable
            if error is not None:
                raise error
        for index, task in current.tasks.items():
            task.wait()
            if task.error is None:
                current.results[index] = task.result
            else:  # no signal handler's, in a thread of ours; SystemExit and KeyboardInterrupt are the env's as well
                current.failures[index] = task.error

    # --- after an interrupted call ----------------------------------------------------------------

    def _resume_or_drop(self, command: str) -> None:
        """An interrupted step is completed by the next step; anything else completes and forgets what there is."""
        assert self._unfinished is not None
        kind, pending = self._unfinished
        if kind == command == "step":
            return
        if kind == "each":
            for task in pending:
                task.drop()
        else:
            self._resume(pending, self._resume_step if kind == "step" else self._resume_reset)
        self._unfinished = None

    def _resume(self, current: _Round, resume_one: Callable[[_Round, int, int | None], Any]) -> _Round:
        """Bring an interrupted round to its end, whichever line it was interrupted at."""
        for task in (*current.shares, *current.tasks.values()):
            task.start(self._pool)
        self._gather(current)
        marks = iter(current.marks)
        for index, env in enumerate(self.envs):
            mark = next(marks) if isinstance(env, HostedEnv) else None
            if current.arguments[index] is None or index in current.tasks or index in current.failures:
                continue
            if current.results[index] is None:
                self._begin(current, index, partial(resume_one, current, index, mark))
        self._gather(current)
        return current

    def _resume_step(self, current: _Round, index: int, mark: int | None) -> Any:
        lane = self._lanes[index]
        if mark is None or not lane.env._supervisor.has_asked_since(mark):  # type: ignore[attr-defined]
            return lane.step(current.arguments[index])
        try:
            return lane.resume()
        except Exception as error:
            lane.env._supervisor.note_interruption(error)  # type: ignore[attr-defined]
            raise

    def _resume_reset(self, current: _Round, index: int, mark: int | None) -> Any:
        lane = self._lanes[index]
        if mark is None or not lane.env._supervisor.has_asked_since(mark):  # type: ignore[attr-defined]
            return lane.reset(**current.arguments[index])
        return lane.resume_reset()

    # --- reset ------------------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        mask: Sequence[bool] | None = None,
    ) -> tuple[list[Any], list[dict[str, Any] | None]]:
        """Begin an episode in every env, or in those of ``mask``.

        Args:
            seed: ``None``, one integer (env ``i`` gets ``seed + i``), or one for each env.
            options: The envs' own: one for all, or one for each.
            mask: Which envs to reset; the others are untouched and give ``None`` in both places. Gymnasium's
                ``options={"reset_mask": mask}`` says the same.

        Returns:
            Observations and infos.

        Raises:
            EnvsFailedError: Some envs raised; the others are reset: see its ``results``.
        """
        if self._closed:
            raise ClosedError("reset(): this MultiEnv has been closed. Make a new one.")
        if self._unfinished is not None:
            self._resume_or_drop("reset")
        if isinstance(options, dict) and "reset_mask" in options:
            options = dict(options)
            mask = options.pop("reset_mask")
            options = options or None
        arguments = [
            {"seed": one_seed, "options": one} if chosen else None
            for one_seed, one, chosen in zip(self._seeds(seed), self._options(options), self._chosen(mask), strict=True)
        ]
        results, failures = self._reset_all(arguments)
        if failures:
            raise EnvsFailedError.collect("reset()", failures, results)
        pairs = [(None, None) if result is None else result for result in results]
        return [observation for observation, _ in pairs], [info for _, info in pairs]

    def _reset_all(self, arguments: list[dict[str, Any] | None]) -> tuple[list[Any], dict[int, BaseException]]:
        current = _Round(arguments, list(map(_sequence, self._supervisors)))
        self._unfinished = ("reset", current)
        try:
            self._reset_chosen(current)
        except BaseException as error:
            current.keep_arguments()
            for supervisor in self._supervisors:
                supervisor.note_interruption(error)
            raise
        self._unfinished = None
        return current.results, current.failures

    def _reset_chosen(self, current: _Round) -> None:
        sent = []
        for index, lane in enumerate(self._lanes):
            chosen = current.arguments[index]
            if chosen is None:
                continue
            if not lane.splits or lane.env._supervisor.due or lane.env._supervisor.phase == LOST:  # type: ignore[attr-defined]
                self._begin(current, index, partial(lane.reset, **chosen))
                continue
            try:
                lane.reset_async(**chosen)
                sent.append((index, lane))
            except Exception as error:
                current.fail(index, error)
        for index, lane in sent:
            try:
                current.results[index] = lane.reset_wait(defer=True)
            except RecoveryDue:
                self._begin(current, index, lane.reset_wait)
            except Exception as error:
                current.fail(index, error)
        self._gather(current)

    def _seeds(self, seed: Any) -> Sequence[int | None]:
        if seed is None or not hasattr(seed, "__len__"):
            first = HostedEnv._checked_seed(seed)
            return [None if first is None else first + index for index in range(self.num_envs)]
        return [HostedEnv._checked_seed(one) for one in self._one_each("seed", seed)]

    def _options(self, options: Any) -> Sequence[dict[str, Any] | None]:
        if options is None or isinstance(options, dict):
            return [options] * self.num_envs
        return self._one_each("options", options)

    def _chosen(self, mask: Any) -> Sequence[bool]:
        if mask is None:
            return [True] * self.num_envs
        return [bool(one) for one in self._one_each("mask", mask)]

    def _one_each(self, name: str, values: Any) -> Sequence[Any]:
        try:
            each: list[Any] = list(values)
        except TypeError:
            raise UsageError(f"reset({name}={values!r:.100}): give one value, or a list of {self.num_envs}.") from None
        if len(each) != self.num_envs:
            raise UsageError(f"reset(): {len(each)} values of {name} for {self.num_envs} envs; give one for each.")
        return each

    # --- anything else ----------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every env, side by side; an attribute that is not callable is returned."""
        return self._each(f"call({name!r})", lambda env: _call(env, name, args, kwargs))

    def get_attr(self, name: str) -> list[Any]:
        """An attribute of every env."""
        return self._each(f"get_attr({name!r})", lambda env: env.get_wrapper_attr(name))

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute on every env: a list or tuple has one value for each, anything else is for all."""
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        each = dict(zip(map(id, self.envs), self._one_each("values", values), strict=True))
        self._each(f"set_attr({name!r})", lambda env: env.set_wrapper_attr(name, each[id(env)]))

    def render(self) -> list[Any]:
        """What every env renders."""
        return self._each("render()", lambda env: env.render())

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on from here in another trainer; see :meth:`SubprocessEnv.state_dict`.

        Raises:
            UsageError: A step was interrupted, or an env keeps no journal.
        """
        self._refuse_unfinished("state_dict()")
        return {"lanes": [lane.state_dict() for lane in self._lanes]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was called, all envs side by side.

        Raises:
            EnvsFailedError: Some could not be restored (``NotRestoredError``); those are as they were before.
            UsageError: ``state`` is something else, or of another number of envs.
        """
        self._refuse_unfinished("load_state_dict()")
        lanes = state.get("lanes") if isinstance(state, dict) else None
        if lanes is None or len(lanes) != self.num_envs:
            raise UsageError(f"load_state_dict(): give what the state_dict() of {self.num_envs} such envs returned.")
        calls = [partial(lane.load_state_dict, one) for lane, one in zip(self._lanes, lanes, strict=True)]
        tasks = side_by_side(self._pool, calls)
        failures = {index: task.error for index, task in enumerate(tasks) if task.error is not None}
        if failures:
            raise EnvsFailedError.collect(
                "load_state_dict()", failures, [None] * self.num_envs, "The others are restored."
            )

    def statistics(self) -> list[Statistics | None]:
        """The statistics of every env that keeps any."""
        return [env.statistics() if isinstance(env, HostedEnv) else None for env in self.envs]

    def _refuse_unfinished(self, what: str) -> None:
        if self._closed:
            raise ClosedError(f"{what}: this MultiEnv has been closed. Make a new one.")
        if self._unfinished is not None:
            if self._unfinished[0] == "step":
                raise UsageError(f"{what}: a step was interrupted. Call step() to complete it, or reset() to drop it.")
            self._resume_or_drop(what)

    def _each(self, what: str, ask: Callable[[gymnasium.Env[Any, Any]], Any]) -> list[Any]:
        self._refuse_unfinished(what)
        tasks = [Task(partial(ask, env)) for env in self.envs]
        self._unfinished = ("each", tasks)
        for task in tasks:
            task.start(self._pool)
        for task in tasks:
            task.wait()
        failures = {index: task.error for index, task in enumerate(tasks) if task.error is not None}
        results = [task.result for task in tasks]
        self._unfinished = None
        if failures:
            raise EnvsFailedError.collect(what, failures, results, "The others answered; all episodes go on.")
        return results

    def close(self) -> None:
        """Close all envs, side by side; again does nothing, unless it was interrupted."""
        self._closed = True
        if not self._all_closed:
            close_all(self.envs)
            self._pool.shutdown()
            self._all_closed = True

    def __enter__(self) -> Self:
        """Nothing more to do: the envs are initialized."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def _copied(argument: Any) -> Any:
    with contextlib.suppress(Exception):  # what cannot be copied is kept as it is
        return copy.deepcopy(argument)
    return argument


def _call(env: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(env, HostedEnv):
        return env.call(name, *args, **kwargs)
    attribute = env.get_wrapper_attr(name)
    return attribute(*args, **kwargs) if callable(attribute) else attribute
