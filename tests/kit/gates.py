"""An env whose steps, resets and builds take as long as a test wants."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.counter import CounterEnv

GO, WAIT = 0, 3


class GateEnv(CounterEnv):
    """Waits until the file ``gate`` is there, and leaves the file ``waits`` meanwhile.

    It waits in each step with the action ``WAIT``, in ``wait()``, and in its second reset if told so.
    """

    def __init__(self, directory: Path, name: str = "", *, in_reset: bool = False, **counter: Any) -> None:
        super().__init__(**{"horizon": None, **counter})
        self.waits, self.gate = directory / f"waits{name}", directory / "gate"
        self.in_reset, self.resets = in_reset, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self.in_reset and self.resets == 1:
            self.wait()
        self.resets += 1
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if action == WAIT:
            self.wait()
        return super().step(action)

    def wait(self) -> str:
        self.waits.touch()
        while not self.gate.exists():
            time.sleep(0.005)
        return "waited"


def gated_from_the_second_time(directory: Path) -> GateEnv:
    """Build an env: the first time at once, later when the gate is there."""
    env = GateEnv(directory)
    if (directory / "built").exists():
        env.wait()
    (directory / "built").touch()
    return env


@contextlib.contextmanager
def opened_meanwhile(directory: Path) -> Iterator[None]:
    """Open the gate by another thread as soon as an env waits there."""

    def open_up() -> None:
        while not (directory / "waits").exists():
            time.sleep(0.005)
        (directory / "gate").touch()

    thread = threading.Thread(target=open_up)
    thread.start()
    yield
    thread.join()
