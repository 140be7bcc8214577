"""A parallel env of PettingZoo in a process that may die at any moment."""

from __future__ import annotations

import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import gymnasium
import numpy as np
from gymnasium import spaces

from multienv.config import takes_options_of
from multienv.envs.building import WorkerOptions, check_env_fn
from multienv.envs.calls import call_message, refuse_copy
from multienv.envs.subprocess_env import SubprocessEnv, calls_of
from multienv.events import Statistics
from multienv.worker.failures import pickled

try:
    from pettingzoo import AECEnv, ParallelEnv
except ImportError as missing:
    # Not "multienv[pettingzoo]" alone: on the package index that name belongs to another project.
    raise ImportError(
        f'multienv.adapters.pettingzoo needs {missing.name}: pip install -e ".[pettingzoo]" in a checkout of multienv.',
        name=missing.name,
    ) from None

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

# What an env may have, and has from its construction on.
_ATTRIBUTES = ("metadata", "possible_agents", "observation_spaces", "action_spaces", "state_space", "render_mode")
_OWN_METHODS = frozenset(("reset", "step", "render", "close"))

# Observations, rewards, terminations, truncations and infos, each by agent.
Transition = tuple[dict[Any, Any], dict[Any, float], dict[Any, bool], dict[Any, bool], dict[Any, dict[str, Any]]]


