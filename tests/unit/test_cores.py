"""How many cores there are to use, also in a container that may have the time of some."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from multienv import cores


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {}, math.inf),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "200000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "max 1\n"}, 2.0),
        ("0::/a/b\n", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            "3:cpu,cpuacct:/a\n2:memory:/\n",
            {
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            "3:cpu,cpuacct:/\n",
            {
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            math.inf,
        ),
        ("nonsense\n", {}, math.inf),
    ],
)
def test_the_quota_of_a_container(tmp_path, groups, files, expected):
    assert cores.quota(system(tmp_path, groups, files)) == expected


def test_without_control_groups_there_is_no_quota(tmp_path):
    assert cores.quota(tmp_path) == math.inf


@pytest.mark.parametrize(("quota", "busy"), [(math.inf, 8), (2.5, 3), (0.1, 1), (64.0, 8)])
def test_as_many_cores_as_may_be_busy(monkeypatch, quota, busy):
    monkeypatch.setattr(cores, "cores", lambda: list(range(8)))
    monkeypatch.setattr(cores, "quota", lambda: quota)
    assert cores.busy_cores() == busy
