"""One env in one process, stepped from an asyncio event loop: for steps that take seconds to minutes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from multienv.config import check_seconds
from multienv.envs.building import EnvFn
from multienv.envs.subprocess_env import SubprocessEnv, calls_of, supervisor_of
from multienv.errors import CallPendingError, ClosedError, MultienvError, WaitTimeout
from multienv.events import Statistics
from multienv.processes.event_loop import end_of, heard_from, in_thread, without_stop
from multienv.recovery.supervisor import HealingDue
from multienv.wire.codecs import Transition

if TYPE_CHECKING:
    from typing_extensions import Self


class AsyncEnv:
    """Steps a :class:`~multienv.SubprocessEnv` from an asyncio event loop; its process may die at any moment.

    ::

        async with AsyncEnv(make_env, restart=RestartPolicy(on_crash="truncate", on_timeout="truncate")) as env:
            observation, info = await env.reset(seed=0)
            observation, reward, terminated, truncated, info = await env.step(action, deadline=60.0)

    While the env works the loop waits for descriptors of its process: no thread is blocked, and nothing is killed
    without a deadline. What blocks, such as bringing back a lost process, gets a thread for as long as it takes.

    **Cancellation.** A call that is cancelled has been sent all the same, and the env goes on with it. The next
    ``step()`` completes a cancelled ``step()``: its own action is not taken, and ``info["multienv"]`` is
    ``{"resumed": True}``. ``reset()`` waits for it and drops its outcome; ``call()`` raises CallPendingError. Any other
    cancelled call is completed by the next call, and its outcome is dropped. Only a deadline gives up the process.

    An env is awaited by one task at a time; many envs share a loop. Hooks are called in the loop's thread.

    Args:
        env_fn: Builds the env; called in its process.
        **options: Of :class:`~multienv.SubprocessEnv`.

    Raises:
        EnvFnError: ``env_fn`` is not callable or cannot be pickled.
    """

    def __init__(self, env_fn: EnvFn, **options: Any) -> None:
        self._env = env = SubprocessEnv(env_fn, **options)
        supervisor = supervisor_of(env)
        assert supervisor is not None
        self._supervisor = supervisor
        self._calls = calls_of(env)
        self._awaited: tuple[str, asyncio.AbstractEventLoop] | None = None  # the call that a task awaits now, and where
        self._work: Future[BaseException | None] | None = None  # the thread of a call, or of one that was cancelled
        self._closed = False

    # --- start and end --------------------------------------------------------------------------

    async def initialize(self) -> Self:
        """Launch the process and wait until the env is built; its spaces are known then. Again does nothing.

        Raises:
            EnvRaisedError: ``env_fn`` raised; catchable by the exception's own type too.
            WorkerLostError: Building the env ended its process.
        """
        mine = self._taken("initialize")
        try:
            await self._build()
        finally:
            if self._awaited is mine:
                self._awaited = None
        return self

    async def close(self) -> None:
        """End the process, as ``SubprocessEnv.close()`` does; a call that is awaited raises ClosedError."""
        self._closed = True
        await end_of(in_thread(self._env.close))
        if self._work is not None:  # a recovery, which ends now
            await end_of(self._work)
        self._supervisor.record.call_hooks()

    async def __aenter__(self) -> Self:
        """Initialize; close if that fails."""
        try:
            return await self.initialize()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(self, *error: object) -> None:
        """Close."""
        await self.close()

    # --- an episode -----------------------------------------------------------------------------

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; see :meth:`SubprocessEnv.reset`. The first one builds the env, if nothing has yet."""
        send = partial(self._env.reset_async, seed=seed, options=options)
        answer: tuple[Any, dict[str, Any]] = await self._ask("reset", send)
        return answer

    async def step(self, action: Any, *, deadline: float | None = None) -> Transition:
        """Take one step; see :meth:`SubprocessEnv.step` for what it returns and raises.

        Args:
            action: Of the env's action space.
            deadline: Seconds that the process may take for this step; ``None``: as ``Deadlines.step`` says. Once they
                have passed the process counts as hung, and ``RestartPolicy.on_timeout`` says what happens. Given for a
                step that was cancelled, they count from now.
        """
        check_seconds("deadline", deadline)
        transition: Transition = await self._ask("step", partial(self._env.step_async, action), deadline)
        return transition

    async def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the env, or return an attribute of it; see :meth:`SubprocessEnv.call`."""
        return await self._ask("call", partial(self._env.call_async, name, *args, **kwargs))

    # --- what is known here ---------------------------------------------------------------------

    @property
    def observation_space(self) -> Any:
        """Return the env's observation space, known once it is built."""
        return self._env.observation_space

    @property
    def action_space(self) -> Any:
        """Return the env's action space, known once it is built."""
        return self._env.action_space

    def statistics(self) -> Statistics:
        """Return state, process and counters at this moment, as a frozen record."""
        return self._env.statistics()

    # --- how --------------------------------------------------------------------------------------

    def _taken(self, name: str) -> object:
        """Have this task be the one that awaits; refuse a second one. A task whose loop was closed is cancelled."""
        if self._awaited is not None and not self._awaited[1].is_closed():
            other = self._awaited[0]
            raise CallPendingError(f"{name}(): another task awaits {other}() of this env.", other)
        self._awaited = name, asyncio.get_running_loop()
        return self._awaited

    async def _ask(self, name: str, send: Callable[[], None], deadline: float | None = None) -> Any:
        """Send a request, wait and return the answer, or raise the error that is the answer."""
        mine = self._taken(name)
        try:
            await self._build()
            resumes = name == "step" == self._calls.pending()
            if not resumes:
                await self._send(name, send)
            if deadline is not None:
                self._supervisor.bound(deadline)
            return await self._outcome(resumes=resumes)  # nothing is called after it: see FanOut.finish()
        finally:
            if self._awaited is mine:
                self._awaited = None

    async def _build(self) -> None:
        """Wait for what a cancelled call has left to a thread, then until the env is built."""
        supervisor = self._supervisor
        if self._work is not None:
            await self._end_of_work()
        try:
            while supervisor.description is None:
                try:
                    await self._in_thread(partial(supervisor.initialize, 0.0))
                except WaitTimeout:
                    await self._is_answered()
        finally:
            supervisor.record.call_hooks()
        self._refuse_if_closed()
        self._env.initialize()

    async def _send(self, name: str, send: Callable[[], None]) -> None:
        """Complete a call that was cancelled, then send a request."""
        pending = self._calls.pending()
        if pending == "step" and name != "reset":
            raise CallPendingError(
                f"{name}(): step() was cancelled. Call step() again for its outcome, or reset() to drop it.", "step"
            )
        if pending:
            with contextlib.suppress(MultienvError):
                await self._outcome()
        maintenance = self._supervisor.maintenance
        # The process is to be replaced by plan first, or may be.
        if maintenance.is_due or (name == "reset" and maintenance.recycling.wanted):
            await self._in_thread(send)
        else:
            send()

    async def _outcome(self, *, resumes: bool = False) -> Any:
        """Wait until what is pending is answered; return the answer or raise the error that is the answer."""
        supervisor, calls = self._supervisor, self._calls
        name = calls.pending()
        while True:
            while supervisor.state.request is not None:
                try:
                    if await self._is_answered():
                        supervisor.collect(heal=False)
                    else:
                        await self._in_thread(partial(supervisor.collect, 0.0))
                except (HealingDue, WaitTimeout):
                    continue
                except MultienvError:
                    if supervisor.state.request is not None:  # it is not the answer, which the supervisor keeps
                        raise
            self._refuse_if_closed()
            try:
                return without_stop(lambda: calls.wait(name, 0.0, resumes=resumes))
            except WaitTimeout:  # an interruption had come before it was sent, which it is now
                continue

    async def _is_answered(self) -> bool:
        """Wait for the reply; false if something else is to be done: the process has ended, say, or is overdue."""
        self._refuse_if_closed()
        line = self._supervisor.waiting()
        if line is None:
            return False
        channel, number, due = line
        await heard_from(channel, number, None if due == inf else due)
        self._refuse_if_closed()
        return channel.answered(number)

    async def _in_thread(self, call: Callable[[], object]) -> None:
        """Make a blocking call in a thread; if this is cancelled, the next call waits for the thread."""
        self._work = in_thread(call)
        error = await self._end_of_work()
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame

    async def _end_of_work(self) -> BaseException | None:
        assert self._work is not None
        error = await end_of(self._work)
        self._work = None
        self._refuse_if_closed()
        return error

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ClosedError("This env has been closed. Make a new one.")
