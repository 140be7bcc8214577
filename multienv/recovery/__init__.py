"""Recover the envs of lost workers: the supervisor and its parts.

This package is not public: the public names are in ``multienv``, and ``docs/api.md`` lists them.
"""
