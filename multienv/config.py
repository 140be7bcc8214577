"""Options, as frozen values."""

from __future__ import annotations

import difflib
import inspect
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from multienv.errors import UsageError

OnLoss = Literal["replay", "truncate", "raise"]
# Longer than any use; a clock in float64 still counts seconds exactly up to there.
_LONGEST = 10**15
# Less than Python with numpy needs, and more than anybody's limit in MiB or KiB.
_LEAST_RSS = 16 * 2**20
_Function = TypeVar("_Function", bound=Callable[..., Any])


def takes_options_of(*takers: Callable[..., Any], but: Iterable[str] = ()) -> Callable[[_Function], _Function]:
    """Decorate a function that hands its ``**options`` on, so that ``help()`` shows them by name, with their defaults.

    A name that is unknown raises TypeError before the function is called.

    Args:
        *takers: Where the options end up: their keyword-only parameters are shown.
        but: Names of options that follow from others.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        shown = {name: one for name, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD}
        by_position = [name for name, one in shown.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
        for taker in takers:
            for name, one in inspect.signature(taker).parameters.items():
                if one.kind is one.KEYWORD_ONLY and name not in but:
                    shown.setdefault(name, one)

        @wraps(function)
        def checked(*arguments: Any, **named: Any) -> Any:
            for name in named:
                if name not in shown:
                    unknown = f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
                    raise TypeError(f"{unknown}.{did_you_mean(name, shown)}")
            if len(arguments) > len(by_position):
                raise TypeError(
                    f"{function.__qualname__}() takes only {by_position[-1]} by position: give options by name. "
                    "[env_fn] * 4 is four envs of one function; make_vec('CartPole-v1', 4) makes a vector env of an id."
                )
            return function(*arguments, **named)

        cast("Any", checked).__signature__ = signature.replace(parameters=list(shown.values()))
        return cast("_Function", checked)

    return decorate


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the question `` Did you mean …?`` with the known name nearest to an unknown one; ``""``: none is near."""
    near = difflib.get_close_matches(name, known, 1, 0.7)
    return f" Did you mean {near[0]}=…?" if near else ""


def chosen_options(options: Any) -> str:
    """Return the call that makes the same; in a signature ``RestartPolicy()`` says more than all its values."""
    values = [(field, getattr(options, field.name)) for field in fields(options)]
    chosen = ", ".join(f"{field.name}={value!r}" for field, value in values if value != field.default)
    return f"{type(options).__name__}({chosen})"


def check_seconds(name: str, value: Any, *, zero: bool = False, words: str = "", needed: bool = False) -> None:
    """Raise UsageError unless this is ``None`` or a finite, positive number.

    Args:
        name: Of the value, for messages.
        value: The value.
        zero: 0 is allowed too.
        words: What else would have been allowed, for messages.
        needed: ``None`` is not allowed.
    """
    if value is None and not needed:
        return
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # Compared before any conversion: an integer may be too large for a float, a float for a poll().
    if not is_number or not 0 <= value <= _LONGEST or (value == 0 and not zero):
        words += "" if needed else ", or None for no limit"
        raise UsageError(f"{name} is {value!r:.100}; give a number of seconds{words}: positive, at most {_LONGEST:,}.")


