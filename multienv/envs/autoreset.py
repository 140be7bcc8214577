"""Start the next episode automatically, in one of gymnasium's three ways, without losing an observation."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from multienv._engine.asking.fanout import Calls
from multienv._engine.asking.members import Ending
from multienv._engine.building.building import mode_of
from multienv._engine.interrupts import runs_user_code
from multienv._engine.recovery.state_machine import Episode
from multienv._engine.recovery.supervisor import Supervisor
from multienv._engine.wire.codecs import Transition
from multienv._engine.wire.messages import PLAIN_RESET, Reset
from multienv.envs.subprocess_env import supervisor_of
from multienv.errors import UsageError


class AutoresetOfOne:
    """Makes resets of steps, and lets resets follow them: what a fan-out over single envs does about ended episodes.

    Whether an episode has ended is the supervisor's to say: an episode that the caller begins or restores goes on.
    After an exception of the env, too, the next step begins a new episode.

    Args:
        mode: ``NEXT_STEP`` or ``SAME_STEP``.
    """

    def __init__(self, mode: AutoresetMode) -> None:
        self.leaves_ends = mode is AutoresetMode.SAME_STEP

    def first(self, supervisor: Supervisor) -> Reset | None:
        """Return the reset to ask for in place of a step, or ``None``."""
        return PLAIN_RESET if supervisor.state.episode is Episode.ENDED else None

    def next(
        self, supervisor: Supervisor, ended: Ending | None, answer: Any, request: Any
    ) -> tuple[Ending, str, Reset] | None:
        """Return the end of an episode, and the reset that follows it in the same step."""
        is_end = self.leaves_ends and len(answer) != 2 and (answer[2] or answer[3])
        return (Ending(answer), "reset", PLAIN_RESET) if is_end else None

    def joined(self, ended: Ending | None, answer: Any) -> Transition:
        """Return the outcome of a step, which may have been a reset, or was followed by one."""
        return joined(ended and ended.returned, answer) if len(answer) == 2 else answer


def joined(transition: tuple[Any, ...] | None, begun: tuple[Any, dict[str, Any]]) -> Transition:
    """Return the result of a step that reset the env: after ``transition``, or in place of a step if it is ``None``."""
    observation, info = begun
    if transition is None:
        return observation, 0.0, False, False, info
    final_observation, reward, terminated, truncated, final_info = transition
    info = {**info, "final_obs": final_observation, "final_info": final_info}
    return observation, reward, terminated, truncated, info


class AutoResetWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Resets an env when its episode has ended.

    - ``NEXT_STEP``: the step that ends the episode returns its final observation. The next step ignores its action and
      returns the first observation of the new episode, reward 0.0 and both flags False.
    - ``SAME_STEP``: the step that ends the episode returns the first observation of the new episode.
      ``info["final_obs"]`` and ``info["final_info"]`` belong to the old episode, as do reward and flags.
    - ``DISABLED``: no reset; you reset the env yourself.

    After a step that raised, the next step begins a new episode. If the reset in a ``SAME_STEP`` step raised,
    ``error.returned`` is the result of the step. ``metadata["autoreset_mode"]`` states the mode. If the env has calls
    in two halves (``step_async``, ``step_wait``), the wrapper has them too.

    Args:
        env: Any gymnasium.Env.
        mode: A mode, or its name or value.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], mode: AutoresetMode | str = AutoresetMode.NEXT_STEP) -> None:
        super().__init__(env)
        self.mode = mode_of(mode)
        self.metadata = {**(env.metadata or {}), "autoreset_mode": self.mode}
        # For an env without a supervisor: the next step is a reset; the transition that ended the episode, until it
        # is returned.
        self._is_due = False
        self._ending: Transition | None = None
        self._supervisor = supervisor_of(env)
        self._autoreset = None if self.mode is AutoresetMode.DISABLED else AutoresetOfOne(self.mode)
        self._calls = None if self._supervisor is None else Calls(self._supervisor, self._autoreset)

    @property
    def ended(self) -> bool:
        """Return whether the next step is a reset."""
        if self._supervisor is None or self._autoreset is None:
            return self._is_due
        return self._supervisor.state.episode is Episode.ENDED

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, even if the last one has not ended."""
        if self._calls is not None:
            self._calls.finish_interrupted("reset")
        result = self.env.reset(seed=seed, options=options)
        self._is_due, self._ending = False, None
        return result

    def step(self, action: Any) -> Transition:
        """Take one step, or make the reset that is due.

        If it is interrupted, the next call completes it; see :meth:`SubprocessEnv.step`.
        """
        return self._step_here(action) if self._calls is None else self._calls.ask("step", action)

    @runs_user_code
    def _step_here(self, action: Any) -> Transition:
        """Step an env without a supervisor."""
        if self._is_due:
            return self._begin_here()
        resets, at_once = self.mode is not AutoresetMode.DISABLED, self.mode is AutoresetMode.SAME_STEP
        try:
            transition: Any = self.env.step(action)
        except Exception:
            self._is_due = resets
            raise
        if resets and (transition[2] or transition[3]):
            self._ending, self._is_due = transition if at_once else None, True
            if at_once:
                return self._begin_here()
        return transition  # type: ignore[no-any-return]

    @runs_user_code
    def _begin_here(self) -> Transition:
        """Make the reset that is due; if it is interrupted, the next step makes it."""
        result = joined(self._ending, self.env.reset())
        self._is_due, self._ending = False, None
        return result

    # --- in two halves --------------------------------------------------------------------------

    def step_async(self, action: Any) -> None:
        """Send a step, or the reset that is due."""
        self._halves().send("step", action)

    def step_wait(self, timeout: float | None = None) -> Transition:
        """Collect the result of step_async(). Raises WaitTimeout after ``timeout`` seconds; then wait again."""
        return self._halves().wait("step", timeout)  # type: ignore[no-any-return]

    def reset_async(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Send a reset; collect the result with :meth:`reset_wait`."""
        self._halves().finish_interrupted("reset")
        self.env.reset_async(seed=seed, options=options)  # type: ignore[attr-defined]

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Collect the result of reset_async(): observation and info."""
        self._halves()
        return self.env.reset_wait(timeout)  # type: ignore[attr-defined, no-any-return]

    def _halves(self) -> Calls:
        if self._calls is None:
            raise UsageError(f"{self.env} has no calls in two halves: use step() and reset().")
        return self._calls
