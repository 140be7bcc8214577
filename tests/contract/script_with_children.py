"""A script that runs envs of its own in multiprocessing children, where it is not ``__main__``; see test_surroundings."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

from kit import CounterEnv
from multienv import SubprocessEnv


class OfTheScript(CounterEnv):
    """Observes and returns things of the script."""

    def itself(self) -> Any:
        return self.__class__


def build() -> OfTheScript:
    return OfTheScript()


def child(context: str) -> None:
    with SubprocessEnv(build, context=context) as env:
        env.reset(seed=0)
        env.step(1)
        assert env.call("itself") is OfTheScript


if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child, args=(sys.argv[2],))
    process.start()
    process.join()
    sys.exit(process.exitcode)
