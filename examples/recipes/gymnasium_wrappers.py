"""Where to put gymnasium's wrappers: the env's own state inside ``env_fn``, the learner's statistics outside."""

from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.wrappers import RecordEpisodeStatistics, RecordVideo
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward

from multienv import SubprocessVectorEnv


def make_env(env_id: str, videos: Path | None = None) -> gymnasium.Env[Any, Any]:
    """Build one env, in a worker."""
    env = gymnasium.make(env_id, render_mode=None if videos is None else "rgb_array")
    if videos is not None:  # only then does the env render frames
        env = RecordVideo(env, str(videos), episode_trigger=lambda episode: episode % 2 == 0)
    return RecordEpisodeStatistics(env)  # does not count lost episodes


def make_envs(env_fns: list[Any], **options: Any) -> tuple[SubprocessVectorEnv, gymnasium.vector.VectorEnv]:
    """Return the envs, bare and wrapped. The trainer keeps the statistics for normalization, over all envs."""
    envs = SubprocessVectorEnv(env_fns, **options)
    return envs, NormalizeReward(NormalizeObservation(envs))
