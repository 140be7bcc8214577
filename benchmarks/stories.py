"""How much of the package a story passes through in the trainer: calls, functions, files and rooms.

A story is one call of a user's, such as a step or the step that finds a worker dead. A profiler (``sys.setprofile``, in
all threads) notes each function of the package that the trainer calls meanwhile; workers and monitor are not counted.
The stories run in a child interpreter with ``MULTIENV_PUREPYTHON=1``: with the native extension a plain step is one
call into C. Comprehensions, generator expressions and the code that runs when a module is imported do not count.

A room is a folder of ``multienv/`` or of ``multienv/_engine/``; a module that lies there by itself (``config``,
``_engine/threads`` …) is a room of its own. ``--list STORY`` prints the files of a story with their functions, in the
order of the first call. The largest modules, the floors of imports and the lines of code follow.

Two runs are to be compared, so what a story passes through must not depend on time. All workers sleep when it begins,
and the end of a worker that was killed can be read. A function of the package begins only when the workers have
answered all that they were asked: the trainer finds each answer at its first look. The thread that writes the crash
report of a death, after the call has returned, counts in one story alone. ``--repeats 3`` says which figures differ
from one run to the next: some calls, because a process takes its time to end, or to wake from a snapshot.
"""

from __future__ import annotations

import argparse
import ast
import gc
import inspect
import io
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import tokenize
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

from multienv._engine.wire.segment import PID, REPLY, REQUEST, WORKER_SLEEPS

PATIENCE = 20.0  # seconds for a worker to answer or to end
LARGEST, LONGEST = 20, 1000  # how many modules are listed; lines of the longest that may be
ON_TOP = ("adapters", "testing", "cli", "__main__")  # need extras, or are programs of their own: no floor counts them
# Most files, by story: the bars of the project's design.
BARS = {
    "a death": 28, "reset": 16, "restore": 17, "load_state_dict": 20, "MultiEnv.step with an autoreset": 14,
}  # fmt: skip
Story = Callable[["Recorder"], object]


# --- the recorder -------------------------------------------------------------------------------


class Recorder:
    """Notes the functions of the package that any thread calls while a story is told.

    Args:
        package: The folder of the package.
        settle: Called at the beginning of each of these functions.

    Attributes:
        calls: Number of calls.
        found: File and name of each function, in the order of the first call.
    """

    def __init__(self, package: Path, settle: Callable[[], None]) -> None:
        self._prefix, self._settle = f"{package}{os.sep}", settle
        self._is_on = self._reports = False
        self._names: dict[CodeType, tuple[str, str] | None] = {}
        self.calls = 0
        self.found: dict[tuple[str, str], None] = {}

    def install(self) -> None:
        """Have all threads of this process call the recorder."""
        import _thread

        start = _thread.start_new_thread

        def begin(function: Callable[..., object], args: tuple[Any, ...], kwargs: Any) -> None:
            sys.setprofile(self._note)
            function(*args, **kwargs)

        # The package starts some threads without the module threading, which would give them the profiler.
        _thread.start_new_thread = lambda function, args, kwargs=None: start(begin, (function, args, kwargs or {}))
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    @contextmanager
    def telling(self, *, reports: bool = False) -> Iterator[None]:
        """Record what is called in here, once all workers sleep.

        Args:
            reports: Record the threads that write crash reports, too, and wait for them.
        """
        wait_until(lambda: all(words[WORKER_SLEEPS] or is_gone(words[PID]) for words in words_of_all()))
        self.calls, self.found = 0, {}
        self._reports, self._is_on = reports, True
        try:
            yield
            for thread in threading.enumerate():
                if reports and thread.name == "multienv-report":
                    thread.join()
        finally:
            self._is_on = False

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not self._is_on:
            return
        code = frame.f_code
        if code not in self._names:
            self._names[code] = self._named(code)
        name = self._names[code]
        if name is not None:
            if not self._reports and code.co_name == "run" and name[0].endswith("reports/store.py"):
                sys.setprofile(None)  # of this thread
                return
            is_asking = code.co_name == "ring" or code.co_name.startswith("__")  # the worker may still have to be woken
            if not is_asking:
                self._settle()
            self.calls += 1
            self.found.setdefault(name)

    def _named(self, code: CodeType) -> tuple[str, str] | None:
        """Return file and name of a function of the package; ``None`` for any other code."""
        is_function = code.co_flags & inspect.CO_OPTIMIZED and (code.co_name[0] != "<" or code.co_name == "<lambda>")
        if not is_function or not code.co_filename.startswith(self._prefix):
            return None
        return code.co_filename.removeprefix(self._prefix), getattr(code, "co_qualname", code.co_name)  # since 3.11


