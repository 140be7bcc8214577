"""What SubprocessEnv and SerialEnv share: a gymnasium.Env whose env lives behind a supervisor."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import gymnasium

from multienv.errors import MultienvError, ResultNotPicklableError, SeedError, UsageError
from multienv.events import Statistics
from multienv.recovery.phases import HALF, WHOLE
from multienv.recovery.restorer import Snapshot
from multienv.recovery.supervisor import Supervisor, Transition
from multienv.remote_generator import RemoteGenerator
from multienv.unique import Unique
from multienv.wire.messages import Branch, Call, GetAttribute, HasAttribute, Method, Render, Reset, SetAttribute

if TYPE_CHECKING:
    from typing_extensions import Self

EnvFn = Callable[[], gymnasium.Env[Any, Any]]

_OWN_METHODS = frozenset(("reset", "step", "render", "close"))
_SPACES = frozenset(("observation_space", "action_space"))


class HostedEnv(Unique, gymnasium.Env[Any, Any]):
    """An env that answers requests from somewhere else.

    The calls come whole (``step``) and in two halves: ``step_async`` sends and does not block,
    ``step_wait`` collects, with a timeout if given.
    """

    # gymnasium declares these on the class; here they are the remote env's, known once it is built.
    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012
    _supervisor: Supervisor

    def __init__(self, supervisor: Supervisor) -> None:
        """Keep the supervisor; start nothing."""
        self._supervisor = supervisor

    # --- start and end --------------------------------------------------------------------------

    def start(self) -> Self:
        """Launch the process and have it build the env; does not wait. Again does nothing.

        Returns:
            The env itself.

        Raises:
            ClosedError: It has been closed.
        """
        self._supervisor.start()
        return self

    def initialize(self, timeout: float | None = None) -> Self:
        """Wait until the env is built; start it first if need be. Again does nothing.

        Afterwards ``observation_space``, ``action_space``, ``metadata``, ``spec`` and ``render_mode`` are
        those of the env.

        Args:
            timeout: Seconds to wait; it can be called again.

        Returns:
            The env itself.

        Raises:
            EnvRaisedError: ``env_fn`` raised; catchable by the exception's own type too.
            WorkerLostError: Building the env ended its process.
            WaitTimeout: ``timeout`` is over.
        """
        description = self._supervisor.initialize(timeout)
        if "observation_space" not in self.__dict__:
            self.metadata = description.metadata
            self.spec = description.spec
            self.render_mode = description.render_mode
            # Copies: training code writes to spaces (CleanRL sets a dtype), and recovery goes by these. The one that is
            # asked about above comes last: an interruption leaves all to do again.
            self.action_space = copy.deepcopy(description.action_space)
            self.observation_space = copy.deepcopy(description.observation_space)
        return self

    def close(self) -> None:
        """End the process: by asking, and after ``Deadlines.close`` seconds by force. Again does nothing."""
        self._supervisor.close()

    def __exit__(self, *error: object) -> Literal[False]:
        """Close."""
        self.close()
        return False

    def __enter__(self) -> Self:
        """Initialize."""
        return self.initialize()

    # --- an episode -----------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: For the env's generators. Without one the env is given none, and its generators go on as they are;
                what it leaves to chance is recorded, so that the episode can be replayed.
            options: The env's own.

        Returns:
            Observation and info.
        """
        seed = self._checked_seed(seed)
        with _Interruptible(self._supervisor):
            self._supervisor.send("reset", Reset(seed, options, anchor=False))
            return self._supervisor.receive("reset")  # type: ignore[no-any-return]

    def reset_async(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Send a reset; collect it with :meth:`reset_wait`."""
        seed = self._checked_seed(seed)
        with _Interruptible(self._supervisor, HALF):
            self._supervisor.send("reset", Reset(seed, options, anchor=False))

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Collect what the reset returned. Raises WaitTimeout after ``timeout`` seconds; wait again then."""
        with _Interruptible(self._supervisor, HALF):
            return self._supervisor.receive("reset", timeout)  # type: ignore[no-any-return]

    def step(self, action: Any) -> Transition:
        """Take one step.

        An interrupted step (Ctrl-C) has been sent all the same: the next call returns its outcome, whatever
        its own action, with ``info["multienv"] == {"resumed": True}``.

        Args:
            action: Of the env's action space; it arrives in the type, dtype and value given here.

        Returns:
            Observation, reward, terminated, truncated, info. An episode that could not be brought back
            after a loss ends with ``truncated=True``, the last observation seen, reward 0.0 and
            ``info["multienv"]["reason"]``.

        Raises:
            ActionError: The action does not fit the action space; nothing was sent.
            ResetNeededError: There is no running episode.
            EnvRaisedError: The env raised; catchable by the exception's own type too.
            WorkerLostError: The process was lost and the policy says ``"raise"``, or its budget is spent.
        """
        supervisor = self._supervisor
        before = supervisor.seq
        try:
            supervisor.send_step(action)
            return supervisor.receive_step()
        except BaseException as error:
            supervisor.note_interrupted_step(error, before)
            raise

    def step_async(self, action: Any) -> None:
        """Send a step; collect it with :meth:`step_wait`."""
        with _Interruptible(self._supervisor, HALF):
            self._supervisor.send_step(action)

    def step_wait(self, timeout: float | None = None) -> Transition:
        """Collect what the step returned. Raises WaitTimeout after ``timeout`` seconds; wait again then.

        A loss that shows meanwhile is made good here first: ``Deadlines.recovery`` bounds that.
        """
        supervisor = self._supervisor
        try:
            return supervisor.receive_step(timeout)
        except BaseException as error:
            supervisor.note_interrupted_step(error, None)
            raise

    def resume(self) -> Any:
        """What the last step or reset returned, collected before or not: to go on after an interruption."""
        return self._supervisor.resume()

    def render(self) -> Any:
        """Draw the env where it is; returns what its ``render`` returns."""
        return self._ask("render", Render())

    # --- branching ------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Keep the env as it is now, to come back to with :meth:`restore`, any number of times.

        To be called between two steps. The env's process forks itself, which takes about a millisecond and works for
        whatever can be forked: also what cannot be copied or pickled, an emulator or a physics engine for instance.

        Returns:
            To be given to :meth:`restore`. It is freed when nobody holds it any more.

        Raises:
            NotForkableError: The env has threads, child processes, sockets, shared memory or a GPU; or it is not on
                Linux, was started by ``fork``, or is a :class:`SerialEnv`. Nothing is lost.
            UsageError: ``RestartPolicy.max_snapshots`` are kept already.
        """
        token = self._supervisor.prepare_snapshot()
        return self._supervisor.keep_snapshot(token, self._ask("snapshot", Branch(token)))

    def restore(self, snapshot: Snapshot) -> None:
        """Have the env as it was when this snapshot of it was taken: exactly, its random generators too.

        What happened since is undone for the env; the next step continues the episode of the snapshot. Losses after
        that are made good as ever.

        Raises:
            UsageError: The snapshot is another env's, or has been freed.
            NotRestoredError: The frozen process has been killed, and the env could not be replayed to that state.
        """
        with _Interruptible(self._supervisor):
            self._supervisor.restore(snapshot)

    # --- checkpoints ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on from here in another trainer: plain data, to be pickled or saved with a model.

        To be called between two steps. It holds what drove the env and what was seen of it, as the journal does, and
        is as large as that. The generators of the spaces on this side (``action_space.sample()``) are not in it.

        Raises:
            UsageError: Something is pending, or the journal does not reach back far enough.
        """
        return self._supervisor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was called: a new process replays what it holds, and is verified.

        Whatever this env was doing is given up. It is initialized if need be; its ``env_fn`` must be the same.

        Raises:
            NotRestoredError: The replay does not show what had been seen; this env is as it was before.
            UsageError: ``state`` is something else, or a request is pending.
        """
        self.initialize()
        self._supervisor.load_state_dict(state)

    # --- anything else --------------------------------------------------------------------------

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the env or of one of its wrappers; an attribute that is not callable is returned.

        Calls are recorded and replayed: the method should be as deterministic as the env.

        Raises:
            ValueError: ``name`` is reset, step, render or close, which have methods of their own here.
        """
        return self._ask("call", self._call_message(name, args, kwargs))

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Send a call; collect it with :meth:`call_wait`."""
        with _Interruptible(self._supervisor, HALF):
            self._supervisor.send("call", self._call_message(name, args, kwargs))

    def call_wait(self, timeout: float | None = None) -> Any:
        """Collect what the call returned. Raises WaitTimeout after ``timeout`` seconds; wait again then."""
        with _Interruptible(self._supervisor, HALF):
            return self._supervisor.receive("call", timeout)

    def get_attr(self, name: str) -> Any:
        """A copy of an attribute of the env or of one of its wrappers; of a method, what calls it there."""
        if name in _OWN_METHODS:
            return getattr(self, name)
        value = self._ask("get_attr", GetAttribute(name))
        return partial(self.call, name) if isinstance(value, Method) else value

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute where it is found among env and wrappers, else on the outermost. Recorded, replayed."""
        self._ask("set_attr", SetAttribute(name, value))

    def statistics(self) -> Statistics:
        """State, process and counters at this moment, as a frozen record."""
        return self._supervisor.statistics()

    # --- gymnasium's own ways to attributes -------------------------------------------------------

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether this env or the remote one has the attribute."""
        return self._has_here(name) or bool(self._ask("has_attr", HasAttribute(name)))

    def get_wrapper_attr(self, name: str) -> Any:
        """The attribute of this env, or of the remote one."""
        return getattr(self, name) if self._has_here(name) else self.get_attr(name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute of the remote env, as :meth:`set_attr` does; False if it has none and not ``force``."""
        if not force and not self._ask("has_attr", HasAttribute(name)):
            return False
        self.set_attr(name, value)
        return True

    @property
    def np_random(self) -> Any:
        """The remote env's generator: to draw from it is to draw there. ``get_attr("np_random")`` is a copy."""
        return RemoteGenerator(self.call, lambda: self.get_attr("np_random"))

    @np_random.setter
    def np_random(self, value: Any) -> None:
        self.set_attr("np_random", value)

    @property
    def _np_random(self) -> Any:  # type: ignore[override]
        """What gymnasium's checker looks at."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> Any:
        """The seed of the remote env's generator; -1 if it is not known."""
        return self.get_attr("np_random_seed")

    def __str__(self) -> str:
        """Name the env by its spec, where it has one."""
        spec = self.spec
        return f"<{type(self).__name__}{'' if spec is None else f'<{spec.id}>'} {self._supervisor.statistics().state}>"

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what the remote env has, and this object has not, there; anything else here."""
        own = name.startswith("_") or name in _SPACES or self._has_here(name)
        if own or not self._has_remotely(name):
            super().__setattr__(name, value)
        else:
            self.set_attr(name, value)

    def __getattr__(self, name: str) -> Any:
        """What the remote env has, and this object has not: a copy, as :meth:`get_attr` returns it.

        Names that begin with ``_`` are this object's own. While the remote env cannot be asked, because a call is
        pending or its process is known to be lost, there is no such thing.
        """
        if name in _SPACES and "_supervisor" in self.__dict__:
            self._supervisor.refuse(name)
        nowhere = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name.startswith("_") or "_supervisor" not in self.__dict__ or not self._supervisor.is_idle:
            raise AttributeError(f"{nowhere}; the remote env's: get_attr()")
        try:
            return self.get_attr(name)
        except (AttributeError, ResultNotPicklableError) as error:
            advice = "A wrapper that needs it belongs into the env_fn."
            raise AttributeError(f"{nowhere}, nor has the remote env one to be had here. {advice} {error}") from error

    def _has_here(self, name: str) -> bool:
        return name in self.__dict__ or hasattr(type(self), name)

    def _has_remotely(self, name: str) -> bool:
        if "observation_space" not in self.__dict__ or self._supervisor.closed:
            return False
        return bool(self._ask("has_attr", HasAttribute(name)))

    # --- helpers --------------------------------------------------------------------------------

    def _ask(self, command: str, message: Any) -> Any:
        with _Interruptible(self._supervisor):
            self._supervisor.send(command, message)
            return self._supervisor.receive(command)

    @staticmethod
    def _call_message(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if name in _OWN_METHODS:
            raise UsageError(
                f"Trying to call function `{name}` with `call`, use `{name}` directly instead: what it does to the "
                "episode must be seen here."
            )
        return Call(name, args, kwargs)

    @staticmethod
    def _checked_seed(seed: Any) -> int | None:
        if seed is None:
            return None
        advice = f"reset(seed={seed!r:.100}): give a non-negative integer, or None."
        try:
            number = None if isinstance(seed, bool) else operator.index(seed)  # numpy's too; gymnasium wants Python's
        except TypeError:
            number = None
        if number is None:
            raise SeedError(f"Seed must be a python integer, actual type: {type(seed)}. {advice}")
        if number < 0:
            raise SeedError(f"Seed must be greater or equal to zero, actual value: {number}. {advice}")
        return number


class _Interruptible:
    """Notes when an exception from outside (Ctrl-C, a signal handler's) leaves a request unanswered."""

    __slots__ = ("_extent", "_supervisor")

    def __init__(self, supervisor: Supervisor, extent: int = WHOLE) -> None:
        self._supervisor = supervisor
        self._extent = extent

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        if error[1] is not None:
            self._supervisor.note_interruption(error[1], self._extent)
            if not isinstance(error[1], MultienvError):
                self._supervisor.rest()
