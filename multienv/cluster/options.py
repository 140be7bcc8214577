"""How envs run on a Ray cluster, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from multienv.config import Named, check_seconds, integer
from multienv.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RayOptions(Named):
    """Says how envs run on a Ray cluster. A *host* is an actor on a node, with its own monitor and workers.

    Args:
        address: As in ``ray.init``: ``"auto"``, ``"ray-head:6379"``. ``None``: the Ray that this process is connected
            to; else the Ray that ``RAY_ADDRESS`` names; else a local Ray, which is shut down again when the last env is
            closed.
        hosts: Number of hosts. ``None``: one on each node with a free CPU, but not more than workers.
        cpus_per_host: CPUs that a host reserves. ``None``: one for each of its workers, as far as its node has them
            free. The replacement of a lost host needs a node with as many free CPUs.
        placement: Order of the nodes. ``"spread"``: nodes with the most free CPUs first, in turn. ``"pack"``: as few
            nodes as possible. Or a list of node ids, taken in turn.
        runtime_env: As in ``ray.init``: packages and files for the hosts. They need multienv, gymnasium and everything
            that the envs import.
        suspect_after: Seconds of silence after which a host counts as lost. Its envs are then recovered on another
            node.
        placement_timeout: Seconds that a host may wait for a node with enough free CPUs.
    """

    address: str | None = None
    hosts: int | None = None
    cpus_per_host: int | None = None
    placement: str | Sequence[str] = "spread"
    runtime_env: Mapping[str, Any] | None = field(default=None, hash=False)
    suspect_after: float = 10.0
    placement_timeout: float = 60.0

    def __post_init__(self) -> None:
        """Raise UsageError for a value that makes no sense."""
        for name in ("suspect_after", "placement_timeout"):
            check_seconds(f"RayOptions.{name}", getattr(self, name))
            if getattr(self, name) is None:
                raise UsageError(f"RayOptions.{name} is None; give a number of seconds.")
        for name in ("hosts", "cpus_per_host"):
            value = getattr(self, name)
            if value is not None and (integer(value) or 0) < 1:
                raise UsageError(f"RayOptions.{name} is {value!r:.100}; give an integer of at least 1.")
        if isinstance(self.placement, str) and self.placement not in ("spread", "pack"):
            raise UsageError(f"RayOptions.placement is {self.placement!r:.100}; choose 'spread', 'pack' or node ids.")
