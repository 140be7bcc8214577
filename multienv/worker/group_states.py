"""The state of all envs of a group, and where their episodes stand."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from typing import Any

import cloudpickle
from gymnasium import spaces
from gymnasium.vector.utils import iterate

from multienv.wire.actions import LEAVING_OUT, action_decoder, left_out
from multienv.wire.memory import SLOT
from multienv.wire.messages import TAG_AT, CaptureState, RestoreState
from multienv.worker import states
from multienv.worker.group_calls import GroupCalls
from multienv.worker.rows import Rows
from multienv.worker.states import Beginning


class GroupStates(GroupCalls):
    """Takes and puts back the states of its envs; in each the process's generators are, all the same."""

    _action_space: spaces.Space[Any]
    _begun: list[Beginning | None]  # the last reset of each that was asked for
    _ended: list[bool]
    _rows: Rows

    @abstractmethod
    def _end(self, slot: int) -> None:
        """The next step begins an episode."""

    @abstractmethod
    def _go_on(self, slot: int) -> None:
        """An episode has begun."""

    def capture_state(self, seq: int, message: CaptureState) -> bytes:
        """See :class:`Tenant`. What was seen last is in it too: it is seen again where an env fails."""
        captured = []
        for slot, env in enumerate(self._envs):
            self._words[SLOT] = slot + 1
            captured.append(states.capture(env))
        rows = self._rows.kept(seq)
        data: bytes = cloudpickle.dumps((self._begun, message.step, self._ended, rows, captured))
        return data

    def restore_state(self, message: RestoreState) -> None:
        """See :class:`Tenant`."""
        self._begun, step, ended, rows, captured = pickle.loads(message.state)
        actions = self._actions_in(step)
        for slot, env in enumerate(self._envs):
            self._words[SLOT] = slot + 1
            states.warm_up(env, self._begun[slot], actions[slot : slot + 1])
            states.restore(env, captured[slot])
            (self._end if ended[slot] else self._go_on)(slot)
        self._rows.put_there(rows)

    def _actions_in(self, step: bytes) -> list[Any]:
        if not step:
            return []
        frame = left_out(step)[0] if step[TAG_AT] == LEAVING_OUT else step
        return list(iterate(self._action_space, action_decoder(self._action_space)(frame)))
