"""The generator of an env in another process, to draw from as if it were here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from typing import Any

import numpy as np


class RemoteGenerator(np.random.Generator):
    """Draws where the env is: gymnasium's wrappers share the generator of the env they wrap.

    Each method is a request to the env's process, recorded and replayed as any call. Everything else, as
    ``bit_generator``, is that of a copy as it stands.
    """

    def __init__(self, call: Callable[..., Any], copy: Callable[[], np.random.Generator]) -> None:
        """``call`` calls a method of the remote env, ``copy`` gets the generator."""
        super().__init__(np.random.PCG64(0))
        self._call = call
        self._copy = copy

    def _draw(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._call(f"np_random.{name}", *args, **kwargs)

    @property
    def bit_generator(self) -> np.random.BitGenerator:
        """Of a copy: its state is that of the remote one."""
        return self._copy().bit_generator

    def shuffle(self, x: Any, axis: int = 0) -> None:
        """In place, and so here; the order is drawn there."""
        if isinstance(x, np.ndarray) and axis:
            x = np.swapaxes(x, 0, axis)
        order = self._draw("permutation", len(x))
        x[:] = x[order] if isinstance(x, np.ndarray) else [x[place] for place in order]

    def __reduce__(self) -> Any:
        """A copy, as it stands."""
        return self._copy().__reduce__()


for _name in dir(np.random.Generator):
    if not _name.startswith("_") and _name not in ("bit_generator", "shuffle"):
        setattr(RemoteGenerator, _name, partialmethod(RemoteGenerator._draw, _name))
