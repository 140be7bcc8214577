"""Where a worker's envs stand, as the caller has seen them: a recovery ends at this position.

Only the supervisor and the hot path write it. A kept snapshot, a checkpoint and a crash report hold what
:meth:`Position.dump` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from multienv._engine.recovery.journal import Journal
from multienv._engine.wire.messages import Build
from multienv._engine.wire.segment import OTHER_SECONDS, STEP_SECONDS, Segment

PickledRows = tuple[int, list[bytes | None]]
# Resets where a replay can begin: number of the request, and slot → state of its generators before it.
ReplayPoints = Iterable[tuple[int, Mapping[int, bytes]]]


class Position:
    """Holds all that the caller has seen of one worker.

    Args:
        build: The request that built the present envs.
        journal: What drove them.

    Attributes:
        number: Of the last request whose answer was collected; the pending one has the next number. An answer that no
            process gave counts two, so that the bank with what was seen last is not written to.
        seen: Number of the last reply with an observation; 0: none. Its rows lie in the bank of that number.
        pickled_rows: Number of a reply, and for each slot the pickle of what the caller saw in it, if that did not fit
            the row of the slot in the bank; see :attr:`pickled_rows_now`.
        spaces: Observation and action space that a single env has set since it was built, pickled; ``b""``: none.
        journal, build: As given; the seeds and generators in ``build`` are those of the present envs.
        steps: Step requests answered.
        episodes: Episodes begun, of all envs together.
        steps_before: Step requests answered before the running episode of each env.
        seeds: Of the last seeded reset, for each env.
        seconds: Time that the envs took so far, about.
    """

    # The hot path reads these, native code by offset.
    __slots__ = ("__dict__", "__weakref__", "journal", "number", "seen", "steps")

    def __init__(self, build: Build, journal: Journal) -> None:
        self.build, self.journal = build, journal
        self.number, self.seen = 1, 0
        self.pickled_rows: PickledRows = 0, [None] * len(build.draws)
        self.spaces = b""
        self.steps = self.episodes = 0
        self.steps_before = [0] * len(build.draws)
        self.seeds: list[int | None] = [None] * len(build.draws)
        self.seconds = 0.0
        # At the last count of the time: steps, other time in the present process, and time of a step.
        self._timed, self._others, self._step = 0, 0.0, 0.0

    @property
    def pickled_rows_now(self) -> list[bytes | None]:
        """Return for each slot the pickle of what the caller saw last; ``None`` if that lies in the row of the slot.

        The hot path takes only replies without pickled rows. It updates ``seen`` and leaves :attr:`pickled_rows` as it
        is: its number then differs from ``seen``, which says that there are none.
        """
        number, pickled_rows = self.pickled_rows
        return list(pickled_rows) if number == self.seen else [None] * len(pickled_rows)

    # --- counting ---------------------------------------------------------------------------------

    def count_reset(self, seeds: Mapping[int, int | None], number: int) -> None:
        """Count the episodes that an answered reset has begun.

        Args:
            seeds: Slot that was reset → its seed.
            number: Of the request.
        """
        for slot, seed in seeds.items():
            self.episodes += 1
            self.steps_before[slot] = self.steps
            self.seeds[slot] = self.seeds[slot] if seed is None else seed
        self.journal.record_ends(seeds, number)

    def count_step(self, answer: Any, segment: Segment, number: int, left_alone: Sequence[int] = ()) -> None:
        """Count a step, and the episodes that it has ended.

        Args:
            answer: To the step, with truncations laid over its rows.
            segment: With the reply.
            number: Of the request.
            left_alone: Slots that took no part in it: their flags are those of an earlier step.
        """
        if not self.build.verbatim and not isinstance(answer, Exception):
            failed = segment.banks[number & 1].failed
            ended = (answer.terminated | answer.truncated | failed).nonzero()[0].tolist()
            if left_alone:
                ended = [slot for slot in ended if slot not in left_alone]
                self.count_left_alone(left_alone)
            self.count_ends(ended)
            self.journal.record_ends(ended, number)
        self.steps += 1

    def count_rollout(self, steps: int, ends: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """Count the steps of a rollout; ``ends``: see ``RolloutReply``."""
        before = self.steps
        for done, number, slots in ends:
            self.steps = before + done
            if self.build.verbatim:
                self.count_reset({0: None}, number)
            else:
                self.count_ends(slots)
                self.journal.record_ends(slots, number)
        self.steps = before + steps

    def count_truncation(self, slots: Iterable[int], left_alone: Iterable[int]) -> None:
        """Count a step that ended the episodes of these slots without a process, and took no part in the others."""
        self.count_left_alone(left_alone)
        self.count_ends(slots)
        self.steps += 1

    def count_left_alone(self, slots: Iterable[int]) -> None:
        """Leave the step that is answered now out of the count of these slots, which took no part in it."""
        for slot in slots:
            self.steps_before[slot] += 1

    def count_ends(self, slots: Iterable[int]) -> None:
        """Count the episodes that begin because the step which is answered now, and not counted yet, has ended others.

        They begin with this step or the next, where the worker resets by itself; else a reset begins them.
        """
        if self.build.autoreset in ("NEXT_STEP", "SAME_STEP"):
            before = self.steps + 1 + (self.build.autoreset == "NEXT_STEP")
            for slot in slots:
                self.steps_before[slot] = before
                self.episodes += 1

    def ended(self, segment: Segment) -> Any:
        """Return for each slot of a batch whether its episode has ended and the next has not begun: an array of bool.

        With SAME_STEP the next has begun when the caller sees the end. ``segment``: of the process that showed it.
        """
        bank, can_be = segment.banks[self.seen & 1], self.seen > 0 and self.build.autoreset != "SAME_STEP"
        return (bank.terminated | bank.truncated | bank.failed) & can_be

    def count_time(self, segment: Segment) -> float:
        """Count the time that the envs took since the last count, and return it."""
        times = segment.times
        others, step = times[OTHER_SECONDS], times[STEP_SECONDS] or 1e-5
        # The smaller of two: a step may have waited for its core, and the next smoothed time shows that less.
        seconds: float = max(0, self.steps - self._timed) * min(step, self._step or step) + others - self._others
        self._timed, self._others, self._step = self.steps, others, step
        self.seconds += seconds
        return seconds

    def record_replay_points(self, points: ReplayPoints) -> None:
        """Record resets that were answered now: a replay can begin there."""
        for number, generators in points:
            for slot, state in generators.items():
                self.journal.record_replay_point(slot, number, state, self.seconds)

    # --- copies -----------------------------------------------------------------------------------

    def shown(self, segment: Segment) -> dict[str, Any]:
        """Return what the caller saw last, as plain data; ``segment``: of the process that showed it."""
        bank = segment.banks[self.seen & 1]
        rows = bytes(bank.view[bank.layout.rewards :]) if self.seen else b""  # else a lost process may have written it
        return {"seen": self.seen, "pickled_rows": self.pickled_rows_now, "bank": rows}

    def set_shown(self, segment: Segment, shown: Mapping[str, Any]) -> None:
        """Set what the caller has seen to what :meth:`shown` returned; write its rows into a bank of ``segment``."""
        self.seen = shown["seen"]
        self.pickled_rows = self.seen, list(shown["pickled_rows"])
        bank = segment.banks[self.seen & 1]
        if len(shown["bank"]) == bank.layout.size - bank.layout.rewards:
            bank.view[bank.layout.rewards :] = shown["bank"]

    def move_to(self, segment: Segment, before: Segment | None) -> None:
        """Go on in another process's segment, which then has what the one before showed last."""
        if before is not None:
            self.set_shown(segment, self.shown(before))
        self._others = segment.times[OTHER_SECONDS]

    def dump(self, segment: Segment) -> dict[str, Any]:
        """Return all of it as plain data; ``segment``: of the process that showed what was seen last."""
        return {
            "journal": self.journal.dump(),
            "shown": self.shown(segment),
            "spaces": self.spaces,
            "build": (self.build.seeds, self.build.draws, dict(self.build.generators), self.build.code),
            "seeds": tuple(self.seeds),
            "number": self.number,
            "steps": self.steps,
            "steps_before": tuple(self.steps_before),
            "episodes": self.episodes,
            "seconds": self.seconds,
        }

    def load(self, data: Mapping[str, Any]) -> None:
        """Hold what :meth:`dump` returned, but for what was seen last: that needs a process, see :meth:`set_shown`."""
        self.journal.load(data["journal"])
        seeds, draws, generators, code = data["build"]
        self.build = replace(self.build, seeds=seeds, draws=draws, generators=generators, code=code)
        self.seeds[:], self.steps_before[:] = data["seeds"], data["steps_before"]
        self.number, self.steps, self.episodes = data["number"], data["steps"], data["episodes"]
        self.seconds, self.spaces = data["seconds"], data["spaces"]
        self._timed = self.steps
