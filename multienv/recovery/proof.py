"""How much must have been seen since a reset for a replay to begin there.

An env that remembers more than its random generators shows that over a whole episode, or a long part of one. It may
well take it some time: a walker has to touch the ground.
"""

from __future__ import annotations

from multienv.wire.messages import (
    KIND_OF_REQUEST_AT,
    LASTING,
    MESSAGE,
    RESET,
    STEP,
    TAG_AT,
    GroupOptions,
    Message,
    Reset,
    unpack_message,
)

# Steps that are as good as an episode.
PROOF_OF_RESET = 512


def has_proof(requests: list[bytes]) -> bool:
    """Whether what came since a reset tells if a replay from there is the same env."""
    if sum(frame[KIND_OF_REQUEST_AT] == STEP for frame in requests) >= PROOF_OF_RESET:
        return True
    return any(_ends_episodes(unpack_message(frame)) for frame in requests if _may_be_reset(frame))


def _ends_episodes(message: Message) -> bool:
    """Whether it is a reset: of a group, one of all its envs."""
    if not isinstance(message, Reset):
        return False
    return not isinstance(message.options, GroupOptions) or message.options.mask is None


def _may_be_reset(frame: bytes) -> bool:
    kind = frame[KIND_OF_REQUEST_AT]
    return kind == RESET or (kind == MESSAGE and frame[TAG_AT] != LASTING)
