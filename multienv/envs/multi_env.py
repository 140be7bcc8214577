"""Several envs that are stepped together: lists in, lists out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NoReturn

import gymnasium
from gymnasium.vector import AutoresetMode
from typing_extensions import Self

from multienv._engine import interrupts
from multienv._engine.asking.fanout import FanOut, mark_resumed
from multienv._engine.asking.in_flight import ReadyBatch
from multienv._engine.asking.members import Blocking, Round
from multienv._engine.asking.stream import Stream
from multienv._engine.building.building import mode_of
from multienv._engine.cores import spread
from multienv._engine.recovery.supervisor import Supervisor
from multienv._engine.wire.actions import own_copy
from multienv._engine.wire.messages import Reset, reset_of_one
from multienv.config import checked_count
from multienv.envs.arguments import checked_indices, checked_seeds, envs_failed, refuse_copy, reset_options
from multienv.envs.autoreset import AutoresetOfOne, AutoResetWrapper, joined
from multienv.envs.subprocess_env import (
    SupervisedEnv,
    check_same_spaces,
    close_all,
    initialize_all,
    supervisor_of,
)
from multienv.errors import ActionError, ClosedError, EnvsFailedError, UsageError
from multienv.events import Statistics

Lists = tuple[list[Any], list[Any], list[Any], list[Any], list[dict[str, Any] | None]]

_UNTOUCHED = (None, None, None, None, None)


class MultiEnv:
    """Steps and resets several envs at once.

    ::

        m = MultiEnv(create_subprocess_envs([lambda: gymnasium.make("CartPole-v1")] * 8))
        observations, infos = m.reset(seed=0)
        observations, rewards, terminations, truncations, infos = m.step(actions)

    If an env has calls in two halves (:class:`SubprocessEnv`), MultiEnv sends all requests before it waits for the
    first answer. The threads of a ThreadPoolExecutor do all work that blocks: envs of any other kind, building, and the
    recovery of lost processes.

    Args:
        envs: A list of any gymnasium.Env; :class:`SubprocessEnv` gains most. They are initialized if necessary.
        autoreset_mode: What happens when an episode ends; see :class:`AutoResetWrapper`.
        bind_cores: With at least as many envs as cores, let each worker with short steps run on one core, the cores in
            turn. This is a third faster for CartPole. A worker frees itself while another program wants its core. Linux
            only, and not in a container with a quota of CPU time.
        max_workers: Threads of the executor; ``None``: one for each env.

    Raises:
        UsageError: No envs are given, or their spaces differ.
    """

    def __init__(
        self,
        envs: Iterable[gymnasium.Env[Any, Any]],
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        max_workers: int | None = None,
        bind_cores: bool = True,
    ) -> None:
        self.envs: list[Any] = _listed(envs)
        checked_count("MultiEnv: max_workers", max_workers, needed=False)
        self.autoreset_mode = mode_of(autoreset_mode)
        self.num_envs = len(self.envs)
        self._closed = self._all_closed = False
        # The envs of our own, also those that are wrapped.
        inner = {index: env.unwrapped for index, env in enumerate(self.envs)}
        hosted = {index: env for index, env in inner.items() if isinstance(env, SupervisedEnv)}
        self._initialize(hosted)
        self._adopt_spaces()
        if bind_cores:
            spread([one for env in hosted.values() if (one := supervisor_of(env)) is not None])
        disabled = self.autoreset_mode is AutoresetMode.DISABLED
        autoreset = None if disabled else AutoresetOfOne(self.autoreset_mode)
        members: list[Supervisor | Blocking] = [
            supervisor_of(env) or partial(_ask_here, AutoResetWrapper(env, self.autoreset_mode)) for env in self.envs
        ]
        self._fan = FanOut(members, autoreset=autoreset, threads=max_workers)
        self._stream = Stream(self._fan)

    def _initialize(self, hosted: dict[int, SupervisedEnv]) -> None:
        indexes, envs = list(hosted), list(hosted.values())
        try:
            failures = initialize_all(envs)
        except BaseException:
            # An interruption leaves some half built, with a thread waiting for each.
            close_all([env for env in envs if env.statistics().state == "starting"])
            raise
        if failures:
            failed = {indexes[member]: error for member, error in failures.items()}
            results = [None if index in failed else env for index, env in enumerate(self.envs)]
            raise EnvsFailedError.collect("initialize()", failed, results, "Fix what the errors below name.")

    def _adopt_spaces(self) -> None:
        first = self.envs[0]
        check_same_spaces("MultiEnv", self.envs)
        self.observation_space = first.observation_space
        self.action_space = first.action_space
        self.metadata: dict[str, Any] = {**(first.metadata or {}), "autoreset_mode": self.autoreset_mode}
        self.spec = first.spec
        self.render_mode = first.render_mode

    def __len__(self) -> int:
        """Return the number of envs."""
        return len(self.envs)

    # --- step -----------------------------------------------------------------------------------

    def step(self, actions: Sequence[Any]) -> Lists:
        """Step every env.

        If Ctrl-C interrupts a step while it waits, the next call completes that step and returns its outcome, whatever
        its own actions; ``infos[i]["multienv"]`` then says ``resumed``.

        Args:
            actions: One action for each env. ``None`` skips the env: its entry in all five lists is ``None``.

        Returns:
            Five lists: observations, rewards, terminations, truncations, infos.

        Raises:
            ActionError: The number of actions is wrong; nothing was sent.
            EnvsFailedError: Some envs raised. The other envs have stepped, and ``results`` has their outcomes. With
                autoreset, the next step of an env that raised begins a new episode; without it, reset these envs.
        """
        fan, unfinished = self._fan, self._fan.unfinished
        if unfinished is not None and unfinished.name == "step" and not self._closed:
            current = fan.resume()
            results = [result and mark_resumed(result) for result in fan.answers_of(current)]
        else:
            if unfinished is not None or self._closed:
                self._finish_interrupted("step()")
            self._check_actions(actions, self.num_envs, "step()")
            current = fan.ask("step", actions)
            results = fan.answers_of(current)
        if current.failures:
            self._raise("step()", current, results)
        if None in results:
            results = [_UNTOUCHED if result is None else result for result in results]
        lists: Any = tuple(map(list, zip(*results, strict=True)))
        fan.finish()
        return lists  # type: ignore[no-any-return]

    def _check_actions(self, actions: Any, count: int, what: str) -> None:
        if type(actions) is list and len(actions) == count:
            return
        is_unordered = isinstance(actions, Mapping | str | set | frozenset)
        is_list = hasattr(actions, "__len__") and getattr(actions, "shape", None) != () and not is_unordered
        if not is_list or len(actions) != count:
            given = f"{len(actions)} actions" if is_list else repr(actions)[:100]
            untouched = ", None for an env to leave untouched" if what == "step()" else ""
            raise ActionError(
                f"{what}: {given} for {count} envs; give a list with one for each{untouched}. Nothing was sent."
            )

    # --- reset ------------------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        mask: Sequence[bool] | None = None,
    ) -> tuple[list[Any], list[dict[str, Any] | None]]:
        """Begin an episode in every env, or in the envs of ``mask``.

        If Ctrl-C interrupts a reset, the next call of any kind completes it before it does its own work.

        Args:
            seed: ``None``, one integer (env ``i`` gets ``seed + i``), or one for each env.
            options: Options for the envs' own ``reset``: one dict for all, or one for each.
            mask: Which envs to reset. The other envs are untouched: their entry in both lists is ``None``. Gymnasium's
                ``options={"reset_mask": mask}`` does the same.

        Returns:
            Observations and infos.

        Raises:
            EnvsFailedError: Some envs raised. The other envs are reset, and ``results`` has their outcomes.
        """
        self._refuse_if_closed("reset()")
        requests = self._resets(seed, options, mask)
        fan = self._fan
        self._stream.finish_interrupted("reset with a mask" if None in requests else "reset")
        self._seed_here(requests)
        current = fan.ask("reset", requests)
        answers = fan.answers_of(current)
        if current.failures:
            self._raise("reset()", current, answers)
        pairs = [(None, None) if answer is None else answer for answer in answers]
        lists = [observation for observation, _ in pairs], [info for _, info in pairs]
        fan.finish()
        return lists

    def _resets(self, seed: Any, options: Any, mask: Any) -> list[Reset | None]:
        """Return the request for each env, ``None`` for those that are not reset."""
        each, found = reset_options(options, self.num_envs)
        mask = found if mask is None else mask
        chosen = [True] * self.num_envs if mask is None else self._one_each("mask", mask)
        seeds = checked_seeds(seed, self.num_envs)
        return [reset_of_one(*arguments) if one else None for one, *arguments in zip(chosen, seeds, each, strict=True)]

    def _seed_here(self, requests: Sequence[Reset | None]) -> None:
        """Seed ``np_random`` of the envs on this side, as gymnasium's own reset does."""
        for env, request in zip(self.envs, requests, strict=True):
            if request is not None and isinstance(env, SupervisedEnv):
                gymnasium.Env.reset(env, seed=request.seeds[0])

    def _one_each(self, name: str, values: Any) -> Sequence[Any]:
        each: list[Any] = list(values)
        if len(each) != self.num_envs:
            raise UsageError(f"{len(each)} values of {name} for {self.num_envs} envs; give one for each.")
        return each

    # --- each env at its own pace -----------------------------------------------------------------

    def reset_async(self, *, seed: Any = None, options: Any = None, mask: Sequence[bool] | None = None) -> None:
        """Send resets to envs that are not under way; :meth:`recv` returns the results.

        Args:
            seed: As for :meth:`reset`.
            options: As for :meth:`reset`.
            mask: As for :meth:`reset`.

        Raises:
            CallPendingError: Some of the envs are under way; nothing was sent.
        """
        self._refuse_if_closed("reset_async()")
        stream, requests = self._stream.start("reset_async"), self._resets(seed, options, mask)
        chosen = {index: one for index, one in enumerate(requests) if one is not None}
        stream.refuse_busy("reset_async", chosen)
        self._seed_here(requests)
        stream.send("reset", chosen, list(chosen.values()))

    @property
    def idle_envs(self) -> list[int]:
        """Return the envs that wait for an action: all but those that :meth:`recv` has to return."""
        self._refuse_if_closed("idle_envs")
        return self._stream.idle()

    def send(self, actions: Sequence[Any], indices: Sequence[int] | None = None) -> None:
        """Send actions to some envs without waiting; :meth:`recv` returns the results.

        A slow, hanging or recovering env delays no other env. Each env's own trajectory is the same as with
        :meth:`step`, in any order: see :meth:`SubprocessVectorEnv.send`.

        Args:
            actions: One action for each of ``indices``.
            indices: Different envs that are not under way; ``None``: all, in order.

        Raises:
            ActionError: The number of actions is wrong; nothing was sent.
            CallPendingError: Some of the envs are under way, or a signal handler calls it while another call sends;
                nothing was sent.
        """
        self._refuse_if_closed("send()")
        stream = self._stream.start("send")
        chosen = list(range(self.num_envs)) if indices is None else checked_indices(indices, self.num_envs)
        self._check_actions(actions, len(chosen), "send()")
        stream.refuse_busy("send", chosen)
        stream.send("step", chosen, own_copy(list(actions), "send()"))

    def recv(self, k: int | None = None, at_most: int | None = None, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the first ``k`` envs that are ready, among the envs that got an action or a reset.

        Args:
            k: Number of envs; ``None``: all that are under way.
            at_most: Return also those that are ready by then, up to so many in all; ``None``: exactly ``k``. What is
                not returned, a later call returns.
            timeout: Seconds to wait; ``None`` waits for ever. After that it returns the envs that are ready, even if
                they are fewer than ``k``.

        Returns:
            Six lists of the same length: observations, rewards, terminations, truncations, infos, and the indices of
            the envs, in the order in which they were ready. An env that was reset has reward 0.0 and both flags False.

        Raises:
            WaitTimeout: No env is ready after ``timeout`` seconds. Nothing is lost; call it again.
            EnvsFailedError: Some of these envs raised; ``results`` has the outcomes of the others among them.
            CallPendingError: A signal handler calls it inside of another ``recv()``.
            UsageError: Fewer than ``k`` envs are under way, or none.
        """
        self._refuse_if_closed("recv()")
        return self._stream.start("recv").recv(self._received, k, at_most, timeout)  # type: ignore[no-any-return]

    def _received(self, ready: ReadyBatch) -> Any:
        """Return what recv() returns for these results, or the error to raise."""
        self._refuse_if_closed("recv()")
        envs, answers, errors = ready.envs, ready.answers, ready.errors
        if ready.resets:
            begun = ready.resets - errors.keys()
            answers = [joined(None, one) if env in begun else one for env, one in zip(envs, answers, strict=True)]
        if errors:
            outcomes = dict(zip(envs, answers, strict=True))
            results = [outcomes.get(index) for index in range(self.num_envs)]
            return envs_failed("recv()", self.autoreset_mode, errors, results)
        return *map(list, zip(*answers, strict=True)), envs

    # --- anything else ----------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every env, in parallel. If the attribute is not callable, return it."""
        return self._each(f"call({name!r})", [partial(_call, env, name, args, kwargs) for env in self.envs])

    def get_attr(self, name: str) -> list[Any]:
        """Return an attribute of every env."""
        return self._each(f"get_attr({name!r})", [partial(env.get_wrapper_attr, name) for env in self.envs])

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute on every env. A list or tuple has one value for each env; any other value is for all."""
        each = self._one_each("values", values) if isinstance(values, list | tuple) else [values] * self.num_envs
        calls = [partial(env.set_wrapper_attr, name, value) for env, value in zip(self.envs, each, strict=True)]
        self._each(f"set_attr({name!r})", calls)

    def render(self) -> list[Any]:
        """Render every env and return the results."""
        return self._each("render()", [env.render for env in self.envs])

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, to continue in another trainer; see :meth:`SubprocessEnv.state_dict`.

        Raises:
            UsageError: A step was interrupted, or an env keeps no journal.
        """
        self._finish_interrupted("state_dict()")
        return {"envs": [env.state_dict() for env in self.envs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was called, with all envs in parallel.

        Args:
            state: A dict that :meth:`state_dict` returned.

        Raises:
            EnvsFailedError: Some envs could not be restored (``NotRestoredError``); these are as they were before.
            UsageError: ``state`` is not a dict of :meth:`state_dict`, or has another number of envs.
        """
        self._finish_interrupted("load_state_dict()")
        each = state.get("envs") if isinstance(state, dict) else None
        if not isinstance(each, list | tuple) or len(each) != self.num_envs:
            raise UsageError(f"load_state_dict(): give what the state_dict() of {self.num_envs} such envs returned.")
        calls = [partial(env.load_state_dict, one) for env, one in zip(self.envs, each, strict=True)]
        self._each("load_state_dict()", calls)

    def statistics(self) -> list[Statistics | None]:
        """Return the statistics of every env; ``None`` for an env that has none."""
        add = self._stream.add_seconds
        return [add(env.statistics()) if isinstance(env, SupervisedEnv) else None for env in self.envs]

    def _each(self, what: str, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Make these calls side by side, one for each env, and return what they return."""
        self._finish_interrupted(what)
        current = self._fan.call_each(what, calls)
        answers = self._fan.answers_of(current)
        if current.failures:
            self._raise(what, current, answers)
        self._fan.finish()
        return answers

    def _raise(self, what: str, current: Round, results: list[Any]) -> NoReturn:
        """Raise what some envs raised."""
        try:
            self._refuse_if_closed(what)  # meanwhile, by a signal handler or another thread: no failure of the envs
            raise envs_failed(what, self.autoreset_mode, current.failures, results)
        finally:
            self._fan.finish()

    def _refuse_if_closed(self, what: str) -> None:
        if self._closed:
            raise ClosedError(f"{what}: this MultiEnv has been closed. Make a new one.")

    def _finish_interrupted(self, what: str) -> None:
        self._refuse_if_closed(what)
        self._stream.finish_interrupted(what.partition("(")[0])

    def close(self) -> None:
        """Close all envs in parallel. A second call does nothing, unless the first was interrupted."""
        self._closed = True
        if not self._all_closed:
            with interrupts.Held(self):
                close_all(self.envs)
                self._stream.drop_results()
                self._fan.close()
            self._all_closed = True

    def __enter__(self) -> Self:
        """Return this object; its envs are initialized."""
        return self

    def __exit__(self, *error: object) -> Literal[False]:
        """Close all envs."""
        self.close()
        return False

    __reduce_ex__ = refuse_copy


def _listed(envs: Any) -> list[gymnasium.Env[Any, Any]]:
    """Return a list of envs; the errors say what to write instead."""
    found: list[Any] = list(envs)
    if not found:
        raise UsageError("MultiEnv: envs is empty; give at least one env.")
    for index, env in enumerate(found):
        if not isinstance(env, gymnasium.Env):
            raise TypeError(
                f"MultiEnv: env {index} is {env!r:.100}, a {type(env).__name__}; give a gymnasium.Env. "
                "create_subprocess_envs(env_fns) makes envs of functions."
            )
    if len({id(env.unwrapped) for env in found}) < len(found):
        raise UsageError("MultiEnv: the same env is given twice, perhaps in wrappers; give each its own.")
    return found


def _ask_here(env: AutoResetWrapper, name: str, request: Any) -> Any:
    """Step or reset an env that blocks; called in a thread."""
    if name == "step":
        return env.step(request)
    return env.reset(seed=request.seeds[0], options=request.options[0])


def _call(env: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(env, SupervisedEnv):
        return env.call(name, *args, **kwargs)
    attribute = env.get_wrapper_attr(name)
    return attribute(*args, **kwargs) if callable(attribute) else attribute
