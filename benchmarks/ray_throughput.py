"""Env steps a second on Ray: actors written by hand, RLlib's env runners, multienv; in turns in one run; ratios.

A local Ray is started for it. Each contender has as many CPUs of it as the machine has cores, and all share these
cores with the driver: there is no network, and nothing that more machines would add. All are built and warmed up first,
then they take short turns in an order that is drawn anew each time; who waits is idle. Actions are random: by the
driver where it is asked step by step, beside the envs in fragments of 100 steps. A step that only begins an episode
counts as one where a contender has such steps, 1 in 20 of CartPole's; RLlib's does not.

RLlib wants one version of gymnasium exactly: run it where the extra ``rllib`` is installed, else those rows are left
out. ``--env busy`` is an env of 1 ms a step; HalfCheetah-v5 needs the extra ``test``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv
from scaling import BusyEnv
from throughput import LIMIT, EnvFn, limit, ratio, stepping

import multienv

try:
    import ray
except ImportError as error:
    sys.exit(f'{error}; from a checkout: pip install -e ".[ray,bench]"')

Bench = Callable[[float], float]  # seconds to spend → env steps a second
STEPS = 100  # of a fragment
EACH, SYNC = "plain Ray, an actor an env", "plain Ray, SyncVectorEnv in an actor a core"
SYNC_FRAGMENTS, RLLIB = f"{SYNC}, {STEPS} steps a call", f"RLlib's env runners, {STEPS} steps a call"
VECTOR = "multienv.RayVectorEnv"
# Ratios that are printed: to these. Who is asked step by step, and who is not, are two kinds.
AGAINST = {EACH: "an actor an env", SYNC: "SyncVectorEnv", SYNC_FRAGMENTS: "its fragments", LIMIT: LIMIT}


class RandomPolicy:
    """Draws an action for each observation: small, and picklable."""

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        """Keep what is needed to draw quickly."""
        self._dice = np.random.default_rng(0)
        self._count = int(space.n) if isinstance(space, gymnasium.spaces.Discrete) else 0
        if isinstance(space, gymnasium.spaces.Box):
            self._box = space.low, space.high, space.shape, space.dtype

    def __call__(self, observations: Any) -> Any:
        """Return a batch of actions."""
        if self._count:
            return self._dice.integers(self._count, size=len(observations))
        low, high, shape, dtype = self._box
        return self._dice.uniform(low, high, (len(observations), *shape)).astype(dtype)


class Millisecond(BusyEnv):
    """Takes 1 ms of a processor's time for a step, so that envs which share a core wait for each other."""

    def __init__(self) -> None:
        """Show 16 bytes."""
        super().__init__(0.0, 16)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Keep the core busy."""
        until = time.thread_time() + 1e-3
        while time.thread_time() < until:
            pass
        return super().step(action)


def env_fn_of(name: str) -> EnvFn:
    """What builds it."""
    return Millisecond if name == "busy" else partial(gymnasium.make, name)


# --- what a practitioner writes -------------------------------------------------------------------


class OneEnv:
    """An actor with an env."""

    def __init__(self, env_fn: EnvFn) -> None:
        """Build it."""
        self._env = env_fn()

    def reset(self) -> Any:
        return self._env.reset()[0]

    def step(self, action: Any) -> Any:
        """Step, and reset at the end of an episode."""
        observation, reward, terminated, truncated, info = self._env.step(action)
        if terminated or truncated:
            info = {**info, "final_obs": observation}
            observation, _ = self._env.reset()
        return observation, reward, terminated, truncated, info


class SomeEnvs:
    """An actor with a SyncVectorEnv."""

    def __init__(self, env_fns: Sequence[EnvFn]) -> None:
        """Build them."""
        self._envs = SyncVectorEnv(env_fns)

    def reset(self) -> Any:
        self._observations, _ = self._envs.reset()
        return self._observations

    def step(self, actions: Any) -> Any:
        return self._envs.step(actions)

    def sample(self, policy: Callable[[Any], Any], steps: int) -> Any:
        """Make so many steps with the policy here; return what came of them, stacked."""
        told = []
        for _ in range(steps):
            actions = policy(self._observations)
            self._observations, rewards, terminations, truncations, _ = self._envs.step(actions)
            told.append((self._observations.copy(), actions, rewards, terminations, truncations))
        return [np.stack(each) for each in zip(*told, strict=True)]


class ByHand:
    """What the driver does with an actor an env.

    Args:
        env_fns: Each builds one env.
        cpus: CPUs of all actors together.
    """

    def __init__(self, env_fns: Sequence[EnvFn], cpus: int) -> None:
        """Start the actors."""
        actor = ray.remote(num_cpus=cpus / len(env_fns))(OneEnv)
        self.actors = [actor.remote(env_fn) for env_fn in env_fns]

    def reset(self) -> Any:
        return np.stack(ray.get([actor.reset.remote() for actor in self.actors]))

    def step(self, actions: Any) -> Any:
        """Step all; return batches."""
        replies = ray.get([actor.step.remote(action) for actor, action in zip(self.actors, actions, strict=True)])
        observations, rewards, terminations, truncations, infos = zip(*replies, strict=True)
        return np.stack(observations), np.array(rewards), np.array(terminations), np.array(truncations), infos

    def close(self) -> None:
        """End the actors."""
        for actor in self.actors:
            ray.kill(actor)


class SyncByHand(ByHand):
    """What the driver does with an actor a core, each with a SyncVectorEnv."""

    def __init__(self, env_fns: Sequence[EnvFn], cpus: int) -> None:
        """Start the actors."""
        actor = ray.remote(num_cpus=1)(SomeEnvs)
        count = min(cpus, len(env_fns))
        bounds = [len(env_fns) * place // count for place in range(count + 1)]
        self._parts = [slice(*bounds[place : place + 2]) for place in range(count)]
        self.actors = [actor.remote(list(env_fns[part])) for part in self._parts]

    def reset(self) -> Any:
        return np.concatenate(ray.get([actor.reset.remote() for actor in self.actors]))

    def step(self, actions: Any) -> Any:
        """Step all; return batches."""
        parts = zip(self.actors, self._parts, strict=True)
        *batches, _ = zip(*ray.get([actor.step.remote(actions[part]) for actor, part in parts]), strict=True)
        return tuple(np.concatenate(batch) for batch in batches)

    def sample(self, policy: Callable[[Any], Any], steps: int) -> Any:
        """Make a fragment of so many steps; return batches, time first."""
        batches = zip(*ray.get([actor.sample.remote(policy, steps) for actor in self.actors]), strict=True)
        return [np.concatenate(batch, axis=1) for batch in batches]


class EnvRunners:
    """RLlib's own way to gather episodes, without its learner, with random actions.

    Args:
        env_fn: Builds an env.
        num_envs: How many.
        cpus: One for each env runner.
    """

    def __init__(self, env_fn: EnvFn, num_envs: int, cpus: int) -> None:
        """Start the env runners."""
        from ray import tune
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.env.env_runner_group import EnvRunnerGroup

        tune.register_env("bench", lambda _: env_fn())
        self._each = -(-num_envs // cpus)
        config = (
            PPOConfig()
            .environment("bench")
            .env_runners(num_env_runners=cpus, num_envs_per_env_runner=self._each)
            .rl_module(model_config={"fcnet_hiddens": [16]})
            .fault_tolerance(restart_failed_env_runners=False)
        )
        self._group = EnvRunnerGroup(config=config, local_env_runner=False)

    def reset(self) -> None:
        """Do nothing: they begin by themselves."""

    def sample(self, policy: Callable[[Any], Any], steps: int) -> int:
        """Gather so many steps of each env; return how many that were."""
        count = self._each * steps
        gathered = self._group.foreach_env_runner(
            lambda runner: runner.sample(num_timesteps=count, random_actions=True), local_env_runner=False
        )
        return sum(len(episode) for episodes in gathered for episode in episodes)

    def close(self) -> None:
        """End the env runners."""
        self._group.stop()


# --- a run ----------------------------------------------------------------------------------------


def sampling(sample: Callable[..., object], policy: Callable[[Any], Any], num_envs: int) -> Bench:
    """Make fragments again and again."""

    def bench(seconds: float) -> float:
        done, begin = 0, time.perf_counter()
        while (spent := time.perf_counter() - begin) < seconds:
            found = sample(policy, STEPS)
            done += found if isinstance(found, int) else num_envs * STEPS
        return done / spent

    return bench


def faces(env_fns: Sequence[EnvFn], cpus: int) -> dict[str, Callable[[], Any]]:
    """What multienv has: on this machine, and on Ray with as many CPUs."""
    made: dict[str, Callable[[], Any]] = {
        "multienv.SubprocessVectorEnv, no Ray": lambda: multienv.SubprocessVectorEnv(env_fns)
    }
    if not hasattr(multienv, "RayVectorEnv"):
        print(f"skipped: {VECTOR} and create_ray_envs are not in this multienv", file=sys.stderr)
        return made
    options = multienv.RayOptions(hosts=1, cpus_per_host=cpus)
    made[VECTOR] = lambda: multienv.RayVectorEnv(env_fns, ray=options)
    made["multienv.MultiEnv over create_ray_envs"] = lambda: multienv.MultiEnv(
        multienv.create_ray_envs(env_fns, ray=options)
    )
    return made


def contenders(env_fn: EnvFn, num_envs: int, cpus: int, only: Sequence[str], stack: contextlib.ExitStack) -> Any:
    """Return name → what steps so many envs."""
    policy = RandomPolicy(env_fn().action_space)
    batches = [policy(range(num_envs)) for _ in range(8)]
    env_fns, benches = [env_fn] * num_envs, {}
    makes: dict[str, Callable[[], Any]] = {
        EACH: lambda: ByHand(env_fns, cpus),
        SYNC: lambda: SyncByHand(env_fns, cpus),
        RLLIB: lambda: EnvRunners(env_fn, num_envs, cpus),
        **faces(env_fns, cpus),
    }
    for name, make in makes.items():
        if not any(part in name for part in [*only, *AGAINST]):
            continue
        try:
            envs = make()
        except ImportError as error:
            print(f"skipped: {name}: {error}", file=sys.stderr)
            continue
        stack.callback(envs.close)
        envs.reset()
        if hasattr(envs, "step"):
            actions = [list(batch) for batch in batches] if "MultiEnv" in name else batches
            benches[name] = stepping(envs.step, actions, num_envs)
        fragments = getattr(envs, "rollout", None) or getattr(envs, "sample", None)
        if fragments is not None:
            named = {SYNC: SYNC_FRAGMENTS, RLLIB: RLLIB}.get(name, f"{name}.rollout, {STEPS} steps a call")
            benches[named] = sampling(fragments, policy, num_envs)
        elif name == VECTOR:
            print(f"skipped: {VECTOR}.rollout is not in this multienv", file=sys.stderr)
    benches[LIMIT] = stack.enter_context(limit(env_fn))
    return benches


def measure(env_fn: EnvFn, num_envs: int, cpus: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Rates of all contenders, in turns, in an order drawn for each."""
    with contextlib.ExitStack() as stack:
        benches = contenders(env_fn, num_envs, cpus, arguments.only, stack)
        for bench in benches.values():
            bench(arguments.warm_up)
        rates: dict[str, list[float]] = {name: [] for name in benches}
        gc.collect()
        gc.freeze()  # what one contender has made is no work for the collector in another's turn
        order, dice = list(benches), random.Random(0)
        for _ in range(arguments.repeats):
            dice.shuffle(order)
            for name in order:
                benches[name](arguments.seconds / 5)  # caches are warm again
                rates[name].append(benches[name](arguments.seconds))
    return rates


def main() -> None:
    """Print, for each env and number of envs, medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", nargs="+", default=["CartPole-v1", "busy"])
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8])
    parser.add_argument("--seconds", type=float, default=0.4, help="of each turn, and until the last call is answered")
    parser.add_argument("--warm-up", type=float, default=2.0, help="seconds, of each before the first turn")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="parts of names of contenders")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cpus, rows = len(os.sched_getaffinity(0)), []
    # Ray's CPUs are a number that is counted, no core: enough that each contender can have as many as there are cores.
    ray.init(address="local", num_cpus=8 * cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        for name in arguments.env:
            for num_envs in arguments.num_envs:
                rates = measure(env_fn_of(name), num_envs, cpus, arguments)
                print(f"{num_envs} × {name}, {cpus} cores, load {os.getloadavg()[0]:.1f}")
                for told, values in rates.items():
                    ratios = [f"{ratio(rates, told, base):6.2f} × {short}" for base, short in AGAINST.items()]
                    print(f"  {told:60} {statistics.median(values):9,.0f} steps/s  {'  '.join(ratios)}", flush=True)
                rows.append({"env": name, "num_envs": num_envs, "cpus": cpus, "rates": rates})
    finally:
        ray.shutdown()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
