"""Step envs whose workers are struck beside the same envs undisturbed, and compare bit by bit."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
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
    """Steps two batches until they part: one that is struck, and an undisturbed one.

    Both get the same seed at the first reset, none later, and the same random actions. The undisturbed envs have
    processes of their own, too: an env that crashes by itself does not take this one with it.

    Args:
        struck: The envs that are struck; closed with the context.
        calm: As many of the same envs, undisturbed; closed, too.
        seed: Decides seeds and actions.

    Attributes:
        mismatch: What differed; ``""``: nothing.
        ended: Number of episodes that have ended by themselves.
        reasons: Why episodes were ended, or errors raised, because of a loss; also a loss of an undisturbed env.
    """

    def __init__(self, struck: Sequence[Any], calm: Sequence[Any], seed: int) -> None:
        self.mismatch = ""
        self.reasons: list[str] = []
        self.ended = 0
        with contextlib.ExitStack() as stack:
            self._calm: MultiEnv = stack.enter_context(MultiEnv(calm))
            self._struck: MultiEnv = stack.enter_context(MultiEnv(struck))
            self._actions = copy.deepcopy(self._calm.action_space)
            self._actions.seed(seed)
            self._compare("reset", self._struck.reset(seed=seed)[0], self._calm.reset(seed=seed)[0])
            self._stack = stack.pop_all()

    def __enter__(self) -> SideBySide:  # noqa: PYI034 - Self needs Python 3.11
        """Do nothing: the envs are built."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close both batches."""
        self._stack.close()

    @property
    def agree(self) -> bool:
        """Tell whether the two batches have not parted."""
        return not self.mismatch and not self.reasons

    def step(self) -> None:
        """Step both batches, if they have not parted."""
        if not self.agree:
            return
        actions = [self._actions.sample() for _ in self._calm.envs]
        try:
            seen = self._struck.step(copy.deepcopy(actions))
            expected = self._calm.step(actions)
            self.reasons = _reasons((*seen[4], *expected[4]))
            if self.reasons:
                return
            self.ended += sum(bool(over or cut) for over, cut in zip(expected[2], expected[3], strict=True))
        except EnvsFailedError as failed:
            lost = [error for error in failed.failures.values() if isinstance(error, WorkerLostError)]
            if len(lost) < len(failed.failures):
                raise
            self.reasons = [first_line(error) for error in lost]
            return
        names = ("observations", "rewards", "terminated", "truncated")
        for name, one, other in zip(names, seen, expected, strict=False):
            self._compare(name, one, other)

    def _compare(self, name: str, seen: Any, expected: Any) -> None:
        self.mismatch = self.mismatch or difference(seen, expected, name) or ""


def _reasons(infos: Any) -> list[str]:
    """Return why episodes were truncated by a loss, from the infos of a step."""
    told = [info.get("multienv", {}) for info in infos if info]
    return [one["reason"] for one in told if "reason" in one]


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
