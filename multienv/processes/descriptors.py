"""The trainer's descriptors, so that a forked worker can let go of them.

A forked sibling that keeps another worker's pipe open would hide that worker's death. The lock is held
while ends that belong to a worker are open in the trainer, and while forking.
"""

from __future__ import annotations

import contextlib
import os
import threading

lock = threading.RLock()
_trainers: set[int] = set()


def own(*descriptors: int) -> None:
    """These are the trainer's: no worker may keep them."""
    _trainers.update(descriptors)


def close(*descriptors: int) -> None:
    """Close the trainer's ends; a negative one is none."""
    with lock:
        for descriptor in descriptors:
            if descriptor >= 0:
                _trainers.discard(descriptor)
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def close_inherited(kept: set[int]) -> None:
    """In a forked worker: close every descriptor that is the trainer's, but for ``kept``."""
    for descriptor in _trainers - kept:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _trainers.clear()
