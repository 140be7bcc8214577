"""One env in one process that may die at any moment; and the same in the trainer's own process."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import gymnasium
from typing_extensions import Self, Unpack

from multienv._engine.asking.fanout import Calls
from multienv._engine.building.building import (
    EnvFn,
    Processes,
    SerialWorkers,
    WorkerOptions,
    Workers,
    build_all,
    checked_env_fn,
    listed_env_fns,
)
from multienv._engine.cores import spread
from multienv._engine.interrupts import finalizer
from multienv._engine.processes.endings import close_together
from multienv._engine.recovery.state_machine import Process
from multienv._engine.recovery.supervisor import Supervisor, abandon_all
from multienv._engine.wire.codecs import Transition
from multienv._engine.wire.messages import Call, GetAttribute, Method, Reset, SetAttribute, reset_of_one
from multienv.config import checked_seed, takes_options_of
from multienv.envs.arguments import OWN_METHODS, call_message, refuse_copy
from multienv.envs.fragments import Fragment, Policy, fragment_of_one, rollout_message
from multienv.errors import EnvsFailedError, ResultNotPicklableError, UsageError
from multienv.events import Hook, Statistics

SupervisedEnvT = TypeVar("SupervisedEnvT", bound="SupervisedEnv")
_SPACES = frozenset(("observation_space", "action_space"))


class SupervisedEnv(gymnasium.Env[Any, Any]):
    """Base class of SubprocessEnv and SerialEnv: a gymnasium.Env that recovers its env after a loss.

    Each call also comes in two halves: ``step_async`` sends and does not block, ``step_wait`` collects the result, with
    an optional timeout. ``np_random`` is a generator of this object, seeded by ``reset(seed=…)``; the env draws from
    its own generator. Put wrappers that draw random numbers into ``env_fn``.
    """

    # gymnasium declares these on the class; here they are the env's, known once it is built.
    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._calls = Calls(supervisor)
        self._calls.convert["rollout"] = fragment_of_one
        self._frame: Any = None  # what render() has returned last
        supervisor.on_spaces = weakref.WeakMethod(self._show_spaces)

    # --- start and end --------------------------------------------------------------------------

    def start(self) -> Self:
        """Launch the process and let it build the env, without waiting. A second call does nothing.

        Returns:
            The env itself.

        Raises:
            ClosedError: The env has been closed.
        """
        self._supervisor.start()
        return self

    def initialize(self, timeout: float | None = None) -> Self:
        """Wait until the env is built, and start it first if necessary. A second call does nothing.

        Afterwards ``observation_space``, ``action_space``, ``metadata``, ``spec`` and ``render_mode`` are those of the
        env.

        Args:
            timeout: Seconds to wait; ``None`` waits for ever. After a timeout you can call it again.

        Returns:
            The env itself.

        Raises:
            EnvError: ``env_fn`` raised; also catchable by the type of that exception.
            WorkerLostError: The process ended while it built the env.
            WaitTimeout: ``timeout`` has passed.
        """
        try:
            description = self._supervisor.initialize(timeout)
            if "observation_space" not in self.__dict__:
                self.metadata = description.metadata
                self.spec = description.spec
                self.render_mode = description.render_mode
                # Copies: training code writes to spaces (CleanRL sets a dtype), and recovery goes by these.
                self._show_spaces(description.spaces[0])
        finally:
            if self._supervisor.reporter.events:
                self._supervisor.reporter.call_hooks()
        return self

    def _show_spaces(self, spaces: tuple[Any, Any]) -> None:
        """Show these spaces; an env may set others in its reset."""
        self.observation_space, self.action_space = copy.deepcopy(spaces)

    def close(self) -> None:
        """Ask the process to end, and kill it after ``Deadlines.close`` seconds. A second call does nothing."""
        self._supervisor.close()

    def __enter__(self) -> Self:
        """Initialize the env; close it if that fails."""
        try:
            return self.initialize()
        except BaseException:
            self.close()
            raise

    # --- an episode -----------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: Seed for the env's generators. Without a seed they go on as they are. An env that was never seeded
                gets a generator with a recorded seed, so that the episode can be replayed.
            options: Options for the env's own ``reset``.

        Returns:
            Observation and info, as the env returned them.
        """
        return self._calls.ask("reset", self._reset_message(seed, options))  # type: ignore[no-any-return]

    def reset_async(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Send a reset; collect the result with :meth:`reset_wait`."""
        self._calls.send("reset", self._reset_message(seed, options))

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Collect the result of the reset. Raises WaitTimeout after ``timeout`` seconds; then wait again."""
        return self._calls.wait("reset", timeout)  # type: ignore[no-any-return]

    def step(self, action: Any) -> Transition:
        """Take one step.

        If Ctrl-C interrupts a step while it waits, the next call completes that step: it ignores its own action and
        returns the outcome of the interrupted step, with ``info["multienv"] == {"resumed": True}``.

        Args:
            action: An action of the env's action space. It reaches the env with the type, dtype and value that you
                give.

        Returns:
            Observation, reward, terminated, truncated and info, each with the type, dtype and shape that the env
            returned. ``truncated`` comes from the env, or from multienv if the episode could not be recovered after a
            loss. Then the observation is the last one that you saw, the reward is 0.0, and
            ``info["multienv"]["reason"]`` says why.

        Raises:
            ActionError: The action does not fit the action space; nothing was sent.
            ResetNeededError: No episode is running.
            EnvError: The env raised; also catchable by the type of that exception.
            WorkerLostError: The process was lost and the policy says ``"raise"``, or its restart budget is used up.
        """
        return self._calls.ask("step", action)  # type: ignore[no-any-return]

    def step_async(self, action: Any) -> None:
        """Send a step; collect the result with :meth:`step_wait`."""
        self._calls.send("step", action)

    def step_wait(self, timeout: float | None = None) -> Transition:
        """Collect the result of the step. Raises WaitTimeout after ``timeout`` seconds; then wait again.

        If the worker is lost meanwhile, this call recovers it first, in at most ``Deadlines.recovery`` seconds.
        """
        return self._calls.wait("step", timeout)  # type: ignore[no-any-return]

    def rollout(self, policy: Policy, steps: int) -> Fragment:
        """Take many steps in one request: the policy runs beside the env, in the env's process.

        The result equals this loop bit for bit, and so does everything after it::

            for _ in range(steps):
                action = policy(observation)
                observation, reward, terminated, truncated, info = env.step(action)
                if terminated or truncated:
                    observation, info = env.reset()

        The info of a step that ended an episode is the info of the reset. It also has ``final_obs`` and ``final_info``
        of the step, as in ``AutoResetWrapper`` with ``SAME_STEP``. If Ctrl-C interrupts a rollout, the next
        ``rollout()`` completes it, whatever its arguments, and the fragment says ``resumed``.

        Args:
            policy: A function that takes one observation. It returns the action, or a pair of the action and a dict of
                further values. The policy travels by cloudpickle and is unpickled for each call. If the policy draws
                random numbers, let it carry its own generator: then a fragment that is computed again after a loss is
                the same.
            steps: Number of steps.

        Raises:
            PolicyError: The policy raised. The env stays where it was at that moment.
            EnvError: The env raised. ``error.fragment`` has all steps: the step that raised is ``truncated`` there, and
                the next episode follows it, if a reset succeeded.
            ResetNeededError: No episode is running.
        """
        message = None if self._calls.pending() == "rollout" else rollout_message(policy, steps)
        return self._calls.ask("rollout", message)  # type: ignore[no-any-return]

    def render(self) -> Any:
        """Render the env and return the result of its ``render``.

        After a lost episode the env cannot be rendered until the next reset: the last frame is returned once more.
        """
        if self._supervisor.state.process is Process.NONE and self._frame is not None:
            return self._frame
        self._frame = self._calls.ask("render", Call("render"))
        return self._frame

    # --- branching and checkpoints ----------------------------------------------------------------

    def snapshot(self) -> Any:
        """Keep the present state of the env. :meth:`restore` returns to it, any number of times.

        Call it between two steps. The env's process forks itself, which takes about a millisecond. This works for every
        env that can be forked, also for one that cannot be copied or pickled, such as an emulator or a physics engine.

        Returns:
            A snapshot for :meth:`restore`. ``snapshot.free()`` ends its process. So does one of the next calls of this
            env when you have dropped the last reference to it, and :meth:`close`.

        Raises:
            UsageError: The env has threads, child processes, sockets, pipes, shared memory or a GPU; or the system is
                not Linux; or the env is a :class:`SerialEnv`; or 1,024 snapshots exist already. Nothing is lost.
        """
        self._calls.finish_interrupted("snapshot")
        return self._supervisor.snapshot()

    def restore(self, snapshot: Any) -> None:
        """Bring the env back to the state in which this snapshot of it was taken: exactly, with its random generators.

        The next step continues the episode of the snapshot. Losses after that are recovered as usual.

        Args:
            snapshot: A snapshot that :meth:`snapshot` of this env returned.

        Raises:
            UsageError: The snapshot is from another env, or has been freed.
            NotRestoredError: The frozen process has been killed, and a replay could not bring the env to that state.
        """
        self._calls.finish_interrupted("restore")
        self._supervisor.restore(snapshot)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the env as plain data, to continue in another trainer.

        Pickle it, or save it with a model. Call it between two steps. It holds the requests to the env and the replies
        you saw, like the journal, and is as large as the journal. It does not hold the generators of this object's
        spaces (``action_space.sample()``).

        Raises:
            UsageError: A request is pending, or the journal does not reach back far enough.
        """
        self._calls.finish_interrupted("state_dict")
        return self._supervisor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was called: a new process replays the state, and the replay is verified.

        The present episode of this env is dropped. The env is initialized if necessary; its ``env_fn`` must be the same
        as that of the saved env.

        Args:
            state: A dict that :meth:`state_dict` returned.

        Raises:
            NotRestoredError: The replay differs from the saved replies; this env is as it was before.
            UsageError: ``state`` is not a dict of :meth:`state_dict`, or a request is pending.
        """
        self.initialize()
        self._calls.finish_interrupted("load_state_dict")
        self._supervisor.load_state_dict(state)

    # --- anything else ----------------------------------------------------------------------------

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the env or of one of its wrappers. If the attribute is not callable, return it.

        Calls are recorded and replayed, so the method should be as deterministic as the env.

        Raises:
            ValueError: ``name`` is reset, step or close; call those methods of this object instead.
        """
        return self._calls.ask("call", call_message(name, args, kwargs))

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Send a call; collect the result with :meth:`call_wait`."""
        self._calls.send("call", call_message(name, args, kwargs))

    def call_wait(self, timeout: float | None = None) -> Any:
        """Collect the result of the call. Raises WaitTimeout after ``timeout`` seconds; then wait again."""
        return self._calls.wait("call", timeout)

    def get_attr(self, name: str) -> Any:
        """Return a copy of an attribute of the env or of a wrapper; for a method, a function that calls it."""
        if name in OWN_METHODS:
            return getattr(self, name)
        value = self._calls.ask("get_attr", GetAttribute(name))
        return partial(self.call, name) if isinstance(value, Method) else value

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute on the env or the wrapper that has it, else on the outermost one.

        The call is recorded and replayed.
        """
        self._calls.ask("set_attr", SetAttribute(name, (value,)))

    def statistics(self) -> Statistics:
        """Return state, process and counters at this moment, as a frozen record."""
        return self._supervisor.statistics()

    # --- gymnasium's own ways to attributes -------------------------------------------------------

    def has_wrapper_attr(self, name: str) -> bool:
        """Return whether this object or the remote env has the attribute; a private name is the remote env's."""
        return self._has_here(name) or self._has_remotely(name)

    def get_wrapper_attr(self, name: str) -> Any:
        """Return the attribute of this object, or of the remote env; a private name is the remote env's."""
        return getattr(self, name) if self._has_here(name) else self.get_attr(name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute of the remote env, as :meth:`set_attr` does.

        Returns False, and sets nothing, if ``force`` is false and the remote env has no such attribute.
        """
        if not force and not self._has_remotely(name):
            return False
        self.set_attr(name, value)
        return True

    def __getattr__(self, name: str) -> Any:
        """Return a copy of what the remote env has and this object has not.

        Names that begin with ``_`` are this object's own. While the remote env cannot be asked, because a call is
        pending or its process is known to be lost, there is no such thing.
        """
        supervisor = self.__dict__.get("_supervisor")
        state = None if supervisor is None else supervisor.state
        if name in _SPACES and supervisor is not None:
            supervisor.check(name)
        nowhere = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name.startswith("_") or state is None or state.process is not Process.READY or state.request is not None:
            raise AttributeError(f"{nowhere}; the remote env's: get_attr()")
        try:
            return self.get_attr(name)
        except (AttributeError, ResultNotPicklableError) as error:
            advice = "A wrapper that needs it belongs into the env_fn."
            raise AttributeError(f"{nowhere}, nor has the remote env one to be had here. {advice} {error}") from error

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what the remote env has, and this object has not, there; anything else here."""
        is_own = name.startswith("_") or name in _SPACES or "observation_space" not in self.__dict__
        is_own = is_own or self._has_here(name) or self._supervisor.state.process is Process.CLOSED
        if is_own or not self._has_remotely(name):
            super().__setattr__(name, value)
        else:
            self.set_attr(name, value)

    def _has_here(self, name: str) -> bool:
        return not name.startswith("_") and (name in self.__dict__ or hasattr(type(self), name))

    def _has_remotely(self, name: str) -> bool:
        return bool(self._calls.ask("has_attr", call_message("has_wrapper_attr", (name,), {})))

    def __str__(self) -> str:
        """Name the env by its spec, where it has one."""
        spec = self.__dict__.get("spec")
        return f"<{type(self).__name__}{'' if spec is None else f'<{spec.id}>'} {self._supervisor.statistics().state}>"

    __repr__ = __str__

    __reduce_ex__ = refuse_copy

    def _reset_message(self, seed: Any, options: Any) -> Reset:
        number = checked_seed(seed)
        super().reset(seed=number)  # gymnasium's: seeds np_random
        return reset_of_one(number, options)


class SubprocessEnv(SupervisedEnv):
    """A gymnasium.Env whose env runs in its own process and survives the death of that process.

    ::

        env = SubprocessEnv(lambda: gymnasium.make("CartPole-v1"))
        env.start()          # launches the process; does not block
        env.initialize()     # the env is built; its spaces are known
        observation, info = env.reset(seed=0)
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())

    When the process dies, from any cause, the env is recovered in a new process. The step returns the same result as
    without the loss. An episode that cannot be shown to be the same ends at that step, with ``truncated=True``.

    Args:
        env_fn: Function that builds the env; it is called in the process. It travels by cloudpickle, so a lambda works.
            If it needs an argument, it gets ``env_index``, or 0.
        env_index: Index of the env in its batch, for messages.
        **options: See :class:`~multienv.WorkerOptions`.

    Raises:
        UsageError: ``env_fn`` is not callable or cannot be pickled, or an option is invalid.
    """

    @takes_options_of(Workers.__init__)
    def __init__(self, env_fn: EnvFn, *, env_index: int | None = None, **options: Unpack[WorkerOptions]) -> None:
        fns = [checked_env_fn(env_fn, env_index)]
        super().__init__(Workers(Processes, **options).make(fns, env_index, verbatim=True))
        spread([self._supervisor])

    @finalizer
    def __del__(self) -> None:
        """Release the process, which closes its env and ends by itself, if close() was not called.

        No ``weakref.finalize``: its registry would hold the supervisor, so the traceback of an exception that it keeps,
        and so the frames that hold this object.
        """
        if "_supervisor" in self.__dict__:
            abandon_all([self._supervisor])


class SerialEnv(SupervisedEnv):
    """A :class:`SubprocessEnv` without a process, for debugging: the env runs in the trainer's process.

    It returns the same as :class:`SubprocessEnv`, to the bit. A breakpoint in the env stops here. Deadlines are not
    enforced, and a crash of the env is a crash of your process.

    Args:
        env_fn: Function that builds the env.
        env_index: Index of the env in its batch, for messages.
        hooks: See :class:`~multienv.WorkerOptions`.
    """

    def __init__(self, env_fn: EnvFn, *, env_index: int | None = None, hooks: Sequence[Hook] = ()) -> None:
        fns = [checked_env_fn(env_fn, env_index)]
        super().__init__(SerialWorkers(hooks=hooks).make(fns, env_index, verbatim=True))


@takes_options_of(Workers.__init__)
def create_subprocess_envs(env_fns: Iterable[EnvFn], **options: Unpack[WorkerOptions]) -> list[SubprocessEnv]:
    """Make envs with a process each: start all processes first, then build the envs in parallel.

    Args:
        env_fns: One function for each env; one that needs an argument gets the env's index.
        **options: Options for all envs: see :class:`~multienv.WorkerOptions`.

    Returns:
        The initialized envs, in order; each has its index as ``env_index``.

    Raises:
        EnvsFailedError: Some envs could not be built, and all others are closed again. ``failures`` has every cause. If
            all causes have one type, the error is catchable by that type too.
    """
    fns = listed_env_fns("create_subprocess_envs", env_fns)
    return built_envs(
        "create_subprocess_envs()",
        [SubprocessEnv(env_fn, env_index=index, **options) for index, env_fn in enumerate(fns)],
    )


def built_envs(what: str, envs: list[SupervisedEnvT]) -> list[SupervisedEnvT]:
    """Start all envs, build them in parallel and return them; close them all if one fails.

    Args:
        what: What the caller called, for messages.
        envs: Not started.

    Raises:
        EnvsFailedError: Some could not be built.
    """
    for env in envs[1:]:
        env._supervisor.share_knowledge(envs[0]._supervisor)
    try:
        failures = initialize_all(envs)
    except BaseException:
        close_all(envs)  # it ends what the threads wait for
        raise
    if failures:
        close_all(envs)
        results = [None if index in failures else env for index, env in enumerate(envs)]
        raise EnvsFailedError.collect(
            what, failures, results, "All envs have been closed; fix the env_fns named below."
        )
    return envs


def check_same_spaces(owner: str, envs: Sequence[gymnasium.Env[Any, Any]]) -> None:
    """Raise UsageError unless all envs have the same spaces."""
    for index, env in enumerate(envs):
        for name in ("observation_space", "action_space"):
            if getattr(env, name) != getattr(envs[0], name):
                raise UsageError(
                    f"{owner}: env {index} has {name} {getattr(env, name)}, env 0 has {getattr(envs[0], name)}. "
                    "Put envs of one kind together, or wrap them to the same spaces."
                )


def initialize_all(envs: Sequence[SupervisedEnv]) -> dict[int, BaseException]:
    """Start all, then build in parallel; returns what some of them raised, by their index."""
    failures = build_all([env._supervisor for env in envs])
    for index, env in enumerate(envs):
        if index not in failures:
            env.initialize()
    return failures


def close_all(envs: Sequence[gymnasium.Env[Any, Any]]) -> None:
    """Close envs side by side, so that several stuck ones take no longer than one."""
    workers = [worker for worker in map(supervisor_of, envs) if worker is not None]
    close_together(workers, [env.close for env in envs])


def supervisor_of(env: Any) -> Supervisor | None:
    """Return the supervisor of an env of ours; ``None`` for any other, and for a wrapper around one."""
    return env._supervisor if isinstance(env, SupervisedEnv) else None


def calls_of(env: SupervisedEnv) -> Calls:
    """Return what makes the calls to an env."""
    return env._calls
