"""Go-Explore's first phase on Montezuma's Revenge: return to a promising state, and explore from there.

``copy.deepcopy`` cannot copy the emulator, and the emulator's own saved states leave out the wrappers. So the archive
holds forked snapshots. ``restore`` brings back emulator, wrappers and random generators, in a few milliseconds.

    pip install -e ".[examples]" ale-py && python examples/go_explore.py

Source of the idea: Ecoffet, Huizinga, Lehman, Stanley and Clune, "First return, then explore", Nature 590 (2021).
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

import ale_py
import gymnasium
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from multienv import Snapshot, SubprocessEnv

gymnasium.register_envs(ale_py)

# Addresses of these values in the game's memory.
ROOM, X, Y, LIVES = 3, 42, 43, 58
Cell = tuple[int, int, int]


@dataclass
class Entry:
    """A state worth returning to."""

    snapshot: Snapshot
    score: float
    visits: int = 0


def make() -> gymnasium.Env:
    """Build the env. Its observations are the game's memory."""
    return gymnasium.make("ALE/MontezumaRevenge-v5", obs_type="ram", repeat_action_probability=0.0)


def cell_of(ram) -> Cell:
    """Return the cell of a state. The search treats all states of a cell as equal."""
    return int(ram[ROOM]), int(ram[X]) // 8, int(ram[Y]) // 8


def explore(env: SubprocessEnv, archive: dict[Cell, Entry], dice: random.Random, steps: int, room_for: int) -> float:
    """Return to a state, act at random from there, and keep states that are new or have a better score."""
    entries = list(archive.values())
    (entry,) = dice.choices(entries, [(1 + one.visits) ** -0.5 for one in entries])
    del entries  # a snapshot is freed when nothing refers to it any more
    entry.visits += 1
    env.restore(entry.snapshot)
    score, best, action, lives = entry.score, entry.score, 0, None
    for _ in range(steps):
        if dice.random() < 0.1:
            action = dice.randrange(env.action_space.n)
        ram, reward, terminated, truncated, _ = env.step(action)
        lives = ram[LIVES] if lives is None else lives
        if terminated or truncated or ram[LIVES] != lives:
            break
        score += float(reward)
        best = max(best, score)
        cell = cell_of(ram)
        known = archive.get(cell)
        if (known is None and len(archive) < room_for) or (known is not None and score > known.score):
            archive[cell] = Entry(env.snapshot(), score)
    return best


def main() -> None:
    """Search, and print how far the search came."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=100, help="steps to explore from each state")
    parser.add_argument("--cells", type=int, default=300, help="most cells to keep at a time; each is a frozen process")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    dice, best = random.Random(arguments.seed), 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with SubprocessEnv(make) as env, Progress(*columns) as bar:
        ram, _ = env.reset(seed=arguments.seed)
        archive = {cell_of(ram): Entry(env.snapshot(), 0.0)}
        task = bar.add_task("exploring", total=arguments.iterations)
        for iteration in range(1, arguments.iterations + 1):
            best = max(best, explore(env, archive, dice, arguments.steps, arguments.cells))
            told = f"{len(archive)} cells, best score {best:g}"
            bar.update(task, advance=1, description=told)
            if not bar.console.is_terminal and iteration % 100 == 0:  # a pipe shows no bar
                print(f"{iteration} iterations: {told}", flush=True)
        rooms = len({room for room, _, _ in archive})
        print(
            f"{len(archive)} cells in {rooms} rooms, best score {best:g}; {env.statistics().steps:,} steps on this path"
        )


if __name__ == "__main__":
    main()
