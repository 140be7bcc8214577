"""A SubprocessEnv for asyncio: for envs whose steps take seconds to minutes."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakMethod

from typing_extensions import Self, Unpack

from multienv._engine.asking.fanout import mark_resumed
from multienv._engine.building.building import EnvFn, WorkerOptions
from multienv._engine.interrupts import finalizer
from multienv._engine.recovery.reporter import call_hooks
from multienv._engine.threads import Pool, Task
from multienv._engine.wire.actions import own_copy
from multienv._engine.wire.codecs import Transition
from multienv.config import Deadlines, check_seconds, takes_options_of
from multienv.envs.fragments import Fragment, Policy
from multienv.envs.subprocess_env import SubprocessEnv, calls_of, supervisor_of
from multienv.errors import CallPendingError, EnvError, MultienvError, WaitTimeout, rebuilt
from multienv.events import Event, Hook, Statistics

T = TypeVar("T")

_THREAD = "multienv-async"
# Seconds after which a step that is being waited for looks whether it has been given another deadline.
_LOOK = 2.0


class AsyncEnv:
    """A :class:`~multienv.SubprocessEnv` that you await in an asyncio event loop; its process may die at any moment.

    ::

        async with AsyncEnv(make_env, restart=RestartPolicy(on_crash="truncate", on_timeout="truncate")) as env:
            observation, info = await env.reset(seed=0)
            observation, reward, terminated, truncated, info = await env.step(action, deadline=60.0)

    A thread of this env makes each call while you await it. Without a deadline nothing is killed.

    **Cancellation.** A cancelled call goes on in its thread. After a cancelled ``step()``, the next ``step()``
    completes it: its own action is not taken, and ``info["multienv"]`` is ``{"resumed": True}``. In the same way the
    next ``rollout()`` completes a cancelled ``rollout()``. ``reset()`` waits for a cancelled step or rollout and drops
    its outcome; other calls raise CallPendingError. Any other cancelled call is completed by the next call, and its
    outcome is dropped. Only a deadline ends the process.

    One task at a time may await an env; many envs share a loop. Hooks are called in the loop's thread. Everything else
    is as in :class:`~multienv.SubprocessEnv`.

    Args:
        env_fn: Function that builds the env; it is called in the env's process.
        env_index: Index of the env in its batch, for messages.
        **options: See :class:`~multienv.WorkerOptions`. By default a step and a reset have no deadline here: they may
            wait for a person.

    Raises:
        UsageError: ``env_fn`` is not callable or cannot be pickled.
    """

    @takes_options_of(SubprocessEnv.__init__)
    def __init__(self, env_fn: EnvFn, *, env_index: int | None = None, **options: Unpack[WorkerOptions]) -> None:
        # Hooks and the events to call them with when the call is done.
        self._events: deque[tuple[Callable[[Any], object], Any]] = deque()
        options["hooks"] = [partial(_queue_event, self._events, hook) for hook in options.get("hooks", ())]
        options.setdefault("deadlines", Deadlines(step=None, reset=None))
        self._env = SubprocessEnv(env_fn, env_index=env_index, **options)
        self._pool = Pool(1, _THREAD)
        self._call: _Call | None = None  # until its outcome is handed to the caller
        self._deadlines: deque[float] = deque()  # of the step that is taken; its thread takes note of them
        self._awaited: tuple[str, asyncio.AbstractEventLoop] | None = None  # the call that a task awaits now, and where

    # --- start and end --------------------------------------------------------------------------

    async def initialize(self) -> Self:
        """Launch the process and wait until the env is built and its spaces are known. A second call does nothing."""
        await self._ask("initialize", self._env.initialize)
        return self

    async def close(self) -> None:
        """End the process, as ``SubprocessEnv.close()`` does; a call that a task awaits raises ClosedError."""
        await _Call("close", self._env.close).ended(Pool(1, _THREAD))  # the env's own thread may be busy
        if self._call is not None:  # it ends now
            await self._call.ended(self._pool)
        self._pool.shutdown(wait=False)
        call_hooks(self._events)

    async def __aenter__(self) -> Self:
        """Initialize the env; close it if that fails."""
        try:
            return await self.initialize()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(self, *error: object) -> None:
        """Close the env."""
        await self.close()

    @finalizer
    def __del__(self) -> None:
        """End a call that is still being made, if close() was not called; an env that is idle lets go by itself."""
        call = self.__dict__.get("_call")
        if call is not None and not call.task.wait(0):
            with contextlib.suppress(RuntimeError):  # no thread is to be had
                _thread.start_new_thread(self._env.close, ())  # takes no lock: a finalizer may run anywhere

    # --- an episode -----------------------------------------------------------------------------

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, and build the env first if it is not built yet. Returns observation and info."""
        return await self._ask("reset", partial(self._env.reset, seed=seed, options=options))

    async def step(self, action: Any, *, deadline: float | None = None) -> Transition:
        """Take one step; see :meth:`SubprocessEnv.step` for its results and errors.

        Args:
            action: An action of the env's action space.
            deadline: Seconds that the process may take for this step; ``None``: as ``Deadlines.step`` says. After that
                the process counts as hung, and ``RestartPolicy.on_timeout`` says what happens. If this call completes a
                cancelled step, the seconds count from now, or from up to two seconds later.
        """
        check_seconds("deadline", deadline)
        # The thread encodes it later: another task may reuse an array until then.
        take: Callable[[], Transition] = partial(_step, self._env, own_copy(action, "step()"), self._deadlines)
        return await self._ask("step", take, deadline)

    async def rollout(self, policy: Policy, steps: int) -> Fragment:
        """Take many steps in one request, with the policy beside the env; see :meth:`SubprocessEnv.rollout`."""
        return await self._ask("rollout", partial(self._env.rollout, policy, steps))

    # --- branching and checkpoints ----------------------------------------------------------------

    async def snapshot(self) -> Any:
        """Keep the present state of the env for :meth:`restore`; see :meth:`SubprocessEnv.snapshot`."""
        return await self._ask("snapshot", self._env.snapshot)

    async def restore(self, snapshot: Any) -> None:
        """Bring the env back to the state in which this snapshot of it was taken; see :meth:`SubprocessEnv.restore`."""
        await self._ask("restore", partial(self._env.restore, snapshot))

    async def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, to continue in another trainer; see :meth:`SubprocessEnv.state_dict`."""
        return await self._ask("state_dict", self._env.state_dict)

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was called; see :meth:`SubprocessEnv.load_state_dict`."""
        await self._ask("load_state_dict", partial(self._env.load_state_dict, state))

    # --- anything else ----------------------------------------------------------------------------

    async def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the env, or return an attribute of it; see :meth:`SubprocessEnv.call`."""
        return await self._ask("call", partial(self._env.call, name, *args, **kwargs))

    async def get_attr(self, name: str) -> Any:
        """Return a copy of an attribute of the env or of a wrapper; for a method, a function that calls it."""
        value = await self._ask("get_attr", partial(self._env.get_attr, name))
        if getattr(getattr(value, "func", value), "__self__", None) is not self._env:
            return value
        return getattr(self, name) if name in ("reset", "step", "close") else partial(self.call, name)

    async def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute on the env or the wrapper that has it, else on the outermost one.

        The call is recorded and replayed.
        """
        await self._ask("set_attr", partial(self._env.set_attr, name, value))

    @property
    def observation_space(self) -> Any:
        """Return the env's observation space. It is known once the env is built."""
        return self._env.observation_space

    @property
    def action_space(self) -> Any:
        """Return the env's action space. It is known once the env is built."""
        return self._env.action_space

    def statistics(self) -> Statistics:
        """Return state, process and counters at this moment, as a frozen record."""
        return self._env.statistics()

    # --- how --------------------------------------------------------------------------------------

    async def _ask(self, name: str, call: Callable[[], T], deadline: float | None = None) -> T:
        """Make a call in the thread, wait for it, and return what it returned or raise what it raised."""
        if self._awaited is not None and not self._awaited[1].is_closed():  # a task whose loop was closed is cancelled
            other = self._awaited[0]
            raise CallPendingError(f"{name}(): another task awaits {other}() of this env.", other)
        self._awaited = mine = name, asyncio.get_running_loop()
        try:
            resumes = await self._finish_interrupted(name)
            if not resumes:
                self._deadlines.clear()
            if deadline is not None:
                self._deadlines.append(deadline)
            if not resumes:
                self._call = _Call(name, partial(_once_built, self._env, call))
            current = self._call
            assert current is not None
            await current.ended(self._pool)
            answer, error = current.outcome(resumes)
            call_hooks(self._events)
        finally:
            if self._awaited is mine:
                self._awaited = None
        self._call = None  # no call of anything comes after it: an interruption would lose the outcome
        if error is None:
            return answer  # type: ignore[no-any-return]
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    async def _finish_interrupted(self, name: str) -> bool:
        """Return whether ``name`` completes a call that was cancelled; complete any other one and drop its outcome."""
        pending = self._call
        if pending is None:
            return False
        if pending.name in ("step", "rollout"):
            if pending.name == name:
                return True
            if name != "reset":
                raise CallPendingError(
                    f"{name}(): {pending.name}() was cancelled. Call {pending.name}() again for its outcome, or "
                    "reset() to drop it.",
                    pending.name,
                )
        await pending.ended(self._pool)
        return False


