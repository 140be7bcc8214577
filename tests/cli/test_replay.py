"""``multienv replay``: the fault comes again, or it is said that it does not."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from cli_command import ODD_ENVS, run_process
from gymnasium.spaces import Box, Dict, Discrete, Sequence, Text, Tuple
from typer.testing import CliRunner, Result

import multienv
from kit import CounterEnv, Fault, FaultyEnv, SpaceEnv, kill_worker, reports_written
from kit.trainer_process import STUCK_AFTER, becomes_true
from multienv import Deadlines, RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv._engine.reports.read import load
from multienv.cli.commands import app
from multienv.cli.env_functions import named
from multienv.errors import UsageError, WorkerLostError

pytestmark = pytest.mark.usefixtures("monitor_stays")
PATH = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(multienv.__file__).parents[1])])
RAISE = RestartPolicy(on_crash="raise", on_timeout="raise")


Replay = Any  # (*arguments, path=where) -> Result


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replay]:
    """In this process, which is then put back as it was: no fault comes again."""
    modules, environment = set(sys.modules), dict(os.environ)
    random_state, numpy_state = random.getstate(), np.random.get_state()
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.chdir(os.getcwd())
    monkeypatch.setattr(faulthandler, "enable", lambda: None)  # pytest's own goes on

    def run(*arguments: str | Path, path: Path | None = None) -> Result:
        if path is not None:
            os.chdir(path)
        here = [] if not arguments or str(arguments[0]).startswith("--") else ["--here"]
        return CliRunner().invoke(app, ["replay", *map(str, arguments), *here])

    yield run
    for name in set(sys.modules) - modules:
        if name in ("mine", "helper"):
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)
    random.setstate(random_state)
    np.random.set_state(numpy_state)


def killed(env_fn: Any, steps: int, reports: Path, *, seed: int = 3, **options: Any) -> Path:
    """The report of an env that is killed from outside, and recovers."""
    with SubprocessEnv(env_fn, reports=reports, **options) as env:
        env.action_space.seed(seed)
        env.reset(seed=seed)
        for number in range(steps):
            if number == steps - 1:
                kill_worker(env)
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
        recovery = env.statistics().last_recovery
        assert recovery is not None
        assert recovery.outcome in ("exact", "replayed")
    reports_written()
    return Path(recovery.report)


def killed_after_65_steps(env: SubprocessEnv) -> str:
    """Return the report of an env whose losses raise."""
    env.reset(seed=7)
    for _ in range(65):
        if env.step(1)[2]:
            env.reset()
    kill_worker(env)
    with pytest.raises(WorkerLostError) as caught:
        env.step(1)
    return caught.value.report


@pytest.fixture(scope="module")
def cartpole_reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the report of a CartPole that was killed from outside after four steps."""
    directory = tmp_path_factory.mktemp("cartpole")
    killed(partial(gymnasium.make, "CartPole-v1"), 5, directory)
    return directory


@pytest.fixture
def cartpole_report(cartpole_reports: Path, reports: Path) -> Path:
    """A copy of that report, to be changed."""
    shutil.copytree(cartpole_reports, reports, dirs_exist_ok=True)
    (report,) = reports.glob("*.json")
    return report


@pytest.fixture
def module(tmp_path: Path) -> Any:
    """Writes a module that builds an env, into the directory that replays begin in."""

    def write(source: str) -> Path:
        (tmp_path / "mine.py").write_text(f"from kit import *\n{source}\n")
        return tmp_path

    return write


# --- the fault comes again ------------------------------------------------------------------------


def test_what_hung_is_ended_with_its_stack() -> None:
    env_fn = partial(FaultyEnv, fault=Fault("hang_c", "step"))
    with SubprocessEnv(env_fn, restart=RAISE, deadlines=Deadlines(step=0.2)) as env:
        env.reset(seed=7)
        with pytest.raises(WorkerLostError) as caught:
            env.step(1)
    result = run_process("replay", caught.value.report)
    assert result.returncode == 1
    assert result.stdout.endswith(
        "\nIf it hangs again, its stack is printed after 1.4 s, or at once by Ctrl-C. Then this command ends.\n"
        "The fault happened again: the process hung.\n"
    )
    assert "Timeout" in result.stderr
    assert "faults.py" in result.stderr


