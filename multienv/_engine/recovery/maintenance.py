"""When the process of a worker is to be replaced by plan: because simulators leak, or a reset ends processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from multienv._engine.processes.channel import Channel
from multienv._engine.recovery.position import Position
from multienv._engine.recovery.state_machine import Kind, State
from multienv._engine.sometimes import sometimes
from multienv.config import RestartPolicy


class Recycling:
    """Tells when a process is due to be replaced, because simulators leak.

    Args:
        policy: The limits.

    Attributes:
        wanted: The policy has such limits at all.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.wanted = policy.recycles
        self.begin(0, 0)

    def begin(self, steps: int, episodes: int, replayed: int = 0) -> None:
        """Note that a new process takes over: after so many steps, ended episodes, and requests of a replay."""
        self._steps, self._episodes, self._replayed = steps, episodes, replayed
        self._again_at = self._waited = 0

    def put_off(self, episodes: int, least: int) -> None:
        """Note that a replacement has failed: it is tried at a reset of all envs, else after some more episodes.

        Args:
            episodes: Begun so far.
            least: How many more the first time; then twice as many each time.
        """
        self._waited = 2 * self._waited or least
        self._again_at = episodes + self._waited

    def is_put_off(self, episodes: int) -> bool:
        """Tell whether a replacement has failed not long ago."""
        return episodes < self._again_at

    def due(self, steps: int, episodes: int, slots: int, rss: Callable[[], int | None], *, is_over: bool) -> str:
        """Return why the process should be replaced, or ``""``.

        Args:
            steps: Taken so far.
            episodes: Ended so far.
            slots: Number of envs.
            rss: Tells the resident memory, in bytes. It is asked last: it costs a system call.
            is_over: No episode runs.
        """
        policy = self._policy
        if policy.recycle_after_steps is not None and steps - self._steps >= policy.recycle_after_steps:
            return f"after {steps - self._steps} steps"
        most = policy.recycle_after_episodes
        if most is not None and episodes - self._episodes >= most and is_over:
            return f"after {episodes - self._episodes} episodes"
        # A replay of all that the process has done would leak as much once more. A replay goes back two episodes; where
        # it alone takes that much, the process would be replaced all the time.
        gains = is_over or (episodes - self._episodes >= 2 * slots and steps - self._steps >= self._replayed)
        if policy.max_rss is not None and gains:
            size = rss()
            if size is not None and size > policy.max_rss:
                return f"at {size / 2**20:.0f} MiB"
        return ""


class Maintenance:
    """Finds out when the process of a worker is to be replaced.

    Args:
        policy: The limits.
        position: Of the worker.
        resets_itself: The worker begins the next episode by itself: it is counted when one has ended.

    Attributes:
        is_due: Something is to be done before the next request.
        recycling_due: Why the process is to be replaced, or ``""``.
        needs_rebuild: Slots that need a new env, because their resets have ended processes.
        takes_new_envs: The policy takes new envs between two episodes, which remember nothing.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "is_due",
    )  # the hot path reads it, native code by offset

    def __init__(self, policy: RestartPolicy, position: Position, *, resets_itself: bool = False) -> None:
        self._position, self._resets_itself = position, resets_itself
        self.recycling = Recycling(policy)
        self.takes_new_envs = (
            policy.accept != "exact" or policy.recycle_after_episodes is not None or not policy.replays
        )
        self.is_due = False
        self.recycling_due = ""
        self.needs_rebuild: frozenset[int] = frozenset()

    def begin(self, replayed: int, *, is_over: bool) -> None:
        """Note that a new process has taken over, after so many requests of a replay; ``is_over``: no episode runs."""
        if self.recycling.wanted:
            self.recycling.begin(self._position.steps, self._ended(is_over=is_over), replayed)
        self.is_due, self.recycling_due, self.needs_rebuild = False, "", frozenset()

    def _ended(self, *, is_over: bool) -> int:
        """Return about how many episodes have ended: of several envs, all but one count as ended."""
        return max(0, self._position.episodes - (self._resets_itself or not is_over))

    def note_guilty(self, state: State, ended: Any) -> None:
        """Note which envs are to be new ones: their resets have ended processes, wherever the envs came back from.

        Args:
            state: The worker's, before the answer is committed.
            ended: Of each slot, whether its episode has ended and the next one has not begun.
        """
        assert state.request is not None
        guilty = {slot for slot, _ in (*state.deaths, *state.killed)}
        for slot, _ in state.skipped:
            is_reset = state.request.kind is Kind.RESET
            if slot in guilty and (is_reset or slot in state.not_reset or ended[slot]):
                sometimes("an env whose reset ends processes is built anew")
                self.needs_rebuild, self.is_due = self.needs_rebuild | {slot}, True

    def put_off(self, *, is_built: bool = True) -> None:
        """Note that the process was not replaced.

        Args:
            is_built: The envs could be built in another process; else the old one ends first the next time.
        """
        self.recycling_due, self.needs_rebuild = "", frozenset()
        self.recycling.put_off(self._position.episodes, 2 * len(self._position.seeds) if is_built else 1)

    def look(self, channel: Channel, is_between: Callable[[], bool]) -> None:
        """Find out what is due; ``is_between`` tells whether no episode runs."""
        position = self._position
        if self.recycling.wanted and not self.recycling_due:
            is_over = is_between()
            counts = position.steps, self._ended(is_over=is_over), len(position.seeds)
            self.recycling_due = self.recycling.due(*counts, channel.memory, is_over=is_over)
        is_ripe = bool(self.recycling_due) and not self.recycling.is_put_off(position.episodes)
        self.is_due = is_ripe or bool(self.needs_rebuild)