class _Call:
    """A call that a thread makes and that any number of tasks await, of one event loop or of several in turn."""

    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        self.name = name
        # The loops and the events that are set there. By weak references: the thread would keep a task whose loop was
        # closed, and the env with it.
        self._waiting: list[tuple[asyncio.AbstractEventLoop, WeakMethod[Callable[[], None]]]] = []
        self.task = Task(call, partial(_wake, self._waiting))

    async def ended(self, pool: Pool) -> None:
        """Wait until the call has ended; have the pool make it if it was not begun. A cancellation leaves it alone."""
        ended = asyncio.Event()
        self._waiting.append((asyncio.get_running_loop(), WeakMethod(ended.set)))
        self.task.start(pool)
        if not self.task.wait(0):
            await ended.wait()

    def outcome(self, resumes: bool) -> tuple[Any, BaseException | None]:
        """Return what the call returned and what it raised, as a coroutine can return or raise it."""
        answer, error = self.task.result, self.task.error
        if error is not None:
            error = error.with_traceback(None)  # its frames would keep memory mapped as long as it is kept
            if isinstance(error, StopIteration):  # which no coroutine can raise
                stop, error = error, rebuilt((EnvError, error.args, vars(error)))
                error.__cause__ = stop.__cause__
        elif resumes:
            answer = mark_resumed(answer) if self.name == "step" else replace(answer, resumed=True)
        return answer, error


def _queue_event(events: deque[tuple[Callable[[Any], object], Any]], hook: Hook, event: Event) -> None:
    events.append((hook, event))


def _wake(waiting: list[tuple[asyncio.AbstractEventLoop, WeakMethod[Callable[[], None]]]]) -> None:
    for loop, event in waiting:
        awaken = event()
        if awaken is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(awaken)


def _once_built(env: SubprocessEnv, call: Callable[[], Any]) -> Any:
    env.initialize()
    return call()


def _step(env: SubprocessEnv, action: Any, deadlines: deque[float]) -> Any:
    """Take a step whose deadline is the last that is given here, before or while it is taken."""
    calls, supervisor = calls_of(env), supervisor_of(env)
    assert supervisor is not None
    if calls.pending() == "step":  # the system had not let an earlier call come to its end: no descriptor was left, say
        return calls.ask("step", action)
    calls.send("step", action, waits=True)
    while supervisor.state.request is not None:
        while deadlines:
            supervisor.set_deadline(deadlines.popleft())
        try:
            supervisor.collect(_LOOK)
        except WaitTimeout:
            pass  # it goes on: look whether another deadline has been given
        except MultienvError:
            break  # wait() raises it
    return calls.wait("step", None, waits=True)