def words_of_all() -> Iterator[Any]:
    """Yield the control words of all workers."""
    from multienv._engine.processes.worker_process import living

    for channel in living():
        if channel.descriptors():  # else it is released
            yield channel.segment.words


def settle() -> None:
    """Wait until no worker has anything to do."""
    for words in words_of_all():
        wait_until(partial(has_answered, words))


def has_answered(words: Any) -> bool:
    """Return whether a worker is there, and has answered what it was asked last; or has ended."""
    return bool(words[PID]) and (words[REQUEST] in (0, words[REPLY]) or is_gone(words[PID]))


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, condition
        time.sleep(0.0001)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, and its parent knows."""
    return pid > 0 and not Path(f"/proc/{pid}").exists()


# --- the stories --------------------------------------------------------------------------------


def cart_pole(most_steps: int = 500) -> Callable[[], Any]:
    """Return a function that makes an env whose episodes end at the latest after so many steps."""
    import gymnasium

    return partial(gymnasium.make, "CartPole-v1", max_episode_steps=most_steps)


@contextmanager
def one_env(**policy: Any) -> Iterator[Any]:
    """Make an env, and begin an episode."""
    import multienv
    from multienv._engine.recovery.way_back import ForkingPolicy

    restart = ForkingPolicy(**{"snapshot_every": 0, **policy})
    env = multienv.SubprocessEnv(cart_pole(), restart=restart).initialize()
    try:
        env.reset(seed=0)
        walk(env, 3)
        yield env
    finally:
        env.close()


@contextmanager
def vector_env(count: int) -> Iterator[Any]:
    """Make a batch, a worker an env, and take some steps."""
    import multienv

    envs = multienv.SubprocessVectorEnv([cart_pole()] * count, envs_per_worker=1)
    try:
        envs.reset(seed=0)
        for turn in range(3):
            envs.step([turn % 2] * count)
        yield envs
    finally:
        envs.close()


@contextmanager
def multi_env(most_steps: int) -> Iterator[Any]:
    """Make a MultiEnv, and take three steps."""
    import multienv
    from multienv._engine.recovery import supervisor

    supervisor.SHARE = 0.0  # whether a reset saves the generators depends on how long it took
    envs = multienv.MultiEnv(multienv.create_subprocess_envs([cart_pole(most_steps)] * 2))
    try:
        envs.reset(seed=0)
        for turn in range(3):
            envs.step([turn % 2] * 2)
        yield envs
    finally:
        envs.close()


def walk(env: Any, steps: int) -> None:
    """Take some steps that end no episode."""
    for turn in range(steps):
        env.step(turn % 2)


def end(env: Any) -> None:
    """Kill the process of an env, and wait until the trainer can read that it has ended."""
    from multienv._engine.processes.worker_process import living

    pid = env.statistics().pid
    channels = [one for one in living() if one.descriptors() and one.segment.words[PID] == pid]
    os.kill(pid, signal.SIGKILL)
    for descriptor in channels[0].descriptors():
        assert select.select([descriptor], [], [], PATIENCE)[0], "the end of the process is not told"


def step(recorder: Recorder) -> None:
    with one_env() as env, recorder.telling():
        env.step(1)


def vector_step(recorder: Recorder) -> None:
    with vector_env(2) as envs:
        actions = envs.action_space.sample()
        with recorder.telling():
            envs.step(actions)


def reset(recorder: Recorder) -> None:
    with one_env() as env, recorder.telling():
        env.reset()


def death(recorder: Recorder, *, reports: bool = False) -> None:
    with one_env(snapshot_every=4) as env:
        walk(env, 2)
        wait_until(lambda: env.statistics().snapshots)
        walk(env, 2)  # which the snapshot has not seen
        end(env)
        with recorder.telling(reports=reports):
            env.step(1)
        assert env.statistics().exact_recoveries == 1


def death_by_replay(recorder: Recorder) -> None:
    with one_env(snapshots=False) as env:
        end(env)
        with recorder.telling():
            env.step(1)
        assert env.statistics().exact_recoveries == 1


def load_state_dict(recorder: Recorder) -> None:
    with one_env() as env:
        state = env.state_dict()
        walk(env, 2)
        with recorder.telling():
            env.load_state_dict(state)


def restore(recorder: Recorder) -> None:
    with one_env() as env:
        kept = env.snapshot()
        walk(env, 2)
        with recorder.telling():
            env.restore(kept)


def snapshot(recorder: Recorder) -> None:
    with one_env() as env, recorder.telling():
        env.snapshot()


def recv(recorder: Recorder) -> None:
    with vector_env(6) as envs:
        for _ in range(2):
            envs.send(envs.action_space.sample())
            with recorder.telling():
                envs.recv(4)
            envs.recv()


def send(recorder: Recorder) -> None:
    with vector_env(6) as envs:
        envs.send(envs.action_space.sample())
        *_, ready = envs.recv(4)
        actions = envs.action_space.sample()[:4]
        with recorder.telling():
            envs.send(actions, ready)
        envs.recv()


def multi_step(recorder: Recorder) -> None:
    with multi_env(500) as envs, recorder.telling():
        envs.step([0, 1])


def multi_step_with_autoreset(recorder: Recorder) -> None:
    with multi_env(4) as envs:
        *_, truncations, _ = envs.step([0, 1])
        assert all(truncations)
        with recorder.telling():
            envs.step([0, 1])
        assert all(env.statistics().episodes == 2 for env in envs.envs)


def planned_replacement(recorder: Recorder) -> None:
    with one_env(recycle_after_steps=3) as env:
        with recorder.telling():
            env.reset()
        assert env.statistics().recycled == 1


def start(recorder: Recorder) -> None:
    import multienv

    with recorder.telling():
        env = multienv.SubprocessEnv(cart_pole()).initialize()
    env.close()


STORIES: dict[str, Story] = {
    "SubprocessEnv.step": step,
    "SubprocessVectorEnv.step": vector_step,
    "reset": reset,
    "a death": death,
    "a death, with its crash report": partial(death, reports=True),
    "a death, by a replay": death_by_replay,
    "load_state_dict": load_state_dict,
    "restore": restore,
    "snapshot": snapshot,
    "recv(4)": recv,
    "send(4)": send,
    "MultiEnv.step": multi_step,
    "MultiEnv.step with an autoreset": multi_step_with_autoreset,
    "a planned replacement": planned_replacement,
    "start of a worker": start,
}


def tell(names: Sequence[str]) -> dict[str, Any]:
    """Tell stories in this process; return the folder of the package, and calls and functions of each story."""
    import multienv

    package = Path(multienv.__file__).parent
    assert not multienv.has_native_extension
    for kind in ("multienv", "gymnasium"):
        logging.getLogger(kind).propagate = False
        logging.getLogger(kind).addHandler(logging.NullHandler())
    recorder = Recorder(package, settle)
    recorder.install()
    with one_env() as env:  # the first worker of a process also starts the monitor
        walk(env, 1)
    told = {}
    for name in names:
        gc.collect()
        gc.disable()  # finalizers belong to no story
        STORIES[name](recorder)
        gc.enable()
        told[name] = {"calls": recorder.calls, "found": list(recorder.found)}
    return {"package": str(package), "stories": told}


# --- the size of the house ----------------------------------------------------------------------


@dataclass
class Told:
    """Holds what a story passes through: calls, and file and name of each function, in the order of the first call."""

    calls: int
    found: list[tuple[str, str]]

    @property
    def files(self) -> dict[str, list[str]]:
        """Return the functions of each file."""
        files: dict[str, list[str]] = {}
        for file, name in self.found:
            files.setdefault(file, []).append(name)
        return files

    @property
    def figures(self) -> tuple[int, int, int, int]:
        """Return the numbers of calls, functions, files and rooms."""
        return self.calls, len(self.found), len(self.files), len({room_of(file) for file in self.files})


def room_of(file: str) -> str:
    """Return the room in which a file of the package lies; for a module that lies in none, its own name."""
    return Path(file.removeprefix(f"_engine{os.sep}").removesuffix(".py")).parts[0]


def code_lines(source: str) -> int:
    """Return the number of lines of Python with code: no docstrings, comments, blanks."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in nothing:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def floors(package: Path) -> int:
    """Return the number of floors: modules of the first import none of the package, the others only from below."""
    modules = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    modules.pop(package.name)  # imports the faces
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name, path in modules.items():
        if name.split(".")[1] not in ON_TOP and not name.endswith(".ray_vector_env"):
            found = set()
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    found |= {str(node.module), *(f"{node.module}.{one.name}" for one in node.names)}
            sorter.add(name, *(found & modules.keys() - {name}))
    sorter.prepare()
    count = 0
    while names := sorter.get_ready():
        sorter.done(*names)
        count += 1
    return count


