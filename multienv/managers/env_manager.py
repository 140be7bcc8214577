"""Several envs by their ids: each env goes on when it is ready, and no env waits for the slowest."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from typing_extensions import Self

from multienv._engine.building.building import EnvFn, WorkerOptions, Workers, listed_env_fns
from multienv._engine.wire.messages import Call, GetAttribute, Message, Method, SetAttribute
from multienv.config import RayOptions, checked_seed, integer, takes_options_of
from multienv.envs.arguments import call_message, checked_seeds, refuse_copy
from multienv.envs.subprocess_env import (
    SubprocessEnv,
    SupervisedEnv,
    built_envs,
    check_same_spaces,
    close_all,
    supervisor_of,
)
from multienv.errors import (
    CallPendingError,
    ClosedError,
    MultienvError,
    ResetNeededError,
    UsageError,
)
from multienv.events import Statistics
from multienv.managers.config import EnvManagerConfig, EnvReference, EnvState, Timestep
from multienv.managers.scheduler import Scheduler

ResetParam = Mapping[int, Mapping[str, Any] | None]

_NO_REASON_TO_STEP = {
    EnvState.DONE: "has run all its episodes; reset() begins anew",
    EnvState.ERROR: "has failed; reset({{{0}: None}}) begins an episode",
    EnvState.NEED_RESET: "has ended its episode; call reset({{{0}: None}})",
    EnvState.RESET: "is being reset; ready_obs says when it is ready",
}


class EnvManager:
    """Base class of the env managers: runs each env in its own process, resets it, and counts its episodes.

    See :class:`AsyncSubprocessEnvManager` for the arguments.
    """

    config: EnvManagerConfig
    _defaults = EnvManagerConfig()
    _waits_for_all = False
    _way_to_collect = "step({})"

    @takes_options_of(Workers.__init__, EnvManagerConfig, but=["deadlines"])
    def __init__(
        self,
        env_fn: Iterable[EnvFn],
        cfg: EnvManagerConfig | Mapping[str, Any] | None = None,
        *,
        backend: Literal["subprocess", "ray"] = "subprocess",
        ray: RayOptions | None = None,
        **options: Any,
    ) -> None:
        if backend not in ("subprocess", "ray") or (ray is not None and backend != "ray"):
            asked = f"backend is {backend!r:.100}{'' if ray is None else ' and ray is given'}"
            raise UsageError(f"{asked}; choose 'subprocess', or 'ray' with ray=RayOptions(...).")
        self._backend, self._ray = backend, ray
        self._env_fns = listed_env_fns(type(self).__name__, env_fn)
        of_workers = WorkerOptions.__annotations__.keys() - {"deadlines", "context"}  # these follow from the config
        self._options: Any = {name: options.pop(name) for name in list(options) if name in of_workers}
        self.config = EnvManagerConfig.of(cfg, options, self._defaults)
        self._options |= {"deadlines": self.config.deadlines, "context": self.config.context}
        self._scheduler: Scheduler | None = None
        self._envs: list[SupervisedEnv] = []
        self._reference: EnvReference | None = None
        self._seeds: dict[int, int] = {}
        self._dynamic_seed = True

    @classmethod
    def default_config(cls) -> EnvManagerConfig:
        """Return the default options of this manager."""
        return cls._defaults

    # --- begin and end ----------------------------------------------------------------------------

    def launch(self, reset_param: ResetParam | None = None) -> None:
        """Start the processes, build the envs and reset them all.

        Args:
            reset_param: As for :meth:`reset`; envs that are not in it are reset without parameters.

        Raises:
            UsageError: The manager is launched already.
            EnvsFailedError: Some envs could not be built or reset; all are closed again.
            ClosedError: Another thread, or a signal handler, has called ``close()`` meanwhile.
        """
        if not self.closed:
            raise UsageError("launch(): the manager is launched already. Call close() first.")
        params = _checked_params(reset_param, self.env_num)
        self.close()  # a launch() that was interrupted
        envs = self._envs = self._make_envs()
        try:
            built_envs("launch()", envs)
            check_same_spaces("launch()", envs)
            self._reference = self._reference or _reference_of(envs[0])
            self._seed_actions()
            supervisors = [supervisor for supervisor in map(supervisor_of, envs) if supervisor is not None]
            scheduler = self._scheduler = Scheduler(supervisors, self.config, self._seed_of)
            self._reset(scheduler, {**dict.fromkeys(range(self.env_num)), **params})
        except BaseException as error:
            closed = self._envs is not envs
            self.close()
            if closed and isinstance(error, MultienvError):
                raise ClosedError("launch(): the manager was closed meanwhile. Call launch() again.") from error
            raise

    def _make_envs(self) -> list[SupervisedEnv]:
        """Return the envs, not started."""
        if self._backend == "ray":
            # By a string: it lies in a room above, which few programs enter.
            make: Callable[..., list[SupervisedEnv]] = importlib.import_module("multienv.envs.ray_env").unbuilt_envs
            return make(self._env_fns, self._ray, **self._options)
        return [SubprocessEnv(env_fn, env_index=index, **self._options) for index, env_fn in enumerate(self._env_fns)]

    def close(self) -> None:
        """End all processes in parallel. A second call does nothing.

        You can call ``launch()`` again afterwards.
        """
        scheduler, envs, self._envs = self._scheduler, self._envs, []
        if scheduler is not None:
            scheduler.close()
        else:  # launch() is building the envs
            close_all(envs)
        self._scheduler = None

    @property
    def closed(self) -> bool:
        """Return whether the manager is not launched yet, or closed again."""
        return self._scheduler is None or self._scheduler.closed

    __reduce_ex__ = refuse_copy

    def __enter__(self) -> Self:
        if self.closed:
            self.launch()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- reset ------------------------------------------------------------------------------------

    def reset(self, reset_param: ResetParam | None = None) -> None:
        """Begin episodes and wait until they have begun; ``ready_obs`` then has the observations.

        Steps in progress of these envs are dropped. An env that was done counts its episodes anew.

        Args:
            reset_param: Env id → ``{"seed": …, "options": …}`` (either key may be missing), or → ``None``. Only these
                envs are reset; the others go on. The manager remembers the parameters for its automatic resets;
                ``None`` clears them. Without ``reset_param``, all envs are reset with the remembered parameters.

        Raises:
            EnvsFailedError: Some envs could not be reset; the others are.
        """
        scheduler = self._launched("reset()")
        params = _checked_params(reset_param, self.env_num)
        self._reset(scheduler, params if reset_param is not None else None)

    def _reset(self, scheduler: Scheduler, params: Mapping[int, dict[str, Any] | None] | None) -> None:
        for index, param in (params or {}).items():
            scheduler.params[index] = param or {}
        scheduler.reset(range(self.env_num) if params is None else list(params))

    def seed(self, seed: int | Sequence[int] | Mapping[int, int], dynamic_seed: bool | None = None) -> None:
        """Seed the envs from their next reset on; call it before :meth:`launch` or after.

        Args:
            seed: One integer for all (env ``i`` gets ``seed + i``), a list with one for each, or env id → seed.
            dynamic_seed: By default each further episode of an env has its own seed. It depends only on the given seed
                and the number of the episode, whatever happens to processes. If false, all episodes of an env have the
                same seed. A seed in ``reset_param`` has priority.

        Raises:
            UsageError: The number of seeds is wrong, an id is unknown, or a seed is not an integer.
        """
        given = _checked_seeds(seed, self.env_num)
        self._seeds = {**self._seeds, **given}
        self._dynamic_seed = dynamic_seed is None or bool(dynamic_seed)
        if self._scheduler is not None:
            self._scheduler.update_records(given, resets=0)  # on that number depends the seed of an episode
        self._seed_actions()

    def _seed_of(self, index: int, episode: int) -> int | None:
        seed = self._seeds.get(index)
        if seed is None or episode == 0 or not self._dynamic_seed:
            return seed
        return int(np.random.SeedSequence(seed, spawn_key=(episode,)).generate_state(1)[0] >> 1)

    def _seed_actions(self) -> None:
        if self._reference is not None and self._seeds:
            self._reference.action_space.seed(self._seeds[min(self._seeds)])

    # --- step -------------------------------------------------------------------------------------

    @property
    def ready_obs(self) -> dict[int, Any]:
        """Return the observations of the envs that can be stepped: env id → observation.

        If no env is ready and one is being reset, it waits. The dict is empty if all envs are done, wait for a reset by
        you, or are being stepped (``step({})`` collects those).

        Raises:
            EnvsFailedError: Some envs could not be reset in the background; ``results`` has the other observations.
        """
        scheduler = self._launched("ready_obs")
        scheduler.until_some_are_ready()
        observations = {index: scheduler.observation(index) for index in scheduler.ready()}
        scheduler.raise_failures("ready_obs", observations)
        return observations

    def random_action(self) -> dict[int, Any]:
        """Sample an action for each env that can be stepped now."""
        return {index: self.action_space.sample() for index in self.ready_env}

    def step(self, actions: Mapping[int, Any]) -> dict[int, Timestep]:
        """Step these envs: env id → action.

        If Ctrl-C interrupts a step, either all actions were sent or none; ``ready_env`` tells which. The next step, for
        instance ``step({})``, returns the timesteps.

        Returns:
            Env id → :class:`~multienv.Timestep`, with the values that the env returned. The timestep that ends an
            episode has the last observation; ``ready_obs`` will have the first one of the next episode. ``truncated``
            comes from the env, or from the manager if the episode could not be recovered after a loss. Then
            ``info["abnormal"]`` is true, the reward is 0.0, and ``info["multienv"]`` has the reason.

        Raises:
            UsageError: An id does not exist, or an env cannot be stepped now; nothing was sent.
            EnvsFailedError: Some envs raised, or could not be reset in the background; ``results`` has the timesteps of
                the others, by id.
        """
        scheduler = self._launched("step()")
        self._send_steps(scheduler, actions)
        self._wait(scheduler, len(actions))
        return scheduler.deliver_timesteps("step()", dict)  # type: ignore[no-any-return]

    def _send_steps(self, scheduler: Scheduler, actions: Mapping[Any, Any]) -> None:
        """Send these steps, all of them or none."""
        scheduler.finish_calls()
        chosen: dict[int, Any] = {}
        for env_id, action in actions.items():
            index = _checked_id("step()", env_id, self.env_num)
            record = scheduler.records[index]
            if scheduler.asked(index) == "step" or record.timestep is not None:
                raise CallPendingError(
                    f"step(): env {index} is stepping; {self._way_to_collect} collects it. Nothing was sent."
                )
            if record.state is not EnvState.RUN:
                reason = _NO_REASON_TO_STEP[record.state].format(index)
                raise ResetNeededError(f"step(): env {index} {reason}. Nothing was sent.")
            chosen[index] = action
        if not (chosen or scheduler.is_busy()):
            states = {index: state.name for index, state in self.env_states.items()}
            raise UsageError(f"step(): no action, and nothing to wait for: {states}. Step some envs, or reset them.")
        scheduler.step(chosen)

    def _wait(self, scheduler: Scheduler, asked: int) -> None:
        """Wait for the timesteps that step() is to return; ``asked``: how many steps this call has sent."""
        if not (scheduler.stepping() or scheduler.undelivered()):
            scheduler.until_some_are_ready()
        elif self._waits_for_all:
            scheduler.until_stepped(math.inf, None)
        else:
            scheduler.until_stepped(min(self.config.wait_num, asked or math.inf), self.config.step_wait_timeout)

    # --- the state of the envs --------------------------------------------------------------------

    @property
    def env_num(self) -> int:
        """Return the number of envs."""
        return len(self._env_fns)

    @property
    def env_ref(self) -> EnvReference:
        """Return spaces, metadata, spec and render mode. Before the first launch it starts a process to read them."""
        if self._reference is None:
            with SubprocessEnv(self._env_fns[0], **{**self._options, "hooks": ()}) as env:
                reference = self._reference = _reference_of(env.initialize())
            self._seed_actions()
            return reference
        return self._reference

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        """Return the observation space of a single env."""
        return self.env_ref.observation_space

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        """Return the action space of a single env."""
        return self.env_ref.action_space

    @property
    def reward_space(self) -> gymnasium.Space[Any]:
        """Return the reward space of a single env."""
        return self.env_ref.reward_space

    @property
    def env_states(self) -> dict[int, EnvState]:
        """Return the state of each env by id, after the answers that the manager has processed so far."""
        scheduler = self._scheduler
        if scheduler is None or scheduler.closed:
            return dict.fromkeys(range(self.env_num), EnvState.VOID)
        return {index: record.state for index, record in enumerate(scheduler.records)}

    @property
    def active_env(self) -> list[int]:
        """Return the ids of the envs in an episode, including those that are being stepped."""
        return [index for index, state in self.env_states.items() if state is EnvState.RUN]

    @property
    def ready_env(self) -> list[int]:
        """Return the ids of the envs that can be stepped now, without waiting."""
        scheduler = self._launched("ready_env")
        scheduler.take_up_answers(0.0)
        return scheduler.ready()

    ready_obs_id = ready_env  # by DI-engine's name

    @property
    def ready_info(self) -> dict[int, dict[str, Any]]:
        """Return the infos of the envs that can be stepped, by id: each from the env's last step or reset."""
        scheduler = self._launched("ready_info")
        scheduler.take_up_answers(0.0)
        return {index: scheduler.records[index].info for index in scheduler.ready()}

    @property
    def ready_imgs(self) -> dict[int, Any]:
        """Render the envs that can be stepped now."""
        ready = self.ready_env
        return self._launched("ready_imgs").call("ready_imgs", "render", dict.fromkeys(ready, Call("render")))

    @property
    def done(self) -> bool:
        """Return whether each env has run ``episode_num`` episodes."""
        return self._scheduler is not None and self._scheduler.done()

    def env_state_done(self, env_id: int) -> bool:
        """Return whether this env has run ``episode_num`` episodes."""
        return self.env_states[_checked_id("env_state_done()", env_id, self.env_num)] is EnvState.DONE

    def statistics(self) -> list[Statistics]:
        """Return the counters of each env; see :meth:`SubprocessEnv.statistics`."""
        return [one.statistics() for one in self._launched("statistics()").supervisors]

    # --- the envs' own ----------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every env, in parallel, after all pending requests are answered; return a list by id.

        Raises:
            EnvsFailedError: Some envs raised; ``results`` has the results of the others.
        """
        return self._call_all(f"call({name!r})", "call", call_message(name, args, kwargs))

    def get_attr(self, name: str) -> list[Any]:
        """Return an attribute of every env, as a list by id. Waits and raises as :meth:`call` does."""
        values = self._call_all(f"get_attr({name!r})", "get_attr", GetAttribute(name))
        if any(isinstance(value, Method) for value in values):
            raise UsageError(f"get_attr({name!r}): it is a method of the envs; call({name!r}) calls it.")
        return values

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute of every env to this value. Waits and raises as :meth:`call` does."""
        self._call_all(f"set_attr({name!r})", "set_attr", SetAttribute(name, (value,)))

    def render(self) -> list[Any]:
        """Render every env and return a list by id. Waits and raises as :meth:`call` does."""
        return self._call_all("render()", "render", Call("render"))

    def _call_all(self, what: str, name: str, message: Message) -> list[Any]:
        return list(self._launched(what).call(what, name, dict.fromkeys(range(self.env_num), message)).values())

    def _launched(self, what: str) -> Scheduler:
        scheduler = self._scheduler
        if scheduler is None or scheduler.closed:
            raise ClosedError(f"{what}: the envs are not running. Call launch() first.")
        return scheduler


