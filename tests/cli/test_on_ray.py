"""The commands on Ray, as they are typed. What is left of Ray afterwards fails the test."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_command import run, run_process

from kit import assert_nothing_left, monitor_itself, snapshot_resources

# A raylet that is told to end takes some seconds to take its helpers with it.
GONE_WITHIN = 10.0


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = snapshot_resources()
    yield
    gc.collect()
    assert_nothing_left(before, timeout=GONE_WITHIN, ignore=monitor_itself)


@pytest.fixture
def a_ray_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No other test joins what is started here; and workers of a busy machine get their share."""
    directory = tempfile.mkdtemp(prefix="ray-")  # short, because sockets lie in it
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in {"RAY_TMPDIR": directory, "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}.items():
        monkeypatch.setenv(name, value)
    yield
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.ci
@pytest.mark.usefixtures("a_ray_of_its_own")
def test_bench_measures_an_env_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my_envs.py"
    file.write_text("from kit import CounterEnv\ndef make(): return CounterEnv()\n")
    few = ("--num-envs", "2", "--seconds", "0.05", "--repeats", "3", "--against", "none", "--json")
    done = run_process("bench", f"{file}:make", "--backend", "ray", *few)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["left_out"] == {}
    assert {one["name"]: one["steps_per_second"] for one in told["contenders"]}["RayVectorEnv(env_fns)"] > 0


def test_what_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for arguments, said in {
        ("--backend", "ray"): 'need the extra "ray"',
        ("--address", "auto"): "--address needs --backend ray",
        ("--backend", "dask"): "--backend must be subprocess or ray",
    }.items():
        result, _ = run("bench", "CartPole-v1", *arguments)
        assert result.exit_code == 2
        assert said in result.stderr