class SubprocessParallelEnv(ParallelEnv[Any, Any, Any]):
    """A ``ParallelEnv`` whose env runs in a process of its own, and survives that process.

    ::

        env = SubprocessParallelEnv(make_env)  # which returns a ParallelEnv
        observations, infos = env.reset(seed=0)
        while env.agents:
            actions = {agent: env.action_space(agent).sample() for agent in env.agents}
            observations, rewards, terminations, truncations, infos = env.step(actions)
        env.close()

    It returns what the env itself would return, to the bit, whether its process dies or not. The process is launched
    by :meth:`start`, or when the env is first used. Several envs are stepped at the same time in two halves::

        for env, actions in zip(envs, all_actions):
            env.step_async(actions)
        results = [env.step_wait() for env in envs]

    An episode that could not be brought back after a loss ends for all agents that were there: ``truncations`` are
    true, rewards 0.0, observations the last ones, ``infos[agent]["multienv"]["reason"]`` says why, and ``agents`` is
    empty. A step that Ctrl-C interrupted is completed by the next one, whatever its actions; each
    ``infos[agent]["multienv"]`` then says ``resumed``.

    Args:
        env_fn: Builds the env, a ``ParallelEnv``; called in the process. It travels by cloudpickle.
        env_index: The env's index among several, for messages.
        **options: See :class:`~multienv.WorkerOptions`.

    Attributes:
        agents: Those that are there now.
        possible_agents, observation_spaces, action_spaces, state_space, metadata, render_mode: As the env has them, if
            it has them.

    Raises:
        UsageError: ``env_fn`` is not callable or cannot be pickled, or an option makes no sense.
    """

    @takes_options_of(SubprocessEnv.__init__)
    def __init__(
        self, env_fn: Callable[[], Any], *, env_index: int | None = None, **options: Unpack[WorkerOptions]
    ) -> None:
        check_env_fn(env_fn)
        self.agents: list[Any] = []
        self._env = SubprocessEnv(_Build(env_fn), env_index=env_index, **options)
        self._spaces: dict[Any, tuple[Any, Any]] = {}  # of possible agents
        self._spaces_of_others: dict[Any, tuple[Any, Any]] = {}  # asked for in this episode
        self._last = b""  # what the env returned last, but for infos

    # --- start and end ----------------------------------------------------------------------------

    def start(self) -> Self:
        """Launch the process and have it build the env; does not wait. Again does nothing. Returns the env itself."""
        self._env.start()
        return self

    def initialize(self, timeout: float | None = None) -> Self:
        """Wait until the env is built; start it first if need be. Again does nothing.

        Args:
            timeout: Seconds to wait; it can be called again.

        Returns:
            The env itself.

        Raises:
            EnvError: ``env_fn`` raised, or what it returned is no ``ParallelEnv``.
            WorkerLostError: Building the env ended its process.
            WaitTimeout: ``timeout`` is over.
        """
        self._env.initialize(timeout)
        if "metadata" not in self.__dict__:
            described: Any = self._env.action_space
            self._spaces = described.spaces
            self.__dict__.update(described.attributes)
        return self

    def close(self) -> None:
        """End the process: by asking, and after ``Deadlines.close`` seconds by force. Again does nothing."""
        self._env.close()

    def __enter__(self) -> Self:
        """Initialize; close if that fails."""
        try:
            return self.initialize()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    # --- an episode -------------------------------------------------------------------------------

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, dict[str, Any]]]:
        """Begin an episode.

        Args:
            seed: For the env's generators. Without one they go on as the env has it.
            options: The env's own.

        Returns:
            Observations and infos by agent.
        """
        return self._begun(*self._built().reset(seed=seed, options=options))

    def reset_async(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Send a reset; collect it with :meth:`reset_wait`."""
        self._built().reset_async(seed=seed, options=options)

    def reset_wait(self, timeout: float | None = None) -> tuple[dict[Any, Any], dict[Any, dict[str, Any]]]:
        """Collect what the reset returned. Raises WaitTimeout after ``timeout`` seconds; wait again then."""
        return self._begun(*self._env.reset_wait(timeout))

    def step(self, actions: dict[Any, Any]) -> Transition:
        """Take one step.

        Args:
            actions: By agent. The env gets them as they are: what it makes of one that is missing is its own business.

        Returns:
            Observations, rewards, terminations, truncations and infos by agent, each of the type and value that the
            env gave it.

        Raises:
            ResetNeededError: Nobody is left: the episode is over.
            EnvError: The env raised; catchable by the exception's own type too.
            WorkerLostError: The process was lost and the policy says ``"raise"``, or its budget is spent.
        """
        return self._stepped(*self._env.step(actions))

    def step_async(self, actions: dict[Any, Any]) -> None:
        """Send a step; collect it with :meth:`step_wait`."""
        self._env.step_async(actions)

    def step_wait(self, timeout: float | None = None) -> Transition:
        """Collect what the step returned. Raises WaitTimeout after ``timeout`` seconds; wait again then."""
        return self._stepped(*self._env.step_wait(timeout))

    def resume(self) -> Any:
        """Return what the last step or reset returned, collected before or not: after an interruption."""
        answer = self._env.resume()
        return self._begun(*answer) if len(answer) == 2 else self._stepped(*answer)

    def render(self) -> Any:
        """Draw the env where it is; returns what its ``render`` returns."""
        return self._built().render()

    def state(self) -> Any:
        """Return the env's state, a view of all of it. The env is expected to change nothing when it is asked."""
        return self._ask("state")

    def observation_space(self, agent: Any) -> spaces.Space[Any]:
        """Return an agent's observation space: always the same object, of an agent that is born in an episode in it."""
        return self._spaces_of(agent)[0]  # type: ignore[no-any-return]

    def action_space(self, agent: Any) -> spaces.Space[Any]:
        """Return an agent's action space: always the same object, of an agent that is born in an episode in it."""
        return self._spaces_of(agent)[1]  # type: ignore[no-any-return]

    # --- branching and checkpoints ----------------------------------------------------------------

    def snapshot(self) -> Any:
        """Keep the env as it is now, to come back to with :meth:`restore`; see :meth:`SubprocessEnv.snapshot`."""
        return self._built().snapshot(), self._last, list(self.agents)

    def restore(self, snapshot: Any) -> None:
        """Have the env as it was when this snapshot of it was taken; see :meth:`SubprocessEnv.restore`."""
        self._env.restore(snapshot[0])
        self._stand(*snapshot[1:])

    def state_dict(self) -> dict[str, Any]:
        """Return what it takes to go on from here in another trainer; see :meth:`SubprocessEnv.state_dict`."""
        return {"env": self._built().state_dict(), "last": self._last, "agents": list(self.agents)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was called; see :meth:`SubprocessEnv.load_state_dict`."""
        self._built().load_state_dict(state.get("env", state))
        self._stand(state["last"], state["agents"])

    # --- anything else ----------------------------------------------------------------------------

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the env or of what it wraps. Recorded and replayed; see :meth:`SubprocessEnv.call`."""
        return self._built().call(name, *args, **kwargs)

    def get_attr(self, name: str) -> Any:
        """Return a copy of an attribute of the env or of what it wraps; of a method, what calls it there."""
        return getattr(self, name) if name in _OWN_METHODS else self._built().get_attr(name)

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute where it is found in the env or in what it wraps, else on the outermost."""
        self._built().set_attr(name, value)

    def statistics(self) -> Statistics:
        """Return state, process and counters at this moment, as a frozen record."""
        return self._env.statistics()

    def __getattr__(self, name: str) -> Any:
        """Build the env when it is asked for the first attribute that it may have."""
        if name in _ATTRIBUTES and "_env" in self.__dict__ and "metadata" not in self.__dict__:
            self._built()
            return getattr(self, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}; the remote env's: get_attr()")

    def __str__(self) -> str:
        """Name the env by its metadata, once they are known."""
        return str(self.__dict__.get("metadata", {}).get("name", type(self).__name__))

    __reduce_ex__ = refuse_copy

    # --- how --------------------------------------------------------------------------------------

    def _built(self) -> SubprocessEnv:
        if "metadata" not in self.__dict__:
            self.initialize()
        return self._env

    def _ask(self, name: str, *args: Any) -> Any:
        """Call a method that changes nothing: it is not recorded."""
        return calls_of(self._built()).ask("call", call_message(name, args, {}, recorded=False))

    def _spaces_of(self, agent: Any) -> tuple[Any, Any]:
        self._built()
        found = self._spaces.get(agent) or self._spaces_of_others.get(agent)
        if found is None:
            found = self._ask("observation_space", agent), self._ask("action_space", agent)
            self._spaces_of_others[agent] = found
        return found

    def _begun(self, checksum: Any, info: dict[str, Any]) -> tuple[dict[Any, Any], dict[Any, dict[str, Any]]]:
        self._spaces_of_others = {}
        self._last = info["returned"]
        self.agents, observations = pickle.loads(self._last)
        return observations, info["infos"]

    def _stepped(self, checksum: Any, reward: float, terminated: bool, truncated: bool, info: Any) -> Transition:
        told = info.get("multienv", {})
        if "returned" not in info:
            return self._truncated(told)
        self._last = info["returned"]
        self.agents, observations, rewards, terminations, truncations = pickle.loads(self._last)
        infos = info["infos"]
        if told:
            infos = {**infos, **{agent: {**infos.get(agent, {}), "multienv": dict(told)} for agent in terminations}}
        return observations, rewards, terminations, truncations, infos

    def _truncated(self, told: dict[str, Any]) -> Transition:
        """Return the honest end of an episode that cannot go on: of all agents that were there."""
        agents, observations, *_ = pickle.loads(self._last)
        self.agents = []
        return (
            {agent: observations.get(agent) for agent in agents},
            dict.fromkeys(agents, 0.0),
            dict.fromkeys(agents, False),
            dict.fromkeys(agents, True),
            {agent: {"multienv": dict(told)} for agent in agents},
        )

    def _stand(self, last: bytes, agents: list[Any]) -> None:
        self._last, self.agents = last, list(agents)
        self._spaces_of_others = {}


# --- in the process -------------------------------------------------------------------------------


class _Build:
    """Builds the env of a worker.

    Args:
        env_fn: Builds the ``ParallelEnv``.
    """

    def __init__(self, env_fn: Callable[[], Any]) -> None:
        self._env_fn = env_fn

    def __call__(self) -> _AgentsEnv:
        return _AgentsEnv(self._env_fn())

    def __repr__(self) -> str:
        return repr(self._env_fn)


class _Agents(spaces.Space[Any]):
    """Describes a parallel env, in the place of an action space; its actions are dicts of any agents.

    Two are equal if their agents have equal spaces: an env that is built anew is held against that.

    Args:
        env: The env.

    Attributes:
        spaces: Observation and action space of each possible agent.
        attributes: Those of ``_ATTRIBUTES`` that the env has.
    """

    def __init__(self, env: ParallelEnv[Any, Any, Any]) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some attributes are deprecated
            self.attributes = {name: getattr(env, name) for name in _ATTRIBUTES if hasattr(env, name)}
            self.attributes.setdefault("metadata", {})
            self.spaces = {
                agent: (env.observation_space(agent), env.action_space(agent))
                for agent in self.attributes.get("possible_agents", ())
            }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Agents) and self.spaces == other.spaces

    __hash__ = None  # type: ignore[assignment]


class _AgentsEnv(gymnasium.Env[Any, Any]):
    """Presents a parallel env to multienv, which knows envs of one agent only.

    What the env returned is pickled in the info, but for its infos. The observation is a checksum of it: a
    replay is held against it, however large the observations of the agents are.

    Args:
        env: The parallel env.
    """

    observation_space = spaces.Box(0, 2**32 - 1, (1,), np.uint32)

    def __init__(self, env: ParallelEnv[Any, Any, Any]) -> None:
        if isinstance(env, AECEnv) or not hasattr(env, "step"):
            raise TypeError(
                f"env_fn returned {type(env).__name__}, which is no ParallelEnv. Take parallel_env() in place of env() "
                "or convert it: pettingzoo.utils.conversions has aec_to_parallel and turn_based_aec_to_parallel."
            )
        self.env = env
        self.action_space = _Agents(env)
        self.metadata = dict(self.action_space.attributes["metadata"])
        self.render_mode = self.action_space.attributes.get("render_mode")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observations, infos = self.env.reset(seed=seed, options=options)
        return self._told(observations, infos=infos)

    def step(self, action: Any) -> Any:
        *returned, infos = self.env.step(action)
        checksum, told = self._told(*returned, infos=infos)
        return checksum, 0.0, not self.env.agents, False, told

    def _told(self, *returned: Any, infos: Any) -> tuple[Any, dict[str, Any]]:
        data = pickled("step", (list(self.env.agents), *returned))
        return np.array([zlib.crc32(data)], np.uint32), {"returned": data, "infos": infos}

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()

    def inner_layers(self) -> Iterator[Any]:
        """Yield the parallel env, then what it wraps: random generators and attributes are looked for in these."""
        layer: Any = self.env
        seen: list[Any] = []
        while layer is not None and not any(layer is one for one in seen):
            yield layer
            seen.append(layer)
            attributes = getattr(layer, "__dict__", {})
            layer = attributes.get("env", attributes.get("aec_env"))

    # gymnasium's ways to attributes: here they lead to the parallel env.

    def has_wrapper_attr(self, name: str) -> bool:
        return self._with(name) is not None

    def get_wrapper_attr(self, name: str) -> Any:
        found = self._with(name)
        if found is None:
            _refuse(self.env, name)
        return getattr(found, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        found = self._with(name)
        if found is None and not force:
            return False
        setattr(self.env if found is None else found, name, value)
        return True

    def _with(self, name: str) -> Any:
        """Return the outermost that has an attribute of its own: wrappers of PettingZoo pass those of others on."""
        for layer in self.inner_layers():
            if name in getattr(layer, "__dict__", ()) or hasattr(type(layer), name):
                return layer
        return None


def _refuse(env: Any, name: str) -> NoReturn:
    raise AttributeError(f"{type(env).__name__!r} and what it wraps have no attribute {name!r}")
