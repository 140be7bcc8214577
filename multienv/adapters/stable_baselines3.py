"""The vector env of multienv as a ``VecEnv`` of Stable-Baselines3."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array

from multienv.adapters import extra_needed
from multienv.errors import CallPendingError, EnvsFailedError
from multienv.events import Statistics
from multienv.vector.vector_env import SubprocessVectorEnv

try:
    # Where it is defined: `multienv run` imports this module while Stable-Baselines3 is being imported.
    from stable_baselines3.common.vec_env.base_vec_env import VecEnv
except ImportError as missing:
    raise extra_needed(__name__, "sb3", missing) from None

Array = np.ndarray[Any, Any]
T = TypeVar("T")

# Calls that the libraries make all the time, and that change nothing: HER's of goals, sb3-contrib's of masks.
UNRECORDED = ("action_masks", "compute_reward")


class SubprocessVecEnv(VecEnv):
    """Replaces Stable-Baselines3's ``SubprocVecEnv``; its processes may die at any moment.

    ::

        from multienv.adapters.stable_baselines3 import SubprocessVecEnv

        envs = make_vec_env("CartPole-v1", n_envs=8, seed=0, vec_env_cls=SubprocessVecEnv)
        model = PPO("MlpPolicy", envs).learn(100_000)

    With the same seed a model learns the same weights as on a ``DummyVecEnv``, to the bit, whether workers die or not.
    If an episode cannot be recovered, it ends: ``done``, reward 0, ``TimeLimit.truncated``, the last observation as
    ``terminal_observation``, and the reason in ``info["multienv"]``. So a learner bootstraps from it, as at a time
    limit.

    If Ctrl-C interrupts a step, the next step completes it, whatever its actions; each ``info["multienv"]`` then says
    ``resumed``. What is asked of the envs meanwhile sees them after that step. ``reset()`` drops a pending step.

    Args:
        env_fns: One function for each env, which builds it in its process; one that needs an argument gets the env's
            index.
        start_method: ``"forkserver"`` or ``"spawn"``; ``None``: ``"forkserver"`` on Linux, ``"spawn"`` elsewhere.
            ``"fork"`` means ``"forkserver"`` here.
        unrecorded: Names of methods that change nothing in an env. A call of any other method by :meth:`env_method` is
            recorded, and replayed when the env is recovered.
        **options: Options for :class:`~multienv.SubprocessVectorEnv`: ``envs_per_worker``, ``restart``, ``deadlines``,
            ….

    Attributes:
        vector_env: The :class:`~multienv.SubprocessVectorEnv`. Use it for ``snapshot()``, ``state_dict()`` and its
            other methods.

    Raises:
        EnvsFailedError: Some envs could not be built; all have been closed.
        UsageError: An argument is invalid.
    """

    # That of DummyVecEnv.
    reward_dtype: type = np.float32
    # Of VecEnv, for the next reset.
    _seeds: Sequence[int | None]
    _options: list[dict[str, Any]]

    def __init__(
        self,
        env_fns: Sequence[Callable[..., Any]],
        start_method: str | None = None,
        *,
        unrecorded: Collection[str] = UNRECORDED,
        **options: Any,
    ) -> None:
        if start_method is not None:
            # SB3 forks so that scripts need no ``if __name__ == "__main__"``. No start method of multienv's needs that.
            options["context"] = "forkserver" if start_method == "fork" else start_method
        self._unrecorded = frozenset(unrecorded)
        self._taken: Any = None  # the outcome of a step that was collected, and not handed to the caller yet
        self._resumes = False  # the pending step was asked for once more: it was interrupted
        self.vector_env = SubprocessVectorEnv(
            env_fns, autoreset_mode=AutoresetMode.SAME_STEP, merge_infos=False, **options
        )
        try:
            envs = self.vector_env
            super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
            # A list of actions, one for each env, is no batch of these.
            self._has_nested_actions = isinstance(self.action_space, spaces.Dict | spaces.Tuple)
            self.metadata = self.get_attr("metadata", 0)[0]  # with the frames per second that a recorder wants
        except BaseException:
            self.close()
            raise

    # --- episodes ---------------------------------------------------------------------------------

    def reset(self) -> Any:
        """Begin an episode in every env, with the seeds and options set before; return the observations."""
        self._taken = None  # that step is dropped
        options = [one or None for one in self._options]
        try:
            observations, infos = self.vector_env.reset(seed=self._seeds, options=options)
        except CallPendingError:  # that step, too
            with contextlib.suppress(EnvsFailedError):
                self.vector_env.step_wait()
            observations, infos = self.vector_env.reset(seed=self._seeds, options=options)
        no_seeds: list[None] = [None] * self.num_envs
        no_options: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        # In one statement: a reset that is interrupted before it has its seeds and options when it is called again.
        self.reset_infos, self._resumes, self._seeds, self._options = infos, False, no_seeds, no_options
        return observations

    def step_async(self, actions: Any) -> None:
        """Send one action to each env. If a step is pending, these actions are not sent: the pending one is completed.

        It is pending because it was interrupted, be it between ``step_async()`` and :meth:`step_wait`.
        """
        if self._has_nested_actions:
            empty: Any = create_empty_array(self.action_space, self.num_envs)
            actions = concatenate(self.action_space, actions, empty)
        if self._taken is None:
            try:
                self.vector_env.step_async(actions)
                return
            except CallPendingError as error:
                if error.name != "step":
                    raise
        self._resumes = True

    def step_wait(self) -> tuple[Any, Array, Array, list[dict[str, Any]]]:
        """Collect observations, rewards (of ``reward_dtype``), dones and infos."""
        if self._taken is None:
            # Stored as soon as it is returned: whatever follows may raise.
            self._taken = self.vector_env.step_wait()
        observations, rewards, terminations, truncations, infos = self._taken
        dones = terminations | truncations
        for info in infos:
            info["TimeLimit.truncated"] = False
        told, begun = infos.copy(), list(self.reset_infos)
        for index in np.flatnonzero(dones).tolist():
            is_truncated = bool(truncations[index] and not terminations[index])
            told[index], begun[index] = _ended(infos[index], is_truncated)
        if self._resumes:
            for info in told:
                info["multienv"] = {**info.get("multienv", {}), "resumed": True}
        returned = observations, rewards.astype(self.reward_dtype), dones, told
        # No call comes after this: an interruption would lose the transition.
        self.reset_infos, self._resumes, self._taken = begun, False, None
        return returned

    def _asking(self, ask: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Ask the envs something. A step that is pending is completed first; :meth:`step_wait` returns its outcome."""
        try:
            return ask(*args, **kwargs)
        except CallPendingError as error:
            if error.name != "step":
                raise
        self._taken = self.vector_env.step_wait()
        return ask(*args, **kwargs)

    def close(self) -> None:
        """End the workers."""
        self.vector_env.close()

    # --- what is asked of the envs ----------------------------------------------------------------

    def has_attr(self, attr_name: str) -> bool:
        """Return whether every env, or a wrapper of it, has the attribute."""
        return all(self._asking(self.vector_env.call, "has_wrapper_attr", attr_name))

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute of each env or of one of its wrappers; for a method, a function that calls it."""
        asked = self._asked(indices)
        return list(self._asking(self.vector_env.get_attr, attr_name, asked, calls_methods=False))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of each env, on the env or the wrapper that has it, else on the outermost one."""
        asked = self._asked(indices)
        values = [value] * (self.num_envs if asked is None else len(asked))
        self._asking(self.vector_env.set_attr, attr_name, values, asked)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Call a method of each env or of one of its wrappers."""
        given = {**method_kwargs, "indices": self._asked(indices), "recorded": method_name not in self._unrecorded}
        return list(self._asking(self.vector_env.call, method_name, *method_args, **given))

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """Return for each env whether it has a wrapper of this class. Classes are compared by name."""
        return list(self._asking(self.vector_env.is_wrapped, wrapper_class, self._asked(indices)))

    def get_images(self) -> list[Array | None]:
        """Return a frame of each env, if their ``render_mode`` is ``"rgb_array"``."""
        if self.render_mode != "rgb_array":
            warnings.warn(f"render_mode is {self.render_mode!r}: the envs draw no images.", stacklevel=2)
            return [None] * self.num_envs
        return list(self._asking(self.vector_env.render))

    def statistics(self) -> list[Statistics]:
        """Return counters and state of each worker."""
        return self.vector_env.statistics()

    def _asked(self, indices: Any) -> list[int] | None:
        """Return indices as a list, ``None`` for all; negative ones count from the end."""
        if indices is None:
            return None
        if not hasattr(indices, "__iter__"):
            indices = [indices]
        of_all = range(self.num_envs)
        return [of_all[operator.index(index)] for index in indices]


def _ended(info: dict[str, Any], is_truncated: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the info of the step that ended an episode, and that of the reset after it.

    Args:
        info: Of both, as SAME_STEP has it.
        is_truncated: The episode did not terminate.
    """
    begun = {key: value for key, value in info.items() if key not in ("final_obs", "final_info", "multienv")}
    del begun["TimeLimit.truncated"]
    of_end = dict(info["final_info"])
    told = {**info.get("multienv", {}), **of_end.get("multienv", {})}
    if told:
        of_end["multienv"] = told
    of_end["TimeLimit.truncated"] = is_truncated
    of_end["terminal_observation"] = info["final_obs"]
    return of_end, begun
