"""Every error multienv raises, by whose fault it is.

::

    MultienvError
    ├── UsageError (also a ValueError)      the caller's: says what to call instead
    │   ├── ClosedError                       the env has been closed
    │   ├── ResetNeededError                  step() without a running episode
    │   ├── CallPendingError                  a second request before the first was collected
    │   ├── ActionError                       an action that does not fit the action space
    │   └── PolicyError                       the policy of a rollout() raised
    ├── WaitTimeout (also a TimeoutError)   the answer is not there yet; wait again
    ├── EnvError                            the env's: it raised, its process lives; also of the type that it raised
    │   └── ResultNotPicklableError           what the env returned cannot travel
    ├── WorkerLostError                     the process's: it died or had to be killed
    │   ├── WorkerHungError                   a deadline passed (also a TimeoutError)
    │   └── RestartBudgetExceeded             it was lost more often than the policy allows
    ├── ClusterError                        the cluster's: it cannot be reached, or a host cannot be made
    │   └── NoCapacityError                   no node has room for a host
    ├── NotRestoredError                    restore() or load_state_dict() could not have the env as it was
    └── EnvsFailedError                     envs of a batch: failures by index, results of the others

Each message says what happened, the likely cause, and what to do next.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium


class MultienvError(Exception):
    """Base class of the errors that multienv raises."""


# --- the caller's ---------------------------------------------------------------------------


class UsageError(MultienvError, ValueError):
    """Raised when a call was wrong; nothing was sent to the env and nothing is lost."""


class ClosedError(UsageError, gymnasium.error.ClosedEnvironmentError):
    """Raised by a call after ``close()``."""


class ResetNeededError(UsageError, gymnasium.error.ResetNeeded):
    """Raised by ``step()`` where no episode is running."""


class CallPendingError(UsageError, gymnasium.error.AlreadyPendingCallError):
    """Raised by a request while an earlier one has not been collected; ``name`` says which."""

    def __init__(self, message: str, name: str = "") -> None:
        Exception.__init__(self, message)  # gymnasium's has no default for the name, and then cannot be unpickled
        self.name = name


class ActionError(UsageError, gymnasium.error.InvalidAction):
    """Raised by an action that does not fit the action space."""


class PolicyError(UsageError):
    """Raised when the policy of a ``rollout()`` raised, or returned what are no actions; that is its ``__cause__``.

    The steps that it chose before are done and not returned; the episodes go on.

    Attributes:
        remote_traceback: The traceback in the worker, as text.
    """

    remote_traceback: str = ""


class WaitTimeout(MultienvError, TimeoutError, multiprocessing.TimeoutError):  # noqa: N818 - reads as what it is
    """Raised when the caller's ``timeout`` passes before the answer; the request is still pending."""


# --- the env's ------------------------------------------------------------------------------


class EnvError(MultienvError):
    """Raised in the place of an exception of the env, which is its ``__cause__``; its process is alive.

    Its class is made on the spot and also derives from that exception's type: ``except ThatType`` catches it. Not so
    for a :class:`WaitTimeout` of the env's own: it would say that this call is still pending.

    Attributes:
        env_index: The env's index in its batch, or ``None``.
        command: What was asked of it: ``"step"``, ``"reset"``, …
        step: Steps taken in the episode so far, or ``None``.
        seed: The seed of the last seeded reset, or ``None``.
        remote_traceback: The traceback in the worker, as text; where unpickling failed, that in the trainer.
        returned: What ``step()`` had returned, if it ended an episode and the reset of the same step raised:
            observation, reward, terminated, truncated and info. Else ``None``.
        fragment: What a ``rollout()`` came to all the same, of this env; else ``None``.
    """

    env_index: int | None = None
    command: str = ""
    step: int | None = None
    seed: int | None = None
    remote_traceback: str = ""
    returned: tuple[Any, float, bool, bool, dict[str, Any]] | None = None
    fragment: Any = None


class ResultNotPicklableError(EnvError):
    """Raised when what the env returned cannot be sent to the trainer."""


