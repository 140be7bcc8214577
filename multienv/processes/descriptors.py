"""The trainer's descriptors: closed once, whatever interrupts; and a forked worker can let go of them.

A forked sibling that keeps another worker's pipe open would hide that worker's death. The lock is held
while ends that belong to a worker are open in the trainer, and while forking.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque

lock = threading.RLock()
# By a token of its own each: a number may have been given to somebody else when close() is called once more.
_trainers: dict[object, int] = {}


def _begin_anew() -> None:
    """In a forked child: whichever thread held it is not here."""
    global lock
    lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def is_held_here() -> bool:
    """Whether this thread launches a process, and is now below a signal handler: others would wait for it in vain."""
    return lock._is_owned()  # type: ignore[attr-defined,no-any-return]


def own(descriptor: int) -> object:
    """This one is the trainer's: no worker may keep it. Returns what :func:`close` takes."""
    token = object()
    _trainers[token] = descriptor
    return token


def holds(token: object) -> bool:
    """Whether it has not been closed yet."""
    return token in _trainers


def close(*tokens: object) -> None:
    """Close the trainer's ends; one that has been closed is passed over."""
    with lock:
        open_still = list(filter(_trainers.__contains__, tokens))
        with contextlib.suppress(OSError):
            # At one stroke, for no signal handler to come in between: forgotten and closed.
            deque(map(os.close, map(_trainers.pop, open_still)), maxlen=0)


def close_inherited(kept: set[int]) -> None:
    """In a forked worker: close every descriptor that is the trainer's, but for ``kept``."""
    for descriptor in set(_trainers.values()) - kept:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _trainers.clear()