def integer(value: Any) -> int | None:
    """Return an integer, numpy's too, as an int; ``None`` for anything else, a bool included."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None


def checked_count(name: str, value: Any, *, least: int = 1, words: str = "", needed: bool = True) -> Any:
    """Return a value as an ``int``; raise UsageError unless it is an integer of at least ``least``.

    Args:
        name: Of the value, for messages.
        value: The value.
        least: The least integer that is allowed.
        words: What else would have been allowed, for messages.
        needed: ``None`` is not allowed; else it is returned.
    """
    number = integer(value)
    if (value is not None or needed) and (number is None or number < least):
        words += "" if needed else ", or None"
        raise UsageError(f"{name} is {value!r:.100}; give an integer of at least {least}{words}.")
    return number


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
class Deadlines:
    """Says how long an env may take for one request, in seconds; ``None`` means no limit.

    A process that has not answered by its deadline counts as hung: multienv records its Python stack and kills it.
    ``RestartPolicy.on_timeout`` says what happens next.

    Args:
        start: From the launch of the process to the built env.
        reset: One ``reset``. ``"auto"`` works as for ``step``, and starts after three resets.
        step: One ``step``; in a ``rollout``, each step. ``"auto"`` starts after twenty steps: the deadline is then ten
            times the slowest step of this worker so far, and at least one minute. It is five times as long if the
            worker has no snapshot to recover from, and in the next process after a first hang. So an env that is only
            slow gets its time, and a worker that hung by chance is recovered. While you look at an env in a debugger,
            give ``None``.
        call: One ``call``, ``get_attr``, ``set_attr`` or ``render``.
        close: Closing the envs of a process: by ``close()``, at the end of the trainer, or when nothing refers to them.
            Then the process is killed, and a warning says so. Each worker of the trainer adds 10 ms: of many that
            end at the same time, the last waits for the others. Cannot be ``None``.
        recovery: The recovery of the envs of one lost worker, all attempts together; then the step is truncated. Each
            attempt except the last may use half of the remaining time. An ``env_fn`` that raises in place of a lost env
            is called again for as long; with ``None`` for 120 s.
    """

    start: float | None = 120.0
    reset: float | Literal["auto"] | None = "auto"
    step: float | Literal["auto"] | None = "auto"
    call: float | None = None
    close: float = 5.0
    recovery: float | None = 120.0

    __repr__ = chosen_options

    def __post_init__(self) -> None:
        """Raise UsageError unless all values are numbers of seconds."""
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            if name not in ("reset", "step"):
                check_seconds(f"Deadlines.{name}", value, needed=name == "close")
            elif not isinstance(value, str) or value != "auto":
                check_seconds(f"Deadlines.{name}", value, words=", 'auto'")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RestartPolicy:
    """Says what happens when a worker is lost, and how often.

    ``"replay"`` recovers the same episode and verifies it; if no recovery that ``accept`` allows succeeds, the episode
    is truncated. ``"truncate"`` ends the episode at the failed step. ``"raise"`` raises a
    :class:`~multienv.errors.WorkerLostError`.

    Args:
        on_crash: What to do if the process died, or sent a reply that cannot be decoded: one of these three.
        on_timeout: What to do if a deadline passed: one of these three.
        on_error: What to do if the env raised an exception in ``step()``; its process is alive. ``"raise"``, or
            ``"truncate"`` to end the env's episode at this step and log the traceback. The step is not tried again,
            even if it raised by chance.
        accept: Which recoveries are taken, if the action is ``"replay"``. ``"exact"``: only those that go on from a
            forked copy of the lost process, or repeat all that happened since the env was built; an episode that can
            only be repeated from a reset, or by edited code, is truncated. ``"replayed"``: those too, if at least one
            whole episode compares equal. The same holds for ``restore()``, ``load_state_dict()`` and replacements by
            plan: ``"exact"`` takes new envs between two episodes only if ``recycle_after_episodes`` is given too.
        max_restarts: Restarts of a worker allowed within an hour; one more raises
            :class:`~multienv.errors.RestartBudgetExceeded`.
        backoff: Seconds to wait before the second restart in a row without progress. The wait doubles with each further
            restart, up to 10 s, with jitter. The first restart is immediate. A build that raises is tried again after
            such pauses.
        journal_limit: Bytes of memory for the journal of each env. A replay needs the journal: it begins with the
            construction of the env while that is affordable, or nothing else is possible (in the first episode), later
            with one of the env's own resets, about two episodes back, however long the run is. An episode that exceeds
            this limit or ``replay_limit`` cannot be replayed: without a snapshot, a loss truncates it. The other envs
            of the worker are recovered. With 0 and a policy that never replays, crash reports have no journal either.
        replay_limit: Seconds of env time that a replay may take for each env, including resets, calls and renderings.
        snapshots: Workers fork themselves now and then (Linux only), and a lost worker is recovered from its frozen
            copy, exactly, for any kind of env. They take at most 1 % of the env's time; once workers are lost, as much
            as pays (``statistics().snapshot_seconds``). An env that has something outside its memory (threads, sockets,
            a database, a GPU) has no snapshots; ``statistics().no_snapshots`` says why.
        recycle_after_steps: Replace a process after this many steps, for simulators that leak. Between two episodes,
            the old process ends, and a new one begins the next episode; nothing is replayed. The random generators go
            on, so the trajectory changes only if the env remembers earlier episodes. During an episode (and always with
            SAME_STEP and several envs in a process) the process is replaced by a replay, as after a loss. If the envs
            cannot be replayed, or cannot be built beside the old ones (a port, a licence, a lock that is waited for as
            long as ``replay_limit``), a warning says so, and it is tried again after some more episodes, then, for all
            workers that were made in the same call, with the old process ended first. This limit and the next two
            are checked every 64 steps, and when an episode begins or ends.
        recycle_after_episodes: Replace a process after this many episodes; needs one env per process. With 1, each
            episode has a new process.
        max_rss: Replace a process when its resident memory exceeds this many bytes, at least 16 MiB. Give more than
            the envs of the process need when they are new.
    """

    on_crash: OnLoss = "replay"
    on_timeout: OnLoss = "replay"
    on_error: Literal["raise", "truncate"] = "raise"
    accept: Literal["replayed", "exact"] = "replayed"
    max_restarts: int = 10_000
    backoff: float = 0.1
    journal_limit: int = 16 * 2**20
    replay_limit: float = 10.0
    snapshots: bool = True
    recycle_after_steps: int | None = None
    recycle_after_episodes: int | None = None
    max_rss: int | None = None

    __repr__ = chosen_options

    def __post_init__(self) -> None:
        """Raise UsageError for an unknown action or a number out of range."""
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                choices = ", ".join(map(repr, allowed))
                raise UsageError(f"RestartPolicy.{name} is {getattr(self, name)!r}; choose one of {choices}.")
        for name in ("backoff", "replay_limit"):
            check_seconds(f"RestartPolicy.{name}", getattr(self, name), zero=True, needed=True)
        for name in ("max_restarts", "journal_limit"):
            checked_count(f"RestartPolicy.{name}", getattr(self, name), least=0)
        for name in ("recycle_after_steps", "recycle_after_episodes", "max_rss"):
            checked_count(f"RestartPolicy.{name}", getattr(self, name), needed=False)
        if self.max_rss is not None and self.max_rss < _LEAST_RSS:
            raise UsageError(
                f"RestartPolicy.max_rss is {self.max_rss!r}, and counts bytes: no worker is as small as that. Give "
                "max_rss=2 * 2**30 for 2 GiB."
            )

    @property
    def replays(self) -> bool:
        """Return whether a crash, a timeout or both lead to a replay."""
        return "replay" in (self.on_crash, self.on_timeout)

    @property
    def recycles(self) -> bool:
        """Return whether processes are replaced by plan."""
        limits = (self.recycle_after_steps, self.recycle_after_episodes, self.max_rss)
        return any(limit is not None for limit in limits)


# The words that an option of a policy may be, as its type says.
_CHOICES = {name: get_args(kind) for name, kind in get_type_hints(RestartPolicy).items() if get_origin(kind) is Literal}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RayOptions:
    """Says how envs run on a Ray cluster. A *host* is an actor on a node, with its own monitor and workers.

    Args:
        address: As in ``ray.init``: ``"auto"``, ``"ray-head:6379"``. ``None``: the Ray that this process is connected
            to; else the Ray that ``RAY_ADDRESS`` names; else a local Ray, which is shut down again when the last env is
            closed.
        hosts: Number of hosts. ``None``: one on each node with a free CPU, but not more than workers.
        cpus_per_host: CPUs that a host reserves. ``None``: one for each of its workers, as far as its node has them
            free. The replacement of a lost host needs a node with as many free CPUs.
        placement: Order of the nodes. ``"spread"``: nodes with the most free CPUs first, in turn. ``"pack"``: as few
            nodes as possible. Or a list of node ids, taken in turn.
        runtime_env: As in ``ray.init``: packages and files for the hosts. They need multienv, gymnasium and everything
            that the envs import.
        suspect_after: Seconds after which a host counts as lost that gives signs of life, but no answer. One that gives
            none counts as lost after 1.5 s, or ``suspect_after`` if that is less. Its envs are recovered on another
            node.
        placement_timeout: Seconds that a host may wait for a node with enough free CPUs.
    """

    address: str | None = None
    hosts: int | None = None
    cpus_per_host: int | None = None
    placement: str | Sequence[str] = "spread"
    runtime_env: Mapping[str, Any] | None = field(default=None, hash=False)
    suspect_after: float = 10.0
    placement_timeout: float = 60.0

    __repr__ = chosen_options

    def __post_init__(self) -> None:
        """Raise UsageError for a value that makes no sense."""
        for name in ("suspect_after", "placement_timeout"):
            check_seconds(f"RayOptions.{name}", getattr(self, name), needed=True)
        for name in ("hosts", "cpus_per_host"):
            checked_count(f"RayOptions.{name}", getattr(self, name), needed=False)
        if isinstance(self.placement, str) and self.placement not in ("spread", "pack"):
            raise UsageError(f"RayOptions.placement is {self.placement!r:.100}; choose 'spread', 'pack' or node ids.")
