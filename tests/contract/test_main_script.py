"""Names of the trainer's main script are found in a worker, whose ``__main__`` is another one; or an error helps.

Each test runs a script, as a user does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import os, pickle, signal, sys, threading
import gymnasium
from kit import CounterEnv
from multienv import SubprocessEnv, SubprocessVectorEnv
print("running as", __name__, flush=True)

class Travels:
    pass

class StaysBehind:
    pass

class Env(CounterEnv):
    def load(self, name):
        return pickle.loads(f"c__main__\\n{name}\\n(tR.".encode())

    def loads_same(self):
        return type(self.load("Travels")) is Travels

    def imports(self, name):
        return getattr(__import__("__main__"), name)
"""
GUARD = 'if __name__ == "__main__":\n    '


def ran(script: str, tmp_path: Path, how: str = "file") -> subprocess.CompletedProcess[str]:
    """Run a script as ``python file``, ``python -m module`` or ``python - < file``."""
    path = tmp_path / "the_script.py"
    path.write_text(HEAD + script)
    arguments = {"file": [str(path)], "module": ["-m", path.stem], "stdin": ["-"]}[how]
    return subprocess.run(
        [sys.executable, "-u", *arguments],  # what it prints comes in order with what its workers print
        cwd=tmp_path,
        input=path.read_text() if how == "stdin" else "",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def line_of(start: str, script: str = "") -> int:
    lines = (HEAD + script).splitlines()
    return 1 + next(number for number, line in enumerate(lines) if line.startswith(start))


def succeeds(script: str, tmp_path: Path, how: str = "file") -> list[str]:
    """Run a script, which must succeed; return what it printed, less the first line."""
    done = ran(script, tmp_path, how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[1:]


ENTRY_POINT = """
gymnasium.register("Mine-v0", entry_point="__main__:Env")
for context in ("forkserver", "spawn"):
    with SubprocessEnv(lambda: gymnasium.make("Mine-v0"), context=context) as env:
        env.reset(seed=0)
        os.kill(env.statistics().pid, signal.SIGKILL)
        print(*env.step(1)[0], env.statistics().restarts)
"""


@pytest.mark.parametrize("how", [pytest.param("file", marks=pytest.mark.ci), "stdin"])
def test_entry_point_in_the_main_script_is_found_without_running_it_again(how: str, tmp_path: Path) -> None:
    lines = succeeds(ENTRY_POINT, tmp_path, how)
    assert len(lines) == 2  # no "running as" of a worker
    assert all(line.startswith("1") and line.endswith(" 1") for line in lines)


TRAVELS = """
for env_fn in (Env, lambda: Env()):
    with SubprocessEnv(env_fn) as env:
        for _ in range(2):
            env.reset(seed=0)
            print(env.call("loads_same"), type(env.call("load", "Travels")) is Travels, env.call("imports", "Env") is Env)
            os.kill(env.statistics().pid, signal.SIGKILL)
"""


def test_class_that_travelled_is_the_one_that_is_unpickled_in_the_env(tmp_path: Path) -> None:
    """Also in a process that replaces a lost one, and back in the trainer."""
    assert succeeds(TRAVELS, tmp_path, "stdin") == ["True True True"] * 4


IMPORTS = f"""
{GUARD}with SubprocessEnv(Env) as env:
        for _ in range(2):
            print(type(env.call("load", "StaysBehind")) is StaysBehind)
            print(type(env.call("load", "StaysBehind")) is StaysBehind)
            env.reset(seed=0)
            os.kill(env.statistics().pid, signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["file", pytest.param("module", marks=pytest.mark.ci)])
def test_class_that_did_not_travel_is_found_by_importing_the_script_once_in_a_process(how: str, tmp_path: Path) -> None:
    once = ["running as __mp_main__", "True", "True"]
    # The replacement repeats the recorded calls, and so the import, before it is asked.
    assert succeeds(IMPORTS, tmp_path, how) == once * 2


def error_in(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.strip().rpartition("UsageError: ")[2]


def test_class_that_did_not_travel_and_is_in_no_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    script = 'with SubprocessEnv(Env) as env:\n    env.call("load", "StaysBehind")\n'
    told = error_in(ran(script, tmp_path, "stdin"))
    line = line_of("        return pickle.loads(")
    assert told.startswith(f"<stdin>:{line} looks up __main__.StaysBehind in a worker")
    assert "Move StaysBehind to a module" in told


def test_name_that_is_only_defined_below_the_guard_is_named_with_the_remedy(tmp_path: Path) -> None:
    script = f'{GUARD}class Late: pass\n    with SubprocessEnv(Env) as env:\n        env.call("load", "Late")\n'
    told = error_in(ran(script, tmp_path))
    assert f"the_script.py:{line_of('        return pickle.loads(')} looks up __main__.Late in a worker" in told
    assert "it stands below `if __name__ == '__main__':`" in told


def test_unknown_name_does_not_import_the_script(tmp_path: Path) -> None:
    script = """
with SubprocessEnv(Env) as env:
    try:
        env.call("imports", "no_such_name")
    except AttributeError as error:
        print(str(error).splitlines()[0])
"""
    (line,) = succeeds(script, tmp_path)
    assert "module '__main__' has no attribute 'no_such_name'" in line


def test_function_of_the_script_is_not_sent_to_a_pool_of_the_env(tmp_path: Path) -> None:
    """Its processes have another ``__main__``: they would end when they unpickle it, and be replaced for ever."""
    script = """
import multiprocessing

def double(number):
    return 2 * number

class PoolEnv(Env):
    def compute(self):
        with multiprocessing.get_context("forkserver").Pool(1) as pool:
            return pool.map(double, [1])

with SubprocessEnv(PoolEnv) as env:
    env.call("compute")
"""
    done = ran(script, tmp_path)
    assert "PicklingError: Can't pickle <function double" in done.stderr


@pytest.mark.parametrize(
    "made", [pytest.param("SubprocessEnv(Env)", marks=pytest.mark.ci), "SubprocessVectorEnv([Env] * 2)"]
)
def test_script_without_a_guard_does_not_start_its_training_in_a_worker(made: str, tmp_path: Path) -> None:
    script = f"""
{made}.close()
with SubprocessEnv(Env) as env:
    env.call("load", "StaysBehind")
"""
    done = ran(script, tmp_path)
    assert done.stdout.splitlines() == ["running as __main__", "running as __mp_main__"]
    told = error_in(done)
    assert "Put the code that makes envs below `if __name__ == '__main__':`" in done.stderr
    assert "StaysBehind" in told


@pytest.mark.parametrize(
    "env_fn", [pytest.param("Mine", marks=pytest.mark.ci), 'lambda: gymnasium.make("the_module:Mine-v0")']
)
def test_module_without_a_guard_does_not_start_workers_in_its_workers(env_fn: str, tmp_path: Path) -> None:
    module = f"""
import gymnasium
from kit import CounterEnv
from multienv import SubprocessVectorEnv
print("importing", __name__, flush=True)
class Mine(CounterEnv):
    pass
gymnasium.register("Mine-v0", entry_point=Mine)
SubprocessVectorEnv([{env_fn}])
"""
    (tmp_path / "the_module.py").write_text(module)
    done = ran("import the_module", tmp_path)
    assert done.stdout.splitlines()[1:] == ["importing the_module"] * 2
    told = error_in(done)
    assert f"{tmp_path}/the_module.py, line 9. Put the code that makes envs below" in told


UNPICKLABLE = """
LOCK = threading.Lock()

def guarded():
    return LOCK

class Locking(Env):
    def step(self, action):
        guarded()
        return super().step(action)

"""


def names_the_lock(told: str, file: str) -> bool:
    line = line_of("def guarded():", UNPICKLABLE)
    return f"A _thread.lock is in the global LOCK, which guarded() ({file}:{line}) uses." in told


def test_global_that_cannot_be_pickled_is_named_with_the_function_that_uses_it(tmp_path: Path) -> None:
    told = error_in(ran(f"{UNPICKLABLE}SubprocessEnv(lambda: Locking())\n", tmp_path, "stdin"))
    assert names_the_lock(told, "<stdin>")
    assert "Build what it needs inside the function" in told


def test_global_that_cannot_be_pickled_is_that_of_the_imported_script(tmp_path: Path) -> None:
    """Also in the process that replaces a lost one."""
    script = f"""{UNPICKLABLE}
{GUARD}with SubprocessEnv(lambda: Locking()) as env:
        env.reset(seed=0)
        env.step(1)
        os.kill(env.statistics().pid, signal.SIGKILL)
        print(env.step(1)[0][0], env.statistics().restarts)
"""
    assert succeeds(script, tmp_path) == ["running as __mp_main__", "running as __mp_main__", "2.0 1"]


def test_class_that_is_imported_in_a_worker_is_the_one_of_what_is_sent_to_it(tmp_path: Path) -> None:
    """By value, ``StaysBehind`` would be another class there."""
    script = f"""{UNPICKLABLE}
class Asked(Locking):
    def is_known(self, value):
        return isinstance(value, StaysBehind), value
{GUARD}with SubprocessEnv(lambda: Asked()) as env:
        is_known, value = env.call("is_known", StaysBehind())
        print(is_known, type(value) is StaysBehind)
"""
    assert succeeds(script, tmp_path) == ["running as __mp_main__", "True True"]


def test_report_of_an_env_that_needs_its_script_is_replayed(tmp_path: Path, reports: Path) -> None:
    script = f"""{UNPICKLABLE}
{GUARD}with SubprocessEnv(lambda: Locking()) as env:
        env.reset(seed=0)
        env.step(1)
        os.kill(env.statistics().pid, signal.SIGKILL)
        env.step(1)
"""
    succeeds(script, tmp_path)
    (report,) = reports.glob("*.json")
    arguments = [sys.executable, "-m", "multienv", "replay", str(report)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert "running as __mp_main__" in done.stdout
    assert "match the recorded" in done.stdout, done.stdout + done.stderr


def test_missing_guard_is_told_with_its_line_where_the_script_must_be_imported(tmp_path: Path) -> None:
    script = f"{UNPICKLABLE}\nSubprocessVectorEnv([lambda: Locking()])\n"
    done = ran(script, tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["running as __main__", "running as __mp_main__"]
    file = str(tmp_path / "the_script.py")
    assert names_the_lock(done.stderr, file)
    line = line_of("SubprocessVectorEnv(", script)
    assert f"is made while a worker imports {file}, line {line}. Put the code that makes envs below" in done.stderr
