"""One env of a manager: what is asked of it, what has come back, and what follows from that.

Everything that an answer changes is one immutable value that is replaced at one stroke: an exception of a signal
handler (Ctrl-C) finds the lane before the answer or after it, never in between.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Literal, NamedTuple

import numpy as np

from multienv.env_manager_config import EnvManagerConfig
from multienv.env_states import EnvState, Timestep
from multienv.episode_video import EpisodeVideo
from multienv.errors import EnvError, MultienvError, RestartBudgetExceeded, UsageError, WorkerLostError
from multienv.recovery.phases import LOST, OWED, PENDING, RUNNING, RecoveryDue
from multienv.recovery.supervisor import Supervisor, Transition
from multienv.subprocess_env import SubprocessEnv
from multienv.threads import Pool, Task


class Crew:
    """Threads for what takes its time, and a bell they ring when they are done.

    Attributes:
        ear: The descriptor that can be read when the bell has been rung.
        closing: Set when nobody waits for anything any more.
        numbers: Of what has come back, in order.
    """

    def __init__(self, threads: int) -> None:
        """Start the threads."""
        self.closing = threading.Event()
        self.numbers = count(1)
        self.ear, self._bell = os.pipe()
        self._finalizer = weakref.finalize(self, _close_both, self.ear, self._bell)
        os.set_blocking(self.ear, False)
        os.set_blocking(self._bell, False)
        self.pool = Pool(threads, "multienv-manager")

    def ring(self) -> None:
        """Wake who waits."""
        with contextlib.suppress(OSError):  # it has been rung often enough
            os.write(self._bell, b"\0")

    def listen(self) -> None:
        """From now on the bell has not been rung."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.ear, 4096)

    def dismiss(self) -> None:
        """Wait for the threads; again does nothing."""
        self.pool.shutdown()
        self._finalizer()


def _close_both(first: int, second: int) -> None:
    os.close(first)
    os.close(second)


class Request:
    """Something that has been asked of an env and not yet been answered.

    Attributes:
        mark: The supervisor's last number before it.
        task: The thread that waits for the answer, if one does; ``told``: it has it.
        retried: It has been tried again as often as it may be.
    """

    __slots__ = ("argument", "kind", "mark", "retried", "task", "told")

    def __init__(self, kind: Literal["step", "reset"], argument: Any, mark: int) -> None:
        """Nobody has been asked yet."""
        self.kind, self.argument, self.mark = kind, argument, mark
        self.task: Task | None = None
        self.told = self.retried = False


class Moment(NamedTuple):
    """Where a lane stands.

    Attributes:
        state: The env's.
        episodes: Whole ones, of those that count.
        resets: Begun since its seed was given.
        request: What is under way.
        timestep: Number and value of the last one.
        failure: Number and value of the last one.
        ended: The timestep that waits for the reset in place.
        observation: The next to act on.
        info: What came with it.
    """

    state: EnvState = EnvState.INIT
    episodes: int = 0
    resets: int = 0
    request: Request | None = None
    timestep: tuple[int, Timestep] | None = None
    failure: tuple[int, BaseException] | None = None
    ended: Timestep | None = None
    observation: Any = None
    info: Any = None


