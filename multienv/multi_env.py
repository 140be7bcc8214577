"""Several envs, stepped together: lists in, lists out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.vector import AutoresetMode

from multienv.autoreset import AutoResetWrapper, mode_of
from multienv.config import integer
from multienv.errors import (
    ActionError,
    ClosedError,
    EnvsFailedError,
    SpaceMismatchError,
    UsageError,
)
from multienv.events import Statistics
from multienv.hosted_env import HostedEnv
from multienv.recovery.phases import STARTING
from multienv.recovery.record import refuse_in_hook
from multienv.recovery.supervisor import resumed
from multienv.rounds import Rounds
from multienv.subprocess_env import close_all
from multienv.threads import Pool, side_by_side
from multienv.turns import spread
from multienv.unique import Unique

if TYPE_CHECKING:
    from typing_extensions import Self

Lists = tuple[list[Any], list[Any], list[Any], list[Any], list[dict[str, Any] | None]]

_UNTOUCHED = (None, None, None, None, None)


class MultiEnv(Unique):
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
            somebody else wants their core. And one worker on each core looks out for its next request for 0.2 ms
            before it sleeps, if that has been enough before. Linux only.
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
        if isinstance(envs, gymnasium.Env):
            raise UsageError("MultiEnv: envs is a single env; give a list of them.")
        if not isinstance(envs, Iterable):
            raise UsageError(f"MultiEnv: envs is {envs!r:.100}; give a list of envs.")
        self.envs: list[gymnasium.Env[Any, Any]] = list(envs)
        if not self.envs:
            raise UsageError("MultiEnv: envs is empty; give at least one env.")
        if max_workers is not None and (integer(max_workers) or 0) < 1:
            raise UsageError(f"MultiEnv: max_workers is {max_workers!r}; give an integer of at least 1, or None.")
        self.autoreset_mode = mode_of(autoreset_mode)
        self._lanes = [AutoResetWrapper(env, self.autoreset_mode) for env in self.envs]
        if len(set(map(id, self.envs))) < len(self.envs):
            raise UsageError("MultiEnv: the same env is given twice; give each its own.")
        self._closed = self._all_closed = False
        self._pool = Pool(min(max_workers or len(self.envs), len(self.envs)), "multienv")
        try:
            self._initialize()
        except BaseException:
            # An interruption leaves some half built, with a thread waiting for each.
            close_all([env for _, env in self._hosted() if env._supervisor.phase == STARTING])
            self._pool.shutdown()
            raise
        self.num_envs = len(self.envs)
        if bind_cores:
            spread([env._supervisor for _, env in self._hosted()])
        self._rounds = Rounds(self._lanes, self._pool, max_workers or 1)

    def _hosted(self) -> list[tuple[int, HostedEnv]]:
        """The envs of our own, also those that are wrapped, and their places."""
        inner = [(index, env.unwrapped) for index, env in enumerate(self.envs)]
        return [(index, env) for index, env in inner if isinstance(env, HostedEnv)]

    def _initialize(self) -> None:
        hosted = self._hosted()
        if len({id(env) for _, env in hosted}) < len(hosted):
            raise UsageError("MultiEnv: one env is given twice, in several wrappers; give each its own.")
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
        outcome, whatever its own actions; ``infos[i]["multienv"]`` then says ``resumed``.

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
        rounds = self._rounds
        if rounds.unfinished is not None:
            refuse_in_hook(rounds.supervisors, "step()")
            if not rounds.step_is_unfinished():
                rounds.forget()
        if rounds.unfinished is None:
            several = hasattr(actions, "__len__") and getattr(actions, "shape", None) != ()
            if not several or len(actions) != len(self._lanes):
                given = len(actions) if several else repr(actions)[:100]
                raise ActionError(
                    f"step(): {given} actions for {len(self._lanes)} envs; give one for each, "
                    "None for an env to leave untouched. Nothing was sent."
                )
            current = rounds.step(actions)
            results = current.results
        else:
            current = rounds.resume_steps()
            results = [result and resumed(result) for result in current.results]
        if current.failures:
            if self._closed:  # meanwhile, by a signal handler or another thread: that is no failure of the envs
                raise ClosedError("step(): this MultiEnv has been closed. Make a new one.")
            try:
                raise EnvsFailedError.collect("step()", current.failures, results)
            except EnvsFailedError:
                rounds.unfinished = None  # not before: what is interrupted till then is told the next time
                raise
        if None in results:
            results = [_UNTOUCHED if result is None else result for result in results]
        lists: Any = tuple(map(list, zip(*results, strict=True)))
        rounds.unfinished = None
        return lists  # type: ignore[no-any-return]

    # --- reset ------------------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        mask: Sequence[bool] | None = None,
    ) -> tuple[list[Any], list[dict[str, Any] | None]]:
        """Begin an episode in every env, or in those of ``mask``.

        A reset interrupted by Ctrl-C is completed by whatever is called next, before it does its own.

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
        refuse_in_hook(self._rounds.supervisors, "reset()")
        self._rounds.forget()
        if isinstance(options, dict) and "reset_mask" in options:
            options = dict(options)
            mask = options.pop("reset_mask")
            options = options or None
        arguments = [
            {"seed": one_seed, "options": one} if chosen else None
            for one_seed, one, chosen in zip(self._seeds(seed), self._options(options), self._chosen(mask), strict=True)
        ]
        current = self._rounds.reset(arguments)
        if current.failures:
            raise EnvsFailedError.collect("reset()", current.failures, current.results)
        pairs = [(None, None) if result is None else result for result in current.results]
        return [observation for observation, _ in pairs], [info for _, info in pairs]

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
        if not isinstance(lanes, list | tuple) or len(lanes) != self.num_envs:
            raise UsageError(f"load_state_dict(): give what the state_dict() of {self.num_envs} such envs returned.")
        tasks = self._rounds.each(
            [partial(lane.load_state_dict, one) for lane, one in zip(self._lanes, lanes, strict=True)]
        )
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
        refuse_in_hook(self._rounds.supervisors, what)
        if self._rounds.step_is_unfinished():
            raise UsageError(f"{what}: a step was interrupted. Call step() to complete it, or reset() to drop it.")
        self._rounds.forget()

    def _each(self, what: str, ask: Callable[[gymnasium.Env[Any, Any]], Any]) -> list[Any]:
        self._refuse_unfinished(what)
        tasks = self._rounds.each([partial(ask, env) for env in self.envs])
        failures = {index: task.error for index, task in enumerate(tasks) if task.error is not None}
        results = [task.result for task in tasks]
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


def _call(env: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(env, HostedEnv):
        return env.call(name, *args, **kwargs)
    attribute = env.get_wrapper_attr(name)
    return attribute(*args, **kwargs) if callable(attribute) else attribute
