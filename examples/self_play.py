"""One policy learns both sides of a PettingZoo game, on environments whose workers may be killed at any moment.

    python examples/self_play.py            # learn tic-tac-toe, then play against a random player
    python examples/self_play.py --chaos    # ... while workers are killed at random

A game in which the players take turns becomes one env. The player to move acts, and sees the board from its own side.
So one policy plays both sides. The policy is a table, and learns as an actor-critic. For the player to move, the value
of a position is minus the value that the next position has for the opponent. For a game in which all players move at
the same time, see rock_paper_scissors.py.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from multienv import Deadlines, SubprocessVectorEnv
from multienv.testing import Killer

Array = np.ndarray[Any, Any]


class TurnsAsEnv(gymnasium.Env[Any, Any]):
    """Presents a game of two players, a PettingZoo AEC env, as one env for both.

    The observation belongs to the player to move, with the mask of legal actions. The reward belongs to the player that
    has just moved. An episode is a game.

    Args:
        game: An AEC env, whose observations are dicts of ``observation`` and ``action_mask``.
    """

    def __init__(self, game: Any) -> None:
        self.game = game
        self.metadata, self.render_mode = game.metadata, game.render_mode
        self.action_space = game.action_space(game.possible_agents[0])
        board = game.observation_space(game.possible_agents[0])["observation"]
        mask = spaces.Box(0, 1, (int(self.action_space.n),), np.int8)
        self.observation_space = spaces.Dict({"observation": board, "action_mask": mask})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.game.reset(seed=seed, options=options)
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        mover = self.game.agent_selection
        self.game.step(int(action))
        is_over = any(self.game.terminations.values())
        is_truncated = any(self.game.truncations.values())
        return self._observe(), float(self.game.rewards[mover]), is_over, is_truncated, {}

    def _observe(self) -> Any:
        seen = self.game.observe(self.game.agent_selection)
        space = self.observation_space["observation"]
        return {
            "observation": np.asarray(seen["observation"], space.dtype),
            "action_mask": np.asarray(seen["action_mask"], np.int8),
        }

    def close(self) -> None:
        self.game.close()


def make_env() -> TurnsAsEnv:
    """Build one env, in a worker."""
    from pettingzoo.classic.tictactoe import tictactoe

    return TurnsAsEnv(tictactoe.env())


class Table:
    """Keeps the policy's preferences and the value of each position, as the player to move sees it."""

    def __init__(self, seed: int) -> None:
        self.preferences = np.zeros((3**9, 9))
        self.values = np.zeros(3**9)
        self.rng = np.random.default_rng(seed)

    @staticmethod
    def positions(observations: Any) -> Array:
        """Return a number for each position: each field is empty, the mover's or the opponent's."""
        boards = observations["observation"].reshape(-1, 9, 2).astype(np.intp)
        return (boards[:, :, 0] + 2 * boards[:, :, 1]) @ 3 ** np.arange(9)

    def chances(self, positions: Array, masks: Array) -> Array:
        """Return the policy's probabilities, 0 for illegal actions."""
        preferences = np.where(masks > 0, self.preferences[positions], -np.inf)
        chances = np.exp(preferences - preferences.max(axis=1, keepdims=True))
        return chances / chances.sum(axis=1, keepdims=True)

    def act(self, positions: Array, masks: Array) -> tuple[Array, Array]:
        """Return an action for each position, and the probabilities that it was drawn from."""
        masks = np.where(masks.any(axis=1, keepdims=True), masks, 1)  # the game is over: the next step only resets
        chances = self.chances(positions, masks)
        return (chances.cumsum(axis=1) > self.rng.random((len(chances), 1))).argmax(axis=1), chances

    def learn(self, steps: list[dict[str, Array]], last: Array, rate: float, trace: float) -> None:
        """Take one gradient step. ``last`` holds the positions after the last of the steps."""
        following, after = (
            np.zeros(len(last)),
            self.values[last],
        )  # for the opponent: advantage and value of the next move
        advantages = []
        for step in reversed(steps):
            before = self.values[step["position"]]
            worth = step["reward"] - np.where(step["terminated"], 0.0, after)
            advantage = worth - before - np.where(step["ended"], 0.0, trace * following)
            advantage *= step["real"]  # leave out steps that only reset, and moves whose outcome was lost
            advantages.insert(0, advantage)
            following, after = advantage, before
        every = {name: np.concatenate([step[name] for step in steps]) for name in steps[0]}
        position, advantage = every["position"], np.concatenate(advantages)
        towards = -every["chances"]
        towards[np.arange(len(position)), every["action"]] += 1
        visits = np.maximum(1, np.bincount(position, every["real"], len(self.values)))[position]
        np.add.at(self.preferences, position, (rate * advantage / visits)[:, None] * towards)
        np.add.at(self.values, position, 0.1 * advantage / visits)


