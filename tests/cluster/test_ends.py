"""How a trainer on a cluster ends, and what ends with it; and a reply that is lost after it was executed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterable

import pytest

from kit.trainer_process import Trainer, becomes_true

pytestmark = pytest.mark.ci

# Seconds: Ray's raylet looks for its head now and then.
GONE_WITHIN = 10.0


def test_nothing_is_left_of_a_local_ray_when_the_trainer_is_killed_while_an_env_hangs():
    with Trainer("cluster_trainers", "hang_on_a_local_ray") as trainer:
        trainer.expect("ready")
        trainer.signal(signal.SIGKILL)
        trainer.wait()
        # Two agents of Ray's wait for their head, some seconds as a rule, a minute if they were just starting.
        becomes_true(lambda: all("Agent" in command for command in trainer.family().values()), GONE_WITHIN)
        assert all("Agent" in command for command in trainer.family().values()), trainer.family()
        assert becomes_true(lambda: not end(trainer.family()))


def test_a_reply_lost_after_the_step_was_executed_loses_the_host_and_no_step(monkeypatch):
    """Ray throws the reply away: its own means to test what is built on it."""
    fault = {"CoreWorkerService.grpc_client.PushTask": {"num_failures": 3, "resp_failure_prob": 10}}
    monkeypatch.setenv("RAY_testing_rpc_failure", json.dumps(fault))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    told = run_trainer("lost_replies")
    assert told["losses"] >= 1, "no reply was lost"
    assert told["observations"] == list(range(1, 101))
    assert told["exact"] == told["losses"]


def test_a_head_that_dies_is_a_typed_error_and_the_trainer_lives_on():
    told = run_trainer("lost_head", ends=False)
    assert told["errors"] == ["ClusterError", "ClusterError"]
    assert "checkpoint" in told["message"]
    assert told["closed"] < 20


def end(pids: Iterable[int]) -> bool:
    """Kill these; tell whether there were any."""
    any_of_them = False
    for pid in pids:
        any_of_them = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return any_of_them


def run_trainer(function: str, *arguments: str, ends: bool = True) -> dict:
    """Return what a trainer tells; ``ends``: it then ends by itself, which Ray may not let it do without its head."""
    with Trainer("cluster_trainers", function, *arguments) as trainer:
        told = json.loads(trainer.expect("told", 110))
        if ends:
            assert trainer.wait(110) == 0, trainer.errors()[-3000:]
        becomes_true(lambda: not end(trainer.family()), GONE_WITHIN)  # agents of Ray's, that wait for their head
        return told
