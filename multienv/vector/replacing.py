"""Put multienv's classes under the names of gymnasium's and Stable-Baselines3's, for scripts that nobody changes.

A class of ours that stands under the name of another, a *stand-in*, is made for each class that is replaced: a subclass
of ours with the name, the module and the arguments of the *original*. It is put wherever a module has the original: at
once where that is imported already, else right after the module that defines it has been executed, before another
module can import it from there. So there is one class, for ``isinstance`` and for subclasses in the script.

Workers are not affected. What refers to a stand-in is pickled by the name of the original, and finds that in a worker.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from abc import ABCMeta
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
from typing_extensions import Self, Unpack

from multienv._engine.building.building import Processes, WorkerOptions, Workers
from multienv._engine.interrupts import runs_user_code
from multienv._engine.reports.texts import signal_name
from multienv._engine.worker.module_values import AfterImport
from multienv.config import takes_options_of
from multienv.envs.subprocess_env import SubprocessEnv
from multienv.errors import UsageError, first_line
from multienv.events import Event, Loss, Recovery, Recycled
from multienv.vector.batching import deal
from multienv.vector.vector_env import SubprocessVectorEnv

logger = logging.getLogger("multienv")

_ADAPTER = "multienv.adapters.stable_baselines3"  # by its name: it lies in a room above, and needs an extra
_OUTCOMES = ("exact", "replayed", "truncated", "reset", "raised", "recycled")
_LIBRARIES = ("multienv", "gymnasium", "stable_baselines3")


class _Kind(NamedTuple):
    """Names a class that is replaced.

    Attributes:
        module: The module that defines it.
        name: Its name there.
        serial: It steps its envs in the process of the trainer.
    """

    module: str
    name: str
    serial: bool


_KINDS = (
    _Kind("gymnasium.vector.async_vector_env", "AsyncVectorEnv", serial=False),
    _Kind("gymnasium.vector.sync_vector_env", "SyncVectorEnv", serial=True),
    _Kind("stable_baselines3.common.vec_env.subproc_vec_env", "SubprocVecEnv", serial=False),
    _Kind("stable_baselines3.common.vec_env.dummy_vec_env", "DummyVecEnv", serial=True),
)


@takes_options_of(Workers.__init__)
def replace_vector_envs(
    *,
    serial: bool = False,
    single: bool = False,
    envs_per_worker: int | str = 1,
    **options: Unpack[WorkerOptions],
) -> ReplacedVectorEnvs:
    """Put multienv's classes under the names of gymnasium's and Stable-Baselines3's: what ``multienv run`` does.

    ::

        replaced = multienv.replace_vector_envs(deadlines=multienv.Deadlines(step=30.0))
        ...  # gymnasium.vector.AsyncVectorEnv(env_fns) makes a SubprocessVectorEnv
        replaced.undo()

    These are ``gymnasium.vector.AsyncVectorEnv``, also where ``gymnasium.make_vec(…, "async")`` makes one, and
    ``SubprocVecEnv`` of Stable-Baselines3. Where a module has imported one before, the name is put right there, too.
    Worker processes, and other processes that the script starts, have the classes of the libraries.

    What ``context="fork"`` and ``start_method="fork"`` ask for is not kept: such an argument is passed over. An env
    that multienv cannot make (``worker=…``, a function that cannot be pickled) is made by the class of the library. A
    warning in the log says so once, with file and line.

    Args:
        serial: Replace also ``SyncVectorEnv`` and ``DummyVecEnv``, which step their envs in the trainer's process. One
            that is given an env that exists already stays as it is.
        single: Replace also ``gymnasium.make``: each env that it returns is a :class:`SubprocessEnv`.
        envs_per_worker: For all vector envs that are made so; ``"auto"`` is faster. See :class:`SubprocessVectorEnv`.
        **options: For all envs that are made so. See :class:`~multienv.WorkerOptions`.

    Returns:
        What undoes it, also as a context manager, and tells what became of the workers.

    Raises:
        UsageError: An option makes no sense.
    """
    deal(1, envs_per_worker, 1)  # both raise
    Workers(Processes, **options)
    kinds = [kind for kind in _KINDS if serial or not kind.serial]
    return ReplacedVectorEnvs(kinds, dict(options), envs_per_worker, single=single)


class ReplacedVectorEnvs:
    """Is what :func:`replace_vector_envs` has put in place: undoes it, and counts what became of the workers."""

    def __init__(
        self, kinds: Sequence[_Kind], options: dict[str, Any], envs_per_worker: int | str, *, single: bool
    ) -> None:
        self._waiting, self._envs_per_worker = list(kinds), envs_per_worker
        self._options = {**options, "hooks": (*options.get("hooks", ()), self._count_event)}
        self._replaced: list[tuple[Any, Any]] = []  # pairs of an original and what stands in its place
        self._said: set[str] = set()
        # Lists: threads add to them.
        self._made: list[int] = []
        self._losses: list[str] = []
        self._outcomes: list[str] = []
        self._finder = AfterImport({_ADAPTER, *(kind.module for kind in kinds)}, lambda _: self.replace_imported())
        sys.meta_path.insert(0, self._finder)
        self.replace_imported()
        if single:
            self._replace(gymnasium.make, self._making(gymnasium.make))

    def undo(self) -> None:
        """Put the classes of the libraries back; envs that exist stay what they are. A second call does nothing."""
        self._waiting.clear()
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        while self._replaced:
            original, stand_in = self._replaced.pop()
            _swap(stand_in, original)

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, *error: object) -> Literal[False]:
        """Put the classes of the libraries back."""
        self.undo()
        return False

    def summary(self) -> dict[str, Any]:
        """Return what became of the workers so far.

        Returns:
            A dict. ``envs``: number of envs made. ``losses``: number of lost workers by cause: a signal, such as
            ``"SIGKILL"``, ``"exit code 1"``, ``"hung"`` or ``"broken"``. ``outcomes``: number of recoveries by outcome,
            see :class:`Recovery`; and as ``"recycled"`` the workers that were replaced by plan.
        """
        outcomes = Counter(self._outcomes)
        losses = dict(Counter(self._losses).most_common())
        return {"envs": sum(self._made), "losses": losses, "outcomes": {name: outcomes[name] for name in _OUTCOMES}}

    # --- what is put in place -------------------------------------------------------------------

    def replace_imported(self) -> None:
        """Replace each class that has been imported since, and whose stand-in can be made."""
        for kind in list(self._waiting):
            original = getattr(sys.modules.get(kind.module), kind.name, None)
            if original is None:
                continue
            ours: Any = SubprocessVectorEnv
            if not kind.module.startswith("gymnasium."):
                # Not there yet if the script imports ours, and that the library: then it is replaced a moment later.
                ours = getattr(importlib.import_module(_ADAPTER), "SubprocessVecEnv", None)
            if ours is not None and kind in self._waiting:  # it was replaced already if that import was the first
                self._waiting.remove(kind)
                self._replace(original, self._stand_in(kind, original, ours))

    def _replace(self, original: Any, stand_in: Any) -> None:
        self._replaced.append((original, stand_in))
        _swap(original, stand_in)

    def _stand_in(self, kind: _Kind, original: Any, ours: Any) -> Any:
        """Return a class with the name and the arguments of the original that does what ours does."""
        signature = inspect.signature(original)

        def build(made: Any, *arguments: Any, **named: Any) -> None:
            given = signature.bind(*arguments, **named).arguments
            forks = [given.pop(name) and name for name in ("context", "start_method") if given.get(name) == "fork"]
            given["env_fns"] = env_fns = list(given["env_fns"])
            if kind.serial and any(_returns_existing_env(env_fn) for env_fn in env_fns):
                raise UsageError(
                    "It is given an env that exists already, which cannot move to a worker (see --single)."
                )
            ours.__init__(made, **given, envs_per_worker=self._envs_per_worker, **self._options)
            self._made.append(made.num_envs)
            for name in forks:
                self._warn_once(f"{name}='fork' is passed over: workers are forked from a clean process.")

        members = {
            "__init__": build,
            "__doc__": f"Stands in for {original.__name__}: see ``multienv.replace_vector_envs``.",
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__signature__": signature,
            "replaced": (original, self._warn_once),
            "reward_dtype": np.float32 if kind.serial else np.float64,  # as Stable-Baselines3's
        }
        stand_in = _StandIn(original.__name__, (ours,), members)
        stand_in.register(original)
        return stand_in

    def _making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands in for ``gymnasium.make``."""

        @runs_user_code
        @functools.wraps(original)
        def make(*arguments: Any, **named: Any) -> Any:
            try:
                # Pickled by the name of the original, so that is what a worker calls.
                env = SubprocessEnv(functools.partial(make, *arguments, **named), **self._options).__enter__()
            except UsageError as error:
                self._warn_once(f"make() returns an env of this process: {first_line(error)}")
                return original(*arguments, **named)
            self._made.append(1)
            return env

        return make

    def _count_event(self, event: Event) -> None:
        """Note what became of a worker: a hook."""
        if isinstance(event, Loss):
            code = event.exit_code
            died = "died" if code is None else signal_name(code) if code < 0 else f"exit code {code}"
            self._losses.append(died if event.cause == "died" else event.cause)
        elif isinstance(event, Recovery):
            self._outcomes.append(event.outcome)
        elif isinstance(event, Recycled) and event.outcome != "put off":
            self._outcomes.append("recycled")

    def _warn_once(self, text: str) -> None:
        """Log a warning once for each line of the script that causes it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
            frame = frame.f_back
        where = "" if frame is None else f"{frame.f_code.co_filename}, line {frame.f_lineno}: "
        said = where + text.partition(":")[0]  # what follows may name an object
        if said not in self._said:
            self._said.add(said)
            logger.warning("%s%s", where, text)


class _StandIn(ABCMeta):
    """Is the type of stand-ins: where ours cannot make an env, the original does."""

    replaced: tuple[Any, Callable[[str], None]]

    @runs_user_code
    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        """Make an env; a subclass of the script makes its own."""
        if "replaced" not in vars(cls):
            return super().__call__(*arguments, **named)
        original, warn_once = cls.replaced
        try:
            return super().__call__(*arguments, **named)
        except (UsageError, TypeError) as error:  # TypeError: an argument is unknown, or the env is no gymnasium.Env
            warn_once(f"{original.__name__} is {original.__module__.partition('.')[0]}'s own here: {first_line(error)}")
        return original(*arguments, **named)


def _swap(old: Any, new: Any) -> None:
    """Put ``new`` wherever a module has ``old``, but for those of multienv."""
    for module_name, module in list(sys.modules.items()):
        # Not isinstance(): cffi's libraries say that they are modules, and have no names.
        if issubclass(type(module), ModuleType) and module_name.partition(".")[0] != "multienv":
            names = object.__getattribute__(module, "__dict__")  # some modules are loaded by any other look at them
            names.update({name: new for name, value in list(names.items()) if value is old})


def _returns_existing_env(env_fn: Any) -> bool:
    """Tell whether a function uses an env that exists: ``lambda: env``."""
    try:
        used = inspect.getclosurevars(env_fn)
    except (TypeError, ValueError):  # no function of Python's, or a variable has no value yet
        return False
    return any(isinstance(value, gymnasium.Env) for value in (*used.nonlocals.values(), *used.globals.values()))
