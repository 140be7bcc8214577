"""Recover the envs of lost workers: the supervisor and its parts."""
