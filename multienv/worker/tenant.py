"""What a host holds: one env, or the envs of a group; and how it takes leave of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, MutableSequence
from functools import partial
from types import BuiltinMethodType, MethodType, ModuleType
from typing import Any

from multienv.wire.memory import Block
from multienv.wire.messages import (
    Call,
    CaptureState,
    Description,
    GetAttribute,
    HasAttribute,
    Render,
    Reset,
    RestoreState,
    SetAttribute,
    pack_value,
)
from multienv.worker.failures import not_picklable

# Number, kind and frame of a request → the frame of its reply.
Handle = Callable[[int, int, bytes], bytes]
Words = MutableSequence[int] | memoryview


class Tenant(ABC):
    """Answers the requests that concern envs. What it raises becomes the answer.

    Attributes:
        block: The memory for observations, if there is any.
    """

    block: Block | None = None

    @abstractmethod
    def describe(self) -> Description:
        """What the trainer learns once it is built."""

    @abstractmethod
    def compile(self, words: Any, handle: Handle) -> Handle:
        """``handle`` for steps too: one function, because each call, and each object it touches, counts there.

        ``words`` are the control words, to mark what is being executed.
        """

    def is_compiled(self) -> bool:
        """Whether what :meth:`compile` has returned still holds; asked after each request that is not a step."""
        return True

    def remember(self, seq: int) -> None:  # noqa: B027 - one with memory of its own has no need to
        """Keep what others will have written over when a copy of this process is moved."""

    @abstractmethod
    def move(self, allocate: Callable[[int], Block]) -> Block | None:
        """To memory of another process, with the observations that lie there; returns what to let go of."""

    @abstractmethod
    def close(self) -> None:
        """Close what it holds."""

    @abstractmethod
    def reset(self, seq: int, message: Reset) -> bytes:
        """Begin an episode."""

    @abstractmethod
    def capture_state(self, seq: int, message: CaptureState) -> bytes:
        """What a new process needs to go on from here."""

    @abstractmethod
    def restore_state(self, message: RestoreState) -> None:
        """Go on from there."""

    @abstractmethod
    def call(self, seq: int, message: Call) -> bytes:
        """Call a method."""

    @abstractmethod
    def get(self, seq: int, message: GetAttribute) -> bytes:
        """Read an attribute."""

    @abstractmethod
    def has(self, seq: int, message: HasAttribute) -> bytes:
        """Tell whether there is such an attribute."""

    @abstractmethod
    def set(self, seq: int, message: SetAttribute) -> bytes:
        """Write an attribute."""

    @abstractmethod
    def render(self, seq: int, message: Render) -> bytes:
        """Draw."""


def call_by_name(env: Any, message: Call) -> Any:
    """Call the method that ``message`` names, or read the attribute."""
    name, *inside = message.name.split(".")
    attribute = env.get_wrapper_attr(name)
    for name in inside:
        attribute = getattr(attribute, name)
    return attribute(*message.args, **message.kwargs) if callable(attribute) else attribute


def is_method(value: Any) -> bool:
    """Whether calling a copy of it would call a method of a copy."""
    while isinstance(value, partial):
        value = value.func
    return isinstance(value, MethodType | BuiltinMethodType) and not isinstance(
        value.__self__, type | ModuleType | None
    )


def packed(seq: int, value: Any, name: str) -> bytes:
    """The reply with this value; ``name`` says where it is from if it cannot be pickled."""
    try:
        return pack_value(seq, value)
    except Exception as error:
        raise not_picklable(name, error) from error
