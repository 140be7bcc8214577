"""An adapter without its library says which extra it is of, in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("skipped", ["stable_baselines3", "torch"])
def test_without_stable_baselines3_the_extra_is_named(skipped):
    code = f"""
import sys
sys.modules[{skipped!r}] = None
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


@pytest.mark.parametrize(
    ("extra", "skipped", "used"),
    [
        ("prometheus", "prometheus_client", "import multienv.adapters.prometheus"),
        ("tensorboard", "tensorboard", "from multienv.adapters.tensorboard import *; TensorBoardExporter('runs')"),
    ],
)
def test_without_the_library_of_an_exporter_the_extra_is_named(extra, skipped, used):
    code = f"""
import sys
sys.modules[{skipped!r}] = None
try:
    {used}
except ImportError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.count("\n") == 1
    assert f'pip install -e ".[{extra}]"' in told
