"""Batched envs: gymnasium's vector API over groups of envs, several in a process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import logger
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from multienv.backends.arena import Arena
from multienv.errors import ActionError, EnvsFailedError, MultienvError, ResetNeededError, UsageError
from multienv.events import Statistics
from multienv.hosted_env import HostedEnv
from multienv.processes import descriptors
from multienv.recovery.group import GroupSupervisor
from multienv.recovery.record import refuse_in_hook
from multienv.threads import Pool, close_at_once, side_by_side
from multienv.vector_arguments import check_mask, check_options, normal_batch, shown, sliced
from multienv.vector_calls import VectorCalls
from multienv.vector_rounds import STEP, Refused, Round, VectorRounds
from multienv.vector_spaces import blank, check_shareable, check_spaces, observation_spaces
from multienv.wire.batch import BatchLayout, Place, copied, row_of
from multienv.wire.messages import GroupOptions, Reset
from multienv.wire.numbers import Merging

if TYPE_CHECKING:
    from multienv.hosted_env import EnvFn

Batch = tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any], dict[str, Any]]


class HostedVectorEnv(VectorCalls):
    """What SubprocessVectorEnv and SerialVectorEnv share: groups of envs that answer from somewhere else.

    Attributes:
        num_envs: How many envs there are.
        single_observation_space, single_action_space: Of each.
        observation_space, action_space: Of all together.
        metadata, render_mode: As the first env has them.
        spec: What :func:`make_vec` makes the same again from; else ``None``, as in gymnasium.
        autoreset_mode: What happens when an episode ends.
        envs_per_worker: The sizes of the groups.
    """

    _retired: Sequence[GroupSupervisor] = ()  # others have taken their envs over, and they are yet to be closed

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        groups: Sequence[GroupSupervisor],
        arena: Arena,
        *,
        shared_memory: bool | None,
        copy: bool,
        observation_mode: Any,
        autoreset_mode: AutoresetMode,
        max_concurrency: int | None,
    ) -> None:
        """Build all envs, and compare their spaces."""
        self.num_envs = len(env_fns)
        self.env_fns = list(env_fns)
        self.shared_memory, self.copy = shared_memory, copy
        self.observation_mode = observation_mode
        self.autoreset_mode = autoreset_mode
        self._groups, self._arena = list(groups), arena
        self.envs_per_worker = [group.size for group in groups]
        starts = np.cumsum([0, *self.envs_per_worker]).tolist()
        self._slices = [slice(start, stop) for start, stop in pairwise(starts)]
        self._rounds = VectorRounds(self._groups, max_concurrency or len(self._groups))
        self._places: tuple[Place, Place] | None = None
        self._begun = np.zeros(self.num_envs, np.bool_)  # has an episode, for DISABLED
        self._met = self._begun.copy()  # has had one, or has been asked for it
        self._fresh = False
        self._merging = Merging(self.num_envs)
        try:
            self._initialize()
        except BaseException:
            self.close()
            raise

    def _initialize(self) -> None:
        for group in self._groups:
            group.start()
        with Pool(len(self._groups), "multienv-build") as pool:
            tasks = side_by_side(pool, [group.initialize for group in self._groups])
        failures = {}
        for task, rows in zip(tasks, self._slices, strict=True):
            if task.error is not None:
                index = getattr(task.error, "env_index", None)
                failures[rows.start if index is None else index] = task.error
        if failures:
            advice = "All have been closed; mend the env_fns named below."
            raise EnvsFailedError.collect(type(self).__name__, failures, [None] * self.num_envs, advice)
        descriptions = [task.result for task in tasks]
        members = [member for description in descriptions for member in description.members]
        first = descriptions[0]
        found = self._found = [observation_space for observation_space, _ in members]
        check_spaces(type(self).__name__, self.observation_mode, members)
        # Copies: training code writes to spaces (CleanRL sets a dtype), and recovery goes by these.
        public = observation_spaces(self.observation_mode, copy.deepcopy(found))
        self.observation_space, self.single_observation_space = public
        self._single, self._single_action = copy.deepcopy(public[1]), members[0][1]
        if self.shared_memory:
            check_shareable(self._single)
        self.single_action_space = copy.deepcopy(self._single_action)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        layout = BatchLayout.of(self._single, self.num_envs, with_observations=self.shared_memory is not False)
        self._places = self._arena.places(layout)
        self._laid_out = layout.tree is not None
        self._loose: list[Any] = [None] * self.num_envs

    # --- reset ------------------------------------------------------------------------------------

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every env, or in those of ``options["reset_mask"]``.

        Args:
            seed: ``None``, one integer (env ``i`` gets ``seed + i``), or one for each env.
            options: The envs' own; and ``reset_mask``, a bool array: the others stay as they are.

        Returns:
            The batch of observations, and infos as gymnasium merges them.

        Raises:
            EnvsFailedError: Some envs raised; the others are reset.
        """
        self._begin_reset(seed, options, whole=True)
        return self.reset_wait()

    def reset_async(self, seed: Any = None, options: dict[str, Any] | None = None) -> None:
        """Send the resets; collect them with :meth:`reset_wait`."""
        self._begin_reset(seed, options, whole=False)

    def _begin_reset(self, seed: Any, options: dict[str, Any] | None, *, whole: bool) -> None:
        self._refuse_pending("reset" if whole else "reset_async")
        seeds = self._checked_seeds(seed)
        check_options(options)
        options = None if options is None else dict(options)
        mask = self._checked_mask(options)
        self._mask = mask
        self._rounds.begin(
            "reset",
            [
                Reset(
                    tuple(seeds[rows]),
                    GroupOptions(None if mask is None else tuple(mask[rows].tolist()), options),
                    anchor=False,
                )
                for rows in self._slices
            ],
            whole=whole,
        )

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Collect what the resets returned. Raises WaitTimeout after ``timeout`` seconds; wait again then."""
        current = self._collect("reset", timeout)
        self._note_episodes(current)
        try:
            infos = self._merged(current, "reset")
            observations = self._observations(current)
        except Exception as error:
            if self._is_outcome(error, current, "reset"):
                self._rounds.end()
            raise
        self._rounds.end()
        return observations, infos

    def _note_episodes(self, current: Round) -> None:
        """Which envs have an episode after this round."""
        if current.command == "reset":
            self._begun |= True if self._mask is None else self._mask
            self._met |= self._begun
        elif current.command == STEP and self.autoreset_mode is AutoresetMode.DISABLED:
            place = self._place()
            self._begun &= ~(place.terminations | place.truncations)
        if current.command != "call" and self.autoreset_mode is AutoresetMode.DISABLED:
            self._begun[list(self._failures_of(current))] = False

    def _note_completed(self, completed: Round) -> None:
        self._note_episodes(completed)
        if not self._laid_out and completed.command != "call":
            self._keep_loose(completed)

    def _failures_of(self, current: Round) -> dict[int, BaseException]:
        failures: dict[int, BaseException] = {}
        for index, (rows, answer) in enumerate(zip(self._slices, current.answers, strict=True)):
            if index in current.failures:
                failures |= dict.fromkeys(range(rows.start, rows.stop), current.failures[index])
            else:
                failures |= {rows.start + slot: error for slot, error in answer[-1].get("failures", {}).items()}
        return failures

    def _checked_seeds(self, seed: Any) -> list[int | None]:
        if seed is None or not hasattr(seed, "__len__") or getattr(seed, "shape", None) == ():
            first = HostedEnv._checked_seed(seed)
            return [None if first is None else first + index for index in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise UsageError(
                f"reset(): If seeds are passed as a list the length must match num_envs={self.num_envs} but got "
                f"length={len(seed)}."
            )
        return [HostedEnv._checked_seed(one) for one in seed]

    def _checked_mask(self, options: dict[str, Any] | None) -> np.ndarray[Any, Any] | None:
        """Taken out of the options, as gymnasium wants it."""
        if options is None or "reset_mask" not in options:
            return None
        mask: Any = options.pop("reset_mask")
        check_mask(mask, self.num_envs)
        unseen = np.flatnonzero(~(mask | self._met)).tolist()
        if unseen and not self._laid_out:
            raise ResetNeededError(
                f"reset(): envs {unseen} have no observation yet; reset all envs once, without reset_mask."
            )
        return np.array(mask)

    # --- step -------------------------------------------------------------------------------------

    def step(self, actions: Any) -> Batch:
        """Take one step in every env.

        A step interrupted by Ctrl-C is completed by the next call, whatever its actions; ``infos["multienv"]`` then
        says ``resumed``.

        Args:
            actions: A batch of the action space.

        Returns:
            Observations, rewards (float64), terminations, truncations, infos. With ``copy=False`` the observations are
            views that the next step but one overwrites. An episode that could not be brought back after a loss ends
            with ``truncated``, and ``infos["multienv"]`` says why.

        Raises:
            ActionError: The actions do not fit; nothing was sent.
            EnvsFailedError: Some envs failed; ``results`` has what the others returned, and their episodes go on.
        """
        unfinished = self._rounds.current
        if unfinished is not None and unfinished.command == STEP and unfinished.interrupted:
            refuse_in_hook(self._groups, "step()")
            unfinished.disturbed = True  # to be completed, whichever line it has come to
        else:
            self._begin_step(actions, whole=True)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Send the steps; collect them with :meth:`step_wait`."""
        self._begin_step(actions, whole=False)

    def _begin_step(self, actions: Any, *, whole: bool) -> None:
        if self._rounds.current is not None or self.closed:
            self._refuse_pending("step" if whole else "step_async")
        parts = self._parts(actions)
        if self.autoreset_mode is AutoresetMode.DISABLED and not self._begun.all():
            ended = np.flatnonzero(~self._begun).tolist()
            raise ResetNeededError(
                f"step(): there is no episode in envs {ended}. reset(options={{'reset_mask': mask}}) begins one. "
                "Nothing was sent."
            )
        if not self._fresh and not self._all_begun():
            # As gymnasium has it: the step is pending, and what is wrong with it is told when it is collected.
            self._rounds.refuse(STEP, ResetNeededError("step(): there is no episode yet. Call reset() first."))
            return
        self._rounds.begin(STEP, parts, whole=whole)

    def step_wait(self, timeout: float | None = None) -> Batch:
        """Collect what the steps returned. Raises WaitTimeout after ``timeout`` seconds; wait again then."""
        current = self._collect(STEP, timeout)
        if self.autoreset_mode is AutoresetMode.DISABLED:
            self._note_episodes(current)
        infos = None
        try:
            if not current.failures and not current.disturbed and type(self)._add_info is VectorEnv._add_info:
                infos = self._merging.merged([answer[4] for answer in current.answers])
            if infos is None:
                infos = self._merged(current, "step")
            observations = self._observations(current)
        except Exception as error:
            if self._is_outcome(error, current, "step"):
                self._rounds.end()
            raise
        # Not before: the traceback of what that raises would keep the memory mapped.
        place = self._place()
        rewards, terminations = place.rewards.copy(), place.terminations.copy()
        truncations = place.truncations.copy()
        self._rounds.end()
        return observations, rewards, terminations, truncations, infos

    def _is_outcome(self, error: Exception, current: Round, command: str) -> bool:
        """Whether this is what the round comes to: failures of envs, or infos that gymnasium cannot merge, say.

        The round ends with it no sooner than it is raised: what is interrupted till then is told the next time.
        """
        if isinstance(error, MultienvError):
            return True
        try:
            self._merged(current, command)
            self._observations(current)
        except Exception as again:
            return type(again) is type(error)
        return False  # it was a signal handler's

    def _all_begun(self) -> bool:
        self._fresh = bool(self._begun.all())
        return self._fresh

    def _parts(self, actions: Any) -> list[Any]:
        """The actions of each group."""
        if type(actions) is np.ndarray and actions.shape == self.action_space.shape and not actions.dtype.hasobject:
            return [actions[rows] for rows in self._slices]
        try:
            whole = normal_batch(self._single_action, actions, self.num_envs)
        except ActionError:
            raise
        except Exception as error:
            raise ActionError(f"step(): {shown(actions)} is no batch of {self.action_space}: {error}") from error
        return [sliced(self._single_action, whole, rows) for rows in self._slices]

    # --- what came back ---------------------------------------------------------------------------

    def _place(self) -> Place:
        """Where the rows of the last request lie; the groups count in step."""
        places = self._places
        if places is None:  # closed meanwhile, by a signal handler or another thread
            self._refuse_closed("wait")
        return places[self._groups[0].seq & 1]

    def _observations(self, current: Round) -> Any:
        if self._laid_out:
            observations = self._place().observations
            return copied(observations) if self.copy else observations
        self._keep_loose(current)
        space = self._single
        loose = [blank(space) if one is None else one for one in self._loose]
        empty: Any = create_empty_array(space, self.num_envs)
        return concatenate(space, loose, empty)

    def _keep_loose(self, current: Round) -> None:
        """The observations that came in the replies."""
        for rows, answer in zip(self._slices, current.answers, strict=True):
            if answer is not None:
                for index, observation in enumerate(answer[0]):
                    if observation is not None or self._loose[rows.start + index] is None:
                        self._loose[rows.start + index] = observation

    def _merged(self, current: Round, command: str) -> dict[str, Any]:
        """The infos as gymnasium merges them; or raise what has failed."""
        if isinstance(current, Refused):
            raise current.error
        infos: dict[str, Any] = {}
        failures = self._failures_of(current)
        if failures:
            raise self._error_of(command, failures, current)
        for rows, answer in zip(self._slices, current.answers, strict=True):
            for slot, info in answer[-1].get("infos", ()):
                self._add_one(infos, info, rows.start + slot)
        if current.disturbed and command == STEP:
            for index in range(self.num_envs):
                self._add_info(infos, {"multienv": {"resumed": True}}, index)
        return infos

    def _add_one(self, infos: dict[str, Any], info: dict[str, Any], index: int) -> None:
        if "final_obs" in info:  # in gymnasium's order: the old episode's first
            final: dict[str, Any] = {key: info[key] for key in ("final_obs", "final_info") if key in info}
            self._add_info(infos, final, index)
            info = {key: value for key, value in info.items() if key not in final}
        self._add_info(infos, info, index)

    def _error_of(self, command: str, failures: dict[int, BaseException], current: Round) -> MultienvError:
        results = self._results_but(failures, command, current)
        if current.failures:  # of whole processes: refused, or given up
            advice = "The episodes of the others go on; what is to be done about these is said below, or reset()."
        elif self.autoreset_mode is AutoresetMode.DISABLED:
            advice = "The episodes of the others go on; reset the failed ones by options['reset_mask']."
        else:
            advice = "The episodes of the others go on; the next step() begins new ones where they failed, or reset()."
        return EnvsFailedError.collect(f"{command}()", failures, results, advice)

    def _results_but(self, failures: dict[int, BaseException], command: str, current: Round) -> list[Any]:
        """What the envs returned that have not failed."""
        place = self._place()
        results: list[Any] = [None] * self.num_envs
        if not self._laid_out:
            self._keep_loose(current)
        for index in set(range(self.num_envs)).difference(failures):
            observation = row_of(place.observations, index) if self._laid_out else self._loose[index]
            flags = place.rewards[index], bool(place.terminations[index]), bool(place.truncations[index])
            results[index] = (observation, *flags) if command == STEP else observation
        return results

    # --- anything else ----------------------------------------------------------------------------

    def __del__(self) -> None:
        """Nothing, where gymnasium before 1.2 closes, also what could not be built: workers end by themselves."""

    def statistics(self) -> list[Statistics]:
        """Of each worker, as a frozen record; its steps are those of all its envs together."""
        return [group.statistics() for group in self._groups]

    def close_extras(self, timeout: float | None = None, terminate: bool = False, **kwargs: Any) -> None:
        """End the workers: by asking, and after ``Deadlines.close`` seconds by force; again does nothing.

        Args:
            timeout: Seconds to wait for them, if that is less.
            terminate: Do not ask.
            **kwargs: Ignored, as gymnasium does.

        Warns:
            UserWarning: An answer is pending that nobody has collected. All is closed nevertheless.
        """
        patience = 0.0 if terminate else timeout
        groups = [*self._groups, *self._retired]
        for group in groups:
            if group.inside:  # perhaps by this very thread, below a signal handler: another could wait for it in vain
                group.close(patience)
        close_at_once([partial(group.close, patience) for group in groups], here=descriptors.is_held_here())
        self._rounds.close()
        self._places = None
        self._arena.close()
        current = self._rounds.current
        if current is not None and not current.interrupted:
            self.closed = True  # the warning may be made an error
            logger.warn(f"Calling `close` while waiting for a pending call to `{current.command}` to complete.")
