"""preload: modules are imported once, in a process that workers are forked from; or by each worker, with a reason."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kit import CounterEnv, assert_same_trajectory, is_alive, kill_worker, monitor_pid, no_leaks, rollout
from kit.trainer_process import becomes_true
from multienv import (
    AsyncSubprocessEnvManager,
    Deadlines,
    RestartPolicy,
    SubprocessEnv,
    SubprocessVectorEnv,
    create_subprocess_envs,
)
from multienv.errors import EnvsFailedError, UsageError

REPLAYED = RestartPolicy(snapshots=False, backoff=0.0)
LINE = "preload is not used, and each worker imports {} for itself: {}"

Slow = Callable[..., str]


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slow:
    """Return what writes a module: it notes each import, then runs the lines it is given; and return its name."""
    (tmp_path / "site-packages").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))

    def write(lines: str = "", name: str = "slow_module", folder: str = "site-packages") -> str:
        note = f"""
            import os, sys
            VALUE = os.environ.get("PRELOAD_TEST")
            with open({str(tmp_path / "imports")!r}, "a") as notes:
                notes.write(f"{{os.getpid()}} {{VALUE}} {{__name__}}\\n")
        """
        (tmp_path / folder / f"{name}.py").write_text(textwrap.dedent(note) + textwrap.dedent(lines))
        importlib.invalidate_caches()
        return name

    return write


@pytest.fixture
def imports(tmp_path: Path) -> Callable[[], list[str]]:
    """Return what lists the imports so far: the pid, the variable that the module saw, and its name."""
    return lambda: (tmp_path / "imports").read_text().splitlines() if (tmp_path / "imports").exists() else []


class ImportingEnv(CounterEnv):
    """Imports the modules in its constructor."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names or ("slow_module",):
            self.value = importlib.import_module(name).VALUE
        self.pid = os.getpid()
        self.parent = os.getppid()


