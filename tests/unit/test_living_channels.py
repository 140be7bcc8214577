"""The exit of a trainer asks for all channels while other threads may open some, and close those of forgotten envs."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest

from multienv._engine.processes import worker_process


class Channel:
    """Stands for one."""


def test_all_channels_are_told_though_another_one_is_opened_at_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a thread has its turn is left to luck; a trace function is called wherever it could have it."""
    live: Any = weakref.WeakValueDictionary()
    monkeypatch.setattr(worker_process, "live", live)
    kept, opened = [Channel() for _ in range(3)], list[Channel]()
    live.update({id(one): one for one in kept})

    def open_another(*_: object) -> Any:
        opened.append(Channel())
        live[id(opened[-1])] = opened[-1]
        return open_another

    before = sys.gettrace()
    sys.settrace(open_another)
    try:
        found: list[Any] = worker_process.living()
    finally:
        sys.settrace(before)
    assert opened
    assert {*kept} <= {*found}
