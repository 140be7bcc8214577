"""Build workers and their envs: options, and how functions travel to another process."""
