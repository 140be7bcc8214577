"""``multienv bench``: all contenders are measured, and one is recommended. How fast they are is no matter of tests."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from cli_command import ODD_ENVS, run, run_process

SHORT = ("--seconds", "0.05", "--repeats", "3")


def test_layouts_and_peers_are_measured_and_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "bench.png"
    done = run_process("bench", "CartPole-v1", "--envs", "3", *SHORT, "--json", "--plot", str(picture))
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
    for one in [*told["contenders"], told["limit"]]:
        assert len(one["rates"]) == 3
        assert min(one["rates"]) > 0
    best = next(one for one in told["contenders"] if one["name"] == told["recommended"])
    assert best["recommended_is_faster_by"] == 1.0
    assert told["time"]["env_steps"] == best["share_of_limit"]
    assert len(told["kill_to_next_step"]["seconds"]) == told["kill_to_next_step"]["exact"] == 5
    assert 'gymnasium.make("CartPole-v1")] * 3' in told["code"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(importlib.util.find_spec("stable_baselines3") is None, reason="Stable-Baselines3 is not installed")
def test_against_stable_baselines3() -> None:
    result = run_process("bench", "CartPole-v1", "--envs", "1", *SHORT, "--against", "sb3")
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("SubprocessVecEnv(env_fns)", "SubprocVecEnv(env_fns)", "DummyVecEnv(env_fns)"):
        assert name in result.stdout
    assert "From SIGKILL to the next step: " in result.stdout
    assert "AsyncVectorEnv" not in result.stdout


def test_what_cannot_be_measured_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, said in {
        (f"{ODD_ENVS}:segfaulting",): "does not work: The env's process was killed by SIGSEGV during step()",
        (f"{ODD_ENVS}:raising",): "does not work: The env raised kit.faults.FaultError: fault at reset 1",
        ("CartPole-v1", "--against", "baselines"): "choose some of gymnasium, sb3",
    }.items():
        result, _ = run("bench", *arguments)
        assert result.exit_code == 2
        assert said in result.stderr
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result, _ = run("bench", "CartPole-v1", "--plot", "x.png")
    assert (result.exit_code, '-e ".[plot]"' in result.stderr) == (2, True)
