"""What the simulator has found in multienv: each run failed once, and is run again by default.

To add one, paste the literal that a failure prints, with a sentence that says what went wrong.
"""

from simulation.programs import Case
from simulation.simulation import CRASHED, KILLED, Fault

REGRESSIONS: dict[str, Case] = {
    # Worker and snapshot were lost together in the first episode. The construction had been forgotten when the first
    # snapshot stood, and no episode had ended yet: all envs of the worker were truncated.
    **{
        f"worker_and_snapshot_lost_in_the_first_episode_{face}": Case(
            face,
            "first episode",
            (("reset", 3), *(("step", number) for number in range(5)), ("call", 0.5), ("step", 5), ("step", 6)),
            (Fault(0, "request", 9, "executed"), Fault(0, "wake", 1, "skipped")),
        )
        for face in ("subprocess_env", "multi_env", "DISABLED", "NEXT_STEP", "SAME_STEP")
    },
    # After restore() the numbers of requests come again. A worker died in the step after it; what it was asked once more
    # in the next process was the step of the same number that had been lost before.
    "a_step_after_restore_is_asked_with_its_own_action": Case(
        "subprocess_env",
        "snapshot",
        (("reset", 0), ("step", 0), ("snapshot",), ("step", 1), ("restore",), ("step", 2), ("restore",), ("step", 3)),
        (Fault(0, "request", 3, "before"), Fault(0, "request", 4, "before"), Fault(0, "request", 5, "before")),
    ),
    # A worker had begun to write its first reply, and died. Its replacement got a copy of what lay there as "what the
    # caller saw last", though nothing had been seen: flags that the reply does not write came into the journal, and
    # no later replay could match it.
    "rows_that_nobody_saw_are_not_handed_to_the_next_process": Case(
        "subprocess_env",
        "journal",
        (("reset", 3), ("step", 0), ("save",), ("step", 2), ("load",), ("step", 3)),
        (Fault(0, "request", 1, "torn"),),
    ),
    # snapshot() found its process lost, and no descriptor was left for another one. A request that no call of the
    # caller's could complete stayed pending: snapshot(), step() and reset() refused, each for the sake of the others.
    "a_snapshot_whose_recovery_is_broken_off_leaves_nothing_pending": Case(
        "subprocess_env",
        "journal",
        (("reset", 3), ("step", 0), ("snapshot",), ("step", 1), ("restore",), ("step", 2)),
        (Fault(0, "ask", 1, "hang"), Fault(0, "launch", 2, "no descriptors")),
    ),
    # One replay was killed from outside, the next one crashed at the same request: that counted as two crashes.
    "a_replay_that_is_killed_and_then_crashes_is_tried_again": Case(
        "subprocess_env",
        "journal",
        (("reset", 7), ("step", 0), ("step", 1)),
        (
            Fault(0, "request", 2, "executed"),
            Fault(0, "replay", 1, "in the env", code=KILLED),
            Fault(0, "replay", 2, "in the env", code=CRASHED),
        ),
    ),
    # A call changed the env, and raised when it was run again in the replay for a replacement by plan. Nothing after it
    # told the two envs apart, so the new one was taken for the old one.
    "a_call_that_raises_in_a_replay_alone_makes_the_envs_different": Case(
        "subprocess_env",
        "starts",
        (("reset", 7), *(("step", number) for number in range(4)), ("call", 0.5), ("step", 4), ("step", 5)),
        (Fault(0, "replay", 6, "raises"),),
        eager=True,
        rare=757952,
    ),
    # Calls and attributes set were repeated in the new envs of a replacement by plan, and the process was killed from
    # outside meanwhile: the next one began without them.
    "what_was_set_survives_a_kill_while_it_is_repeated_in_new_envs": Case(
        "NEXT_STEP",
        "memory",
        (
            ("reset", 7),
            ("step", 0),
            ("call", 0.5),
            ("set", 0.25),
            *(("step", number) for number in range(1, 10)),
            ("reset", None),
            *(("step", number) for number in range(3)),
        ),
        (Fault(1, "request", 16, "interrupted after", times=4), Fault(1, "ask", 2, "before")),
        rare=161268,
    ),
}
