"""What the vector envs share: a batch of envs in supervised workers, with gymnasium's vector API."""

from __future__ import annotations

import copy as copying
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, Literal, TypedDict

import numpy as np
from gymnasium import logger
from gymnasium.error import NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from typing_extensions import Self

from multienv._engine import interrupts
from multienv._engine.asking.fanout import FanOut
from multienv._engine.asking.in_flight import ReadyBatch
from multienv._engine.asking.members import Round
from multienv._engine.asking.stream import Stream
from multienv._engine.building.building import EnvFn, SerialWorkers, WorkerOptions, Workers, build_all, mode_of
from multienv._engine.processes.endings import close_together
from multienv._engine.recovery.state_machine import Process
from multienv._engine.recovery.supervisor import Supervisor, abandon_all
from multienv._engine.wire.codecs import RowsReply
from multienv._engine.wire.messages import Call, GetAttribute, IsWrapped, Message, Method, Reset, SetAttribute
from multienv.envs.arguments import (
    call_message,
    checked_indices,
    checked_seeds,
    envs_failed,
    refuse_copy,
    reset_options,
)
from multienv.envs.fragments import Fragment, Policy, fragment_of_all, fragment_of_slot, rollout_message
from multienv.errors import (
    ClosedError,
    EnvError,
    EnvsFailedError,
    MultienvError,
    PolicyError,
    UsageError,
)
from multienv.events import Statistics
from multienv.vector.batching import (
    Rows,
    action_cutter,
    action_splitter,
    check_observation_mode,
    check_sendable,
    check_shareable,
    check_spaces,
    observation_spaces,
)
from multienv.vector.infos import BatchInfos, Infos, listed, parts_of
from multienv.vector.same_step import ResetAtOnce
from multienv.vector.shared_workers import SharedWorkers, rows_of

Array = np.ndarray[Any, Any]
Batch = tuple[Any, Array, Array, Array, Any]
ReadyRows = tuple[Any, Array, Array, Array, Any, Array]
_ERRORS, _EXTRAS = attrgetter("errors"), attrgetter("extras")


class BatchOptions(TypedDict, total=False):
    """Lists the options of all vector envs.

    Args:
        shared_memory: Observations travel in shared memory if their space has a fixed layout, else pickled. ``True``
            refuses spaces without a fixed layout; ``False`` is accepted and changes nothing.
        copy: Return new arrays of observations. If False, two sets of arrays are used in turn: the next step or reset
            but one overwrites them. You may write to them.
        observation_mode: ``"same"``: all envs have the same observation space. ``"different"``: their spaces share
            shape and dtype. Or a pair of the batched and the single space.
        autoreset_mode: A mode of gymnasium, or its name or value.
        merge_infos: Merge the infos of all envs, as gymnasium does. If False, ``infos`` is a list with one dict for
            each env, with the values that the env returned.
    """

    shared_memory: bool | None
    copy: bool
    observation_mode: Any
    autoreset_mode: AutoresetMode | str
    merge_infos: bool


class VectorOptions(BatchOptions, WorkerOptions, total=False):
    """Has the options of vector envs whose envs run in processes: those of :class:`BatchOptions`, WorkerOptions."""


