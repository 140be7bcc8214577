"""Find which modules of installed packages a worker imports while it builds its envs, for ``preload="auto"``."""

from __future__ import annotations

import os
import sys
from types import ModuleType

from multienv._engine.wire.messages import Imports

# Folders that hold installed packages. A module elsewhere is the user's, or Python's own.
_INSTALLED = ("/site-packages/", "/dist-packages/")


class BeforeBuild:
    """Notes the modules and the environment variables of this process, to be compared after the envs are built."""

    def __init__(self) -> None:
        self._modules, self._variables = set(sys.modules), dict(os.environ)

    def imports(self) -> Imports:
        """Return what was imported since, and the variables that were set since: imports may depend on them."""
        names = [
            name for name, module in list(sys.modules.items()) if name not in self._modules and is_installed(module)
        ]
        variables = {name: value for name, value in os.environ.items() if self._variables.get(name) != value}
        return Imports(tuple(names), variables)


def is_installed(module: object) -> bool:
    """Tell whether a module belongs to an installed package; its attributes are not looked up, which may run code."""
    is_module = issubclass(type(module), ModuleType)  # not one that only says so
    path = object.__getattribute__(module, "__dict__").get("__file__") if is_module else None
    return isinstance(path, str) and any(folder in path for folder in _INSTALLED)
