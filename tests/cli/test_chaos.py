"""``multienv chaos``: kills for a while, and tells by its exit code whether anything differed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from typer.testing import CliRunner, Result

from kit import CounterEnv
from multienv.cli import app


class PidEnv(CounterEnv):
    """Shows its process: another one in the worker."""

    def _next_draw(self) -> float:
        return float(os.getpid())


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    made: dict[str, Any] = {"Counter-v0": CounterEnv, "Pid-v0": PidEnv}
    for name, entry_point in made.items():
        gymnasium.register(name, entry_point=entry_point)
    yield
    for name in made:
        del gymnasium.registry[name]


def chaos(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["chaos", "--reset-deadline", "0.5", *arguments], env={"COLUMNS": "120"})


def row(result: Result, name: str) -> str:
    (line,) = [line for line in result.output.splitlines() if f" {name} " in line]
    return line.split("│")[2].strip()


def test_a_deterministic_env(reports: Path) -> None:
    result = chaos("Counter-v0", "--kills", "12", "--num-envs", "3", "--snapshot-every", "5", "--pause", "0.03")
    assert result.exit_code == 0, result.output
    assert row(result, "mismatches") == "0"
    assert row(result, "episodes ended with a reason") == "0"
    assert int(row(result, "brought back by: snapshot")) > 0
    assert int(row(result, "brought back by: journal")) > 0
    before, _, after = row(result, "its descriptors").partition(" → ")
    assert int(after) <= int(before) + 2
    assert not list(reports.iterdir())  # they would push out those of real losses


def test_an_env_that_is_another_one_in_each_process_is_found_out() -> None:
    result = chaos("Pid-v0", "--kills", "20", "--minutes", "0.5")
    assert result.exit_code == 1, result.output
    assert row(result, "mismatches") != "0"


def test_an_env_that_cannot_be_made() -> None:
    result = chaos("Nonsense-v7")
    assert result.exit_code == 2
    assert "cannot be made" in result.output
    assert chaos("Counter-v0", "--env-kwargs", "{").exit_code == 2


def test_an_env_that_a_module_of_the_working_directory_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_envs.py").write_text(
        "from kit import CounterEnv\ndef make(horizon): return CounterEnv(horizon=horizon)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    arguments = ("--env-kwargs", '{"horizon": 7}', "--kills", "2")
    assert chaos("my_envs:make", *arguments).exit_code == 0
    assert chaos("my_envs:nothing").exit_code == 2


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "multienv.cli")
    with pytest.raises(SystemExit, match=r'pip install -e "\.\[cli\]" in a checkout'):
        import multienv.cli  # noqa: F401


def test_bench_recommends_a_way() -> None:
    result = CliRunner().invoke(
        app, ["bench", "Counter-v0", "--num-envs", "2", "--seconds", "0.1"], env={"COLUMNS": "120"}
    )
    assert result.exit_code == 0, result.output
    assert "envs_per_worker=2" in result.output
    assert "Fastest here: " in result.output
