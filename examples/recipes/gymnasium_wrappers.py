"""Where gymnasium's wrappers belong: what an env must remember inside ``env_fn``, what the learner learns outside."""

from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.wrappers import RecordEpisodeStatistics, RecordVideo
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward

from multienv import SubprocessVectorEnv


def make_env(env_id: str, videos: Path | None = None) -> gymnasium.Env[Any, Any]:
    """Build one env, in a worker."""
    env = gymnasium.make(env_id, render_mode=None if videos is None else "rgb_array")
    if videos is not None:  # frames are there only
        env = RecordVideo(env, str(videos), episode_trigger=lambda episode: episode % 2 == 0)
    return RecordEpisodeStatistics(env)  # an episode that was lost is not counted


def make_envs(env_fns: list[Any], **options: Any) -> tuple[SubprocessVectorEnv, gymnasium.vector.VectorEnv]:
    """Return the envs, and the same wrapped: what all envs have taught the normalisation is kept in the trainer."""
    envs = SubprocessVectorEnv(env_fns, **options)
    return envs, NormalizeReward(NormalizeObservation(envs))
