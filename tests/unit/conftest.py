"""Hypothesis without its wall clock: a busy machine is no reason to fail."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("multienv", deadline=None, print_blob=True, max_examples=60)
settings.load_profile("multienv")