# --- the report ---------------------------------------------------------------------------------


def told_by_child(names: Sequence[str]) -> tuple[Path, dict[str, Told]]:
    """Have a child without native code tell stories; return the folder of the package, and the stories."""
    command = [sys.executable, __file__, "--child", *names]
    with TemporaryDirectory() as reports:
        environment = {**os.environ, "MULTIENV_PUREPYTHON": "1", "MULTIENV_REPORTS": reports}
        told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout)
    stories = {
        name: Told(one["calls"], [(file, function) for file, function in one["found"]])
        for name, one in told["stories"].items()
    }
    return Path(told["package"]), stories


def show_table(runs: Sequence[dict[str, Told]]) -> None:
    """Print a row for each story, and where runs differ."""
    print(f"{'story (trainer, pure Python)':34}{'calls':>7}{'functions':>11}{'files':>7}{'rooms':>7}{'bar, files':>12}")
    for name, told in runs[0].items():
        calls, functions, files, rooms = told.figures
        print(f"{name:34}{calls:>7}{functions:>11}{files:>7}{rooms:>7}{BARS.get(name, ''):>12}")
    if len(runs) > 1:
        differ = [
            f"{name}, {what}: {', '.join(map(str, figures))}"
            for name in runs[0]
            for what, *figures in zip(
                ("calls", "functions", "files", "rooms"), *(run[name].figures for run in runs), strict=True
            )
            if len(set(figures)) > 1
        ]
        print(f"\n{len(runs)} runs: " + ("; ".join(differ) or "all figures the same"))


