"""What is asked of all envs of a batch besides steps and resets."""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from gymnasium.vector import VectorEnv

from multienv.config import check_seconds
from multienv.errors import CallPendingError, ClosedError, EnvsFailedError, NothingPendingError, UsageError
from multienv.hosted_env import HostedEnv
from multienv.recovery.group import GroupSupervisor
from multienv.recovery.record import refuse_in_hook
from multienv.rendering import Frame, tile_images
from multienv.unique import Unique
from multienv.vector_arguments import check_sendable
from multienv.vector_rounds import STEP, Parted, Round, VectorRounds
from multienv.wire.messages import Message, Render, SetAttribute

if TYPE_CHECKING:
    from typing_extensions import Self


class VectorCalls(Unique, VectorEnv[Any, Any, Any]):
    """Calls, attributes, generators and pictures; and who may ask what when."""

    _groups: list[GroupSupervisor]
    _rounds: VectorRounds
    _slices: list[slice]

    def __enter__(self) -> Self:
        """Nothing more to do: the envs are built."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or of one of its wrappers; an attribute that is not callable is returned.

        Calls are recorded and replayed: the method should be as deterministic as the env.

        Returns:
            What each env returned.

        Raises:
            EnvsFailedError: Some envs raised; ``results`` has what the others returned, and all episodes go on.
            UsageError: ``name`` is reset, step or close, which have methods of their own here.
        """
        self._begin_call("call", self._message_of(name, args, kwargs), whole=True)
        return self.call_wait()

    @staticmethod
    def _message_of(name: str, args: Any, kwargs: Any) -> Message:
        return Render() if name == "render" else HostedEnv._call_message(name, args, kwargs)

    def _begin_call(self, what: str, message: Message, *, whole: bool) -> None:
        self._refuse_pending(what)
        self._rounds.begin("call", [message] * len(self._groups), whole=whole)

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Send the calls; collect them with :meth:`call_wait`."""
        self._begin_call("call_async", self._message_of(name, args, kwargs), whole=False)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Collect what the calls returned. Raises WaitTimeout after ``timeout`` seconds; wait again then."""
        current = self._collect("call", timeout)
        values: list[Any] = []
        failures: dict[int, BaseException] = {}
        for index, rows in enumerate(self._slices):
            if index in current.failures:
                failures |= dict.fromkeys(range(rows.start, rows.stop), current.failures[index])
                values += [None] * (rows.stop - rows.start)
                continue
            some, failed = current.answers[index]
            values += some
            failures |= {rows.start + slot: error for slot, error in failed.items()}
        answer = tuple(values)
        if failures:
            try:
                raise EnvsFailedError.collect("call()", failures, values, "The others answered; all episodes go on.")
            except EnvsFailedError:
                self._rounds.end()  # not before: what is interrupted till then is told the next time
                raise
        self._rounds.end()
        return answer

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every env; a method is called, as gymnasium does."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute on every env.

        Args:
            name: It is set where it is found among the env and its wrappers, else on the outermost.
            values: A list or tuple has one value for each env; anything else is for all.
        """
        if self.closed:
            self._refuse_pending("set_attr")
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise UsageError(
                "set_attr(): Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        self._refuse_pending("set_attr")
        if len(self._groups) > 1:
            check_sendable(tuple(values), "set_attr(): the values")
        self._rounds.begin("call", [SetAttribute(name, tuple(values[rows])) for rows in self._slices], whole=True)
        self.call_wait()

    @property
    def np_random(self) -> Any:
        """Copies of the generators of all envs."""
        return self.get_attr("np_random")

    @np_random.setter
    def np_random(self, value: Any) -> None:
        self.set_attr("np_random", value)

    @property
    def np_random_seed(self) -> Any:
        """The seeds of the generators of all envs; -1 where it is not known."""
        return self.get_attr("np_random_seed")

    # --- pictures ---------------------------------------------------------------------------------

    def render(self) -> tuple[Any, ...]:
        """What every env renders, as its ``render_mode`` says: with ``"rgb_array"`` one frame each."""
        return self.call("render")

    def get_images(self) -> list[Frame]:
        """One frame of every env.

        Raises:
            UsageError: The envs draw no frames: their ``render_mode`` is another than ``"rgb_array"``.
        """
        if self.render_mode != "rgb_array":
            raise UsageError(
                f"get_images(): the envs draw no frames, render_mode is {self.render_mode!r}. Make them with "
                "render_mode='rgb_array'."
            )
        return list(self.render())

    def render_tiled(self) -> Frame:
        """The frames of all envs in one picture, as :func:`~multienv.rendering.tile_images` lays them out."""
        return tile_images(self.get_images())

    # --- who may ask ------------------------------------------------------------------------------

    def _refuse_pending(self, command: str) -> None:
        if self.closed:
            self._refuse_closed(command)
        current = self._rounds.current
        if current is None:
            return
        if isinstance(current, Parted):
            raise UsageError(f"{command}(): these envs have been split; call {command}() of their parts, or close().")
        refuse_in_hook(self._groups, f"{command}()")
        if not current.interrupted:
            raise CallPendingError(
                f"Calling `{command}` while waiting for a pending call to `{current.command}` to complete. Call "
                f"{current.command}_wait() first.",
                current.command,
            )
        if current.command == STEP and not command.startswith("reset"):
            raise CallPendingError(
                f"{command}(): a step was interrupted. Call step() to complete it, or reset() to drop it.", STEP
            )
        completed = self._rounds.completed()
        if completed is not None:  # nobody asks for its outcome; what it has changed stays so
            self._note_completed(completed)
            self._rounds.end()

    def _refuse_closed(self, command: str) -> NoReturn:
        name = type(self).__name__
        raise ClosedError(f"{command}(): Trying to operate on `{name}`, after a call to `close()`. Make a new one.")

    def _collect(self, command: str, timeout: float | None) -> Round:
        current = self._rounds.current
        if self.closed:
            self._refuse_closed(f"{command}_wait")
        if current is None or current.command != command:
            pending = "" if current is None else f" What is pending is {current.command}."
            raise NothingPendingError(
                f"Calling `{command}_wait` without any prior call to `{command}_async`.{pending}", command
            )
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
        refuse_in_hook(self._groups, f"{command}_wait()")
        self._rounds.collect(timeout)
        if any(type(failure) is ClosedError for failure in current.failures.values()):
            # By a signal handler or another thread: that is no failure of the envs.
            self._refuse_closed(command)
        return current

    @abstractmethod
    def _note_completed(self, completed: Round) -> None:
        """Take in what a call has changed whose outcome nobody asks for."""
