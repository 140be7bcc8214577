"""The kinds of faces behind one set of calls, so that an invariant is tested on each of them by one test.

Nothing resets by itself here: ``record()`` resets the envs whose episodes have ended, as kit's ``rollout()`` does with
the bare env that it is held against.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kit import Transition, assert_same_trajectory, is_alive, rollout
from kit.side_by_side import info_of
from multienv import AsyncEnv, MultiEnv, RestartPolicy, SubprocessEnv, SubprocessVectorEnv, create_subprocess_envs
from multienv.testing import worker_pids

KINDS = ["subprocess_env", "multi_env", "vector_env"]
AND_ASYNC = [*KINDS, "async_env"]
REPLAY = RestartPolicy(snapshots=False)
RAISE = RestartPolicy(on_crash="raise", on_timeout="raise")


class InLoop:
    """An AsyncEnv for code that is not asynchronous: each call runs the loop until it is done."""

    def __init__(self, env_fn: Callable[[], Any], **options: Any) -> None:
        self._env, self._loop = AsyncEnv(env_fn, **options), asyncio.new_event_loop()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._env, name)
        if not inspect.iscoroutinefunction(found):
            return found
        run = asyncio.run if self._loop.is_closed() else self._loop.run_until_complete
        return lambda *args, **kwargs: run(found(*args, **kwargs))

    def step_async(self, action: Any) -> None:
        """Begin a step in a task that nobody awaits."""
        self._task = self._loop.create_task(self._env.step(action))
        self._loop.run_until_complete(asyncio.sleep(0))

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._env.close())
            self._loop.close()

    def __del__(self) -> None:
        self._loop.close()


class Face:
    """Envs of one kind of face; every call takes and gives lists, one entry an env.

    Args:
        kind: ``"subprocess_env"`` (a single env), ``"multi_env"`` or ``"vector_env"`` (all envs in one process); or
            ``"async_env"``, which is stepped as a ``SubprocessEnv``, and is of that kind from then on.
        env_fns: What builds the envs; where there is one, it is built by the first.
        autoreset_mode: Of several envs.
        options: Of the face.
    """

    def __init__(
        self, kind: str, env_fns: Sequence[Callable[[], Any]], autoreset_mode: str = "DISABLED", **options: Any
    ) -> None:
        single = {"subprocess_env": SubprocessEnv, "async_env": InLoop}
        self.kind = "subprocess_env" if kind in single else kind
        self.num_envs = 1 if kind in single else len(env_fns)
        self.env_fns = list(env_fns)[: self.num_envs]
        if kind in single:
            self.envs: Any = single[kind](self.env_fns[0], env_index=0, **options)
            try:
                self.envs.initialize()
            except BaseException:
                self.envs.close()
                raise
        elif kind == "multi_env":
            options.pop("envs_per_worker", None)
            self.envs = MultiEnv(create_subprocess_envs(self.env_fns, **options), autoreset_mode=autoreset_mode)
        else:
            settings = {"envs_per_worker": self.num_envs, **options}
            self.envs = SubprocessVectorEnv(self.env_fns, autoreset_mode=autoreset_mode, **settings)

    @classmethod
    def around(cls, kind: str, envs: Any, num_envs: int) -> Face:
        """Return a face around envs that the test has made in its own way, and closes."""
        face = cls.__new__(cls)
        face.kind, face.envs, face.num_envs, face.env_fns = kind, envs, num_envs, []
        return face

    def reset(self, seed: int | None = None, mask: Sequence[bool] | None = None) -> list[Transition]:
        """Reset the envs of the mask; env ``i`` gets ``seed + i``. The entries of the others mean nothing."""
        if self.kind == "subprocess_env":
            observations, infos = self.envs.reset(seed=seed)
            return [Transition(observations, info=infos, is_reset=True)]
        if self.kind == "multi_env":
            observations, infos = self.envs.reset(seed=seed, mask=mask)
        else:
            options = None if mask is None else {"reset_mask": np.array(mask)}
            observations, infos = self.envs.reset(seed=seed, options=options)
            infos = self._split(infos)
        pairs = zip(observations, infos, strict=True)
        return [Transition(copy.copy(one), info=info or {}, is_reset=True) for one, info in pairs]

    def step(self, actions: Sequence[Any]) -> list[Transition]:
        if self.kind == "subprocess_env":
            return [transition(self.envs.step(actions[0]), actions[0])]
        lists = list(self.envs.step(list(actions) if self.kind == "multi_env" else np.array(actions)))
        if self.kind == "vector_env":
            lists[4] = self._split(lists[4])
        return [transition(row, action) for row, action in zip(zip(*lists, strict=True), actions, strict=True)]

    def call(self, name: str, *arguments: Any) -> list[Any]:
        if self.kind == "subprocess_env":
            return [self.envs.call(name, *arguments)]
        return list(self.envs.call(name, *arguments))

    def set_attr(self, name: str, value: Any) -> None:
        self.envs.set_attr(name, value if self.kind == "subprocess_env" else [value] * self.num_envs)

    def record(
        self, actions: Sequence[Sequence[Any]], seed: int, before_step: Callable[[int], object] = lambda step: None
    ) -> list[list[Transition]]:
        """Take these steps, ``actions[step][env]``, and reset what has ended; return all transitions of each env."""
        records = [[one] for one in self.reset(seed)]
        for number, row in enumerate(actions):
            ended = [record[-1].ended for record in records]
            if any(ended):
                for record, one, is_new in zip(records, self.reset(mask=ended), ended, strict=True):
                    if is_new:
                        record.append(one)
            before_step(number)
            for record, one in zip(records, self.step(row[: self.num_envs]), strict=True):
                record.append(one)
        return records

    def pids(self) -> list[int]:
        return worker_pids(self.envs)

    def signal(self, number: signal.Signals = signal.SIGKILL, worker: int = 0) -> int:
        """Send a signal to a worker, and see that a deadly one ends it; return its pid."""
        pid = self.statistics()[worker].pid
        assert pid, "it has ended already"
        os.kill(pid, number)
        while number == signal.SIGKILL and is_alive(pid):
            time.sleep(0.001)
        return pid

    def statistics(self) -> list[Any]:
        found = self.envs.statistics()
        return list(found) if isinstance(found, list) else [found]

    def losses(self) -> int:
        return max(one.losses for one in self.statistics())

    def close(self) -> None:
        self.envs.close()

    def _split(self, infos: dict[str, Any]) -> list[dict[str, Any]]:
        return [info_of(infos, index) for index in range(self.num_envs)]

    def __enter__(self) -> Face:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def transition(row: Sequence[Any], action: Any) -> Transition:
    observation, reward, terminated, truncated, info = row
    flags = bool(terminated), bool(truncated)
    return Transition(copy.copy(observation), float(reward), *flags, info=dict(info), action=action)


def counts(steps: int, num_envs: int = 3) -> list[list[np.int64]]:
    """Return actions of four kinds for these envs, each env its own."""
    return [[np.int64((step * (env + 1) + env) % 4) for env in range(num_envs)] for step in range(steps)]


def assert_as_without_losses(
    face: Face, records: Sequence[Sequence[Transition]], actions: Any, seed: int, *, envs: Sequence[int] | None = None
) -> None:
    """Fail unless these envs (all) show, to the bit, what the bare env shows when nothing happens to it."""
    for env in range(face.num_envs) if envs is None else envs:
        bare = face.env_fns[env]()
        expected = rollout(bare, [row[env] for row in actions], seed=seed + env)
        bare.close()
        assert_same_trajectory(records[env], expected)


def assert_honest_truncation(broken: Transition, before: Transition, *words: str) -> None:
    """Fail unless a step was given up in the open: the last observation again, no reward, the reason."""
    assert broken.truncated
    assert not broken.terminated
    assert broken.reward == 0.0
    np.testing.assert_array_equal(broken.observation, before.observation)
    assert broken.recovery is not None, "no word about the recovery"
    assert broken.recovery["recovery"] == "truncated"
    for word in words:
        assert word in broken.recovery["reason"]