def show_house(package: Path) -> None:
    """Print the largest modules, the floors and the lines of code."""
    sizes = {path.relative_to(package): code_lines(path.read_text()) for path in package.rglob("*.py")}
    native = sum(len(path.read_text().splitlines()) for path in package.rglob("*.c"))
    print(f"\ncode lines of the {LARGEST} largest modules (all lines; bar: {LONGEST})")
    for path in sorted(sizes, key=lambda one: (-sizes[one], one))[:LARGEST]:
        length = len((package / path).read_text().splitlines())
        print(f"{sizes[path]:>7,} {f'({length:,})':>8}  {path}{'   over the bar' if length > LONGEST else ''}")
    print(
        f"\n{len(sizes)} modules on {floors(package)} floors; {sum(sizes.values()):,} code lines; {native:,} lines of C"
    )


def show_list(name: str, told: Told) -> None:
    """Print the files of a story, with their functions."""
    calls, functions, files, rooms = told.figures
    print(f"{name}: {calls} calls, {functions} functions, {files} files, {rooms} rooms")
    for number, (file, names) in enumerate(told.files.items(), 1):
        print(f"{number:>3}  {file}: {', '.join(names)}")


def main() -> None:
    """Tell the stories and print what they pass through."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stories", nargs="*", metavar="STORY", help=f"{'; '.join(STORIES)}. Default: all")
    parser.add_argument("--list", action="append", choices=STORIES, metavar="STORY", help="print its files", default=[])
    parser.add_argument("--repeats", type=int, default=1, help="in interpreters of their own; prints what differs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.stories) - STORIES.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {'; '.join(STORIES)}")
    names = arguments.stories or arguments.list or list(STORIES)
    if arguments.child:
        print(json.dumps(tell(names)))
        return
    package, runs = Path(), []
    for _ in range(arguments.repeats):
        package, told = told_by_child(names)
        runs.append(told)
    if arguments.list:
        for name in arguments.list:
            show_list(name, runs[0][name])
    else:
        show_table(runs)
        show_house(package)
    if arguments.json:
        keys = ("calls", "functions", "files", "rooms")
        figures = {name: dict(zip(keys, one.figures, strict=True)) for name, one in runs[0].items()}
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
