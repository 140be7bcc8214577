"""A batch of envs in several processes, and the same envs undisturbed in this one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate

from kit import CounterEnv, descendants, first_difference
from multienv import RestartPolicy, SerialVectorEnv, SubprocessVectorEnv
from multienv.events import Event, Loss, Recovery

Fns = Sequence[Callable[[], gymnasium.Env[Any, Any]]]
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
NO_SNAPSHOTS = RestartPolicy(snapshots=False)
NUM_ENVS = 6  # three in one worker, three in the other
CULPRIT = 1
FIRST, SECOND = [0, 1, 2], [3, 4, 5]
OTHERS = [0, 2, 3, 4, 5]


def counters(**others: Callable[[], Any]) -> Fns:
    """Return what builds six envs whose episodes end at different steps, some of them others: ``env1=…``."""
    made: list[Any] = [partial(CounterEnv, horizon=5 + index, render_mode="rgb_array") for index in range(NUM_ENVS)]
    for place, env_fn in others.items():
        made[int(place.removeprefix("env"))] = env_fn
    return made


class Pair:
    """A batch and its twin, which are reset and stepped together.

    Args:
        fns: Of the batch.
        twins: Of the twin, if they are others.
        each: How many envs a worker has.
        mode: Of autoreset.
        options: Of the batch.
    """

    def __init__(
        self, fns: Fns, twins: Fns | None = None, *, each: int = 3, mode: AutoresetMode = NEXT_STEP, **options: Any
    ) -> None:
        self.events: list[Event] = []
        self.envs = SubprocessVectorEnv(
            fns, envs_per_worker=each, autoreset_mode=mode, hooks=[self.events.append], **options
        )
        self.twin = SerialVectorEnv(twins or fns, autoreset_mode=mode)
        self.everyone = list(range(len(fns)))
        self.number = 0
        self.seen = self.last = self.compare(self.envs.reset(seed=1), self.twin.reset(seed=1), None)

    def compare(self, batch: Any, own: Any, rows: Sequence[int] | None) -> list[Any]:
        """Hold these rows against the twin's; return the observations of all."""
        mine, theirs = (list(iterate(self.twin.observation_space, one[0])) for one in (batch, own))
        for row in self.everyone if rows is None else rows:
            assert first_difference(mine[row], theirs[row]) is None, (self.number, row)
            for part, reference in zip(batch[1:4], own[1:4], strict=True) if len(own) == 5 else ():
                assert part[row].tobytes() == reference[row].tobytes(), (self.number, row)
        return mine

    def actions(self) -> Any:
        self.number += 1
        return np.random.default_rng(self.number).integers(0, 4, len(self.everyone))

    def step(self, rows: Sequence[int] | None = None, strike: Callable[[], object] | None = None) -> Any:
        """Step both, with a strike while the step is under way, and compare these rows, or all."""
        actions = self.actions()
        self.envs.step_async(actions)
        if strike is not None:
            strike()
        batch = self.envs.step_wait()
        self.last, self.seen = self.seen, self.compare(batch, self.twin.step(actions.copy()), rows)
        return batch

    def reset(self, mask: Any, rows: Sequence[int] | None = None, strike: Callable[[], object] = int) -> Any:
        self.envs.reset_async(options={"reset_mask": np.array(mask)})
        strike()
        result = self.envs.reset_wait()
        self.last, self.seen = (
            self.seen,
            self.compare(result, self.twin.reset(options={"reset_mask": np.array(mask)}), rows),
        )
        return result

    def kill(self, *workers: int, snapshot: bool = False) -> None:
        for place in workers:
            worker = self.envs.statistics()[place].pid or 0
            for victim in [worker, *(sorted(descendants(worker))[-1:] if snapshot else [])]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)

    def outcomes(self) -> list[str]:
        return [event.outcome for event in self.events if isinstance(event, Recovery)]

    def culprits(self) -> set[int | None]:
        return {event.env_index for event in self.events if isinstance(event, Loss)}

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *error: object) -> None:
        self.envs.close()
        self.twin.close()
