"""All errors that multienv raises, grouped by cause.

::

    MultienvError
    ├── UsageError (also a ValueError)      your call was wrong; the message says what to call instead
    │   ├── ClosedError                       the env has been closed
    │   ├── ResetNeededError                  step() without a running episode
    │   ├── CallPendingError                  a second request before the first was collected
    │   ├── ActionError                       an action that does not fit the action space
    │   └── PolicyError                       the policy of a rollout() raised
    ├── WaitTimeout (also a TimeoutError)   the answer is not there yet; wait again
    ├── EnvError                            the env raised; its process lives (also of the type that the env raised)
    │   └── ResultNotPicklableError           the env returned a value that cannot be sent to the trainer
    ├── WorkerLostError                     the worker died or had to be killed
    │   ├── WorkerHungError                   a deadline passed (also a TimeoutError)
    │   └── RestartBudgetExceeded             the worker was lost more often than the policy allows
    ├── SystemLimitError (also an OSError)  the system allows no further process: descriptors, processes, memory
    ├── ClusterError                        the cluster cannot be reached, or a host cannot be started
    │   └── NoCapacityError                   no node has room for a host
    ├── NotRestoredError                    restore() or load_state_dict() could not bring the env back exactly
    ├── EnvsFailedError                     envs of a batch failed: failures by index, results of the other envs
    └── InfosNotMergedError                 the infos of a batch cannot be merged; also of the type that merging raised

Each message says what happened, the likely cause, and what to do next.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import gymnasium

ErrorT = TypeVar("ErrorT", bound="MultienvError")


class MultienvError(Exception):
    """Base class of all errors that multienv raises."""


# --- the caller's ---------------------------------------------------------------------------


class UsageError(MultienvError, ValueError):
    """Raised when your call was wrong. Nothing was sent to the env, and nothing is lost."""


class ClosedError(UsageError, gymnasium.error.ClosedEnvironmentError):
    """Raised by a call after ``close()``."""


class ResetNeededError(UsageError, gymnasium.error.ResetNeeded):
    """Raised by ``step()`` when no episode is running."""


class CallPendingError(UsageError, gymnasium.error.AlreadyPendingCallError):
    """Raised by a request when the result of an earlier one is not collected yet; ``name`` is the earlier request."""

    def __init__(self, message: str, name: str = "") -> None:
        Exception.__init__(self, message)  # gymnasium's has no default for the name, and then cannot be unpickled
        self.name = name


class ActionError(UsageError, gymnasium.error.InvalidAction):
    """Raised when an action does not fit the action space."""


class PolicyError(UsageError):
    """Raised when the policy of a ``rollout()`` raised an exception (its ``__cause__``) or returned invalid actions.

    The steps before that are done, but they are not returned. The episodes go on.

    Attributes:
        remote_traceback: The traceback in the worker, as text.
    """

    remote_traceback: str = ""


class WaitTimeout(MultienvError, TimeoutError, multiprocessing.TimeoutError):  # noqa: N818 - reads as what it is
    """Raised when your ``timeout`` passes before the answer arrives. The request is still pending."""


# --- the env's ------------------------------------------------------------------------------


class EnvError(MultienvError):
    """Raised when the env raised an exception, which is the ``__cause__``. The env's process is alive.

    The class of the error also derives from the type of the env's exception: ``except ThatType`` catches it. Exception:
    if the env raises a :class:`WaitTimeout` of its own, the error is a plain ``EnvError``, because a ``WaitTimeout``
    would say that your call is still pending.

    Attributes:
        env_index: Index of the env in its batch, or ``None``.
        command: The request that raised: ``"step"``, ``"reset"``, …
        step: Number of steps taken in the episode so far, or ``None``.
        seed: Seed of the last seeded reset, or ``None``.
        remote_traceback: The traceback in the worker, as text. If unpickling failed, the traceback in the trainer.
        returned: If a step ended an episode and the reset in the same step raised: the result of the step, that is
            observation, reward, terminated, truncated and info. Else ``None``.
        fragment: In a ``rollout()``: the fragment of this env in spite of the error. Else ``None``.
    """

    env_index: int | None = None
    command: str = ""
    step: int | None = None
    seed: int | None = None
    remote_traceback: str = ""
    returned: tuple[Any, float, bool, bool, dict[str, Any]] | None = None
    fragment: Any = None


class ResultNotPicklableError(EnvError):
    """Raised when a value that the env returned cannot be sent to the trainer."""


class RemoteTraceback(Exception):  # noqa: N818 - not an error of its own, the text under one
    """Carries the traceback of another process as the ``__cause__`` of an exception."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        """Return the remote traceback in quotes, apart from the local one."""
        return f'\n"""\n{self.text}"""'


def show_remotely(error: BaseException, text: str) -> None:
    """Have an exception that another process raised print the traceback of there, as its own."""
    try:
        error.add_note(f"Where it was raised:\n{text}")  # type: ignore[attr-defined]
    except AttributeError:  # Python 3.10, or an exception that takes no attributes
        error.__cause__ = RemoteTraceback(text)


def catchable_as(base: type[ErrorT], cause: BaseException, message: str) -> ErrorT:
    """Build an error of class ``base`` that ``except type(cause)`` catches too.

    The constructor of ``type(cause)`` may take any arguments: it is never called. Where the two types cannot be
    combined, the error is a plain ``base``; also for a :class:`WaitTimeout`, whose catcher would wait for ever.
    """
    kind = type(cause)
    if isinstance(cause, base | WaitTimeout) or not isinstance(cause, Exception):
        return base(message)
    namespace: dict[str, Any] = {
        "__init__": lambda self, *args: Exception.__init__(self, *args),
        "__str__": lambda self: message,
        "__module__": base.__module__,
        # The class exists in this process only: a pickle of it becomes its base again.
        "__reduce__": lambda self: (base, (message,), dict(self.__dict__)),
    }
    try:
        combined: Any = type(f"{base.__name__}[{kind.__name__}]", (base, kind), namespace)
        try:
            error = combined.__new__(combined, message)
        except TypeError:  # MemoryError will not make instances of a subclass by its own means
            error = Exception.__new__(combined, message)
        error.args = (message,)
        if isinstance(error, SyntaxError):
            error.msg = message  # what a traceback prints for a SyntaxError
        for name, value in getattr(cause, "__dict__", {}).items():
            if not name.startswith("__"):
                setattr(error, name, value)
        assert isinstance(error, base)
    except Exception:  # a user's metaclass, layout or __new__ may raise anything
        return base(message)
    return error


def rebuilt(parts: tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]) -> BaseException:
    """Rebuild an exception from its type, arguments and attributes, without calling its constructor."""
    kind, args, state = parts
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


# --- the process's --------------------------------------------------------------------------


class WorkerLostError(MultienvError):
    """Raised when the worker died, or sent a reply that cannot be decoded and was killed.

    The next ``reset()`` starts a new process.

    Attributes:
        env_index: Index in the batch of the env that was running, or of the worker's only env; ``None`` if not known.
        command: The request that the worker was executing: ``"initialize"``, ``"reset"``, ``"step"``, …
        step: Number of steps taken in the episode so far, or ``None``.
        seed: Seed of the last seeded reset, or ``None``.
        idle: Whether the process ended before it began to execute the request.
        envs: Indices of all envs of the worker.
        exit_code: Exit code of the process; a negative number is a signal; ``None`` if not known.
        stack: Python and native stack at the moment of the death or hang, if they were recorded. The message shows
            only the frames of the env's code.
        stderr: The last lines that the process wrote to stderr.
        report: The crash report, for ``multienv replay``; ``""`` if none is written.
    """

    env_index: int | None = None
    command: str = ""
    step: int | None = None
    seed: int | None = None
    idle: bool = False
    envs: tuple[int, ...] = ()
    exit_code: int | None = None
    stack: str = ""
    stderr: str = ""
    report: str = ""


class WorkerHungError(WorkerLostError, TimeoutError):
    """Raised when a deadline passed and the process was killed."""


class RestartBudgetExceeded(WorkerLostError):  # noqa: N818 - a name of the public contract
    """Raised when a worker was lost more often than its ``RestartPolicy`` allows."""


# --- the system's ---------------------------------------------------------------------------


class SystemLimitError(MultienvError, OSError):
    """Raised when the operating system allows no further worker: descriptors, processes, memory or file sizes.

    The message names the limit and what is needed; ``errno`` is that of the failed system call. No env is lost: a call
    that was made stays pending, and the next call tries again.
    """

    def __str__(self) -> str:
        """Return the message, without the number of the error."""
        return str(self.args[-1]) if self.args else ""


# --- the cluster's --------------------------------------------------------------------------


class ClusterError(MultienvError):
    """Raised when a cluster cannot be reached, or when a host cannot be started on its nodes."""


class NoCapacityError(ClusterError):
    """Raised when no node of the cluster has room for a host within ``RayOptions.placement_timeout`` seconds."""


# --- several envs ---------------------------------------------------------------------------

# Errors that the error of several envs tells in full.
_MOST_TOLD = 8


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type. Of several errors, take the first one."""
    if isinstance(error, EnvsFailedError):
        return first_line(next(iter(error.failures.values())))
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def listed(numbers: Sequence[Any]) -> str:
    """Return these numbers for people to read: those that follow one another as ``3–5``."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and list(numbers) == list(range(first, first + len(numbers))):
        return f"{first}–{last}"
    return ", ".join(map(str, numbers))


class NotRestoredError(MultienvError):
    """Raised when ``restore()`` or ``load_state_dict()`` cannot bring the env back exactly.

    After ``load_state_dict()`` the env is as it was before the call. ``restore()`` has already ended the env's process:
    the next ``reset()`` starts a new one.
    """


class EnvsFailedError(MultienvError):
    """Raised when some envs of a batch failed, after all other envs have finished.

    Attributes:
        failures: Env index → exception of that env.
        results: What the call returned for each env; ``None`` for the envs that failed, and for those that this
            ``recv()`` did not return. After a step of a vector env or a ``MultiEnv``: observation, reward, terminated,
            truncated and info. After a reset: observation and info.
    """

    failures: Mapping[int, BaseException]
    results: Sequence[Any]

    @classmethod
    def collect(
        cls,
        what: str,
        failures: Mapping[int, BaseException],
        results: Sequence[Any],
        advice: str = "Reset them.",
        others: str = "",
    ) -> MultienvError:
        """Build one error for all failures. If they share one type, the error is catchable by that type too.

        Args:
            what: The call that failed: ``"step()"``.
            failures: Env index → exception, in any order.
            results: The result of each env.
            advice: What to do next.
            others: How the other envs are; left out if all envs failed.
        """
        failures, alike = dict(sorted(failures.items())), dict[Any, list[int]]()
        for index, error in failures.items():
            is_of_several = isinstance(error, WorkerLostError) and len(error.envs) > 1
            if isinstance(error, EnvError | WorkerLostError) and error.env_index is None and not is_of_several:
                error.env_index = index
            is_same = type(error).__name__, getattr(error, "remote_traceback", "") or str(error)
            alike.setdefault(is_same, []).append(index)
        others = others and f" {others}" if len(failures) < len(results) else ""
        lines = [f"{len(failures)} of {len(results)} envs failed in {what}.{others} {advice}"]
        for indices in list(alike.values())[:_MOST_TOLD]:
            error = failures[indices[0]]
            envs = f"env{'' if len(indices) == 1 else 's'} {listed(indices)}"
            same = "" if len({str(failures[index]) for index in indices}) == 1 else ", all as the first"
            lines.append(f"  {envs}{same}: {type(error).__name__}: {error}")
        if len(alike) > _MOST_TOLD:
            lines.append(f"  and {len(alike) - _MOST_TOLD} other errors: `failures` has all.")
        message = "\n".join(lines)
        kinds = {
            type(error.__cause__ or error if isinstance(error, EnvError) else error) for error in failures.values()
        }
        first = next(iter(failures.values()))
        error = catchable_as(cls, first, message) if len(kinds) == 1 else cls(message)
        error.failures = dict(failures)
        error.results = list(results)
        error.__cause__ = (first.__cause__ if isinstance(first, EnvError) else None) or first  # the env's own
        return error


class InfosNotMergedError(MultienvError):
    """Raised when the infos of a batch cannot be merged in gymnasium's way: None in one env, a number in another.

    The call is done, and all episodes go on. Make the envs with ``merge_infos=False``, or let all of them give the same
    kind of value. The class of the error also derives from the type that merging raised, which is the ``__cause__``.

    Attributes:
        results: What the call would have returned, with a list of infos: one dict for each env.
    """

    results: Any = None


__all__ = [
    name for name, value in list(globals().items()) if isinstance(value, type) and issubclass(value, MultienvError)
]
