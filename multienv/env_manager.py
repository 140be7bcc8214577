"""Several envs by their ids: what the managers have in common, which is all but how they are stepped."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from multienv.config import RestartPolicy
from multienv.env_lane import Crew, Lane
from multienv.env_manager_arguments import checked_id, checked_params, checked_seeds, compare_spaces, reference_of
from multienv.env_manager_calls import EnvCalls, surfacing
from multienv.env_manager_config import EnvManagerConfig
from multienv.env_manager_loop import Loop
from multienv.env_states import EnvReference, EnvState
from multienv.episode_video import EpisodeVideo
from multienv.errors import (
    CallPendingError,
    ClosedError,
    MultienvError,
    ResetNeededError,
    UsageError,
)
from multienv.events import Hook, Statistics, checked_hooks
from multienv.hosted_env import EnvFn
from multienv.subprocess_env import SubprocessEnv, close_all, initialize_all

if TYPE_CHECKING:
    from typing_extensions import Self

ResetParam = Mapping[int, Mapping[str, Any] | None]

_NO_REASON_TO_STEP = {
    EnvState.DONE: "has run all its episodes; reset() begins anew",
    EnvState.ERROR: "has failed; reset({{{0}: None}}) begins an episode",
    EnvState.NEED_RESET: "has ended its episode; call reset({{{0}: None}})",
    EnvState.RESET: "is being reset; ready_obs says when it is ready",
}


class EnvManager(EnvCalls):
    """Runs each env in a process of its own, resets it when its episode has ended, and counts its episodes.

    Args:
        env_fn: A list of functions that build the envs; the place in it is the env's id.
        cfg: An :class:`~multienv.env_manager_config.EnvManagerConfig`, or a dict of its options.
        restart: What happens when a process is lost.
        hooks: Called with each :class:`~multienv.events.Loss` and :class:`~multienv.events.Recovery`, by whichever
            thread brings the env back.
        native_threads: As for :class:`SubprocessEnv`.
        reports: As for :class:`SubprocessEnv`.
        **options: Options of the config, by name.

    One thread at a time may call it; ``close()`` may be called by any, and by a signal handler.

    Raises:
        UsageError: No ``env_fn``, or an option that is not known or makes no sense.
    """

    config: EnvManagerConfig
    _defaults = EnvManagerConfig()
    _way_to_collect = "step({})"

    def __init__(
        self,
        env_fn: Iterable[EnvFn],
        cfg: EnvManagerConfig | Mapping[str, Any] | None = None,
        *,
        restart: RestartPolicy = RestartPolicy(),  # noqa: B008 - frozen
        hooks: Sequence[Hook] = (),
        native_threads: int | None = 1,
        reports: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        """Start nothing yet."""
        if callable(env_fn):
            raise UsageError("env_fn is a single function; give a list of them, one for each env.")
        if not isinstance(env_fn, Iterable):
            raise UsageError(f"env_fn is {env_fn!r:.100}; give a list of functions, one for each env.")
        self._env_fns = list(env_fn)
        if not self._env_fns:
            raise UsageError("env_fn is empty; give one function for each env.")
        self.config = EnvManagerConfig.of(cfg, options, self._defaults)
        self._options = {
            "restart": restart,
            "hooks": checked_hooks(hooks),
            "native_threads": native_threads,
            "reports": reports,
            "deadlines": self.config.deadlines,
            "context": self.config.context,
            "shared_memory": self.config.shared_memory,
        }
        super().__init__()
        self._launching: list[SubprocessEnv] | None = None
        self._reference: EnvReference | None = None
        self._seeds: dict[int, int | None] = {}
        self._dynamic_seed = True
        self._videos: list[EpisodeVideo] = []

    @classmethod
    def default_config(cls) -> EnvManagerConfig:
        """The options of this manager, as they are unless given."""
        return cls._defaults

    # --- begin and end ----------------------------------------------------------------------------

    def launch(self, reset_param: ResetParam | None = None) -> None:
        """Start the processes, build the envs and reset them all.

        Args:
            reset_param: As for :meth:`reset`; envs it does not name are reset without parameters.

        Raises:
            UsageError: It is launched already.
            EnvsFailedError: Some envs could not be built or reset; all are closed again.
            ClosedError: Another thread, or a signal handler, has called ``close()`` meanwhile.
        """
        if self._loop is not None:
            if not self._loop.closed:
                raise UsageError("launch(): the manager is launched already. Call close() first.")
            self.close()  # it was interrupted
        params = checked_params(reset_param, self.env_num)
        envs = self._launching = [
            SubprocessEnv(env_fn, env_index=index, **self._options) for index, env_fn in enumerate(self._env_fns)
        ]
        loop: Loop | None = None
        try:
            initialize_all(envs)
            compare_spaces(envs)
            self._reference = self._reference or reference_of(envs[0])
            self._seed_actions()
            self._check_videos()
            crew = Crew(len(envs))
            videos: Sequence[EpisodeVideo | None] = self._videos or [None] * len(envs)
            lanes = [
                Lane(index, env, self.config, crew, self._seed_of, video)
                for index, (env, video) in enumerate(zip(envs, videos, strict=True))
            ]
            loop = self._loop = Loop(lanes, crew)
            loop.enter("launch()")
            self._reset(loop, {**dict.fromkeys(range(self.env_num)), **params})
            loop.leave()
        except BaseException as error:
            closed = self._launching is not envs
            if loop is None:
                close_all(envs)
            else:
                loop.close()
                self._loop = None
            if closed and isinstance(error, MultienvError):
                raise ClosedError("launch(): the manager was closed meanwhile. Call launch() again.") from error
            raise
        finally:
            self._launching = None

    def close(self) -> None:
        """End all processes, side by side: it takes no longer than the slowest. Again does nothing.

        ``launch()`` can be called again.
        """
        launching, self._launching = self._launching, None
        if launching is not None:
            close_all(launching)
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def __enter__(self) -> Self:
        """Launch, unless that is done."""
        if self.closed:
            self.launch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    # --- reset ------------------------------------------------------------------------------------

    def reset(self, reset_param: ResetParam | None = None) -> None:
        """Begin episodes, and wait until they have begun: ``ready_obs`` has the observations.

        What these envs were doing is given up; an env that was done starts counting anew.

        Args:
            reset_param: Env id → ``{"seed": …, "options": …}``, either of which may be left out, or ``None``. These
                envs are reset, the others go on; the parameters are remembered for the automatic resets, ``None``
                clears them. Without it all envs are reset, with what is remembered.

        Raises:
            EnvsFailedError: Some could not be reset; the others are.
        """
        params = checked_params(reset_param, self.env_num)
        loop = self._entered("reset()")
        try:
            self._reset(loop, params if reset_param is not None else None)
        except MultienvError:
            loop.leave()
            raise
        loop.leave()

    def _reset(self, loop: Loop, params: Mapping[int, dict[str, Any] | None] | None) -> None:
        for index, param in (params or {}).items():
            loop.lanes[index].param = param or {}
        loop.reset(loop.lanes if params is None else [loop.lanes[index] for index in params])

    def seed(self, seed: int | Sequence[int] | Mapping[int, int], dynamic_seed: bool | None = None) -> None:
        """Seed the envs, from their next reset on; before :meth:`launch` or after.

        Args:
            seed: One for all (env ``i`` gets ``seed + i``), a list with one for each, or env id → seed.
            dynamic_seed: Unless false, each further episode of an env has a seed of its own, which depends on the
                given one and the number of the episode alone, whatever happens to processes; if false, all have the
                same. A seed in ``reset_param`` comes first.

        Raises:
            UsageError: A wrong number of seeds, an unknown id, or no integer.
        """
        given = checked_seeds(seed, self.env_num)
        self._seeds = {**self._seeds, **given}
        self._dynamic_seed = dynamic_seed is None or bool(dynamic_seed)
        for lane in self._loop.lanes if self._loop is not None else []:
            if lane.index in given:
                lane.now = lane.now._replace(resets=0)
        self._seed_actions()

    def _seed_of(self, index: int, episode: int) -> int | None:
        seed = self._seeds.get(index)
        if seed is None or episode == 0 or not self._dynamic_seed:
            return seed
        return int(np.random.SeedSequence(seed, spawn_key=(episode,)).generate_state(1)[0] >> 1)

    def _seed_actions(self) -> None:
        seed = next((seed for _, seed in sorted(self._seeds.items()) if seed is not None), None)
        if self._reference is not None and seed is not None:
            self._reference.action_space.seed(seed)

    def enable_save_replay(self, replay_path: str | Sequence[str]) -> None:
        """Have every episode filmed: ``env-<id>-episode-<number>.mp4`` in this folder, or each env in its own.

        To be called before :meth:`launch`; the envs need ``render_mode="rgb_array"``. Losses leave no gap in a film.

        Raises:
            UsageError: The manager is launched, a wrong number of paths, or moviepy is not installed.
        """
        if not self.closed:
            raise UsageError("enable_save_replay(): call it before launch(), or close() first.")
        paths = [replay_path] * self.env_num if isinstance(replay_path, str) else list(replay_path)
        if len(paths) != self.env_num:
            raise UsageError(f"enable_save_replay(): {len(paths)} paths for {self.env_num} envs; give one for each.")
        self._videos = [EpisodeVideo(str(path), index) for index, path in enumerate(paths)]

    # --- how they stand ---------------------------------------------------------------------------

    @property
    def env_num(self) -> int:
        """How many envs there are."""
        return len(self._env_fns)

    @property
    @surfacing
    def env_ref(self) -> EnvReference:
        """Spaces, metadata, spec and render mode; before the first launch a process is asked for them."""
        if self._reference is None:
            with SubprocessEnv(self._env_fns[0], **{**self._options, "hooks": ()}) as env:
                self._reference = reference_of(env)
            self._seed_actions()
        return self._reference

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        """Of a single env."""
        return self.env_ref.observation_space

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        """Of a single env."""
        return self.env_ref.action_space

    @property
    def reward_space(self) -> gymnasium.Space[Any]:
        """Of a single env."""
        return self.env_ref.reward_space

    @property
    def env_states(self) -> dict[int, EnvState]:
        """Where each env stands, as far as it has been looked at."""
        loop = self._loop
        if loop is None or loop.closed:
            return dict.fromkeys(range(self.env_num), EnvState.VOID)
        return {lane.index: lane.now.state for lane in loop.lanes}

    @property
    def active_env(self) -> list[int]:
        """The ids of the envs in an episode, whether they are being stepped or not."""
        return [index for index, state in self.env_states.items() if state == EnvState.RUN]

    @property
    def ready_env(self) -> list[int]:
        """The ids of the envs that can be stepped now; does not wait."""
        loop = self._entered("ready_env")
        loop.turn(0.0)
        ready = [lane.index for lane in loop.ready()]
        loop.leave()
        return ready

    @property
    def ready_obs_id(self) -> list[int]:
        """As :attr:`ready_env`."""
        return self.ready_env

    @property
    def ready_info(self) -> dict[int, dict[str, Any]]:
        """What came with the observations of the envs that can be stepped, from their resets too."""
        return {index: self._lanes[index].now.info for index in self.ready_env}

    @property
    @surfacing
    def ready_imgs(self) -> dict[int, Any]:
        """What the envs render that can be stepped now."""
        return self._each("ready_imgs", {index: self._lanes[index].env.render for index in self.ready_env})

    @property
    def done(self) -> bool:
        """Whether each env has run ``episode_num`` episodes."""
        return self._loop is not None and self._loop.done()

    def env_state_done(self, env_id: int) -> bool:
        """Whether this env has run ``episode_num`` episodes."""
        return self.env_states[checked_id("env_state_done()", env_id, self.env_num)] == EnvState.DONE

    def statistics(self) -> list[Statistics]:
        """Of each env; see :meth:`SubprocessEnv.statistics`."""
        return [lane.env.statistics() for lane in self._lanes]

    # --- helpers ----------------------------------------------------------------------------------

    def _take_steps(self, actions: Mapping[Any, Any], loop: Loop) -> None:
        """Send these steps, once all of them may be."""
        chosen: dict[int, Any] = {}
        ready = loop.ready()
        for env_id, action in actions.items():
            index = checked_id("step()", env_id, self.env_num)
            lane = loop.lanes[index]
            state = lane.now.state
            if lane.is_stepping or (lane.is_idle and lane not in ready):
                raise CallPendingError(
                    f"step(): env {index} is stepping; {self._way_to_collect} collects it. Nothing was sent."
                )
            if state != EnvState.RUN:
                reason = _NO_REASON_TO_STEP[state].format(index)
                raise ResetNeededError(f"step(): env {index} {reason}. Nothing was sent.")
            chosen[index] = action
        if not (chosen or loop.is_busy()):
            states = {index: state.name for index, state in self.env_states.items()}
            raise UsageError(f"step(): no action, and nothing to wait for: {states}. Step some envs, or reset them.")
        for index, action in chosen.items():
            loop.lanes[index].ask_step(action)

    def _check_videos(self) -> None:
        assert self._reference is not None
        if self._videos and self._reference.render_mode != "rgb_array":
            mode = self._reference.render_mode
            raise UsageError(f'enable_save_replay(): the envs have render_mode={mode!r}; make them with "rgb_array".')
        for video in self._videos:
            video.fps = self._reference.metadata.get("render_fps", 30)
