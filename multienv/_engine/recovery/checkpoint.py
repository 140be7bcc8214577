"""Come back to an earlier state of the envs: of this trainer (a kept snapshot), or of another (a checkpoint)."""

from __future__ import annotations

import logging
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from hashlib import blake2b
from itertools import count
from typing import Any

from multienv._engine.processes.channel import Channel
from multienv._engine.recovery.journal import Journal
from multienv._engine.recovery.policy import RecoveryProgress
from multienv._engine.recovery.position import Position
from multienv._engine.recovery.recoverer import Unrecoverable
from multienv._engine.recovery.state_machine import Episode, Process, State
from multienv._engine.sometimes import sometimes
from multienv._engine.wire.messages import KeepSnapshot
from multienv.errors import NotRestoredError, UsageError

# Version of the dict that state_dict() returns.
_VERSION = 13
# Seconds that a request of our own between two of the caller's may last; a fork of a large process takes some of them.
ASIDE = 30.0
_tokens = count(1)

logger = logging.getLogger("multienv")


class Snapshot:
    """Holds a state of a worker's envs that you can return to, any number of times: a frozen process and its journal.

    It is freed by :meth:`free`; by one of the next calls of its env when you have dropped the last reference to it; or
    when the env is closed.

    Attributes:
        token: Number of the frozen process.
        position: Where the worker stood when the snapshot was taken, as ``Checkpoints.position()`` returns it.
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
    """

    def __init__(self, free: Callable[[int], None]) -> None:
        self._free = free
        self._kept: dict[int, _Reference] = {}
        self._dropped: deque[_Reference] = deque()

    def __len__(self) -> int:
        """Return how many frozen processes there are."""
        return len(self._kept)

    def __contains__(self, snapshot: object) -> bool:
        """Tell whether the frozen process of this snapshot is kept."""
        found = self._kept.get(snapshot.token) if isinstance(snapshot, Snapshot) else None
        return found is not None and found() is snapshot

    def add(self, snapshot: Snapshot) -> None:
        """Keep a snapshot."""
        reference = _Reference(snapshot, self._dropped.append)
        reference.token = snapshot.token
        self._kept[snapshot.token] = reference

    def free(self, token: int) -> None:
        """End a frozen process. Again does nothing."""
        if token in self._kept:
            self._free(token)
            self._kept.pop(token, None)

    def free_dropped(self) -> None:
        """End the processes of the snapshots to which nothing refers any more."""
        while self._dropped:
            self.free(self._dropped[0].token)
            self._dropped.popleft()  # after it: an interruption leaves it to the next call

    def free_all(self) -> None:
        """End all frozen processes, also those of snapshots that are gone."""
        for token in list(self._kept):
            self.free(token)