def play(envs: SubprocessVectorEnv, table: Table, options: Any) -> int:
    """Let the policy play against itself. Return the number of finished games."""
    observations, _ = envs.reset(seed=options.seed)
    only_resets = np.zeros(envs.num_envs, bool)
    games, reported = 0, 0
    while games < options.games:
        steps = []
        for _ in range(16):
            positions = table.positions(observations)
            actions, chances = table.act(positions, observations["action_mask"])
            observations, rewards, terminated, truncated, infos = envs.step(actions)
            lost = infos.get("multienv", {}).get("_reason", False)  # see docs/learners.md
            steps.append(
                {
                    "position": positions,
                    "action": actions,
                    "chances": chances,
                    "reward": rewards,
                    "terminated": terminated,
                    "ended": terminated | truncated,
                    "real": ~only_resets & ~np.broadcast_to(lost, len(actions)),
                }
            )
            only_resets = terminated | truncated
            games += int(terminated.sum())
        table.learn(steps, table.positions(observations), options.rate, options.trace)
        if games - reported >= options.games / 10:
            reported = games
            deaths = sum(one.losses for one in envs.statistics())
            opening = table.values[0]
            print(f"{games:7} games: the first move is worth {opening:+.2f}; {deaths} workers died", flush=True)
    return games


def against_random(envs: SubprocessVectorEnv, table: Table, games: int) -> tuple[float, float, float]:
    """Let the policy play a random player, which opens in every other env. Return the shares won, drawn and lost."""
    observations, _ = envs.reset(seed=1)
    moves = np.zeros(envs.num_envs, int)
    won = drawn = lost = 0
    while won + drawn + lost < games:
        masks = observations["action_mask"]
        best = table.chances(table.positions(observations), np.where(masks.any(axis=1, keepdims=True), masks, 1))
        chance = np.where(masks > 0, table.rng.random(masks.shape), -1.0)
        is_ours = (moves + np.arange(envs.num_envs)) % 2 == 0
        observations, rewards, terminated, truncated, _ = envs.step(
            np.where(is_ours, best.argmax(axis=1), chance.argmax(axis=1))
        )
        won += int((terminated & (rewards > 0) & is_ours).sum())
        lost += int((terminated & (rewards > 0) & ~is_ours).sum())
        drawn += int((terminated & (rewards == 0)).sum())
        moves = np.where(terminated | truncated, -1, moves + 1)  # the next step is the reset
    total = won + drawn + lost
    return won / total, drawn / total, lost / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--games", type=int, default=30_000)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.5, help="learning rate")
    parser.add_argument("--trace", type=float, default=0.9, help="the lambda of generalised advantage estimation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chaos", action="store_true", help="kill about three workers per second")
    options = parser.parse_args()
    try:
        make_env().close()
    except ImportError as error:
        sys.exit(f"{error}. This example needs PettingZoo: pip install pettingzoo pygame-ce")
    if options.chaos:
        logging.getLogger("multienv").setLevel(logging.ERROR)  # each loss logs a warning; this example counts them

    table = Table(options.seed)
    envs = SubprocessVectorEnv(
        [make_env] * options.num_envs,
        deadlines=Deadlines(step=60.0, reset=60.0),  # replaces hung workers too
        reports="" if options.chaos else None,  # no crash reports for intended deaths
    )
    chaos = Killer(envs, interval=(0.1, 0.5), seed=options.seed) if options.chaos else contextlib.nullcontext()
    with envs, chaos:
        before = against_random(envs, table, 500)
        games = play(envs, table, options)
        after = against_random(envs, table, 500)
        workers = envs.statistics()
    for name, (won, drawn, lost) in (("at first", before), (f"after {games} games", after)):
        print(f"Against a random player, {name}: won {won:.1%}, drew {drawn:.1%}, lost {lost:.1%}.")
    names = ("losses", "exact_recoveries", "replayed_recoveries", "truncated_recoveries")
    died, exact, replayed, cut = (sum(getattr(one, name) for one in workers) for name in names)
    told = f"{cut} games were cut short" if cut else "nothing was lost"
    print(f"{died} workers died; {exact} recoveries were exact, {replayed} replayed, {cut} truncated; {told}.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
