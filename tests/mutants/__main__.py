"""Applies each mutant to a copy of the package, and prints a table of the tests that catch them.

For each mutant the tree is copied without the native extension, which is built if the mutant is in it. The change is
made, and pytest is run in the copy with ``-x``: first the files that the mutant hints at, then STAGES, until a test
fails. Then that test is run without the mutant: if it fails there too, it has caught nothing. A test that hangs is
broken off; that counts as caught, and the table says so.

All processes that the tests leave are killed, because some mutants leave processes behind.

Defects that no test can see are not among the mutants: a lost wake-up costs only time, and infos are not compared after
a replay.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.process_table import descendants
from mutants.changes import applied, file_of
from mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")
COPIED = ("multienv", "tests", "docs", "examples", "benchmarks", *DOCUMENTS, "setup.cfg", "setup.py", "pyproject.toml")
# What is run one after the other until a test fails: the quickest first.
STAGES: tuple[tuple[str, ...], ...] = (
    ("tests/simulation",),
    ("tests/invariants",),
    ("tests/unit",),
    ("tests/faults", "tests/contract"),
    ("tests/cli",),
)
# They look at the text of the package, not at what it does.
IGNORED = ("tests/unit/test_mutants.py", "tests/unit/test_architecture.py")
# Seconds that a test may take, and a stage.
TEST_LIMIT, STAGE_LIMIT = 60, 900
_PR_SET_CHILD_SUBREAPER = 36
SURVIVED = "**survived**"
TABLE_HEAD = "| mutant | invariant | caught by | seconds |\n|---|---|---|---|\n"


class Verdict(NamedTuple):
    """What became of a mutant.

    Attributes:
        caught_by: The test that failed; empty: none.
        seconds: Until it did.
        how: ``"failed"``; ``"hangs"`` for a test that was broken off; or that it fails without the mutant, too.
    """

    caught_by: str
    seconds: float
    how: str = "failed"

    @property
    def is_caught(self) -> bool:
        """Whether a test fails because of the mutant."""
        return bool(self.caught_by) and self.how in ("failed", "hangs")


def copy_tree(target: Path) -> None:
    """Copy what tests need."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", ".*", "*.so"))
        else:
            shutil.copy2(ROOT / name, target / name)


@contextlib.contextmanager
def tree_with(mutant: Mutant | None) -> Iterator[Path]:
    """Make a copy of the tree, with this defect."""
    with tempfile.TemporaryDirectory(prefix="mutant_", ignore_cleanup_errors=True) as directory:
        tree = Path(directory)
        copy_tree(tree)
        if mutant is not None:
            file = file_of(mutant.place, tree / "multienv")
            file.write_text(applied(mutant, file.read_text()))
            if file.suffix == ".c":
                build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
                subprocess.run(build, cwd=tree, env=os.environ | {"MULTIENV_REQUIRE_EXTENSION": "1"}, check=True)
        yield tree


def run_pytest(tree: Path, tests: Sequence[str], *, limit: float) -> tuple[int | None, str]:
    """Run tests in a tree; return the exit code (``None``: broken off after ``limit`` seconds) and the output."""
    command = [sys.executable, "-m", "pytest", "-x", "-v", "-n0", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    command += [f"--timeout={TEST_LIMIT}", "-o", f"faulthandler_timeout={TEST_LIMIT + 15}"]
    command += [f"--ignore={one}" for one in IGNORED]
    # Else an editable installation lends the tree its extension, which does what a broken reference should do.
    is_pure = str(int(not any((tree / "multienv" / "_engine").glob("_native*.so"))))
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*command, *tests],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "500", "MULTIENV_PUREPYTHON": is_pure},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        until = time.monotonic() + limit
        try:
            while code is None and time.monotonic() < until:
                code = reap().get(process.pid)
                time.sleep(0.02)
        finally:
            end_all()
            process.returncode = code or 0  # reaped; or its finalizer would warn
        output.seek(0)
        return code, output.read().decode(errors="replace")


def reap() -> dict[int, int]:
    """Reap what has ended, as process 1 does where there is no subreaper: tests look for zombies. Return exit codes."""
    codes: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            codes[pid] = os.waitstatus_to_exitcode(status)
    return codes


def end_all() -> None:
    """Kill and reap all descendants of this process; as a subreaper it has those whose parents have ended, too."""
    while found := descendants(os.getpid()):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(0.01)


