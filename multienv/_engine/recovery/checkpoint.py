"""Come back to an earlier state of the envs: of this trainer (a kept snapshot), or of another (a checkpoint)."""

from __future__ import annotations

import copy
import logging
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from hashlib import blake2b
from itertools import count
from typing import Any

from multienv._engine.recovery.journal import Journal
from multienv._engine.recovery.position import Position
from multienv._engine.recovery.recoverer import Recoverer, Revived, Unrecoverable
from multienv._engine.recovery.reporter import Reporter
from multienv._engine.recovery.state_machine import Episode, Process, State
from multienv._engine.recovery.way_back import sources_of_earlier
from multienv._engine.sometimes import sometimes
from multienv._engine.wire.segment import Segment
from multienv.errors import NotRestoredError, UsageError

logger = logging.getLogger("multienv")

# Snapshots that a worker may keep at a time. Each is a frozen process, so a loop that forgets to free them would take
# all processes of the user.
MOST_SNAPSHOTS = 1024
_tokens = count(1)
# Version of the dict that state_dict() returns.
_VERSION = 14


class Snapshot:
    """Holds a state of a worker's envs that you can return to, any number of times: a frozen process and its journal.

    It is freed by :meth:`free`; by one of the next calls of its env when you have dropped the last reference to it; or
    when the env is closed.

    Attributes:
        token: Number of the frozen process.
        position: Where the worker stood when the snapshot was taken, as :func:`dump_position` returns it.
        kept: The snapshots of the worker.
        of: The envs, in words.
    """

    __slots__ = ("__weakref__", "kept", "of", "position", "token")

    def __init__(self, token: int, position: Mapping[str, Any], kept: KeptSnapshots, of: str) -> None:
        self.token = token
        self.position = position
        self.kept = kept
        self.of = of
        kept.add(self)

    def __repr__(self) -> str:
        """Return what it is a snapshot of, and after how many steps."""
        freed = ", freed" if self.is_free else ""
        return f"<Snapshot of {self.of} after {self.position['steps']} steps{freed}>"

    def free(self) -> None:
        """End the frozen process. A second call does nothing."""
        self.kept.free(self.token)

    @property
    def is_free(self) -> bool:
        """Return whether the snapshot has been freed and can no longer be restored."""
        return self not in self.kept


class _Reference(weakref.ref[Snapshot]):
    """Refers to a snapshot, and has its token when it is gone."""

    __slots__ = ("token",)
    token: int


class KeptSnapshots:
    """Knows the frozen processes of one worker until they are freed.

    When a snapshot is dropped, a function written in C notes it, and one of the next calls ends the process: what a
    signal handler raises in a finalizer that is written in Python is swallowed by the interpreter, Ctrl-C with it, and
    what the finalizer was to free would stay.

    Args:
        free: Ends the process with this token; again does nothing.

    Attributes:
        dropped: Of snapshots to which nothing refers any more, and whose processes still run.
    """

    def __init__(self, free: Callable[[int], None]) -> None:
        self._free = free
        self._kept: dict[int, _Reference] = {}
        self.dropped: deque[_Reference] = deque()

    def new_token(self) -> int:
        """Return the token for one more snapshot. Raises UsageError if there are too many."""
        self.free_dropped()
        kept = len(self._kept)
        if kept >= MOST_SNAPSHOTS:
            raise UsageError(
                f"snapshot(): {kept} are kept, as many as a worker may keep. free() some, or let go of them."
            )
        return next(_tokens)

    def check(self, snapshot: object) -> None:
        """Raise UsageError unless this is a snapshot of the worker that is not freed."""
        if not isinstance(snapshot, Snapshot) or snapshot.kept is not self:
            raise UsageError(f"restore(): {snapshot!r:.100} is no snapshot of this env; snapshot() returns one.")
        if snapshot.is_free:
            raise UsageError("restore(): this snapshot has been freed.")

    def __contains__(self, snapshot: object) -> bool:
        """Tell whether the frozen process of this snapshot is kept."""
        found = self._kept.get(snapshot.token) if isinstance(snapshot, Snapshot) else None
        return found is not None and found() is snapshot

    def add(self, snapshot: Snapshot) -> None:
        """Keep a snapshot."""
        reference = _Reference(snapshot, self.dropped.append)
        reference.token = snapshot.token
        self._kept[snapshot.token] = reference

    def free(self, token: int) -> None:
        """End a frozen process. Again does nothing."""
        if token in self._kept:
            self._free(token)
            self._kept.pop(token, None)

    def free_dropped(self) -> None:
        """End the processes of the snapshots to which nothing refers any more."""
        while self.dropped:
            self.free(self.dropped[0].token)
            self.dropped.popleft()  # after it: an interruption leaves it to the next call

    def free_all(self) -> None:
        """End all frozen processes, also those of snapshots that are gone."""
        for token in list(self._kept):
            self.free(token)


