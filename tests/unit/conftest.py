"""Hypothesis without its wall clock: a busy machine is no reason to fail."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "multienv", deadline=None, print_blob=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("multienv")
