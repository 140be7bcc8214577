"""What all env classes do before a call, and the calls to one supervised env: a fan-out over one member."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, SupportsIndex

import numpy as np
from gymnasium.vector import AutoresetMode

from multienv._engine.asking.fanout import FanOut, resumed
from multienv._engine.asking.members import AutoresetHook, Round
from multienv._engine.recovery.state_machine import Process
from multienv._engine.recovery.supervisor import Supervisor
from multienv._engine.wire.messages import Call, Message
from multienv.config import checked_seed, integer
from multienv.errors import ActionError, EnvError, UsageError

# Compared by identity, which is faster: numpy has one such object, unless the caller has made another.
_INDEX = np.dtype(np.int64)
# Methods of gymnasium's that change nothing.
_READING = ("get_wrapper_attr", "has_wrapper_attr")


def refuse_copy(owner: object, protocol: SupportsIndex = 0, /) -> NoReturn:
    """Raise TypeError, in place of ``__reduce_ex__()``: a copy of ``owner`` would step the same envs."""
    raise TypeError(
        f"A {type(owner).__name__} cannot be copied or pickled: it owns its envs. Build another one from the same "
        "env_fns where it is wanted. Of a SubprocessEnv, state_dict() can be pickled, snapshot() come back to."
    )


def call_message(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    slots: tuple[int, ...] | None = None,
    *,
    recorded: bool = True,
) -> Message:
    """Return the message that calls a method of envs; see ``wire.messages.Call`` for the arguments.

    Raises:
        UsageError: ``name`` is reset, step or close: that method itself must be called, which counts episodes.
    """
    if name in ("reset", "step", "close"):
        raise UsageError(
            f"Trying to call function `{name}` with `call`, use `{name}` directly instead: what it does to the "
            "episode must be seen here."
        )
    return Call(name, args, kwargs, slots, recorded and name not in _READING)


def advice_after(name: str, mode: AutoresetMode, failures: Mapping[int, BaseException]) -> tuple[str, str]:
    """Return two sentences for an error: what to do after envs failed in a call, and what became of the others."""
    if name.startswith("reset"):
        return "Reset the failed envs again.", "The other envs are reset."
    if name != "rollout" and not name.startswith(("step", "recv")):
        return "No episode has ended.", "The other envs have answered."
    step, reset = ("send", "reset_async") if name.startswith("recv") else ("step", "reset")
    reset += "(options={'reset_mask': mask})"
    advice = (
        f"The next {step}() begins a new episode of each env that raised an error of its own; after any other, {reset}."
    )
    if all(isinstance(error, ActionError) and not isinstance(error, EnvError) for error in failures.values()):
        advice = f"The failed envs took no step: call {step}() again, with valid actions for them."
    elif mode is AutoresetMode.DISABLED:
        advice = f"Reset the failed envs: {reset}."
    return advice, "The episodes of the other envs go on."


def checked_seeds(seed: Any, num_envs: int) -> list[int | None]:
    """Return a seed for each env, given ``None``, the first env's seed, or a seed for each; raise UsageError."""
    if seed is None or not hasattr(seed, "__len__") or getattr(seed, "shape", None) == ():
        first = checked_seed(seed)
        return [None if first is None else first + index for index in range(num_envs)]
    if len(seed) != num_envs:
        raise UsageError(
            f"reset(): If seeds are passed as a list the length must match num_envs={num_envs} but got "
            f"length={len(seed)}."
        )
    return [checked_seed(one) for one in seed]


def checked_indices(indices: Any, num_envs: int) -> list[int]:
    """Return indices of envs as a list; UsageError if one is no index, or there twice."""
    if type(indices) is np.ndarray and indices.dtype is _INDEX and indices.ndim == 1:  # as recv() returns them
        several: list[int] = indices.tolist()
        if several and len(set(several)) == len(several) and min(several) >= 0 and max(several) < num_envs:
            return several
    found = [integer(index) for index in indices] if hasattr(indices, "__iter__") else [None]
    if len(set(found)) != len(found) or not all(index is not None and 0 <= index < num_envs for index in found):
        raise UsageError(f"indices is {indices!r:.100}; give different integers from 0 to {num_envs - 1}.")
    return [index for index in found if index is not None]


