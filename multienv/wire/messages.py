"""Frames: a fixed header, then a payload.

A request is ``REQUEST`` + payload. Steps are binary (see ``actions``), and so are resets without options;
everything else is one of the frozen dataclasses below, pickled. A reply is ``REPLY`` + observation + info::

    REQUEST  length seq kind tag                                   12 bytes
    REPLY    length seq info_length | kind flags reward_tag reward  24 bytes
                                    └─ evidence: from here to the info

The part of a reply from ``EVIDENCE`` up to the info is what a replay must reproduce to the bit. It leaves
out the numbering, and the info, which may hold wall-clock values.
"""

from __future__ import annotations

import contextlib
import pickle
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

REQUEST = struct.Struct("<IIBBxx")
STEP_INTEGER = struct.Struct("<IIBBxxq")
INTEGER = struct.Struct("<q")  # behind REQUEST, in the same frame
PLAIN_RESET = STEP_INTEGER  # the integer is the seed
REPLY = struct.Struct("<IIIBBBxd")
EVIDENCE = 12
KIND_AT = 12
KIND_OF_REQUEST_AT = 8
TAG_AT = 9

# Kinds of request.
MESSAGE = 1
STEP = 2
RESET = 3

# Tag of a message that may have changed the env for longer than an episode.
LASTING = 1
# Tags of a plain reset.
SEEDED = 1
_ANCHOR = 2
_LARGEST_SEED = 2**63 - 1

# A frame of length 0 comes from a trainer that was interrupted: the worker writes the mark that follows it and,
# if the last request it executed has this number, ARRIVED and the same reply again. What it wrote before the mark
# is of no interest any more.
MARK_SIZE = 16
ARRIVED, NOT_ARRIVED = b"\1", b"\0"

# Kinds of reply.
STEPPED = 16  # an observation, a reward, flags; also what a reset answers
VALUE = 17  # a pickled value
FAILED = 18  # a pickled Failure: the env raised
GONE = 19  # not from the worker: whoever watches over it says that it is dead

# Flags of a STEPPED reply.
TERMINATED = 1
TRUNCATED = 2
IRREGULAR = 4  # observation, reward and flags are a pickled tuple: the space's layout does not hold them
TAILED = 16  # the last bytes before the info are always evidence; where the reward is in other replies it says how many
ANCHORED = 8  # the info is a pair (info, state of the random generators before this reset)

# In place of "infos" in what a group tells besides its rows: each is pickled once more.
APART = "apart"

SEQ_MASK = 0xFFFF_FFFF
# Evidence of an irregular reply larger than this is kept without its observation, the last one excepted.
LARGE_EVIDENCE = 4096

