"""Whatever keeps an env_fn from being pickled is named, with what refers to it. Local functions travel by value."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from multienv._engine.building.pickling import pickled_env_fns
from multienv.errors import UsageError

LOCK = threading.Lock()
QUEUES = {"one": [queue.Queue()]}


def uses_a_global() -> Any:
    def use() -> Any:
        return LOCK

    def make() -> Any:
        return [use() for _ in range(2)]

    return make


def captures() -> Any:
    lock = LOCK
    return lambda: lock


def default() -> Any:
    return lambda lock=LOCK: lock


def of_a_class() -> Any:
    class Base:
        def __init__(self) -> None:
            super().__init__()

    class Env(Base):
        table = (LOCK,)

        def step(self) -> type:
            return Env

    return Env


def of_a_property() -> Any:
    class Env:
        @property
        def shown(self) -> Any:
            return LOCK

    return Env


def of_an_object() -> Any:
    class Builder:
        def __init__(self, lock: Any) -> None:
            self.lock = lock

        def make(self) -> None:
            pass

    return Builder(LOCK).make


def of_an_object_in_one() -> Any:
    class Env:
        def step(self) -> Any:
            return QUEUES

    return Env


def refusal_of(*env_fns: Any) -> str:
    with pytest.raises(UsageError) as refused:
        pickled_env_fns(env_fns)
    return str(refused.value)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (uses_a_global, "the global LOCK, which uses_a_global.<locals>.use() ({file}:N) uses."),
        (captures, "the variable lock, which captures.<locals>.<lambda>() ({file}:N) has captured."),
        (default, "the default values of default.<locals>.<lambda>() ({file}:N)."),
        (of_a_class, "the attribute table of class of_a_class.<locals>.Env."),
        (of_a_property, "the global LOCK, which of_a_property.<locals>.Env.shown() ({file}:N) uses."),
        (of_an_object, "the attribute lock of a of_an_object.<locals>.Builder."),
        (of_an_object_in_one, "the global QUEUES, which of_an_object_in_one.<locals>.Env.step() ({file}:N) uses."),
        (lambda: partial(print, LOCK), "the arguments of partial(print)."),
        (lambda: partial(print, end=LOCK), "the arguments of partial(print)."),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_pickled_is_named(make: Callable[[], Any], told: str) -> None:
    env_fn = make()
    said = refusal_of(print, env_fn, print)
    begin = f"env_fn {env_fn!r:.100} cannot be sent to a process: TypeError: cannot pickle '_thread.lock' object. "
    begin += "A _thread.lock is in "
    assert re.sub(r":\d+\)", ":N)", said).startswith(begin + told.format(file=__file__) + " Build what it needs")


def test_nothing_is_named_if_nothing_is_known_to_hold_what_cannot_be_pickled() -> None:
    class Env:
        def __reduce__(self) -> Any:
            return print, (LOCK,)

    assert "TypeError: cannot pickle '_thread.lock' object. Build what it needs" in refusal_of(Env())