def culprit(output: str) -> tuple[str, str]:
    """Return the test that failed, by the output of pytest, and how: see :class:`Verdict`."""
    found = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - (.*))?$", output, re.MULTILINE)
    if found:
        return found[1].strip(), "hangs" if "Timeout" in (found[2] or "") else "failed"
    # Nothing was reported: it hung so that faulthandler had to end pytest, or we had. The last one to begin.
    begun = re.findall(r"^(tests/\S+?::[^\[\n ]+(?:\[[^\n]*?\])?)", output, re.MULTILINE)
    return (begun[-1] if begun else "collection"), "hangs"


def expand(tests: Sequence[str], tree: Path) -> list[str]:
    """Return paths that exist, given beginnings of paths: ``tests/invariants/test_1_``."""
    found: list[str] = []
    for one in tests:
        path = tree / one.split("::")[0]
        found += [one] if path.exists() else sorted(str(p.relative_to(tree)) for p in path.parent.glob(f"{path.name}*"))
    return found


def try_out(mutant: Mutant, stages: Sequence[Sequence[str]]) -> Verdict:
    """Run the stages until a test catches the mutant."""
    hint = mutant.tests or (f"tests/invariants/test_{mutant.invariant}_",)
    with tree_with(mutant) as tree:
        began = time.monotonic()
        for tests in (hint, *stages):
            paths = expand(tests, tree)
            if not paths:
                continue
            code, output = run_pytest(tree, paths, limit=STAGE_LIMIT)
            if code in (0, 5):  # all passed; none is there
                continue
            seconds = time.monotonic() - began
            test, how = culprit(output)
            with tree_with(None) as sound:
                code, without = run_pytest(sound, [test], limit=STAGE_LIMIT)
            if code != 0:
                print(without, file=sys.stderr)
                return Verdict(test, seconds, "fails without it, too")
            return Verdict(test, seconds, how)
        return Verdict("", time.monotonic() - began)


def check_copy() -> None:
    """Fail unless tests in a copy test the copy."""
    with tree_with(None) as tree:
        command = [sys.executable, "-c", "import multienv; print(multienv.__file__)"]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        found = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True).stdout
        if not found.startswith(str(tree)):
            raise SystemExit(f"A copy in {tree} imports {found}")


# --- the table --------------------------------------------------------------------------------


def row(mutant: Mutant, verdict: Verdict) -> str:
    """Return a line of the table."""
    test = verdict.caught_by.removeprefix("tests/").replace("|", "\\|")
    caught = f"`{test}`" + ("" if verdict.how == "failed" else f" ({verdict.how})") if test else SURVIVED
    return f"| {mutant.name} | {mutant.invariant} | {caught} | {verdict.seconds:.0f} |"


def write_table(path: Path, rows: dict[str, str]) -> None:
    """Write rows into the table of a file, over those of the same mutants; other rows, and text around it, stay."""
    text = path.read_text() if path.exists() else ""
    before, _, old = text.partition(TABLE_HEAD)
    known = {line.split(" | ")[0].removeprefix("| "): line for line in old.splitlines() if line.startswith("| ")}
    known |= rows
    lines = [known[mutant.name] for mutant in MUTANTS if mutant.name in known]
    after = "".join(line + "\n" for line in old.splitlines() if not line.startswith("|"))
    path.write_text(before + TABLE_HEAD + "".join(line + "\n" for line in lines) + after)


def main() -> int:
    """Try out the mutants that are asked for; return 1 if one survives."""
    parser = argparse.ArgumentParser(prog="python tests/mutants", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", action="append", help="mutants whose name or place has this in it")
    parser.add_argument("--tests", metavar="PATH", nargs="+", help="run these in place of the stages")
    parser.add_argument("--table", metavar="FILE", type=Path, help="also write the table to this file")
    parser.add_argument("--list", action="store_true", help="list the mutants and run nothing")
    options = parser.parse_args()
    chosen = [one for one in MUTANTS if not options.only or any(part in one.name + one.place for part in options.only)]
    if options.list:
        print(*(f"{one.invariant:2} {one.place}: {one.name}" for one in chosen), sep="\n")
        return 0
    for mutant in chosen:
        applied(mutant, file_of(mutant.place, ROOT / "multienv").read_text())  # before anything is run
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A killed program leaves nothing either.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    check_copy()
    print(TABLE_HEAD, end="", flush=True)
    survivors = []
    for mutant in chosen:
        verdict = try_out(mutant, (options.tests,) if options.tests else STAGES)
        line = row(mutant, verdict)
        print(line, flush=True)
        if not verdict.is_caught:
            survivors.append(mutant.name)
        if options.table:
            write_table(options.table, {mutant.name: line})
    print(f"{len(chosen)} mutants, {len(survivors)} survived", *survivors, sep="\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
