"""``multienv replay``: the fault comes again, or it is said that it does not; and nothing is unpickled unasked."""

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
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ale_py
import gymnasium
import numpy as np
import pytest
from typer.testing import CliRunner, Result

import multienv
from kit import CounterEnv, Fault, FaultyEnv, SpaceEnv
from multienv import Deadlines, RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv.cli import app
from multienv.cli.env_functions import env_functions
from multienv.errors import ReportError, WorkerLostError
from multienv.reports.read import load
from multienv.reports.store import settle
from multienv.wire.banks import BankLayout, split_entries

PATH = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(multienv.__file__).parents[1])])
MULTIENV = [sys.executable, "-c", "from multienv.cli import app; app()"]
RAISE = RestartPolicy(on_crash="raise", on_timeout="raise")


def replay_apart(
    report: Path, *options: str, stdin: str = "", path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which the fault ends."""
    return subprocess.run(
        [*MULTIENV, "replay", str(report), *options],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=path,
        env={**os.environ, "COLUMNS": "120", "PYTHONPATH": PATH},
    )


class Replay(Protocol):
    def __call__(self, *arguments: str | Path, path: Path | None = None) -> Result: ...


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
        return CliRunner().invoke(app, ["replay", *map(str, arguments)])

    yield run
    for name in set(sys.modules) - modules:
        if name in ("mine", "helper"):
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)
    random.setstate(random_state)
    np.random.set_state(numpy_state)


def lost_by(fault: Fault, *, before: int = 0, action: Any = 1, **options: Any) -> Path:
    """The report of an env that is lost by this fault."""
    with SubprocessEnv(partial(FaultyEnv, fault=fault), restart=RAISE, **options) as env:
        env.reset(seed=7)
        for _ in range(before):
            env.step(2)
        with pytest.raises(WorkerLostError) as caught:
            env.step(action)
    return Path(caught.value.report)


def killed(env_fn: Any, steps: int, reports: Path, *, seed: int = 3, **options: Any) -> Path:
    """The report of an env that is killed from outside, and recovers."""
    with SubprocessEnv(env_fn, reports=reports, **options) as env:
        env.action_space.seed(seed)
        env.reset(seed=seed)
        for number in range(steps):
            if number == steps - 1:
                os.kill(env.statistics().pid, signal.SIGKILL)
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
        recovery = env.statistics().last_recovery
        assert recovery is not None
        assert recovery.outcome == "exact"
    settle()
    return Path(recovery.report)


@pytest.fixture(scope="module", autouse=True)
def monitor_stays() -> Iterator[None]:
    """Keep a worker, and with it the monitor, which would end and be launched again between many of these tests."""
    with SubprocessEnv(CounterEnv) as env:
        env.initialize()
        yield


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


def test_a_segfault_comes_again(module: Any) -> None:
    report = lost_by(Fault("segv", "step", at=4), before=3, action=3)
    where = module("def make(): return FaultyEnv(fault=Fault('segv', 'step', at=4))")
    result = replay_apart(report, "--env", "mine:make", path=where)
    assert result.returncode == -signal.SIGSEGV, result.stderr
    assert "All 4 answers are as they were recorded." in result.stdout
    last = result.stdout.splitlines()[-1]
    assert last == "Now what was fatal: step(3), after 3 steps of its episode, last seed 7"
    assert "Segmentation fault" in result.stderr
    assert "in string_at" in result.stderr


def test_what_hung_is_ended_with_its_stack() -> None:
    report = lost_by(Fault("hang_c", "step"), deadlines=Deadlines(step=0.2))
    result = replay_apart(report, "--trust")
    assert result.returncode == 1
    assert "Timeout" in result.stderr
    assert "faults.py" in result.stderr


def test_an_env_that_died_while_it_was_built() -> None:
    env = SubprocessEnv(partial(FaultyEnv, fault=Fault("abort", "construct")), restart=RAISE)
    with pytest.raises(WorkerLostError) as caught:
        env.initialize()
    env.close()
    result = replay_apart(Path(caught.value.report), "--trust")
    assert result.returncode == -signal.SIGABRT
    assert "It was being built" in result.stdout


def test_poison_in_the_fifth_episode_with_calls_and_attributes(reports: Path, replay: Replay) -> None:
    with SubprocessEnv(partial(FaultyEnv, fault=Fault("segv", "step", action=3))) as env:
        for episode in range(5):
            env.reset(seed=episode or None, options={"start": 2} if episode % 2 else None)
            env.call("poke", 0.25)
            env.set_attr("offset", np.float32(episode))
            for action in (0, 1, 2):
                env.step(action)
        *_, info = env.step(3)
    report = Path(info["multienv"]["report"])
    where = reports
    (where / "mine.py").write_text(
        "from kit import *\ndef make(): return FaultyEnv(fault=Fault('segv', 'step', action=3))"
    )
    refused = replay(report, "--env", "mine:make", path=where)  # the calls are pickled
    assert refused.exit_code == 2
    assert "request 2" in refused.stderr
    assert "--trust" in refused.stderr
    # The debugger stops one step before.
    commands = "p 'counted', env.unwrapped.episode_step, action\nenv.step(action)\n"
    result = replay_apart(report, "--env", "mine:make", "--trust", "--pdb", stdin=commands, path=where)
    assert result.returncode == -signal.SIGSEGV, result.stdout + result.stderr
    assert "('counted', 3, 3)" in result.stdout
    assert "All 30 answers are as they were recorded." in result.stdout


# --- it does not ----------------------------------------------------------------------------------


def test_what_was_killed_from_outside_runs_through(reports: Path, replay: Replay) -> None:
    report = killed(lambda: gymnasium.make("CartPole-v1"), 150, reports)
    result = replay(report)  # from its spec alone
    assert result.exit_code == 0, result.output
    assert "answers are as they were recorded" in result.stdout
    assert "The fault did not come again: the request returned." in result.stdout


def test_a_simulator_in_c(reports: Path, replay: Replay) -> None:
    report = killed(partial(gymnasium.make, "HalfCheetah-v5"), 120, reports)
    result = replay(report)
    assert result.exit_code == 0, result.output
    assert "answers are as they were recorded" in result.stdout


def test_observations_of_which_there_are_digests(reports: Path, replay: Replay) -> None:
    gymnasium.register_envs(ale_py)
    report = killed(partial(gymnasium.make, "ALE/Pong-v5", frameskip=3), 60, reports)
    assert sum(json.loads(report.read_text())["layout"]["leaf_bytes"]) > 1024
    result = replay(report, "--env", "ale_py:ALE/Pong-v5")  # with the arguments of the report
    assert result.exit_code == 0, result.output
    assert "All 60 answers are as they were recorded." in result.stdout


def test_another_env_is_found_out(reports: Path, module: Any, replay: Replay) -> None:
    report = killed(CounterEnv, 20, reports)
    where = module("class Other(CounterEnv):\n  def _next_draw(self): return 0.5")
    result = replay(report, "--env", "mine:Other", path=where)
    assert result.exit_code == 0, result.output
    assert "Not all 21 answers are as they were recorded: " in result.stdout
    assert "the observation differs at request 1 of 21" in result.stdout


def test_the_world_as_the_trainer_saw_it_with_trust(tmp_path: Path, reports: Path, replay: Replay) -> None:
    (tmp_path / "helper.py").write_text("from kit import CounterEnv as Env\n")
    (tmp_path / "horizon").write_text("7")
    (tmp_path / "trainer.py").write_text(
        """if True:
        import os, pathlib, signal, sys
        import gymnasium, helper
        from multienv import SubprocessEnv
        gymnasium.register("Mine-v0", entry_point=lambda **kw: helper.Env(**kw))
        def make():
            return gymnasium.make(sys.argv[1], horizon=int(pathlib.Path("horizon").read_text()))
        with SubprocessEnv(make) as env:
            env.reset(seed=0)
            os.kill(env.statistics().pid, signal.SIGKILL)
            env.step(0)
        """
    )
    environment = {**os.environ, "PYTHONPATH": PATH}
    subprocess.run([sys.executable, "trainer.py", "Mine-v0"], check=True, cwd=tmp_path, env=environment, timeout=60)
    (report,) = reports.glob("*.json")
    assert "'Mine-v0' is not registered here" in replay(report).stderr
    result = replay(report, "--trust")
    assert result.exit_code == 0, result.output
    assert "All 1 answers are as they were recorded." in result.stdout


def test_a_journal_that_begins_in_the_middle_needs_trust(reports: Path, replay: Replay) -> None:
    policy = RestartPolicy(journal_limit=8192)
    report = killed(partial(gymnasium.make, "CartPole-v1"), 2000, reports, restart=policy)
    assert not json.loads(report.read_text())["journal"]["from_construction"]
    refused = replay(report)  # the state of the random generators is pickled
    assert refused.exit_code == 2
    assert "--trust" in refused.stderr
    result = replay(report, "--trust")
    assert result.exit_code == 0, result.output
    assert "answers are as they were recorded" in result.stdout


# --- which report, which env ----------------------------------------------------------------------


@pytest.fixture
def counter() -> Iterator[str]:
    """The id of an env that is registered by its class, until it is taken out of the registry."""
    gymnasium.register("Mine-v0", entry_point=CounterEnv)
    yield "Mine-v0"
    gymnasium.registry.pop("Mine-v0", None)


def test_an_env_registered_by_its_class_is_built_with_the_arguments_of_the_report(
    reports: Path, module: Any, counter: str, replay: Replay
) -> None:
    report = killed(partial(gymnasium.make, counter, horizon=7), 20, reports)
    assert replay(report).exit_code == 0
    del gymnasium.registry[counter]
    unknown = replay(report)
    assert unknown.exit_code == 2
    assert "'Mine-v0' is not registered here" in unknown.stderr
    assert "Try --env kit.counter:Mine-v0." in unknown.stderr
    where = module("import gymnasium\ngymnasium.register('Mine-v0', entry_point=CounterEnv)")
    result = replay(report, "--env", "mine:Mine-v0", "--json", path=where)
    assert result.exit_code == 0, result.output
    told = [json.loads(line) for line in result.stdout.splitlines()]
    assert told[0]["report"] == str(report)
    assert told[1] == {"requests": 22, "differences": []}  # two episodes have ended
    assert told[-1]["came_again"] is False
    other = replay(report, "--env", "mine:Mine-v0", "--env-kwargs", '{"horizon": 9}', path=where)
    assert "Not all 22 answers are as they were recorded" in other.stdout


def test_arguments_without_a_plain_form_are_asked_for(reports: Path, counter: str, replay: Replay) -> None:
    report = killed(partial(gymnasium.make, counter, horizon=np.int64(7)), 20, reports)
    refused = replay(report)
    assert refused.exit_code == 2
    assert "has arguments or wrappers without a plain form" in refused.stderr
    result = replay(report, "--env", counter, "--env-kwargs", '{"horizon": 7}')
    assert "All 22 answers are as they were recorded." in result.stdout
    for wrong in ("{", "[1]"):
        refused = replay(report, "--env-kwargs", wrong)
        assert refused.exit_code == 2
        assert refused.stderr.startswith(f"--env-kwargs {wrong}: ")


def test_without_an_argument_reports_are_listed_and_latest_is_the_newest(
    cartpole_report: Path, reports: Path, replay: Replay
) -> None:
    later = cartpole_report.with_name(f"9{cartpole_report.name[1:]}")
    document = json.loads(cartpole_report.read_text())
    later.write_text(json.dumps(document | {"what": "Something else."}))
    shutil.copy(cartpole_report.with_suffix(".npz"), later.with_suffix(".npz"))
    listed = replay()
    assert listed.exit_code == 0
    head, *lines = listed.stdout.splitlines()
    assert str(reports) in head
    assert [line.split()[4] for line in lines] == [later.name, cartpole_report.name]
    assert all("exact" in line for line in lines)
    assert [one["report"] for one in json.loads(replay("--json").stdout)] == [str(later), str(cartpole_report)]
    assert replay("latest").stdout.startswith("Something else.")
    assert "was killed by SIGKILL" in replay(cartpole_report.name).stdout
    nowhere = replay("latest", "--reports", reports / "none")
    assert nowhere.exit_code == 2
    assert nowhere.stderr.strip() == f"There are no reports in {reports / 'none'}."
    assert replay("--reports", reports / "none").stdout.strip() == f"There are no reports in {reports / 'none'}."


def test_actions_options_and_observations_of_numbers_and_arrays_need_no_trust(
    reports: Path, module: Any, replay: Replay
) -> None:
    source = """
    import gymnasium
    from gymnasium.spaces import Box, Dict, Discrete, Sequence, Text, Tuple
    def make():
        actions = Dict(arm=Box(-1, 1, (2, 3)), mode=Tuple((Discrete(3), Sequence(Box(0, 9, (2,), int)))))
        return SpaceEnv(observation_space=Dict(text=Text(5), parts=Sequence(Box(0, 1, (2,)))), action_space=actions)
    """
    where = module(textwrap.dedent(source))
    made: dict[str, Any] = {}
    exec(f"from kit import *\n{textwrap.dedent(source)}", made)
    with SubprocessEnv(made["make"], reports=reports) as env:
        env.reset(seed=3, options={"start": np.arange(3.0), "count": np.int64(2)})
        env.action_space.seed(3)
        for _ in range(5):
            env.step(env.action_space.sample())
        os.kill(env.statistics().pid, signal.SIGKILL)
        env.step(env.action_space.sample())
    settle()
    result = replay("latest", "--env", "mine:make", path=where)
    assert result.exit_code == 0, result.output
    assert "All 6 answers are as they were recorded." in result.stdout


# --- nothing is unpickled -------------------------------------------------------------------------


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def with_arrays(report: Path, **changed: Any) -> None:
    beside = report.with_suffix(".npz")
    with np.load(beside, allow_pickle=False) as file:
        arrays = dict(file)
    np.savez(beside, **{**arrays, **changed})


def test_a_malicious_pickle_is_not_loaded_without_trust(tmp_path: Path, cartpole_report: Path, replay: Replay) -> None:
    report, struck = cartpole_report, tmp_path / "struck"
    bomb = np.frombuffer(pickle.dumps(Bomb(struck)), np.uint8)
    with np.load(report.with_suffix(".npz")) as file:
        build = replace(pickle.loads(file["build"].tobytes()), env_fns=bomb.tobytes(), state_hooks=bomb.tobytes())
    with_arrays(report, trusted=bomb, build=np.frombuffer(pickle.dumps(build), np.uint8))
    assert replay(report).exit_code == 0
    with_arrays(report, build=bomb)
    assert replay(report).exit_code == 2
    assert not struck.exists()
    replay(report, "--trust")
    assert struck.exists()  # or this test could not fail


def with_mails(report: Path, mail: bytes, *, of_steps: bool) -> None:
    """Put this pickle in the place of the mail of each step, or of each other request."""
    told = json.loads(report.read_text())["layout"]
    end = BankLayout(told["slots"], told["action_bytes"], tuple(told["leaf_bytes"])).end
    with np.load(report.with_suffix(".npz")) as file:
        entries = list(split_entries(file["entries"].tobytes(), end))
    chosen = [bool(entry.request_mail) and entry.is_step == of_steps for entry in entries]
    assert any(chosen)
    changed = [replace(entry, request_mail=mail) if one else entry for entry, one in zip(entries, chosen, strict=True)]
    data = b"".join([entry.packed() for entry in changed])
    with_arrays(report, entries=np.frombuffer(data, np.uint8))


def test_nor_are_the_resets_among_the_requests(tmp_path: Path, reports: Path, replay: Replay) -> None:
    report, struck = killed(partial(gymnasium.make, "CartPole-v1"), 60, reports), tmp_path / "struck"
    with_mails(report, pickle.dumps(Bomb(struck)), of_steps=False)
    result = replay(report)
    assert result.exit_code == 2
    assert "request 1" in result.stderr
    assert "--trust" in result.stderr
    assert not struck.exists()
    replay(report, "--trust")
    assert struck.exists()


def test_nor_are_actions_and_observations(tmp_path: Path, reports: Path, replay: Replay) -> None:
    space = gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(3))
    env_fn = partial(SpaceEnv, observation_space=space, action_space=space)
    report, struck = killed(env_fn, 3, reports), tmp_path / "struck"
    with_mails(report, pickle.dumps(Bomb(struck)), of_steps=True)
    (tmp_path / "mine.py").write_text(
        "import gymnasium\nfrom kit import SpaceEnv\n"
        "space = gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(3))\n"
        "def make(): return SpaceEnv(observation_space=space, action_space=space)\n"
    )
    result = replay(report, "--env", "mine:make", path=tmp_path)
    assert result.exit_code == 2
    assert "request 2" in result.stderr
    assert "--trust" in result.stderr
    assert not struck.exists()


def test_arrays_of_objects_are_refused(tmp_path: Path, cartpole_report: Path, replay: Replay) -> None:
    report, struck = cartpole_report, tmp_path / "struck"
    with_arrays(report, entries=np.array([Bomb(struck)], object))
    struck.unlink(missing_ok=True)
    for options in ([], ["--trust"]):
        result = replay(report, *options)
        assert result.exit_code == 2
        assert "damaged" in result.stderr
    assert not struck.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"id": "Evil-v0", "entry_point": "os:system"},
        {"entry_point": "os:system", "kwargs": {"command": "touch struck"}},
        {"additional_wrappers": [{"name": "x", "entry_point": "os:system", "kwargs": {"command": "touch struck"}}]},
    ],
)
def test_a_spec_calls_nothing_that_is_not_registered(
    change: dict[str, Any], tmp_path: Path, cartpole_report: Path, replay: Replay
) -> None:
    report = cartpole_report
    document = json.loads(report.read_text())
    document["env"]["spec"] |= change
    report.write_text(json.dumps(document))
    result = replay(report, path=tmp_path)
    assert result.exit_code in (1, 2)
    assert "os:system" not in result.stdout
    assert not (tmp_path / "struck").exists()


def test_a_spec_writes_no_files_and_opens_no_windows(tmp_path: Path, cartpole_report: Path, replay: Replay) -> None:
    report, folder = cartpole_report, tmp_path / "videos"
    document = json.loads(report.read_text())
    spec = document["env"]["spec"]
    spec["kwargs"] = {"render_mode": "rgb_array"}
    for name, arguments in (("RecordVideo", {"video_folder": str(folder)}), ("HumanRendering", {})):
        entry_point = f"gymnasium.wrappers.rendering:{name}"
        spec["additional_wrappers"] = [{"name": name, "entry_point": entry_point, "kwargs": arguments}]
        report.write_text(json.dumps(document))
        result = replay(report)
        assert result.exit_code == 2
        assert entry_point in result.stderr
        assert not folder.exists()
    spec["additional_wrappers"] = []
    for mode, built in (("human", None), ("rgb_array", "rgb_array")):
        spec["kwargs"] = {"render_mode": mode}
        report.write_text(json.dumps(document))
        (env_fn,) = env_functions(load(report), None)
        with contextlib.closing(env_fn()) as env:
            assert env.render_mode == built


# --- what is no report ----------------------------------------------------------------------------


def test_without_a_way_to_the_env_it_says_what_to_give(reports: Path, replay: Replay) -> None:
    report = killed(CounterEnv, 3, reports)
    result = replay(report)
    assert result.exit_code == 2
    for word in ("no spec", "--env ID", "module:function", "--trust"):
        assert word in result.stderr
    for name, said in (("no.such:make", "cannot be imported"), ("json:nothing", "no such function"), ("Nix-v0", "id")):
        result = replay(report, "--env", name)
        assert result.exit_code == 2
        assert said in result.stderr


def damaged(report: Path, how: str) -> None:
    beside, text = report.with_suffix(".npz"), report.read_text()
    if how == "no json":
        report.unlink()
    elif how == "no npz":
        beside.unlink()
    elif how == "half json":
        report.write_text(text[: len(text) // 2])
    elif how == "half npz":
        beside.write_bytes(beside.read_bytes()[: beside.stat().st_size // 2])
    elif how == "noise":
        beside.write_bytes(os.urandom(1000))
    elif how == "bits":
        data = bytearray(beside.read_bytes())
        data[200:260] = os.urandom(60)
        beside.write_bytes(data)
    elif how == "another npz":
        np.savez(beside, kind=np.zeros(3))
    elif how == "fewer entries":
        with_arrays(report, entries=np.zeros(16, np.uint8))
    elif how == "half pending":
        with np.load(beside) as file:
            pending = file["pending"]
        with_arrays(report, pending=pending[: len(pending) - 1])
    elif how == "no kwargs":
        document = json.loads(text)
        document["env"]["spec"]["kwargs"] = 3
        report.write_text(json.dumps(document))
    elif how == "no build":
        with_arrays(report, build=np.zeros(1, np.uint8))
    else:
        document = {**json.loads(text), **DOCUMENTS[how]}
        report.write_text(json.dumps(document))


DOCUMENTS: dict[str, dict[str, Any]] = {
    "foreign": {"format": "something else"},
    "newer": {"version": 1000},
    "no dict": {"journal": [1]},
    "nothing": {"loss": None},
}
DAMAGE = [
    "no json", "no npz", "half json", "half npz", "noise", "bits", "another npz", "fewer entries", "half pending",
    "no kwargs", "no build", *DOCUMENTS,
]  # fmt: skip


def test_what_is_broken_or_foreign_is_said_to_be_so(cartpole_report: Path, tmp_path: Path, replay: Replay) -> None:
    original = cartpole_report
    for how in DAMAGE:
        copy = tmp_path / f"{how}.json"
        for suffix in (".json", ".npz"):
            copy.with_suffix(suffix).write_bytes(original.with_suffix(suffix).read_bytes())
        damaged(copy, how)
        with pytest.raises(ReportError, match=re.escape(str(copy.with_suffix("")))):
            load(copy)
    result = replay(tmp_path / "foreign.json")
    assert result.exit_code == 2
    assert (
        result.stderr.strip()
        == f'{tmp_path}/foreign.json is not a report of multienv: it does not say "format": "multienv-report".'
    )
    with np.load(original.with_suffix(".npz")) as file:
        pending = file["pending"]
    pending[1] = 15  # the action's tag
    with_arrays(original, pending=pending)
    result = replay(original)
    assert result.exit_code == 2
    assert "the action that was fatal cannot be read" in result.stderr
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ReportError):
        load(tmp_path / "list.json")


def test_the_texts_of_a_report_do_not_steer_the_terminal(cartpole_report: Path, replay: Replay) -> None:
    document = json.loads(cartpole_report.read_text())
    evil = "\x1b]0;title\x07\x1b[2J\x9b\udc80"
    document["what"] = document["loss"]["step"] = document["recovery"]["outcome"] = evil
    document["env"]["spec"]["additional_wrappers"] = [{"name": "x", "entry_point": f"x:{evil}", "kwargs": {}}]
    cartpole_report.write_text(json.dumps(document))
    listed, refused = replay(), replay(cartpole_report)
    del document["env"]["spec"]["additional_wrappers"][:]
    cartpole_report.write_text(json.dumps(document))
    for result, code in ((listed, 0), (refused, 2), (replay(cartpole_report), 0)):
        assert result.exit_code == code
        assert "]0;title" in result.stdout  # it is shown
        assert all(character.isprintable() or character == "\n" for character in result.output)


# --- several envs in a process ----------------------------------------------------------------------


def test_the_envs_of_a_process_are_replayed_together(reports: Path, replay: Replay) -> None:
    fns = [partial(gymnasium.make, "CartPole-v1")] * 6
    with contextlib.closing(SubprocessVectorEnv(fns, envs_per_worker=3)) as envs:
        envs.action_space.seed(0)
        envs.reset(seed=1)
        for _ in range(60):
            envs.step(envs.action_space.sample())
        os.kill(envs.statistics()[1].pid, signal.SIGKILL)
        envs.step(envs.action_space.sample())
        settle()
    (report,) = reports.glob("*.json")
    assert json.loads(report.read_text())["build"]["first_env"] == 3
    result = replay(report)
    assert result.exit_code == 0, result.output
    assert "All 61 answers are as they were recorded." in result.stdout


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
    result = replay_apart(path, "--trust", "--pdb", stdin="p len(env), action.tolist()\nc\n")
    assert result.returncode == -signal.SIGSEGV, result.stdout + result.stderr
    assert "(3, [1, 3, 2])" in result.stdout
    assert "All 6 answers are as they were recorded." in result.stdout


def test_a_batch_is_replayed_past_a_truncation(reports: Path, module: Any, replay: Replay) -> None:
    where = module("def make(): return FaultyEnv(fault=Fault('segv', 'step', action=3))")
    fns = [partial(FaultyEnv, fault=Fault("segv", "step", action=3))] * 3
    with contextlib.closing(SubprocessVectorEnv(fns, envs_per_worker=3)) as envs:
        envs.reset(seed=1)
        envs.step(np.array([1, 2, 1]))
        *_, truncations, _ = envs.step(np.array([1, 3, 2]))
        assert truncations.tolist() == [False, True, False]
        for _ in range(5):
            envs.step(np.array([1, 2, 1]))
        os.kill(envs.statistics()[0].pid, signal.SIGKILL)
        envs.step(np.array([2, 2, 2]))
    settle()
    result = replay("latest", "--env", "mine:make", path=where)
    assert result.exit_code == 0, result.output
    assert "All 8 answers are as they were recorded." in result.stdout
    assert "The fault did not come again: the request returned." in result.stdout
