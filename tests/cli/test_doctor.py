"""``multienv doctor``: what it says of envs with one fault each, and of one with none."""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from cli_command import ODD_ENVS, run, run_process
from typer.testing import Result

import multienv as package
from multienv import RestartPolicy
from multienv._engine.recovery import journal
from multienv.cli import checks, options

CHECKS = ["builds", "steps", "repeats", "begins anew", "outside", "forks", "replays", "leaks"]


@pytest.fixture(autouse=True)
def as_on_a_fast_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let walks end by their number of steps: on a busy machine fewer would fit into their time."""
    monkeypatch.setattr(checks, "_SECONDS", 60.0)
    monkeypatch.setattr(checks, "_ANEW_SECONDS", 60.0)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing wait before a restart, and a fifth of the steps show a memory across resets."""
    monkeypatch.setattr(checks, "RestartPolicy", partial(RestartPolicy, backoff=0.0))
    monkeypatch.setattr(checks, "_ANEW_STEPS", checks._ANEW_STEPS // 5)


@pytest.fixture
def in_short(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Leave out the check that takes a second and more; return the names of the others."""
    hurry(monkeypatch)
    left = [check for check in checks.CHECKS if check is not checks.begins_anew]
    monkeypatch.setattr(checks, "CHECKS", left)
    return [name for name in CHECKS if name != "begins anew"]


def examined(
    monkeypatch: pytest.MonkeyPatch, name: str, *chosen: Callable[..., Any], **arguments: Any
) -> tuple[Result, dict[str, Any], dict[str, dict[str, Any]]]:
    """The result of these checks alone, what the command prints as JSON, and the rows by name."""
    hurry(monkeypatch)
    monkeypatch.setattr(checks, "CHECKS", [checks.builds, checks.steps, *chosen])
    result, told = run("doctor", name, "--json", "--env-kwargs", json.dumps(arguments))
    return result, told, {row["name"]: row for row in told["checks"]}


def test_a_sound_env_is_recoverable_and_the_line_of_code_works() -> None:
    done, _ = run("doctor", "CartPole-v1", "--env-kwargs", '{"sutton_barto_reward": true}')
    assert done.exit_code == 0, done.output
    assert [line[2:14].strip() for line in done.stdout.splitlines() if line[:1] == "✓"] == CHECKS
    assert re.search(r"✓ forks +a killed worker is recovered exactly from its snapshot, in \d", done.stdout)
    assert re.search(r"✓ replays +a new process repeats 1\d\d requests exactly", done.stdout)
    assert not re.search(r" $", done.stdout, re.MULTILINE)
    assert re.search(
        r"✓ begins anew \d+ episodes of at most \d+ steps are the same, though \d of them begin", done.stdout
    )
    code = done.stdout.partition("Use\n")[2]
    lines = "\n".join(line.strip() for line in code.splitlines())
    assert "sutton_barto_reward=True" in lines
    assert re.search(r", deadlines=Deadlines\(step=[1-9]\d+\.0\)\)$", lines)  # at least 10 s, as it has not hung
    assert "RestartPolicy" not in lines
    names: dict[str, package.SubprocessVectorEnv] = {}
    exec(lines, names)
    names["envs"].close()


def test_an_env_with_a_thread_that_leaks_is_recoverable_by_replay(in_short: list[str]) -> None:
    result, told = run("doctor", f"{ODD_ENVS}:LeakyWithThread", "--json", "--env-kwargs", '{"horizon": 7}')
    assert result.exit_code == 0, result.output
    assert told["verdict"] == "recoverable"
    rows = {row["name"]: row for row in told["checks"]}
    assert list(rows) == in_short
    assert {name for name, row in rows.items() if row["verdict"] != "ok"} == {"outside", "forks", "leaks"}
    assert rows["forks"]["meaning"] == "no snapshot can be taken: threads"
    assert rows["leaks"]["meaning"] == "each episode leaks: 1 descriptors"
    assert "restart=RestartPolicy(recycle_after_steps=2_000)" in told["code"]  # about 300 descriptors
    assert "from odd_envs import LeakyWithThread" in told["code"]
    assert "lambda: LeakyWithThread(horizon=7)" in told["code"]


def test_an_env_whose_episodes_may_outgrow_a_replay_is_told_which_option_helps(
    in_short: list[str],
) -> None:
    result, told = run("doctor", f"{ODD_ENVS}:long_with_thread", "--json")
    assert result.exit_code == 0, result.output
    row = {row["name"]: row for row in told["checks"]}["replays"]
    assert row["verdict"] == "note"
    assert re.search(r"exactly, in .*; but an episode may take .*, and a replay at most 10 s", row["meaning"])
    assert re.search(r"RestartPolicy\(.*replay_limit=\d+\.0\)", told["code"])


def test_an_env_that_draws_from_elsewhere_is_not_known_to_be_recoverable(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    result, told = run("doctor", f"{ODD_ENVS}:Chance", "--json")
    assert result.exit_code == 1, result.output
    verdicts = {row["name"]: row["verdict"] for row in told["checks"]}
    notes = ["repeats", "begins anew", "forks", "replays"]
    assert [name for name, verdict in verdicts.items() if verdict != "ok"] == notes
    assert told["verdict"] == "unknown"


@pytest.mark.usefixtures("in_short")
def test_an_env_that_is_another_one_after_a_fork_is_run_without_snapshots() -> None:
    result, told = run("doctor", f"{ODD_ENVS}:ForkedLate", "--json")
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in told["checks"]}
    assert {name for name, row in rows.items() if row["verdict"] != "ok"} == {"forks"}
    assert rows["forks"]["meaning"] == "after a recovery from a snapshot, step 181 differs silently"
    assert "restart=RestartPolicy(snapshots=False)" in told["code"]


@pytest.mark.parametrize(
    ("kind", "verdict", "meaning"),
    [
        ("good", "ok", r"frames of 4 × 6 × 3, the first in [^;]*, another in [^;]*"),
        ("list", "ok", r"frames of 4 × 6 × 3, .*"),
        ("black", "note", r"frames of 4 × 6 × 3, .*; all of one colour"),
        ("none", "note", r"render\(\) returned no frame, but array\(None, dtype=object\)"),
        ("raises", "note", r"no frame\. .*RuntimeError: no OpenGL context"),
        ("aborts", "note", r"not known: .*killed by SIGABRT.*"),
    ],
)
def test_rendering_is_tried_in_a_worker(monkeypatch: pytest.MonkeyPatch, kind: str, verdict: str, meaning: str) -> None:
    monkeypatch.setattr(checks, "CHECKS", [checks.steps, checks.renders])
    _, told = run("doctor", f"{ODD_ENVS}:Frames", "--json", "--env-kwargs", f'{{"kind": "{kind}"}}')
    row = told["checks"][-1]
    assert (row["name"], row["verdict"]) == ("renders", verdict)
    assert re.fullmatch(meaning, row["meaning"]), row
    assert ("no OpenGL context" in row["detail"]) == (kind == "raises")


@pytest.mark.parametrize("mode", ["human", "ansi"])
def test_nothing_is_said_of_rendering_where_no_frames_are_made(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(checks, "CHECKS", [checks.steps, checks.renders])
    _, told = run("doctor", f"{ODD_ENVS}:Frames", "--json", "--env-kwargs", f'{{"render_mode": "{mode}"}}')
    assert [row["name"] for row in told["checks"]] == ["steps"]


@pytest.mark.parametrize(
    ("env", "check", "meaning", "detail"),
    [
        ("unpicklable", "builds", "cannot pickle '_thread.lock' object", ""),
        ("no_env", "builds", "which is not a gymnasium.Env", ""),
        ("raising", "steps", "fault at reset 1", "misbehave"),
        ("segfaulting", "steps", "was killed by SIGSEGV during step() after 2 steps", "Segmentation fault"),
        ("hanging", "steps", "did not answer within its deadline of 0.8 s", "_hang_in_c"),
    ],
)
def test_a_broken_env_is_named_broken_by_the_check_that_it_fails(
    reports: Path, env: str, check: str, meaning: str, detail: str
) -> None:
    result, told = run("doctor", f"{ODD_ENVS}:{env}", "--json", "--step-deadline", "0.8")
    assert result.exit_code == 2, result.output
    assert told["verdict"] == "broken"
    row = told["checks"][-1]
    assert (row["name"], row["verdict"]) == (check, "broken")
    assert meaning in row["meaning"]
    assert detail in row["detail"]
    assert not re.search(r"multienv/_engine/(worker|processes)/|<string>", row["detail"])
    written = sorted(reports.glob("*.json"), key=lambda path: path.stat().st_mtime)
    assert bool(written) == (env in ("segfaulting", "hanging"))
    for report in written[-1:]:  # it is tried several times
        assert f"multienv replay {report} --env {ODD_ENVS}:{env}" in row["advice"]


def test_an_env_that_crashes_now_and_then_is_examined_to_the_end(in_short: list[str]) -> None:
    result, told = run("doctor", f"{ODD_ENVS}:crashes_late", "--json")
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in told["checks"]}
    assert list(rows) == [*in_short, "snapshots"]
    assert rows["replays"]["verdict"] == "ok"
    assert rows["leaks"]["meaning"].startswith("not known: The env's process was killed by SIGSEGV")
    assert "multienv replay " in rows["leaks"]["advice"]


def doomed(directory: Path, *options: str, **arguments: Any) -> dict[str, Any]:
    """What the doctor says of an env whose own faults are counted there; builds 1 to 3 are before the check forks."""
    arguments = {"directory": str(directory), **arguments}
    result, told = run("doctor", f"{ODD_ENVS}:Doomed", "--json", *options, "--env-kwargs", json.dumps(arguments))
    assert result.exit_code == (0 if told["verdict"] == "recoverable" else 1), result.output
    return {**told, "rows": {row["name"]: row for row in told["checks"]}}


@pytest.mark.usefixtures("in_short")
def test_an_env_whose_workers_are_lost_again_and_again_ends_its_checks_and_not_the_examination(tmp_path: Path) -> None:
    told = doomed(tmp_path, "--step-deadline", "0.3", first=4, hangs=True)
    for name in ("forks", "replays"):
        assert told["rows"][name]["meaning"].startswith("not known: The env's process ")
    assert told["rows"]["leaks"]["meaning"].startswith("not known: The env's process ")
    assert (told["own_faults"]["hung"] > 6, told["own_faults"]["crashed"] > 6) == (True, False)
    deadlines = r"deadlines=Deadlines\(step=\d+\.0, reset=\d+\.0\), "  # ten times the slowest of a busy machine
    assert re.search(rf"\* 8, {deadlines}envs_per_worker=1\)", told["code"])
    assert not any("np_random" in row["advice"] for row in told["checks"])


@pytest.mark.parametrize(
    ("first", "times"),
    [(3, 1), pytest.param(4, 2, marks=pytest.mark.ci)],
    ids=["in the check compares", "in the check forks"],
)
@pytest.mark.usefixtures("in_short")
def test_a_check_that_the_env_itself_spoils_by_chance_is_tried_once_more(
    tmp_path: Path, first: int, times: int
) -> None:
    told = doomed(tmp_path, first=first, times=times)
    assert [row["verdict"] for row in told["checks"]] == ["ok"] * len(told["checks"])
    assert told["own_faults"] == {"crashed": times, "hung": 0}
    assert "workers take a snapshot every" in told["rows"]["snapshots"]["meaning"]


@pytest.mark.usefixtures("in_short")
def test_stack_of_a_hang_that_no_check_shows_is_printed_in_the_end(tmp_path: Path) -> None:
    arguments = json.dumps({"directory": str(tmp_path), "first": 3, "times": 1, "hangs": True})
    result, _ = run("doctor", f"{ODD_ENVS}:Doomed", "--step-deadline", "2", "--env-kwargs", arguments)
    _, _, conclusion = result.stdout.partition("The env itself hung once during the examination")
    line = 1 + ODD_ENVS.read_text().splitlines().index("                time.sleep(60)")
    assert f'odd_envs.py", line {line} in step' in conclusion


@pytest.mark.usefixtures("in_short")
def test_how_often_workers_take_snapshots_is_told_if_the_env_itself_crashes(tmp_path: Path) -> None:
    """A fork takes as long as hundreds of steps, and dozens of a busy machine."""
    told = doomed(tmp_path, first=3, times=1, fork_seconds=0.2)
    means = told["rows"]["snapshots"]["meaning"]
    found = re.fullmatch(
        r"each takes ([\d,.]+) ms\. A crash or hang comes about once in ([\d,]+) steps: after the first one, workers take a "
        r"snapshot every ([\d,]+), which is best",
        means,
    )
    assert found is not None, means
    cost, faults, every = (float(one.replace(",", "")) for one in found.groups())
    assert cost >= 200
    assert faults > 50
    assert every > 10
    assert "RestartPolicy" not in told["code"]


def test_the_conclusion_says_that_the_env_itself_crashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHECKS", [checks.builds, checks.steps, checks.repeats, checks.replays])
    for first, said in {
        3: r"The env itself crashed once during the examination; each loss is recovered, and costs time\.\n"
        r"((    .*)?\n)+Recoverable: ",
        4: r"The env itself crashed \d+ times during the examination; each loss costs time, and may end an episode\.\n"
        r"Not known to be recoverable: expect that a lost worker ends its episode\.\n",
    }.items():
        (tmp_path / str(first)).mkdir()
        arguments = {"directory": str(tmp_path / str(first)), "first": first, "times": 1 if first == 3 else 1000}
        result, _ = run("doctor", f"{ODD_ENVS}:Doomed", "--env-kwargs", json.dumps(arguments))
        assert re.search(said, result.stdout)


def test_an_env_that_crashes_by_chance_is_examined_with_fewer_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"directory": str(tmp_path), "first": 2, "times": 2}
    _, told, rows = examined(monkeypatch, f"{ODD_ENVS}:Doomed", checks.repeats, **arguments)
    assert rows["steps"]["verdict"] == "note"
    assert rows["steps"]["meaning"].startswith("50 random steps of ")  # of 200, and of 100
    assert rows["steps"]["meaning"].endswith("; it crashed twice by itself, each time in step 51")
    assert "multienv replay " in rows["steps"]["advice"]
    assert rows["repeats"]["meaning"] == "the same seed gives the same 50 steps in another process"
    assert told["own_faults"] == {"crashed": 2, "hung": 0}


def test_an_env_that_crashes_in_the_same_step_each_time_is_not_called_recoverable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, told, rows = examined(monkeypatch, f"{ODD_ENVS}:doomed_in_step_20", checks.replays)
    assert rows["steps"]["verdict"] == "truncates"
    assert rows["steps"]["meaning"].startswith("12 random steps of ")
    assert rows["steps"]["meaning"].endswith(
        "it crashed 4 times by itself, each time in step 20: its episode is truncated there"
    )
    assert "Segmentation fault" in rows["steps"]["detail"]
    assert (result.exit_code, told["verdict"]) == (1, "truncates")


# --- memory, chance, and what cannot be compared ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("BipedalWalker-v3", {}, id="BipedalWalker", marks=pytest.mark.ci),
        pytest.param(f"{ODD_ENVS}:Remembering", {"shows_after": 200}, id="shown late"),
    ],
)
def test_an_env_that_carries_memory_across_resets_is_told_of(
    monkeypatch: pytest.MonkeyPatch, name: str, arguments: dict[str, Any]
) -> None:
    result, told, rows = examined(monkeypatch, name, checks.repeats, checks.begins_anew, checks.forks, **arguments)
    assert rows["repeats"]["verdict"] == "ok"
    row = rows["begins anew"]
    assert row["verdict"] == "note"
    assert re.fullmatch(
        r"the env carries memory across resets: \d+ episodes of at most \d+ steps differ if some of them begin in a new "
        r"process",
        row["meaning"],
    )
    assert 'RestartPolicy(accept="exact")' in row["advice"]
    assert (result.exit_code, told["verdict"]) == (0, "recoverable")  # from its snapshot


def test_a_memory_makes_replays_alone_no_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{ODD_ENVS}:normalized"
    result, told, rows = examined(monkeypatch, name, checks.repeats, checks.begins_anew, checks.replays)
    assert rows["replays"]["verdict"] == "truncates"
    assert re.fullmatch(
        r"a new process repeats \d+ requests exactly, in .*; but from about step [1-9][0,]* of a worker on it begins at "
        r"a reset, and the env carries memory across resets",
        rows["replays"]["meaning"],
    )
    assert (result.exit_code, told["verdict"]) == (1, "truncates")
    result, _ = run("doctor", name)
    assert re.search(
        r"\nTruncates, but not early: the first [1-9][0,]* steps or so of a worker are recovered", result.stdout
    )


def test_an_env_that_is_too_slow_for_several_episodes_is_not_known_to_begin_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "_ANEW_SECONDS", 0.0)
    _, _, rows = examined(monkeypatch, "CartPole-v1", checks.begins_anew)
    assert rows["begins anew"]["verdict"] == "note"
    assert rows["begins anew"]["meaning"] == "not known: only 0 episodes of at most 20 steps fit into 0.0 s"


def test_a_memory_that_only_the_end_of_an_episode_changes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, rows = examined(monkeypatch, f"{ODD_ENVS}:Curriculum", checks.begins_anew)
    assert rows["begins anew"]["meaning"].startswith("the env carries memory across resets: ")


def test_an_env_of_which_no_episode_ended_is_not_known_to_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHECKS", [checks.builds, checks.steps, checks.begins_anew, checks.forks])
    result, _ = run("doctor", f"{ODD_ENVS}:endless")
    words = " ".join(result.stdout.split())
    assert result.exit_code == 0
    assert re.search(
        r"! begins anew \d+ episodes, each cut off after at most \d+ steps, are the same, though \d+ of them begin in a "
        r"new process; what an end of an episode changes was not seen",
        words,
    )
    assert "Recoverable, if the env begins anew at each reset, which is not known: your training loop" in words


def test_episodes_that_the_env_itself_cuts_short_by_chance_are_walked_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_ANEW_LEAST", 9)  # its crash comes in its sixth episode
    arguments = {"directory": str(tmp_path), "first": 4, "times": 2}
    _, told, rows = examined(monkeypatch, f"{ODD_ENVS}:Doomed", checks.repeats, checks.begins_anew, **arguments)
    assert rows["begins anew"]["verdict"] == "ok"
    assert told["own_faults"]["crashed"] == 2


@pytest.mark.parametrize(
    ("first", "least", "meaning"),  # builds 1 to 3 are those of the other checks
    [
        (5, 4, r"not known: The env's process was killed by SIGABRT .*"),
        (4, 9, r"not known: only 5 episodes of at most \d+ steps before the env itself crashed or hung"),
    ],
)
def test_of_an_env_that_crashes_by_chance_a_check_says_so_and_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, least: int, meaning: str
) -> None:
    monkeypatch.setattr(checks, "_ANEW_LEAST", least)
    monkeypatch.setattr(checks, "_SECOND_TRIES_UNTIL", 0.0)
    arguments = {"directory": str(tmp_path), "first": first}
    _, told, rows = examined(monkeypatch, f"{ODD_ENVS}:Doomed", checks.repeats, checks.begins_anew, **arguments)
    row = rows["begins anew"]
    assert re.fullmatch(meaning, row["meaning"])
    assert row["verdict"] == "note"
    assert row["advice"] == "That may be chance: run the doctor again."
    assert told["own_faults"]["crashed"] >= 1


def test_an_env_that_draws_from_the_generators_of_the_process_gets_a_worker_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"{ODD_ENVS}:from_process"
    result, told, rows = examined(monkeypatch, name, checks.compares, checks.repeats, checks.draws, checks.replays)
    assert result.exit_code == 0, result.output
    assert list(rows) == ["builds", "steps", "repeats", "draws", "replays"]
    assert rows["draws"]["verdict"] == "note"
    assert rows["draws"]["meaning"].startswith(
        "it draws from random and numpy.random, which the envs of a worker share"
    )
    assert "envs_per_worker=1" in told["code"]


def test_an_env_whose_observations_cannot_be_compared_is_told_before_anything_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = (checks.compares, checks.repeats, checks.begins_anew, checks.forks, checks.replays)
    result, told, rows = examined(monkeypatch, f"{ODD_ENVS}:Incomparable", *chosen)
    assert list(rows) == ["builds", "steps", "compares", "repeats", "begins anew", "forks", "replays"]
    assert rows["compares"]["verdict"] == "truncates"
    assert rows["compares"]["meaning"].startswith("it returns values of type Token, which cannot be compared")
    assert "dataclasses" in rows["compares"]["advice"]
    assert rows["repeats"]["meaning"].startswith("the same seed gives the same rewards and flags in 200 steps")
    assert rows["begins anew"]["meaning"] == "not known: see the line compares"
    assert rows["replays"]["verdict"] == "truncates"
    assert not any("np_random" in rows[name]["advice"] for name in ("forks", "replays"))
    assert (result.exit_code, told["verdict"]) == (1, "truncates")


def test_of_an_env_that_does_not_repeat_itself_nothing_is_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [checks.builds, checks.steps, checks.compares, checks.repeats, checks.begins_anew, checks.forks]
    monkeypatch.setattr(checks, "CHECKS", [*chosen, checks.replays])
    result, _ = run("doctor", f"{ODD_ENVS}:Biased")
    assert result.exit_code == 1
    words = " ".join(result.stdout.split())
    assert "! repeats two processes with the same seed differ at reset 0" in words
    assert "! begins anew not known: the env does not repeat itself" in words
    assert "! forks not known: the env does not repeat itself" in words
    assert "! replays not known: the env does not repeat itself" in words
    assert "Not known to be recoverable: expect that a lost worker ends its episode." in words
    assert "exact" not in words
    assert "Recoverable" not in words


@pytest.mark.parametrize(
    ("at", "meaning"), [(11, "a new process does not repeat it: "), (190, "after a replay, step ")]
)
def test_an_env_that_differs_now_and_then_is_not_called_recoverable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, meaning: str
) -> None:
    """Before the loss, which the replay shows; after it, where the doctor names both causes."""
    arguments = {"directory": str(tmp_path), "first": 4, "at": at}
    result, told, rows = examined(monkeypatch, f"{ODD_ENVS}:Wavering", checks.repeats, checks.replays, **arguments)
    assert rows["repeats"]["verdict"] == "ok"
    assert rows["replays"]["meaning"].startswith(meaning)
    assert ("Or does it not repeat itself? Run `multienv chaos`" in rows["replays"]["advice"]) == (at > 170)
    assert (result.exit_code, told["verdict"]) == (1, "truncates")


def test_a_difference_before_the_kill_is_not_laid_to_the_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The struck env and its replay agree, and differ from the walk that they are compared with."""
    arguments = {"directory": str(tmp_path), "first": 4}
    result, told, rows = examined(monkeypatch, f"{ODD_ENVS}:Moody", checks.repeats, checks.replays, **arguments)
    assert rows["repeats"]["verdict"] == "ok"
    assert rows["replays"]["verdict"] == "note"
    meaning = "not known: step 11 differs before the worker is killed: the env does not repeat itself"
    assert rows["replays"]["meaning"] == meaning
    assert (result.exit_code, told["verdict"]) == (1, "unknown")


@pytest.mark.parametrize(
    ("kind", "meaning"),
    [
        ("large", r"is not within the observation space: Box\(.*; its values of shape \(4,\) are from .* to 1e\+09"),
        ("NaN", r"is not within the observation space: Box\(.*; its values of shape \(4,\) are partly NaN"),
        ("dtype", r"was expecting numpy array dtype to be float32, actual type: float64: .*"),
        ("shape", r"is not within the observation space: Box\(.*; its values of shape \(3,\) are .*"),
    ],
)
def test_an_observation_that_is_not_in_its_space_is_told_of(
    monkeypatch: pytest.MonkeyPatch, kind: str, meaning: str
) -> None:
    _, _, rows = examined(monkeypatch, f"{ODD_ENVS}:Misfit", checks.compares, checks.spaces, kind=kind)
    assert rows["spaces"]["verdict"] == "note"
    assert re.fullmatch(f"the observation of step 4 {meaning}", rows["spaces"]["meaning"])
    assert "spaces" not in examined(monkeypatch, f"{ODD_ENVS}:endless", checks.compares, checks.spaces)[2]


def test_on_a_busy_machine_times_are_said_to_say_little_and_nothing_follows_from_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    monkeypatch.setattr(checks, "CHECKS", [checks.builds, checks.steps, checks.replays])
    arguments = json.dumps({"directory": str(tmp_path), "first": 2, "times": 1, "hangs": True})
    result, told = run("doctor", f"{ODD_ENVS}:Doomed", "--json", "--step-deadline", "1", "--env-kwargs", arguments)
    assert "This machine is busy (load 1000): do not trust these figures.\n" in result.stderr
    assert told["own_faults"]["hung"] == 1
    assert re.search(
        r"deadlines=Deadlines\(step=[\d.]+, reset=", told["code"]
    )  # it has hung: a long time is better than none
    _, told = run("doctor", f"{ODD_ENVS}:long_with_thread", "--json")
    assert 'deadlines=Deadlines(step="auto")' in told["code"]
    assert "replay_limit" not in told["code"]


def test_an_env_that_needs_arguments_is_told_how_to_give_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needing.py").write_text(
        "import gymnasium\nfrom kit import CounterEnv\n"
        "class Needing(CounterEnv):\n    def __init__(self, size): super().__init__(horizon=size + 1)\n"
        "gymnasium.register('Needing-v0', entry_point=Needing)\n"
        "def of_text(text): return CounterEnv(horizon=int(text.strip()))\n"
    )
    advice = """Give arguments for the env by --env-kwargs, such as --env-kwargs '{"size": 4}'."""
    for command in ("doctor", "bench"):
        result, _ = run(command, f"{ODD_ENVS}:needs")
        assert result.exit_code == 2
        assert result.stderr.endswith(f", which needs the arguments size, color. {advice}\n")
    registered = f"{tmp_path}/needing.py:Needing-v0"
    _, _, rows = examined(monkeypatch, registered)
    assert "missing 1 required positional argument: 'size'" in rows["builds"]["meaning"]
    assert rows["builds"]["advice"] == advice
    result, _ = run("chaos", f"{tmp_path}/needing.py:of_text")
    assert result.stderr.endswith(f" Its argument is 0, the index of the env. {advice}\n")
    assert examined(monkeypatch, registered, size=4)[1]["verdict"] != "broken"
    del gymnasium.registry["Needing-v0"]


def test_a_replay_from_a_reset_is_not_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "AFFORDABLE", 0.0)  # so that it does not begin with the construction
    result, told, rows = examined(monkeypatch, f"{ODD_ENVS}:slow", checks.repeats, checks.replays)
    assert rows["replays"]["verdict"] == "ok"
    assert re.fullmatch(
        r"a new process repeats \d+ requests from a reset, all equal, in [^;]*", rows["replays"]["meaning"]
    )
    assert (result.exit_code, told["verdict"]) == (0, "recoverable")


