"""What all faces do before a call, and the calls to one supervised env: a fan-out over one member."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, SupportsIndex

from gymnasium.vector import AutoresetMode

from multienv.config import checked_seed
from multienv.errors import CallPendingError, UsageError
from multienv.fanout import FanOut, Followup, Round, resumed
from multienv.recovery.state_machine import Process
from multienv.recovery.supervisor import Supervisor
from multienv.wire.messages import Call, Message, Render


class NotCopyableError(UsageError, TypeError):
    """A copy was wanted of what owns processes; a TypeError for pickle's callers too."""


def refuse_copy(owner: object, protocol: SupportsIndex = 0, /) -> NoReturn:
    """Raise NotCopyableError, in the place of ``__reduce_ex__``: a copy of ``owner`` would ask the same envs."""
    raise NotCopyableError(
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
    """Return the message that calls a method of envs; see :class:`~multienv.wire.messages.Call` for the arguments.

    Raises:
        UsageError: It has a method of its own here, which keeps count of episodes.
    """
    if name in ("reset", "step", "close"):
        raise UsageError(
            f"Trying to call function `{name}` with `call`, use `{name}` directly instead: what it does to the "
            "episode must be seen here."
        )
    return Render(slots) if name == "render" else Call(name, args, kwargs, slots, recorded)


def advice_after(name: str, mode: AutoresetMode) -> tuple[str, str]:
    """Say what is to be done when some envs have failed in a call, and what became of the others."""
    if name.startswith("reset"):
        return "Reset them again.", "The others are reset."
    if not name.startswith("step"):
        return "All episodes go on.", "The others answered."
    advice = "The next step() begins an episode where an env raised; reset() does where a process was lost."
    if mode is AutoresetMode.DISABLED:
        advice = "Reset the failed envs: reset(options={'reset_mask': mask})."
    return advice, "The episodes of the others go on."


def is_interrupted(current: Round) -> bool:
    """Tell whether any later call completes this unfinished round: its call was broken off, or a wait for it was."""
    return current.whole or current.resumed


def settle(fan: FanOut, name: str, note: Callable[[Round], None] | None = None) -> None:
    """See to what an earlier call has left unfinished before ``name`` is called.

    A call that was interrupted is completed, and its outcome dropped; a step only before a reset: else the caller would
    miss a transition. Of a call in two halves the second must be called first, unless that was interrupted.

    Args:
        fan: What the earlier call went through.
        name: What is called now.
        note: Called with the round that is dropped, while it is unfinished.

    Raises:
        CallPendingError: The answer to the earlier call must be taken first.
    """
    current = fan.unfinished
    if current is None:
        return
    asked = current.name
    if not is_interrupted(current):
        raise CallPendingError(
            f"Calling `{name}` while waiting for a pending call to `{asked}` to complete. Call {asked}_wait() first.",
            asked,
        )
    if asked == "step" and not name.startswith("reset"):
        raise CallPendingError(
            f"Calling `{name}` after a step that was interrupted. Call step() to complete it, or reset() to drop it.",
            asked,
        )
    fan.resume()
    if note is not None:
        note(current)
    fan.finish()


def checked_seeds(seed: Any, num_envs: int) -> list[int | None]:
    """Return a seed for each env, given ``None``, the first one's, or one for each; SeedError if one is none."""
    if seed is None or not hasattr(seed, "__len__") or getattr(seed, "shape", None) == ():
        first = checked_seed(seed)
        return [None if first is None else first + index for index in range(num_envs)]
    if len(seed) != num_envs:
        raise UsageError(
            f"reset(): If seeds are passed as a list the length must match num_envs={num_envs} but got "
            f"length={len(seed)}."
        )
    return [checked_seed(one) for one in seed]


class Calls:
    """Makes one call at a time to one env.

    A step that was interrupted is completed by the next :meth:`step`, whose own action is not taken; ``reset`` drops
    it. Any other interrupted call is completed by whatever is called next, and its outcome dropped.

    Args:
        supervisor: Of the env.
        followup: Makes resets of steps and lets resets follow them.
    """

    __slots__ = ("_fan", "_supervisor")

    def __init__(self, supervisor: Supervisor, followup: Followup | None = None) -> None:
        self._supervisor = supervisor
        self._fan = FanOut([supervisor], followup=followup, skips_none=False)

    def step(self, action: Any) -> Any:
        """Take a step, or complete the one that was interrupted, whose info then says so."""
        fan = self._fan
        unfinished = fan.unfinished
        if unfinished is not None and unfinished.name == "step" and is_interrupted(unfinished):
            return self._outcome(fan.resume())
        return self.ask("step", action)

    def ask(self, name: str, request: Any) -> Any:
        """Send a request, a message or the action of a step, and return its answer; raise what it raises."""
        if self._fan.unfinished is not None:
            self.settle(name)
        return self._outcome(self._fan.ask(name, (request,)))

    def send(self, name: str, request: Any) -> None:
        """Send a request whose answer :meth:`wait` collects."""
        self.settle(name)
        current = self._fan.send(name, (request,), whole=False)
        if current.failures:
            self._outcome(current)

    def wait(self, name: str, timeout: float | None) -> Any:
        """Collect the answer to the request that :meth:`send` sent under this name."""
        unfinished = self._fan.unfinished
        if unfinished is None or unfinished.name != name or unfinished.whole:
            self._supervisor.refuse(f"{name}_wait")
        return self._outcome(self._fan.collect(timeout))

    def resume(self) -> Any:
        """Return the answer to the last request, collected before or not."""
        return self._supervisor.resume() if self._fan.unfinished is None else self._outcome(self._fan.resume())

    def settle(self, name: str) -> None:
        """See to what an earlier call has left unfinished before ``name`` is called; see the function."""
        if self._supervisor.state.process is Process.CLOSED:
            self._fan.finish()
            self._supervisor.refuse(name)
        settle(self._fan, name)

    def _outcome(self, current: Round) -> Any:
        """Return or raise what came of a call, which is finished with that."""
        for error in current.failures.values():
            self._fan.finish()
            raise error
        answer = current.answers[0]
        if current.resumed and current.name == "step":
            answer = resumed(answer)
        self._fan.finish()
        return answer
