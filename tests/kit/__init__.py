"""What the tests share: misbehaving envs, spaces of all kinds, records of trajectories, leaks, the process table."""
# ruff: noqa: F401

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
from kit.faults import FailsNthTime, Fault, FaultError, TwoArgumentError
from kit.leaks import assert_nothing_left, new_names, no_leaks, snapshot_resources
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