class Lane:
    """An env, and what a manager keeps of it.

    Args:
        index: Its id.
        env: It has been built.
        config: The manager's.
        crew: Shared by all lanes.
        seed_of: Gives the seed for the reset of that number, or ``None``.
        video: Takes the frames, if there is to be one.

    Attributes:
        now: Where it stands.
        param: Seed and options for its resets.
        dropped: Nobody wants to know any more what is under way.
    """

    def __init__(
        self,
        index: int,
        env: SubprocessEnv,
        config: EnvManagerConfig,
        crew: Crew,
        seed_of: Callable[[int, int], int | None],
        video: EpisodeVideo | None = None,
    ) -> None:
        """Ask nothing yet."""
        self.index, self.env = index, env
        self.supervisor: Supervisor = env._supervisor
        self.now = Moment()
        self.param: dict[str, Any] = {}
        self.dropped = False
        self._config, self._crew, self._seed_of, self._video = config, crew, seed_of, video

    # --- how it stands ----------------------------------------------------------------------------

    @property
    def is_stepping(self) -> bool:
        """A timestep is under way."""
        request = self.now.request
        return request is not None and (request.kind == "step" or self.now.ended is not None)

    @property
    def is_idle(self) -> bool:
        """It could be stepped, but for a timestep that has not been handed over."""
        return self.now.state == EnvState.RUN and self.now.request is None

    def is_ready(self, handed: int) -> bool:
        """It can be stepped; what has a number up to ``handed`` has been handed over."""
        return self.is_idle and not self.has_news(handed)

    def has_news(self, handed: int) -> bool:
        """A timestep has not been handed over."""
        return self.now.timestep is not None and self.now.timestep[0] > handed

    def has_failed(self, handed: int) -> bool:
        """A failure has not been told."""
        return self.now.failure is not None and self.now.failure[0] > handed

    def observation(self) -> Any:
        """The next to act on."""
        return self._kept(self.now.observation)

    def _kept(self, observation: Any) -> Any:
        return copied(observation) if self._config.copy_on_get else observation

    # --- asking -----------------------------------------------------------------------------------

    def ask_step(self, action: Any) -> None:
        """Send a step; does not block."""
        request = Request("step", action, self.supervisor.seq)
        self.dropped = False  # by a reset that was interrupted before it came to that
        self.now = self.now._replace(request=request)
        self._send(request)

    def ask_reset(self) -> None:
        """Send the reset that the caller wants; does not block. What was done is begun anew."""
        now, request = self.now, self._next_reset()
        self.dropped = False
        self.now = now._replace(
            state=EnvState.RESET,
            episodes=0 if now.state == EnvState.DONE else now.episodes,
            resets=now.resets + 1,
            request=request,
            timestep=None,
            failure=None,
            ended=None,
        )
        self._send(request)

    def _next_reset(self) -> Request:
        seed = self.param.get("seed")
        if seed is None:
            seed = self._seed_of(self.index, self.now.resets)
        return Request("reset", {"seed": seed, "options": self.param.get("options")}, self.supervisor.seq)

    def _send(self, request: Request) -> None:
        supervisor = self.supervisor
        try:
            if request.kind == "step":
                if self._video is None and supervisor.phase in (RUNNING, OWED):
                    supervisor.send_step(request.argument)
                    return
            elif self._video is None and supervisor.phase != OWED and not supervisor.takes_long_to_reset():
                self.env.reset_async(**request.argument)
                return
        except MultienvError as error:
            self._failed(request, error)
        else:  # that may take a while
            self._leave_to_thread(request, partial(self._whole, request))

    def _leave_to_thread(self, request: Request, call: Callable[[], Any]) -> None:
        ring = self._crew.ring

        def told() -> Any:
            try:
                return call()
            finally:
                request.told = True
                ring()

        request.told = False
        request.task = Task(told)
        request.task.start(self._crew.pool)

    def _whole(self, request: Request) -> Any:
        """The call in one piece, in a thread."""
        if request.kind == "reset":
            first = self.env.reset(**request.argument)
            if self._video is not None:
                self._video.begin(self.env.render)
            return first
        transition = self.env.step(request.argument)
        if self._video is not None:
            lost = self.supervisor.phase == LOST  # there is nothing to look at
            self._video.add(None if lost else self.env.render, ended=transition[2] or transition[3])
        return transition

    # --- what comes back --------------------------------------------------------------------------

    def answered(self) -> bool:
        """Whether :meth:`collect` has something to collect."""
        request = self.now.request
        if request is None:
            return False
        return request.told if request.task is not None else self.supervisor.answered()

    def collect(self) -> None:
        """Take up the answer; a recovery is left to a thread."""
        request = self.now.request
        assert request is not None
        try:
            if request.task is not None:
                request.task.wait()
                if request.task.error is not None:
                    self._failed(request, request.task.error)
                    return
                result = request.task.result
            elif request.kind == "step":
                result = self.supervisor.receive_step(None, True)
            else:
                result = self.supervisor.receive("reset", None, defer=True)
        except RecoveryDue:
            self._leave_to_thread(request, self.env.step_wait if request.kind == "step" else self.env.reset_wait)
        except MultienvError as error:
            self._failed(request, error)
        else:
            if request.kind == "step":
                self._stepped(result)
            else:
                self._begun(*result)

    def _stepped(self, transition: Transition) -> None:
        observation, reward, terminated, truncated, info = transition
        now, config = self.now, self._config
        if self.dropped:
            self.now = now._replace(state=EnvState.NEED_RESET, request=None)
            return
        said = info if isinstance(info, dict) else {}  # the env may have returned anything
        ours = said.get("multienv")
        if isinstance(ours, dict) and ours.get("recovery") == "truncated":
            info = said = {**said, "abnormal": True}
        number = next(self._crew.numbers)
        timestep = Timestep(self.index, observation, reward, terminated, truncated, info)
        if not timestep.done:
            kept = self._kept(observation)
            self.now = now._replace(request=None, timestep=(number, timestep), observation=kept, info=info)
            return
        episodes = now.episodes + (not _is_abnormal(said))
        if config.reset_inplace:
            timestep = timestep._replace(info={**said, "final_obs": observation})
        if episodes < config.episode_num and config.auto_reset:
            request = self._next_reset()
            news = {"ended": timestep} if config.reset_inplace else {"timestep": (number, timestep)}
            self.now = now._replace(
                state=EnvState.RESET, episodes=episodes, resets=now.resets + 1, request=request, **news
            )
            self._send(request)
            return
        state = EnvState.NEED_RESET if episodes < config.episode_num else EnvState.DONE
        self.now = now._replace(state=state, episodes=episodes, request=None, timestep=(number, timestep))

    def _begun(self, observation: Any, info: dict[str, Any]) -> None:
        now = self.now
        kept = self._kept(observation)
        news: dict[str, Any] = {}
        if now.ended is not None:
            timestep = now.ended._replace(observation=observation)
            news = {"timestep": (next(self._crew.numbers), timestep), "ended": None}
        self.now = now._replace(state=EnvState.RUN, request=None, observation=kept, info=info, **news)

    def _failed(self, request: Request, error: BaseException) -> None:
        now = self.now
        if request.kind == "reset" and not request.retried and _is_worth_a_retry(error):
            request.retried = True
            if self._config.max_retry > 1:
                self._leave_to_thread(request, partial(self._try_again, request, error))
                return
        number = next(self._crew.numbers)
        # A wrong action has not been sent: the episode goes on.
        state = now.state if request.kind == "step" and isinstance(error, UsageError) else EnvState.ERROR
        news: dict[str, Any] = {}
        if now.ended is not None:  # its reset failed, and it is the caller's all the same
            news = {"timestep": (next(self._crew.numbers), now.ended), "ended": None}
        self.now = now._replace(state=state, request=None, failure=(number, error), **news)

    def _try_again(self, request: Request, error: BaseException) -> Any:
        """In a thread."""
        for _ in range(self._config.max_retry - 1):
            if self._crew.closing.wait(self._config.retry_waiting_time):
                break
            try:
                if self._config.retry_type == "renew":
                    self.supervisor.discard()
                return self._whole(request)
            except MultienvError as again:
                error = again
                if not _is_worth_a_retry(again):
                    break
        raise error

    # --- after an interruption --------------------------------------------------------------------

    def resume(self) -> None:
        """An exception from outside came through some call: what is under way is left to a thread."""
        request = self.now.request
        if request is None:
            return
        if request.task is not None:
            request.task.start(self._crew.pool)  # it may not have come to that
            return
        with contextlib.suppress(Exception):  # what cannot be copied is kept as it is
            request.argument = copy.deepcopy(request.argument)
        self._leave_to_thread(request, partial(self._resumed, request))

    def _resumed(self, request: Request) -> Any:
        supervisor = self.supervisor
        if not supervisor.has_asked_since(request.mark):
            return self._whole(request)
        if request.kind == "step" or supervisor.phase in (*PENDING, RUNNING):
            return supervisor.resume()
        return self._whole(request)  # it had failed, and nobody has heard of that


def _is_worth_a_retry(error: BaseException) -> bool:
    """It is the env's or its process's; not the caller's, nor Ctrl-C, which only the caller's thread ever sees."""
    return isinstance(error, EnvError | WorkerLostError) and not isinstance(error, RestartBudgetExceeded)


def _is_abnormal(info: dict[str, Any]) -> bool:
    try:
        return bool(info.get("abnormal", False))
    except Exception:  # an array, for instance
        return True


def copied(value: Any) -> Any:
    """An observation of its own."""
    if isinstance(value, np.ndarray):
        return value.copy() if value.dtype != object else copy.deepcopy(value)
    if type(value) is dict:
        return {key: copied(member) for key, member in value.items()}
    if type(value) is tuple:
        return tuple(map(copied, value))
    return value if isinstance(value, int | float | str | bytes | np.generic) else copy.deepcopy(value)
