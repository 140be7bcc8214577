"""Whatever keeps an env_fn from being pickled is named, with what refers to it. Local functions travel by value."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import pytest

from multienv.envs.unpicklable import culprit_in

LOCK = threading.Lock()


def can_be_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except TypeError:
        return False
    return True


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


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (uses_a_global, "the global LOCK, which uses_a_global.<locals>.use() ({file}:N) uses, is a _thread.lock"),
        (captures, "the variable lock, which captures.<locals>.<lambda>() ({file}:N) has captured, is a _thread.lock"),
        (default, "a default value of default.<locals>.<lambda>() ({file}:N) is a _thread.lock"),
        (of_a_class, "the attribute table of class of_a_class.<locals>.Env is a builtins.tuple"),
        (
            of_a_property,
            "the global LOCK, which of_a_property.<locals>.Env.shown() ({file}:N) uses, is a _thread.lock",
        ),
        (of_an_object, "the attribute lock of a of_an_object.<locals>.Builder is a _thread.lock"),
        (lambda: partial(print, LOCK), "an argument of partial(print) is a _thread.lock"),
        (lambda: partial(print, end=LOCK), "the argument end of partial(print) is a _thread.lock"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_pickled_is_named(make: Callable[[], Any], told: str) -> None:
    assert re.sub(r":\d+\)", ":N)", culprit_in(make(), can_be_pickled)) == told.format(file=__file__)


def test_nothing_is_named_where_each_part_can_be_pickled_by_itself() -> None:
    def make() -> None:
        pass

    assert culprit_in(make, can_be_pickled) == ""