def test_an_env_that_leaks_memory_is_told_a_limit_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHECKS", [checks.builds, checks.steps, checks.leaks])
    _, told = run("doctor", f"{ODD_ENVS}:Hoarder", "--json")
    row = told["checks"][-1]
    assert re.fullmatch(r"each episode leaks: 1\.\d MB memory", row["meaning"])
    assert row["advice"].startswith("RestartPolicy(max_rss=512 * 2**20) replaces the process in time;")
    assert row["advice"].endswith("max_rss counts a worker: all its envs together.")
    assert "restart=RestartPolicy(max_rss=512 * 2**20)" in told["code"]
    assert checks._max_rss(300 * 2**20) == "max_rss=1216 * 2**20"  # of the next larger 64 MiB
    assert checks._recycle_after_steps(1e-9) == "recycle_after_steps=100_000"
    assert checks._recycle_after_steps(40.0) == "recycle_after_steps=100"


def test_what_an_env_prints_does_not_flood_the_terminal_but_for_its_last_words() -> None:
    arguments = ("doctor", f"{ODD_ENVS}:Loud", "--env-kwargs", '{"horizon": 30}')
    quiet, loud = run_process(*arguments), run_process(*arguments, "--verbose")
    assert (quiet.returncode, quiet.stderr) == (2, "")
    row, _, kept = quiet.stdout.partition("The env printed ")
    printed = [line.strip() for line in row.splitlines() if re.fullmatch(r" +(out|err) \d+", line)]
    assert printed == [f"err {step}" for step in range(10)]
    last = [line.strip() for line in kept.splitlines() if re.fullmatch(r" +(out|err) \d+", line)]
    assert len(last) == 5
    assert "err 9" in last  # stderr takes a way of its own: lines of stdout may come before it, or after
    assert "--verbose shows all of it" in kept
    assert "The env printed" not in loud.stdout
    # Two processes write there: a line of one may lie within a line of the other.
    assert all(printed in loud.stderr for printed in ("out 0", "err 0", "err 9"))
    assert "out 0" not in loud.stdout


