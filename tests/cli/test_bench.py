"""``multienv bench``: all contenders are measured, and one is recommended. How fast they are is no matter of tests."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from pathlib import Path

import pytest
from cli_command import ODD_ENVS, run, run_process
from gymnasium.wrappers import Autoreset
from typer.testing import CliRunner

from kit import Fault, FaultyEnv
from multienv.cli import bench
from multienv.cli.commands import app
from multienv.cli.walking import RAISE, Walk

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
    assert not any(one["died"] for one in told["contenders"])
    for one in told["contenders"]:
        assert len(one["rates"]) == 2
        assert min(one["rates"]) > 0
    best = next(one for one in told["contenders"] if one["name"] == told["recommended"])
    assert best["recommended_is_faster_by"] == 1.0
    limit = told["contenders"][-1]
    assert (limit["package"], limit["share_of_limit"]) == ("limit", 1.0)
    assert 'gymnasium.make("CartPole-v1")] * 3' in told["code"]


def test_an_env_that_crashes_by_chance_is_measured_and_batches_that_it_ends_are_shown_as_dead() -> None:
    arguments = ("--seconds", "0.1", "--repeats", "2", "--num-envs", "3", "--env-kwargs", '{"every": 50}')
    done = run_process("bench", f"{ODD_ENVS}:Chancy", *arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    died = {one["name"]: one["died"] for one in told["contenders"] if one["package"] != "limit"}
    assert {name for name, how in died.items() if how} == {
        "SerialVectorEnv(env_fns)",
        "AsyncVectorEnv(env_fns)",
        "SyncVectorEnv(env_fns)",
    }
    assert died["SyncVectorEnv(env_fns)"] == "was killed by SIGSEGV"
    assert died["AsyncVectorEnv(env_fns)"] == "EOFError"
    assert told["recommended"].startswith("SubprocessVectorEnv(")
    assert all(len(one["rates"]) == 2 for one in told["contenders"] if not one["died"])


def test_an_env_that_hangs_by_chance_costs_a_row_seconds() -> None:
    """Each contender hangs in each turn: that takes a deadline of seconds, not a minute, and not for ever."""
    arguments = ("--num-envs", "2", "--env-kwargs", '{"every": 150, "hangs": true}', "--step-deadline", "0.3")
    began = time.monotonic()
    done = run_process("bench", f"{ODD_ENVS}:Chancy", "--seconds", "0.1", "--repeats", "1", *arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 80.0
    died = {one["name"]: one["died"] for one in json.loads(done.stdout)["contenders"] if one["package"] != "limit"}
    assert {name: how for name, how in died.items() if how} == {
        "SerialVectorEnv(env_fns)": "hung",
        "AsyncVectorEnv(env_fns)": "hung",
        "SyncVectorEnv(env_fns)": "hung",
    }


def test_without_a_deadline_of_the_user_one_is_found_by_the_slowest_step_that_was_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "_LEAST_DEADLINE", 0.2)
    monkeypatch.setattr(bench, "_TRIES", 2)
    quick = bench.Contender("multienv", "quick", lambda: lambda seconds: 1.0, options="")
    monkeypatch.setattr(bench, "_contenders", lambda *_: iter([quick]))
    env_fn = functools.partial(FaultyEnv, fault=Fault("hang", "step"))
    began = time.monotonic()
    limit, _ = bench.measure(env_fn, 1, Walk(slowest_step=0.03), step_deadline=None, seconds=0.1, repeats=1)
    assert limit.died == "hung"
    assert 2 * 0.3 < time.monotonic() - began < 20.0


def test_the_table_fits_a_terminal_of_80_columns_and_no_file_of_an_env_is_left(tmp_path: Path) -> None:
    arguments = ("--num-envs", "32", "--env-kwargs", json.dumps({"every": 0, "directory": str(tmp_path)}))
    result = CliRunner().invoke(app, ["bench", f"{ODD_ENVS}:Chancy", *SHORT, *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    _, _, table = result.stdout.partition(" cores\n")
    lines = table.partition("Recommended:")[0].splitlines()
    assert max(map(len, lines)) <= 80
    names = [line.split("  ")[0] for line in lines]
    assert {"SubprocessVectorEnv", "SubprocessVectorEnv(envs_per_worker=32)", "gymnasium's AsyncVectorEnv"} <= {*names}
    assert list(tmp_path.iterdir()) == []


def test_the_limit_of_an_env_that_crashes_by_chance_is_measured_between_two_crashes() -> None:
    with contextlib.ExitStack() as stack:
        env_fn = functools.partial(FaultyEnv, fault=Fault("segv", "step", at=50))
        batch = functools.partial(bench.BatchInWorker, lambda: Autoreset(env_fn()), 1)
        step_for = bench._build_in_workers([batch], stack, {"restart": RAISE, "reports": ""}, tries=6)
        assert step_for(0.05) > 0


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