def not_forked(obstacle: str) -> UsageError:
    """Return the error for an env of which no snapshot can be taken."""
    return UsageError(
        f"snapshot(): this env cannot be forked: {obstacle}. Threads, child processes, sockets, pipes, devices, "
        "databases and shared memory do not survive a fork, and an env in the trainer (SerialEnv) is not "
        "forked. Nothing is lost."
    )


# --- checkpoints ------------------------------------------------------------------------------------


def dump_position(position: Position, state: State, segment: Segment) -> dict[str, Any]:
    """Return where a worker stands, as plain data; ``segment``: of the process that showed what was seen last."""
    episode, truncations = state.episode.value, state.pending_truncations
    return {**position.dump(segment), "episode": episode, "pending_truncations": truncations}


def state_at(where: Mapping[str, Any]) -> State:
    """Return the state of a worker that stands there."""
    return State(Process.READY, Episode(where["episode"]), pending_truncations=where["pending_truncations"])


def pack_state(where: Mapping[str, Any], journal: Journal) -> dict[str, Any]:
    """Return where a worker stands as what ``state_dict()`` returns; UsageError if its envs could not be replayed."""
    if not journal.replaying or not any(not plan.missing for plan in journal.plans()):
        raise UsageError(
            "state_dict(): what drove the env is not all known: its RestartPolicy does not replay; or the "
            "episode has outgrown its journal_limit or replay_limit, until the next one has ended."
        )
    position = pickle.dumps(where, protocol=5)
    return {"version": _VERSION, "position": position, "digest": _digest_of(position)}


def unpack_state(state: Any, journal: Journal, slots: int) -> dict[str, Any]:
    """Return what :func:`pack_state` was given; ``journal`` and ``slots``: of the worker that is to go on from there.

    Raises:
        UsageError: It is not what ``state_dict()`` returned, or the worker does not replay.
        NotRestoredError: It is the state of other envs.
    """
    if not isinstance(state, dict) or "version" not in state:
        raise UsageError("load_state_dict(): this is not what the state_dict() of such an env returned.")
    if state["version"] != _VERSION:
        raise UsageError(
            f"load_state_dict(): this is what the state_dict() of another multienv returned, its version is "
            f"{state['version']!r:.20}. This one knows version {_VERSION}."
        )
    if state.get("digest") != _digest_of(state.get("position")):
        raise UsageError("load_state_dict(): this state is damaged: it is not what state_dict() returned.")
    if not journal.replaying:
        raise UsageError("load_state_dict(): the env's RestartPolicy does not replay; give it one that does.")
    where: dict[str, Any] = pickle.loads(state["position"])
    if where["journal"]["stride"] != journal.stride or len(where["seeds"]) != slots:
        raise NotRestoredError(
            "load_state_dict(): this state is that of other envs. Is the env_fn the same? The env is as it was before."
        )
    return where


def bring_back_to(
    recoverer: Recoverer, where: Mapping[str, Any], present: Position, reporter: Reporter, token: int | None = None
) -> Revived:
    """Bring envs back to where a worker stood: from a frozen process, or by a replay of what led there.

    Args:
        recoverer: Of the worker that is to go on from there.
        where: What :func:`dump_position` returned.
        present: Where that worker stands now.
        reporter: Names its envs.
        token: Of the frozen process; ``None``: there is none.

    Raises:
        NotRestoredError: They do not come back.
    """
    there = Position(present.build, copy.copy(present.journal))  # whose contents are replaced
    there.load(where)
    sources, why = sources_of_earlier(there.journal, there.number, token), there.journal.why_no_plan()
    try:
        revived = recoverer.bring_back(there.build, sources, recoverer.new_progress(planned=True), why_no_source=why)
    except Unrecoverable as reason:
        text = f"load_state_dict(): {reason}. Is the env_fn the same, and the env deterministic? "
        text += "The env is as it was before."
        if token is not None:
            text = f"restore(): the frozen process is gone, and {reason}. reset() starts a new one."
        raise NotRestoredError(text) from reason.with_traceback(None)  # its frames would keep a segment mapped
    sometimes("a kept snapshot is gone", token is not None and revived.plan is not None)
    if revived.plan is not None and revived.plan.resets:
        reservation = present.journal.memory.reservation
        logger.warning("%s: restored by a replay from a reset. %s", reporter.name, reservation)
    return revived


def _digest_of(position: Any) -> bytes:
    """Return a digest of a pickled position, to find damage before anything of it is executed."""
    return blake2b(position, digest_size=16).digest() if isinstance(position, bytes) else b""
