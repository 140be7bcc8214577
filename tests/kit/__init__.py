"""What the tests share: misbehaving envs, spaces of all kinds, records of trajectories, leaks, the process table.

A name is imported when it is asked for: every worker of every test imports the module of its env, and no more.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

HOMES = {
    "counter": ["CounterEnv"],
    "envs": [
        *("FarewellEnv", "FaultyEnv", "ForkingEnv", "GlobalRandomEnv", "MemoryEnv", "NondeterministicEnv"),
        *("OnlyEnv", "PidEnv", "SameArrayEnv", "SlowEnv"),
    ],
    "faults": ["FailsNthTime", "Fault", "FaultError", "TwoArgumentError"],
    "forking": ["ForkingPolicy"],
    "kills": ["kill_worker"],
    "leaks": ["assert_nothing_left", "no_leaks", "own_name", "snapshot_resources"],
    "monitor": ["monitor_itself", "monitor_pid", "monitor_process"],
    "process_table": ["descendants", "is_alive"],
    "reports": ["reports_written"],
    "space_env": ["SpaceEnv", "TokenSpace", "digest_value", "example_spaces"],
    "trajectories": [
        *("Transition", "assert_no_splice", "assert_same_trajectory", "first_difference", "observations_equal"),
        "rollout",
    ],
}
__all__ = [name for names in HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in HOMES.items():
        if name in names:
            return getattr(import_module(f"kit.{module}"), name)
    raise AttributeError(f"the kit has no {name}")