class HostedVectorEnv(VectorEnv[Any, Any, Any]):
    """Base class of the vector envs: a batch of envs in workers that are recovered after a loss.

    Attributes:
        num_envs: Number of envs.
        single_observation_space, single_action_space: Spaces of one env.
        observation_space, action_space: Spaces of the batch.
        metadata, render_mode: Those of the first env.
        spec: A spec from which :func:`make_vec` makes the same envs again; ``None`` for other envs, as in gymnasium.
        autoreset_mode: What happens when an episode ends.
        envs_per_worker: Number of envs of each worker.

    Args:
        env_fns: One function for each env, which builds it.
        sizes: Number of envs for each worker.
        workers: Called with ``options``; returns the object that makes the workers.
        place: Gives the workers their cores.
        shared_memory, copy, observation_mode, autoreset_mode, merge_infos: See :class:`BatchOptions`.
        **options: Options for ``workers``.
    """

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        sizes: Sequence[int],
        workers: Callable[..., Workers | SerialWorkers],
        place: Callable[[Sequence[Supervisor]], None] | None = None,
        *,
        shared_memory: bool | None = None,
        copy: bool = True,
        observation_mode: Any = "same",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        merge_infos: bool = True,
        **options: Any,
    ) -> None:
        check_observation_mode(observation_mode)
        self.num_envs = len(env_fns)
        self.copy, self.shared_memory = copy, shared_memory
        self.observation_mode, self.autoreset_mode = observation_mode, mode_of(autoreset_mode)
        self.envs_per_worker = list(sizes)
        self._slices = [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]
        space = copying.deepcopy(observation_mode[1]) if isinstance(observation_mode, tuple) else None
        made = workers(**options)
        me = weakref.proxy(self)  # envs that are not closed end with the last reference to them
        hook, autoreset, make = None, self.autoreset_mode.name, made.make
        if autoreset == "SAME_STEP" and made.recycles and max(sizes) == 1:
            hook, autoreset = ResetAtOnce(lambda reply: me._rows.row(reply, 0)), "NEXT_STEP"
        self._workers = [make(env_fns[rows], rows.start, autoreset=autoreset, space=space) for rows in self._slices]
        if place is not None:
            place(self._workers)
        self._fanout = FanOut(self._workers, autoreset=hook)
        self._resets_at_once = hook is not None
        self._merges = merge_infos
        self._frames: tuple[Any, ...] = ()  # what render() has returned last
        self._infos = BatchInfos(me, self.envs_per_worker, merges=merge_infos)
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        """Wait until all envs are built, and compare their spaces."""
        failures: dict[int, BaseException] = {}
        for worker, error in build_all(self._workers).items():
            index = getattr(error, "env_index", None)
            failures[self._slices[worker].start if index is None else index] = error
        if failures:
            advice = "All envs have been closed; fix the env_fns named below."
            raise EnvsFailedError.collect(type(self).__name__, failures, [None] * self.num_envs, advice)
        descriptions = [worker.initialize() for worker in self._workers]
        members = [member for description in descriptions for member in description.spaces]
        check_spaces(type(self).__name__, self.observation_mode, members)
        # Copies: training code writes to spaces (CleanRL sets a dtype), and workers go by their own.
        public = observation_spaces(self.observation_mode, copying.deepcopy([space for space, _ in members]))
        self.observation_space, self.single_observation_space = public
        single, action_space = copying.deepcopy(public[1]), members[0][1]
        if self.shared_memory:
            check_shareable(single)
        self.single_action_space = copying.deepcopy(action_space)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**descriptions[0].metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = descriptions[0].render_mode
        self._rows = Rows(single, self.num_envs, copy=self.copy)
        self._split = action_splitter(action_space, self._slices)
        self._cut = action_cutter(action_space, self.num_envs, "send()")
        self._stream = Stream(self._fanout, SharedWorkers(self._slices, action_space))
        self._infos_of_some = BatchInfos(None, (), merges=self._merges)

    def __enter__(self) -> Self:
        """Return this object; its envs are built."""
        return self

    def __exit__(self, *error: object) -> Literal[False]:
        """Close all envs."""
        self.close()
        return False

    __reduce_ex__ = refuse_copy

    def __init_subclass__(cls, **options: Any) -> None:
        """Warn of a subclass that overrides a half of a call, which the whole call does not use."""
        super().__init_subclass__(**options)
        for whole in ("step", "reset", "call"):
            halves = {f"{whole}_async", f"{whole}_wait"} & vars(cls).keys()
            if halves and whole not in vars(cls):
                text = (
                    f"{cls.__name__} overrides {min(halves)}(), which {whole}() does not call: override {whole}() too."
                )
                warnings.warn(text, stacklevel=2)

    # --- reset ------------------------------------------------------------------------------------

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, Any]:
        """Begin an episode in every env, or in the envs of ``options["reset_mask"]``.

        An interrupted step is completed first, and its outcome is dropped.

        Args:
            seed: ``None``, one integer (env ``i`` gets ``seed + i``), or one for each env.
            options: Options for the envs' own ``reset``, as one dict for all envs. Its key ``reset_mask``, a bool
                array, says which envs to reset; the others stay as they are. Or a list with a dict or ``None`` for each
                env.

        Returns:
            Observations and infos. Observations are batched as ``observation_space`` says; an env that was not reset
            has its last observation. Infos are merged as :meth:`step` does.

        Raises:
            EnvsFailedError: Some envs raised; the others are reset, and ``results`` has observation and info of each.
        """
        self._begin_reset("reset", seed, options)
        return self._collect_reset(None)

    def reset_async(self, seed: Any = None, options: Any = None) -> None:
        """Send the resets; collect the results with :meth:`reset_wait`, or with :meth:`recv`.

        :meth:`recv` returns the first envs that are ready. While some envs are under way after :meth:`send`,
        ``options["reset_mask"]`` says which of the other envs to reset.
        """
        self._begin_reset("reset_async", seed, options)

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Collect the results of the resets. Raises WaitTimeout after ``timeout`` seconds; then wait again."""
        self._refuse_wait("reset")
        return self._collect_reset(timeout)

    def _begin_reset(self, name: str, seed: Any, options: Any) -> None:
        seeds = checked_seeds(seed, self.num_envs)
        each, mask = reset_options(options, self.num_envs)
        is_more = not self._stream.is_idle or (mask is not None and self._stream.is_beginning())
        if name == "reset_async" and is_more and not self.closed:
            envs = range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist()
            stream = self._stream.start(name)
            stream.refuse_busy(name, envs)
            stream.send("reset", envs, [(seeds[env], each[env]) for env in envs])
            return
        self._finish_interrupted(name if mask is None else f"{name} with a mask")
        requests = []
        for rows in self._slices:
            part = None if mask is None else tuple(mask[rows].tolist())
            requests.append(Reset(tuple(seeds[rows]), tuple(each[rows]), part))
        self._fanout.send("reset", requests, waits=name == "reset")

    def _collect_reset(self, timeout: float | None) -> tuple[Any, Any]:
        current = self._fanout.collect(timeout)
        return self._handed_over(current, partial(self._special_outcome, current))  # type: ignore[no-any-return]

    # --- step -------------------------------------------------------------------------------------

    def step(self, actions: Any) -> Batch:
        """Take one step in every env.

        ``autoreset_mode`` says what happens to an env whose episode has ended. If Ctrl-C interrupts a step, the next
        call completes it, whatever its own actions; ``infos["multienv"]`` then says ``resumed``.

        Args:
            actions: A batch of the action space.

        Returns:
            Observations, rewards, terminations, truncations and infos. Observations are batched as
            ``observation_space`` says; with ``copy=False`` the next step but one overwrites them. Rewards are float64
            and the flags bool, each of shape ``(num_envs,)``. The infos of all envs are in one dict: a key has a value
            for each env, and ``_key`` says which envs gave it (``merge_infos=False``: a list of dicts). An env is
            truncated if it says so itself, or if its episode could not be recovered after a loss. Then it has its last
            observation, reward 0.0 and the reason in ``infos["multienv"]``. With SAME_STEP the reason is in
            ``infos["final_info"]["multienv"]``, like all infos of the end of an episode.

        Raises:
            ActionError: The actions do not fit the action space; nothing was sent.
            EnvsFailedError: Some envs failed. For each other env, ``results`` has observation, reward, terminated,
                truncated and info, and its episode goes on.
            InfosNotMergedError: The infos cannot be merged; ``results`` has all that this call returns.
        """
        unfinished = self._fanout.unfinished
        if unfinished is not None or self.closed:
            if unfinished is not None and unfinished.name == "step" and unfinished.is_interrupted:
                return self._outcome(self._fanout.resume())
            self._finish_interrupted("step")
        return self._outcome(self._fanout.ask("step", self._split(actions)))

    def step_async(self, actions: Any) -> None:
        """Send the steps; collect the results with :meth:`step_wait`."""
        self._finish_interrupted("step_async")
        self._fanout.send("step", self._split(actions), waits=False)

    def step_wait(self, timeout: float | None = None) -> Batch:
        """Collect the results of the steps. Raises WaitTimeout after ``timeout`` seconds; then wait again."""
        self._refuse_wait("step")
        return self._outcome(self._fanout.collect(timeout))

    def _outcome(self, current: Round) -> Batch:
        """Return what a step comes to, or raise what has failed; either ends the round."""
        infos = None
        if not current.failures and not current.resumed:
            answers = self._fanout.answers_of(current)
            infos = self._plain_infos(answers)
        if infos is None:
            return self._handed_over(current, partial(self._special_outcome, current))  # type: ignore[no-any-return]
        batch = (*self._rows.batch(answers), infos)
        self._fanout.finish()
        current.answers = {}  # no call: see _handed_over()
        del answers[:]
        return batch

    def _plain_infos(self, replies: Sequence[RowsReply]) -> Infos | None:
        """Return the infos, if no env has raised and they are quickly had; else ``None``."""
        if any(map(_ERRORS, replies)):
            return None
        return {} if self._merges and not any(map(_EXTRAS, replies)) else self._infos.quick(parts_of(replies))

    def _special_outcome(self, current: Round, answers: list[Any]) -> Any:
        """Return what a reset returns, or a step of which not all is plain; or the error that it comes to."""
        is_step = current.name == "step"
        return self._error_of(current, answers) or self._infos.returned(
            current.name,
            lambda infos: (*self._rows.batch(answers)[: 4 if is_step else 1], infos),
            partial(self._infos.of, parts_of(answers), resumed=is_step and current.resumed),
        )

    # --- each env at its own pace -----------------------------------------------------------------

    @property
    def idle_envs(self) -> Array:
        """Return the envs that wait for an action, an int64 array: all but those that :meth:`recv` has to return."""
        self._refuse_if_closed("idle_envs")
        return np.array(self._stream.idle(), np.int64)

    def send(self, actions: Any, indices: Sequence[int] | None = None) -> None:
        """Send actions to some envs without waiting; :meth:`recv` returns the results.

        ::

            envs.reset_async(seed=0)
            while True:
                observations, rewards, terminations, truncations, infos, indices = envs.recv(16)
                envs.send(policy(observations), indices)

        This is EnvPool's asynchronous mode. Each env's own trajectory is the same as with ``step()``, in any order. A
        slow, hanging or recovering env delays only the envs of its own process: they are stepped one after the other.
        If step times differ, set ``envs_per_worker=1``.

        Args:
            actions: A batch with one action for each of ``indices``.
            indices: Different envs that are not under way; ``None``: all, in order.

        Raises:
            ActionError: The actions do not fit the action space; nothing was sent.
            CallPendingError: Some of the envs are under way, or a signal handler calls it while another call sends;
                nothing was sent.
            ResetNeededError: Some of the envs have no running episode; nothing was sent.
        """
        self._refuse_if_closed("send")
        stream = self._stream.start("send")
        envs = list(range(self.num_envs)) if indices is None else checked_indices(indices, self.num_envs)
        stream.refuse_busy("send", envs)
        if envs:
            stream.send("step", envs, self._cut(actions, envs))

    def recv(self, k: int | None = None, at_most: int | None = None, timeout: float | None = None) -> ReadyRows:
        """Wait for the first ``k`` envs that are ready, among those that :meth:`send` or ``reset_async`` has sent to.

        Args:
            k: Number of envs; ``None``: all that are under way.
            at_most: Return also those that are ready by then, up to so many in all; ``None``: exactly ``k``. What is
                not returned, a later call returns.
            timeout: Seconds to wait; ``None`` waits for ever. After that it returns the envs that are ready, even if
                they are fewer than ``k``.

        Returns:
            The same as :meth:`step`, but with a row for each of these envs, in the order in which they were ready:
            observations, rewards, terminations, truncations and infos; and the indices of the envs, an int array. An
            env that was reset has reward 0.0 and both flags False.

        Raises:
            WaitTimeout: No env is ready after ``timeout`` seconds. Nothing is lost; call it again.
            EnvsFailedError: Some of these envs failed; ``results`` has the results of the others among them, as for
                :meth:`step`.
            InfosNotMergedError: The infos cannot be merged; ``results`` has all that this call returns.
            CallPendingError: A signal handler calls it inside of another ``recv()``.
            UsageError: ``k`` results cannot arrive: too few envs are under way.
        """
        self._refuse_if_closed("recv")
        return self._stream.start("recv").recv(self._received, k, at_most, timeout)  # type: ignore[no-any-return]

    def _received(self, ready: ReadyBatch) -> Any:
        """Return what recv() returns for these results, or the error to raise."""
        if ready.errors:
            return self._error_of_some(ready)
        replies = ready.answers
        if self._merges and not any(map(_EXTRAS, replies)):
            return (*rows_of(ready, self._rows), {}, np.array(ready.envs))
        sizes = [len(reply.rewards) for reply in replies]
        if sizes != self._infos_of_some.sizes:
            self._infos_of_some = BatchInfos(None, sizes, merges=self._merges)
        return self._infos_of_some.returned(
            "recv",
            lambda infos: (*rows_of(ready, self._rows), infos, np.array(ready.envs)),
            partial(self._infos_of_some.of, parts_of(replies)),
        )

    def _error_of_some(self, ready: ReadyBatch) -> MultienvError:
        """Return the error for what has failed, with what the others of these envs returned."""
        failures = ready.errors
        self._refuse_if_closed("recv", failures.values())
        results: list[Any] = [None] * self.num_envs
        infos = listed(parts_of(ready.answers), [1] * len(ready.envs))
        for env, reply, info in zip(ready.envs, ready.answers, infos, strict=True):
            if env not in failures:
                results[env] = self._result(reply, 0, info)
        return envs_failed("recv()", self.autoreset_mode, failures, results)

    # --- many steps -------------------------------------------------------------------------------

    def rollout(self, policy: Policy, steps: int) -> Fragment:
        """Take many steps in one request to each worker: the policy runs beside the envs, in each worker's process.

        The result equals this loop bit for bit, and so does everything after it::

            for _ in range(steps):
                observations, rewards, terminations, truncations, infos = envs.step(policy(observations))

        If Ctrl-C interrupts a rollout, the next ``rollout()`` completes it, whatever its arguments, and the fragment
        says ``resumed``.

        Args:
            policy: A function that takes a batch of observations. It returns the batch of actions, or a pair of that
                batch and a dict of arrays with one row for each observation. It gets the observations of its worker's
                envs, not of all envs, so compute each row independently of the others. The policy travels by
                cloudpickle and is unpickled for each call. If the policy draws random numbers, let it carry its own
                generator: then a fragment that is computed again after a loss is the same.
            steps: Number of steps.

        Raises:
            PolicyError: The policy raised in some worker. The envs of that worker stay where they were at that moment.
            EnvsFailedError: Some envs raised. ``results`` has the fragment of each other env. For an env that raised,
                ``failures[index].fragment`` has all steps: the step that raised is ``truncated`` there, and the next
                episode follows it.
            UsageError: ``autoreset_mode`` is ``"DISABLED"``, or the policy cannot be pickled.
        """
        unfinished = self._fanout.unfinished
        if unfinished is not None and unfinished.name == "rollout" and unfinished.is_interrupted and not self.closed:
            return self._fragment(self._fanout.resume())
        self._finish_interrupted("rollout")
        if self.autoreset_mode is AutoresetMode.DISABLED:
            raise UsageError(
                "rollout(): with autoreset_mode='DISABLED' nobody begins the next episode. Make the envs with "
                "'NEXT_STEP' or 'SAME_STEP'. Nothing was sent."
            )
        if self._resets_at_once:
            raise UsageError(
                "rollout(): with 'SAME_STEP', one env in a process, and recycle_... or max_rss, the trainer takes part "
                "at each end of an episode. Make the envs with 'NEXT_STEP' or envs_per_worker=2. Nothing was sent."
            )
        message = rollout_message(policy, steps)
        return self._fragment(self._fanout.ask("rollout", [message] * len(self._workers)))

    def _fragment(self, current: Round) -> Fragment:
        def make(answers: list[Any]) -> Any:
            for error in current.failures.values():
                if isinstance(error, PolicyError):
                    return error
            failures = self._failures_of(current)
            if failures:
                return self._fragment_error(answers, failures)
            steps = sorted({step for reply in answers for step in reply.infos})
            parts = {step: [reply.infos.get(step) for reply in answers] for step in steps}
            return self._infos.returned(
                "rollout",
                lambda infos: fragment_of_all(answers, infos, resumed=current.resumed),
                lambda merges: {step: self._infos.of(parts[step], merges) for step in steps},
            )

        return self._handed_over(current, make)  # type: ignore[no-any-return]

    def _fragment_error(self, answers: list[Any], failures: dict[int, BaseException]) -> MultienvError:
        results: list[Any] = [None] * self.num_envs
        for rows, reply in zip(self._slices, answers, strict=True):
            for slot, index in enumerate(range(rows.start, rows.stop) if reply is not None else ()):
                fragment, error = fragment_of_slot(reply, slot), failures.get(index)
                if error is None:
                    results[index] = fragment
                elif isinstance(error, EnvError):
                    error.fragment = fragment
        return envs_failed("rollout()", self.autoreset_mode, failures, results)

    # --- what came back ---------------------------------------------------------------------------

    def _handed_over(self, current: Round, make: Callable[[list[Any]], Any]) -> Any:
        """Return what ``make`` makes of the answers of the unfinished round, or raise the error that it returns.

        Either ends the round, and so does an Exception that ``make`` raises. KeyboardInterrupt does not: the next call
        tells of the outcome.
        """
        answers = self._fanout.answers_of(current)
        try:
            outcome = make(answers)
        except Exception as error:
            outcome = error
        failed = isinstance(outcome, Exception)
        self._fanout.finish()
        # The answers, which are arrays over the banks, stay mapped while the traceback of an error, of a hook for
        # instance, holds this frame.
        current.answers = {}
        del answers[:]  # no call from here on: a handler that comes in would keep the outcome from the caller
        if failed:
            raise outcome
        return outcome

    def _failures_of(self, current: Round) -> dict[int, BaseException]:
        """Return what has failed, by env; a worker that is lost fails for all its envs."""
        self._refuse_if_closed(current.name, current.failures.values())
        failures: dict[int, BaseException] = {}
        for worker, rows in enumerate(self._slices):
            answer = current.answers.get(worker)
            if worker in current.failures:
                failures |= dict.fromkeys(range(rows.start, rows.stop), current.failures[worker])
            elif answer is not None:
                errors = answer[1] if isinstance(answer, tuple) else answer.errors
                failures |= {rows.start + slot: error for slot, error in errors.items()}
        return failures

    def _error_of(self, current: Round, answers: list[Any]) -> MultienvError | None:
        """Return the error for what has failed, with what the others returned."""
        failures = self._failures_of(current)
        if not failures:
            return None
        is_step = current.name == "step"
        infos = listed(parts_of(answers), self.envs_per_worker, resumed=is_step and current.resumed)
        results: list[Any] = [None] * self.num_envs
        for rows, reply in zip(self._slices, answers, strict=True):
            for slot, index in enumerate(range(rows.start, rows.stop)):
                if index not in failures:
                    result = self._result(reply, slot, infos[index])
                    results[index] = result if is_step else (result[0], result[4])
        return envs_failed(f"{current.name}()", self.autoreset_mode, failures, results)

    def _result(self, reply: RowsReply, slot: int, info: dict[str, Any]) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Return what a step of one env comes to."""
        ended = bool(reply.terminated[slot]), bool(reply.truncated[slot])
        return (self._rows.row(reply, slot), reply.rewards[slot], *ended, info)

    # --- calls and attributes ---------------------------------------------------------------------

    def call(
        self, name: str, /, *args: Any, indices: Sequence[int] | None = None, recorded: bool = True, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Call a method of each env or of one of its wrappers. If the attribute is not callable, return it.

        Args:
            name: Name of the method. For reset, step and close, call the methods of this object instead.
            *args: Arguments for the method.
            indices: Which envs to call, in this order; ``None``: all.
            recorded: Whether the call may change the env. A recorded call is replayed when the env is recovered, so the
                method should be as deterministic as the env. Give False for a method that changes nothing: it takes no
                room in the journal, so you can call it at every step.
            **kwargs: Keyword arguments for the method.

        Returns:
            The result of each env.

        Raises:
            EnvsFailedError: Some envs raised. ``results`` has the results of the others, and all episodes go on.
        """
        return self._ask(
            "call", lambda slots, envs: call_message(name, args, kwargs, slots, recorded=recorded), indices
        )

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Send the calls; collect the results with :meth:`call_wait`."""
        self._finish_interrupted("call_async")
        self._fanout.send("call", [call_message(name, args, kwargs)] * len(self._workers), waits=False)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Collect the results of the calls. Raises WaitTimeout after ``timeout`` seconds; then wait again."""
        self._refuse_wait("call")
        return self._values(range(self.num_envs), timeout)

    def get_attr(
        self, name: str, indices: Sequence[int] | None = None, *, calls_methods: bool = True
    ) -> tuple[Any, ...]:
        """Return an attribute of every env or of one of its wrappers.

        Args:
            name: Name of the attribute.
            indices: Which envs to ask, in this order; ``None``: all.
            calls_methods: If the attribute is a method, call it and return its result, as gymnasium does; the call is
                recorded. If False, return a function that calls the method in its env. Reading an attribute is not
                recorded.
        """
        values = self._ask("get_attr", lambda slots, envs: GetAttribute(name, slots, calls_methods), indices)
        pairs = list(zip(range(self.num_envs) if indices is None else indices, values, strict=True))
        found = [index for index, one in pairs if isinstance(one, Method)]
        of_env: dict[int, Any] = {index: partial(self._call_one, index, name) for index in found}
        if found and calls_methods:
            called = self._ask("get_attr", lambda slots, envs: call_message(name, (), {}, slots), found)
            of_env = dict(zip(found, called, strict=True))
        return tuple(of_env.get(index, one) for index, one in pairs)

    def _call_one(self, index: int, name: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", lambda slots, envs: call_message(name, args, kwargs, slots), [index])[0]

    def set_attr(self, name: str, values: Any, indices: Sequence[int] | None = None) -> None:
        """Set an attribute on every env.

        Args:
            name: Name of the attribute. It is set on the env or the wrapper that has it, else on the outermost one.
            values: A list or tuple has one value for each env of ``indices``; any other value is for all.
            indices: Which envs to change; ``None``: all.
        """
        asked = range(self.num_envs) if indices is None else checked_indices(indices, self.num_envs)
        if not isinstance(values, list | tuple):
            values = [values] * len(asked)
        if len(values) != len(asked):
            raise UsageError(
                "set_attr(): Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {len(asked)} environments."
            )
        if len(self._workers) > 1:
            check_sendable(tuple(values), "set_attr(): the values")
        of_env = dict(zip(asked, values, strict=True))
        self._ask(
            "set_attr", lambda slots, envs: SetAttribute(name, tuple(of_env[env] for env in envs), slots), indices
        )

    def is_wrapped(self, wrapper_class: type[Any], indices: Sequence[int] | None = None) -> tuple[bool, ...]:
        """Return for every env whether it has a wrapper of this class. Classes are compared by name.

        Args:
            wrapper_class: The class of the wrapper, or a base class of it.
            indices: Which envs to ask, in this order; ``None``: all.
        """
        kind = (wrapper_class.__module__, wrapper_class.__name__)  # cloudpickle keeps no __qualname__
        return self._ask("is_wrapped", lambda slots, envs: IsWrapped(kind, slots), indices)

    def _ask(
        self,
        name: str,
        message: Callable[[tuple[int, ...] | None, Sequence[int]], Message],
        indices: Sequence[int] | None = None,
    ) -> tuple[Any, ...]:
        """Ask the envs something.

        Args:
            name: Of the call.
            message: Makes the request to a worker, given the slots that are asked, ``None``: all, and their envs.
            indices: Which envs to ask, in this order; ``None``: all.
        """
        self._finish_interrupted(name)
        asked = range(self.num_envs) if indices is None else checked_indices(indices, self.num_envs)
        requests: list[Message | None] = []
        for rows, envs in zip(self._slices, self._by_worker(asked), strict=True):
            slots = None if indices is None else tuple(env - rows.start for env in envs)
            requests.append(message(slots, envs) if envs else None)
        self._fanout.send(name, requests)
        return self._values(asked, None)

    def _by_worker(self, asked: Sequence[int]) -> list[list[int]]:
        """Return for each worker those of these envs that it has."""
        return [[env for env in asked if rows.start <= env < rows.stop] for rows in self._slices]

    def _values(self, asked: Sequence[int], timeout: float | None) -> tuple[Any, ...]:
        current = self._fanout.collect(timeout)

        def make(answers: list[Any]) -> Any:
            failures = {index: error for index, error in self._failures_of(current).items() if index in asked}
            found: dict[int, Any] = {}
            for envs, answer in zip(self._by_worker(asked), answers, strict=True):
                found |= () if answer is None else zip(envs, answer[0], strict=True)
            results = tuple(found.get(index) for index in asked)
            if failures:
                return envs_failed(f"{current.name}()", self.autoreset_mode, failures, results)
            return results

        return self._handed_over(current, make)  # type: ignore[no-any-return]

    @property
    def np_random(self) -> Any:
        """Return copies of the random generators of all envs, as AsyncVectorEnv does."""
        return self.get_attr("np_random")

    @np_random.setter
    def np_random(self, value: Any) -> None:
        self.set_attr("np_random", value)

    @property
    def np_random_seed(self) -> Any:
        """Return the seeds of the random generators of all envs; -1 for a seed that is not known."""
        return self.get_attr("np_random_seed")

    def render(self) -> tuple[Any, ...]:
        """Render every env, as its ``render_mode`` says: ``"rgb_array"`` returns one frame for each env.

        After a lost episode an env may not be renderable until its next reset: its last frame is returned again.
        """
        drawn: list[int] = []
        for worker, rows in zip(self._workers, self._slices, strict=True):
            if worker.state.process is not Process.NONE or not self._frames:
                drawn += range(rows.start, rows.stop)
        frames = dict(enumerate(self._frames))
        if drawn:
            found = self._ask("render", lambda slots, envs: Call("render", slots=slots), drawn)
            frames |= zip(drawn, found, strict=True)
        self._frames = tuple(frames.values())
        return self._frames

    def get_images(self) -> list[Any]:
        """Return one frame of every env. Raises UsageError if ``render_mode`` is not ``"rgb_array"``."""
        if self.render_mode != "rgb_array":
            raise UsageError(
                f"get_images(): the envs draw no frames, render_mode is {self.render_mode!r}. Make them with "
                "render_mode='rgb_array'."
            )
        return list(self.render())

    # --- checkpoints ------------------------------------------------------------------------------

    def snapshot(self) -> tuple[Any, ...]:
        """Keep the present state of all envs, in frozen copies of their processes. :meth:`restore` returns to it.

        Raises:
            EnvsFailedError: A process cannot be forked; ``failures`` says why.
        """
        return tuple(self._each("snapshot", [worker.snapshot for worker in self._workers]))

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Bring all envs back to a snapshot. You can restore a snapshot any number of times.

        Args:
            snapshot: A snapshot that :meth:`snapshot` of these envs returned.

        Raises:
            EnvsFailedError: Some workers could not be restored; the others are at the snapshot. Restore another
                snapshot, or reset.
        """
        if not isinstance(snapshot, tuple) or len(snapshot) != len(self._workers):
            raise UsageError(f"restore(): {snapshot!r:.100} is no snapshot of these envs; snapshot() returns one.")
        calls = [partial(worker.restore, one) for worker, one in zip(self._workers, snapshot, strict=True)]
        self._each("restore", calls)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data that can be pickled, to continue bit for bit in another trainer."""
        return {"version": 1, "workers": self._each("state_dict", [worker.state_dict for worker in self._workers])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring the envs to the state in which :meth:`state_dict` was called. Nothing else is needed.

        Args:
            state: A dict that :meth:`state_dict` returned.

        Raises:
            UsageError: ``state`` is not a dict of :meth:`state_dict`, or its envs were split over the workers
                differently.
            EnvsFailedError: Some workers could not reach the state: their envs are as they were before. The envs of the
                other workers need a reset, for example with a ``reset_mask``; or load another state.
        """
        found = state.get("workers") if isinstance(state, Mapping) else None
        if not isinstance(found, list) or len(found) != len(self._workers):
            raise UsageError(
                f"load_state_dict(): that is no state_dict() of {self.num_envs} envs in {len(self._workers)} workers. "
                "Give envs_per_worker the number that the first trainer had."
            )
        calls = [partial(worker.load_state_dict, one) for worker, one in zip(self._workers, found, strict=True)]
        advice = "The envs of the others want a reset; those of these are as they were before."
        try:
            self._each("load_state_dict", calls, advice)
        except EnvsFailedError as error:
            for worker, rows in zip(self._workers, self._slices, strict=True):
                if rows.start not in error.failures:
                    worker.discard()  # else its episodes would go on elsewhere, without a word
            raise

    def _each(self, name: str, calls: Sequence[Callable[[], Any]], *advice: str) -> list[Any]:
        """Make blocking calls of workers side by side; EnvsFailedError if some raise."""
        self._finish_interrupted(name)
        current = self._fanout.call_each(name, calls)
        answers = self._fanout.answers_of(current)
        self._fanout.finish()
        if current.failures:
            failures = {self._slices[worker].start: error for worker, error in current.failures.items()}
            raise EnvsFailedError.collect(
                f"{name}()", failures, answers, "Of each worker the first env is named.", *advice
            )
        return answers

    # --- which call may be made -------------------------------------------------------------------

    def _finish_interrupted(self, name: str) -> None:
        """Finish what an earlier call has left unfinished, before ``name`` is called."""
        self._refuse_if_closed(name)
        self._stream.finish_interrupted(name)

    def _refuse_wait(self, command: str) -> None:
        self._refuse_if_closed(f"{command}_wait")
        current = self._fanout.unfinished
        if current is None or current.name != command:
            pending = "" if current is None else f" What is pending is {current.name or 'for recv()'}."
            raise NoAsyncCallError(
                f"Calling `{command}_wait` without any prior call to `{command}_async`.{pending}", command
            )

    def _refuse_if_closed(self, name: str, failures: Collection[BaseException] = ()) -> None:
        """Raise ClosedError if the envs are closed: by a signal handler or a thread, that is no failure of theirs."""
        if self.closed or (failures and any(type(error) is ClosedError for error in failures)):
            kind = type(self).__name__
            raise ClosedError(f"{name}(): Trying to operate on `{kind}`, after a call to `close()`. Make a new one.")

    # --- the end ----------------------------------------------------------------------------------

    def statistics(self) -> list[Statistics]:
        """Return counters and state of each worker. A step of the batch counts as one step of each worker."""
        return [self._stream.add_seconds(worker.statistics()) for worker in self._workers]

    @interrupts.finalizer
    def __del__(self) -> None:
        """Release the processes, which close their envs and end by themselves, if close() was not called."""
        abandon_all(self.__dict__.get("_workers", ()))

    def close_extras(self, timeout: float | None = None, terminate: bool = False, **kwargs: Any) -> None:
        """Ask the workers to end, and kill them after ``Deadlines.close`` seconds. A second call does nothing.

        Args:
            timeout: Seconds to wait for the workers, if that is less than ``Deadlines.close``.
            terminate: Kill the workers without asking.
            **kwargs: Ignored, as in gymnasium.

        Warns:
            UserWarning: The result of a call in two halves was not collected. Everything is closed all the same.
        """
        patience = 0.0 if terminate else timeout
        with interrupts.Held(self):
            close_together(self._workers, [partial(worker.close, patience) for worker in self._workers])
            current = self._fanout.close()
            if hasattr(self, "_stream"):  # the envs have been built
                self._rows.forget()
                self._stream.drop_results()
        if current is not None and current.name and not current.is_interrupted:
            self.closed = True  # the warning may be made an error
            logger.warn(f"Calling `close` while waiting for a pending call to `{current.name}` to complete.")
