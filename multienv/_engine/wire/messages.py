"""The requests to a worker that are not steps, and their answers: frozen values, sent pickled as a payload."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from multienv._engine.wire.banks import RESET
from multienv._engine.wire.reducers import pickled
from multienv.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MainScript:
    """Describes the trainer's main script, which a worker may have to import: see ``worker.main_module``.

    Attributes:
        path: Of its file; ``""``: it is none.
        module: Its name, if it was started by ``python -m``; else ``""``.
        names: The names that it has defined, but for special ones.
    """

    path: str = ""
    module: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """Describes the surroundings of the trainer, which a new process takes over.

    Attributes:
        path: ``sys.path``.
        arguments: ``sys.argv``.
        directory: The working directory.
        environment: ``os.environ``; ``None``: path, directory and environment are those of the process itself, on
            another machine.
        registrations: Pickled specs of the envs the trainer has registered; needed only if an id is unknown.
        authkey: multiprocessing's, for proxies that an ``env_fn`` may hold.
        variables: Of this worker alone, put over the environment: ``worker_env``.
        main: The main script.
        limits: Resource → soft limit, as ``setrlimit`` takes them; of all others the process keeps its own.
        values: What the trainer has set in modules, pickled: see ``worker.module_values``.
    """

    path: tuple[str, ...]
    arguments: tuple[str, ...]
    directory: str
    environment: dict[str, str] | None
    registrations: bytes
    authkey: bytes
    variables: Mapping[str, str] = field(default_factory=dict)
    main: MainScript = MainScript()
    limits: Mapping[int, int] = field(default_factory=dict)
    values: bytes = b""


@dataclass(frozen=True, slots=True)
class Build:
    """Build the envs.

    Attributes:
        env_fns: What builds the env of each slot, a tuple pickled by cloudpickle: bytes, or a ``SharedPickle``.
        verbatim: One env whose values travel exactly as it returns them; else rows of a batch.
        autoreset: Name of a gymnasium ``AutoresetMode`` that the worker carries out; ``""``: the caller resets.
        seeds: For ``random`` and ``numpy.random`` of the process; ``None``: the trainer's own process is left alone.
        draws: For each slot the seed of the generator that its env is given if it has none.
        setting: The surroundings of the trainer; ``None`` in the trainer's own process.
        space: Observation space whose rows the batch has; ``None``: that of the first env.
        truncates_errors: An exception of an env in ``step`` ends its episode instead of being raised.
        snapshots: Forked snapshots: every so many steps; 0: at the best interval; -1: never.
        journal: Bytes that the trainer keeps of requests since the newest snapshot; 0: that is not known.
        replacement: The worker replaces another one: its first snapshot is taken at once.
        replay_point_share: Part of the envs' time that saving the states of generators before resets may take; 0: none
            are saved.
        tells_imports: The answer tells what was imported to build the envs.
        generators: Slot → state of its random generators, put back before its first reset: the env of an earlier
            process has ended between two episodes, and this one takes its place.
        code: From which files the code of the present envs came, as ``worker.imports`` notes it; does not travel.
    """

    env_fns: Any
    verbatim: bool
    autoreset: str
    seeds: tuple[int, int] | None
    draws: tuple[int, ...]
    setting: Setting | None
    space: Any = None
    truncates_errors: bool = False
    snapshots: int = -1
    journal: int = 0
    replacement: bool = False
    replay_point_share: float = 0.0
    tells_imports: bool = False
    generators: Mapping[int, bytes] = field(default_factory=dict)
    code: bytes = b""

    def with_new_seeds(self) -> Build:
        """Return the request that builds other envs, which draw other numbers."""
        seeds = None if self.seeds is None else seeds_from(*self.seeds)
        return replace(self, seeds=seeds, draws=tuple(draw + 1 for draw in self.draws), generators={})


def seeds_from(*numbers: int) -> tuple[int, int]:
    """Return seeds for ``random`` and ``numpy.random`` of a process; equal numbers give equal seeds."""
    of_random, of_numpy = np.random.SeedSequence(numbers).generate_state(2, np.uint64).tolist()
    return of_random, of_numpy & 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class Imports:
    """Tells what was imported to build the envs.

    Attributes:
        names: Modules of installed packages; a module comes after those that it has imported.
        variables: Environment variables that were set meanwhile.
    """

    names: tuple[str, ...]
    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Description:
    """Describes the envs, once they are built.

    Attributes:
        spaces: Observation and action space of each slot.
        metadata, spec, render_mode: Of the first env.
        seconds: What the construction took, with its imports.
        imports: If ``Build.tells_imports``.
        code: From which files the code came, as ``worker.imports`` notes it; ``b""``: that is not known.
    """

    spaces: tuple[tuple[Any, Any], ...]
    metadata: dict[str, Any]
    spec: Any
    render_mode: str | None
    seconds: float = 0.0
    imports: Imports | None = None
    code: bytes = b""


@dataclass(frozen=True, slots=True)
class Reset:
    """Begin an episode in the slots that the mask names.

    Attributes:
        seeds: One for each slot, or ``None``.
        options: One for each slot, or ``None``.
        mask: Which slots; ``None``: all.
    """

    seeds: tuple[int | None, ...]
    options: tuple[Any, ...]
    mask: tuple[bool, ...] | None = None

    def touches(self, slot: int) -> bool:
        """Tell whether this resets the slot."""
        return self.mask is None or self.mask[slot]

    @property
    def seed_by_slot(self) -> dict[int, int | None]:
        """Return the seeds of the slots that this resets."""
        return {slot: seed for slot, seed in enumerate(self.seeds) if self.touches(slot)}


# The reset of a single env that carries nothing: it travels as a kind of request of its own, without payload.
PLAIN_RESET = Reset((None,), (None,))


def reset_of_one(seed: int | None, options: Any) -> Reset:
    """Return the reset of a worker with one env."""
    return PLAIN_RESET if seed is None and options is None else Reset((seed,), (options,))


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method of each env, or read an attribute that is not callable.

    Attributes:
        args, kwargs: What every env's method is called with.
        slots: Which slots; ``None``: all.
        recorded: The call may change the env: it is journalled and replayed.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    slots: tuple[int, ...] | None = None
    recorded: bool = True


@dataclass(frozen=True, slots=True)
class GetAttribute:
    """Read an attribute of each env.

    Attributes:
        slots: Which slots; ``None``: all.
        callables: Answer :class:`Method` in the place of whatever can be called, not of methods alone.
    """

    name: str
    slots: tuple[int, ...] | None = None
    callables: bool = False


@dataclass(frozen=True, slots=True)
class Method:
    """Answers :class:`GetAttribute` in the place of a method, which would travel with a copy of its env."""


@dataclass(frozen=True, slots=True)
class IsWrapped:
    """Tell of each env whether one of its wrappers is of this class, or of one derived from it.

    Attributes:
        kind: Module and name of the class. The class itself is not sent: unpickling it imports its module.
    """

    kind: tuple[str, str]
    slots: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class SetAttribute:
    """Write an attribute; ``values`` has one for each slot asked."""

    name: str
    values: tuple[Any, ...]
    slots: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class KeepSnapshot:
    """Take a snapshot to come back to. The answer is the obstacle, or ``""``.

    Attributes:
        token: What it is kept under.
        number: Of the caller's last request: with it the snapshot tells that it is awake.
    """

    token: int
    number: int


@dataclass(frozen=True, slots=True)
class GetGenerators:
    """Read the states of the random generators of some slots; answered by a dict: slot → state."""

    slots: tuple[int, ...]


class ReplayStart(NamedTuple):
    """Says where a replay begins for one slot, or puts back its generators.

    Attributes:
        slot: Which.
        entry: Index of the entry in which the slot is reset; behind the last one: it takes no part at all.
        generators: State of its random generators before that; ``b""``: it is not known.
        waits: It takes no part in the replay until then. Else the replay begins with the construction of its env.
    """

    slot: int
    entry: int
    generators: bytes
    waits: bool = True


@dataclass(frozen=True, slots=True)
class Replay:
    """Run these journal entries again, in one go; the answer is the entries that came of it.

    Attributes:
        entries: Journal entries end to end.
        starts: Resets at which slots begin, or their generators are put back; those that are not named take part from
            the first entry on.
        calls: Calls, and attributes to set, before ``entries`` begin, each pickled; their outcome is not compared.
        repeated: The process has run so many of them; it is a copy that was forked in another process's replay.
        every: Fork a copy between so many of the others; 0: never.
    """

    entries: bytes
    starts: tuple[ReplayStart, ...] = ()
    calls: tuple[bytes, ...] = ()
    repeated: int = 0
    every: int = 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """Take many steps, each with what a policy returns for the observations before it; answered by a ``RolloutResult``.

    Attributes:
        policy: Pickled by cloudpickle.
        steps: How many.
        shown: What the caller saw last, which the first actions are chosen for: see ``recovery.position``.
    """

    policy: bytes
    steps: int
    shown: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RolloutResult:
    """Answers a :class:`Rollout`. Each step, and each reset of a single env, is a request with a number of its own.

    Attributes:
        banks: Those of these requests with their replies, end to end.
        payloads: Place of a request → its payload and that of its reply, where it has any.
        chosen: What the policy returned, pickled: stacks of the actions, and of what else it returned, by names.
        failure: What the policy raised, which ended it early; or what is wrong with what it returned.
    """

    banks: bytearray
    payloads: dict[int, tuple[bytes, bytes]]
    chosen: bytes = b""
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Close:
    """Close the envs and end the process."""


# What each env of some slots is asked.
Question = Call | GetAttribute | SetAttribute | IsWrapped
Message = Build | Reset | Question | KeepSnapshot | GetGenerators | Replay | Rollout | Close
# What may change an env for longer than an episode: the journal keeps these, and they are repeated in new envs.
CALLS = (SetAttribute, Call)


def is_recorded(message: Message | None) -> bool:
    """Tell whether a request that is neither step nor reset may change an env: it is journalled and replayed."""
    return isinstance(message, SetAttribute) or (isinstance(message, Call) and message.recorded)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception in the worker, in a form that always travels.

    Attributes:
        exception: Its type, arguments and attributes, pickled, if they can be.
        result_not_picklable: The env did not raise; what it returned cannot travel.
        slot: Whose env raised, if nothing else in the reply says so; else -1.
        returned: What ``step()`` had returned before the reset in the same step raised, pickled.
    """

    type_name: str
    text: str
    traceback: str
    exception: bytes | None
    result_not_picklable: bool = False
    slot: int = -1
    returned: bytes | None = None