def children_of(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def templates() -> list[int]:
    return [pid for pid in children_of(monitor_pid()) if is_alive(pid) and name_of(pid) == "multienv preloa\n"]


def name_of(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return Path(f"/proc/{pid}/comm").read_text()
    return ""


def template_pid() -> int:
    """Return the pid of the only template, when it has its name and those before it have ended."""
    assert becomes_true(lambda: len(templates()) == 1)
    return templates()[0]


def kill_template() -> None:
    """Kill the template, and wait until the monitor has noted it: until then, workers are launched without one."""
    pid = template_pid()
    os.kill(pid, signal.SIGKILL)
    assert becomes_true(lambda: pid not in children_of(monitor_pid()))


def test_modules_are_imported_once_for_all_workers_and_their_replacements(slow: Slow, imports: Any) -> None:
    with SubprocessVectorEnv(
        [ImportingEnv] * 4, envs_per_worker=1, preload=[slow()], restart=REPLAYED, reports=""
    ) as envs:
        envs.reset(seed=0)
        pids = envs.get_attr("pid")
        envs.step([1] * 4)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        envs.step([1] * 4)
        assert not set(pids) & set(envs.get_attr("pid"))
        assert set(envs.get_attr("parent")) == {monitor_pid()}
        assert len(imports()) == 1


@pytest.mark.parametrize("preload", [pytest.param(("slow_module",), marks=pytest.mark.ci), "auto"])
def test_a_run_with_kills_is_the_run_without(slow: Slow, preload: Any) -> None:
    slow()
    with SubprocessEnv(ImportingEnv, preload=preload, worker_seed=1, reports="") as env:
        calm = rollout(env, num_steps=30, seed=3)
    for restart in (REPLAYED, RestartPolicy(backoff=0.0)):
        with SubprocessEnv(ImportingEnv, preload=preload, worker_seed=1, restart=restart, reports="") as env:
            struck = rollout(
                env, num_steps=30, seed=3, before_step=lambda step: kill_worker(env) if step % 7 == 3 else None
            )
            told = env.statistics()
        assert_same_trajectory(calm, struck)
        assert told.restarts == told.exact_recoveries == 4


@pytest.mark.parametrize(("sent", "words"), [("exit", "exited with code 7"), ("kill", "SIGKILL")])
def test_how_a_worker_ended_is_exact(slow: Slow, sent: str, words: str) -> None:
    restart = RestartPolicy(on_crash="raise")
    with SubprocessEnv(ExitingEnv, preload=[slow()], restart=restart, reports="") as env:
        env.reset(seed=0)
        with pytest.raises(Exception, match=words):
            env.call(sent)


class ExitingEnv(ImportingEnv):
    def exit(self) -> None:
        os._exit(7)

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_template_that_dies_is_made_again_for_the_next_worker(slow: Slow, imports: Any) -> None:
    with SubprocessEnv(ImportingEnv, preload=[slow()], restart=REPLAYED, reports="") as env:
        env.reset(seed=0)
        for step in range(1, 4):
            kill_template()
            kill_worker(env)
            observation, _, _, truncated, _ = env.step(1)
            assert (int(observation[0]), truncated) == (step, False)
        assert len(imports()) == 4


def test_a_template_that_is_stopped_goes_on(slow: Slow, imports: Any) -> None:
    with SubprocessEnv(ImportingEnv, preload=[slow()], restart=REPLAYED, reports="") as env:
        env.reset(seed=0)
        os.kill(template_pid(), signal.SIGSTOP)
        kill_worker(env)
        assert not env.step(1)[3]
        assert len(imports()) == 1


def test_a_template_that_is_stopped_while_it_imports_goes_on(slow: Slow, imports: Any) -> None:
    name = slow("import signal; os.kill(os.getpid(), signal.SIGSTOP)")
    with SubprocessEnv(ImportingEnv, preload=[name], deadlines=Deadlines(start=20.0), reports="") as env:
        env.initialize()
        assert len(imports()) == 1


KILLED = """
    import pathlib, signal
    if open('/proc/self/comm').read().startswith('multienv preloa') and not pathlib.Path({!r}).exists():
        {}
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("preload", [("slow_module",), "auto"])
def test_a_template_that_is_killed_while_it_imports_is_made_again_for_the_next_worker(
    slow: Slow, imports: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], preload: Any
) -> None:
    slow(KILLED.format(str(tmp_path / "killed"), f"pathlib.Path({str(tmp_path / 'killed')!r}).touch()"))
    with SubprocessEnv(ImportingEnv, preload=preload, restart=REPLAYED, reports="") as env:
        env.reset(seed=0)
        assert becomes_true((tmp_path / "killed").exists)
        found = []
        for _ in range(4):
            kill_worker(env)
            assert not env.step(1)[3]
            found.append(len(imports()))
        # A worker that did without, and twice the template; one more if a launch came before its death was noticed.
        assert found[1] == found[3] <= 4
    assert "preload is not used" not in capfd.readouterr().err


def test_a_template_that_is_killed_again_and_again_while_it_imports_is_given_up(
    slow: Slow, imports: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = slow(KILLED.format(str(tmp_path / "never"), "pass"))
    with SubprocessEnv(CounterEnv, preload=[name], restart=REPLAYED, reports="") as env:
        env.reset(seed=0)
        found = []
        for _ in range(4):
            kill_worker(env)
            assert not env.step(1)[3]
            found.append(len(imports()))
        assert found[1:] == [3, 3, 3]
    assert capfd.readouterr().err.count("ended by signal 9") == 1


def test_a_new_monitor_has_a_new_template(slow: Slow, imports: Any) -> None:
    with SubprocessEnv(ImportingEnv, preload=[slow()], restart=REPLAYED, reports="") as env:
        env.reset(seed=0)
        template = template_pid()
        worker = env.get_attr("pid")
        os.kill(monitor_pid(), signal.SIGKILL)
        assert_ends(template)
        assert_ends(worker)
        assert not env.step(1)[3]
        assert len(imports()) == 2


# --- imports that go wrong ------------------------------------------------------------------------

THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("raise RuntimeError('no licence')\n", "importing slow_module raised RuntimeError: no licence."),
        (THREAD, "importing slow_module has left threads (thread "),
        ("import socket; KEPT = socket.socketpair()\n", "importing slow_module has left sockets (socket:["),
        ("import subprocess; KEPT = subprocess.Popen(['sleep', '1000'])\n", "has left child processes"),
        ("import mmap; KEPT = mmap.mmap(-1, 4096)\n", "has left shared memory"),
        ("time = __import__('time'); os.fork() and time.sleep(1)\n", "has left child processes"),
        ("os.abort()\n", "the process that was to import it ended by signal 6 (Aborted)."),
        ("os._exit(3)\n", "the process that was to import it ended with exit code 3."),
    ],
)
def test_workers_do_without_a_preload_that_cannot_be_forked_and_a_line_says_why(
    slow: Slow, imports: Any, capfd: pytest.CaptureFixture[str], lines: str, reason: str
) -> None:
    name = slow(lines)
    with no_leaks():
        envs = create_subprocess_envs([CounterEnv] * 2, preload=[name], restart=REPLAYED, reports="")
        for env in envs:
            env.reset(seed=0)
            kill_worker(env)
            assert not env.step(1)[3]
        assert len(imports()) == 1
        for env in envs:
            env.close()
    told = capfd.readouterr().err
    assert LINE.format(name, "") in told
    assert reason in told
    assert told.count("preload is not used") == 1


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("import time; time.sleep(1000)", marks=pytest.mark.ci),
        "import ctypes; ctypes.CDLL(None).sleep(1000)",
    ],
)
def test_an_import_that_hangs_is_killed_after_half_of_the_deadline(
    slow: Slow, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    name = slow(how)
    with SubprocessEnv(CounterEnv, preload=[name], deadlines=Deadlines(start=16.0), reports="") as env:
        env.reset(seed=0)
        assert env.statistics().restarts == 0
    told = capfd.readouterr().err
    assert LINE.format(name, "the import was not done after half of Deadlines.start.") in told
    assert "slow_module.py" in told  # where it hung


def test_close_during_the_import_leaves_nothing(slow: Slow, imports: Any) -> None:
    with no_leaks():
        env = SubprocessEnv(CounterEnv, preload=[slow("import time; time.sleep(1000)")], reports="")
        env.start()
        assert becomes_true(imports)
        env.close()


def test_a_trainer_that_is_killed_during_the_import_leaves_nothing(slow: Slow, imports: Any, tmp_path: Path) -> None:
    name = slow("import ctypes; ctypes.CDLL(None).sleep(1000)")
    code = f"""
        import sys; sys.path[:] = {sys.path!r}
        from kit import CounterEnv
        from multienv import SubprocessEnv
        SubprocessEnv(CounterEnv, preload=[{name!r}], reports="").initialize()
    """
    trainer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    assert becomes_true(imports)
    trainer.kill()
    trainer.wait()
    assert_ends(int(imports()[0].split()[0]))


# --- which template -------------------------------------------------------------------------------


def test_variables_are_set_before_the_import_and_each_set_of_them_has_its_template(slow: Slow, imports: Any) -> None:
    name = slow()
    with SubprocessVectorEnv(
        [ImportingEnv] * 4,
        envs_per_worker=1,
        preload=[name],
        worker_env=lambda worker: {"PRELOAD_TEST": str(worker % 2)},
        reports="",
    ) as envs:
        assert envs.get_attr("value") == ("0", "1", "0", "1")
        assert sorted(one.split()[1] for one in imports()) == ["0", "1"]


def test_envs_with_the_same_settings_share_a_template_which_ends_with_the_last_of_them(
    slow: Slow, imports: Any
) -> None:
    name = slow()
    with SubprocessEnv(CounterEnv, reports=""):
        first = SubprocessEnv(ImportingEnv, preload=[name], reports="")
        first.initialize()
        second = SubprocessEnv(ImportingEnv, preload=(name,), reports="")
        second.initialize()
        assert len(imports()) == 1
        template = template_pid()
        for env in (first, second):
            assert is_alive(template)
            env.close()
        assert_ends(template)


def test_a_manager_preloads(slow: Slow, imports: Any) -> None:
    manager = AsyncSubprocessEnvManager([ImportingEnv] * 3, preload=[slow()], reports="")
    manager.launch()
    manager.close()
    assert len(imports()) == 1


@pytest.mark.parametrize(("preload", "shown"), [(["torch"], r"\['torch'\]"), ("auto", "'auto'")])
def test_a_preload_where_workers_are_not_forked_is_refused(preload: Any, shown: str) -> None:
    with pytest.raises(UsageError, match=f"preload={shown} needs workers that are forked.*context='forkserver'"):
        SubprocessEnv(CounterEnv, preload=preload, context="spawn")


# --- "auto" ---------------------------------------------------------------------------------------


def names_of(imports: Any) -> list[str]:
    return [line.split()[2] for line in imports()]


def test_auto_imports_what_the_first_worker_has_imported_and_replacements_are_forked_with_it(
    slow: Slow, imports: Any
) -> None:
    slow()
    with SubprocessEnv(ImportingEnv, preload="auto", restart=REPLAYED, reports="") as env:
        env.reset(seed=0)
        for _ in range(3):
            kill_worker(env)
            assert not env.step(1)[3]
        assert len(imports()) == 2
        assert env.get_attr("parent") == monitor_pid()


def test_with_auto_and_few_cores_the_other_workers_are_forked_with_what_the_first_has_imported(
    slow: Slow, imports: Any
) -> None:
    slow()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with SubprocessVectorEnv([ImportingEnv] * 3, envs_per_worker=1, preload="auto", reports="") as envs:
            envs.reset(seed=0)
            assert len(imports()) == 2
    finally:
        os.sched_setaffinity(0, cores)


def test_with_auto_an_error_of_the_env_that_is_built_first_is_raised_with_those_of_the_others() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with pytest.raises(EnvsFailedError) as caught:
            SubprocessVectorEnv([BrokenEnv, CounterEnv, BrokenEnv], envs_per_worker=1, preload="auto", reports="")
        assert set(caught.value.failures) == {0, 2}
    finally:
        os.sched_setaffinity(0, cores)


class BrokenEnv(CounterEnv):
    def __init__(self) -> None:
        raise RuntimeError("broken")


def test_auto_sets_the_variables_that_env_fn_sets_before_an_import(slow: Slow, imports: Any) -> None:
    name = slow()

    def env_fn() -> ImportingEnv:
        os.environ["PRELOAD_TEST"] = "set"
        return ImportingEnv(name)

    with SubprocessEnv(env_fn, preload="auto", restart=REPLAYED, reports="") as env:
        env.reset(seed=0)
        kill_worker(env)
        env.step(1)
        assert [line.split()[1] for line in imports()] == ["set", "set"]


def test_with_auto_a_run_with_kills_is_the_run_without_if_an_import_draws_random_numbers(slow: Slow) -> None:
    slow("import random; random.random()")
    with SubprocessEnv(DrawingEnv, preload="auto", worker_seed=1, reports="") as env:
        calm = rollout(env, num_steps=10, seed=3)
    with SubprocessEnv(DrawingEnv, preload="auto", worker_seed=1, restart=REPLAYED, reports="") as env:
        struck = rollout(
            env, num_steps=10, seed=3, before_step=lambda step: kill_worker(env) if step % 4 == 3 else None
        )
        assert env.statistics().exact_recoveries == 2
    assert_same_trajectory(calm, struck)


class DrawingEnv(ImportingEnv):
    def step(self, action: Any) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, random.random(), terminated, truncated, info


def test_auto_leaves_out_a_module_that_cannot_be_forked_and_says_so_once(
    slow: Slow, imports: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    slow(), slow(THREAD, "bad_module")
    with no_leaks():
        env = SubprocessEnv(
            partial(ImportingEnv, "slow_module", "bad_module"), preload="auto", restart=REPLAYED, reports=""
        ).initialize()
        env.reset(seed=0)
        assert becomes_true(lambda: names_of(imports).count("slow_module") == 3)  # the worker, and twice the template
        for _ in range(2):
            kill_worker(env)
            assert not env.step(1)[3]
        assert names_of(imports).count("slow_module") == 3
        told = capfd.readouterr().err
        env.close()
    assert told.count("preload='auto' leaves out bad_module: importing bad_module has left threads") == 1
    assert told.count("leaves out") == 1


def test_with_auto_workers_import_for_themselves_if_the_import_fails_elsewhere(
    slow: Slow, imports: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    slow("if open('/proc/self/comm').read().startswith('multienv preloa'): os.abort()")
    with SubprocessEnv(ImportingEnv, preload="auto", restart=REPLAYED, reports="") as env:
        env.reset(seed=0)
        for _ in range(2):
            kill_worker(env)
            assert not env.step(1)[3]
        assert env.statistics().restarts == 2
    assert capfd.readouterr().err.count(LINE.format("what it needs", "the process that was to import it ended")) == 1


def test_auto_imports_no_modules_of_the_user(slow: Slow, imports: Any) -> None:
    slow(), slow(name="my_envs", folder=".")
    with SubprocessEnv(
        partial(ImportingEnv, "my_envs", "slow_module"), preload="auto", restart=REPLAYED, reports=""
    ) as env:
        env.reset(seed=0)
        kill_worker(env)
        env.step(1)
        assert sorted(names_of(imports)) == ["my_envs", "my_envs", "slow_module", "slow_module"]


def test_auto_learns_more_from_an_env_of_another_kind(slow: Slow, imports: Any) -> None:
    slow(), slow(name="other_module")
    with (
        SubprocessEnv(ImportingEnv, preload="auto", restart=REPLAYED, reports="") as first,
        SubprocessEnv(partial(ImportingEnv, "other_module"), preload="auto", restart=REPLAYED, reports="") as second,
    ):
        for env in (first, second):
            env.reset(seed=0)
        for env in (first, second):
            kill_worker(env)
            env.step(1)
        assert names_of(imports).count("other_module") == 2
        template_pid()


def assert_ends(pid: int) -> None:
    assert becomes_true(lambda: not is_alive(pid))


class FolderEnv(CounterEnv):
    def folder(self) -> str:
        return tempfile.gettempdir()

    def say(self, what: str) -> None:
        print(what, flush=True)


def test_each_worker_has_a_temporary_folder_of_its_own(slow: Slow) -> None:
    module = slow("import tempfile; tempfile.gettempdir()")
    with SubprocessVectorEnv([FolderEnv] * 2, envs_per_worker=1, preload=[module], reports="") as envs:
        folders = envs.call("folder")
        assert len(set(folders)) == 2
        assert all(Path(folder).parent.name.startswith("multienv-") for folder in folders)


def test_a_module_may_set_signal_handlers(slow: Slow) -> None:
    module = slow("import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    with SubprocessVectorEnv([FolderEnv] * 4, envs_per_worker=1, preload=[module], reports="") as envs:
        assert len(set(envs.call("folder"))) == 4
        assert [one.losses for one in envs.statistics()] == [0] * 4


def test_a_worker_has_the_stdout_that_the_trainer_has_when_it_is_launched(slow: Slow, tmp_path: Path) -> None:
    module, stdout = slow(), os.dup(1)
    with SubprocessEnv(FolderEnv, preload=[module], reports="") as first, (tmp_path / "out").open("w") as out:
        first.initialize()
        os.dup2(out.fileno(), 1)
        try:
            with SubprocessEnv(FolderEnv, preload=[module], reports="") as second:
                second.initialize().call("say", "second")
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
    assert (tmp_path / "out").read_text() == "second\n"


def test_what_a_module_changes_in_its_process_is_kept(slow: Slow, tmp_path: Path) -> None:
    module = slow(f"import os, sys; os.environ['SET'] = 'yes'; sys.path.insert(0, '/set'); os.chdir({str(tmp_path)!r})")
    with SubprocessEnv(ShowingEnv, preload=[module], worker_env={"TMPDIR": str(tmp_path)}, reports="") as env:
        env.initialize()
        assert env.call("show") == ("yes", "/set", str(tmp_path), str(tmp_path))


class ShowingEnv(CounterEnv):
    def show(self) -> tuple[str | None, str, str, str]:
        return os.environ.get("SET"), sys.path[0], os.getcwd(), tempfile.gettempdir()


def test_a_module_that_leaves_one_file_open_is_not_preloaded(slow: Slow, capfd: pytest.CaptureFixture[str]) -> None:
    module = slow("FILE = open(__file__)")
    with SubprocessEnv(CounterEnv, preload=[module], reports="") as env:
        env.initialize()
    assert "has left an open file (" in capfd.readouterr().err
