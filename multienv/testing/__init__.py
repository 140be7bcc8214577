"""A test kit for whatever runs environments in processes, and for the environments that run there.

- `check_env_recovers`: does your env survive the death of its process, bit for bit?
- `Fault`, `FaultyEnv` and the other misbehaving envs: fail in every manner, at every moment.
- `Killer`: kill processes at random or scripted moments.
- `rollout`, `assert_same_trajectory`, `assert_no_splice`: record and compare what envs do.
- `no_leaks`, `snapshot_resources`, `assert_nothing_left`: is anything left behind?

Nothing in here depends on the rest of multienv, save what `check_env_recovers` imports when it is called.
"""

from multienv.testing.chaos import Killer, KillManner, Strike
from multienv.testing.conformance import RecoverableEnv, RecoveryCheck, check_env_recovers, check_recovery
from multienv.testing.counter import CounterEnv
from multienv.testing.envs import (
    FaultyEnv,
    ForkingEnv,
    GlobalRandomEnv,
    LeakyEnv,
    NoisyEnv,
    NondeterministicEnv,
    PidEnv,
    SameArrayEnv,
    SlowEnv,
    StickyStateEnv,
    WallClockInfoEnv,
)
from multienv.testing.faults import FailsNthTime, Fault, FaultError, Manner, Moment, TwoArgumentError, misbehave
from multienv.testing.leaks import (
    Ignored,
    LeakError,
    Resources,
    assert_nothing_left,
    multiprocessing_helpers,
    no_leaks,
    snapshot_resources,
    what_is_left,
)
from multienv.testing.process_table import ProcessRecord, descendants, is_alive
from multienv.testing.space_env import SpaceEnv, TokenSpace, digest_value, example_spaces
from multienv.testing.trajectories import (
    Transition,
    assert_no_splice,
    assert_same_trajectory,
    counter_clock,
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
    "Ignored",
    "KillManner",
    "Killer",
    "LeakError",
    "LeakyEnv",
    "Manner",
    "Moment",
    "NoisyEnv",
    "NondeterministicEnv",
    "PidEnv",
    "ProcessRecord",
    "RecoverableEnv",
    "RecoveryCheck",
    "Resources",
    "SameArrayEnv",
    "SlowEnv",
    "SpaceEnv",
    "StickyStateEnv",
    "Strike",
    "TokenSpace",
    "Transition",
    "TwoArgumentError",
    "WallClockInfoEnv",
    "assert_no_splice",
    "assert_nothing_left",
    "assert_same_trajectory",
    "check_env_recovers",
    "check_recovery",
    "counter_clock",
    "descendants",
    "digest_value",
    "example_spaces",
    "first_difference",
    "is_alive",
    "misbehave",
    "multiprocessing_helpers",
    "no_leaks",
    "observations_equal",
    "rollout",
    "snapshot_resources",
    "what_is_left",
]