def pack_message(message: Message, name: str = "") -> bytes:
    """Return the payload of a message. Raises UsageError if it cannot be pickled; ``name``: of the caller's call."""
    if message is PLAIN_RESET:
        return b""
    return call_user_code(
        lambda: dumps(message),
        lambda error: UsageError(
            f"{name}(): its arguments cannot be sent to the env: {type(error).__name__}: {error}. Nothing was sent."
        ),
    )


# What the pickle of a Reset begins with, behind the eleven bytes that tell its length.
_LENGTH, _RESET = 11, pickle.dumps(Reset, protocol=5)[11:-1]


def is_reset(kind: int, payload: bytes) -> bool:
    """Tell whether a request is a reset; nothing is unpickled, which would run code of the user."""
    return kind == RESET or payload.startswith(_RESET, _LENGTH)


def message_of(kind: int, payload: bytes) -> Message:
    """Return the message of a request that is not a step; unpickling runs code of the user."""
    if kind == RESET:
        return PLAIN_RESET
    return pickle.loads(payload)  # type: ignore[no-any-return]


def call_user_code(run: Callable[[], T], wrap: Callable[[Exception], Exception]) -> T:
    """Call a function that runs code of the user, like unpickling; raise its exceptions as ``wrap(exception)``."""
    try:
        return run()
    except Exception as error:
        raise wrap(error) from error


def dumps(value: Any) -> bytes:
    """Pickle for another process: by value what ``__main__`` defines here, lambdas, and what else has no name there."""
    try:
        data = pickle.dumps(value, protocol=5)
    except Exception:  # pickling runs code of the user
        return pickled(value)
    # Also "__mp_main__": the main script in a multiprocessing child.
    return pickled(value) if b"_main__" in data and not _workers_import_main else data


_workers_import_main = False


def workers_import_main() -> None:
    """Pickle by name what the main script defines, from now on: the workers of this process import the script."""
    global _workers_import_main
    _workers_import_main = True
