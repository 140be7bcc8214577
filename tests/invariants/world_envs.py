"""An env that draws a world in each episode, and shows it in observations of any kind. Workers import it by name."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

LARGE = 5000  # what took more than 4 KiB was not compared once


class AnySpace(spaces.Space[Any]):
    """Has any value: such observations have no fixed layout."""

    def contains(self, x: Any) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnySpace)

    __hash__ = None  # type: ignore[assignment]


class Tensor:
    """As torch's: it is read through numpy, and its pickle has the address of its memory in it."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)
        self.shape, self.dtype = self.values.shape, self.values.dtype

    def __reduce__(self) -> Any:
        return Tensor, (self.values,), {**vars(self), "address": id(self)}

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.values

    def __dlpack__(self) -> None:
        raise NotImplementedError


class Opaque:
    """Pickles to other bytes each time."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return Opaque, (self.value,), {"nonce": os.urandom(8)}


class SlottedList(list[Any]):
    """Holds a number beside its items."""

    __slots__ = ("goal",)


class SlottedDict(dict[str, Any]):
    """Holds a number beside its items."""

    __slots__ = ("goal",)


class Aimed:
    """Holds a number outside ``__dict__``."""

    __slots__ = ("goal",)


@dataclasses.dataclass
class AimedSeen(Aimed):
    """Holds a number that is none of its fields."""

    frame: int = 0


class ShortList(list[Any]):
    """Has more than it shows; the caller gets all."""

    def __iter__(self) -> Any:
        return iter(())

    def __reduce__(self) -> Any:
        return ShortList, ([self[index] for index in range(len(self))],)


class TellingList(list[Any]):
    """Pickles to more than it holds."""

    told = 0.0

    def __reduce__(self) -> Any:
        return aimed, (SlottedList(), TellingList.told)


def telling(value: float) -> Any:
    """Return a list that pickles to a list with a number beside it."""
    TellingList.told = value
    return TellingList()


def aimed(holder: Any, value: float) -> Any:
    """Return what holds something, with a number beside it."""
    holder.goal = value
    return holder


def long_doubles(value: float) -> Any:
    """Return numbers of which six bytes of sixteen say nothing, and are others each time."""
    array = np.full(8, value, np.longdouble)
    if np.finfo(np.longdouble).nmant == 63:  # as on x86: elsewhere all bytes count
        octets = array.view(np.uint8).reshape(8, -1)
        octets[:, 10:] = np.frombuffer(os.urandom(octets[:, 10:].size), np.uint8).reshape(8, -1)
    return array


def zeros(value: float, shape: Any = LARGE, dtype: Any = np.float64) -> Any:
    """Return an array that shows the value in its last place but one."""
    array = np.zeros(shape, dtype)
    array.reshape(-1)[-2] = value
    return array


def picture(value: float, shape: Any) -> Any:
    """Return an array that shows the value in all channels of its last pixel: one channel is the same once in 256."""
    array = np.zeros(shape, np.uint8)
    array[-1, -1] = list(int(value * 2**24).to_bytes(3, "little"))
    return array


BOX = spaces.Box(-1, 1, (LARGE,), np.float32)


# Of values of all types: unit/test_verification.py.
WAYS: dict[str, tuple[Callable[[float], Any], Any]] = {
    "a dict in another order": (
        lambda value: {"b": zeros(value, dtype=np.float32), "a": zeros(0, dtype=np.float32)},
        spaces.Dict(a=BOX, b=BOX),
    ),
    "float64 in a float32 Box": (zeros, BOX),
    "one pixel": (
        lambda value: picture(value, (300, 200, 3)),
        spaces.Box(0, 255, (300, 200, 3), np.uint8),
    ),
    "one of many pixels": (
        lambda value: picture(value, (700, 500, 3)),
        spaces.Box(0, 255, (700, 500, 3), np.uint8),
    ),
    "a tensor": (lambda value: {"x": Tensor(zeros(value))}, AnySpace()),
    "a tensor's attribute": (lambda value: aimed(Tensor(zeros(0)), value), AnySpace()),
    "a slot of a list": (lambda value: aimed(SlottedList("ab"), value), AnySpace()),
    "a slot of a dict": (lambda value: aimed(SlottedDict(a=1), value), AnySpace()),
    "a slot of a dataclass's base": (lambda value: {"x": aimed(AimedSeen(), value)}, AnySpace()),
    "a list that shows less": (lambda value: ShortList([value]), AnySpace()),
    "a list that pickles to more": (telling, AnySpace()),
    "long doubles": (long_doubles, spaces.Box(-1, 1, (8,), np.longdouble)),
}


class WorldEnv(gymnasium.Env[Any, Any]):
    """Shows a number that is drawn in each reset, or in each step, and nowhere else but in its observations.

    Args:
        way: How it is shown, a key of :data:`WAYS`; or ``"opaque"``.
        chance: Drawn from what no replay can know: ``"reset"``, ``"step"``; ``""``: from the env's own generator.
        horizon: Steps in an episode.
    """

    def __init__(self, way: str, chance: str, horizon: int = 1000) -> None:
        self.show, self.observation_space = WAYS.get(way, (Opaque, AnySpace()))
        self.action_space = spaces.Discrete(2)
        self.chance, self.horizon, self.world, self.steps = chance, horizon, 0.0, 0

    def _draw(self, when: str) -> None:
        known = float(self.np_random.random())
        self.world = int.from_bytes(os.urandom(6), "little") / 2**48 if self.chance == when else known

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._draw("reset")
        self.steps = 0
        return self.show(self.world), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.chance != "reset":
            self._draw("step")
        return self.show(self.world), 1.0, self.steps >= self.horizon, False, {}


class FinalWorld(WorldEnv):
    """Draws the last number of each episode from what no replay can know; all others, and what follows, are known."""

    def step(self, action: Any) -> Any:
        told = super().step(action)
        if told[2] and self.chance == "end":
            self.world = int.from_bytes(os.urandom(6), "little") / 2**48
        return (self.show(self.world), *told[1:])


class VectorRewards(WorldEnv):
    """Gives vectors as rewards, as mo-gymnasium does, beside an observation that does not fit its space."""

    def step(self, action: Any) -> Any:
        _, _, *rest = super().step(action)
        return (self.show(0.0), np.array([1.0, self.world]), *rest)
