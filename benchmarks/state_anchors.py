"""What states as anchors cost in long episodes: throughput with and without, interleaved; and recoveries from them."""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import ale_py
import gymnasium

from multienv import RestartPolicy, SubprocessEnv
from multienv.events import Event, Recovery
from multienv.worker import states

gymnasium.register_envs(ale_py)


def endless_cartpole() -> Any:
    """A CartPole whose pole may fall as it likes."""
    env: Any = gymnasium.make("CartPole-v1", max_episode_steps=10**9)
    env.unwrapped.theta_threshold_radians = env.unwrapped.x_threshold = 1e9
    return env


ENVS: dict[str, Callable[[], Any]] = {
    "CartPole-v1": endless_cartpole,
    "ALE/Pong-v5": lambda: gymnasium.make("ALE/Pong-v5"),
    "HalfCheetah-v5": lambda: gymnasium.make("HalfCheetah-v5", max_episode_steps=10**9),
    "Humanoid-v5": lambda: gymnasium.make("Humanoid-v5", max_episode_steps=10**9, terminate_when_unhealthy=False),
}


def drive(env: Any, actions: list[Any], steps: int) -> float:
    """Seconds for so many steps."""
    begin = time.perf_counter()
    for index in range(steps):
        _, _, terminated, truncated, _ = env.step(actions[index % len(actions)])
        if terminated or truncated:
            env.reset()
    return time.perf_counter() - begin


def best_times(envs: list[Any], actions: list[Any], steps: int, repeats: int) -> list[float]:
    """The shortest of several interleaved runs of each: what else the machine is doing only makes them longer."""
    best = [float("inf")] * len(envs)
    for _ in range(repeats):
        for place, env in enumerate(envs):
            best[place] = min(best[place], drive(env, actions, steps))
    return best


def in_process(env_fn: Callable[[], Any], steps: int, repeats: int) -> tuple[float, int, float]:
    """Seconds to take a state, its bytes, and how much longer steps take in an env whose state has been taken."""
    envs = [env_fn() for _ in range(2)]
    actions = [envs[0].action_space.sample() for _ in range(64)]
    for env in envs:
        env.reset(seed=0)
        drive(env, actions, 100)
    states.capture(envs[0])
    begin = time.perf_counter()
    state = states.capture(envs[0])
    seconds = time.perf_counter() - begin
    with_state, without = best_times(envs, actions, steps, repeats)
    return seconds, len(state), with_state / without


def throughput(env_fn: Callable[[], Any], seconds: float, repeats: int) -> tuple[float, int]:
    """The rate with state anchors over that without, and how many were kept."""
    envs = [
        SubprocessEnv(env_fn, restart=RestartPolicy(snapshots=False, state_anchors=wanted)) for wanted in (True, False)
    ]
    for env in envs:
        env.initialize()
        env.reset(seed=0)
    actions = [envs[0].action_space.sample() for _ in range(64)]
    steps = max(64, int(seconds / drive(envs[1], actions, 500) * 500))
    with_states, without = best_times(envs, actions, steps, repeats)
    taken = envs[0].statistics().state_anchors
    for env in envs:
        env.close()
    return without / with_states, taken


def recoveries(env_fn: Callable[[], Any], kills: int) -> tuple[list[float], list[Recovery]]:
    """Seconds from SIGKILL to the next step's return, where a replay may take 0.4 s of the env's time."""
    seen: list[Recovery] = []

    def note(event: Event) -> None:
        if isinstance(event, Recovery):
            seen.append(event)

    times = []
    policy = RestartPolicy(snapshots=False, replay_limit=0.4)
    with SubprocessEnv(env_fn, restart=policy, hooks=[note]) as env:
        env.reset(seed=0)
        actions = [env.action_space.sample() for _ in range(64)]
        drive(env, actions, 200)
        apart = int(0.5 / (env.statistics().step_seconds or 1e-4))
        drive(env, actions, 2 * apart)
        for _ in range(kills):
            drive(env, actions, apart)
            begin = time.perf_counter()
            os.kill(env.statistics().pid or 0, signal.SIGKILL)
            _, _, terminated, truncated, _ = env.step(actions[0])
            times.append(time.perf_counter() - begin)
            if terminated or truncated:
                env.reset()
    return times, seen


def main() -> None:
    """Print three lines for each env."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("envs", nargs="*", default=list(ENVS))
    parser.add_argument("--seconds", type=float, default=3.0, help="of each of the interleaved runs")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    for name in arguments.envs:
        env_fn = ENVS[name]
        seconds, size, slower = in_process(env_fn, 2000, 2 * arguments.repeats)
        print(f"{name:16} a state: {seconds * 1e3:5.2f} ms, {size:,} bytes; steps after it {slower:5.3f} × as long")
        ratio, taken = throughput(env_fn, arguments.seconds, arguments.repeats)
        print(f"{'':16} {ratio:5.3f} × the rate without; {taken} kept")
        times, seen = recoveries(env_fn, arguments.kills)
        exact = sum(one.outcome == "exact" for one in seen)
        states_ = sum(one.rung == "state" for one in seen)
        print(
            f"{'':16} {len(seen)} losses: {exact} exact, {states_} from a state; "
            f"median {statistics.median(times) * 1e3:.0f} ms, {statistics.median(one.replayed for one in seen):.0f} "
            "requests replayed"
        )


if __name__ == "__main__":
    main()
