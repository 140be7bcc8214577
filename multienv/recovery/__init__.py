"""Bringing a lost env back: what drives it is recorded, run again, and held against what the caller saw."""
