"""``multienv top``: what the workers of a trainer are doing, seen from another process that the trainer does not know."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kit import CounterEnv
from kit.trainer_process import PATH, Trainer, becomes_true
from multienv import SubprocessEnv
from multienv.cli.commands import app
from multienv.cli.top import TrainerView

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what processes do is read from /proc")

# Only ends a wait that would go on for ever.
STUCK_AFTER = 30.0


def top(*arguments: object) -> Result:
    """In this process: it looks on from outside all the same."""
    return CliRunner().invoke(app, ["top", *map(str, arguments)], env={"COLUMNS": "100"})


def table(pid: int) -> Any:
    result = top(pid, "--json", "--every", "0.1")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def table_where(pid: int, holds: Callable[[Any], bool]) -> Any:
    """The first table of which this holds."""
    deadline = time.monotonic() + STUCK_AFTER
    while not holds(found := table(pid)):
        assert time.monotonic() < deadline, f"never seen: {json.dumps(found, indent=1)}"
    return found


@pytest.fixture
def trainer(tmp_path: Path, reports: Path) -> Iterator[Trainer]:
    with Trainer("top_trainers", "step_for_ever", tmp_path) as process:
        yield process


def test_no_worker_is_blamed_if_most_are_waited_for(tmp_path: Path, reports: Path) -> None:
    with Trainer("top_trainers", "recv_for_ever", tmp_path) as trainer:
        trainer.expect("ready")
        for env in range(4):
            (tmp_path / f"step-{env}").touch()
        table_where(trainer.pid, lambda seen: all(row["awaited"] >= 0.5 for row in seen["workers"]))
        assert "The trainer waits for most of its workers." in top(trainer.pid, "--once", "--every", "0.1").output


def test_the_worker_that_hangs_in_a_step_is_named_with_its_env(trainer: Trainer, tmp_path: Path) -> None:
    trainer.expect("ready")
    running = table_where(
        trainer.pid, lambda seen: all(row["env_seconds"] and row["step_seconds"] for row in seen["workers"])
    )
    assert [row["name"] for row in running["workers"]] == ["envs 0-1", "envs 2-3"]
    assert all(row["rss"] > 2**20 for row in running["workers"])
    for row in running["workers"]:
        assert row["steps_per_second"] == pytest.approx(2 / row["step_seconds"])
    assert running["losses"] == []

    (tmp_path / "step-3").touch()

    def hangs(seen: Any) -> bool:  # a worker that gets no core meanwhile looks the same, but for its env
        first, second = seen["workers"]
        all_the_time = first["at_least"] and second["at_least"] and seen["waited_for"]
        return all_the_time and (first["state"], second["env"]) == ("idle", "env 3")

    hung = table_where(trainer.pid, hangs)
    first, second = hung["workers"]
    assert hung["waited_for"] == second
    assert (second["state"], second["request"], second["env"]) == ("busy", "step", "env 3")
    assert (second["step_seconds"], second["steps_per_second"], second["busy"]) == (None, 0.0, 1.0)
    assert (first["state"], first["busy"], first["awaited"]) == ("idle", 0.0, 0.0)
    text = ""

    def is_told() -> bool:  # a look that falls into a moment in which the trainer sees to its clock finds it awake
        nonlocal text
        text = top(trainer.pid, "--once", "--every", "0.1").output
        return "The trainer waits for envs 2-3 (100% of the time)" in text

    assert becomes_true(is_told, STUCK_AFTER), text
    assert "busy: step of env 3" in text

    os.kill(second["pid"], signal.SIGSTOP)
    try:
        stopped = table_where(trainer.pid, lambda seen: seen["workers"][1]["state"] == "stopped")
        assert stopped["workers"][1]["env"] == "env 3"
    finally:
        os.kill(second["pid"], signal.SIGCONT)


def test_a_killed_worker_comes_back_with_its_loss_in_the_table(trainer: Trainer) -> None:
    trainer.expect("ready")
    (before,) = {row["pid"] for row in table(trainer.pid)["workers"] if row["name"] == "envs 0-1"}
    os.kill(before, signal.SIGKILL)

    def is_back(seen: Any) -> bool:
        pids = [row["pid"] for row in seen["workers"]]
        return len(seen["losses"]) == 1 and len(pids) == 2 and before not in pids

    after = table_where(trainer.pid, is_back)
    row = after["workers"][0]
    assert row["name"] == "envs 0-1"
    assert row["restarts"] >= 1
    assert after["workers"][1]["restarts"] == 0
    (loss,) = after["losses"]
    assert "was killed by SIGKILL" in loss["what"]
    assert loss["outcome"] == "exact"
    lines = top(trainer.pid, "--once", "--every", "0.1").output.splitlines()
    who = r"(envs 0–1|env [01])"  # a worker that died in an env's step is named with that env
    assert re.search(rf" ago  exact      process of {who} was killed by SIGKILL ", lines[3])
    head, *rows = lines[-3:]
    assert head.endswith("  RSS restarts")
    assert [len(row) for row in rows] == 2 * [len(head)], "nothing is cut off"
    narrow = (
        CliRunner().invoke(app, ["top", str(trainer.pid), "--once", "--every", "0.1"], env={"COLUMNS": "80"}).output
    )
    assert " per step in env steps/s " in narrow
    assert re.search(r" restarts *$", narrow, re.MULTILINE)
    again = table_where(trainer.pid, lambda seen: all(row["step_seconds"] for row in seen["workers"]))
    assert again["workers"][0]["pid"] == row["pid"]


def test_a_worker_that_is_replaced_while_they_are_watched_has_a_row(trainer: Trainer) -> None:
    trainer.expect("ready")
    with contextlib.closing(TrainerView(trainer.pid)) as onlooker:
        onlooker.watch(0.1)
        before = onlooker.rows[0]["pid"]
        os.kill(before, signal.SIGKILL)
        onlooker.watch(2.0)
        until = time.monotonic() + STUCK_AFTER
        names = ["envs 0-1", "envs 2-3"]  # while there is no new worker yet, the other one is the first
        while (
            [row["name"] for row in onlooker.rows] != names
            or onlooker.rows[0]["pid"] == before
            or onlooker.rows[0]["step_seconds"] is None
        ):
            assert time.monotonic() < until, f"never seen: {onlooker.rows}"
            onlooker.watch(2.0)


def test_envs_that_are_being_built(tmp_path: Path) -> None:
    (tmp_path / "build").touch()
    with Trainer("top_trainers", "step_for_ever", tmp_path) as trainer:
        deadline = time.monotonic() + STUCK_AFTER
        while len(json.loads(top(trainer.pid, "--json", "--every", "0.1").stdout or "{}").get("workers", ())) < 2:
            assert time.monotonic() < deadline
        expected = [("building", "env 0"), ("building", "env 2")]  # not at once: they import before
        table_where(trainer.pid, lambda seen: [(row["state"], row["env"]) for row in seen["workers"]] == expected)
        (tmp_path / "build").unlink()
        trainer.expect("ready")


def test_in_a_terminal_the_table_is_live_until_ctrl_c(trainer: Trainer, tmp_path: Path) -> None:
    trainer.expect("ready")
    (tmp_path / "step-2").touch()
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "multienv", "top", str(trainer.pid), "--every", "0.1"]
    environment = {**os.environ, "PYTHONPATH": PATH, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    shown = ""

    def read_until(holds: Callable[[], bool]) -> None:  # to the end: into a full terminal nothing can be written
        nonlocal shown
        deadline = time.monotonic() + STUCK_AFTER
        while not holds():
            assert time.monotonic() < deadline, f"never so: {shown[-4000:]}"
            if select.select([ours], [], [], 0.2)[0]:
                shown += os.read(ours, 65_536).decode(errors="replace")

    with contextlib.ExitStack() as stack:
        stack.callback(os.close, ours)
        stack.callback(os.close, theirs)
        process = stack.enter_context(
            subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        )
        stack.callback(process.kill)
        read_until(lambda: "busy: step of env 2" in shown)
        (tmp_path / "step-2").unlink()
        shown = ""
        read_until(lambda: "idle" in shown)
        process.send_signal(signal.SIGINT)
        read_until(lambda: process.poll() is not None)
        assert process.returncode == 0


def refusal(*arguments: object) -> str:
    result = top(*arguments)
    assert result.exit_code == 2, result.output
    assert not result.stdout
    return result.stderr.strip()


def test_what_is_no_trainer_is_said_to_be_none_in_one_line() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        text = refusal(process.pid)
        assert text.startswith(f"Process {process.pid} has no workers of multienv: ")
        assert len(text.splitlines()) == 1
    assert refusal(process.pid) == f"There is no process {process.pid}."


def test_a_trainer_of_another_user_is_refused() -> None:
    us = os.getpid()
    assert refusal(2**22 + 1)  # all is imported now: the other user may not read where it lies
    if os.geteuid():
        assert "belongs to another user. Only that user and root may look at it." in refusal(1)
        return
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setresuid(65534, 65534, 65534)
            os.write(write, refusal(us).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == f"Process {us} belongs to another user. Only that user and root may look at it."
    os.waitpid(child, 0)


def test_a_trainer_that_is_busy_itself_and_the_list_where_several_run(trainer: Trainer) -> None:
    trainer.expect("ready")
    with SubprocessEnv(CounterEnv) as env:
        env.reset(seed=0)
        seen = table_where(os.getpid(), lambda seen: [row["state"] for row in seen["workers"]] == ["idle"])
        assert (seen["waited_for"], seen["workers"][0]["name"]) == (None, "env")
        assert "The workers wait for the trainer." in top(os.getpid(), "--once", "--every", "0.1").output
        first, *lines = refusal().splitlines()
    assert first == "Several trainers run here; give the PID of one:"
    assert {str(trainer.pid), str(os.getpid())} <= {line.split()[0] for line in lines}


def test_a_trainer_whose_command_has_several_lines_is_named_in_one(reports: Path) -> None:
    script = "import sys\nfrom kit import CounterEnv\nfrom multienv import SubprocessEnv\n"
    script += "with SubprocessEnv(CounterEnv).initialize():\n    print()\n    sys.stdin.read()\n"
    environment = {**os.environ, "PYTHONPATH": PATH}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        command = table(process.pid)["trainer"]["command"]
    assert " -c import sys from kit import CounterEnv " in command
