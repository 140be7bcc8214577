"""The native extension, where there is one.

``_native.c`` has the loops of a plain step, and control words whose loads and stores keep their order on any processor.
It is built where there is a compiler. Without it, or with ``MULTIENV_PUREPYTHON=1`` in the environment, the Python code
does the same; with ``MULTIENV_REQUIRE_EXTENSION=1`` a build fails if the extension does.

Python has no instruction that orders two stores. On x86-64 the processor orders them: a process that sees the number of
a reply also sees the rows that were written before it. Other processors may show the number first, so the extension is
required there.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import sys
from typing import Any

native: Any = None  # the module; None: there is none, or it is not wanted
_has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()  # the extension needs it, and must not bring it back
if _has_gil and os.environ.get("MULTIENV_PUREPYTHON", "0") in ("", "0"):
    with contextlib.suppress(ImportError):
        native = importlib.import_module("multienv._engine._native")
if native is None and platform.machine() not in ("x86_64", "AMD64"):
    raise ImportError(
        f"On {platform.machine()}, multienv needs its native extension, and this Python has none, or does not use it. "
        "Install a C compiler, install multienv again, and set no MULTIENV_PUREPYTHON. Python must be built with a GIL."
    )
