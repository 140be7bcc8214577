"""A batch in parts that step on their own: the policy computes for one while the others step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium.vector.utils import batch_space

from multienv.config import integer
from multienv.errors import UsageError
from multienv.vector_env import Batch, HostedVectorEnv
from multienv.vector_rounds import VectorRounds
from multienv.vector_spaces import observation_spaces
from multienv.wire.numbers import Merging


class VectorPart(HostedVectorEnv):
    """Some envs of a batch, with workers of their own: a vector env like the whole.

    :meth:`send` and :meth:`recv` are a step in two halves: between them another part has its turn. Closing a part does
    nothing; the whole is what is closed.
    """

    def __init__(self, whole: HostedVectorEnv, start: int, stop: int) -> None:
        """Made by :meth:`SubprocessVectorEnv.split`, of these workers."""
        self._whole = whole  # whose end would be that of the workers
        slices = whole._slices[start:stop]
        rows = slice(slices[0].start, slices[-1].stop)
        self.num_envs = rows.stop - rows.start
        self.env_fns = whole.env_fns[rows]
        self.shared_memory, self.copy = whole.shared_memory, whole.copy
        self.observation_mode, self.autoreset_mode = whole.observation_mode, whole.autoreset_mode
        self.metadata, self.render_mode = whole.metadata, whole.render_mode
        self._single, self._single_action = whole._single, whole._single_action
        self.single_action_space = whole.single_action_space
        self.single_observation_space = whole.single_observation_space
        self.action_space = batch_space(whole.single_action_space, self.num_envs)
        self.observation_space = batch_space(whole.single_observation_space, self.num_envs)
        if whole.observation_mode == "different":
            self.observation_space, _ = observation_spaces("different", whole._found[rows])
        self.envs_per_worker = whole.envs_per_worker[start:stop]
        self._arena, self._groups, self._found = whole._arena, whole._groups[start:stop], whole._found[rows]
        self._slices = [slice(one.start - rows.start, one.stop - rows.start) for one in slices]
        self._rounds = VectorRounds(self._groups, whole._rounds.at_once, whole._rounds.threads())
        assert whole._places is not None
        even, odd = (place.part(rows) for place in whole._places)
        self._places = even, odd
        self._laid_out = whole._laid_out
        self._loose = whole._loose[rows]
        self._begun, self._met = whole._begun[rows].copy(), whole._met[rows].copy()
        self._fresh = False
        self._merging = Merging(self.num_envs)

    def send(self, actions: Any) -> None:
        """Send a step for each env; does not wait. The same as ``step_async``."""
        self.step_async(actions)

    def recv(self, timeout: float | None = None) -> Batch:
        """What the steps returned, once they have. The same as ``step_wait``."""
        return self.step_wait(timeout)

    def close_extras(self, timeout: float | None = None, terminate: bool = False, **kwargs: Any) -> None:
        """Leave the workers to the whole."""


def split(whole: HostedVectorEnv, parts: int) -> tuple[VectorPart, ...]:
    """So many parts, as even as the workers allow; raises UsageError when there are fewer workers."""
    workers = len(whole._groups)
    if not 1 <= (integer(parts) or 0) <= workers:
        raise UsageError(
            f"split({parts!r}): there are {workers} workers; give an integer from 1 to that, or more workers "
            "(envs_per_worker)."
        )
    bounds = np.linspace(0, workers, int(parts) + 1).round().astype(int).tolist()
    return tuple(VectorPart(whole, start, stop) for start, stop in pairwise(bounds))
