"""Set in the modules of a worker what the trainer has set in its own: see ``building.module_state``."""

from __future__ import annotations

import contextlib
import importlib.abc
import pickle
import sys
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np


class AfterImport(importlib.abc.MetaPathFinder):
    """Has something done right after certain modules have been executed, once it is in ``sys.meta_path``.

    Args:
        names: Of the modules.
        then: Called with the module.
    """

    def __init__(self, names: Collection[str], then: Callable[[ModuleType], object]) -> None:
        self._names, self._then = names, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the finders after this one find, with a loader that goes on afterwards."""
        if fullname not in self._names:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def set_module_values(pickled: bytes) -> None:
    """Set what the trainer has set: in modules that are imported now, and in others once they are.

    Args:
        pickled: By ``module_values()`` of the trainer; empty: nothing.
    """
    if not pickled:
        return
    values, errors = pickle.loads(pickled)
    np.seterr(**errors)

    def set_in(module: ModuleType) -> None:
        for path, value in values[module.__name__].items():
            _set(module, path, value)

    for name in values.keys() & sys.modules.keys():
        set_in(sys.modules[name])
    if values:
        sys.meta_path.insert(0, AfterImport(values, set_in))


def _set(holder: Any, path: Sequence[str], value: Any) -> None:
    with contextlib.suppress(AttributeError, TypeError):  # it is another module here
        for name in path[:-1]:
            holder = getattr(holder, name)
        old = getattr(holder, path[-1], None)
        if isinstance(old, list) and isinstance(value, list):  # other modules may have it, too
            old[:] = value
        elif isinstance(old, set | dict) and type(old) is type(value):
            old.clear()
            old.update(value)
        else:
            setattr(holder, path[-1], value)