def test_a_warning_that_each_process_prints_is_shown_once() -> None:
    with tempfile.TemporaryFile() as output:
        work = options.Work(options.plain_console(file=io.StringIO()).status(""), output)
        for process in range(5):
            os.write(output.fileno(), f"x.py:5: UserWarning: old\n  warn(text)\nready {process}\n".encode())
        work.finish()
    assert work.printed.splitlines()[1:] == [
        f"    {line}" for line in ("ready 2", "ready 3", "x.py:5: UserWarning: old", "  warn(text)", "ready 4")
    ]


def test_what_is_no_env_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text("import os\nnonsense\n")
    (tmp_path / "json.py").write_text("def make(): pass\n")
    (tmp_path / "training.py").write_text(
        "from kit import CounterEnv\nfrom multienv import SubprocessEnv\n"
        "class Mine(CounterEnv):\n    pass\nSubprocessEnv(Mine).initialize()\n"
    )
    for name, said in {
        "Cartpole-v1": "Cartpole-v1: no env with this id is registered. Did you mean CartPole-v1?",
        "no_such_module:make": "No module named 'no_such_module'",
        f"{tmp_path}/none.py:make": f"the file {tmp_path}/none.py does not exist",
        f"{tmp_path}/faulty.py:make": f"NameError: name 'nonsense' is not defined ({tmp_path}/faulty.py, line 2)",
        f"{tmp_path}/json.py:make": "another module has the name json; rename the file",
        f"{tmp_path}/training.py:Mine": f"{tmp_path}/training.py, line 5. Put the code that makes envs below",
        f"{ODD_ENVS}": "also name the function or class that builds the env",
        f"{ODD_ENVS}:Chanse": f"Did you mean {ODD_ENVS}:Chance?",
    }.items():
        result, _ = run("doctor", name)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert said in result.stderr
        assert result.stderr.count("\n") == 1
    result, _ = run("doctor", "CartPole-v1", "--env-kwargs", "[1]")
    assert (result.exit_code, result.stderr) == (2, '--env-kwargs [1]: give a JSON object, such as {"size": 4}.\n')