class AsyncSubprocessEnvManager(EnvManager):
    """Steps envs by id, and waits for only some of them.

    ::

        with AsyncSubprocessEnvManager(env_fns, episode_num=10) as manager:
            while not manager.done:
                actions = {env_id: policy(obs) for env_id, obs in manager.ready_obs.items()}
                for env_id, timestep in manager.step(actions).items():
                    ...

    Each env runs in its own process. The manager resets an env when its episode has ended, and counts its episodes.

    ``step()`` returns when all timesteps have arrived; or when ``wait_num`` timesteps have arrived,
    ``step_wait_timeout`` seconds have passed and an env is ready to be stepped. If you give fewer actions than
    ``wait_num``, it waits for as many timesteps as actions, of any envs: so the last fast env does not wait for the
    slow ones. A later ``step()`` returns the timesteps that were missing.

    One thread at a time may call the manager. Any thread may call ``close()``, and so may a signal handler.

    Args:
        env_fn: A list of functions that build the envs; the position in the list is the env's id.
        cfg: An :class:`~multienv.EnvManagerConfig`, or a dict of its options.
        restart, hooks, native_threads, worker_env, preload, worker_seed, starts_at_once, reports: See
            :class:`~multienv.WorkerOptions`.
        backend: Where the processes run: ``"subprocess"``, beside the trainer, or ``"ray"``, on the nodes of a cluster.
        ray: With ``backend="ray"``: a :class:`~multienv.RayOptions`; ``None``: the default options.
        **options: Options of :class:`~multienv.EnvManagerConfig`, by name.

    Raises:
        UsageError: The list of functions is empty, or an option is unknown or invalid.
    """


