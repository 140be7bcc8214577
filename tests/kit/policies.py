"""Policies of the tests of rollouts, and what a loop of steps would return; workers import them by name."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from typing import Any

import numpy as np

from kit.space_env import digest_value


class Linear:
    """Chooses by a product of fixed weights: of each row by itself, so that the size of the batch does not matter."""

    def __init__(self, space: Any) -> None:
        self.space = space

    def __call__(self, observations: Any) -> Any:
        rows = np.atleast_2d(observations).astype(np.float64)
        scores = np.cos((rows * np.arange(1, rows.shape[1] + 1)).sum(axis=1) * 7)
        if hasattr(self.space, "n"):
            actions = (scores > 0).astype(np.int64) * (int(self.space.n) - 1)
        else:
            actions = (scores[:, None] * np.ones(self.space.shape)).astype(np.float32)
        one = np.ndim(observations) == 1
        return (actions[0], {"score": scores[0]}) if one else (actions, {"score": scores})


class Sampling:
    """Returns an action of a space, or a batch of ``count``, that the very bits of the observations choose."""

    def __init__(self, space: Any, count: int = 0) -> None:
        self.space, self.count = space, count

    def __call__(self, observations: Any) -> Any:
        import gymnasium.vector.utils as utils

        text = digest_value(observations).encode()
        self.space.seed(int.from_bytes(hashlib.sha256(text).digest()[:4], "little"))
        if not self.count:
            return self.space.sample()
        batched = utils.batch_space(self.space, self.count)
        batched.seed(int.from_bytes(hashlib.sha256(text).digest()[:4], "little"))
        return batched.sample()


def constant(observations: Any) -> Any:
    return np.ones(len(observations), np.int64) if observations.ndim > 1 else 1


def telling(observations: Any) -> Any:
    """Is ``constant`` and returns the observations that it was given."""
    return constant(observations), {"given": observations}


class Fails:
    """Is ``constant`` until the call with this number, and then does something else."""

    def __init__(self, at: int, what: str) -> None:
        self.calls, self.at, self.what = 0, at, what

    def __call__(self, observations: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            if self.what == "raise":
                raise KeyError("no such layer")
            if self.what == "die":
                os.kill(os.getpid(), signal.SIGSEGV)
            if self.what == "hang":
                time.sleep(60)
            if self.what == "wrong":
                return constant(observations) + 77.5
            if self.what == "wide":
                return constant(observations) + 77
            if self.what == "ragged":
                return constant(observations), {"value": np.zeros(99)}
        return constant(observations)
