"""How many cores there are to use, also in a container that may have the time of some."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from multienv._engine import cores


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
        ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "200000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "max 1\n"}, 2.0),
        ("0::/a/b\n", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        ("3:cpu,cpuacct:/\n2:memory:/\n", {}, math.inf),
        ("nonsense\n", {}, math.inf),
    ],
)
def test_the_quota_of_a_container(tmp_path, groups, files, expected):
    assert cores.quota(system(tmp_path, groups, files)) == expected


# --- who runs where, and is asked when --------------------------------------------------------


class Worker:
    core: int | None = None
    sharing = -1

    def prefer(self, core: int | None, *, sharing: int) -> None:
        self.core, self.sharing = core, sharing


@pytest.mark.parametrize(
    ("workers", "available", "busy", "expected"),
    [
        (5, [2, 3], 2, [(2, 3), (3, 3), (2, 3), (3, 3), (2, 3)]),
        (2, [2, 3], 2, [(2, 1), (3, 1)]),
        (2, [0, 1, 2], 3, [(None, 1)] * 2),
        (2, [0], 1, [(None, 0)] * 2),
        (4, [0, 1, 2, 3], 2, [(None, 0)] * 4),
        (0, [0, 1], 2, []),
    ],
    ids=["in turn", "one each", "fewer than cores", "a single core", "a quota of time", "none"],
)
def test_workers_are_dealt_to_the_cores(monkeypatch, workers, available, busy, expected):
    monkeypatch.setattr(cores, "cores", lambda: available)
    monkeypatch.setattr(cores, "busy_cores", lambda: busy)
    made = [Worker() for _ in range(workers)]
    cores.spread(made)
    assert [(one.core, one.sharing) for one in made] == expected


@pytest.mark.parametrize(
    ("preferred", "here", "expected"),
    [
        ({0: 0, 1: 1, 2: 0, 3: 1}, 0, (1, 3, 0, 2)),
        ({0: 0, 1: 1, 2: 0, 3: 1}, 1, (0, 2, 1, 3)),
        ({0: 0, 1: 1, 2: 0, 3: 1}, 7, None),
        ({4: 0, 7: None, 9: 1}, 0, (7, 9, 4)),
        ({0: None, 1: None}, 0, None),
        ({0: 0}, 0, None),
    ],
)
def test_workers_on_other_cores_than_the_trainers_are_asked_first(preferred, here, expected):
    assert cores.asking_orders(preferred).get(here) == expected
