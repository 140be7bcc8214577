"""Tells which of many workers have something to say, at a cost that does not depend on how many there are."""

from __future__ import annotations

import contextlib
import select
from time import monotonic
from typing import Any

from multienv.interrupts import interruptible
from multienv.processes.channel import FIRST_SLEEP_SECONDS, SPIN_SECONDS, SPINS, Channel, give_way
from multienv.threads import Bell
from multienv.wire.segment import REPLY, TRAINER_SLEEPS

# So many workers are looked at one by one, which is the fastest way; others send a wake byte with each answer.
_FEW = 64
_MOST = 256  # events that one look at the descriptors returns


class Watch:
    """Watches workers that were asked: the words of a few, and the descriptors of all, in one epoll or poll.

    A worker sends a wake byte with its answer if its word says that the trainer sleeps. Before the trainer sleeps it
    says so to the few; to any other worker it does before it is asked, and for good.

    Args:
        bell: Ends a wait when it is rung.

    Attributes:
        has_waited: What was heard last was not there at the first look.
    """

    def __init__(self, bell: Bell) -> None:
        self._bell, self.has_waited, self._sleeps = bell, False, False
        self._has_epoll = hasattr(select, "epoll")
        self._poller: Any = select.epoll() if self._has_epoll else select.poll()
        self._poller.register(bell.descriptor, select.POLLIN)
        self._channels: dict[int, Channel] = {}
        self._descriptors: dict[int, tuple[int, ...]] = {}
        self._members: dict[int, int] = {}  # descriptor → member
        self._few: dict[int, tuple[Any, int]] = {}  # member → words, and number of its request
        self._many: dict[int, tuple[Any, int]] = {}  # the same for those that send wake bytes

    def add(self, member: int, channel: Channel | None, number: int) -> bool:
        """Watch a member that is asked now.

        Args:
            member: The member.
            channel: To its process; ``None``: it has none.
            number: Of the request.

        Returns:
            Whether it will be heard; else somebody has to look after it.
        """
        if channel is None:
            return False
        if self._channels.get(member) is not channel:
            self._register(member, channel)
        if not self._descriptors[member]:
            return False
        words = channel.segment.words
        if len(self._few) < _FEW and not self._sleeps:  # else a signal handler asks
            self._many.pop(member, None)
            self._few[member] = words, number
            words[TRAINER_SLEEPS] = 0
        else:
            self._few.pop(member, None)
            self._many[member] = words, number
            words[TRAINER_SLEEPS] = 1
        return True

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
        self._few.pop(member, None)
        self._many.pop(member, None)
        self._channels.pop(member, None)
        for descriptor in self._descriptors.get(member, ()):
            if self._members.get(descriptor) == member:  # else it was closed, and another one has this number now
                self._unregister(descriptor)

    def _unregister(self, descriptor: int) -> None:
        self._members.pop(descriptor, None)
        with contextlib.suppress(OSError, KeyError):  # it is closed, or was never registered
            self._poller.unregister(descriptor)

    def heard(self, until: float, *, looks_for_ends: bool) -> tuple[list[int], list[int]]:
        """Return the members that have answered, and those whose process has ended; if there are none, wait for one.

        Args:
            until: When to give up, by ``time.monotonic()``. It may return earlier, with none.
            looks_for_ends: Look for processes that have ended even if others have answered.
        """
        ended: list[int] = []
        self.has_waited = self._sleeps = False
        answered = self._look()
        if looks_for_ends or self._many or not answered:
            answered += self._read(0.0, ended)
        if answered or ended or until <= (now := monotonic()):
            return answered, ended
        self.has_waited, asleep_at = True, now + SPIN_SECONDS
        for _ in range(SPINS):
            give_way()
            answered = self._look() or (self._read(0.0, ended) if self._many else [])
            if answered or ended:
                return answered, ended
            if monotonic() > asleep_at:
                break
        return self._sleep(until, ended), ended

    def _sleep(self, until: float, ended: list[int]) -> list[int]:
        """Have all workers send wake bytes, and wait; return who has answered, and note who has ended."""
        self._sleeps, few = True, list(self._few.items())
        self._many.update(few)
        for _, (words, _number) in few:
            words[TRAINER_SLEEPS] = 1
        self._few.clear()
        for seconds in (0.0, FIRST_SLEEP_SECONDS):  # until then a worker may not have seen that the trainer sleeps
            answered = self._read(min(seconds, until - monotonic()), ended)
            if answered or ended:
                return answered
            answered = [member for member, (words, number) in few if words[REPLY] == number]
            for member in answered:
                self._many.pop(member, None)
            if answered:
                return answered
        return self._read(until - monotonic(), ended)

    def _look(self) -> list[int]:
        """Return those of the few that have answered."""
        found = [member for member, (words, number) in self._few.items() if words[REPLY] == number]
        for member in found:
            del self._few[member]
        return found

    def _read(self, seconds: float, ended: list[int]) -> list[int]:
        """Wait for events and read what they bring; return who of the many has answered, and note who has ended."""
        answered, strangers = [], []
        for descriptor in self._poll(seconds):
            member = self._members.get(descriptor, -1)
            channel = self._channels.get(member)
            if channel is None:
                strangers.append(descriptor)
                continue
            words, number = self._many.get(member) or self._few.get(member) or (None, 0)
            has_ended = channel.attend()
            if words is not None and words[REPLY] == number:  # read after the end was seen
                answered.append(member)
                self._many.pop(member, None)
                self._few.pop(member, None)
            elif has_ended:
                ended.append(member)
            if has_ended:
                self.remove(member)
        if strangers:
            self._bell.silence()
            for descriptor in strangers:
                if descriptor != self._bell.descriptor:
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
