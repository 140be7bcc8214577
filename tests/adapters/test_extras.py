"""An adapter without its library says which extra it is of, in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("absent", ["stable_baselines3", "torch"])
def test_without_stable_baselines3_the_extra_is_named(absent):
    code = f"""
import sys
sys.modules[{absent!r}] = None
import multienv
try:
    import multienv.adapters.stable_baselines3
except ImportError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.count("\n") == 1
    assert 'pip install -e ".[sb3]"' in told
    assert "stable_baselines3" in told
