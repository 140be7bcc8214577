"""Inside a worker process: the request loop, the envs, forked snapshots.

This package is not public: the public names are in ``multienv``, and ``docs/api.md`` lists them.
"""