@pytest.mark.parametrize("moment", ["construct", "step"])
def test_ctrl_c_ends_a_hang_in_c_code_with_its_stack(moment: Any, tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    env = SubprocessEnv(
        partial(FaultyEnv, fault=Fault("hang_c", moment, once=hangs)),
        restart=RAISE,
        deadlines=Deadlines(start=2.0, step=0.2) if moment == "construct" else Deadlines(step=0.2),
    )
    with pytest.raises(WorkerLostError) as caught, env:
        env.reset(seed=7)
        env.step(1)
    reports_written()
    report = Path(caught.value.report)
    rewritten(report, pickle.dumps(replace(load(report), deadline=1000.0)))
    hangs.unlink(missing_ok=True)  # on a busy machine the deadline may pass before it hangs
    command = [sys.executable, "-m", "multienv", "replay", str(report)]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": PATH}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert becomes_true(hangs.exists)
        process.send_signal(signal.SIGINT)
        told, errors = process.communicate(timeout=STUCK_AFTER)
    assert process.returncode == 130
    assert "If it hangs again, its stack is printed after 33 min, or at once by Ctrl-C." in told
    assert "faults.py" in errors


def test_ctrl_c_is_ctrl_c_though_the_process_that_it_is_handed_on_to_has_just_ended(
    cartpole_report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a terminal, which ends both, where the other one is faster."""
    join = BaseProcess.join

    def join_and_interrupt(process: BaseProcess, timeout: float | None = None) -> None:
        join(process, timeout)
        if timeout is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(BaseProcess, "join", join_and_interrupt)
    result = CliRunner().invoke(app, ["replay", str(cartpole_report)])
    assert (result.exit_code, type(result.exception)) == (130, SystemExit)


def test_poison_in_the_fifth_episode_with_calls_and_attributes() -> None:
    with SubprocessEnv(partial(FaultyEnv, fault=Fault("segv", "step", action=3))) as env:
        for episode in range(5):
            env.reset(seed=episode or None, options={"start": 2} if episode % 2 else None)
            env.call("poke", 0.25)
            env.set_attr("offset", np.float32(episode))
            for action in (0, 1, 2):
                env.step(action)
        *_, info = env.step(3)
    # The debugger stops one step before.
    commands = "p 'counted', env.unwrapped.episode_step, action\nenv.step(action)\n"
    result = run_process("replay", info["multienv"]["report"], "--pdb", stdin=commands)
    assert result.returncode == -signal.SIGSEGV, result.stdout + result.stderr
    assert "('counted', 3, 3)" in result.stdout
    assert re.search(
        r"^Running the \d+ requests that came before\. One that takes 30 s is ended\.$",
        result.stdout,
        re.MULTILINE,
    )
    # From the construction, or from a reset: those where a replay can begin are chosen by the time that envs take.
    assert re.search(r"All \d+ answers match the recorded ones\.", result.stdout)
    assert "Now the fatal request: step(3), after 3 steps of its episode, last seed 4" in result.stdout
    assert "Segmentation fault" in result.stderr
    assert "in string_at" in result.stderr


@pytest.mark.parametrize("times", [1, 1000])
def test_a_fault_that_strikes_by_chance_on_the_way_is_told_in_one_line_and_the_replay_tried_again(
    tmp_path: Path, times: int
) -> None:
    """The env aborts in step 51 of its replays, so often."""
    env_fn = named(f"{ODD_ENVS}:Doomed", directory=str(tmp_path), first=2, times=times, horizon=None).env_fn
    with SubprocessEnv(env_fn, restart=RAISE) as env:
        report = killed_after_65_steps(env)
    result = run_process("replay", report)
    lines = [line for line in result.stdout.splitlines() if "by chance" in line]
    struck = "A fault struck by chance, before the fatal request: the process was killed by SIGABRT (try {} of 5)."
    assert lines == [struck.format(number + 1) for number in range(1 if times == 1 else 5)]
    assert result.stderr == ""  # no stack
    if times == 1:
        assert result.returncode == 0
        assert re.search(r"All \d+ answers match the recorded ones\.\nNow the fatal request: step", result.stdout)
        return
    assert result.returncode == 3
    assert result.stdout.endswith("Give --env with a calm version of the env: one without this fault.\n")
    calm = json.dumps({"directory": str(tmp_path), "first": 1000, "horizon": None})
    result = run_process("replay", report, "--env", f"{ODD_ENVS}:Doomed", "--env-kwargs", calm)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "The fault did not happen again: the request returned." in result.stdout


def test_a_hang_by_chance_on_the_way_ends_at_a_deadline_and_the_replay_is_tried_again(tmp_path: Path) -> None:
    """The env sleeps for a minute in step 51 of its replay, once."""
    env_fn = named(f"{ODD_ENVS}:Doomed", directory=str(tmp_path), first=2, times=1, hangs=True, horizon=None).env_fn
    with SubprocessEnv(env_fn, restart=RAISE, deadlines=Deadlines(step=1.0)) as env:
        report = killed_after_65_steps(env)
    result = run_process("replay", report)
    assert result.returncode == 0, result.stdout + result.stderr
    told = result.stdout.splitlines()
    assert re.fullmatch(r"Running the \d+ requests that came before\. One that takes 3\.0 s is ended\.", told[1])
    assert told[2] == "A fault struck by chance, before the fatal request: the process hung (try 1 of 5)."
    assert told[-1] == "The fault did not happen again: the request returned."
    assert result.stderr == ""  # no stack
    here = run_process("replay", report, "--here", "--step-deadline", "1", "--env", f"{ODD_ENVS}:hanging")
    assert here.returncode == 1
    assert "in _hang_in_c" in here.stderr  # nothing else tells why the command has ended


def test_deadline_of_a_replay_is_that_of_each_request_by_itself(tmp_path: Path) -> None:
    with SubprocessEnv(partial(CounterEnv, horizon=None), restart=RAISE) as env:
        report = killed_after_65_steps(env)
    for seconds, deadline, code in ((0.03, "1", 0), (0.3, "0.2", 3)):
        slow = json.dumps({"directory": str(tmp_path), "first": 1000, "step_seconds": seconds, "horizon": None})
        options = ("--env", f"{ODD_ENVS}:Doomed", "--env-kwargs", slow, "--step-deadline", deadline)
        result = run_process("replay", report, *options)
        assert result.returncode == code, result.stdout + result.stderr
    assert result.stdout.endswith("one without this fault. If it is only slow: a longer --step-deadline.\n")


def test_after_a_fault_by_chance_a_replay_begins_at_a_later_reset(tmp_path: Path) -> None:
    """The env aborts in step 51 of each process but the first; a replay of the last episode does not get there."""
    arguments = {"directory": str(tmp_path), "first": 2, "step_seconds": 0.004}
    env_fn = named(f"{ODD_ENVS}:Doomed", **arguments).env_fn
    with SubprocessEnv(env_fn, restart=replace(RAISE, max_rss=2**40)) as env:
        report = killed_after_65_steps(env)
    result = run_process("replay", report)
    assert result.returncode == 0, result.stdout + result.stderr
    _, first, struck, again, matched, *_ = result.stdout.splitlines()
    assert "requests that came before" in first
    assert struck.endswith("the process was killed by SIGABRT (try 1 of 5).")
    shorter = re.fullmatch(r"Running the (\d+) requests since a later reset\. One that takes .* s is ended\.", again)
    assert shorter is not None
    assert int(shorter[1]) == 6  # the present episode
    assert matched == f"All {shorter[1]} answers match the recorded ones."


def test_a_crash_in_a_fatal_request_that_hangs_this_time_ends_too(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(
        """if True:
        from kit import Fault, FaultyEnv
        make = lambda: FaultyEnv(fault=Fault("hang_c", "step", at=3))
        """
    )
    with SubprocessEnv(partial(FaultyEnv, fault=Fault("segv", "step", at=3)), restart=RAISE) as env:
        env.reset(seed=7)
        with pytest.raises(WorkerLostError) as caught:
            for _ in range(3):
                env.step(1)
    options = ("--env", f"{tmp_path}/hangs.py:make", "--step-deadline", "1")
    result = run_process("replay", caught.value.report, *options)
    assert (result.returncode, result.stdout.splitlines()[-1]) == (1, "The fault happened again: the process hung.")


# --- it does not ----------------------------------------------------------------------------------


def test_a_report_is_replayed_in_the_world_that_its_trainer_saw(tmp_path: Path, reports: Path, replay: Replay) -> None:
    (tmp_path / "helper.py").write_text("from kit import CounterEnv as Env\n")
    (tmp_path / "horizon").write_text("7")
    (tmp_path / "trainer.py").write_text(
        """if True:
        import os, pathlib, sys
        import gymnasium, helper
        from kit import kill_worker
        from multienv import SubprocessEnv
        gymnasium.register("Mine-v0", entry_point=lambda **kw: helper.Env(**kw))
        def make():
            return gymnasium.make(sys.argv[1], horizon=int(pathlib.Path(os.environ["HORIZON"]).read_text()))
        with SubprocessEnv(make, worker_env={"HORIZON": "horizon"}) as env:
            env.reset(seed=0)
            kill_worker(env)
            env.step(0)
        """
    )
    environment = {**os.environ, "PYTHONPATH": PATH}
    subprocess.run([sys.executable, "trainer.py", "Mine-v0"], check=True, cwd=tmp_path, env=environment, timeout=60)
    (report,) = reports.glob("*.json")
    result = replay(report)
    assert result.exit_code == 0, result.output
    assert "All 1 answers match the recorded ones." in result.stdout


def test_a_journal_that_begins_in_the_middle_is_replayed(reports: Path, replay: Replay) -> None:
    # With a limit of memory more resets are told of.
    policy = RestartPolicy(snapshots=False, replay_limit=0.02, max_rss=2**40)
    report = killed(partial(gymnasium.make, "CartPole-v1"), 12_000, reports, restart=policy)
    assert json.loads(report.read_text())["journal"]["steps"] < 8000
    result = replay(report)
    assert result.exit_code == 0, result.output
    assert "answers match the recorded ones" in result.stdout


def test_actions_options_and_observations_without_a_layout_are_replayed(reports: Path, replay: Replay) -> None:
    def make() -> gymnasium.Env[Any, Any]:
        actions = Dict(arm=Box(-1, 1, (2, 3)), mode=Tuple((Discrete(3), Sequence(Box(0, 9, (2,), int)))))
        return SpaceEnv(observation_space=Dict(text=Text(5), parts=Sequence(Box(0, 1, (2,)))), action_space=actions)

    with SubprocessEnv(make, reports=reports) as env:
        env.reset(seed=3, options={"start": np.arange(3.0), "count": np.int64(2)})
        env.action_space.seed(3)
        for _ in range(5):
            env.step(env.action_space.sample())
        kill_worker(env)
        env.step(env.action_space.sample())
    reports_written()
    result = replay("latest")
    assert result.exit_code == 0, result.output
    assert "All 6 answers match the recorded ones." in result.stdout


def test_a_journal_that_no_replay_can_begin_in_is_said_to_be_so(reports: Path, replay: Replay) -> None:
    policy = RestartPolicy(on_crash="truncate", journal_limit=0, snapshots=False)
    with SubprocessEnv(CounterEnv, restart=policy) as env:
        env.reset(seed=0)
        kill_worker(env)
        *_, info = env.step(0)
    path = info["multienv"]["report"]
    result = replay(path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{path} cannot be replayed: its journal has outgrown")
    assert result.stderr.count("\n") == 1


# --- which report, which env ----------------------------------------------------------------------


def test_a_named_env_takes_the_place_of_the_reports_own(reports: Path, module: Any, replay: Replay) -> None:
    report = killed(partial(CounterEnv, horizon=7), 20, reports)
    where = module("import gymnasium\ngymnasium.register('Mine-v0', entry_point=CounterEnv)")
    try:
        result = replay(report, "--env", "mine:Mine-v0", "--env-kwargs", '{"horizon": 7}', "--json", path=where)
        assert result.exit_code == 0, result.output
        told = [json.loads(line) for line in result.stdout.splitlines()]
        assert told[0]["report"] == str(report)
        assert told[1:3] == [
            {"before": 22, "deadline": 30.0},
            {"requests": 22, "differences": []},
        ]  # two episodes have ended
        assert told[-1]["came_again"] is False
        other = replay(report, "--env", "mine:CounterEnv", "--env-kwargs", '{"horizon": 9}', path=where)
        assert (
            "Some of the 22 answers differ from the recorded ones: env 0: the flags differ at request 8 of 22."
            in other.stdout
        )
    finally:
        gymnasium.registry.pop("Mine-v0", None)


def test_an_env_that_cannot_be_had_is_refused_in_one_line(cartpole_report: Path, replay: Replay) -> None:
    with_build(cartpole_report, env_fns=b"cno_such_module\nmake\n.")
    for options, said in (
        ((), "No module named 'no_such_module'. Give --env ID, --env module:ID or --env module:function"),
        (("--env", "no.such:make"), "cannot be imported"),
        (("--env", "json:nothing"), "no such function"),
        (("--env", "Nix-v0"), "no env with this id"),
        (("--env-kwargs", '{"size": 4}'), "give both"),
        (("--env-kwargs", "{"), "--env-kwargs {: this is not JSON"),
        (("--env-kwargs", "[1]"), "--env-kwargs [1]: give a JSON object"),
    ):
        result = replay(cartpole_report, *options)
        assert result.exit_code == 2
        assert said in result.stderr
        assert result.stderr.count("\n") == 1
    result = replay(cartpole_report, "--env", "CartPole-v1")
    assert "All 5 answers match the recorded ones." in result.stdout


def test_without_an_argument_reports_are_listed_and_latest_is_the_newest(
    cartpole_report: Path, reports: Path, replay: Replay
) -> None:
    later = cartpole_report.with_name(f"9{cartpole_report.name[1:]}")
    document = json.loads(cartpole_report.read_text())
    later.write_text(json.dumps(document | {"what": "Something else."}))
    shutil.copy(cartpole_report.with_suffix(".pickle"), later.with_suffix(".pickle"))
    listed = replay()
    assert listed.exit_code == 0
    head, *lines = listed.stdout.splitlines()
    assert str(reports) in head
    assert [line.split()[3:5] for line in lines] == [["exact", cartpole_report.name], ["exact", later.name]]
    assert [one["report"] for one in json.loads(replay("--json").stdout)] == [str(cartpole_report), str(later)]
    head, line = replay("--last", "1").stdout.splitlines()
    assert "1 of 2; the newest last" in head
    assert later.name in line
    for number in range(20):
        later.with_name(f"0{number:02}{later.name[3:]}").write_text(later.read_text())
    assert [line.split()[4] for line in replay().stdout.splitlines()[-2:]] == [cartpole_report.name, later.name]
    assert len(replay().stdout.splitlines()) == 1 + 10
    assert len(replay("--last", "50").stdout.splitlines()) == 1 + 22
    assert json.loads(replay("latest", "--json").stdout.splitlines()[0])["report"] == str(later)
    assert "was killed by SIGKILL" in replay(cartpole_report.name).stdout
    nowhere = replay("latest", "--reports", reports / "none")
    assert nowhere.exit_code == 2
    assert nowhere.stderr.strip() == f"There are no reports in {reports / 'none'}."
    assert replay("--reports", reports / "none").stdout.strip() == f"There are no reports in {reports / 'none'}."


# --- what is no report ----------------------------------------------------------------------------


def rewritten(report: Path, data: bytes) -> None:
    """Another pickle takes the place of the report's own."""
    report.with_suffix(".pickle").write_bytes(data)
    report.write_text(json.dumps(json.loads(report.read_text()) | {"checksum": zlib.crc32(data)}))


def with_build(report: Path, **changed: Any) -> None:
    found = load(report)
    rewritten(report, pickle.dumps(replace(found, build=replace(found.build, **changed))))


def changed_bytes(path: Path, change: Any) -> None:
    path.write_bytes(change(path.read_bytes()))


def with_text(**changed: Any) -> Any:
    return lambda report: report.write_text(json.dumps({**json.loads(report.read_text()), **changed}))


DAMAGE: dict[str, Any] = {
    "no json": lambda report: report.unlink(),
    "no pickle": lambda report: report.with_suffix(".pickle").unlink(),
    "half json": lambda report: changed_bytes(report, lambda data: data[: len(data) // 2]),
    "half pickle": lambda report: changed_bytes(report.with_suffix(".pickle"), lambda data: data[: len(data) // 2]),
    "bits": lambda report: changed_bytes(report.with_suffix(".pickle"), lambda data: data[:200] + b"x" + data[201:]),
    "a class that is not here": lambda report: rewritten(report, b"cno_such_module\nmake\n."),
    "no dict": lambda report: report.write_text("[]"),
    "foreign": with_text(format="something else"),
    "newer": with_text(version=1000),
    "of another pickle": with_text(checksum=1),
    "attributes missing": lambda report: rewritten(report, b"cmultienv._engine.reports.crash\nReport\n)\x81."),
    "no report": lambda report: rewritten(report, pickle.dumps({"loss": None})),
    "nothing": with_text(build=None),
}


def test_what_is_broken_or_foreign_is_said_to_be_so(cartpole_report: Path, tmp_path: Path, replay: Replay) -> None:
    for how, damage in DAMAGE.items():
        copy = tmp_path / f"{how}.json"
        for suffix in (".json", ".pickle"):
            shutil.copy(cartpole_report.with_suffix(suffix), copy.with_suffix(suffix))
        load(copy)
        damage(copy)
        with pytest.raises(UsageError, match=re.escape(str(copy.with_suffix("")))):
            load(copy)
    assert "no json.json is not there. The newest 100 reports of each trainer are kept, for 14 days, and at most" in (
        replay(tmp_path / "no json.json").stderr
    )
    result = replay(tmp_path / "foreign.json")
    assert result.exit_code == 2
    assert "foreign.json is not a report of multienv" in result.stderr


def test_a_fifo_or_a_device_named_like_a_report_is_not_read(
    cartpole_report: Path, reports: Path, replay: Replay
) -> None:
    """To open the one would block for ever, and the other has no end."""
    fifo, device = (cartpole_report.with_name(f"{digit}{cartpole_report.name[1:]}") for digit in "89")
    os.mkfifo(fifo)
    device.symlink_to("/dev/null")  # which would do no harm
    _, line = replay().stdout.splitlines()
    assert cartpole_report.name in line
    assert len(json.loads(replay("--json").stdout)) == 1
    for path in (fifo, device):
        result = replay(path)
        assert result.exit_code == 2
        assert f"{path} is not a regular file, so it is not read." in result.stderr
    for path in (fifo, device):
        path.unlink()
    cartpole_report.with_suffix(".pickle").unlink()
    os.mkfifo(cartpole_report.with_suffix(".pickle"))
    assert ".pickle is not a regular file" in replay(cartpole_report).stderr


@pytest.mark.parametrize("suffix", [".json", ".pickle"])
def test_a_report_that_others_may_have_written_is_refused(cartpole_report: Path, suffix: str, replay: Replay) -> None:
    path = cartpole_report.with_suffix(suffix)
    for mode, owner, said in (
        (0o620, os.geteuid(), "can be written by others than you (mode 0620)"),
        (0o602, os.geteuid(), "can be written by others than you (mode 0602)"),
        *[(0o644, 12345, "belongs to another user (uid 12345)")] * (os.geteuid() == 0),  # only root can give it away
    ):
        path.chmod(mode)
        os.chown(path, owner, -1)
        result = replay(cartpole_report)
        assert result.exit_code == 2
        assert f"{path} {said}: a report is a pickle, and runs what its author put there." in result.stderr
        assert result.stderr.count("\n") == 1
    assert "was killed by SIGKILL" in replay().stdout  # it is listed: that unpickles nothing
    os.chown(path, os.geteuid(), -1)
    path.chmod(0o644)
    assert replay(cartpole_report).exit_code == 0


def test_the_texts_of_a_report_do_not_steer_the_terminal(cartpole_report: Path, replay: Replay) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x9b\udc80"
    found, document = load(cartpole_report), json.loads(cartpole_report.read_text())
    document["what"] = document["recovery"]["outcome"] = document["obstacle"] = evil
    cartpole_report.write_text(json.dumps(document))
    listed, refused = replay(), replay(cartpole_report)
    cartpole_report.write_text(json.dumps(document | {"obstacle": None}))
    rewritten(cartpole_report, pickle.dumps(replace(found, loss=replace(found.loss, command=evil))))
    for result, code in ((listed, 0), (refused, 2), (replay(cartpole_report), 0)):
        assert result.exit_code == code
        assert "]0;title" in result.output  # it is shown
        assert all(character.isprintable() or character == "\n" for character in result.output)


# --- several envs in a process ----------------------------------------------------------------------


def test_the_culprit_among_several_is_named_and_its_fault_comes_again(reports: Path) -> None:
    fns: list[Any] = [CounterEnv] * 3
    fns[1] = partial(FaultyEnv, fault=Fault("segv", "step", action=3))
    with contextlib.closing(SubprocessVectorEnv(fns, envs_per_worker=3)) as envs:
        envs.reset(seed=1)
        for _ in range(5):
            envs.step(np.array([1, 2, 1]))
        *_, truncations, infos = envs.step(np.array([1, 3, 2]))
    assert truncations.tolist() == [False, True, False]
    path = Path(infos["multienv"]["report"][1])
    document = json.loads(path.read_text())
    assert document["loss"]["env_index"] == 1
    assert document["loss"]["signal"] == "SIGSEGV"
    assert document["request"]["action"] == {"dtype": "int64", "shape": [3], "values": [1, 3, 2]}
    result = run_process("replay", str(path), "--pdb", stdin="p len(env), action.tolist()\nc\n")
    assert result.returncode == -signal.SIGSEGV, result.stdout + result.stderr
    assert "(3, [1, 3, 2])" in result.stdout
    assert "All 6 answers match the recorded ones." in result.stdout


def test_a_batch_is_replayed_past_a_truncation(replay: Replay) -> None:
    fns = [partial(FaultyEnv, fault=Fault("segv", "step", action=3))] * 3
    with contextlib.closing(SubprocessVectorEnv(fns, envs_per_worker=3)) as envs:
        envs.reset(seed=1)
        envs.step(np.array([1, 2, 1]))
        *_, truncations, _ = envs.step(np.array([1, 3, 2]))
        assert truncations.tolist() == [False, True, False]
        for _ in range(5):
            envs.step(np.array([1, 2, 1]))
        kill_worker(envs)
        envs.step(np.array([2, 2, 2]))
    reports_written()
    result = replay("latest")
    assert result.exit_code == 0, result.output
    assert "All 8 answers match the recorded ones." in result.stdout
    assert "The fault did not happen again: the request returned." in result.stdout


def test_steps_of_some_envs_of_a_batch_are_replayed(reports: Path) -> None:
    fns: list[Any] = [CounterEnv] * 3
    fns[1] = partial(FaultyEnv, fault=Fault("segv", "step", action=3))
    with contextlib.closing(SubprocessVectorEnv(fns, envs_per_worker=3)) as envs:
        envs.reset(seed=1)
        for env in (0, 2, 2, 1):
            envs.send(np.array([2]), [env])
            envs.recv()
        envs.send(np.array([3]), [1])
        *_, truncations, infos, _ = envs.recv()
        assert truncations.tolist() == [True]
    path = Path(infos["multienv"]["report"][0])
    loss = json.loads(path.read_text())["loss"]
    assert (loss["env_index"], loss["signal"], loss["step"]) == (1, "SIGSEGV", 1)
    result = run_process("replay", str(path))
    assert result.returncode == 1, result.stdout + result.stderr
    assert "All 5 answers match the recorded ones." in result.stdout
    assert result.stdout.endswith("The fault happened again: the process was killed by SIGSEGV.\n")
    assert "in string_at" in result.stderr
