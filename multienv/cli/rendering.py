"""Find out what renders the frames of an env, from inside its worker."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import Any

import gymnasium

from multienv._engine.building.building import EnvFn

_VARIABLES = ("MUJOCO_GL", "PYOPENGL_PLATFORM", "MUJOCO_EGL_DEVICE_ID", "CUDA_VISIBLE_DEVICES")
_DEVICES = ("/dev/nvidia", "/dev/dri/", "/dev/kfd")


class Drawn(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds a method to an env that tells what renders its frames."""

    def drawn_by(self) -> list[str]:
        """Return what is known after a frame was rendered: OpenGL's name of the renderer, variables, open devices.

        If the OpenGL context is not current, or in another thread, there is no name. This loads no library.
        """
        known = []
        if "OpenGL" in sys.modules:
            with contextlib.suppress(Exception):  # PyOpenGL finds no platform
                gl = importlib.import_module("OpenGL.GL")
                name = gl.glGetString(gl.GL_RENDERER)
                known += [name.decode()] if name else []
        if "mujoco" in sys.modules or known:
            known += [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
        targets = set()
        for descriptor in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
            with contextlib.suppress(OSError):
                targets.add(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115 - a pipe is no path
        return known + sorted(target for target in targets if target.startswith(_DEVICES))


def drawn(env_fn: EnvFn) -> Drawn:
    """Build an env with this method."""
    return Drawn(env_fn())
