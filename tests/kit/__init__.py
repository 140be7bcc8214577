"""What the tests share: misbehaving envs, spaces of all kinds, records of trajectories, leaks, the process table."""

from kit.counter import CounterEnv
from kit.envs import (
    FaultyEnv,
    ForkingEnv,
    GlobalRandomEnv,
    NondeterministicEnv,
    PidEnv,
    SameArrayEnv,
    SlowEnv,
    StickyStateEnv,
)
from kit.faults import FailsNthTime, Fault, FaultError, Moment, TwoArgumentError, misbehave
from kit.leaks import (
    LeakError,
    Resources,
    assert_nothing_left,
    new_names,
    no_leaks,
    snapshot_resources,
)
from kit.monitor import monitor_itself, monitor_pid, monitor_process
from kit.process_table import descendants, is_alive
from kit.space_env import SpaceEnv, TokenSpace, digest_value, example_spaces
from kit.trajectories import (
    Transition,
    assert_no_splice,
    assert_same_trajectory,
    first_difference,
    observations_equal,
    rollout,
)

__all__ = [
    "CounterEnv",
    "FailsNthTime",
    "Fault",
    "FaultError",
    "FaultyEnv",
    "ForkingEnv",
    "GlobalRandomEnv",
    "LeakError",
    "Moment",
    "NondeterministicEnv",
    "PidEnv",
    "Resources",
    "SameArrayEnv",
    "SlowEnv",
    "SpaceEnv",
    "StickyStateEnv",
    "TokenSpace",
    "Transition",
    "TwoArgumentError",
    "assert_no_splice",
    "assert_nothing_left",
    "assert_same_trajectory",
    "descendants",
    "digest_value",
    "example_spaces",
    "first_difference",
    "is_alive",
    "misbehave",
    "monitor_itself",
    "monitor_pid",
    "monitor_process",
    "new_names",
    "no_leaks",
    "observations_equal",
    "rollout",
    "snapshot_resources",
]
