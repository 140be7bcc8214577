"""Wait in an asyncio event loop: for a process, as ``Channel.wait()`` does in a thread, and for what blocks."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from multienv.errors import EnvRaisedError, rebuilt
from multienv.processes.channel import FIRST_SLEEP, LONGEST_SLEEP, Channel
from multienv.wire.segment import TRAINER_SLEEPS


async def heard_from(channel: Channel, number: int, until: float | None) -> bool:
    """Wait in the running event loop until the reply is there or the process has ended; no thread is blocked.

    Args:
        channel: To the process.
        number: The request that is to be answered.
        until: When to give up, by ``time.monotonic()``; ``None``: never.

    Returns:
        Whether ``channel.wait()`` now returns or raises at once; else ``until`` has passed.
    """
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    watched: list[int] = []
    try:
        # Copies: another thread may close the channel, and the loop would go on with a number that is another file's.
        for descriptor in channel.descriptors():
            watched.append(os.dup(descriptor))
            loop.add_reader(watched[-1], heard.set)
        patience = FIRST_SLEEP
        while True:
            channel.segment.words[TRAINER_SLEEPS] = 1
            if channel.answered(number):
                return True
            left = patience if until is None else min(patience, until - time.monotonic())
            timer = loop.call_later(max(0.0, left), heard.set)
            try:
                await heard.wait()
            finally:
                timer.cancel()
            heard.clear()
            if channel.attend() or channel.answered(number):
                return True
            if until is not None and time.monotonic() >= until:
                return False
            patience = LONGEST_SLEEP
    finally:
        for descriptor in watched:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        channel.segment.words[TRAINER_SLEEPS] = 0


def without_stop(call: Callable[[], Any]) -> Any:
    """Make a call; a StopIteration of the env, which no coroutine can raise, is raised as a plain EnvRaisedError."""
    try:
        return call()
    except StopIteration as error:
        stop = error.with_traceback(None)  # its frames would keep memory mapped
    raise rebuilt((EnvRaisedError, stop.args, vars(stop))) from stop.__cause__


def in_thread(call: Callable[[], object]) -> Future[BaseException | None]:
    """Make a call in a thread of its own: the loop's executor may be full of calls that take minutes."""
    pool = ThreadPoolExecutor(1, "multienv-async")
    try:
        return pool.submit(_error_of, call)
    finally:
        pool.shutdown(wait=False)  # the thread ends with the call


async def end_of(work: Future[BaseException | None]) -> BaseException | None:
    """Wait until a thread has ended, and return what its call raised; a cancellation leaves the thread alone."""
    await asyncio.wait([asyncio.wrap_future(work)])
    return work.result()


def _error_of(call: Callable[[], object]) -> BaseException | None:
    """Make a call; return what it raised, without its frames: they would keep memory mapped as long as it is kept."""
    try:
        without_stop(call)
    except BaseException as error:
        return error.with_traceback(None)
    return None
