"""A trainer as a process of its own, for tests that interrupt it, kill it, or look at what it leaves behind.

What it runs is a function of a module among the tests, called with string arguments::

    with Trainer("lifecycle_trainers", "hold_everything", "forkserver") as trainer:
        trainer.expect("ready")
        trainer.signal(signal.SIGKILL)
        trainer.wait()
        trainer.assert_nothing_lives()

Every process that it starts, and whatever those start, carries a token in its environment: sessions, process groups
and parents do not matter to finding them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import multienv
from kit.patience import Patience

TESTS = Path(__file__).parents[1]
# And the library under test, wherever it has been imported from here.
FOLDERS = ("cluster", "contract", "faults", "invariants", "adapters", "cli", "")
PLACES = [*(TESTS / folder for folder in FOLDERS), Path(multienv.__file__).parents[1]]
PATH = os.pathsep.join(map(str, PLACES))
TOKEN_VARIABLE = "MULTIENV_TEST_TRAINER"

# docs/guarantees.md, 7.
GONE_WITHIN = 2.0
# Nothing here takes more than a few seconds; this only ends what is stuck.
STUCK_AFTER = 60.0


class Trainer:
    """Runs ``module.function(*arguments)`` in a process that leads a session, and so a process group, of its own."""

    def __init__(self, module: str, function: str, *arguments: Any) -> None:
        self._token = uuid.uuid4().hex
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the trainer
        code = f"import sys, {module}; sys.exit({module}.{function}(*sys.argv[1:]))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, TOKEN_VARIABLE: self._token, "PYTHONPATH": PATH, "PYTHONFAULTHANDLER": "1"},
            start_new_session=True,
            text=True,
        )
        self.pid = self.process.pid
        self.said: list[str] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put("")

    def expect(self, word: str, timeout: float = STUCK_AFTER) -> str:
        """Wait until it says a line that begins with ``word``; what follows the word."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=0.2)
                if not line:
                    break
                self.said.append(line)
                if line.partition(" ")[0] == word:
                    return line.partition(" ")[2]
        raise AssertionError(f"the trainer never said {word!r}{self._diagnosis()}")

    def signal(self, number: signal.Signals) -> None:
        """To the trainer alone."""
        os.kill(self.pid, number)

    def signal_group(self, number: signal.Signals) -> None:
        """To the trainer and whoever is in its process group, as a terminal does it."""
        os.killpg(self.pid, number)

    def wait(self, timeout: float = STUCK_AFTER) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # faulthandler tells where it is stuck
            time.sleep(0.5)
            raise AssertionError(f"the trainer has not ended within {timeout:g} s{self._diagnosis()}") from None

    def succeed(self, within: float = STUCK_AFTER) -> list[str]:
        """Wait for its end: without an error, and without anything left. What it said."""
        code = self.wait(within)
        self._reader.join(STUCK_AFTER)
        while not self._lines.empty():
            self.said.append(self._lines.get())
        assert code == 0, f"the trainer failed with exit code {code}{self._diagnosis()}"
        self.assert_nothing_lives()
        return self.said

    def family(self) -> dict[int, str]:
        """The processes it started that live, whatever became of itself: pid and command line."""
        found = {}
        for path in Path("/proc").iterdir():
            if not path.name.isdigit() or int(path.name) == self.pid:
                continue
            with contextlib.suppress(OSError):
                if self._token.encode() in (path / "environ").read_bytes():
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
        return found

    def assert_nothing_lives(self) -> None:
        """Fail unless all that it started ends within GONE_WITHIN seconds."""
        if not becomes_true(lambda: not self.family(), GONE_WITHIN):
            left = "\n  ".join(f"{pid}: {command}" for pid, command in self.family().items())
            raise AssertionError(f"alive {GONE_WITHIN:g} s after the trainer:\n  {left}{self._diagnosis()}")

    def errors(self) -> str:
        """What it and its workers wrote on stderr."""
        self._errors.flush()
        self._errors.seek(0)
        return self._errors.read()

    def _diagnosis(self) -> str:
        return "\nit said:\n  " + "\n  ".join(self.said[-20:]) + f"\nstderr:\n{self.errors()[-4000:]}"

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        # The monitor first gets time to end: killed, it would leave its temporary folder.
        becomes_true(lambda: not self.family(), GONE_WITHIN)
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._reader.join(5.0)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()


def run(module: str, function: str, *arguments: Any, within: float = STUCK_AFTER) -> list[str]:
    """Run a trainer to its end, which must be a success that leaves nothing; what it said."""
    with Trainer(module, function, *arguments) as trainer:
        return trainer.succeed(within)


def becomes_true(condition: Callable[[], bool], within: float = STUCK_AFTER) -> bool:
    """Whether the condition holds at some moment within so many seconds, see `Patience`."""
    patience = Patience(within)
    while not condition():
        if not patience.lasts():
            return condition()
    return True
