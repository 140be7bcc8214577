"""Take the steps of a walk again, while new processes go on from a reset now and then.

Each of them knows nothing of what came before that reset. If an env remembers something of it, it goes on otherwise.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from multienv import SubprocessEnv
from multienv.cli.walking import Walk, walk
from multienv.config import RestartPolicy
from multienv.events import Event, Loss, Recovery
from multienv.testing.killer import send

# How often the worker is killed, and in which episode first: a replay begins about two episodes before.
_STRIKES, _FIRST_STRUCK = 12, 2
# A recycling limit that is never reached: with one, multienv notes at nearly every reset how the generators stand.
_NEVER = 10**12
_POLICY = RestartPolicy(snapshots=False, begins_anew=True, backoff=0.0, recycle_after_steps=_NEVER)


class _Enough(Exception):  # noqa: N818 - ends a walk
    pass


@dataclass
class Resumed:
    """Holds the outcome of a walk that new processes have gone on with.

    Attributes:
        walk: What was seen.
        recoveries: The recoveries, in order.
        own_losses: Losses that the env itself has caused.
    """

    walk: Walk = field(default_factory=Walk)
    recoveries: list[Recovery] = field(default_factory=list)
    own_losses: list[Loss] = field(default_factory=list)

    @property
    def spoilt(self) -> Recovery | None:
        """Return the first recovery that did not come out as the env had been seen; ``None`` if there is none."""
        return next((one for one in self.recoveries if one.outcome != "exact"), None)

    @property
    def has_strayed(self) -> bool:
        """Tell whether a replay from a reset came out otherwise than the env had been seen."""
        return self.spoilt is not None and (self.spoilt.outcome == "replayed" or "does not match" in self.spoilt.reason)


def resumed(worker: Callable[..., SubprocessEnv], first: Walk, longest: int, seconds: float) -> Resumed:
    """Take the steps of a walk again, and kill the worker at the end of some of its episodes.

    The walk ends at its first recovery that is not exact, or after this time, but not before the first recovery.

    Args:
        worker: Makes the env; takes options of SubprocessEnv.
        first: The walk.
        longest: Number of steps after which its episodes were ended.
        seconds: The time.
    """
    found, victims = Resumed(), set[int]()
    struck, until = _struck(first), time.monotonic() + seconds

    def note(event: Event) -> None:
        if isinstance(event, Recovery):
            found.recoveries.append(event)
        elif isinstance(event, Loss) and event.pid not in victims:
            found.own_losses.append(event)

    def before_step(step: int) -> None:
        if found.spoilt or (found.recoveries and time.monotonic() > until):
            raise _Enough
        pid = env.statistics().pid if step in struck else None
        if pid is not None:
            victims.add(pid)
            send(pid, "SIGKILL")

    with worker(restart=_POLICY, reports="", hooks=[note]) as env, contextlib.suppress(_Enough):
        walk(env, first.steps, longest=longest, before_step=before_step, found=found.walk)
    return found


def _struck(first: Walk) -> set[int]:
    """Return the steps before which the worker is killed: the last ones of episodes that lie evenly in the walk."""
    ends = first.ends[_FIRST_STRUCK:]
    count = min(_STRIKES, len(ends))
    return {ends[index * (len(ends) - 1) // max(1, count - 1)] - 1 for index in range(count)}
