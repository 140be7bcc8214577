"""Tell which of many workers have answered, and whose process has ended."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Iterable
from time import monotonic
from typing import Any, NamedTuple

from multienv._engine.cores import current_core, give_way
from multienv._engine.interrupts import interruptible
from multienv._engine.native import native
from multienv._engine.processes.channel import FIRST_SLEEP_SECONDS, SPIN_SECONDS, SPINS, Channel
from multienv._engine.threads import Bell
from multienv._engine.wire.segment import BOUND, REPLY, TRAINER_SLEEPS

_MOST = 256  # events that one look at the descriptors returns


def take_answered(asked: dict[int, tuple[Any, int]]) -> list[int]:
    """Take out the members that have answered, and return them.

    Args:
        asked: Member → words of its worker, and number of its request.
    """
    found = [member for member, (words, number) in list(asked.items()) if words[REPLY] == number]
    for member in found:
        del asked[member]
    return found


def awaits_on(core: int, asked: dict[int, tuple[Any, int]]) -> bool:
    """Tell whether a worker that is bound to a core has not answered.

    Args:
        core: The core; -1: it is not known, and no worker counts.
        asked: As for :func:`take_answered`.
    """
    lines = list(asked.values())
    return core >= 0 and any(words[BOUND] == 1 + core and words[REPLY] != number for words, number in lines)


if native is not None:  # the same in native code; a signal handler that asks comes in between in Python alone
    take_answered, awaits_on = native.take_answered, native.awaits_on


class Watched(NamedTuple):
    """Holds how workers that are about to be asked are watched.

    Attributes:
        known: Member → words of the process that is watched.
        asked: Member → words, and number of its request; a worker is noted here before it is asked.
        sleeps: The trainer sleeps.
    """

    known: dict[int, Any]
    asked: dict[int, tuple[Any, int]]
    sleeps: bool


class Watch:
    """Watches workers that were asked.

    A worker that is asked is *quiet*: the trainer sees its answer by looking at its words. Before the trainer sleeps,
    it writes into the words of all quiet workers that they are *waking* from now on: each sends a wake byte with its
    answer. One epoll or poll waits for these bytes and for the ends of processes.

    Args:
        bell: Ends a wait when it is rung.

    Attributes:
        has_waited: What the last wait returned was not there at the first look.
    """

    def __init__(self, bell: Bell) -> None:
        self._bell, self.has_waited, self._sleeps, self._is_rung = bell, False, False, False
        self._has_epoll = hasattr(select, "epoll")
        self._poller: Any = select.epoll() if self._has_epoll else select.poll()
        self._poller.register(bell.descriptor, select.POLLIN)
        self._channels: dict[int, Channel] = {}
        self._descriptors: dict[int, tuple[int, ...]] = {}
        self._members: dict[int, int] = {}  # descriptor → member
        self._known: dict[int, Any] = {}  # member → words of its process
        self._quiet: dict[int, tuple[Any, int]] = {}  # member → words, and number of its request
        self._waking: dict[int, tuple[Any, int]] = {}  # the same for those that send wake bytes

    def watched(self, members: Iterable[int]) -> Watched:
        """Return how members that are about to be asked are watched."""
        if self._waking:  # what is in there was asked before
            for member in members:
                self._waking.pop(member, None)
        return Watched(self._known, self._waking if self._sleeps else self._quiet, self._sleeps)

    def add(self, asked: Iterable[tuple[int, Channel, int]]) -> None:
        """Watch members that are asked now; leave out those whose process has ended.

        Args:
            asked: Of each: the member, the channel to its process, and the number of its request.
        """
        sleeps, channels = self._sleeps, self._channels
        # If the trainer sleeps, a signal handler asks.
        here, there = (self._waking, self._quiet) if sleeps else (self._quiet, self._waking)
        for member, channel, number in asked:
            if channels.get(member) is not channel:
                self._register(member, channel)
            if not self._descriptors[member]:
                continue
            words = self._known[member] = channel.segment.words
            there.pop(member, None)
            here[member] = words, number
            words[TRAINER_SLEEPS] = sleeps

    def _register(self, member: int, channel: Channel) -> None:
        self.remove(member)
        # Another thread may close the channel meanwhile.
        found = self._descriptors[member] = tuple(one for one in channel.descriptors() if one >= 0)
        for descriptor in found:
            self._members[descriptor] = member
            with contextlib.suppress(OSError):  # the last call was broken off here; or it is closed by now
                self._poller.register(descriptor, select.POLLIN)
        self._channels[member] = channel

    def remove(self, member: int) -> None:
        """Watch a member no more, until it is asked again."""
        self._quiet.pop(member, None)
        self._waking.pop(member, None)
        self._channels.pop(member, None)
        self._known.pop(member, None)
        for descriptor in self._descriptors.get(member, ()):
            if self._members.get(descriptor) == member:  # else it was closed, and another one has this number now
                self._unregister(descriptor)

    def _unregister(self, descriptor: int) -> None:
        self._members.pop(descriptor, None)
        with contextlib.suppress(OSError, KeyError):  # it is closed, or was never registered
            self._poller.unregister(descriptor)

    def wait_for_answers(self, until: float, *, looks_for_ends: bool) -> tuple[list[int], list[int]]:
        """Return the members that have answered, and those whose process has ended; if there are none, wait for one.

        Args:
            until: When to give up, by ``time.monotonic()``. It may return earlier, with none.
            looks_for_ends: Look for processes that have ended even if others have answered.
        """
        ended: list[int] = []
        self.has_waited = self._is_rung = False
        # Otherwise a worker that is bound to the trainer's core waits until the trainer's slice of time ends, and takes
        # the core for crowded. For no other worker is the core given away: a thread that never sleeps would take it.
        if awaits_on(current_core(), self._quiet):
            give_way()
        answered = take_answered(self._quiet)
        if looks_for_ends or self._waking or not answered:
            answered += self._read(0.0, ended)
        if answered or ended or self._is_rung or until <= (now := monotonic()):
            return answered, ended
        self.has_waited, asleep_at = True, now + SPIN_SECONDS
        for _ in range(SPINS):
            give_way()
            answered = take_answered(self._quiet) or (self._read(0.0, ended) if self._waking else [])
            if answered or ended or self._is_rung:
                return answered, ended
            if monotonic() > asleep_at:
                break
        try:
            return self._sleep(until, ended), ended
        finally:
            self._sleeps = False

    def _sleep(self, until: float, ended: list[int]) -> list[int]:
        """Have all workers send wake bytes, and wait; return who has answered, and note who has ended."""
        self._sleeps = True  # from here on a worker that a signal handler asks is waking, so clear() drops none of them
        quiet = dict(self._quiet)
        self._waking.update(quiet)
        for words, _ in quiet.values():
            words[TRAINER_SLEEPS] = 1
        self._quiet.clear()
        for seconds in (0.0, FIRST_SLEEP_SECONDS):  # until then a worker may not have seen that the trainer sleeps
            answered = self._read(min(seconds, until - monotonic()), ended)
            if answered or ended or self._is_rung:
                return answered
            answered = take_answered(quiet)
            for member in answered:
                self._waking.pop(member, None)
            if answered:
                return answered
        return self._read(until - monotonic(), ended)

    def _read(self, seconds: float, ended: list[int]) -> list[int]:
        """Wait for events and read what they bring; return who has answered, and note who has ended."""
        answered, strangers = [], []
        for descriptor in self._poll(seconds):
            member = self._members.get(descriptor, -1)
            channel = self._channels.get(member)
            if channel is None:
                strangers.append(descriptor)
                continue
            words, number = self._waking.get(member) or self._quiet.get(member) or (None, 0)
            has_ended = channel.attend()
            if words is not None and words[REPLY] == number:  # read after the end was seen
                answered.append(member)
                self._waking.pop(member, None)
                self._quiet.pop(member, None)
            elif has_ended:
                ended.append(member)
            if has_ended:
                self.remove(member)
        if strangers:
            self._bell.silence()
            for descriptor in strangers:
                if descriptor == self._bell.descriptor:
                    self._is_rung = True
                else:
                    self._unregister(descriptor)
        return answered

    @interruptible
    def _poll(self, seconds: float) -> list[int]:
        if self._has_epoll:
            found = self._poller.poll(max(0.0, seconds), _MOST)
        else:
            found = self._poller.poll(max(0.0, seconds) * 1000)
        return [descriptor for descriptor, _ in found]

    def end(self) -> None:
        """Have the workers send no wake bytes any more."""
        for channel in self._channels.values():
            if channel.descriptors():  # else its segment may be gone
                channel.segment.words[TRAINER_SLEEPS] = 0
