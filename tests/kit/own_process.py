"""Call functions in processes of their own, which have one thread and few descriptors."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

_PROGRAM = "import sys; from kit.own_process import serve; sys.path[:] = {path!r}; serve()"


class Forks:
    """A process that forks itself for each call: only the first one waits until modules are imported."""

    def __init__(self) -> None:
        program = _PROGRAM.format(path=sys.path)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process: Any = subprocess.Popen([sys.executable, "-c", program], **pipes)  # type: ignore[call-overload]

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function of a module returns. Raises AssertionError with the traceback if it raises there."""
        pickle.dump((function, arguments), self._process.stdin)
        self._process.stdin.flush()
        returned, raised = pickle.load(self._process.stdout)
        assert not raised, raised
        return returned

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def serve() -> None:
    """Fork for each call that comes on standard input, until it ends."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for number in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    while True:
        try:
            function, arguments = pickle.load(calls)
        except EOFError:
            return
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            answer = function(*arguments), ""
        except BaseException:
            answer = None, traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()
        os._exit(0)
