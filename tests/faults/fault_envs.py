"""Envs of the tests of faults, in a module of their own: workers import it, and no test with it."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import resource
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from kit import CounterEnv, FaultyEnv
from multienv import SubprocessEnv
from multienv._engine.worker.snapshots import ANNOUNCEMENT


class Alarmed(CounterEnv):
    """Goes by a timer, which it sets once, and whose signal it takes."""

    def __init__(self) -> None:
        super().__init__(horizon=None)
        self.method = 0
        signal.signal(signal.SIGALRM, self.ring)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)

    def ring(self, *_: Any) -> None:
        self.method += 1

    def step(self, action: Any) -> Any:
        before = self.method
        while self.method == before:
            signal.pause()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        return super().step(action)


class BabblingEnv(CounterEnv):
    """Writes to sockets and pipes of its process that are not its own."""

    def babble(self, seed: int, others: list[int]) -> None:
        """Send the monitor announcements of no snapshot, and any bytes, with the wrong descriptors and the right."""
        chance = random.Random(seed)
        pids = [*others, os.getpid(), 0, 1, 2**22, 2**64 - 1]
        announcement = ANNOUNCEMENT.pack(chance.choice(pids), chance.getrandbits(64), chance.choice([0, 1, 2**64 - 1]))
        found = [number for number in map(int, os.listdir("/proc/self/fd")) if number > 2]
        ours, theirs = socket.socketpair()
        with ours, theirs, tempfile.TemporaryFile() as file:
            handed = [[], [ours.fileno()], [file.fileno()], [ours.fileno(), theirs.fileno(), file.fileno()]]
            for number in found:
                with contextlib.suppress(OSError):
                    if stat.S_ISFIFO(os.fstat(number).st_mode):
                        os.write(number, chance.randbytes(100))
                    elif stat.S_ISSOCK(os.fstat(number).st_mode):
                        data = chance.choice([announcement, announcement, chance.randbytes(chance.randrange(1, 200))])
                        rights = array("i", chance.choice(handed))
                        with socket.socket(fileno=os.dup(number)) as over:
                            over.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else [])


class CrashesByChance(CounterEnv):
    """Is killed in some executions of a step, whichever step that is: a file counts them in all its processes.

    Args:
        path: The file.
        crashes: Numbers of these executions.
    """

    def __init__(self, path: str, crashes: tuple[int, ...]) -> None:
        super().__init__(horizon=None)
        # Open all the time: a file that a step opens for writing forbids snapshots.
        self.file, self.crashes = Path(path).open("ab", buffering=0), crashes  # noqa: SIM115

    def step(self, action: Any) -> Any:
        self.file.write(b".")
        if os.fstat(self.file.fileno()).st_size in self.crashes:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().step(action)


class FirstOneHangs(CounterEnv):
    """Hangs in its 30th step, as all copies of it do; an env that was built after it does not.

    So does a simulator whose chance is its own, such as ``rand()`` of C: a copy draws the same numbers.

    Args:
        mark: The first env that is built makes this file.
    """

    def __init__(self, mark: str) -> None:
        super().__init__(horizon=None)
        self.is_first, self.left = not Path(mark).exists(), 30
        Path(mark).touch()

    def step(self, action: Any) -> Any:
        self.left -= 1
        if self.is_first and not self.left:
            time.sleep(1000.0)
        return super().step(action)


class DiesInSteps(CounterEnv):
    """Is killed the first few times that it takes some steps; a file counts them in all its processes.

    Args:
        path: The file.
        deaths: Step of the episode → how often.
    """

    def __init__(self, path: str, deaths: dict[int, int]) -> None:
        super().__init__(horizon=None)
        self.path, self.deaths = Path(path), deaths
        self.file = self.path.open("ab", buffering=0)

    def step(self, action: Any) -> Any:
        step = self.episode_step + 1
        if self.path.read_bytes().count(step) < self.deaths.get(step, 0):
            self.file.write(bytes([step]))
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().step(action)


class ForkShyEnv(CounterEnv):
    """Is not what it was in a forked copy."""

    def __init__(self, **counter: Any) -> None:
        super().__init__(**counter)
        os.register_at_fork(after_in_child=self._be_another)

    def _be_another(self) -> None:
        self.offset += 1.0


class Fills(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Ends its process in each step once it has been reset ten times in it, as with a table of handles that is full."""

    resets = 0

    def reset(self, **options: Any) -> Any:
        self.resets += 1
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        if self.resets > 10:
            os.abort()
        time.sleep(0.002)  # or the worker is young for all the test, and has no reset to begin at
        return super().step(action)


