"""RLlib's PPO over ``make_vec``, in an env runner of its own: the same episodes, whatever dies."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import multienv

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
FOUND = [str(Path(multienv.__file__).parents[1]), str(ROOT / "examples" / "recipes")]


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None or importlib.util.find_spec("pyarrow") is None,
    reason="RLlib is not installed: it is of the extra rllib, in a virtual environment of its own",
)
def test_an_iteration_of_ppo_sees_the_same_episodes_while_its_workers_are_killed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("rllib_trainer.py"))],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(FOUND), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    calm, struck = json.loads(done.stdout.splitlines()[-1])
    assert (calm["exact"], calm["truncated"], struck["truncated"]) == (0, 0, 0)
    assert struck["exact"] > 5
    assert struck["episodes"] == calm["episodes"]
    assert struck["return"] == calm["return"]
