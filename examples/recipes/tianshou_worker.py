"""A worker class for Tianshou's vector envs, synchronous or not: ``BaseVectorEnv(env_fns, MultienvWorker)``."""

import time
from collections.abc import Callable
from typing import Any

from tianshou.env.worker import EnvWorker

from multienv import SubprocessEnv
from multienv.errors import WaitTimeout


class MultienvWorker(EnvWorker):
    """Runs one env in a process that may die at any moment.

    Args:
        env_fn: Builds the env.
        **options: For ``multienv.SubprocessEnv``. Set them with ``functools.partial(MultienvWorker, restart=…)``.
    """

    def __init__(self, env_fn: Callable[[], Any], **options: Any) -> None:
        self.env = SubprocessEnv(env_fn, **options).initialize()
        self._wait: Callable[..., Any] = self.env.reset_wait  # collects the answer to the last request
        self._answer: Any = None  # an answer that has arrived and is not yet collected
        super().__init__(env_fn)

    def get_env_attr(self, key: str) -> Any:
        return getattr(self.env, key, None)

    def set_env_attr(self, key: str, value: Any) -> None:
        self.env.set_attr(key, value)

    def send(self, action: Any, **kwargs: Any) -> None:
        if action is None:
            self.env.reset_async(**kwargs)
            self._wait = self.env.reset_wait
        else:
            self.env.step_async(action)
            self._wait = self.env.step_wait

    def recv(self) -> Any:
        answer, self._answer = self._answer, None
        return self._wait() if answer is None else answer

    def reset(self, **kwargs: Any) -> Any:
        return self.env.reset(**kwargs)

    def seed(self, seed: int | None = None) -> list[int] | None:
        self.env.reset(seed=seed)
        return super().seed(seed)

    def render(self, **kwargs: Any) -> Any:
        return self.env.render()

    def close_env(self) -> None:
        self.env.close()

    @staticmethod
    def wait(workers: list[Any], wait_num: int, timeout: float | None = None) -> list[Any]:
        """Return the workers that have answered: at least ``wait_num``, or fewer after ``timeout`` seconds."""
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            ready = [worker for worker in workers if worker._has_answered()]
            if len(ready) >= min(wait_num, len(workers)) or time.monotonic() > until:
                return ready
            time.sleep(0.0005)

    def _has_answered(self) -> bool:
        if self._answer is None:
            try:
                self._answer = self._wait(timeout=0)
            except WaitTimeout:
                return False
        return True