def filling() -> gymnasium.Env[Any, Any]:
    return Fills(gymnasium.make("CartPole-v1"))


class Obstructed(CounterEnv):
    """Has what would not survive a fork, from its first reset on."""

    def __init__(self, obstacle: str) -> None:
        super().__init__(horizon=None)
        self.obstacle = obstacle
        self.held: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self.obstacle == "threads":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        elif self.obstacle == "child processes":
            self.held = subprocess.Popen(["sleep", "1000"])
        elif self.obstacle == "sockets":
            self.held = socket.socketpair()
        elif self.obstacle == "pipes":
            self.held = os.pipe()
        elif self.obstacle == "shared memory":
            self.held = mmap.mmap(-1, 4096)
        elif self.obstacle == "the fork failed":  # no descriptor is left
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
            with contextlib.suppress(OSError):
                while True:
                    os.open(os.devnull, os.O_RDONLY)
        return super().reset(seed=seed, options=options)


class Forking(CounterEnv):
    """Forks in each step and in each call of `fork`."""

    def __init__(self, way: str) -> None:
        super().__init__(horizon=7)
        self.way = way

    def step(self, action: Any) -> Any:
        result = super().step(action)
        return self.fork(result)

    def fork(self, result: Any) -> Any:
        if os.fork() == 0:
            if self.way == "raise":
                raise ValueError("in the child")
            if self.way == "exit":
                raise SystemExit(3)
            if self.way == "fork again":
                os.fork()
            return np.zeros(4, np.float32), -1.0, False, False, {"child": True}
        return result


class Nesting(CounterEnv):
    """Uses multienv itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SubprocessEnv(CounterEnv).initialize()

    def reset(self, **options: Any) -> Any:
        self.inner.reset(seed=0)
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        observation, *others = super().step(action)
        return observation + self.inner.step(action)[0], *others

    def close(self) -> None:
        self.inner.close()


class ClosingEnv(CounterEnv):
    """With action 3 it closes the descriptors of its process, which ends of that as soon as it waits for a request."""

    def step(self, action: Any) -> Any:
        transition = super().step(action)
        if action == 3:
            os.closerange(3, 100)
        return transition


class Truncating(CounterEnv):
    """Cuts off whatever its process has open, its third step long, as daemons do that empty their log files."""

    def step(self, action: Any) -> Any:
        if self.episode_step == 2:
            for descriptor in range(3, 64):
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, 0)
        return super().step(action)


class LimitsEnv(CounterEnv):
    """Tells the limits of its process."""

    def limits_here(self) -> list[tuple[int, int]]:
        return [resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)]


LINES = [b"line %05d of what a simulator has to say on its stderr" % number for number in range(4000)]


class TalkativeEnv(FaultyEnv):
    """Says much in each step."""

    def step(self, action: Any) -> Any:
        for line in LINES:
            os.write(2, line + b"\n")
        return super().step(action)


class Float64Env(gymnasium.Env[Any, Any]):
    def __init__(self) -> None:
        self.observation_space = spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float64)})
        self.action_space = spaces.Box(-1, 1, (1,), np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return {"a": self.np_random.random(2)}, {}

    def step(self, action: Any) -> Any:
        return {"a": self.np_random.random(2) + action}, float(action[0]), False, False, {}
