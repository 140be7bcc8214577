"""What runs as a script under ``AsyncVectorEnv`` runs under ``SubprocessVectorEnv``, and more: see the scripts.

Those that travel by value are one script: by default read from standard input, the most that one can ask for, as it has
neither a file nor a main guard. The tests marked ``ci`` run it as a file, with a guard and without, and compare with
``AsyncVectorEnv(context="forkserver")``, which refuses most of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from scripts_of_users import BY_NAME, BY_VALUE, HEAD, SIMULATOR

GUARD = 'if __name__ == "__main__":\n    '
Shown = tuple[str, str]


def section(name: str, body: str, guard: str = "") -> str:
    make = "make" if "make" in body else "Env"
    return f"{body}\n{guard}fingerprint({name!r}, {make})\n"


def run(script: str, folder: Path, vector: str = "multienv", how: str = "file") -> subprocess.CompletedProcess[str]:
    path = folder / "the_script.py"
    path.write_text(HEAD + script)
    return subprocess.run(
        [sys.executable, path if how == "file" else "-"],
        cwd=folder,
        input="" if how == "file" else path.read_text(),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "VECTOR": vector},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def shown_by(script: str, folder: Path, vector: str = "multienv", how: str = "file") -> dict[str, Shown]:
    """Run a script; return for each of its sections what the env showed in another process and in the script's own."""
    done = run(script, folder, vector, how)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: (shown, expected) for name, shown, expected in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a simulator in C."""
    made = tmp_path_factory.mktemp("simulator")
    (made / "sim.c").write_text(SIMULATOR)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "sim.so", "sim.c"], cwd=made, check=True)
    return made


@cache
def shown_together(folder: Path, guard: str, how: str) -> dict[str, Shown]:
    return shown_by("".join(section(name, body, guard) for name, body in BY_VALUE.items()), folder, how=how)


@cache
def shown_with_guard(folder: Path, name: str) -> Shown:
    return shown_by(section(name, BY_NAME[name], GUARD), folder)[name]


@pytest.mark.parametrize("name", BY_VALUE)
def test_script_without_file_and_guard_runs(name: str, folder: Path) -> None:
    shown, expected = shown_together(folder, "", "stdin")[name]
    assert shown == expected


# Each shows something else; the others are more kinds of what cannot travel.
SOME_BY_NAME = (
    "settings of modules that the script alone shows",
    "library with settings",
    "classes of two worlds",
    "lambda that uses a lock, and what is defined below the guard",
    "registered class that cannot travel",
    "type hints of what does not travel",
    "class made with arguments",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SOME_BY_NAME else pytest.mark.ci) for name in BY_NAME]
)
def test_script_with_what_cannot_travel_runs_if_it_has_a_guard(name: str, folder: Path) -> None:
    shown, expected = shown_with_guard(folder, name)
    assert shown == expected


def test_script_whose_settings_workers_do_not_have_is_told_of_once(folder: Path) -> None:
    """Envs that are made above the guard would be made in each worker, too, if it imported the script."""
    body = f"""{BY_NAME["library with settings"]}
import small_env
small_env.gravity = Env
"""
    done = run(section("here", body) + section("again", "") + f"{GUARD}pass\n", folder)
    assert done.returncode == 0, done.stderr
    lines = (HEAD + body).splitlines()
    for line in ("code = LIB.sim_init(9.81)", "small_env.gravity = Env"):
        told = f"the_script.py, line {lines.index(line) + 1}: this sets something in this process alone."
        assert done.stderr.count(told) == 1, done.stderr
    assert done.stderr.count("this sets something") == 2


def test_import_of_a_script_is_told_of_once(folder: Path) -> None:
    body = BY_NAME["library with settings"]
    done = run(section("here", body, GUARD) + section("again", "", GUARD), folder)
    line = (HEAD + body).splitlines().index("code = LIB.sim_init(9.81)") + 1
    told = f"the_script.py, line {line}: workers have to do this, too, so they import the script"
    assert done.stderr.count(told) == 1, done.stderr


@pytest.mark.ci
@pytest.mark.parametrize("guard", [GUARD, ""], ids=["guard", "no guard"])
@pytest.mark.parametrize("name", BY_VALUE)
def test_script_of_a_file_runs(name: str, guard: str, folder: Path) -> None:
    shown, expected = shown_together(folder, guard, "file")[name]
    assert shown == expected


@pytest.mark.ci
@pytest.mark.timeout(600)  # thirty scripts, one after the other
def test_whatever_runs_under_async_vector_env_runs_here(folder: Path) -> None:
    runs = []
    for name, body in {**BY_VALUE, **BY_NAME}.items():
        shown, expected = shown_by(section(name, body, GUARD), folder, "async")[name]
        if shown == expected:
            ours = shown_together(folder, GUARD, "file")[name] if name in BY_VALUE else shown_with_guard(folder, name)
            assert ours == (shown, expected), name
            runs.append(name)
    assert {
        "settings of modules",
        "caches",
        "type hints of what does not travel",
        "registered class that cannot travel",
    } <= set(runs)