GONE_FRAME = REPLY.pack(REPLY.size, 0, 0, GONE, 0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class Initialize:
    """Build the env.

    ``seeds`` are for ``random``, for ``numpy.random``, and for what is made without a seed (see ``Entropy``), so that a
    restarted worker begins as the first one did; ``None`` leaves them alone, in the trainer's own process.
    ``snapshots`` says how often the worker forks itself: every so many steps, 0 as it thinks best, -1 never.
    A ``replacement`` takes its first at once: what was lost may well be lost again.
    With ``group`` it is several envs, and ``env_fn`` is the list of what builds them.
    ``state_hooks`` are those registered in the trainer.
    ``setting`` is where the trainer stands (sys.path, sys.argv, working directory, environment); ``None`` under fork.
    """

    env_fn: bytes | None
    seeds: tuple[int, int, int] | None
    setting: Setting | None
    inline_limit: int
    snapshots: int = -1
    replacement: bool = False
    group: Group | None = None
    state_hooks: bytes = b""


def drawn_seeds(entropy: int | None = None) -> tuple[int, int, int]:
    """Seeds for a process; ``entropy`` is that of a batch, in which each env has a stream of its own."""
    return secrets.randbits(64), secrets.randbits(32), secrets.randbits(64) if entropy is None else entropy


@dataclass(frozen=True, slots=True)
class Group:
    """The envs that share a process, and their place in the batch.

    Attributes:
        first: The row of the first of them.
        size: How many they are.
        num_envs: How many there are in the whole batch.
        autoreset: The name of a gymnasium ``AutoresetMode``.
        space: The observation space whose arrays the batch has; ``None``: that of the first env.
        truncates_errors: An exception of an env ends its episode and is not raised.
        with_observations: The batch has arrays for observations, if their space can be laid out.
    """

    first: int
    size: int
    num_envs: int
    autoreset: str
    space: Any = None
    truncates_errors: bool = False
    with_observations: bool = True


@dataclass(frozen=True, slots=True)
class Setting:
    """What a fresh process needs to see the world as the trainer does."""

    path: tuple[str, ...]
    arguments: tuple[str, ...]
    directory: str
    environment: dict[str, str]
    registrations: bytes  # envs the trainer knows, needed only if the process does not
    overrides: bytes  # gymnasium's own, as they are in the trainer
    authkey: bytes  # for managers of multiprocessing, whose proxies an env_fn may hold; a secret


@dataclass(frozen=True, slots=True)
class Description:
    """What the trainer learns about the env once it is built.

    Of a group the spaces are those of all together: a ``Tuple`` of observation spaces, a batched action space.
    ``members`` are the observation and action spaces of each.
    """

    observation_space: Any
    action_space: Any
    metadata: dict[str, Any]
    spec: Any
    render_mode: str | None
    pid: int
    members: tuple[tuple[Any, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Reset:
    """Begin an episode; with ``anchor`` also tell the random generators' state before it.

    ``generators`` is such a state, put back first: how a replay begins at an episode. For a group ``seed`` is a tuple
    and ``options`` a :class:`GroupOptions`.
    """

    seed: Any
    options: Any
    anchor: bool
    generators: bytes | None = None


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How the envs of a group are reset.

    Attributes:
        mask: Which of them; ``None``: all.
        options: The envs' own.
        left_out: Those whose reset has killed the process too often; they are not reset.
        anew: Which of those are built anew, and what is done to each then: the requests that have changed all envs for
            longer than an episode.
        careful: The process was lost by what some env has returned: find out whose it is.
    """

    mask: tuple[bool, ...] | None
    options: Any
    left_out: tuple[int, ...] = ()
    careful: bool = False
    anew: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Instead of the step of one env of a group.

    Attributes:
        observation: What the caller saw last.
        reason: Why its episode ends here, or ``""``: it had ended, and its reset is not to be tried again.
        report: The crash report of that, or ``""``.
        lasting: If it is built anew, what is done to it then: see :class:`GroupOptions`.
    """

    observation: Any
    reason: str
    report: str = ""
    lasting: tuple[bytes, ...] | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method of the env, or read an attribute that is not callable."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GetAttribute:
    """Read an attribute."""

    name: str


@dataclass(frozen=True, slots=True)
class Method:
    """Answers :class:`GetAttribute` in the place of a method, which would travel with a copy of its env."""


@dataclass(frozen=True, slots=True)
class HasAttribute:
    """Tell whether there is such an attribute."""

    name: str


@dataclass(frozen=True, slots=True)
class SetAttribute:
    """Write an attribute."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Render:
    """Draw the env."""


@dataclass(frozen=True, slots=True)
class Sparing:
    """Ask this of the envs of a group, but not of those in ``slots``: they have killed the process with it."""

    message: Message
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TellApart:
    """Answer the last request, a step or a reset of a group, once more, each env's info pickled by itself."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Take a snapshot to come back to, under this token. The answer is what is in the way, or nothing."""

    token: int


@dataclass(frozen=True, slots=True)
class CaptureState:
    """Tell the env's state, to go on from in a new process, and how long that took the processor.

    ``step`` is the request before, if it was a step.
    """

    step: bytes


@dataclass(frozen=True, slots=True)
class RestoreState:
    """Put such a state into a newly built env: how a replay begins in the middle of an episode."""

    state: bytes


@dataclass(frozen=True, slots=True)
class Replay:
    """Run these request frames again, in one go, and return their evidence."""

    frames: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Close:
    """Close the env and end the process."""


Message = (
    Initialize
    | Reset
    | Call
    | GetAttribute
    | HasAttribute
    | SetAttribute
    | Render
    | Sparing
    | TellApart
    | Branch
    | CaptureState
    | RestoreState
    | Replay
    | Close
)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception in the worker, in a form that always travels."""

    type_name: str
    text: str
    traceback: str
    exception: bytes | None  # its type, arguments and attributes, pickled, if they can be
    result_not_picklable: bool = False
    slot: int = -1  # of a group's env that could not be built
    returned: bytes | None = None  # what step() had returned before the reset in the same step raised, pickled


class Unpicklable(Exception):  # noqa: N818 - internal
    """Pickling, which runs foreign code, raised; the cause says what."""


def pack_message(seq: int, message: Message) -> bytes:
    """A request frame for anything but a step. Raises :class:`Unpicklable`."""
    if type(message) is Reset and message.options is None and message.generators is None:
        seed = message.seed
        if seed is None:
            return PLAIN_RESET.pack(PLAIN_RESET.size, seq, RESET, message.anchor and _ANCHOR, 0)
        if seed <= _LARGEST_SEED:
            return PLAIN_RESET.pack(PLAIN_RESET.size, seq, RESET, SEEDED | (message.anchor and _ANCHOR), seed)
    unpicklable = True
    try:
        payload: bytes = cloudpickle.dumps(message)
    except Exception as error:
        with contextlib.suppress(Exception):
            cloudpickle.dumps(message)
            unpicklable = False  # the message is not to blame: a signal handler raised
        if unpicklable:
            raise Unpicklable from error
        raise
    asked = message.message if isinstance(message, Sparing) else message
    tag = LASTING if isinstance(asked, SetAttribute | Call) else 0
    return REQUEST.pack(REQUEST.size + len(payload), seq, MESSAGE, tag) + payload


def mark_frame(mark: bytes, seq: int) -> bytes:
    """A request to write this mark between the replies, and to repeat the reply to ``seq``."""
    return REQUEST.pack(0, seq, 0, 0) + mark


def seq_of(frame: bytes) -> int:
    """The number in a frame, request or reply."""
    return int.from_bytes(frame[4:8], "little")


def split_frames(joined: bytes | bytearray) -> list[bytes]:
    """The frames that lie end to end, up to what is cut short, or is no frame."""
    frames, start, end = [], 0, len(joined)
    while start + 4 <= end:
        stop = start + int.from_bytes(joined[start : start + 4], "little")
        if not start < stop <= end:  # a length of 0 would be read for ever
            break
        frames.append(bytes(joined[start:stop]))
        start = stop
    return frames


def unpack_message(frame: bytes) -> Message:
    """The message in a request frame."""
    if frame[KIND_OF_REQUEST_AT] == RESET:
        _, _, _, tag, seed = PLAIN_RESET.unpack_from(frame)
        return Reset(seed if tag & SEEDED else None, None, bool(tag & _ANCHOR))
    message: Message = pickle.loads(memoryview(frame)[REQUEST.size :])
    return message


def pack_value(seq: int, value: Any, kind: int = VALUE) -> bytes:
    """A reply frame that carries a pickled value. Raises what pickling raises."""
    payload = dumps(value)
    return REPLY.pack(REPLY.size + len(payload), seq, len(payload), kind, 0, 0, 0.0) + payload


def unpack_value(reply: bytes) -> Any:
    """The value in a VALUE or FAILED reply."""
    return pickle.loads(memoryview(reply)[REPLY.size :])


def is_cut(evidence: bytes) -> bool:
    """Whether the observations have been left out of this evidence of an irregular reply: they are too large."""
    _, _, info_length, _, flags, _, reward = REPLY.unpack_from(evidence)
    return bool(len(evidence) - info_length == REPLY.size + (int(reward) if flags & TAILED else 0))


def dumps(value: Any) -> bytes:
    """Pickle, by value where by reference is not possible (lambdas, classes of ``__main__``)."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:  # pickling runs foreign code
        data: bytes = cloudpickle.dumps(value)
        return data


def evidence_of(reply: bytes) -> bytes:
    """The reply without what a replay need not reproduce; a frame of its own length.

    The numbering stays in front, to be skipped when comparing: a plain step's reply is its own evidence.
    """
    length, seq, info_length, kind, flags, tag, reward = REPLY.unpack_from(reply)
    if kind != STEPPED or (flags & IRREGULAR and length - info_length > LARGE_EVIDENCE):
        if flags & TAILED:
            stop = length - info_length
            tail = reply[stop - int(reward) : stop]
            return REPLY.pack(REPLY.size + len(tail), seq, 0, kind, flags, tag, reward) + tail
        return REPLY.pack(REPLY.size, seq, 0, kind, flags, tag, reward)
    if not info_length:
        return reply
    length -= info_length
    return REPLY.pack(length, seq, 0, kind, flags, tag, reward) + reply[REPLY.size : length]
