"""A parallel env of PettingZoo in a process that may die at any moment."""

from __future__ import annotations

import pickle
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from typing_extensions import Self, Unpack

from multienv._engine.building.building import WorkerOptions, checked_env_fn
from multienv._engine.worker.replies import pickled
from multienv.adapters import extra_needed
from multienv.config import takes_options_of
from multienv.envs.arguments import OWN_METHODS, call_message, refuse_copy
from multienv.envs.subprocess_env import SubprocessEnv, calls_of
from multienv.events import Statistics

try:
    from pettingzoo import AECEnv, ParallelEnv
except ImportError as missing:
    raise extra_needed(__name__, "pettingzoo", missing) from None

# What an env may have, and has from its construction on.
_ATTRIBUTES = ("metadata", "possible_agents", "observation_spaces", "action_spaces", "state_space", "render_mode")

# Observations, rewards, terminations, truncations and infos, each by agent.
Transition = tuple[dict[Any, Any], dict[Any, float], dict[Any, bool], dict[Any, bool], dict[Any, dict[str, Any]]]


class SubprocessParallelEnv(ParallelEnv[Any, Any, Any]):
    """A ``ParallelEnv`` whose env runs in its own process and survives the death of that process.

    ::

        env = SubprocessParallelEnv(make_env)  # make_env returns a ParallelEnv
        observations, infos = env.reset(seed=0)
        while env.agents:
            actions = {agent: env.action_space(agent).sample() for agent in env.agents}
            observations, rewards, terminations, truncations, infos = env.step(actions)
        env.close()

    It returns the same as the env itself, to the bit, whether its process dies or not. :meth:`start`, or the first use
    of the env, launches the process. To step several envs at the same time, call them in two halves::

        for env, actions in zip(envs, all_actions):
            env.step_async(actions)
        results = [env.step_wait() for env in envs]

    If an episode cannot be recovered after a loss, it ends for all agents that were in it: ``truncations`` are true,
    rewards 0.0, observations the last ones, ``infos[agent]["multienv"]["reason"]`` says why, and ``agents`` is empty.
    If Ctrl-C interrupts a step, the next step completes it, whatever its actions; each ``infos[agent]["multienv"]``
    then says ``resumed``.

    Args:
        env_fn: Function that builds the env, a ``ParallelEnv``; it is called in the process. It travels by cloudpickle.
        env_index: Index of the env among several, for messages.
        **options: See :class:`~multienv.WorkerOptions`.

    Attributes:
        agents: The agents that are in the episode now.
        possible_agents, observation_spaces, action_spaces, state_space, metadata, render_mode: Those of the env, if it
            has them.

    Raises:
        UsageError: ``env_fn`` is not callable or cannot be pickled, or an option is invalid.
    """

    @takes_options_of(SubprocessEnv.__init__)
    def __init__(
        self, env_fn: Callable[..., Any], *, env_index: int | None = None, **options: Unpack[WorkerOptions]
    ) -> None:
        self.agents: list[Any] = []
        self._env = SubprocessEnv(partial(_built, checked_env_fn(env_fn, env_index)), env_index=env_index, **options)
        # By a weak reference: an env that is not closed ends with the last reference to it.
        convert = partial(SubprocessParallelEnv._converted, weakref.proxy(self))
        calls_of(self._env).convert.update(step=convert, reset=convert)
        self._spaces: dict[Any, tuple[Any, Any]] = {}  # of possible agents
        self._spaces_of_others: dict[Any, tuple[Any, Any]] = {}  # asked for in this episode
        self._last = b""  # what the env returned last, but for infos

    # --- start and end ----------------------------------------------------------------------------

    def start(self) -> Self:
        """Launch the process and let it build the env, without waiting. A second call does nothing.

        Returns:
            The env itself.
        """
        self._env.start()
        return self

    def initialize(self, timeout: float | None = None) -> Self:
        """Wait until the env is built, and start it first if necessary. A second call does nothing.

        Args:
            timeout: Seconds to wait; ``None`` waits for ever. After a timeout you can call it again.

        Returns:
            The env itself.

        Raises:
            EnvError: ``env_fn`` raised, or did not return a ``ParallelEnv``.
            WorkerLostError: The process ended while it built the env.
            WaitTimeout: ``timeout`` has passed.
        """
        self._env.initialize(timeout)
        if "metadata" not in self.__dict__:
            described: Any = self._env.action_space
            self._spaces = described.spaces
            self.__dict__.update(described.attributes)
        return self

    def close(self) -> None:
        """Ask the process to end, and kill it after ``Deadlines.close`` seconds. A second call does nothing."""
        self._env.close()

    def __enter__(self) -> Self:
        """Initialize the env; close it if that fails."""
        self._env.__enter__()
        return self.initialize()

    def __exit__(self, *error: object) -> None:
        """Close the env."""
        self.close()

    # --- an episode -------------------------------------------------------------------------------

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, dict[str, Any]]]:
        """Begin an episode.

        Args:
            seed: Seed for the env's generators. Without a seed they go on as the env defines.
            options: Options for the env's own ``reset``.

        Returns:
            Observations and infos by agent.
        """
        self.agents, self._last, self._spaces_of_others, outcome = self._built().reset(seed=seed, options=options)  # type: ignore[misc]
        return outcome  # type: ignore[no-any-return]

    def reset_async(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Send a reset; collect the result with :meth:`reset_wait`."""
        self._built().reset_async(seed=seed, options=options)

    def reset_wait(self, timeout: float | None = None) -> tuple[dict[Any, Any], dict[Any, dict[str, Any]]]:
        """Collect the result of the reset. Raises WaitTimeout after ``timeout`` seconds; then wait again."""
        self.agents, self._last, self._spaces_of_others, outcome = self._env.reset_wait(timeout)  # type: ignore[misc]
        return outcome  # type: ignore[no-any-return]

    def step(self, actions: dict[Any, Any]) -> Transition:
        """Take one step.

        Args:
            actions: Actions by agent. They reach the env unchanged: if one is missing, the env decides what that means.

        Returns:
            Observations, rewards, terminations, truncations and infos by agent, each with the type and value that the
            env returned.

        Raises:
            ResetNeededError: No agent is left: the episode is over.
            EnvError: The env raised; also catchable by the type of that exception.
            WorkerLostError: The process was lost and the policy says ``"raise"``, or its restart budget is used up.
        """
        self.agents, self._last, self._spaces_of_others, outcome = self._env.step(actions)  # type: ignore[misc]
        return outcome  # type: ignore[no-any-return]

    def step_async(self, actions: dict[Any, Any]) -> None:
        """Send a step; collect the result with :meth:`step_wait`."""
        self._env.step_async(actions)

    def step_wait(self, timeout: float | None = None) -> Transition:
        """Collect the result of the step. Raises WaitTimeout after ``timeout`` seconds; then wait again."""
        self.agents, self._last, self._spaces_of_others, outcome = self._env.step_wait(timeout)  # type: ignore[misc]
        return outcome  # type: ignore[no-any-return]

    def render(self) -> Any:
        """Render the env and return the result of its ``render``."""
        return self._built().render()

    def state(self) -> Any:
        """Return the env's global state. The env's ``state()`` must not change the env."""
        return self._ask("state")

    def observation_space(self, agent: Any) -> spaces.Space[Any]:
        """Return an agent's observation space, always the same object.

        For an agent that appears during an episode, it is the same object within that episode.
        """
        return self._spaces_of(agent)[0]  # type: ignore[no-any-return]

    def action_space(self, agent: Any) -> spaces.Space[Any]:
        """Return an agent's action space, always the same object.

        For an agent that appears during an episode, it is the same object within that episode.
        """
        return self._spaces_of(agent)[1]  # type: ignore[no-any-return]

    # --- branching and checkpoints ----------------------------------------------------------------

    def snapshot(self) -> Any:
        """Keep the present state of the env for :meth:`restore`; see :meth:`SubprocessEnv.snapshot`."""
        return self._built().snapshot(), self._last, list(self.agents)

    def restore(self, snapshot: Any) -> None:
        """Bring the env back to the state in which this snapshot of it was taken; see :meth:`SubprocessEnv.restore`."""
        self._env.restore(snapshot[0])
        self._set_state(*snapshot[1:])

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, to continue in another trainer; see :meth:`SubprocessEnv.state_dict`."""
        return {"env": self._built().state_dict(), "last": self._last, "agents": list(self.agents)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was called; see :meth:`SubprocessEnv.load_state_dict`."""
        self._built().load_state_dict(state.get("env", state))
        self._set_state(state["last"], state["agents"])

    # --- anything else ----------------------------------------------------------------------------

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the env or of an env inside it; see :meth:`SubprocessEnv.call`.

        The call is recorded and replayed.
        """
        return self._built().call(name, *args, **kwargs)

    def get_attr(self, name: str) -> Any:
        """Return a copy of an attribute of the env or of an env inside it; for a method, a function that calls it."""
        return getattr(self, name) if name in OWN_METHODS else self._built().get_attr(name)

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute on the env, or the env inside it, that has this attribute; else on the outermost one."""
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

    def _converted(self, answer: Any, resumed: bool) -> tuple[list[Any], bytes, dict[Any, tuple[Any, Any]], Any]:
        """Return agents, last transition and spaces after an answer, which the caller stores, and what it then returns.

        Nothing is stored here: until the caller has the outcome, an interrupted call is not over. It stores them in one
        line and calls nothing after that: in a call, an exception of a signal handler would lose the outcome.
        """
        info = answer[-1]
        told, last = info.get("multienv", {}), info.get("returned", self._last)
        agents, *outcome = pickle.loads(last)
        if len(answer) == 2:
            return agents, last, {}, (*outcome, info["infos"])
        if "returned" not in info:
            return [], last, self._spaces_of_others, self._truncated(agents, outcome[0], told)
        observations, rewards, terminations, truncations = outcome
        infos = info["infos"]
        if told:
            infos = {**infos, **{agent: {**infos.get(agent, {}), "multienv": dict(told)} for agent in terminations}}
        transition = observations, rewards, terminations, truncations, infos
        return agents, last, self._spaces_of_others, transition

    @staticmethod
    def _truncated(agents: list[Any], observations: dict[Any, Any], told: dict[str, Any]) -> Transition:
        """Return the honest end of an episode that cannot go on: of all agents that were there."""
        return (
            {agent: observations.get(agent) for agent in agents},
            dict.fromkeys(agents, 0.0),
            dict.fromkeys(agents, False),
            dict.fromkeys(agents, True),
            {agent: {"multienv": dict(told)} for agent in agents},
        )

    def _set_state(self, last: bytes, agents: list[Any]) -> None:
        self._last, self.agents = last, list(agents)
        self._spaces_of_others = {}


# --- in the process -------------------------------------------------------------------------------


def _built(env_fn: Callable[[], Any]) -> _AgentsEnv:
    return _AgentsEnv(env_fn())


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
            raise AttributeError(f"{type(self.env).__name__!r} and what it wraps have no attribute {name!r}")
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
