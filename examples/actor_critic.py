"""Advantage actor-critic in numpy, on environments whose workers may be killed at any moment.

    python examples/actor_critic.py                    # learn CartPole-v1
    python examples/actor_critic.py --chaos            # ... while workers are killed at random
    python examples/actor_critic.py --chaos --verify   # ... and check that the kills changed nothing
    python examples/actor_critic.py --vector --chaos   # ... with several environments in each worker
    python examples/actor_critic.py --backend ray      # ... on a Ray cluster (without --address: a local one)

The learner is plain A2C with generalised advantage estimation.  It treats terminated and truncated
differently.  After a terminated episode, the future is worth 0.  After a truncated one, the future is
worth the critic's value of the final observation.  ``MultiEnv`` and the vector environments reset in
the step after the one that ended an episode (``AutoresetMode.NEXT_STEP``).  So the final observation
is the next one in the rollout, and the step that only performed the reset is left out of the loss.

Everything that the learner does depends only on ``--seed``.  A separate thread kills the workers, at
random moments.  The learner never looks at the kills.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from multienv import MultiEnv, RayOptions, RayVectorEnv, SubprocessVectorEnv, create_subprocess_envs

try:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
except ImportError as error:
    sys.exit(f'{error}: this example needs rich and matplotlib; in a checkout, run pip install -e ".[examples]"')

Floats = NDArray[np.float32]
Envs = MultiEnv | SubprocessVectorEnv | RayVectorEnv

HORIZON = 16  # steps per environment between two updates
HIDDEN = 32  # units in each of the two hidden layers
DISCOUNT = 0.995
TRACE = 0.95  # the lambda of generalised advantage estimation
ACTOR_RATE = 2e-3  # both learning rates fall to zero over --total-steps
CRITIC_RATE = 4e-3
ENTROPY_BONUS = 0.01
GRADIENT_NORM = 0.5
CHAOS = 0.5  # kills per 1000 steps, if --chaos gives no number
RECOVERIES = ("exact_recoveries", "replayed_recoveries", "truncated_recoveries")
WINDOW = 100  # episodes in the mean return that decides whether the task is solved


class Network:
    """Two tanh layers and a linear layer, with gradient and state of Adam, all in flat vectors."""

    def __init__(self, inputs: int, outputs: int, gain: float, rng: np.random.Generator) -> None:
        self.shapes = list(pairwise((inputs, HIDDEN, HIDDEN, outputs)))
        self.weights, self.gradient, self.mean, self.square = np.zeros(
            (4, sum((rows + 1) * columns for rows, columns in self.shapes)), np.float32
        )
        self.layers = self._layers(self.weights)
        self.gradients = self._layers(self.gradient)
        self.inputs: list[Floats] = []  # inputs of each layer in the latest forward pass
        self.updates = 0
        for (matrix, _), scale in zip(self.layers, (np.sqrt(2.0), np.sqrt(2.0), gain), strict=True):
            u, _, v = np.linalg.svd(rng.normal(size=matrix.shape), full_matrices=False)
            matrix[:] = scale * (u @ v)

    def _layers(self, flat: Floats) -> list[tuple[Floats, Floats]]:
        """Return the matrix and the bias of each layer, as views of one flat vector."""
        layers, start = [], 0
        for rows, columns in self.shapes:
            middle, end = start + rows * columns, start + (rows + 1) * columns
            layers.append((flat[start:middle].reshape(rows, columns), flat[middle:end]))
            start = end
        return layers

    def forward(self, x: Floats) -> Floats:
        """Return the outputs for a batch of inputs."""
        self.inputs = [x]
        for matrix, bias in self.layers[:-1]:
            x = np.tanh(x @ matrix + bias)
            self.inputs.append(x)
        matrix, bias = self.layers[-1]
        return x @ matrix + bias

    def descend(self, slope: Floats, rate: float) -> None:
        """Take one clipped Adam step; `slope` is the derivative of the loss with respect to the latest outputs."""
        for i in reversed(range(len(self.layers))):
            np.matmul(self.inputs[i].T, slope, out=self.gradients[i][0])
            np.sum(slope, axis=0, out=self.gradients[i][1])
            if i:
                slope = (slope @ self.layers[i][0].T) * (1 - self.inputs[i] ** 2)
        self.updates += 1
        norm = float(np.sqrt(self.gradient @ self.gradient))
        gradient = self.gradient * min(1.0, GRADIENT_NORM / (norm + 1e-12))
        self.mean += 0.1 * (gradient - self.mean)
        self.square += 0.001 * (gradient**2 - self.square)
        mean = self.mean / (1 - 0.9**self.updates)
        square = self.square / (1 - 0.999**self.updates)
        self.weights -= rate * mean / (np.sqrt(square) + 1e-8)


class Rollout:
    """HORIZON steps of every environment. `observations` has one more row: those after the last step."""

    def __init__(self, num_envs: int, size: int) -> None:
        self.observations = np.zeros((HORIZON + 1, num_envs, size), np.float32)
        self.actions = np.zeros((HORIZON, num_envs), np.intp)
        self.rewards = np.zeros((HORIZON, num_envs), np.float32)
        self.terminated = np.zeros((HORIZON, num_envs), np.bool_)
        self.truncated = np.zeros((HORIZON, num_envs), np.bool_)
        self.real = np.zeros((HORIZON, num_envs), np.bool_)  # False: this step only reset the environment
        self.ended = np.zeros(num_envs, np.bool_)  # whether the latest step ended the episode
        self.totals = np.zeros(num_envs)  # return so far of each running episode

    def record(self, t: int, actions: NDArray[np.intp], outcome: tuple[Any, ...]) -> None:
        self.actions[t] = actions
        self.observations[t + 1], self.rewards[t], self.terminated[t], self.truncated[t], _ = outcome
        self.real[t] = ~self.ended
        self.ended = self.terminated[t] | self.truncated[t]
        self.totals = self.totals * self.real[t] + self.rewards[t]

    def advantages(self, values: Floats) -> Floats:
        """Return generalised advantage estimates. They are 0 for steps that only reset."""
        # Rewards are scaled by (1 - DISCOUNT). This keeps the values of any policy near the unit interval.
        future = DISCOUNT * values[1:] * ~self.terminated  # a truncated step keeps its future
        surprises = (1 - DISCOUNT) * self.rewards + future - values[:-1]
        carried = DISCOUNT * TRACE * ~(self.terminated | self.truncated)  # nothing flows across the end of an episode
        advantages = np.zeros_like(surprises)
        following = np.zeros_like(surprises[0])
        for t in reversed(range(HORIZON)):
            advantages[t] = following = surprises[t] + carried[t] * following
        return advantages * self.real


class ActorCritic:
    """Two separate networks: one for the policy, one for the value of an observation."""

    def __init__(self, space: gymnasium.Space[Any], choices: gymnasium.Space[Any], seed: int) -> None:
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
            sys.exit(f"this example learns from flat vectors only, not from {space}")
        if not isinstance(choices, gymnasium.spaces.Discrete) or choices.start != 0:
            sys.exit(f"this example learns discrete actions only, not {choices}")
        size = space.shape[0]
        self.rng = np.random.default_rng(seed)
        self.actor = Network(size, int(choices.n), 0.01, self.rng)
        self.critic = Network(size, 1, 1.0, self.rng)
        self.scale = np.full(size, 0.5, np.float32)  # scales observations to a similar size
        bounded = np.isfinite(space.high)
        self.scale[bounded] = 2.0 / np.maximum(np.abs(space.high[bounded]), 1e-6)

    def act(self, observations: Floats) -> NDArray[np.intp]:
        logits = self.actor.forward(observations * self.scale)
        # The argmax of logits plus Gumbel noise is a sample from their softmax.
        choices: NDArray[np.intp] = np.argmax(logits + self.rng.gumbel(size=logits.shape), axis=1)
        return choices

    def learn(self, rollout: Rollout, remaining: float) -> None:
        """Take one gradient step for each network, on one rollout. `remaining` scales the learning rates."""
        _, num_envs, size = rollout.observations.shape
        inputs = rollout.observations.reshape(-1, size) * self.scale
        real = rollout.real.reshape(-1, 1)
        count = np.float32(np.count_nonzero(real))

        values = self.critic.forward(inputs).reshape(HORIZON + 1, num_envs)
        advantages = rollout.advantages(values)
        slope = np.zeros_like(values)  # gradient of half the mean squared error; 0 in the row after the last step
        slope[:-1] = -advantages / count
        self.critic.descend(slope.reshape(-1, 1), CRITIC_RATE * remaining)

        mean, deviation = advantages[rollout.real].mean(), advantages[rollout.real].std()
        advantage = ((advantages - mean) / (deviation + 1e-8)).reshape(-1, 1)
        logits = self.actor.forward(inputs[:-num_envs])
        logits -= logits.max(axis=1, keepdims=True)
        logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        chances = np.exp(logs)
        entropy = -(chances * logs).sum(axis=1, keepdims=True)
        towards = chances.copy()  # gradient of -log(probability of the action) with respect to the logits
        towards[np.arange(len(towards)), rollout.actions.ravel()] -= 1
        slope = (towards * advantage + ENTROPY_BONUS * chances * (logs + entropy)) * real / count
        self.actor.descend(slope, ACTOR_RATE * remaining)


@dataclass
class Run:
    """The results of one training run."""

    steps: int = 0
    seconds: float = 0.0
    solved: bool = False
    episodes: list[tuple[int, float]] = field(default_factory=list)  # steps taken at its end, its return
    kills: list[int] = field(default_factory=list)  # steps taken at each kill
    weights: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    statistics: list[Any] = field(default_factory=list)  # one per worker

    @property
    def mean_return(self) -> float:
        latest = [total for _, total in self.episodes[-WINDOW:]]
        return sum(latest) / len(latest) if latest else 0.0

    def count(self, name: str) -> int:
        return sum(getattr(each, name) for each in self.statistics)


@contextmanager
def chaos(envs: Envs, run: Run, rate: float | None) -> Iterator[None]:
    """While the block runs, kill `rate` random workers per 1000 steps at random moments; record them in `run`."""
    over = threading.Event()
    dice = random.SystemRandom()  # independent of the learner's seed
    killed: set[int] = set()

    def rampage(rate: float) -> None:
        due = dice.expovariate(rate / 1000)
        while not over.wait(dice.uniform(0, 0.01)):  # so that a kill may hit any part of a step
            if run.steps < due:
                continue
            due = run.steps + dice.expovariate(rate / 1000)
            worker = dice.choice(envs.statistics())
            pid = None if worker is None else worker.pid
            if pid is None or pid in killed:  # being replaced at this moment
                continue
            try:
                os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
            except OSError:  # already gone
                continue
            killed.add(pid)
            run.kills.append(run.steps)

    if rate is None:
        yield
        return
    thread = threading.Thread(target=rampage, args=(rate,), name="chaos", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def build(options: argparse.Namespace) -> Envs:
    """Build one environment per worker, with lists; or batches, with several per worker, here or on a cluster."""
    env_fns = [partial(gymnasium.make, options.env)] * options.num_envs
    reports = None if options.chaos is None else ""  # no crash reports for intended deaths
    if options.backend == "ray":
        return RayVectorEnv(env_fns, ray=RayOptions(address=options.address), reports=reports)
    if options.vector:
        return SubprocessVectorEnv(env_fns, reports=reports)
    return MultiEnv(create_subprocess_envs(env_fns, reports=reports))


def spaces_of(envs: Envs) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    """Return the observation space and the action space of a single environment."""
    if isinstance(envs, MultiEnv):
        return envs.observation_space, envs.action_space
    return envs.single_observation_space, envs.single_action_space


def was_cut_short(infos: Any, i: int) -> bool:
    """Tell whether the episode that just ended in environment `i` was truncated because its worker was lost."""
    return bool(infos.get("_multienv", {i: False})[i]) if isinstance(infos, dict) else "multienv" in infos[i]


def collect(envs: Envs, learner: ActorCritic, rollout: Rollout, run: Run) -> None:
    """Fill the rollout, and add to `run` the episodes that end in it."""
    rollout.observations[0] = rollout.observations[-1]
    for t in range(HORIZON):
        actions = learner.act(rollout.observations[t])
        outcome = envs.step(actions.tolist())
        rollout.record(t, actions, outcome)
        run.steps += int(np.count_nonzero(rollout.real[t]))
        for i in np.flatnonzero(rollout.ended):
            # An episode that was cut short by a lost worker says nothing about the policy.
            if not was_cut_short(outcome[4], int(i)):
                run.episodes.append((run.steps, float(rollout.totals[i])))


def train(options: argparse.Namespace, title: str, rate: float | None, progress: Progress) -> Run:
    """Learn until the task is solved or the steps are used up.  The result depends only on `options`."""
    run = Run()
    began = last = time.monotonic()
    bar = progress.add_task(title, total=options.total_steps, told="starting the workers")
    with closing(build(options)) as envs:
        learner = ActorCritic(*spaces_of(envs), options.seed)
        rollout = Rollout(options.num_envs, learner.scale.size)
        rollout.observations[-1], _ = envs.reset(seed=options.seed)
        with chaos(envs, run, rate):
            while run.steps < options.total_steps and not run.solved:
                collect(envs, learner, rollout, run)
                learner.learn(rollout, remaining=max(0.0, 1 - run.steps / options.total_steps))
                run.solved = len(run.episodes) >= WINDOW and run.mean_return >= options.threshold
                run.statistics = envs.statistics()
                run.seconds = time.monotonic() - began
                recovered = sum(map(run.count, RECOVERIES))
                told = f"return {run.mean_return:5.1f}  {run.steps / run.seconds:6.0f} steps/s"
                told += f"  {recovered}/{run.count('losses')} recovered  {run.seconds:4.1f} s"
                total = run.steps if run.solved else options.total_steps
                progress.update(bar, completed=run.steps, total=total, told=told)
                if not progress.console.is_terminal and time.monotonic() > last + 5:  # a pipe shows no bar
                    last = time.monotonic()
                    progress.console.print(f"{title}: {run.steps} steps  {told}", soft_wrap=True)
        if len(run.kills) > run.count("losses"):  # a worker died after the last step: another step recovers it
            envs.step(learner.act(rollout.observations[-1]).tolist())
            run.statistics = envs.statistics()
        run.weights = np.concatenate([learner.actor.weights, learner.critic.weights])
    return run


def curve(run: Run) -> tuple[Floats, Floats, Floats]:
    """Return for each episode the steps taken at its end, its return, and the mean return of the latest ones."""
    steps, totals = np.reshape(run.episodes, (-1, 2)).T
    sums = np.concatenate([[0.0], np.cumsum(totals)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(0, ends - WINDOW)
    return steps, totals, (sums[ends] - sums[starts]) / (ends - starts)


def draw(run: Run, calm: Run | None, options: argparse.Namespace) -> None:
    """Save the learning curve with the kills marked, and the curve of the undisturbed run if there is one."""
    steps, totals, means = curve(run)
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    if run.kills:
        style: dict[str, Any] = {"colors": "tab:red", "linewidth": 1, "alpha": 0.5}
        label = f"worker killed ({len(run.kills)})"
        axes.vlines(run.kills, 0, 1, transform=axes.get_xaxis_transform(), label=label, **style)
    axes.plot(steps, totals, ".", color="tab:blue", alpha=0.3, markersize=4, label="episode")
    axes.plot(steps, means, color="tab:blue", linewidth=3, label=f"mean of the last {WINDOW}")
    if calm is not None:
        calm_steps, _, calm_means = curve(calm)
        axes.plot(calm_steps, calm_means, color="black", linewidth=1, linestyle=":", label="same seed, undisturbed")
    if np.isfinite(options.threshold):
        label = f"solved ({options.threshold:g})"
        axes.axhline(options.threshold, color="tab:green", linestyle="--", label=label)
    axes.set(xlabel="environment steps", ylabel="episode return", title=f"{options.env}, seed {options.seed}")
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(options.plot, dpi=120)


def difference(one: Run, other: Run) -> str | None:
    """Return where two runs first differ, or None if they are equal to the bit."""
    for i, (a, b) in enumerate(zip(one.episodes, other.episodes, strict=False)):
        if a != b:
            return f"episode {i + 1} returned {a[1]:g} at step {a[0]}, not {b[1]:g} at step {b[0]}"
    if (len(one.episodes), one.steps) != (len(other.episodes), other.steps):
        return f"{len(one.episodes)} episodes in {one.steps} steps, not {len(other.episodes)} in {other.steps}"
    if one.weights.tobytes() != other.weights.tobytes():
        return "the same episodes, but the final weights differ"
    return None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Advantage actor-critic in numpy, with workers that get killed.")
    add = parser.add_argument
    add("--env", default="CartPole-v1", help="an environment with flat observations and discrete actions")
    add("--num-envs", type=int, default=8, metavar="N")
    add("--vector", action="store_true", help="put several environments into each worker (SubprocessVectorEnv)")
    add("--backend", choices=("subprocess", "ray"), default="subprocess", help="ray uses RayVectorEnv")
    add("--address", default=os.environ.get("RAY_ADDRESS"), help="address of a Ray cluster (default: a local Ray)")
    add("--seed", type=int, default=0)
    add("--total-steps", type=int, default=500_000, metavar="N", help="give up after this many environment steps")
    add("--chaos", type=float, nargs="?", const=CHAOS, metavar="KILLS", help="kill this many workers per 1000 steps")
    add("--verify", action="store_true", help="run again undisturbed and compare to the bit (implies --chaos)")
    add("--plot", type=Path, default=Path("actor_critic.png"), metavar="PATH")
    options = parser.parse_args(argv)
    if options.verify and options.chaos is None:
        options.chaos = CHAOS
    if options.chaos is not None and options.backend == "ray" and options.address:
        print(f"no kills: the workers are on the nodes of {options.address}")  # here their pids are other processes
        options.chaos = None
    if min(options.num_envs, options.total_steps) < 1 or (options.chaos is not None and options.chaos <= 0):
        parser.error("--num-envs, --total-steps and --chaos must be positive")
    if not options.plot.absolute().parent.is_dir():
        parser.error(f"--plot: there is no folder {options.plot.absolute().parent}")
    try:
        threshold = gymnasium.spec(options.env).reward_threshold
    except gymnasium.error.Error as error:
        parser.error(str(error))
    options.threshold = float("inf") if threshold is None else threshold
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.chaos is not None:
        logging.getLogger("multienv").setLevel(logging.ERROR)  # each loss logs a warning; here the bar counts them
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}")
    with Progress(*columns, console=Console(stderr=True)) as progress:
        run = train(options, "chaos" if options.chaos else "learning", options.chaos, progress)
        calm = train(options, "undisturbed", None, progress) if options.verify else None
    draw(run, calm, options)
    how = "solved" if run.solved else "not solved"
    print(f"{how}: mean return {run.mean_return:.1f} over the last {WINDOW} of {len(run.episodes)} episodes,")
    print(f"{run.steps} steps, {run.seconds:.1f} s; learning curve in {options.plot}")
    if seconds := [each for statistics in run.statistics for each in statistics.recovery_seconds]:
        print(f"a recovery took {np.median(seconds):.3f} s (median), {max(seconds):.3f} s (maximum)")
    found = None if calm is None else difference(run, calm)
    if found:
        print(f"differs from the undisturbed run: {found}")
    elif calm is not None:
        counts = f"{len(run.episodes)} episodes, {run.steps} steps"
        print(f"identical to the undisturbed run: {counts}, weights equal to the bit")
    died, exact, replayed, cut = map(run.count, ("losses", *RECOVERIES))
    lost = f"{cut} episodes were cut short" if cut else "nothing was lost"
    print(f"{died} workers died; {exact} recoveries were exact, {replayed} replayed, {cut} truncated; {lost}.")
    if options.chaos is not None:
        print('no crash reports were written (reports=""): these deaths were intended')
    for report in (each.last_recovery.report for each in run.statistics if each.last_recovery is not None):
        if report:
            print(f"crash report: {report}; run it again with multienv replay")
    return 1 if found else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
