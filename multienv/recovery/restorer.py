"""Coming back to an earlier state: from a checkpoint in another trainer, or from a snapshot to branch off."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any

from multienv.backends.base import Backend
from multienv.errors import NotForkableError, NotRestoredError, UsageError
from multienv.recovery.healer import Unrecoverable
from multienv.recovery.journal import Journal, Plan
from multienv.recovery.keeper import entered
from multienv.recovery.mender import Mender
from multienv.recovery.phases import ENDED, IDLE, LOST, NEW, PENDING, READY, RUNNING, STARTING, STATES
from multienv.recovery.verification import alike
from multienv.wire.messages import IRREGULAR, REPLY, seq_of
from multienv.wire.observations import body_of

# Of what state_dict() returns.
_VERSION = 2
_unpack = REPLY.unpack_from
_tokens = count(1)


class Snapshot:
    """A state of an env to come back to, any number of times: a frozen process, and what led there.

    It is freed with :meth:`free`, when nobody holds it any more, or when its env is closed.
    """

    __slots__ = ("__weakref__", "_finalizer", "state", "token")

    def __init__(self, token: int, state: BranchState, free: Callable[[int], None]) -> None:
        """Made by ``SubprocessEnv.snapshot``."""
        self.token = token
        self.state = state
        self._finalizer = weakref.finalize(self, free, token)
        self._finalizer.atexit = False

    def free(self) -> None:
        """Let the frozen process end; again does nothing."""
        self._finalizer()

    @property
    def is_free(self) -> bool:
        """Whether it can be restored no more."""
        return not self._finalizer.alive


@dataclass(frozen=True, slots=True)
class BranchState:
    """Where a supervisor stood."""

    journal: Journal = field(repr=False)
    last: bytes = field(repr=False)
    memory: bytes = field(repr=False)
    phase: int
    process_seeds: tuple[int, int, int] | None
    seed: int | None
    seq: int
    steps: int
    steps_before: int
    episodes: int


class Restorer(Mender):
    """Brings the env to a state it was in before."""

    __slots__ = ()

    # --- checkpoints --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All it takes to have the env again as it stands between two requests: plain data."""
        if self.closed or self.phase not in IDLE:
            self.refuse("state_dict")
        plans = self._journal.plans()
        if not plans:
            raise UsageError(
                "state_dict(): what drove the env is not all known: its RestartPolicy does not replay, or the episode "
                "has outgrown its journal_limit or replay_limit and no state of the env is kept "
                "(statistics().no_state_anchors says why)."
            )
        (plan, *others), seen = plans, self._last_reply()
        if plan.from_construction:  # all of them once more, for an env that is not made twice alike
            others = []
        state = {
            "version": _VERSION,
            "frames": plan.frames,
            "evidence": plan.evidence,
            "from_construction": plan.from_construction,
            "from_state": plan.from_state,
            "others": tuple((one.frames, one.evidence, one.from_state) for one in others),
            "memory": bytes(self._memory_of(seq_of(seen), self._block)) if seen and self._block else b"",
            "last": seen,
            "state": STATES[self.phase],
            "process_seeds": self._healer.seeds,
            "seed": self._seed,
            "seq": self.seq,
            "steps": self._steps,
            "steps_before": self._steps_before,
            "episodes": self.record.episodes,
        }
        return state | {"digest": _digest_of(state)}

    @entered
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the env as it stood then, verified; in a new process."""
        if self.closed or self.phase in PENDING:
            self.refuse("load_state_dict")
        if not isinstance(state, dict) or "version" not in state:
            raise UsageError("load_state_dict(): this is not what the state_dict() of such an env returned.")
        if state["version"] != _VERSION:
            raise UsageError(
                f"load_state_dict(): this is what the state_dict() of another multienv returned, its version is "
                f"{state['version']!r:.20}. This one knows version {_VERSION}."
            )
        if state.get("digest") != _digest_of(state):
            raise UsageError("load_state_dict(): this state is damaged: it is not what state_dict() returned.")
        if not self._journal.replaying:
            raise UsageError("load_state_dict(): the env's RestartPolicy does not replay; give it one that does.")
        plans = [Plan(state["frames"], state["evidence"], state["from_construction"], state.get("from_state", False))]
        plans += [Plan(frames, evidence, False, kept) for frames, evidence, kept in state.get("others", ())]
        target = BranchState(
            journal=self._journal.twin(),
            last=state["last"],
            memory=b"",
            phase={"ready": READY, "running": RUNNING, "ended": ENDED}[state["state"]],
            process_seeds=state["process_seeds"],
            seed=state["seed"],
            seq=state["seq"],
            steps=state["steps"],
            steps_before=state["steps_before"],
            episodes=state["episodes"],
        )
        effort = self._healer.begin(planned=True)
        before, self._healer.seeds = self._healer.seeds, target.process_seeds
        try:
            looks_the_same = partial(self._looks_as_saved, state)
            backend = self._healer.bring_back(plans, effort, self._steps, looks_the_same)
        except Unrecoverable as reason:
            raise NotRestoredError(
                f"load_state_dict(): {reason}. Is the env_fn the same, and the env deterministic? "
                "The env is as it was before."
            ) from reason
        finally:
            self._healer.seeds = before  # until it is that env
        self._go_on_as("load_state_dict", backend, target, effort.plan)

    def _looks_as_saved(self, state: dict[str, Any], backend: Backend, last: bytes) -> bool:
        seen = state["last"]
        if seen and last and _unpack(seen)[4] & IRREGULAR:
            return alike(body_of(seen), body_of(last))
        size = self._placement.block_size
        if not state["memory"] or not size:
            return True  # inline: it was compared with the rest of the evidence
        return bool(self._memory_of(seq_of(seen), backend.observations(size)) == state["memory"])

    # --- branching ----------------------------------------------------------------------------------

    def prepare_snapshot(self) -> int:
        """Whether one can be taken now; a token for it."""
        if self.closed or self.phase not in IDLE:
            self.refuse("snapshot")
        kept = sum(not one.is_free for one in self.snapshots)
        if kept >= self._policy.max_snapshots:
            raise UsageError(
                f"snapshot(): {kept} are kept, as many as RestartPolicy.max_snapshots allows. "
                "free() some, or let go of them."
            )
        self._free_forsaken()
        self._branching = next(_tokens)
        return self._branching

    def keep_snapshot(self, token: int, obstacle: str) -> Snapshot:
        """The env's process has been asked for one; this was in the way, or nothing."""
        if obstacle:
            self._branching = 0
            raise NotForkableError(
                f"snapshot(): this env cannot be forked: {obstacle}. Threads, child processes, sockets, devices and "
                'shared memory do not survive it; nor does the trainer take part in it (context="fork", SerialEnv). '
                "Nothing is lost."
            )
        seen = self._last_reply()
        state = BranchState(
            journal=self._journal.copy(),
            last=seen,
            memory=bytes(self._memory_of(seq_of(seen), self._block)) if seen and self._block else b"",
            phase=self.phase,
            process_seeds=self._healer.seeds,
            seed=self._seed,
            seq=self.seq,
            steps=self._steps,
            steps_before=self._steps_before,
            episodes=self.record.episodes,
        )
        snapshot = Snapshot(token, state, self._healer.free)
        self.snapshots.add(snapshot)
        self._branching = 0
        return snapshot

    @entered
    def restore(self, snapshot: Snapshot) -> None:
        """Have the env as it stood then."""
        if self.closed or self.phase in (NEW, STARTING, *PENDING):
            self.refuse("restore")
        if not isinstance(snapshot, Snapshot):
            raise UsageError(f"restore({snapshot!r:.100}): give what snapshot() returned.")
        if snapshot not in self.snapshots:
            raise UsageError("restore(): this is another env's snapshot; each env comes back to its own.")
        if snapshot.is_free:
            raise UsageError("restore(): this snapshot has been freed.")
        state, effort = snapshot.state, self._healer.begin(planned=True)
        # Its process would be the parent of what is woken, and nobody would hear of the end of that.
        if self._backend is not None:
            self._backend.kill()  # it is ours until it is dead, whatever interrupts
        self._drop_backend()
        self.phase = LOST  # a truncation that is owed is not any more
        self._healer.seeds = state.process_seeds
        try:
            backend = self._healer.branch(snapshot.token, effort, self._steps)
            if backend is None:  # the frozen process is gone; what led there is known
                plans = state.journal.plans()
                backend = self._healer.bring_back(plans, effort, self._steps, partial(self._looks_as_kept, state))
        except Unrecoverable as reason:
            raise NotRestoredError(
                f"restore(): the frozen process is gone, and {reason}. reset() starts a new one."
            ) from reason
        self._go_on_as("restore", backend, state)

    # --- both -------------------------------------------------------------------------------------

    def _go_on_as(self, command: str, backend: Backend, state: BranchState, plan: Plan | None = None) -> None:
        """From now on this backend is the env's, which stands so; with its journal yet to be loaded with this plan.

        Interrupted, the env is what it was, or lost: nobody is asked for an episode that is not told of.
        """
        self._refuse_if_closed(backend, command)
        try:
            if plan is not None:
                state.journal.load(plan, state.steps)
            self._drop_backend()
            self.phase = LOST
            self._healer.seeds = state.process_seeds
            self._journal.become(state.journal)
            self._last, self._owed, self._pending = state.last, "", b""
            self._seed, self.seq = state.seed, state.seq
            self._anchoring.move(state.steps - self._steps)
            self._steps, self._steps_before = state.steps, state.steps_before
            self.record.episodes = state.episodes
            self.begun += 1
            self._adopt(backend)
            if state.memory and self._block:
                self._memory_of(seq_of(state.last), self._block)[:] = state.memory
            self.phase = state.phase
        except BaseException:
            if self._backend is not backend:
                backend.kill()
                backend.release()
            raise
        self._refuse_if_closed(command=command)

    def _looks_as_kept(self, state: BranchState, backend: Backend, last: bytes) -> bool:
        return self._looks_as_saved({"last": state.last, "memory": state.memory}, backend, last)


def _digest_of(state: dict[str, Any]) -> bytes:
    """Of all that it holds: what is damaged is to be found out before anything of it is run."""
    digest = blake2b(digest_size=16)
    for key in sorted(state, key=str):
        if key != "digest":
            _feed(digest.update, (key, state[key]))
    return digest.digest()


def _feed(update: Callable[[bytes], None], value: Any) -> None:
    if isinstance(value, bytes):
        update(b"bytes %d:" % len(value) + value)
    elif not isinstance(value, list | tuple):
        update(f"{value!r};".encode())
    elif set(map(type, value)) == {bytes}:  # frames: as many as there were steps
        update(b"%d pieces:" % len(value) + array("Q", map(len, value)).tobytes() + b"".join(value))
    else:
        update(b"%d values:" % len(value))
        for one in value:
            _feed(update, one)
