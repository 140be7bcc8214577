"""Envs by their ids, with DI-engine's contract: asynchronous, synchronous, and in batches.

config       options, states of envs, timesteps
env_manager  what users call
scheduler      the envs of a launched manager: what is asked of each, and what has come back
stacked      the manager whose observations and actions are batches
"""

from multienv.managers.config import EnvState as EnvState
