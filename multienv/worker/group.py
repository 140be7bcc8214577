"""The envs that share a process: stepped one after the other, reset when their episodes end.

Each writes into its own row of the batch. The one being called is marked in the control words, so that it is known
whose fault it is if the process does not survive it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate

from multienv.wire.actions import LEAVING_OUT, action_decoder, left_out
from multienv.wire.memory import BUSY, RESETTING, SLOT, Block
from multienv.wire.messages import (
    FAILED,
    REPLY,
    STEP,
    STEPPED,
    TAG_AT,
    Description,
    Failure,
    Group,
    GroupOptions,
    LeftOut,
    Reset,
    dumps,
    pack_value,
)
from multienv.wire.numbers import Alike
from multienv.worker import generators
from multienv.worker.eavesdropping import listening, watched
from multienv.worker.failures import failure_of, not_sent, wrong_result, wrong_reward
from multienv.worker.group_replies import Failures, GroupReplies, Infos
from multienv.worker.group_results import NotBegun, of_reset, own_info
from multienv.worker.rows import Rows
from multienv.worker.tenant import Handle

_STEP_RESULT = "observation, reward, terminated, truncated, info"


class EnvGroup(GroupReplies):
    """Holds several envs.

    Args:
        envs: The envs, built.
        group: Their place in the batch.
        arena: Gives the memory that all groups share.
        build: Builds the env of a slot.
    """

    def __init__(
        self,
        envs: Sequence[gymnasium.Env[Any, Any]],
        group: Group,
        arena: Callable[[int], Block],
        build: Callable[[int], gymnasium.Env[Any, Any]],
    ) -> None:
        """Take the envs in; their episodes are to be begun."""
        self._envs = list(envs)
        self._build = build
        self._abandoned = []
        self._group = group
        space = envs[0].observation_space if group.space is None else group.space
        self._action_space = batch_space(envs[0].action_space, group.size)
        self._rows = Rows(space, group, arena)
        self.block = self._rows.block
        self._same_step = group.autoreset == "SAME_STEP"
        self._begun = [None] * group.size
        self._ended = [True] * group.size
        self._steps: list[Callable[[Any], Any]] = []
        self._calls: list[Callable[[Any], Any]] = []  # what a step calls: an env's step, or what begins its episode
        self._words: Any = None
        self._alike = Alike(group.size)

    def describe(self) -> Description:
        """What the first env tells of itself, and the spaces of all."""
        first = self._envs[0]
        return Description(
            observation_space=spaces.Tuple([env.observation_space for env in self._envs]),
            action_space=self._action_space,
            metadata=dict(first.metadata or {}),
            spec=first.spec,
            render_mode=first.render_mode,
            pid=os.getpid(),
            members=tuple((env.observation_space, env.action_space) for env in self._envs),
        )

    def remember(self, seq: int) -> None:
        """Keep the rows as they are after this request."""
        self._rows.remember(seq)

    def move(self, allocate: Callable[[int], Block]) -> None:
        """The arena stays where it is; the rows become what they were."""
        self._rows.put_back()

    def close(self) -> None:
        """Close all, also if one raises."""
        with contextlib.ExitStack() as stack:
            for env in self._envs:
                stack.callback(env.close)

    def is_compiled(self) -> bool:
        """Some envs set their ``step`` anew; see :class:`SingleEnv`."""
        with contextlib.suppress(Exception):  # foreign code
            return [env.step for env in self._envs] == self._steps
        return True

    # --- step -----------------------------------------------------------------------------------

    def compile(self, words: Any, handle: Handle) -> Handle:
        """See :class:`Tenant`."""
        self._words = words
        self._steps = [env.step for env in self._envs]
        self._calls[:] = [
            self._beginner(slot) if ended else self._steps[slot] for slot, ended in enumerate(self._ended)
        ]
        step, step_without = self._stepper(words), self._step_without
        shown, laid_out, pack, size = self._rows.shown, self._rows.laid_out, REPLY.pack, REPLY.size
        packed_numbers = self._alike.packed

        def handle_any(seq: int, kind: int, frame: bytes) -> bytes:
            if kind != STEP:
                reply = handle(seq, kind, frame)
                words[SLOT] = 0
                return reply
            words[BUSY] = seq + 1
            try:
                infos, failures = (step_without if frame[TAG_AT] == LEAVING_OUT else step)(seq, frame)
                words[SLOT] = 0
                plain = laid_out and not failures
                numbers = packed_numbers(infos) if infos and plain and not self._careful else b""
                if not plain or (infos and not numbers):
                    reply = self._packed(seq, infos, failures, None)
                else:
                    data = shown[seq & 1]()
                    length = size + len(data) + len(numbers)
                    reply = pack(length, seq, len(numbers), STEPPED, 0, 0, 0.0) + data + numbers
                    self._told = infos, failures, None
            except Exception as error:
                self._rows.keep(seq)
                words[SLOT] = 0
                reply = pack_value(seq, failure_of(error), FAILED)
            words[BUSY] = 0
            return reply

        return handle_any

    def _stepper(self, words: Any) -> Callable[[int, bytes], tuple[Infos, Failures]]:
        """One loop for every kind of env, because each call, and each object it touches, counts here."""
        group, calls, stale, write = self._group, self._calls, self._rows.stale, self._rows.write
        decode = action_decoder(self._action_space)
        is_array = type(self._action_space) in (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)
        rows, marks = range(group.first, group.first + group.size), range(1, group.size + 1)
        targets = [self._rows.target(side) for side in (0, 1)]
        whole = slice(None)

        def step(seq: int, frame: bytes) -> tuple[Infos, Failures]:
            side = seq & 1
            cells, rewards, terminations, truncations = targets[side]
            if stale[side]:
                self._rows.clear_flags(side)
            infos: Infos = []
            failures: Failures = {}
            actions = decode(frame)
            if not is_array:
                actions = iterate(self._action_space, actions)
            for row, mark, call, action, cell in zip(rows, marks, calls, actions, cells, strict=True):
                words[SLOT] = mark
                try:
                    result = call(action)
                    try:
                        observation, reward, terminated, truncated, info = result
                    except (TypeError, ValueError):
                        raise wrong_result("step", _STEP_RESULT, result) from None
                    try:
                        rewards[row] = reward
                    except (TypeError, ValueError):
                        raise wrong_reward(reward) from None
                    if terminated or truncated:
                        stale[side] = True
                        terminations[row], truncations[row] = terminated, truncated
                        observation, info = self._note_end(mark - 1, observation, info)
                    try:
                        cell[whole] = observation
                    except (TypeError, ValueError):
                        write(side, mark - 1, observation)  # it may fit all the same
                    if info:
                        infos.append((mark - 1, own_info(info)))
                except Exception as error:
                    self._note_error(seq, mark - 1, error, infos, failures)
            return infos, failures

        return step

    def _note_end(self, slot: int, observation: Any, info: Any) -> tuple[Any, Any]:
        """The episode has ended: what the caller gets."""
        self._end(slot)
        return self._begin_at_once(slot, observation, info) if self._same_step else (observation, info)

    def _end(self, slot: int) -> None:
        """The next step begins an episode."""
        self._ended[slot] = True
        self._calls[slot] = self._beginner(slot)

    def _go_on(self, slot: int) -> None:
        """An episode has begun."""
        self._rows.begun[slot] = True
        self._ended[slot] = False
        self._calls[slot] = self._steps[slot]

    def _beginner(self, slot: int) -> Callable[[Any], Any]:
        """In the place of an env's step: begin an episode."""

        def begin(action: Any) -> tuple[Any, float, bool, bool, Any]:
            observation, info = self._reset(slot)
            return observation, 0.0, False, False, info

        return begin

    def _reset(self, slot: int, **arguments: Any) -> tuple[Any, Any]:
        self._words[SLOT] = slot + 1 + RESETTING
        result = of_reset(self._envs[slot].reset(**arguments))
        self._go_on(slot)
        return result

    def _begin_at_once(self, slot: int, observation: Any, info: Any) -> tuple[Any, dict[str, Any]]:
        """The episode has ended with this: what the caller gets, with autoreset in the same step."""
        try:
            final_observation, final_info = pickle.loads(dumps((observation, info)))  # they may be the env's own
        except Exception as error:
            raise not_sent("step", error, info=info) from error
        try:
            first, info = self._reset(slot)
        except Exception as error:
            raise NotBegun(error, final_observation, final_info) from error
        return first, {"final_obs": final_observation, "final_info": final_info, **(info or {})}

    def _failed(self, seq: int, slot: int, error: Exception) -> Failure:
        """An env has raised: its episode ends there, at what was seen last."""
        self._end(slot)
        self._rows.put(seq, slot, self._rows.seen(seq, slot))
        return failure_of(error.raised if isinstance(error, NotBegun) else error)

    def _note_error(self, seq: int, slot: int, error: Exception, infos: Infos, failures: Failures) -> None:
        """An env has raised in a step: its failure, or, if it is told to, the honest end of its episode."""
        if isinstance(error, _Absent):
            return  # who stands in for it comes later
        if isinstance(error, NotBegun):
            self._note_lost_reset(seq, slot, error, infos, failures)
            return
        if not self._group.truncates_errors:
            failures[slot] = self._failed(seq, slot, error)
            return
        what = failure_of(error)
        self._end(slot)
        reason = f"The env raised {what.type_name}: {what.text}"
        try:
            seen = self._rows.told(seq, slot) if self._same_step else self._rows.seen(seq, slot)
            infos.append((slot, self._stand_in(seq, slot, LeftOut(seen, reason))))
        except Exception as again:  # it begins its next episode in there
            failures[slot] = self._failed(seq, slot, again)

    def _note_lost_reset(self, seq: int, slot: int, error: NotBegun, infos: Infos, failures: Failures) -> None:
        """What the step has returned is not lost with it: it goes with the failure, or is all there is to tell."""
        observation, info, earned = error.observation, error.info, self._rows.earned(seq, slot)
        if self._group.truncates_errors:
            with contextlib.suppress(Exception):  # it may succeed when it is tried again
                first, more = self._reset(slot)
                self._rows.write(seq & 1, slot, first)
                told = {"reason": f"The reset raised {type(error.raised).__name__}. It was tried again."}
                final = {"final_obs": observation, "final_info": info, "multienv": told}
                infos.append((slot, final | (more or {})))
                return
        returned = dumps((observation, *earned, info))
        failures[slot] = replace(self._failed(seq, slot, error), returned=returned)

    def _step_without(self, seq: int, frame: bytes) -> tuple[Infos, Failures]:
        """A step in which some envs do not take part: they have killed the process, or are not what they were."""
        frame, absent = left_out(frame)
        self._careful = True
        self._rows.stale[:] = True, True  # the trainer may have written there, to put back what was seen
        for slot in absent:
            self._calls[slot] = _nothing_happens
        with watched(self._calls, self._words, self.replies) as expose:
            try:
                infos, failures = self._stepper(self._words)(seq, frame)
            finally:
                for slot in absent:
                    self._end(slot)
            expose(self._group.size - 1, True)
            for slot, one in absent.items():
                info: dict[str, Any] = {}
                try:
                    if one.lasting is not None:
                        self._build_anew(seq, slot, one.lasting)
                    info = self._stand_in(seq, slot, one)
                except Exception as error:  # it begins its next episode in there
                    failures[slot] = self._failed(seq, slot, error)
                expose(slot)
                if info:
                    infos.append((slot, info))
        return infos, failures

    def _stand_in(self, seq: int, slot: int, one: LeftOut) -> dict[str, Any]:
        """Write what the caller gets for an env that was left out; its info."""
        seen = self._rows.seen(seq, slot) if one.observation is None else one.observation
        self._rows.put(seq, slot, seen, truncated=bool(one.reason))
        if not one.reason:
            return {}
        told = {"reason": one.reason, "recovery": "truncated"} | ({"report": one.report} if one.report else {})
        info: dict[str, Any] = {"multienv": told}
        if self._same_step:
            observation, info = self._begin_at_once(slot, seen, info)
            self._rows.put(seq, slot, observation, truncated=True)
        return info

    # --- everything but steps -------------------------------------------------------------------

    def reset(self, seq: int, message: Reset) -> bytes:
        """Begin an episode in those that the mask names."""
        options = message.options
        assert isinstance(options, GroupOptions)
        if message.generators is not None:
            for env, state in zip(self._envs, pickle.loads(message.generators), strict=True):
                generators.restore(env, state)
        state = dumps([generators.capture(env) for env in self._envs]) if message.anchor else None
        infos: Infos = []
        failures: Failures = {}
        self._careful = options.careful
        self._rows.stale[:] = True, True
        with listening(self._words, self.replies if options.careful else -1) as expose:
            for slot in range(self._group.size):
                if slot in options.left_out:
                    self._end(slot)
                if slot in options.anew:
                    with contextlib.suppress(Exception):  # it is raised that it was lost
                        self._build_anew(seq, slot, options.anew[slot])
                    expose(slot, True)
                if slot in options.left_out or (options.mask is not None and not options.mask[slot]):
                    self._rows.keep(seq, slot)
                    continue
                self._begun[slot] = message.seed[slot], options.options
                try:
                    observation, info = self._reset(slot, seed=message.seed[slot], options=options.options)
                    self._rows.put(seq, slot, observation)
                    if info:
                        infos.append((slot, own_info(info)))
                except Exception as error:
                    failures[slot] = self._failed(seq, slot, error)
                expose(slot)
        self._words[SLOT] = 0
        return self._packed(seq, infos, failures, state)


class _Absent(Exception):  # noqa: N818 - goes no further than the step
    """An env does not take part in a step."""


def _nothing_happens(action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    raise _Absent