class Checkpoints:
    """Takes and restores the states of one worker.

    Args:
        supervisor: The worker.
        limit: How many snapshots may be kept at a time.
    """

    def __init__(self, supervisor: Any, limit: int) -> None:
        self._supervisor = supervisor
        self._limit = limit
        self._kept = KeptSnapshots(supervisor.recoverer.free)
        self.free_dropped = self._kept.free_dropped

    # --- snapshots ----------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Ask the process to fork itself, and return the copy. Raises UsageError."""
        worker = self._supervisor
        worker.check("snapshot")
        self._kept.free_dropped()
        kept = len(self._kept)
        if kept >= self._limit:
            raise UsageError(
                f"snapshot(): {kept} are kept, as many as a worker may keep. free() some, or let go of them."
            )
        if worker.state.process is Process.NONE:
            raise UsageError("snapshot(): the worker was lost. Call reset(): it starts a new one.")
        token = next(_tokens)
        try:
            obstacle = worker.ask_between(KeepSnapshot(token, worker.position.number))
            snapshot = Snapshot(token, self.position(), self._kept, worker.reporter.env_in(-1))
        except BaseException:
            sometimes("a snapshot is broken off while it is taken")
            if worker.channel is not None:
                worker.channel.kill()  # else it might take the snapshot later
            worker.recoverer.free(token)
            raise
        if obstacle:
            raise UsageError(
                f"snapshot(): this env cannot be forked: {obstacle}. Threads, child processes, sockets, pipes, devices "
                "and shared memory do not survive a fork, and an env in the trainer (SerialEnv) is not forked. "
                "Nothing is lost."
            )
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Bring the envs back to where they stood when this snapshot was taken. Raises UsageError, NotRestoredError."""
        worker = self._supervisor
        worker.check("restore")
        if not isinstance(snapshot, Snapshot) or snapshot.kept is not self._kept:
            raise UsageError(f"restore(): {snapshot!r:.100} is no snapshot of this env; snapshot() returns one.")
        if snapshot.is_free:
            raise UsageError("restore(): this snapshot has been freed.")
        position, recoverer = snapshot.position, worker.recoverer
        progress = recoverer.begin(planned=True)
        # First: else this process is the parent of the woken one, and the monitor does not see that one end.
        worker.give_up()
        try:
            channel = recoverer.wake_kept(snapshot.token, position["number"], progress)
            if channel is None:  # the frozen process is gone: replay what led to it
                sometimes("a kept snapshot is gone")
                channel = self._replayed(position, progress)
        except Unrecoverable as reason:
            raise NotRestoredError(
                f"restore(): the frozen process is gone, and {reason}. reset() starts a new one."
            ) from reason.with_traceback(None)  # its frames would keep a segment mapped
        self._move_to(position, channel)

    def free_all(self) -> None:
        """Free all snapshots; called when the worker is closed."""
        self._kept.free_all()

    # --- checkpoints --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the envs as plain data, for load_state_dict(). Raises UsageError."""
        self._supervisor.check("state_dict")
        journal = self._supervisor.position.journal
        if not journal.replaying or not any(not plan.missing for plan in journal.plans()):
            raise UsageError(
                "state_dict(): what drove the env is not all known: its RestartPolicy does not replay; or the "
                "episode has outgrown its journal_limit or replay_limit, until the next one has ended."
            )
        position = pickle.dumps(self.position(), protocol=5)
        return {"version": _VERSION, "position": position, "digest": _digest_of(position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring the envs to this state in a new process, verified. Raises UsageError, NotRestoredError."""
        worker = self._supervisor
        worker.check("load_state_dict")
        if not isinstance(state, dict) or "version" not in state:
            raise UsageError("load_state_dict(): this is not what the state_dict() of such an env returned.")
        if state["version"] != _VERSION:
            raise UsageError(
                f"load_state_dict(): this is what the state_dict() of another multienv returned, its version is "
                f"{state['version']!r:.20}. This one knows version {_VERSION}."
            )
        if state.get("digest") != _digest_of(state.get("position")):
            raise UsageError("load_state_dict(): this state is damaged: it is not what state_dict() returned.")
        journal = worker.position.journal
        if not journal.replaying:
            raise UsageError("load_state_dict(): the env's RestartPolicy does not replay; give it one that does.")
        position = pickle.loads(state["position"])
        if position["journal"]["stride"] != journal.stride or len(position["seeds"]) != worker.rules.slots:
            raise NotRestoredError(
                "load_state_dict(): this state is that of other envs. Is the env_fn the same? "
                "The env is as it was before."
            )
        try:
            channel = self._replayed(position, worker.recoverer.begin(planned=True))
        except Unrecoverable as reason:
            raise NotRestoredError(
                f"load_state_dict(): {reason}. Is the env_fn the same, and the env deterministic? "
                "The env is as it was before."
            ) from reason.with_traceback(None)
        self._move_to(position, channel)

    # --- both ---------------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """Return where the worker stands, as plain data."""
        worker = self._supervisor
        episode, truncations = worker.state.episode.value, worker.state.pending_truncations
        return {**worker.position.dump(worker.segment), "episode": episode, "pending_truncations": truncations}

    def _replayed(self, position: Mapping[str, Any], progress: RecoveryProgress) -> Channel:
        """Return a new process with envs replayed to this position; the worker keeps its own process."""
        worker = self._supervisor
        journal = Journal(recording=True, policy=worker.policy, memory=worker.position.journal.memory)
        there = Position(worker.position.build, journal)
        there.load(position)
        found = worker.recoverer.recover_by_replay(there.build, journal.plans(), progress, journal.why_no_plan())
        if found.plan is not None and found.plan.resets:
            logger.warning(
                "%s: restored by a replay from a reset. %s", worker.reporter.name, journal.memory.reservation
            )
        if found.mismatches:
            sometimes("the replay of a checkpoint differs")
            found.channel.kill()
            found.channel.release()
            raise Unrecoverable(next(iter(found.mismatches.values())))
        channel: Channel = found.channel
        return channel

    def _move_to(self, position: Mapping[str, Any], channel: Channel) -> None:
        """Give the worker this process, with envs at this position. If interrupted, the env is as before, or lost."""
        worker = self._supervisor
        worker.refuse_if_closed("restore", channel)
        worker.give_up()
        truncations = position["pending_truncations"]
        state = State(Process.READY, Episode(position["episode"]), pending_truncations=truncations)
        worker.move_to(position, state, channel)


def _digest_of(position: Any) -> bytes:
    """Return a digest of a pickled position, to find damage before anything of it is executed."""
    return blake2b(position, digest_size=16).digest() if isinstance(position, bytes) else b""
