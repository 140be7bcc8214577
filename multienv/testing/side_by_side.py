"""Step envs whose workers are struck beside the same envs undisturbed, and compare bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from multienv import Deadlines, MultiEnv, RestartPolicy
from multienv._engine.recovery.verification import same
from multienv.errors import EnvsFailedError, WorkerLostError, first_line

# After so many differences a check ends.
ENOUGH_MISMATCHES = 5
# Arrays of no more values are shown whole.
_FEW = 16
# For envs that may hang by themselves; a step is not expected to take so long.
PATIENT = Deadlines(reset=60.0, step=60.0)

# A worker that is struck, or whose env crashes by chance, is restarted as often as it takes.
MANY_RESTARTS = 1_000_000
# Options of SubprocessEnv for an env that is not struck: a busy machine is waited for, and what the env itself loses is
# recovered.
UNDISTURBED: dict[str, Any] = {
    "restart": RestartPolicy(max_restarts=MANY_RESTARTS),
    "deadlines": PATIENT,
    "reports": "",
}


class SideBySide:
    """Steps envs in pairs until they part: one of each pair is struck, the other one undisturbed.

    Both get the same seed at the first reset, none later, and the same random actions. The undisturbed envs have
    processes of their own, too: an env that crashes by itself does not take this one with it.

    Args:
        envs: The undisturbed envs, and after them as many of the same envs that are struck.
        seed: Decides seeds and actions.

    Attributes:
        mismatch: What differed; ``""``: nothing.
        ended: Number of episodes that have ended by themselves.
        reasons: Why episodes were ended, or errors raised, because of a loss; also a loss of an undisturbed env.
    """

    def __init__(self, envs: MultiEnv, seed: int) -> None:
        self.mismatch = ""
        self.reasons: list[str] = []
        self.ended = 0
        self._envs, self._pairs = envs, len(envs) // 2
        self._actions = copy.deepcopy(envs.action_space)
        self._actions.seed(seed)
        self._compare("reset", envs.reset(seed=[*range(seed, seed + self._pairs)] * 2)[0])

    @property
    def agree(self) -> bool:
        """Tell whether no pair has parted."""
        return not self.mismatch and not self.reasons

    def step(self) -> None:
        """Step all envs, if no pair has parted."""
        if not self.agree:
            return
        actions = [self._actions.sample() for _ in range(self._pairs)]
        try:
            *returned, infos = self._envs.step([*actions, *copy.deepcopy(actions)])
        except EnvsFailedError as failed:
            lost = [error for error in failed.failures.values() if isinstance(error, WorkerLostError)]
            if len(lost) < len(failed.failures):
                raise
            self.reasons = [first_line(error) for error in lost]
            return
        told = [info["multienv"] for info in infos if info and "multienv" in info]
        self.reasons = [one["reason"] for one in told if "reason" in one]
        if self.reasons:
            return
        for name, values in zip(("observations", "rewards", "terminated", "truncated"), returned, strict=True):
            self._compare(name, values)
        ends = [bool(over or cut) for over, cut in zip(returned[2], returned[3], strict=True)]
        self.ended += sum(ends[: self._pairs])

    def _compare(self, name: str, values: list[Any]) -> None:
        expected, seen = values[: self._pairs], values[self._pairs :]
        self.mismatch = self.mismatch or difference(seen, expected, name) or ""


def difference(seen: Any, expected: Any, name: str) -> str | None:
    """Tell where two values differ; ``None`` if they agree to the bit. The order of keys does not matter."""
    if isinstance(seen, Mapping) and isinstance(expected, Mapping) and seen.keys() == expected.keys():
        found = (difference(seen[key], expected[key], f"{name}[{key!r}]") for key in expected)
        return next((one for one in found if one is not None), None)
    if isinstance(seen, tuple | list) and type(seen) is type(expected) and len(seen) == len(expected):
        pairs = enumerate(zip(seen, expected, strict=True))
        found = (difference(one, other, f"{name}[{index}]") for index, (one, other) in pairs)
        return next((one for one in found if one is not None), None)
    if same(seen, expected):
        return None
    if _is_large(seen) and _is_large(expected):
        return f"{name}: {_difference_of_arrays(seen, expected)}"
    return f"{name}: {seen!r:.300} against {expected!r:.300}"


def _is_large(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.size > _FEW and not value.dtype.hasobject


def _difference_of_arrays(seen: Any, expected: Any) -> str:
    """Tell how many values of two arrays differ, and the first of them."""
    if seen.shape != expected.shape or seen.dtype != expected.dtype:
        return f"{seen.dtype} of shape {seen.shape} against {expected.dtype} of shape {expected.shape}"
    one, other = np.ascontiguousarray(seen).reshape(-1, 1), np.ascontiguousarray(expected).reshape(-1, 1)
    differ = (one.view(np.uint8) != other.view(np.uint8)).any(1)
    place = int(differ.argmax())
    index = list(map(int, np.unravel_index(place, seen.shape)))
    pair = f"{one[place, 0]!s:.50} against {other[place, 0]!s:.50}"
    return f"{differ.sum():,} of {differ.size:,} values differ, the first at {index}: {pair}"
