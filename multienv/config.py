"""Options as a few frozen values that are passed whole."""

from __future__ import annotations

import inspect
import numbers
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, Literal, TypeVar, cast

from multienv.errors import UsageError

OnLoss = Literal["replay", "truncate", "raise"]
# Longer than any use; a clock in float64 still counts seconds exactly up to there.
_LONGEST = 10**15
_ON_LOSS = ("replay", "truncate", "raise")
_ON_ERROR = ("raise", "truncate")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def takes_options_of(*takers: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Decorate a function that hands its ``**options`` on, so that ``help()`` shows them by name, with their defaults.

    A name that is unknown raises TypeError before the function is called.

    Args:
        *takers: Where the options end up: their keyword-only parameters are shown.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        shown = {name: one for name, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD}
        for taker in takers:
            for name, one in inspect.signature(taker).parameters.items():
                if one.kind is one.KEYWORD_ONLY:
                    shown.setdefault(name, one)

        @wraps(function)
        def checked(*arguments: Any, **named: Any) -> Any:
            for name in named:
                if name not in shown:
                    raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {name!r}")
            return function(*arguments, **named)

        cast("Any", checked).__signature__ = signature.replace(parameters=list(shown.values()))
        return cast("_Function", checked)

    return decorate


class Named:
    """Shows only the options that are not as they are by default."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the call that makes the same; in a signature ``RestartPolicy()`` says more than all its values."""
        values = [(field, getattr(self, field.name)) for field in fields(self)]  # type: ignore[arg-type]
        chosen = ", ".join(f"{field.name}={value!r}" for field, value in values if value != field.default)
        return f"{type(self).__name__}({chosen})"


def check_seconds(name: str, value: float | None, *, zero: bool = False, words: str = "") -> None:
    """Raise UsageError unless this is ``None`` or a finite, positive number.

    Args:
        name: Of the value, for messages.
        value: The value.
        zero: 0 is allowed too.
        words: What else would have been allowed, for messages.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise UsageError(f"{name} is {value!r}; give a number of seconds{words}, or None for no limit.")
    # Compared before any conversion: an integer may be too large for a float, a float for a poll().
    if not 0 <= value <= _LONGEST or (value == 0 and not zero):
        raise UsageError(
            f"{name} is {value!r}; give a positive number of seconds, at most {_LONGEST:,}, or None for no limit."
        )


def integer(value: Any) -> int | None:
    """Return an integer, numpy's too, as an int; ``None`` for anything else, a bool included."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None


def checked_seed(seed: Any) -> int | None:
    """Return a seed as an ``int``, or ``None``; raise UsageError unless it is a non-negative integer or ``None``."""
    if seed is None:
        return None
    advice = f"reset(seed={seed!r:.100}): give a non-negative integer, or None."
    try:
        number = None if isinstance(seed, bool) else operator.index(seed)  # numpy's too; gymnasium wants Python's
    except TypeError:
        number = None
    if number is None:
        raise UsageError(f"Seed must be a python integer, actual type: {type(seed)}. {advice}")
    if number < 0:
        raise UsageError(f"Seed must be greater or equal to zero, actual value: {number}. {advice}")
    return number


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Deadlines(Named):
    """Says how long the env may take for one request, in seconds; ``None`` is for ever.

    A process that has not answered when its deadline passes counts as hung: its Python stack is taken,
    it is killed, and ``RestartPolicy.on_timeout`` says what happens next.

    Args:
        start: From the launch of the process to the built env.
        reset: One ``reset``; or ``"auto"``, as for ``step``, after three resets.
        step: One ``step``; of a ``rollout`` each. Or ``"auto"``: after twenty steps, ten times as long as the slowest
            that this process has made so far, and 10 s at least. A request that was ended by that has thirty times as
            long in the next process, so that an env which is merely slow is waited for, and one that hangs by chance is
            healed.
        call: One ``call``, ``get_attr``, ``set_attr`` or ``render``.
        close: ``close``, after which the process is killed.
        recovery: Bringing back the envs of one lost worker, all attempts together. Past it the step is truncated. An
            attempt that is not the last one may use half of what is left.
    """

    start: float | None = 120.0
    reset: float | Literal["auto"] | None = None
    step: float | Literal["auto"] | None = None
    call: float | None = None
    close: float = 5.0
    recovery: float | None = 120.0

    def __post_init__(self) -> None:
        """Raise UsageError unless all values are numbers of seconds."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("reset", "step"):
                check_seconds(f"Deadlines.{field.name}", value)
            elif not isinstance(value, str) or value != "auto":
                check_seconds(f"Deadlines.{field.name}", value, words=", 'auto'")
        if self.close is None:
            raise UsageError("Deadlines.close is None; close() is always bounded: give a number of seconds.")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RestartPolicy(Named):
    """Says what happens when a worker is lost, and how often.

    ``"replay"`` brings the same episode back, verified, or truncates it where that cannot be shown to be
    exact; ``"truncate"`` ends the episode at the broken step; ``"raise"`` raises a
    :class:`~multienv.errors.WorkerLostError`.

    Args:
        on_crash: The process died, or answered something undecodable.
        on_timeout: A deadline passed.
        on_error: The env raised an exception in ``step()``; its process lives. ``"raise"``, or ``"truncate"`` to end
            its episode there and log the traceback.
        max_restarts: Restarts allowed per env within ``window``; one more raises
            :class:`~multienv.errors.RestartBudgetExceeded`.
        window: Length of the window, seconds.
        backoff: Wait before the second restart in a row that made no progress, seconds; it doubles with
            each further one, with jitter. The first restart is immediate.
        max_backoff: The longest such wait, seconds.
        poison_after: The number of processes the same request may kill before it is taken for poison.
        journal_limit: Bytes of memory that the journal may take for each env. It is for replays: each env is replayed
            from a reset of its own, about two episodes back, however long the run is; while the worker is young from
            the construction on. An episode that outgrows this or ``replay_limit`` cannot be replayed: unless there is
            a snapshot, a loss truncates it. The other envs of the worker are brought back. With 0, and a policy that
            replays nothing, crash reports have no journal either.
        replay_limit: Seconds of env time, with resets, calls and renderings, that a replay may take for each env.
        snapshots: Workers fork themselves now and then, on Linux only: a lost one is brought
            back from its frozen copy, exactly whatever the env is made of. An env with threads, child
            processes, sockets, shared memory or a GPU has none; ``statistics().no_snapshots`` says so.
        snapshot_every: Steps between two snapshots; ``None`` finds out what is good: 1 % of the env's time at most.
        max_snapshots: How many that ``env.snapshot()`` has taken may be kept at a time; each is a frozen process.
        recycle_after_steps: A process that has taken so many steps is replaced by a new one, between two steps and
            without a trace in the trajectory: by a replay, as after a loss. For simulators that leak. Envs that cannot
            be replayed exactly keep their process until all of them are reset at once; without that the replacement
            is tried again after some more episodes: 2 of each env, then 4, 8 and so on. This and what follows is
            looked at every 64 steps, and when an episode ends or begins.
        recycle_after_episodes: The same after so many episodes; where each env has a process of its own.
        recycle_after: The same after so many seconds.
        max_rss: The same when its resident memory exceeds so many bytes: more than the envs of the process take when
            they are new.
    """

    on_crash: OnLoss = "replay"
    on_timeout: OnLoss = "replay"
    on_error: Literal["raise", "truncate"] = "raise"
    max_restarts: int = 10_000
    window: float = 3600.0
    backoff: float = 0.1
    max_backoff: float = 10.0
    poison_after: int = 2
    journal_limit: int = 16 * 2**20
    replay_limit: float = 10.0
    snapshots: bool = True
    snapshot_every: int | None = None
    max_snapshots: int = 256
    recycle_after_steps: int | None = None
    recycle_after_episodes: int | None = None
    recycle_after: float | None = None
    max_rss: int | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for an unknown action or a number out of range."""
        for name, allowed in (("on_crash", _ON_LOSS), ("on_timeout", _ON_LOSS), ("on_error", _ON_ERROR)):
            if getattr(self, name) not in allowed:
                choices = ", ".join(map(repr, allowed))
                raise UsageError(f"RestartPolicy.{name} is {getattr(self, name)!r}; choose one of {choices}.")
        for name in ("window", "backoff", "max_backoff", "replay_limit"):
            check_seconds(f"RestartPolicy.{name}", getattr(self, name), zero=name != "window")
            if getattr(self, name) is None:
                raise UsageError(f"RestartPolicy.{name} is None; give a number of seconds.")
        check_seconds("RestartPolicy.recycle_after", self.recycle_after)
        for name, least in (("max_restarts", 0), ("poison_after", 1), ("journal_limit", 0), ("max_snapshots", 0)):
            self._check_integer(name, least)
        for name in ("snapshot_every", "recycle_after_steps", "recycle_after_episodes", "max_rss"):
            if getattr(self, name) is not None:
                self._check_integer(name, 1)

    @property
    def replays(self) -> bool:
        """Tell whether a crash, a timeout or both are answered by a replay."""
        return "replay" in (self.on_crash, self.on_timeout)

    def _check_integer(self, name: str, least: int) -> None:
        value = integer(getattr(self, name))
        if value is None or value < least:
            raise UsageError(f"RestartPolicy.{name} is {getattr(self, name)!r}; give an integer of at least {least}.")
