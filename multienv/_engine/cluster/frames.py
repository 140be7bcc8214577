"""What travels between a courier and its relay: lists of frames.

A frame is a tuple whose first item says what it is and whose second one names a channel. For each kind that the trainer
sends, the relay has a method with that name after ``_do_``; for each kind of the relay's, the channel has one after
``hear_``.
"""

from __future__ import annotations

from typing import Any

# From the trainer.
LAUNCH = "launch"  # channel, method, native threads, title
WAKE = "wake"  # channel, the channel of the lost worker
WAKE_KEPT = "wake_kept"  # channel, token
FREE = "free"  # token
# Channel, number, layout of the banks or None if it is known, mean time between two losses, request part of the bank,
# payload or None.
ASK = "ask"
AWAIT = "await"  # channel, number of a request that it was given before it was woken: its answer is wanted
STACK = "stack"  # channel
KILL = "kill"  # channel, cause, whether the stack is wanted, detail
CLOSE = "close"  # channel, seconds
RELEASE = "release"  # channel

# From the relay.
ANSWER = "answer"  # channel, number, words, head, rows, payload
PROGRESS = "progress"  # channel, words
STACKS = "stacks"  # channel, text
GONE = "gone"  # channel, arguments of Gone

Frame = tuple[Any, ...]
