"""A policy that says when snapshots are taken: users have none, because the interval follows what they cost."""

from __future__ import annotations

from multienv._engine.recovery.way_back import ForkingPolicy

__all__ = ["ForkingPolicy"]
