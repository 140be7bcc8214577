"""PPO with torch in a single file, on environments whose workers may be killed at any moment.

    python examples/ppo_torch.py                                # learn CartPole-v1
    python examples/ppo_torch.py --chaos                        # ... while workers are killed at random
    python examples/ppo_torch.py --chaos --on-crash truncate    # ... and their episodes are truncated
    python examples/ppo_torch.py --env ALE/Pong-v5 --total-steps 10_000_000 --log runs/pong

With the same ``--seed``, the first two commands learn the same, to the bit. The third one shows what a learner does
with an episode that cannot be recovered. ``docs/learners.md`` explains the code.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
from collections import deque
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from multienv import Deadlines, RestartPolicy, SubprocessVectorEnv
from multienv.testing import Killer

try:
    import torch
    from torch import Tensor, nn
    from torch.distributions import Categorical
except ImportError as error:
    sys.exit(f"{error}. This example needs torch: pip install torch")


def make_env(env_id: str) -> gymnasium.Env[Any, Any]:
    """Build one env, in a worker. The statistics are inside it too: so a lost episode does not count as a bad one."""
    if not env_id.startswith("ALE/"):
        return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make(env_id))
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make(env_id, frameskip=1, repeat_action_probability=0.0)
    env = gymnasium.wrappers.RecordEpisodeStatistics(env)  # counts whole games and unclipped rewards
    env = gymnasium.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, terminal_on_life_loss=True)
    env = gymnasium.wrappers.TransformReward(env, np.sign)
    return gymnasium.wrappers.FrameStackObservation(env, 4)


# --- the learner ----------------------------------------------------------------------------------


def layer(module: Any, gain: float = 2**0.5) -> Any:
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


class Agent(nn.Module):
    """Policy and value function: a convolutional network for frames, two small networks for vectors."""

    def __init__(self, observations: gymnasium.spaces.Box, actions: gymnasium.spaces.Discrete) -> None:
        super().__init__()
        if len(observations.shape) == 3:  # stacked frames
            body = nn.Sequential(
                *(layer(nn.Conv2d(observations.shape[0], 32, 8, 4)), nn.ReLU()),
                *(layer(nn.Conv2d(32, 64, 4, 2)), nn.ReLU()),
                *(layer(nn.Conv2d(64, 64, 3, 1)), nn.ReLU(), nn.Flatten()),
                *(layer(nn.Linear(64 * 7 * 7, 512)), nn.ReLU()),
            )
            actor_body = critic_body = body
            width, self.scale = 512, 255.0
        else:
            actor_body, critic_body = (
                nn.Sequential(
                    *(nn.Flatten(), layer(nn.Linear(int(np.prod(observations.shape)), 64)), nn.Tanh()),
                    *(layer(nn.Linear(64, 64)), nn.Tanh()),
                )
                for _ in range(2)
            )
            width, self.scale = 64, 1.0
        self.actor = nn.Sequential(actor_body, layer(nn.Linear(width, int(actions.n)), 0.01))
        self.critic = nn.Sequential(critic_body, layer(nn.Linear(width, 1), 1.0))

    def value(self, observations: Tensor) -> Tensor:
        return self.critic(observations / self.scale).squeeze(-1)

    def policy(self, observations: Tensor) -> Categorical:
        return Categorical(logits=self.actor(observations / self.scale))


def without_outcome(infos: dict[str, Any], num_envs: int) -> np.ndarray:
    """Tell for each env whether this step has no outcome: its worker was lost, and the episode cannot go on exactly.

    The step is ``truncated``. Its observation repeats the one before it, and its reward of 0 is a placeholder.
    """
    return infos.get("multienv", {}).get("_reason", np.zeros(num_envs, bool))


class Rollout:
    """Holds some steps of every env. ``observations`` has one more row: those after the last step."""

    def __init__(self, steps: int, num_envs: int, space: gymnasium.spaces.Box, device: str) -> None:
        def zeros(rows: int, *shape: int) -> Tensor:
            return torch.zeros((rows, num_envs, *shape), device=device)

        self.observations = zeros(steps + 1, *space.shape)
        self.actions, self.log_probs, self.rewards = zeros(steps), zeros(steps), zeros(steps)
        self.terminated, self.ended, self.real = zeros(steps), zeros(steps), zeros(steps)
        self.only_resets = np.zeros(num_envs, bool)  # envs whose next step only resets them

    def add(self, t: int, step: tuple[Any, ...]) -> None:
        observations, rewards, terminated, truncated, infos = step
        device = self.rewards.device
        self.observations[t + 1] = torch.as_tensor(observations, device=device)
        self.rewards[t] = torch.as_tensor(rewards, device=device)
        self.terminated[t] = torch.as_tensor(terminated, device=device)
        self.ended[t] = torch.as_tensor(terminated | truncated, device=device)
        # The mask leaves out the steps that only reset an env, and the steps whose outcome was lost.
        real = ~self.only_resets & ~without_outcome(infos, len(rewards))
        self.real[t] = torch.as_tensor(real, device=device)
        self.only_resets = terminated | truncated

    def advantages(self, values: Tensor, discount: float, trace: float) -> Tensor:
        """Return generalised advantage estimates. They are 0 where a step is masked.

        Only ``terminated`` ends the future: a truncated step bootstraps from the critic's value of its observation. So
        does the last step before a lost step: both steps end with the same observation. The lost step's own estimate is
        0, so nothing flows back from it.
        """
        advantages = torch.zeros_like(self.rewards)
        following = torch.zeros_like(self.rewards[0])
        for t in reversed(range(len(self.rewards))):
            surprise = self.rewards[t] + discount * values[t + 1] * (1 - self.terminated[t]) - values[t]
            following = self.real[t] * (surprise + discount * trace * (1 - self.ended[t]) * following)
            advantages[t] = following
        return advantages


def improve(agent: Agent, optimizer: torch.optim.Optimizer, rollout: Rollout, options: Any) -> dict[str, float]:
    """Update the agent on one rollout, and return the losses of the last minibatch."""
    with torch.no_grad():
        values = agent.value(rollout.observations.flatten(0, 1)).reshape(options.steps + 1, -1)
        advantages = rollout.advantages(values, options.discount, options.trace)
    returns = (advantages + values[:-1]).flatten()
    observations = rollout.observations[:-1].flatten(0, 1)
    actions, log_probs, advantages = (x.flatten() for x in (rollout.actions, rollout.log_probs, advantages))
    real = torch.nonzero(rollout.real.flatten()).squeeze(1)  # the masked steps are left out
    if len(real) < options.minibatches * 2:
        return {}
    for _ in range(options.epochs):
        for batch in real[torch.randperm(len(real), device=real.device)].chunk(options.minibatches):
            policy = agent.policy(observations[batch])
            ratio = (policy.log_prob(actions[batch]) - log_probs[batch]).exp()
            advantage = advantages[batch]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
            policy_loss = -torch.min(advantage * ratio, advantage * clipped).mean()
            value_loss = 0.5 * (agent.value(observations[batch]) - returns[batch]).pow(2).mean()
            entropy = policy.entropy().mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss - options.entropy * entropy).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    return {"policy_loss": policy_loss.item(), "value_loss": value_loss.item(), "entropy": entropy.item()}


# --- the run --------------------------------------------------------------------------------------


def collect(envs: SubprocessVectorEnv, agent: Agent, rollout: Rollout, returns: deque[float]) -> None:
    """Fill the rollout, and append the returns of the episodes that ended in it."""
    rollout.observations[0] = rollout.observations[-1]
    for t in range(len(rollout.rewards)):
        with torch.no_grad():
            policy = agent.policy(rollout.observations[t])
            actions = policy.sample()
        rollout.actions[t], rollout.log_probs[t] = actions, policy.log_prob(actions)
        step = envs.step(actions.cpu().numpy())
        rollout.add(t, step)
        if "episode" in step[4]:
            returns.extend(step[4]["episode"]["r"][step[4]["episode"]["_r"]].tolist())


def train(options: argparse.Namespace, envs: SubprocessVectorEnv, writer: Any) -> None:
    agent = Agent(envs.single_observation_space, envs.single_action_space).to(options.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=options.learning_rate, eps=1e-5)
    rollout = Rollout(options.steps, options.num_envs, envs.single_observation_space, options.device)
    returns: deque[float] = deque(maxlen=50)
    rollout.observations[-1] = torch.as_tensor(envs.reset(seed=options.seed)[0])
    size, began, masked = options.steps * options.num_envs, time.monotonic(), 0
    updates = max(1, options.total_steps // size)
    for update in range(1, updates + 1):
        optimizer.param_groups[0]["lr"] = options.learning_rate * (1 - (update - 1) / updates)
        collect(envs, agent, rollout, returns)
        losses = improve(agent, optimizer, rollout, options)
        masked += int((rollout.real == 0).sum())
        steps = update * size
        workers = envs.statistics()
        mean = float(np.mean(returns)) if returns else float("nan")
        if writer is not None:
            scalars = {f"losses/{name}": value for name, value in losses.items()} | {
                "charts/episodic_return": mean,
                "charts/steps_per_second": steps / (time.monotonic() - began),
                "workers/lost": sum(one.losses for one in workers),
                "workers/episodes_cut_short": sum(one.truncated_recoveries for one in workers),
            }
            for name, value in scalars.items():
                writer.add_scalar(name, value, steps)
        if update % max(1, updates // 20) == 0 or update == updates:
            rate = steps / (time.monotonic() - began)
            deaths = sum(one.losses for one in workers)
            print(f"{steps:8} steps: mean return {mean:7.2f}; {deaths} workers died; {rate:.0f} steps/s", flush=True)
    print(f"The mean return of the last {len(returns)} episodes is {mean:.2f}; {masked} of {steps} steps were masked.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--env", default="CartPole-v1", help="an env with discrete actions; ALE/… gets the usual Atari wrappers")
    add("--total-steps", type=int, default=100_000)
    add("--num-envs", type=int, default=8)
    add("--steps", type=int, default=128, help="steps per env between two updates")
    add("--seed", type=int, default=0)
    add("--learning-rate", type=float, default=1e-3)
    add("--epochs", type=int, default=4)
    add("--minibatches", type=int, default=4)
    add("--discount", type=float, default=0.99)
    add("--trace", type=float, default=0.95, help="the lambda of generalised advantage estimation")
    add("--clip", type=float, default=0.2)
    add("--entropy", type=float, default=0.01)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--log", metavar="DIRECTORY", help="write logs for TensorBoard into this directory")
    add("--chaos", action="store_true", help="kill about three workers per second")
    add("--on-crash", default="replay", choices=["replay", "truncate"], help="what to do with their episodes")
    return parser.parse_args()


def main() -> None:
    options = parse()
    writer = None
    if options.log:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            sys.exit(f"--log: {error}. pip install tensorboard")
        writer = SummaryWriter(options.log)
    if options.chaos:
        logging.getLogger("multienv").setLevel(logging.ERROR)  # each loss logs a warning; this example counts them
    torch.set_num_threads(1)  # faster for small networks, and leaves the other cores to the workers
    torch.manual_seed(options.seed)
    envs = SubprocessVectorEnv(
        [partial(make_env, options.env)] * options.num_envs,
        deadlines=Deadlines(step=60.0, reset=60.0),  # replaces hung workers too
        restart=RestartPolicy(on_crash=options.on_crash),
        reports="" if options.chaos else None,  # no crash reports for intended deaths
    )
    chaos = Killer(envs, interval=(0.1, 0.5), seed=options.seed) if options.chaos else contextlib.nullcontext()
    with envs, chaos, writer or contextlib.nullcontext():
        train(options, envs, writer)
        workers = envs.statistics()
    names = ("losses", "exact_recoveries", "replayed_recoveries", "truncated_recoveries")
    died, exact, replayed, cut = (sum(getattr(one, name) for one in workers) for name in names)
    lost = "their episodes were cut short" if cut else "nothing was lost"
    print(f"{died} workers died; {exact} recoveries were exact, {replayed} replayed, {cut} truncated; {lost}.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