def test_an_env_that_does_not_work_is_refused_with_the_last_lines_that_it_printed() -> None:
    refused = run_process("chaos", f"{ODD_ENVS}:Loud", "--env-kwargs", '{"horizon": 30}')
    assert refused.returncode == 2
    assert "Loud does not work: The env's process exited with code 7" in refused.stderr
    assert "    err 9" in refused.stderr.splitlines()[-5:]


def test_an_env_that_is_the_only_one_of_its_process_gets_a_worker_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _, told, rows = examined(monkeypatch, f"{ODD_ENVS}:OnlyOne", checks.shares, count_episodes=False)
    assert "only one emulator" in rows["shares"]["meaning"]
    assert "SubprocessVectorEnv([lambda: OnlyOne(count_episodes=False)] * 8, " in told["code"]
    assert "envs_per_worker=1" in told["code"]


def test_an_env_that_a_vector_env_does_not_take_is_recommended_as_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    _, told, rows = examined(monkeypatch, f"{ODD_ENVS}:TwoRewards", checks.shares)
    assert "as reward" in rows["shares"]["meaning"]
    assert "envs = MultiEnv(create_subprocess_envs([TwoRewards] * 8" in told["code"]
    assert "envs_per_worker" not in told["code"]


def test_nothing_is_said_of_sharing_where_two_get_along(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "shares" not in examined(monkeypatch, "CartPole-v1", checks.shares)[2]
