"""Bring back what a lost worker held: the supervisor and its parts."""
