"""Tells which of many workers have something to say, at a cost that does not depend on how many there are."""

from __future__ import annotations

import contextlib
import select
from typing import Any

from multienv.interrupts import interruptible
from multienv.processes.channel import Channel
from multienv.threads import Bell
from multienv.wire.segment import TRAINER_SLEEPS

_MOST = 256  # events that one look returns


class Watch:
    """Watches the descriptors of workers, in one epoll; where there is none, in one poll.

    A worker that is watched sends a wake byte with each answer: its word says that the trainer sleeps, before it is
    asked. So nobody looks at the words of all workers, and no wake byte is lost.

    Args:
        bell: Ends a wait when it is rung.
    """

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._in_seconds = hasattr(select, "epoll")
        self._poller: Any = select.epoll() if self._in_seconds else select.poll()
        self._poller.register(bell.descriptor, select.POLLIN)
        self._channels: dict[int, Channel] = {}
        self._descriptors: dict[int, tuple[int, ...]] = {}
        self._members: dict[int, int] = {}  # descriptor → member

    def add(self, member: int, channel: Channel | None) -> bool:
        """Watch the present process of a member, which is about to be asked.

        Args:
            member: The member.
            channel: To its process; ``None``: it has none.

        Returns:
            Whether it will be heard; else it has to be looked at.
        """
        if channel is None:
            return False
        if self._channels.get(member) is not channel:
            self._register(member, channel)
        channel.segment.words[TRAINER_SLEEPS] = 1
        return bool(self._descriptors[member])

    def _register(self, member: int, channel: Channel) -> None:
        self.remove(member)
        # Another thread may close the channel meanwhile.
        found = self._descriptors[member] = tuple(one for one in channel.descriptors() if one >= 0)
        for descriptor in found:
            self._members[descriptor] = member
            with contextlib.suppress(FileExistsError):  # the last call was broken off here
                self._poller.register(descriptor, select.POLLIN)
        self._channels[member] = channel

    def remove(self, member: int) -> None:
        """Watch a member no more, until it is asked again."""
        self._channels.pop(member, None)
        for descriptor in self._descriptors.get(member, ()):
            if self._members.get(descriptor) == member:  # else it was closed, and another one has this number now
                self._unregister(descriptor)

    def _unregister(self, descriptor: int) -> None:
        self._members.pop(descriptor, None)
        with contextlib.suppress(OSError, KeyError):  # it is closed, or was never registered
            self._poller.unregister(descriptor)

    def channel_of(self, member: int) -> Channel:
        """Return the process of a member that was heard."""
        return self._channels[member]

    def heard(self, seconds: float) -> list[int]:
        """Wait up to ``seconds``; return the members that have something to say. They have until it is read."""
        found: dict[int, None] = {}  # it may have two descriptors
        strangers = []
        for descriptor in self._poll(seconds):
            member = self._members.get(descriptor, -1)
            if member in self._channels:
                found[member] = None
            else:
                strangers.append(descriptor)
        if strangers:
            self._bell.silence()
            for descriptor in strangers:
                if descriptor != self._bell.descriptor:
                    self._unregister(descriptor)
        return list(found)

    @interruptible
    def _poll(self, seconds: float) -> list[int]:
        if self._in_seconds:
            found = self._poller.poll(max(0.0, seconds), _MOST)
        else:
            found = self._poller.poll(max(0.0, seconds) * 1000)
        return [descriptor for descriptor, _ in found]

    def end(self) -> None:
        """Have the workers send no wake bytes any more."""
        for channel in self._channels.values():
            if channel.descriptors():  # else its segment may be gone
                channel.segment.words[TRAINER_SLEEPS] = 0
