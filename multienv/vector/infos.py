"""The infos of a batch: merged into one dict as gymnasium merges them, or a dict for each env."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from gymnasium.vector import VectorEnv

from multienv._engine.wire.codecs import RowsReply
from multienv._engine.wire.infos import InfoMerger
from multienv.errors import InfosNotMergedError, catchable_as

Infos = dict[str, Any] | list[dict[str, Any]]
# For each worker slot and info of its envs; ``None``: they have none, or the worker is lost.
Parts = Sequence[Any]


class BatchInfos:
    """Puts the infos of several workers together.

    Args:
        env: Its ``_add_info`` merges. If it holds this object: a weak proxy. ``None``: gymnasium's merges.
        sizes: Number of envs of each worker.
        merges: Merge them into one dict; else a dict for each env.

    Attributes:
        sizes: As given.
    """

    def __init__(self, env: Any, sizes: Sequence[int], *, merges: bool) -> None:
        self._env = env = _Envs(sum(sizes)) if env is None else env
        self.sizes, self._merges = sizes, merges
        self._merger = InfoMerger(env.num_envs)
        self._merges_as_gymnasium = env.__class__._add_info is VectorEnv._add_info

    def quick(self, parts: Parts) -> Infos | None:
        """Return the infos if they are a list, or numbers of the same names, ``{}`` if there are none."""
        if not self._merges:
            return listed(parts, self.sizes)
        if not any(parts):
            return {}
        return self._merger.merged(parts) if self._merges_as_gymnasium else None

    def of(self, parts: Parts, merges: bool, *, resumed: bool = False) -> Infos:
        """Return the infos.

        Args:
            parts: Of each worker.
            merges: Merge them.
            resumed: Have the info of each env say that an earlier call was completed.
        """
        if not merges:
            return listed(parts, self.sizes, resumed=resumed)
        found = None if resumed else self.quick(parts)
        return self._merged(parts, resumed) if found is None else found

    def returned(self, name: str, make: Callable[[Any], Any], infos_of: Callable[[bool], Any]) -> Any:
        """Return what a call returns, given the infos; if they cannot be merged, the error that has it with a list.

        Args:
            name: Of the call, for messages.
            make: Returns what the call returns, given the infos.
            infos_of: Returns the infos, given whether to merge them.
        """
        try:
            infos = infos_of(self._merges)
        except Exception as error:
            found = catchable_as(
                InfosNotMergedError,
                error,
                f"{name}(): the infos of these envs cannot be merged as gymnasium merges them: {error}. The call is "
                "done and the episodes go on; `results` has its outcome, with a list of infos. Make the envs with "
                "merge_infos=False to have lists always.",
            )
            found.results, found.__cause__ = make(infos_of(False)), error.with_traceback(None)
            return found
        return make(infos)

    def _merged(self, parts: Parts, resumed: bool) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        add = self._env._add_info
        for index, info in _by_env(parts, self.sizes):
            if "final_obs" in info:  # in gymnasium's order: those of the episode that ended come first
                final = {key: info[key] for key in ("final_obs", "final_info") if key in info}
                infos = add(infos, final, index)
                info = {key: value for key, value in info.items() if key not in final}
            infos = add(infos, info, index)
        for index in range(sum(self.sizes) if resumed else 0):
            infos = add(infos, {"multienv": {"resumed": True}}, index)
        return infos


class _Envs(VectorEnv[Any, Any, Any]):
    """Has gymnasium's way to merge infos, which goes by the number of envs."""

    def __init__(self, count: int) -> None:
        self.num_envs, self.closed = count, True


def parts_of(replies: Sequence[RowsReply | None]) -> Parts:
    """Return the infos in some replies."""
    return [None if reply is None or reply.extras is None else reply.extras.infos for reply in replies]


def listed(parts: Parts, sizes: Sequence[int], *, resumed: bool = False) -> list[dict[str, Any]]:
    """Return a dict of its own for each env."""
    infos: list[dict[str, Any]] = [{} for _ in range(sum(sizes))]
    for index, info in _by_env(parts, sizes):
        infos[index].update(info)
    for info in infos if resumed else ():
        info["multienv"] = {**info.get("multienv", {}), "resumed": True}
    return infos


def _by_env(parts: Parts, sizes: Sequence[int]) -> Iterable[tuple[int, Any]]:
    """Yield index and info of each env that has one."""
    for start, part in zip(accumulate(sizes, initial=0), parts, strict=False):
        for slot, info in part or ():
            yield start + slot, info
