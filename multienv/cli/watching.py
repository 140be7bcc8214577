"""Find out, inside its worker, what an env draws from and has outside, how its observations are, and what renders."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.utils.passive_env_checker import check_obs

from multienv._engine.building.building import EnvFn
from multienv._engine.processes.leftovers import open_descriptors
from multienv._engine.wire.digests import MARK, evidence_of
from multienv._engine.worker.census import OBSTACLES, census, obstacle_of, standard_streams
from multienv._engine.worker.seeding import seed_process, state_of_process

# What chooses the renderer of frames, and what it opens.
_VARIABLES = ("MUJOCO_GL", "PYOPENGL_PLATFORM", "MUJOCO_EGL_DEVICE_ID", "CUDA_VISIBLE_DEVICES")
_DEVICES = ("/dev/nvidia", "/dev/dri/", "/dev/kfd")


class Outside(NamedTuple):
    """Tells of one thing that an env has beyond its memory.

    Attributes:
        when: When it was first seen: ``"after its construction"`` and so on.
        what: For people.
        obstacle: One of ``OBSTACLES``; ``""``: it is put back.
    """

    when: str
    what: str
    obstacle: str


class Noticed(NamedTuple):
    """Holds what was noticed of an env.

    Attributes:
        drawn_from: Which of ``random`` and ``numpy.random`` it has drawn from, or seeded, in resets and steps.
        incomparable: Name of the type of a value that it returned and that cannot be compared; ``""``: there is none.
        outside: What it has beyond its memory.
        misfit: The first observation that is not as its space says: where, and what is wrong; ``""``: there is none.
    """

    drawn_from: tuple[str, ...] = ()
    incomparable: str = ""
    outside: tuple[Outside, ...] = ()
    misfit: str = ""


class ObservedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Compares the generators of the process before and after each reset and step, and looks at what they return.

    Args:
        env_fn: Builds the env. What the process has open before is multienv's.
    """

    def __init__(self, env_fn: EnvFn) -> None:
        self._ours = open_descriptors()
        self._standard = standard_streams()
        self._outside: dict[tuple[str, str], Outside] = {}
        self._drawn_from: set[str] = set()
        self._incomparable = self._misfit = ""
        self._is_called, self._steps = False, 0
        super().__init__(env_fn())
        self._take_census("after its construction")
        sys.addaudithook(self._on_audit_event)

    def reset(self, **options: Any) -> Any:
        """Reset the env."""
        result = self._called("reset", **options)
        if not self._steps:
            self._take_census("after a reset")
        return result

    def step(self, action: Any) -> Any:
        """Step the env."""
        self._steps += 1
        return self._called("step", action)

    def _called(self, method: str, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        before, self._is_called = state_of_process(), True
        try:
            *result, info = getattr(self.env, method)(*arguments, **options)
        finally:
            self._is_called = False
        self._inspect(method, before, *result)
        return (*result, info)

    def noticed(self) -> Noticed:
        """Return what was noticed up to now."""
        self._take_census(f"after {self._steps} steps")
        drawn_from = tuple(sorted(self._drawn_from, reverse=True))
        return Noticed(drawn_from, self._incomparable, tuple(self._outside.values()), self._misfit)

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

    def _take_census(self, when: str) -> None:
        for found in census(self._ours, (), self._standard) if sys.platform == "linux" else ():
            self._add_outside(when, found.name, OBSTACLES[found.obstacle])

    def _on_audit_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_called and obstacle_of(event, arguments):
            what = f"{event}({', '.join(map(repr, arguments[-1:] if event.startswith('socket') else arguments[:1]))})"
            when = "in a step" if self._steps else "in a reset"
            self._add_outside(when, f"{what:.160}", OBSTACLES[obstacle_of(event, arguments)])

    def _add_outside(self, when: str, what: str, obstacle: str) -> None:
        self._outside.setdefault((obstacle, what), Outside(when, what, obstacle))

    def _inspect(self, method: str, before: Any, *returned: Any) -> None:
        pairs = zip(("random", "numpy.random"), before, state_of_process(), strict=True)
        self._drawn_from.update(name for name, one, other in pairs if one != other)
        marks = [found[len(MARK) :] for found in map(evidence_of, returned) if found.startswith(MARK)]
        if marks and not self._incomparable:
            self._incomparable = marks[0].decode(errors="replace")
        if not self._misfit and (found := misfit(returned[0], self.observation_space, method)):
            self._misfit = f"the observation of {f'step {self._steps}' if self._steps else 'the reset'} {found}"


def misfit(observation: Any, space: gymnasium.Space[Any], method: str) -> str:
    """Return gymnasium's first complaint about an observation, and its values in short; ``""``: it fits its space."""
    gymnasium.logger.min_level = gymnasium.logger.WARN  # the env may have raised it
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            check_obs(observation, space, method)
        except Exception as error:  # another structure
            return str(error).removeprefix(f"The obs returned by the `{method}()` method ")
    if not told:
        return ""
    text = str(told[0].message).removesuffix("\x1b[0m").rstrip(".").partition(" method ")[2]
    text += f": {' '.join(str(space).split()):.100}"
    for array in observation.values() if isinstance(observation, dict) else [observation]:
        if isinstance(array, np.ndarray) and array.size and array.dtype.kind in "biuf":
            values = "partly NaN" if np.isnan(array.min()) else f"from {array.min():g} to {array.max():g}"
            text += f"; its values of shape {array.shape} are {values}"
    return text


def seeded(env_fn: EnvFn) -> EnvFn:
    """Return a function that builds an env with the same states of ``random`` and ``numpy.random`` each time.

    multienv puts them back after a loss. So the walks of an env that draws from them can be compared, too.
    """

    def build() -> Any:  # pickled by value: a worker does not import the command line for it
        seed_process((0, 0))
        return env_fn()

    return build
