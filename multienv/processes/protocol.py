"""What the trainer and its warden say to each other."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass

# operation, method, number of the ward, pid (WATCH), shortest deadline in seconds (0 for none)
ORDER = struct.Struct("<BBxxxxxxQqd")
LAUNCH = 1  # descriptors: requests (read), replies (write), memory, fate; and the arena, if there is one
WATCH = 2  # descriptors: replies (write), memory, fate, stderr (read), stack (read)
KILL = 3
WAKE = 4  # what a dead worker has left behind; descriptors as for LAUNCH, its number in the place of the pid
WAKE_TOKEN = 5  # the same for a snapshot that is kept under a token
FREE = 6  # let such a snapshot go; the token in the place of the pid

FORKSERVER = 1
SPAWN = 2
FORK = 3

STDERR_TAIL = 4096
STACK_LIMIT = 16_384


@dataclass(frozen=True, slots=True)
class Fate:
    """How a worker ended.

    Attributes:
        code: Exit code; negative is a signal's number; ``None`` if not known.
        overdue: It was killed because a deadline passed.
        stack: What faulthandler wrote: stacks at a crash or, for one that hung, before it was killed.
        stderr: The last lines on stderr.
        standby: Of the snapshot it has left behind: the process, and the number of the last request it has executed.
    """

    code: int | None
    overdue: bool = False
    stack: str = ""
    stderr: str = ""
    standby: tuple[int, int] | None = None

    def encode(self) -> bytes:
        """As one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Fate:
        """From what :meth:`encode` made."""
        fields = json.loads(line)
        standby = fields.pop("standby")
        return cls(**fields, standby=None if standby is None else tuple(standby))


UNKNOWN_FATE = Fate(code=None)
