"""``multienv run``: a script that nobody changed runs as it does by itself, and its workers may die.

Each test runs scripts as a user does. What stands under the names of the libraries is tested in
``tests/contract/test_replace_vector_envs.py``, and with real programs in ``tests/adapters/test_run_programs.py``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import multienv
from multienv.cli.run import run_command

HEAD = """
import os, signal, sys, threading
import gymnasium
import numpy as np
os.write(1, f"running as {__name__}\\n".encode())
"""
TRAINING = """
def trained(envs, kills=False):
    observations, _ = envs.reset(seed=3)
    seen = [observations]
    envs.action_space.seed(3)
    for step in range(60):
        if kills and step % 20 == 10:
            os.kill(envs.statistics()[0].pid, signal.SIGKILL)
        seen += envs.step(envs.action_space.sample())[:4]
    envs.close()
    return [part.tobytes() for part in seen]

"""


def started(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(multienv.__file__).parents[1])])
    return subprocess.Popen(
        [sys.executable, "-m", "multienv", "run", *arguments],
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def ran(*arguments: str, cwd: Path) -> tuple[int, list[str], list[str]]:
    """Return the exit code, and the lines on stdout and on stderr."""
    process = started(*arguments, cwd=cwd)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout.splitlines(), stderr.splitlines()


def test_script_without_a_guard_runs_as_main_and_its_killed_workers_are_recovered(tmp_path: Path) -> None:
    script = f"""{HEAD}{TRAINING}
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
print(sys.argv, sys.path[0] == os.path.dirname(__file__), __spec__, sys.modules["__main__"].sys is sys)
fns = [lambda: gymnasium.make("CartPole-v1")] * 2
envs = AsyncVectorEnv(fns)
print(isinstance(envs, gymnasium.vector.AsyncVectorEnv), type(SyncVectorEnv(fns)).__module__)
print(trained(envs, kills=True) == trained(SyncVectorEnv(fns)))
print(sorted({{"typer", "rich", "psutil", "stable_baselines3"}} & sys.modules.keys()))
sys.exit(3)
"""
    (tmp_path / "train.py").write_text(script)
    options = ("--summary", "told-$RANK.json", "--max-rss", "2GiB", "--step-deadline", "30")
    os.environ["RANK"] = "7"
    try:
        code, stdout, stderr = ran(*options, "--", "train.py", "--", "--serial", cwd=tmp_path)
    finally:
        del os.environ["RANK"]
    assert stdout == [
        "running as __main__",
        "['train.py', '--', '--serial'] True None True",
        "True gymnasium.vector.sync_vector_env",
        "True",
        "[]",
    ], stderr
    assert code == 3
    assert stderr[-1] == "multienv run: 2 envs. Lost workers: 3 × SIGKILL. Outcomes: 3 × exact."
    told = json.loads((tmp_path / "told-7.json").read_text())
    assert told["envs"] == 2
    assert told["losses"] == {"SIGKILL": 3}
    assert told["outcomes"]["exact"] == 3


def test_package_that_its_workers_must_import_runs_by_its_name_and_shows_its_own_traceback(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text("WORD = 'found'\n")
    script = f"""{HEAD}
from .parts import WORD
LOCK = threading.Lock()
class Locking(gymnasium.Wrapper):
    def step(self, action):
        with LOCK:
            return super().step(action)
if __name__ == "__main__":
    print(WORD, __spec__.name, __package__, os.path.basename(sys.argv[0]), sys.argv[1:], sys.path[0] == os.getcwd())
    envs = gymnasium.make_vec("CartPole-v1", 2, "async", wrappers=[Locking])
    envs.reset(seed=0)
    envs.step(envs.action_space.sample())
    raise ValueError("of the script")
"""
    (package / "train.py").write_text(script)
    code, stdout, stderr = ran("-m", "package.train", "-x", cwd=tmp_path)
    assert code == 1
    assert stdout[:2] == ["running as __main__", "found package.train package train.py ['-x'] True"], stderr
    assert set(stdout[2:]) == {"running as __mp_main__"}
    traceback = [line for line in stderr if line.startswith(("Traceback", "  File", "ValueError"))]
    file = package / "train.py"
    line = script.splitlines().index('    raise ValueError("of the script")') + 1
    assert traceback == [
        "Traceback (most recent call last):",
        f'  File "{file}", line {line}, in <module>',
        "ValueError: of the script",
    ]
    assert stderr[-1] == "multienv run: 2 envs. Lost workers: none. Outcomes: none."


def test_ctrl_c_is_the_scripts(tmp_path: Path) -> None:
    script = f"""{HEAD}
envs = gymnasium.vector.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
envs.reset(seed=0)
try:
    print("ready", flush=True)
    while True:
        envs.step(np.zeros(2, np.int64))
except KeyboardInterrupt:
    envs.step(np.zeros(2, np.int64))
    print("saved", flush=True)
    raise
