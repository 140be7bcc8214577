"""Who writes on the pipe that the worker answers on, or closes it: the trainer cannot tell whose call it was."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import Any

from multienv.wire.memory import RESETTING, SLOT

# The exit code of a worker that has found out.
NOISY = 71


@contextlib.contextmanager
def listening(words: Any, replies: int) -> Iterator[Callable[..., None]]:
    """Put another pipe in the place of ``replies``, -1 for none; yields what is to be called after each env's turn.

    With its slot, and whether it was in a reset, for where the mark has moved on meanwhile.
    Who has written there, or closed what is not its own, ends the process, marked: the trainer has read the same, or
    nothing, and knows whom to blame.
    """
    if replies < 0:
        yield lambda slot, resetting=False: None
        return
    with _another_pipe(replies) as ear:
        poller = select.poll()
        poller.register(ear, select.POLLIN)

        def expose(slot: int, resetting: bool = False) -> None:
            for _, event in poller.poll(0):
                found = "wrote on" if event & select.POLLIN else "closed"
                if words[SLOT] % RESETTING != slot + 1:  # else it is marked already, and whether it was in a reset
                    words[SLOT] = slot + 1 + (RESETTING if resetting else 0)
                with contextlib.suppress(Exception):
                    print(f"It {found} the pipe that its worker answers on.", file=sys.stderr, flush=True)
                os._exit(NOISY)

        yield expose


@contextlib.contextmanager
def watched(calls: list[Callable[[Any], Any]], words: Any, replies: int) -> Iterator[Callable[..., None]]:
    """Listen to each of the calls, in their order; yields as above, for what comes after them."""
    with listening(words, replies) as expose:

        def watching(slot: int, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def call_and_listen(action: Any) -> Any:
                if slot:
                    expose(slot - 1, True)  # after its call: in the reset that the same step brings
                    words[SLOT] = slot + 1
                try:
                    return call(action)
                finally:
                    expose(slot)

            return call_and_listen

        before = list(calls)
        own = [watching(slot, call) for slot, call in enumerate(before)]
        calls[:] = own
        try:
            yield expose
        finally:
            for slot, (call, mine, plain) in enumerate(zip(calls, own, before, strict=True)):
                calls[slot] = plain if call is mine else call


@contextlib.contextmanager
def _another_pipe(descriptor: int) -> Iterator[int]:
    inheritable = os.get_inheritable(descriptor)
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)  # nobody reads what fills it: who writes much would wait for ever
    kept = os.dup(descriptor)
    try:
        os.dup2(mouth, descriptor, inheritable)
        os.close(mouth)
        yield ear
    finally:
        os.dup2(kept, descriptor, inheritable)
        os.close(kept)
        os.close(ear)
