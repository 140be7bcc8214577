"""An adapter without its library says which extra it is of, in one line."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
for skipped, used in {!r}:
    sys.modules[skipped] = None
    try:
        exec(used)
    except ImportError as error:
        print(error)
    del sys.modules[skipped]
"""
# The extra, the library that is not there, and what asks for it.
CASES = [
    ("sb3", "stable_baselines3", "import multienv.adapters.stable_baselines3"),
    ("sb3", "torch", "import multienv.adapters.stable_baselines3"),
    ("pettingzoo", "pettingzoo", "import multienv.adapters.pettingzoo"),
    ("prometheus", "prometheus_client", "import multienv.adapters.prometheus"),
    ("tensorboard", "tensorboard", "from multienv.adapters.tensorboard import *; TensorBoardExporter('runs')"),
]


def test_without_the_library_of_an_adapter_the_extra_is_named():
    command = [sys.executable, "-c", CODE.format([case[1:] for case in CASES])]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(told) == len(CASES)
    for line, (extra, *_) in zip(told, CASES, strict=True):
        assert f'pip install "multienv-rl[{extra}]"' in line
