"""One policy plays both sides of a PettingZoo game, in several parallel envs whose processes may be killed.

    python examples/rock_paper_scissors.py            # rock, paper, scissors, Spock, lizard
    python examples/rock_paper_scissors.py --chaos    # ... while processes are killed at random

Both players move at the same time. At first the policy prefers rock. It learns from its results against itself (Exp3).
The policy itself goes round in circles. But its average approaches a policy that no opponent can exploit: each move
equally often.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from typing import Any

import numpy as np

from multienv import Deadlines
from multienv.adapters.pettingzoo import SubprocessParallelEnv
from multienv.testing import Killer, worker_pids

MOVES = 5
Array = np.ndarray[Any, Any]


def make_env() -> Any:
    """Build one env, in its process."""
    from pettingzoo.classic.rps import rps

    return rps.parallel_env(num_actions=MOVES, max_cycles=100)


def play(envs: list[SubprocessParallelEnv], options: Any) -> list[float]:
    """Let the policy play against itself. Return after each tenth how much an opponent could win from its average."""
    rng = np.random.default_rng(options.seed)
    gains, pays, average = np.zeros(MOVES), np.zeros((MOVES, MOVES)), np.zeros(MOVES)
    gains[0] = 3.0
    exploited = []
    for index, env in enumerate(envs):
        env.reset(seed=options.seed + index)
    for played in range(1, options.rounds + 1):
        chances = np.exp(gains - gains.max())
        chances = 0.9 * chances / chances.sum() + 0.1 / MOVES
        average += chances
        moves = [{agent: int(rng.choice(MOVES, p=chances)) for agent in env.agents} for env in envs]
        for env, actions in zip(envs, moves, strict=True):
            env.step_async(actions)  # all envs play this round at the same time
        for env, actions in zip(envs, moves, strict=True):
            _, rewards, _, _, infos = env.step_wait()
            for (agent, own), other in zip(actions.items(), reversed(actions.values()), strict=True):
                if "multienv" not in infos[agent]:  # otherwise the result is unknown: see docs/learners.md
                    pays[own, other] = rewards[agent]
                    gains[own] += options.rate * rewards[agent] / chances[own]
            if not env.agents:
                env.reset()
        if played % (options.rounds // 10) == 0:
            exploited.append(float((pays @ average).max() / played))
            deaths = sum(env.statistics().losses for env in envs)
            print(
                f"{played:6} rounds: the best response wins {exploited[-1]:.2f} per round; {deaths} workers died",
                flush=True,
            )
    return exploited


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.005, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chaos", action="store_true", help="kill about ten workers per second")
    options = parser.parse_args()
    if options.chaos:
        logging.getLogger("multienv").setLevel(logging.ERROR)  # each loss logs a warning; this example counts them

    envs = [
        SubprocessParallelEnv(
            make_env,
            env_index=index,
            deadlines=Deadlines(step=60.0, reset=60.0),  # replaces hung workers too
            reports="" if options.chaos else None,  # no crash reports for intended deaths
        ).start()  # all envs are built at the same time
        for index in range(options.num_envs)
    ]
    with contextlib.ExitStack() as stack:
        for env in envs:
            stack.enter_context(env)
        if options.chaos:
            stack.enter_context(
                Killer(
                    lambda: [pid for env in envs for pid in worker_pids(env)], interval=(0.05, 0.15), seed=options.seed
                )
            )
        exploited = play(envs, options)
        workers = [env.statistics() for env in envs]
    print(f"The best response won {exploited[0]:.2f} per round at first, and {exploited[-1]:.2f} at the end.")
    names = ("losses", "exact_recoveries", "replayed_recoveries", "truncated_recoveries")
    died, exact, replayed, cut = (sum(getattr(one, name) for one in workers) for name in names)
    told = f"{cut} games were cut short" if cut else "nothing was lost"
    print(f"{died} workers died; {exact} recoveries were exact, {replayed} replayed, {cut} truncated; {told}.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
