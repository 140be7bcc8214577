"""The envs that share a process: stepped one after the other, reset when their episodes end.

Each writes into its own row of the batch. The one being called is marked in the control words, so that it is known
whose fault it is if the process does not survive it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate

from multienv.wire.actions import LEAVING_OUT, action_decoder, left_out
from multienv.wire.batch import Array, BatchLayout, Place, copied_rows, places, row_of, row_writer
from multienv.wire.evidence import GroupEvidence
from multienv.wire.memory import BUSY, RESETTING, SLOT, Block
from multienv.wire.messages import (
    ANCHORED,
    FAILED,
    IRREGULAR,
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
from multienv.worker import generators
from multienv.worker.failures import failure_of, not_picklable, not_sent, wrong_result
from multienv.worker.group_calls import GroupCalls
from multienv.worker.tenant import Handle

# What rides in a reply besides the rows: infos by env, and what the envs have raised.
_Infos = list[tuple[int, dict[str, Any]]]
_Failures = dict[int, Failure]
_STEP_RESULT = "observation, reward, terminated, truncated, info"


class EnvGroup(GroupCalls):
    """Holds several envs.

    Args:
        envs: The envs, built.
        group: Their place in the batch.
        arena: Gives the memory that all groups share.
    """

    def __init__(self, envs: Sequence[gymnasium.Env[Any, Any]], group: Group, arena: Callable[[int], Block]) -> None:
        """Take the envs in; their episodes are to be begun."""
        self._envs = list(envs)
        self._group = group
        self._space = envs[0].observation_space if group.space is None else group.space
        self._action_space = batch_space(envs[0].action_space, group.size)
        layout = BatchLayout.of(self._space, group.num_envs)
        self.block = arena(2 * layout.size)
        self._places = places(layout, self.block.view)
        self._laid_out = layout.tree is not None
        evidence = GroupEvidence(layout, group.size)
        self._shown = [evidence.maker(place, group.first) for place in self._places]
        self._ended = [True] * group.size
        self._loose: list[Any] = [None] * group.size  # observations that have no arrays
        self._steps: list[Callable[[Any], Any]] = []
        self._words: Any = None
        self._remembered: list[tuple[Array, Array]] = []

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
        first, place = self._group.first, self._places[seq & 1]
        rows = [array[first : first + self._group.size] for array in place.arrays]
        self._remembered = [(one, one.copy()) for one in rows]

    def move(self, allocate: Callable[[int], Block]) -> None:
        """The arena stays where it is; the rows become what they were."""
        for rows, before in self._remembered:
            rows[...] = before

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
        step, step_without = self._stepper(words), self._step_without
        shown, laid_out, pack, size = self._shown, self._laid_out, REPLY.pack, REPLY.size

        def handle_any(seq: int, kind: int, frame: bytes) -> bytes:
            if kind != STEP:
                reply = handle(seq, kind, frame)
                words[SLOT] = 0
                return reply
            words[BUSY] = seq + 1
            try:
                infos, failures = (step_without if frame[TAG_AT] == LEAVING_OUT else step)(seq, frame)
                if infos or failures or not laid_out:
                    reply = self._packed(seq, infos, failures, None)
                else:
                    data = shown[seq & 1]()
                    reply = pack(size + len(data), seq, 0, STEPPED, 0, 0, 0.0) + data
            except Exception as error:
                self._keep_rows(seq)
                reply = pack_value(seq, failure_of(error), FAILED)
            words[SLOT] = 0
            words[BUSY] = 0
            return reply

        return handle_any

    def _stepper(self, words: Any) -> Callable[[int, bytes], tuple[_Infos, _Failures]]:
        """One loop for every kind of env, because each call, and each object it touches, counts here."""
        group, ended, steps, envs = self._group, self._ended, self._steps, self._envs
        decode, first = action_decoder(self._action_space), group.first
        is_array = type(self._action_space) in (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)
        same_step, ndarray = group.autoreset == "SAME_STEP", np.ndarray
        targets = [self._target(place) for place in self._places]

        def step(seq: int, frame: bytes) -> tuple[_Infos, _Failures]:
            array, dtype, shape, write, rewards, terminations, truncations, flags = targets[seq & 1]
            for rows in flags:
                rows.fill(False)
            infos: _Infos = []
            failures: _Failures = {}
            actions = decode(frame)
            row = first
            for action in actions if is_array else iterate(self._action_space, actions):
                slot = row - first
                words[SLOT] = slot + 1
                try:
                    if ended[slot]:
                        words[SLOT] = slot + 1 + RESETTING
                        observation, info = of_reset(envs[slot].reset())
                        rewards[row], ended[slot] = 0.0, False
                    else:
                        result = steps[slot](action)
                        try:
                            observation, reward, terminated, truncated, info = result
                        except (TypeError, ValueError):
                            raise wrong_result("step", _STEP_RESULT, result) from None
                        rewards[row] = reward
                        if terminated or truncated:
                            terminations[row], truncations[row] = terminated, truncated
                            ended[slot] = True
                            if same_step:
                                observation, info = self._begin_at_once(slot, observation, info)
                    if type(observation) is ndarray and observation.dtype is dtype and observation.shape == shape:
                        array[row] = observation
                    else:
                        write(row, observation)
                    if info:
                        infos.append((slot, as_info(info)))
                except Exception as error:
                    failures[slot] = self._failed(seq, slot, error)
                row += 1
            return infos, failures

        return step

    def _target(self, place: Place) -> tuple[Any, ...]:
        """Where a step writes: an array of observations and what fits it, how others are written, rewards and flags."""
        first, size = self._group.first, self._group.size
        flags = [array[first : first + size] for array in (place.terminations, place.truncations)]
        views = [array.data for array in (place.rewards, place.terminations, place.truncations)]
        if not self._laid_out:
            return None, None, None, loose_writer(self._loose, first), *views, flags
        write = row_writer(place.observations)
        if isinstance(place.observations, np.ndarray):
            return place.observations, place.observations.dtype, place.observations.shape[1:], write, *views, flags
        return None, None, None, write, *views, flags

    def _begin_at_once(self, slot: int, observation: Any, info: Any) -> tuple[Any, dict[str, Any]]:
        """The episode has ended with this: what the caller gets, with autoreset in the same step."""
        final = {"final_obs": pickle.loads(dumps(observation)), "final_info": info}  # it may be the env's own array
        self._words[SLOT] = slot + 1 + RESETTING
        first, info = of_reset(self._envs[slot].reset())
        self._ended[slot] = False
        return first, {**final, **(info or {})}

    def _failed(self, seq: int, slot: int, error: Exception) -> Failure:
        """An env has raised: its episode ends there, at what was seen last."""
        self._ended[slot] = True
        self._put(seq, slot, self._seen(seq, slot), truncated=self._group.truncates_errors)
        return failure_of(error)

    def _step_without(self, seq: int, frame: bytes) -> tuple[_Infos, _Failures]:
        """A step in which some envs do not take part: they have killed the process, or are not what they were."""
        frame, absent = left_out(frame)
        present = list(self._steps), list(self._ended)
        for slot in absent:
            self._steps[slot] = _nothing_happens
            self._ended[slot] = False
        try:
            stepped, failures = self._stepper(self._words)(seq, frame)
        finally:
            self._steps[:] = present[0]
            for slot in absent:
                self._ended[slot] = present[1][slot]
        infos = [(slot, info) for slot, info in stepped if slot not in absent]
        for slot, one in absent.items():
            failures.pop(slot, None)
            info = self._stand_in(seq, slot, one)
            if info:
                infos.append((slot, info))
        return infos, failures

    def _stand_in(self, seq: int, slot: int, one: LeftOut) -> dict[str, Any]:
        """Write what the caller gets for an env that was left out; its info."""
        self._put(seq, slot, one.observation, truncated=bool(one.reason))
        self._ended[slot] = True
        if not one.reason:
            return {}
        info: dict[str, Any] = {"multienv": {"reason": one.reason, "recovery": "truncated"}}
        if self._group.autoreset == "SAME_STEP":
            observation, info = self._begin_at_once(slot, one.observation, info)
            self._put(seq, slot, observation, truncated=True)
        return info

    # --- rows -----------------------------------------------------------------------------------

    def _put(self, seq: int, slot: int, observation: Any, *, truncated: bool = False) -> None:
        place, row = self._places[seq & 1], self._group.first + slot
        if self._laid_out:
            row_writer(place.observations)(row, observation)
        else:
            self._loose[slot] = observation
        place.rewards[row], place.terminations[row], place.truncations[row] = 0.0, False, truncated

    def _seen(self, seq: int, slot: int) -> Any:
        """What the caller saw last of this env."""
        if not self._laid_out:
            return self._loose[slot]
        return row_of(self._places[(seq & 1) ^ 1].observations, self._group.first + slot)

    def _keep_rows(self, seq: int) -> None:
        """Nothing has happened: what was seen last is seen once more."""
        group = self._group
        copied_rows(self._places[(seq & 1) ^ 1], self._places[seq & 1], group.first, group.first + group.size)

    def _packed(self, seq: int, infos: _Infos, failures: _Failures, state: bytes | None) -> bytes:
        """The reply, with all that is not in the rows."""
        extras: dict[str, Any] = {}
        if infos:
            extras["infos"] = infos
        if failures:
            extras["failures"] = failures
        flags, data = 0, b""
        try:
            if self._laid_out:
                data = self._shown[seq & 1]()
            else:
                flags, data = IRREGULAR, dumps((self._loose, *self._flags_of(seq)))
            info = b"" if not extras and state is None else dumps(extras if state is None else (extras, state))
        except Exception:
            if not self._excuse(seq, infos, failures):
                raise
            return self._packed(seq, infos, failures, state)
        flags |= ANCHORED if state is not None else 0
        length = REPLY.size + len(data) + len(info)
        return REPLY.pack(length, seq, len(info), STEPPED, flags, 0, 0.0) + data + info

    def _flags_of(self, seq: int) -> tuple[list[float], list[bool], list[bool]]:
        place, first = self._places[seq & 1], self._group.first
        rows = slice(first, first + self._group.size)
        return place.rewards[rows].tolist(), place.terminations[rows].tolist(), place.truncations[rows].tolist()

    def _excuse(self, seq: int, infos: _Infos, failures: _Failures) -> bool:
        """Find what cannot be pickled, and take it for the failure of its env; false if there is nothing left."""
        for slot, info in infos:
            try:
                dumps(info)
            except Exception as error:
                infos[:] = [one for one in infos if one[0] != slot]
                failures[slot] = self._failed(seq, slot, not_sent("step", error, info=info))
                return True
        for slot, observation in enumerate(self._loose):
            try:
                dumps(observation)
            except Exception as error:
                self._loose[slot] = None
                failures[slot] = self._failed(seq, slot, not_picklable("step", error))
                return True
        return False

    # --- everything but steps -------------------------------------------------------------------

    def reset(self, seq: int, message: Reset) -> bytes:
        """Begin an episode in those that the mask names."""
        options = message.options
        assert isinstance(options, GroupOptions)
        if message.generators is not None:
            for env, state in zip(self._envs, pickle.loads(message.generators), strict=True):
                generators.restore(env, state)
        state = dumps([generators.capture(env) for env in self._envs]) if message.anchor else None
        infos: _Infos = []
        failures: _Failures = {}
        for slot, env in enumerate(self._envs):
            if slot in options.left_out:
                self._ended[slot] = True
            if slot in options.left_out or (options.mask is not None and not options.mask[slot]):
                row = self._group.first + slot
                copied_rows(self._places[(seq & 1) ^ 1], self._places[seq & 1], row, row + 1)
                continue
            self._words[SLOT] = slot + 1 + RESETTING
            try:
                observation, info = of_reset(env.reset(seed=message.seed[slot], options=options.options))
                self._put(seq, slot, observation)
                self._ended[slot] = False
                if info:
                    infos.append((slot, as_info(info)))
            except Exception as error:
                failures[slot] = self._failed(seq, slot, error)
        return self._packed(seq, infos, failures, state)


def loose_writer(loose: list[Any], first: int) -> Callable[[int, Any], None]:
    """Keep the observations that have no arrays, for the reply."""

    def write(row: int, observation: Any) -> None:
        loose[row - first] = observation

    return write


def of_reset(result: Any) -> tuple[Any, Any]:
    """What a reset has returned, if it is a pair."""
    try:
        observation, info = result
    except (TypeError, ValueError):
        raise wrong_result("reset", "observation, info", result) from None
    return observation, info


def as_info(info: Any) -> dict[str, Any]:
    """The info, if it is a dict."""
    if not isinstance(info, dict):
        raise TypeError(f"the env returned {type(info).__name__} {info!r:.200} as info; gymnasium's API wants a dict")
    return info


def _nothing_happens(action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    raise RuntimeError("this env does not take part in the step")