"""
    (tmp_path / "train.py").write_text(script)
    process = started("train.py", cwd=tmp_path)
    assert process.stdout is not None
    while process.stdout.readline() != "ready\n":
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert stdout == "saved\n", stderr
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt\n" in stderr
    assert "cli/run.py" not in stderr
    assert stderr.splitlines()[-1] == "multienv run: 2 envs. Lost workers: none. Outcomes: none."


@pytest.mark.parametrize(
    ("line", "code"),
    [("import no_such_module", 1), ("sys.exit('needs a GPU')", 1), ("sys.exit(2)", 2), ("sys.exit(0)", 0)],
)
def test_script_that_fails_before_it_makes_an_env_is_given_no_advice(tmp_path: Path, line: str, code: int) -> None:
    (tmp_path / "train.py").write_text(f"{HEAD}\n{line}\n")
    ended, _, stderr = ran("train.py", cwd=tmp_path)
    assert ended == code
    advice = "" if code else "; see --serial and --single"
    assert stderr[-1] == f"multienv run: the script made no env that multienv replaces{advice}."


SLEEPING = f"""{HEAD}
envs = gymnasium.vector.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
envs.reset(seed=0)
os.kill(envs.statistics()[0].pid, signal.SIGKILL)
envs.step(np.zeros(2, np.int64))
"""


def terminated(script: str, cwd: Path) -> tuple[int, list[str], list[str]]:
    """Send SIGTERM to a script when it has printed "ready"; return its exit code, and what it wrote after that."""
    (cwd / "train.py").write_text(script)
    process = started("--summary", "told.json", "train.py", cwd=cwd)
    assert process.stdout is not None
    while process.stdout.readline() != "ready\n":
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout.splitlines(), stderr.splitlines()


@pytest.mark.parametrize("waits", ["time.sleep(60)", "[envs.step(np.zeros(2, np.int64)) for _ in range(10**9)]"])
def test_sigterm_tells_what_became_of_the_workers_and_ends_the_script_as_alone(tmp_path: Path, waits: str) -> None:
    code, stdout, stderr = terminated(f'{SLEEPING}\nimport time\nprint("ready", flush=True)\n{waits}\n', tmp_path)
    assert code == -signal.SIGTERM
    assert stdout == []
    assert stderr[-1] == "multienv run: 2 envs. Lost workers: 1 × SIGKILL. Outcomes: 1 × exact."
    assert json.loads((tmp_path / "told.json").read_text())["losses"] == {"SIGKILL": 1}


def test_handler_of_the_script_for_sigterm_is_left_alone(tmp_path: Path) -> None:
    script = f"""{SLEEPING}
import time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(5)))
print("ready", flush=True)
time.sleep(60)
"""
    code, stdout, stderr = terminated(script, tmp_path)
    assert (code, stdout) == (5, ["saved"])
    assert sum(line.startswith("multienv run: ") for line in stderr) == 1


def test_sigterm_after_the_last_line_does_not_tell_it_again(tmp_path: Path) -> None:
    """At the end of a script there may be much to do, such as to send logs."""
    script = f"""{SLEEPING}
import logging
class Last(logging.NullHandler):
    def close(self):
        os.kill(os.getpid(), signal.SIGTERM)
logging.getLogger().addHandler(Last())
"""
    (tmp_path / "train.py").write_text(script)
    code, _, stderr = ran("train.py", cwd=tmp_path)
    assert code == -signal.SIGTERM
    assert sum(line.startswith("multienv run: ") for line in stderr) == 1


def test_process_that_the_script_forks_ends_by_sigterm_in_c_code_too_and_tells_nothing(tmp_path: Path) -> None:
    script = f"""{HEAD}
import time
from kit import Fault, FaultyEnv
env = FaultyEnv(fault=Fault("hang_c", "step"))
env.reset(seed=0)
child = os.fork()
if not child:
    env.step(0)
time.sleep(0.5)
os.kill(child, signal.SIGTERM)
for _ in range(100):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        break
    time.sleep(0.1)
else:
    os.kill(child, signal.SIGKILL)
print(status)
"""
    (tmp_path / "train.py").write_text(script)
    code, stdout, stderr = ran("train.py", cwd=tmp_path)
    assert (code, stdout[-1]) == (0, str(int(signal.SIGTERM)))
    assert sum(line.startswith("multienv run: ") for line in stderr) == 1


def test_script_without_a_guard_that_workers_would_have_to_import_keeps_the_class_of_gymnasium(tmp_path: Path) -> None:
    """An import would begin the training in the worker, with gymnasium's own class."""
    script = f"""{HEAD}
LOCK = threading.Lock()
class Locking(gymnasium.Wrapper):
    def step(self, action):
        with LOCK:
            return super().step(action)
for _ in range(2):
    envs = gymnasium.vector.SyncVectorEnv([lambda: Locking(gymnasium.make("CartPole-v1"))])
    print(hasattr(envs, "statistics"), isinstance(envs, gymnasium.vector.SyncVectorEnv), flush=True)
"""
    (tmp_path / "train.py").write_text(script)
    code, stdout, stderr = ran("--serial", "train.py", cwd=tmp_path)
    assert code == 0, stderr
    assert stdout == ["running as __main__", "False True", "False True"]
    line = script.splitlines().index("for _ in range(2):") + 2
    start = f"{tmp_path}/train.py, line {line}: SyncVectorEnv is gymnasium's own here: env_fn <function <lambda>"
    assert [one.startswith(start) for one in stderr] == [True, False]
    assert "A _thread.lock is in the global LOCK" in stderr[0]
    assert stderr[-1].endswith("the script made no env that multienv replaces; see --serial and --single.")


def test_script_with_an_error_in_its_syntax_shows_that_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n)\n")
    code, stdout, stderr = ran("train.py", cwd=tmp_path)
    assert (code, stdout) == (1, [])
    assert stderr[0] == f'  File "{tmp_path}/train.py", line 2'
    assert stderr[-2] == "SyntaxError: unmatched ')'"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "give a script, or -m and a module"),
        (["no_such.py"], "no_such.py is no file"),
        (["--max-rss", "much", __file__], "--max-rss much: give a size such as 2GiB or 500MiB."),
        (["--max-rss", "2", __file__], "counts bytes"),
        (["--step-deadline", "-1", __file__], "Deadlines.step is -1.0"),
        (["--envs-per-worker", "-1", __file__], "envs_per_worker is -1"),
        (["--no-such-option", __file__], "no such option"),
    ],
)
def test_wrong_arguments_are_told_in_a_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]
