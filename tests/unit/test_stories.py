"""What a call of a user's passes through in the trainer; `benchmarks/stories.py` counts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "stories.py"
# Most files of the package. Lower a number when a change passes through fewer; raise none without a reason beside it.
MOST_FILES = {
    "SubprocessEnv.step": 7,
    "SubprocessVectorEnv.step": 8,
    "reset": 16,
    "a death": 28,
    "load_state_dict": 20,
    "restore": 17,
    "recv(4)": 10,
    "MultiEnv.step with an autoreset": 14,
}


@pytest.mark.skipif(sys.platform != "linux", reason="the stories have forked snapshots")
def test_a_story_passes_through_no_more_files_than_before(tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, SCRIPT, "--json", figures, *MOST_FILES]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    found = {name: one["files"] for name, one in json.loads(figures.read_text()).items()}
    grown = {name: (files, MOST_FILES[name]) for name, files in found.items() if files > MOST_FILES[name]}
    assert not grown, f"files now, and at most: {grown}; `python {SCRIPT} --list STORY` prints them"
    assert found.keys() == MOST_FILES.keys()
