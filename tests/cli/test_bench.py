"""``multienv bench``: all contenders are measured, and one is recommended. How fast they are is no matter of tests."""

from __future__ import annotations

import json

from cli_command import ODD_ENVS, run, run_process

SHORT = ("--seconds", "0.02", "--repeats", "2")


def test_layouts_and_those_of_gymnasium_are_measured() -> None:
    done = run_process("bench", "CartPole-v1", "--num-envs", "3", *SHORT, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    names = {(one["package"], one["name"]) for one in told["contenders"]}
    assert names >= {
        ("multienv", "SubprocessVectorEnv(env_fns)"),
        ("multienv", "SubprocessVectorEnv(env_fns, envs_per_worker=1)"),
        ("multienv", "SubprocessVectorEnv(env_fns, envs_per_worker=3)"),
        ("multienv", "SerialVectorEnv(env_fns)"),
        ("gymnasium", "AsyncVectorEnv(env_fns)"),
        ("gymnasium", "SyncVectorEnv(env_fns)"),
    }
    assert told["left_out"] == {}
    for one in told["contenders"]:
        assert len(one["rates"]) == 2
        assert min(one["rates"]) > 0
    best = next(one for one in told["contenders"] if one["name"] == told["recommended"])
    assert best["recommended_is_faster_by"] == 1.0
    limit = told["contenders"][-1]
    assert (limit["package"], limit["share_of_limit"]) == ("limit", 1.0)
    assert 'gymnasium.make("CartPole-v1")] * 3' in told["code"]


def test_what_cannot_be_measured_is_refused_in_one_line() -> None:
    for arguments, said in {
        (f"{ODD_ENVS}:segfaulting",): "does not work: The env's process was killed by SIGSEGV during step()",
        (f"{ODD_ENVS}:raising",): "does not work: The env raised kit.faults.FaultError: fault at reset 1",
    }.items():
        result, _ = run("bench", *arguments)
        assert result.exit_code == 2
        assert said in result.stderr
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
