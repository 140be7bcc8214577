"""Begin the next episode by itself, in one of gymnasium's three ways, losing no observation."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from multienv.errors import UsageError
from multienv.hosted_env import HostedEnv
from multienv.recovery.supervisor import Transition


class AutoResetWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Resets an env after its episode has ended.

    - ``NEXT_STEP``: the step that ends the episode returns its final observation; the next one ignores its
      action and returns the first observation of the new episode, reward 0.0 and both flags False.
    - ``SAME_STEP``: the step that ends the episode returns the first observation of the new one, with
      ``info["final_obs"]`` and ``info["final_info"]`` of the old; reward and flags are the old one's.
    - ``DISABLED``: nothing; the caller resets.

    The mode is stated in ``metadata["autoreset_mode"]``. The two halves of a step are there where the env
    has them.

    Args:
        env: Any gymnasium.Env.
        mode: A mode, or its name or value.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], mode: AutoresetMode | str = AutoresetMode.NEXT_STEP) -> None:
        """Wrap the env; its current episode, if any, goes on."""
        super().__init__(env)
        self.mode = autoreset_mode(mode)
        self.metadata = {**(env.metadata or {}), "autoreset_mode": self.mode}
        self.splits = isinstance(env, HostedEnv)
        self.ended = False
        self._final: Transition | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, whatever became of the last one."""
        result = self.env.reset(seed=seed, options=options)
        self.ended = False
        return result

    def step(self, action: Any) -> Transition:
        """One step, or the reset that is due."""
        if self.ended:
            return self._first(self.env.reset())
        transition: Any = self.env.step(action)
        return self.end(transition) if transition[2] or transition[3] else transition

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`HostedEnv.state_dict`; with whether a reset is due."""
        return {"env": self._hosted.state_dict(), "ended": self.ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`HostedEnv.load_state_dict`."""
        self._hosted.load_state_dict(state["env"])
        self.ended = state["ended"]

    # --- in two halves --------------------------------------------------------------------------

    def step_async(self, action: Any) -> None:
        """Send a step, or the reset that is due."""
        if self.ended:
            self._hosted.reset_async()
        else:
            self._hosted.step_async(action)

    def step_wait(self, timeout: float | None = None) -> Transition:
        """Collect what was sent."""
        if self.ended:
            return self._first(self._hosted.reset_wait(timeout))
        transition = self._hosted.step_wait(timeout)
        return self.end(transition) if transition[2] or transition[3] else transition

    def reset_async(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Send a reset."""
        self._hosted.reset_async(seed=seed, options=options)

    def reset_wait(self, timeout: float | None = None, *, defer: bool = False) -> tuple[Any, dict[str, Any]]:
        """Collect what the reset returned; ``defer`` is for who has a thread to recover in."""
        result = self._hosted._supervisor.receive("reset", timeout, defer=defer)
        self.ended = False
        return result  # type: ignore[no-any-return]

    def resume(self) -> Any:
        """Complete the step or reset that was interrupted: what it returned, collected before or not."""
        answer = self._hosted.resume()
        if len(answer) == 2:
            if self._final is not None:
                return self._same_step(self._final, answer)
            return self._first(answer)
        return self.end(answer) if answer[2] or answer[3] else answer

    # --- helpers --------------------------------------------------------------------------------

    @property
    def _hosted(self) -> HostedEnv:
        if not isinstance(self.env, HostedEnv):
            raise UsageError(f"{self.env} has no calls in two halves: use step() and reset().")
        return self.env

    def end(self, transition: Transition) -> Transition:
        """The episode has ended with this transition: what the caller gets."""
        if self.mode is AutoresetMode.NEXT_STEP:
            self.ended = True
        elif self.mode is AutoresetMode.SAME_STEP:
            self._final = transition
            return self._same_step(transition, self.env.reset())
        return transition

    def _same_step(self, final: Transition, first: tuple[Any, dict[str, Any]]) -> Transition:
        final_observation, reward, terminated, truncated, final_info = final
        observation, info = first
        self._final = None
        info = {**info, "final_obs": final_observation, "final_info": final_info}
        return observation, reward, terminated, truncated, info

    def _first(self, first: tuple[Any, dict[str, Any]]) -> Transition:
        observation, info = first
        self.ended = False
        return observation, 0.0, False, False, info


def autoreset_mode(mode: Any) -> AutoresetMode:
    """The mode, from itself, its name or its value."""
    if isinstance(mode, AutoresetMode):
        return mode
    for known in AutoresetMode:
        if mode in (known.name, known.value):
            return known
    names = ", ".join(f"AutoresetMode.{known.name}" for known in AutoresetMode)
    raise UsageError(f"autoreset_mode is {mode!r}; choose one of {names}.")
