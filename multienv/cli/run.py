"""``multienv run``: run a script that nobody changed, with multienv's classes under the names that it imports.

It needs no extra. The script runs in this process as ``__main__``, as by ``python train.py``: with its own
``sys.argv``, first entry of ``sys.path``, traceback and exit code.
"""

from __future__ import annotations

import atexit
import builtins
import importlib.util
import json
import optparse
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any

from multienv._engine.worker.main_module import UnguardedModule
from multienv.config import Deadlines, RestartPolicy
from multienv.errors import UsageError
from multienv.vector.replacing import ReplacedVectorEnvs, replace_vector_envs

_USAGE = "%prog [options] [--] train.py [arguments]\n       %prog [options] -m package.module [arguments]"
_DESCRIPTION = (
    "Run a training script that nobody changed. Under the names that it imports stand classes of multienv, whose "
    "workers may die: gymnasium's AsyncVectorEnv, also by make_vec(..., 'async'), and Stable-Baselines3's "
    "SubprocVecEnv. At the end, one line on stderr says how many workers were lost, and how they were recovered."
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def run_command(arguments: Sequence[str]) -> None:
    """Run the script that the arguments of ``multienv run`` name; its end is that of this process."""
    parser = optparse.OptionParser(_USAGE, description=_DESCRIPTION, prog="multienv run")
    parser.disable_interspersed_args()  # what follows the script is the script's
    add = parser.add_option
    add("-m", dest="is_module", action="store_true", help="run a module or package, as `python -m` does")
    add("--max-rss", metavar="SIZE", help="replace a worker process that takes more memory, such as 2GiB")
    add("--step-deadline", metavar="SECONDS", type="float", help="replace one whose step takes longer")
    add("--envs-per-worker", metavar="N", type="int", default=1, help="envs that share a process; 0: as suits it")
    add("--serial", action="store_true", help="also in place of SyncVectorEnv and DummyVecEnv")
    add("--single", action="store_true", help="also what gymnasium.make() returns: each env in a worker of its own")
    add("--summary", metavar="FILE", help="write what the last line says as JSON; $NAME is a variable, such as $RANK")
    options, rest = parser.parse_args(list(arguments))
    if not rest or not (options.is_module or Path(rest[0]).is_file()):
        parser.error(f"{rest[0]} is no file" if rest else "give a script, or -m and a module")
    try:
        replaced = replace_vector_envs(
            serial=bool(options.serial),
            single=bool(options.single),
            envs_per_worker=options.envs_per_worker or "auto",
            restart=RestartPolicy(max_rss=_bytes(options.max_rss)),
            deadlines=Deadlines(step="auto" if options.step_deadline is None else options.step_deadline),
        )
    except UsageError as error:
        parser.error(str(error))
    file = Path(os.path.expandvars(options.summary)).absolute() if options.summary else None
    if file is not None and not file.parent.is_dir():
        parser.error(f"--summary {file}: there is no such folder")
    hint = ["; see --serial and --single"]
    tell = cache(partial(_print_summary, replaced, file, os.getpid(), hint))  # once: SIGTERM may come at the exit, too
    # Registered before the script runs, so called after what the script registers, and after its threads have ended.
    atexit.register(tell)
    _print_summary_at_sigterm(tell)
    sys.argv[:] = rest
    try:
        main, code = (_module if options.is_module else _script)(rest[0])
        sys.modules["__main__"] = main
        exec(code, vars(main))  # noqa: S102 - that is what this command is for
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            hint.clear()
        sys.excepthook = partial(_show_exception, sys.excepthook)
        raise


def _print_summary_at_sigterm(tell: Callable[[], None]) -> None:
    """Have SIGTERM tell, and then end this process as it would have; a handler that the script sets replaces this."""

    def end(number: int, frame: FrameType | None) -> None:
        try:
            tell()
        finally:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def undo() -> None:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)
        os.register_at_fork(after_in_child=undo)  # a child in C code would not end by terminate()


def _script(name: str) -> tuple[ModuleType, CodeType]:
    """Return the ``__main__`` of a script, and its code."""
    path = os.path.abspath(name)  # noqa: PTH100 - as Python does
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    _find_first(os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    return _main_of(code, __file__=path, __loader__=SourceFileLoader("__main__", path)), code


def _module(name: str) -> tuple[ModuleType, CodeType]:
    """Return the ``__main__`` of a module or a package, and its code. Raises ImportError."""
    _find_first(os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = None if spec is None else getattr(spec.loader, "get_code", lambda _: None)(spec.name)
    if spec is None or code is None:
        raise ImportError(f"No module named {name} that can be run")
    sys.argv[0] = str(spec.origin)
    return _main_of(code, __file__=spec.origin, __loader__=spec.loader, __spec__=spec, __package__=spec.parent), code


def _find_first(folder: str) -> None:
    """Have imports look into this folder first, in place of that of this command."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _main_of(code: CodeType, **attributes: Any) -> ModuleType:
    """Return an empty ``__main__`` for this code."""
    # `if __name__ == "__main__":` leaves these two in the code of a module.
    is_guarded = "__name__" in code.co_names and "__main__" in code.co_consts
    main = (ModuleType if is_guarded else UnguardedModule)("__main__")
    vars(main).update({"__builtins__": builtins, **attributes})
    return main


def _bytes(size: str | None) -> int | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(iB?|B)?", size or "0")
    if found is None:
        raise UsageError(f"--max-rss {size}: give a size such as 2GiB or 500MiB.")
    return int(float(found[1]) * _UNITS[found[2]]) or None


def _show_exception(
    hook: Callable[..., Any], kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Show an exception that ends the script, with the frames of the script alone."""
    shown = traceback
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == __file__:
            shown = traceback.tb_next
        traceback = traceback.tb_next
    hook(kind, error.with_traceback(shown), shown)


def _print_summary(replaced: ReplacedVectorEnvs, file: Path | None, pid: int, hint: list[str]) -> None:
    """Say what became of the workers; if there are none, with a hint. Does nothing in a forked child."""
    if os.getpid() != pid:
        return
    told = replaced.summary()
    text = f"the script made no env that multienv replaces{''.join(hint)}."
    if told["envs"]:
        lost, outcomes = (_listed(told[name]) for name in ("losses", "outcomes"))
        text = f"{told['envs']} envs. Lost workers: {lost}. Outcomes: {outcomes}."
    print(f"multienv run: {text}", file=sys.stderr)
    if file is not None:
        file.write_text(json.dumps(told, indent=2) + "\n")


def _listed(numbers: dict[str, int]) -> str:
    return ", ".join(f"{number} × {name}" for name, number in numbers.items() if number) or "none"
