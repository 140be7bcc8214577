"""A script with types of its own, here or in a multiprocessing child, where it is not ``__main__``; see test_surroundings."""

from __future__ import annotations

import enum
import multiprocessing
import os
import signal
import sys
from typing import Any

from kit import CounterEnv
from multienv import SubprocessEnv


class Move(enum.IntEnum):
    LEFT = 1


class OfTheScript(CounterEnv):
    """Takes and returns things of the script."""

    def step(self, action: Any) -> Any:
        *transition, info = super().step(action)
        return *transition, {**info, "type": type(action)}

    def itself(self) -> Any:
        return self.__class__


def run(context: str) -> None:
    action = Move.LEFT
    with SubprocessEnv(OfTheScript, context=context) as env:
        env.reset(seed=0)
        for _ in range(2):
            assert env.step(action)[4]["type"] is type(action)
            assert env.call("itself") is OfTheScript
            os.kill(env.statistics().pid or 0, signal.SIGKILL)
        env.step(action)
        assert env.statistics().exact_recoveries == 2


if __name__ == "__main__":
    _, where, context = sys.argv
    if where == "itself":
        run(context)
    else:
        process = multiprocessing.get_context("forkserver").Process(target=run, args=(context,))
        process.start()
        process.join()
        sys.exit(process.exitcode)