class Calls:
    """Makes one call at a time to one env.

    A step that was interrupted is completed by the next :meth:`step`, whose own action is not taken; ``reset`` drops
    it. Any other interrupted call is completed by the next call of any name, and its outcome is dropped.

    Args:
        supervisor: Of the env.
        autoreset: Makes resets of steps and lets resets follow them.

    Attributes:
        convert: Makes of the answer to a step or a reset what the caller is given; ``None``: that is the answer. It
            comes before the call counts as finished: Ctrl-C in there loses nothing. What it raises is told once.
    """

    __slots__ = ("_fan", "_supervisor", "convert")

    def __init__(self, supervisor: Supervisor, autoreset: AutoresetHook | None = None) -> None:
        self.convert: Callable[[Any], Any] | None = None
        self._supervisor = supervisor
        self._fan = FanOut([supervisor], autoreset=autoreset, skips_none=False)

    def step(self, action: Any) -> Any:
        """Take a step, or complete an interrupted step, whose info then says so."""
        fan = self._fan
        unfinished = fan.unfinished
        if unfinished is not None and unfinished.name == "step" and unfinished.is_interrupted:
            return self._outcome(fan.resume())
        return self.ask("step", action)

    def rollout(self, message: Callable[[], Message] | None, make: Callable[[Any, bool], Any]) -> Any:
        """Make a rollout, or complete an interrupted one.

        Args:
            message: Makes the request; ``None``: one was interrupted.
            make: Returns the outcome, or the error to raise, given the answer and whether the call was interrupted.
        """
        fan = self._fan
        if self.pending() == "rollout":
            return self._outcome(fan.resume(), make)
        self.finish_interrupted("rollout")
        assert message is not None
        return self._outcome(fan.ask("rollout", (message(),)), make)

    def ask(self, name: str, request: Any) -> Any:
        """Send a message or the action of a step; return the answer, or raise the error that is the answer."""
        if self._fan.unfinished is not None:
            self.finish_interrupted(name)
        return self._outcome(self._fan.ask(name, (request,)))

    def send(self, name: str, request: Any, *, waits: bool = False) -> None:
        """Send a request whose answer :meth:`wait` collects; ``waits``: in the same call of the caller's."""
        self.finish_interrupted(name)
        current = self._fan.send(name, (request,), waits=waits)
        if current.failures:
            self._outcome(current)

    def wait(self, name: str, timeout: float | None, *, waits: bool = False) -> Any:
        """Collect the answer to the request that :meth:`send` sent under this name; wait ``timeout`` seconds for it."""
        unfinished = self._fan.unfinished
        if unfinished is None or unfinished.name != name or unfinished.waits is not waits:
            self._supervisor.check(f"{name}_wait")
        return self._outcome(self._fan.collect(timeout))

    def resume(self) -> Any:
        """Return the answer to the last request, even if it was collected before."""
        if self._fan.unfinished is None:
            answer = self._supervisor.resume()
            return answer if self.convert is None else self.convert(answer)
        return self._outcome(self._fan.resume())

    def pending(self) -> str:
        """Return the name of the call whose outcome has not been handed to the caller; ``""``: there is none."""
        unfinished = self._fan.unfinished
        return "" if unfinished is None else unfinished.name

    def finish_interrupted(self, name: str) -> None:
        """Do what :meth:`FanOut.finish_interrupted` does; refuse the call if the worker is closed."""
        if self._supervisor.state.process is Process.CLOSED:
            self._fan.finish()
            self._supervisor.check(name)
        self._fan.finish_interrupted(name)

    def _outcome(self, current: Round, make: Callable[[Any, bool], Any] | None = None) -> Any:
        """Finish a call: return its answer, or what ``make`` returns for it, or raise its error."""
        for error in current.failures.values():
            self._fan.finish()
            raise error
        answer = current.answers[0]
        if current.resumed and current.name == "step":
            answer = resumed(answer)
        if self.convert is not None and current.name in ("step", "reset"):
            try:
                answer = self.convert(answer)
            except Exception:
                self._fan.finish()
                raise
        if make is not None:
            answer = make(answer, current.resumed)
        failed = make is not None and isinstance(answer, Exception)
        self._fan.finish()
        if failed:
            raise answer
        return answer
