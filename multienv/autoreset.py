"""Begin the next episode by itself, in one of gymnasium's three ways, losing no observation."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from multienv.errors import MultienvError, UsageError
from multienv.hosted_env import HostedEnv
from multienv.recovery.phases import ASKED
from multienv.recovery.supervisor import Transition, resumed


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
        if not isinstance(env, gymnasium.Env):
            raise TypeError(f"AutoResetWrapper: {env!r:.100} is a {type(env).__name__}; give a gymnasium.Env.")
        super().__init__(env)
        self.mode = mode_of(mode)
        self.metadata = {**(env.metadata or {}), "autoreset_mode": self.mode}
        self.splits = isinstance(env, HostedEnv)
        self._reset_is_due = False
        self._ended_in = 0  # the number of the episode that is over; see `Supervisor.begun`
        self._final: Transition | None = None  # the last transition of the episode that ended last, in SAME_STEP
        self._interrupted: tuple[int, int] | None = None  # of an interrupted step: the last request before and of it

    @property
    def ended(self) -> bool:
        """A reset is due, unless the caller has begun or restored an episode of the env itself: that one goes on."""
        return self._reset_is_due and not (self.splits and self._hosted._supervisor.begun != self._ended_in)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, whatever became of the last one."""
        self._interrupted = None
        result = self.env.reset(seed=seed, options=options)
        self._reset_is_due = False
        return result

    def step(self, action: Any) -> Transition:
        """One step, or the reset that is due.

        If it is interrupted, the next call completes it; see :meth:`HostedEnv.step`.
        """
        if not self.splits:
            return self._step(action)
        supervisor = self._hosted._supervisor
        before, last = self._interrupted or (supervisor.seq, None)
        self._interrupted = None
        try:
            if last == supervisor.seq and supervisor.has_asked_since(before):
                return resumed(self.resume())
            before = supervisor.seq
            return self._step(action)
        except BaseException as error:
            if not isinstance(error, MultienvError):
                self._interrupted = before, supervisor.seq
            raise

    def _step(self, action: Any) -> Transition:
        if self.ended:
            return self._begun(self.env.reset())
        transition: Any = self.env.step(action)
        return self._ended(transition) if transition[2] or transition[3] else transition

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`HostedEnv.state_dict`; with whether a reset is due."""
        return {"env": self._hosted.state_dict(), "ended": self.ended, "final": self._final if self.ended else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`HostedEnv.load_state_dict`."""
        if not isinstance(state, dict) or not {"env", "ended", "final"} <= state.keys():
            raise UsageError("load_state_dict(): give what the state_dict() of an AutoResetWrapper returned.")
        self._hosted.load_state_dict(state["env"])
        self._interrupted = None
        self._final = state["final"]
        self._note_end(due=state["ended"])

    # --- in two halves --------------------------------------------------------------------------

    def step_async(self, action: Any) -> None:
        """Send a step, or the reset that is due."""
        if self.ended:
            self._hosted.reset_async()
        else:
            self._hosted.step_async(action)

    def step_wait(self, timeout: float | None = None, *, defer: bool = False) -> Transition:
        """Collect what was sent; ``defer`` is for who has a thread to recover in."""
        env = self._hosted
        if not self.ended:
            transition = env._supervisor.receive_step(timeout, True) if defer else env.step_wait(timeout)
            if not (transition[2] or transition[3]) or not self.end(transition):
                return transition
        if self._final is not None and env._supervisor.phase != ASKED:
            env.reset_async()
        return self._begun(env._supervisor.receive("reset", timeout, defer=True) if defer else env.reset_wait(timeout))

    def reset_async(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Send a reset."""
        self._hosted.reset_async(seed=seed, options=options)

    def reset_wait(self, timeout: float | None = None, *, defer: bool = False) -> tuple[Any, dict[str, Any]]:
        """Collect what the reset returned; ``defer`` is for who has a thread to recover in."""
        result = self._hosted._supervisor.receive("reset", timeout, defer=defer)
        self._reset_is_due = False
        return result  # type: ignore[no-any-return]

    def resume(self) -> Any:
        """Complete the step that was interrupted: what it returned, collected before or not."""
        answer = self._hosted.resume()
        if len(answer) == 2:
            return self._begun(answer)
        return self._ended(answer) if answer[2] or answer[3] else answer

    def resume_reset(self) -> Any:
        """Complete the reset that was interrupted."""
        first = self._hosted.resume()
        self._reset_is_due = False
        return first

    # --- helpers --------------------------------------------------------------------------------

    @property
    def _hosted(self) -> HostedEnv:
        if not isinstance(self.env, HostedEnv):
            raise UsageError(f"{self.env} has no calls in two halves: use step() and reset().")
        return self.env

    def end(self, transition: Transition) -> bool:
        """The episode has ended with this transition; true when the caller gets it only after a reset."""
        self._note_end(due=self.mode is not AutoresetMode.DISABLED)
        self._final = transition if self.mode is AutoresetMode.SAME_STEP else None
        return self._final is not None

    def _note_end(self, *, due: bool) -> None:
        if self.splits:
            self._ended_in = self._hosted._supervisor.begun
        self._reset_is_due = due

    def _ended(self, transition: Transition) -> Transition:
        return self._begun(self.env.reset()) if self.end(transition) else transition

    def _begun(self, first: tuple[Any, dict[str, Any]]) -> Transition:
        """The reset that was due returned this: what the caller gets. It may be asked for again."""
        observation, info = first
        self._reset_is_due = False
        if self._final is None:
            return observation, 0.0, False, False, info
        final_observation, reward, terminated, truncated, final_info = self._final
        info = {**info, "final_obs": final_observation, "final_info": final_info}
        return observation, reward, terminated, truncated, info


def mode_of(mode: Any) -> AutoresetMode:
    """The mode, from itself, its name or its value."""
    if isinstance(mode, AutoresetMode):
        return mode
    for known in AutoresetMode:
        if mode in (known.name, known.value):
            return known
    names = ", ".join(f"AutoresetMode.{known.name}" for known in AutoresetMode)
    raise UsageError(f"autoreset_mode is {mode!r}; choose one of {names}.")
