"""What env_fns have captured that is large lies in memory once, for all workers, and is still each env's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_envs import TableEnv

from kit import ForkingPolicy, kill_worker, no_leaks, reports_written
from kit.makers import manager, multi_env, one_each
from multienv import (
    SubprocessEnv,
    SubprocessVectorEnv,
)
from multienv._engine.reports.read import load
from multienv._engine.wire.shared_pickle import DATA_NAME, SharedFile
from multienv.cli.env_functions import env_functions
from multienv.errors import UsageError

pytestmark = pytest.mark.usefixtures("monitor_stays")

TABLE = np.random.default_rng(0).random(500_000)


def shared_files() -> dict[int, int]:
    """Return inodes and sizes of the shared files that this process has open."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        path = Path("/proc/self/fd", name)
        if path.is_symlink() and os.readlink(path).startswith(f"/memfd:{DATA_NAME} "):
            found[path.stat().st_ino] = path.stat().st_size
    return found


@pytest.mark.parametrize("make", [one_each, multi_env, manager])
def test_arrays_lie_in_memory_once_for_all_workers(make: Any) -> None:
    table = TABLE.copy()
    with no_leaks():
        envs = make([lambda: TableEnv(table, TABLE[::-1].copy())] * 3)
        (inode,), (size,) = shared_files().keys(), shared_files().values()
        assert table.nbytes <= size < 1.1 * (table.nbytes + 2**16)
        assert list(map(set, envs.call("mappings"))) == [{inode}] * 3
        envs.close()
        assert not shared_files()


def test_each_env_has_its_own_and_what_it_shares() -> None:
    own = [np.full(100_000, index, np.float64) for index in range(3)]
    with one_each([lambda mine=mine: TableEnv(mine, TABLE) for mine in own]) as envs:
        assert [sums[0] for sums in envs.call("sums")] == [100_000 * index for index in range(3)]
        assert [sums[1] for sums in envs.call("sums")] == [float(np.sum(TABLE))] * 3
        (size,) = shared_files().values()
        assert size < 1.1 * (TABLE.nbytes + sum(one.nbytes for one in own))


@pytest.mark.parametrize(
    ("snapshots", "context"),
    [
        (True, "forkserver"),
        (False, "spawn"),
        pytest.param(True, "spawn", marks=pytest.mark.ci),
        pytest.param(False, "forkserver", marks=pytest.mark.ci),
    ],
)
def test_a_replacement_is_built_from_it_and_nothing_shows_what_another_env_has_written(
    context: str, snapshots: bool
) -> None:
    restart = ForkingPolicy(snapshots=snapshots, snapshot_every=2)
    with one_each([lambda: TableEnv(TABLE)] * 2, context=context, restart=restart) as envs:
        start = envs.reset(seed=0)[0][:, 0]
        assert list(start) == [TABLE[0]] * 2
        for _ in range(5):
            envs.step(np.array([1, 0]))
        kill_worker(envs)
        envs.step(np.array([1, 0]))
        assert list(envs.reset()[0][:, 0]) == [sum([1] * 6, TABLE[0]), TABLE[0]]
        statistics = envs.statistics()
        assert [one.restarts for one in statistics] == [1, 0]
        assert [bool(one.snapshots) for one in statistics] == [snapshots] * 2
        assert envs.call("mappings")[0] == set(shared_files()), "the replacement shares it, too"
    assert TABLE[0] == start[0], "nor does the trainer see it"


def test_a_read_only_array_stays_read_only_and_a_change_after_construction_is_not_seen() -> None:
    table = TABLE.copy()
    fixed = TABLE.copy()
    fixed.flags.writeable = False
    first = SubprocessEnv(lambda: TableEnv(fixed, table))
    table[:] = 1.0
    second = SubprocessEnv(lambda: TableEnv(fixed, table))
    with first, second:
        assert first.call("sums")[1] == float(np.sum(TABLE))
        assert second.call("sums")[1] == table.size
        assert len(shared_files()) == 1
        assert not first.get_attr("tables")[0].flags.writeable


@pytest.mark.parametrize("envs_per_worker", [1, 2])
def test_equal_arrays_are_in_memory_once_and_yet_not_the_same(envs_per_worker: int) -> None:
    tables = [(np.ones(100_000), np.ones(100_000)) for _ in range(2)]
    with SubprocessVectorEnv(
        [lambda mine=mine: TableEnv(*mine) for mine in tables], envs_per_worker=envs_per_worker
    ) as envs:
        (size,) = shared_files().values()
        assert size < 1.5 * tables[0][0].nbytes
        envs.reset(seed=0)
        envs.step(np.array([5, 0]))
        assert envs.call("sums") == ([100_005, 100_000], [100_000, 100_000])


def test_a_large_pickle_without_arrays_is_kept_once() -> None:
    words = [f"{index}" for index in range(100_000)]
    with no_leaks():
        envs = one_each([lambda: TableEnv(words)] * 3)
        (size,) = shared_files().values()
        assert size < 2**21
        envs.close()


def test_what_is_small_is_in_no_file() -> None:
    some = TABLE[:10].copy()
    with one_each([lambda: TableEnv(some)] * 2):
        assert not shared_files()


def test_the_last_of_several_closes_the_file() -> None:
    with no_leaks():
        envs = [SubprocessEnv(lambda: TableEnv(TABLE)) for _ in range(3)]
        envs[0].initialize()
        later = SubprocessEnv(lambda: TableEnv(TABLE))  # the file is sealed by now
        assert len(shared_files()) == 1
        for env in (*envs, later):
            assert len(shared_files()) == 1
            env.initialize()
            env.close()
            env.close()
        assert not shared_files()
        forgotten = SubprocessEnv(lambda: TableEnv(TABLE))
        del forgotten
        with pytest.raises(UsageError):
            SubprocessVectorEnv([lambda: TableEnv(TABLE)], worker_seed=0, worker_env={"": ""})


def test_nothing_writes_to_a_file_that_was_handed_to_a_worker() -> None:
    file = SharedFile()
    place = file.place(memoryview(b"abc"))
    file.seal()
    assert file.place(memoryview(b"abc")) == place
    assert file.place(memoryview(b"abd")) is None
    for change in (lambda: os.pwrite(file.descriptor, b"x", 0), lambda: os.ftruncate(file.descriptor, 0)):
        with pytest.raises(PermissionError):
            change()


def test_a_report_holds_what_it_needs(reports: Path) -> None:
    table, words = TABLE.copy(), [f"{index}" for index in range(100_000)]
    with no_leaks():
        with SubprocessEnv(lambda: TableEnv(table, words)) as env:
            env.reset(seed=0)
            kill_worker(env)
            env.step(0)
        reports_written()
        assert not shared_files()
    (path,) = reports.glob("*.json")
    (env_fn,) = env_functions(load(path), None)
    tables = env_fn().tables
    assert np.array_equal(tables[0], table)
    assert tables[0].flags.writeable
    assert tables[1] == words
