"""Vector envs: batches of envs in a few processes, as ``gymnasium.vector.VectorEnv``."""