class RemoteTraceback(Exception):  # noqa: N818 - not an error of its own, the text under one
    """Carries the traceback of another process as the ``__cause__`` of an exception."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        """Return the remote traceback in quotes, apart from the local one."""
        return f'\n"""\n{self.text}"""'


def catchable_as(base: type[MultienvError], cause: BaseException, message: str) -> MultienvError:
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
    except Exception:  # a foreign metaclass, layout or __new__ may raise anything
        return base(message)
    assert isinstance(error, base)
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
    """Raised when the env's process died, or answered something that cannot be decoded and was killed.

    The next ``reset()`` starts a new process.

    Attributes:
        env_index: The index in its batch of the env that was being executed, or is the only one; ``None``: not known.
        command: What it was doing: ``"initialize"``, ``"reset"``, ``"step"``, …
        step: Steps taken in the episode so far, or ``None``.
        seed: The seed of the last seeded reset, or ``None``.
        idle: The process had not begun to execute the command when it ended.
        envs: The indexes of all its envs.
        exit_code: Its exit code; negative is the number of the signal; ``None`` if not known.
        stack: The Python and native stack at the moment of death or hang, where one was taken.
        stderr: The last lines it wrote on stderr.
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
    """Raised when a deadline passed, and the process was killed."""


class RestartBudgetExceeded(WorkerLostError):  # noqa: N818 - a name of the public contract
    """Raised when the env was lost more often than its ``RestartPolicy`` allows."""


# --- the cluster's --------------------------------------------------------------------------


class ClusterError(MultienvError):
    """Raised when a cluster cannot be reached any more, or a host cannot be made on its nodes."""


class NoCapacityError(ClusterError):
    """Raised when no node of the cluster has room for a host, for ``RayOptions.placement_timeout`` seconds."""


# --- several envs ---------------------------------------------------------------------------


class NotRestoredError(MultienvError):
    """Raised when ``restore()`` or ``load_state_dict()`` cannot bring the env back exactly.

    After ``load_state_dict()`` the env is as it was before the call. ``restore()`` has ended the env's process by then:
    the next ``reset()`` starts a new one.
    """


class EnvsFailedError(MultienvError):
    """Raised when envs of a batch failed, after all others have finished.

    Attributes:
        failures: Env index → the exception of that env.
        results: What each env returned, ``None`` for the failed ones.
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
        """Build one error for all failures; it is catchable by their own type where they share one.

        Args:
            what: What was asked: ``"step()"``.
            failures: Env index → exception, in any order.
            results: What each env returned.
            advice: What to do next.
            others: What became of those that did not fail; left out where all did.
        """
        failures = dict(sorted(failures.items()))
        for index, error in failures.items():
            is_of_several = isinstance(error, WorkerLostError) and len(error.envs) > 1
            if isinstance(error, EnvError | WorkerLostError) and error.env_index is None and not is_of_several:
                error.env_index = index
        others = others and f" {others}" if len(failures) < len(results) else ""
        lines = [f"{len(failures)} of {len(results)} envs failed in {what}.{others} {advice}"]
        lines += [f"  env {index}: {type(error).__name__}: {error}" for index, error in failures.items()]
        message = "\n".join(lines)
        kinds = {
            type(error.__cause__ or error if isinstance(error, EnvError) else error) for error in failures.values()
        }
        first = next(iter(failures.values()))
        error = catchable_as(cls, first, message) if len(kinds) == 1 else cls(message)
        assert isinstance(error, cls)
        error.failures = dict(failures)
        error.results = list(results)
        error.__cause__ = first
        return error


__all__ = [
    name for name, value in list(globals().items()) if isinstance(value, type) and issubclass(value, MultienvError)
]

# Names of earlier versions, and what is raised in their place.
_RENAMED: dict[str, type[Exception]] = {
    "ClusterLostError": ClusterError,
    "EnvFnError": UsageError,
    "EnvRaisedError": EnvError,
    "HangingPoisonError": WorkerHungError,
    "NotForkableError": UsageError,
    "NotInitializedError": UsageError,
    "NotShareableError": ValueError,
    "NothingPendingError": gymnasium.error.NoAsyncCallError,
    "PoisonError": WorkerLostError,
    "ReplyBrokenError": WorkerLostError,
    "ReportError": UsageError,
    "SeedError": UsageError,
    "SpaceMismatchError": RuntimeError,
    "WorkerDiedError": WorkerLostError,
}


def __getattr__(name: str) -> Any:
    """Return what is raised in place of an error of an earlier version, with a DeprecationWarning."""
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = _RENAMED[name]
    warnings.warn(f"{name} is gone: catch {found.__name__}.", DeprecationWarning, stacklevel=2)
    return found