class SyncSubprocessEnvManager(EnvManager):
    """Steps envs by id: ``step()`` takes any of the ready ids and returns the timesteps of exactly these ids.

    With ``reset_inplace=True`` all envs are ready again after each step. ``wait_num`` and ``step_wait_timeout`` belong
    to the asynchronous manager and have no effect here.

    See :class:`~multienv.AsyncSubprocessEnvManager` for the arguments.
    """

    _defaults = EnvManagerConfig(wait_num=math.inf, step_wait_timeout=None)
    _waits_for_all = True


# --- checks of arguments ----------------------------------------------------------------------


def _checked_id(what: str, env_id: Any, env_num: int) -> int:
    """Return the id as an int, numpy's integers too; raise UsageError if no env has it."""
    index = integer(env_id)
    if index is None or not 0 <= index < env_num:
        raise UsageError(f"{what}: {env_id!r:.100} is no env's id; they are 0 to {env_num - 1}.")
    return index


def _checked_params(reset_param: Any, env_num: int) -> dict[int, dict[str, Any] | None]:
    """Return deep copies of the reset parameters by id; raise UsageError for wrong ones."""
    if reset_param is None:
        return {}
    params: dict[int, dict[str, Any] | None] = {}
    for env_id, param in reset_param.items():
        if param is not None and not (isinstance(param, Mapping) and set(param) <= {"seed", "options"}):
            raise UsageError(
                f"reset_param has {param!r:.100} for an env; give None or a dict with 'seed' and 'options'."
            )
        index = _checked_id("reset_param", env_id, env_num)
        params[index] = None if param is None else copy.deepcopy(dict(param))
        checked_seed((param or {}).get("seed"))
    return params


def _checked_seeds(seed: Any, env_num: int) -> dict[int, int]:
    """Return the seeds by id, for all envs or for some; raise UsageError for wrong ones."""
    if isinstance(seed, Mapping):
        given = {_checked_id("seed()", env_id, env_num): checked_seed(one) for env_id, one in seed.items()}
    else:
        given = dict(enumerate(checked_seeds(seed, env_num)))
    if None in given.values():
        raise UsageError(f"seed({seed!r:.100}): give an integer, a list of them, or a dict: env id → seed.")
    return given  # type: ignore[return-value]


def _reference_of(env: SupervisedEnv) -> EnvReference:
    """Return the properties that all envs share, read from this one, which is built."""
    reward_space = env.get_attr("reward_space") if env.has_wrapper_attr("reward_space") else None
    return EnvReference(
        env.observation_space,
        copy.deepcopy(env.action_space),
        reward_space if reward_space is not None else gymnasium.spaces.Box(-np.inf, np.inf, (), np.float64),
        dict(env.metadata or {}),
        env.spec,
        env.render_mode,
    )
