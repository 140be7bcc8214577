"""An adapter without its library says which extra it is of, in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
sys.modules[{!r}] = None
try:
    {}
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("extra", "skipped", "used"),
    [
        ("sb3", "stable_baselines3", "import multienv.adapters.stable_baselines3"),
        ("sb3", "torch", "import multienv.adapters.stable_baselines3"),
        ("prometheus", "prometheus_client", "import multienv.adapters.prometheus"),
        ("tensorboard", "tensorboard", "from multienv.adapters.tensorboard import *; TensorBoardExporter('runs')"),
    ],
)
def test_without_the_library_of_an_adapter_the_extra_is_named(extra, skipped, used):
    command = [sys.executable, "-c", CODE.format(skipped, used)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.count("\n") == 1
    assert f'pip install -e ".[{extra}]"' in told
