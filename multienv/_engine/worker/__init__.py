"""Inside a worker process: the request loop, the envs, forked snapshots."""
