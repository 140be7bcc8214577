"""``multienv chaos``: kills for a while, and tells by its exit code whether anything differed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from cli_command import ODD_ENVS, run_process
from typer.testing import CliRunner, Result

import multienv
from kit import CounterEnv, NondeterministicEnv
from multienv.cli.commands import app


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    made: dict[str, Any] = {"Counter-v0": CounterEnv, "Chance-v0": NondeterministicEnv}
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


def counts(result: Result, of: str) -> dict[str, int]:
    """Return the numbers of the rows that begin so."""
    cells = [line.split("│")[1:3] for line in result.output.splitlines() if f"│ {of}: " in line]
    return {name.partition(": ")[2].strip(): int(number) for name, number in cells}


def test_a_deterministic_env(reports: Path) -> None:
    few = ("Counter-v0", "--kills", "8", "--num-envs", "3", "--pause", "0.03")
    result = chaos(*few)
    assert result.exit_code == 0, result.output
    # On a busy machine the kills may follow each other so soon that no episode ends, and no snapshot is taken.
    ends = r"(no end of an episode|1 end of an episode|\d+ ends of episodes)"
    assert re.search(rf"Counter-v0: \d+ steps and {ends} compared with", result.output)
    assert row(result, "mismatches") == "0"
    assert row(result, "episodes not recovered") == "0"
    lost, recovered = counts(result, "lost"), counts(result, "recovered by")
    assert lost["was killed by SIGKILL"] > 0
    assert recovered.keys() <= {"snapshot", "journal"}
    by_itself = counts(result, "lost by itself")  # a worker that a busy machine gave no core for half a second
    assert sum(recovered.values()) == sum(lost.values()) + sum(by_itself.values())
    assert counts(chaos(*few, "--no-snapshots"), "recovered by").keys() == {"journal"}
    assert not list(reports.iterdir())  # they would push out those of real losses


def test_it_is_said_if_no_episode_ended() -> None:
    result = chaos(f"{ODD_ENVS}:endless", "--kills", "2", "--num-envs", "1")
    assert result.exit_code == 0, result.output
    assert " steps and no end of an episode compared with " in " ".join(result.output.split())


def test_an_env_that_cannot_be_made() -> None:
    result = chaos("Counter-v0", "--env-kwargs", '{"nothing": 1}')
    assert result.exit_code == 2
    assert "unexpected keyword argument 'nothing'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_what_an_env_loses_by_itself_is_told_apart_from_the_kills(reports: Path) -> None:
    """Workers die by SIGSEGV either way."""
    arguments = ("--kills", "10", "--pause", "0.4", "--num-envs", "2", "--env-kwargs", '{"every": 40}')
    patient = ("--step-deadline", "5", "--reset-deadline", "5")
    result = chaos(f"{ODD_ENVS}:Chancy", *arguments, *patient, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["kills"] == 10
    assert sum(told["causes"].values()) <= 10
    assert sum(told["own_causes"].values()) == told["own_losses"] > 0
    assert {*told["own_causes"]} <= {"died: was killed by SIGSEGV", "in the undisturbed run"}
    assert told["mismatches"] == told["strayed"] == []


def test_an_env_that_crashes_in_its_first_step_by_chance_is_tried_again(tmp_path: Path) -> None:
    arguments = ("--kills", "1", "--num-envs", "1", "--env-kwargs", json.dumps({"directory": str(tmp_path)}))
    result = chaos(f"{ODD_ENVS}:crashes_once", *arguments)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "once").exists()


def test_an_env_that_is_not_deterministic_is_found_out_before_recovery_is_blamed() -> None:
    result = chaos("Chance-v0", "--kills", "20", "--num-envs", "1")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Chance-v0 is not deterministic: without any kill, ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_what_differs_silently_after_a_kill_is_told_and_nothing_else_is_on_stdout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That a process was forked shows in the very step that it was killed in, which nothing can be held against."""
    monkeypatch.setattr("multienv.testing.recovery_check.ENOUGH_MISMATCHES", 1)
    result = chaos(f"{ODD_ENVS}:Forked", "--kills", "60", "--num-envs", "1", "--json")
    assert result.exit_code == 1, result.output
    told = json.loads(result.stdout)
    assert told["mismatches"]
    assert told["undisturbed"] == ""
    assert told["methods"]["snapshot"] > 0
    assert sum(told["causes"].values()) == told["losses"] <= told["kills"]


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "multienv.cli.commands", raising=False)
    with pytest.raises(SystemExit, match=r'pip install "multienv-rl\[cli\]"'):
        import multienv.cli.commands  # noqa: F401


def test_without_the_extra_the_commands_are_listed_and_the_version_is_told() -> None:
    script = """if True:
        import sys
        for name in ("psutil", "rich", "typer"):
            sys.modules[name] = None
        from multienv.cli import app
        for argument in ("--version", "--help"):
            sys.argv[1:] = [argument]
            app()
    """
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    version, _, listed = told.partition("\n")
    assert version == multienv.__version__
    names = {command.callback.__name__ for command in app.registered_commands if command.callback}
    assert {line.split()[0] for line in listed.splitlines() if line.startswith("  ")} == {"run", *names}
    assert listed == run_process("--help").stdout == run_process().stdout


def test_every_command_has_help_with_an_example() -> None:
    for name in ("doctor", "chaos", "bench"):
        told = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "120"}).stdout
        assert f"multienv {name} CartPole-v1" in told
        assert "--json" in told
        assert " --envs" not in told
        assert (" --num-envs" in told) == (name != "doctor")


def test_the_name_of_an_env_is_no_emoji_code() -> None:
    result = chaos(f"{ODD_ENVS}:Ferry", "--kills", "1")
    assert result.exit_code == 0, result.output
    assert ":Ferry: " in " ".join(result.stdout.split())
