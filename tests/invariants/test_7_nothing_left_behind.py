"""Invariant 7: within 2 s of the last ``close()``, of an exception that ends the trainer, or of its SIGKILL with an env
hung in C code, there is no process (the monitor included), zombie, descriptor, thread or shared memory of ours.

Trainers that end are programs of their own: functions of this module, see ``kit/trainer_process.py``.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faces import AND_ASYNC, Face, counts
from invariant_envs import EngineEnv, LinkingEnv, SharedMemoryEnv, TemporaryFileEnv, UntidyEnv

from kit import (
    CounterEnv,
    Fault,
    FaultyEnv,
    ForkingEnv,
    ForkingPolicy,
    assert_nothing_left,
    descendants,
    is_alive,
    monitor_itself,
    monitor_pid,
    own_name,
    snapshot_resources,
)
from kit.process_table import record
from kit.trainer_process import GONE_WITHIN, Trainer, becomes_true, run
from multienv import Deadlines, RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv.errors import MultienvError


def open_all_with_one_that_hangs(kind: str, context: str, marker: str) -> Any:
    """Return envs one of which will hang in C, beside others with snapshots, and a child process of their own."""
    hanging = Fault("hang_c", "step", at=3, ignore_sigterm=True, once=marker)
    env_fns = [partial(FaultyEnv, fault=hanging), partial(ForkingEnv, stubborn=True), CounterEnv]
    face = Face(kind, env_fns, context=context, restart=ForkingPolicy(snapshot_every=1))
    face.reset(0)
    return face


def hang(kind: str, context: str, marker: str) -> None:
    """Be a trainer inside a step that never returns."""
    envs = open_all_with_one_that_hangs(kind, context, marker)
    print("ready", flush=True)
    while True:
        envs.step([1, 1, 1])


def end(kind: str, context: str, marker: str, how: str) -> None:
    """Be a trainer that ends in this way while an env hangs, and closes nothing."""
    face = open_all_with_one_that_hangs(kind, context, marker)
    face.step([1, 1, 1])
    face.step([1, 1, 1])
    if kind != "multi_env":
        face.envs.step_async([1, 1, 1] if kind == "vector_env" else 1)
        assert becomes_true(lambda: Path(marker).exists())
    print("ready", flush=True)
    if how == "exception":
        raise RuntimeError("the trainer's own mistake")
    sys.exit(3) if how == "sys.exit" else os._exit(4)


@pytest.mark.parametrize(
    ("kind", "context"),
    [("subprocess_env", "forkserver"), ("multi_env", "forkserver"), ("vector_env", "spawn")],
)
def test_nothing_outlives_a_trainer_that_is_killed_while_an_env_hangs(kind: str, context: str, marker: str) -> None:
    """In one of the cases as a batch system does it: by SIGTERM to the group, of which the monitor is."""
    with Trainer("test_7_nothing_left_behind", "hang", kind, context, marker) as trainer:
        trainer.expect("ready")
        assert becomes_true(lambda: Path(marker).exists())
        assert len(trainer.family()) >= 3  # the monitor, a worker, a snapshot
        trainer.signal_group(signal.SIGTERM) if kind == "multi_env" else trainer.signal(signal.SIGKILL)
        trainer.wait()
        trainer.assert_nothing_lives()


def hang_beside_a_copy(kind: str, context: str, marker: str) -> None:
    """Be a trainer that C code has forked: the copy holds all descriptors, so that nobody sees their end."""
    face = open_all_with_one_that_hangs(kind, context, marker)
    libc = ctypes.PyDLL(None)  # keeps the GIL: the copy is not to run any Python
    if libc.fork() == 0:
        libc.pause()
    print("ready", *face.pids(), flush=True)
    while True:
        face.step([1, 1, 1])


def test_no_worker_outlives_a_trainer_whose_descriptors_a_copy_of_it_holds(marker: str) -> None:
    with Trainer("test_7_nothing_left_behind", "hang_beside_a_copy", "multi_env", "forkserver", marker) as trainer:
        workers = [int(word) for word in trainer.expect("ready").split()]
        assert becomes_true(lambda: Path(marker).exists())
        assert all(map(is_alive, workers))
        trainer.signal(signal.SIGKILL)
        trainer.wait()
        assert becomes_true(lambda: not any(map(is_alive, workers)), GONE_WITHIN)
        # The copy: were the monitor killed with it, before it has removed its temporary folder, that would stay.
        assert becomes_true(lambda: len(trainer.family()) == 1)


@pytest.mark.parametrize(("kind", "how"), [("subprocess_env", "exec"), ("multi_env", "exec"), ("vector_env", "fork")])
def test_what_an_env_has_started_ends_with_its_process(kind: str, how: Any) -> None:
    """In sessions of their own, ignoring SIGTERM, while other envs go on."""
    forking = partial(ForkingEnv, how=how, stubborn=True)
    with Face(kind, [forking, CounterEnv]) as face, Face("subprocess_env", [CounterEnv]) as other:
        started = descendants(face.pids()[0])
        assert started
        face.signal()
        assert becomes_true(lambda: not any(map(is_alive, started)), GONE_WITHIN)
        assert other.reset(0)[0].observation[0] == 0


@pytest.mark.parametrize(
    ("kind", "how", "code"),
    [
        ("vector_env", "sys.exit", 3),
        ("multi_env", "os._exit", 4),
        ("async_env", "exception", 1),
    ],
)
def test_nothing_outlives_a_trainer_that_ends_without_close(kind: str, how: str, code: int, marker: str) -> None:
    with Trainer("test_7_nothing_left_behind", "end", kind, "forkserver", marker, how) as trainer:
        trainer.expect("ready")
        assert trainer.wait() == code
        trainer.assert_nothing_lives()


def is_there(name: str) -> bool:
    return Path("/dev/shm", name).exists()


def is_stopped(pid: int) -> bool:
    found = record(pid)
    return found is not None and found.state == "T"


@pytest.mark.parametrize(
    ("how", "forking"),
    [
        ("close", {"stubborn": True}),
        ("killed", {"stubborn": True}),
        ("hung", {}),
        ("monitor killed", {"stubborn": True}),
    ],
)
def test_shared_memory_of_an_env_goes_with_its_process(how: str, forking: dict[str, Any]) -> None:
    before = snapshot_resources()
    policy = RestartPolicy(on_crash="truncate", on_timeout="truncate")
    env = SubprocessEnv(partial(SharedMemoryEnv, **forking), deadlines=Deadlines(step=0.2), restart=policy)
    with env:
        name = env.get_attr("shared_name")
        assert name in snapshot_resources().shared_memory
        if how != "close":
            env.reset(seed=0)
            if how != "hung":
                os.kill(env.statistics().pid or 0 if how == "killed" else monitor_pid(), signal.SIGKILL)
            assert env.step(0)[3]
            assert becomes_true(lambda: not is_there(name), GONE_WITHIN)
            env.reset(seed=0)
            env.step(1)
    assert_nothing_left(before, timeout=GONE_WITHIN)


@pytest.mark.parametrize("how", ["close", pytest.param("killed", marks=pytest.mark.ci), "monitor killed"])
def test_shared_memory_of_an_env_goes_although_its_resource_tracker_starts_slowly(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does on busy cores: it reads what it is to unlink when the env's process has ended.

    Half a second after the monitor takes no more orders, and no later: other tests look for names that are left.
    """
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "is_tracker = 'resource_tracker import main' in ' '.join(sys.orig_argv)\n"
        f"while is_tracker and not os.path.exists({str(tmp_path / 'gate')!r}):\n    time.sleep(0.01)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    before = snapshot_resources()
    env = SubprocessEnv(UntidyEnv).initialize()
    name = env.get_attr("shared_name")
    if how != "close":
        os.kill(env.statistics().pid or 0 if how == "killed" else monitor_pid(), signal.SIGKILL)
    env.close()
    assert is_there(name)
    (tmp_path / "gate").touch()
    assert becomes_true(lambda: not is_there(name))
    assert_nothing_left(before, timeout=GONE_WITHIN)


@pytest.mark.parametrize("how", ["closed", "monitor killed"])
def test_resource_tracker_that_has_been_stopped_ends(how: str) -> None:
    before = snapshot_resources()
    with SubprocessEnv(SharedMemoryEnv) as env:
        name, tracker = env.get_attr("shared_name"), env.get_attr("tracker")
        os.kill(tracker, signal.SIGSTOP)
        # The kernel ends the group of a dead worker by SIGHUP if a process in it is stopped by then.
        assert becomes_true(lambda: is_stopped(tracker))
        if how == "monitor killed":
            os.kill(monitor_pid(), signal.SIGKILL)
    Path("/dev/shm", name).unlink(missing_ok=True)  # the tracker may have done it
    assert_nothing_left(before, timeout=GONE_WITHIN)


def hang_with_shared_memory() -> None:
    """Be a trainer inside a step that never returns."""
    env = SubprocessEnv(SharedMemoryEnv).initialize()
    env.reset(seed=0)
    print("ready", env.get_attr("shared_name"), flush=True)
    env.step(0)


def test_shared_memory_of_an_env_that_hangs_goes_with_the_trainer() -> None:
    with Trainer("test_7_nothing_left_behind", "hang_with_shared_memory") as trainer:
        name = trainer.expect("ready")
        assert is_there(name)
        trainer.signal(signal.SIGKILL)
        trainer.wait()
        trainer.assert_nothing_lives()
        assert not is_there(name)


def lose_an_engine(how: str, own: str, held: str, older: str, later: str, within: str) -> None:
    """Be a trainer that has one of the names open that its env and the env's engine map.

    It has written one of them after its first worker has started, and before this env's.
    """
    policy = RestartPolicy(on_crash="truncate", on_timeout="truncate")
    first = SubprocessEnv(CounterEnv).initialize()
    Path("/dev/shm", later).write_bytes(b"data")
    env_fn = partial(EngineEnv, own, held, older, later, within)
    env = SubprocessEnv(env_fn, deadlines=Deadlines(step=0.5), restart=policy)
    env.initialize()
    env.reset(seed=0)
    with Path("/dev/shm", held).open():
        os.kill(env.statistics().pid or 0, signal.SIGSTOP if how == "hung" else signal.SIGKILL)
        assert env.step(0)[3]
        assert becomes_true(lambda: not is_there(own))
        assert is_there(held)
        assert is_there(older)
        assert is_there(later)
        assert is_there(within)
        env.close()
        first.close()


@pytest.mark.parametrize("how", ["killed", "hung"])
def test_shared_memory_that_only_killed_processes_use_is_unlinked_although_no_resource_tracker_knows_it(
    how: str,
) -> None:
    """Not so what was there before the env's worker, such as data that the user has copied, and files in folders."""
    before = snapshot_resources()
    own, held, older, later, folder = (own_name() for _ in range(5))
    Path("/dev/shm", older).write_bytes(b"")
    Path("/dev/shm", folder).mkdir()
    run("test_7_nothing_left_behind", "lose_an_engine", how, own, held, older, later, f"{folder}/data")
    shutil.rmtree(Path("/dev/shm", folder))
    assert not is_there(own)
    Path("/dev/shm", older).unlink()
    Path("/dev/shm", later).unlink()
    Path("/dev/shm", held).unlink(missing_ok=True)
    assert_nothing_left(before, timeout=GONE_WITHIN)


@pytest.mark.parametrize(
    ("how", "context"),
    [
        ("close", "forkserver"),
        pytest.param("close", "spawn", marks=pytest.mark.ci),
        ("killed", "forkserver"),
        ("hung", "spawn"),
        ("monitor killed", None),
    ],
)
def test_temporary_files_of_an_env_go_with_its_process(how: str, context: str | None, tmp_path: Path) -> None:
    """And nothing that a link among them leads to."""
    (tmp_path / "precious").touch()
    policy = RestartPolicy(on_crash="truncate", on_timeout="truncate")
    with SubprocessEnv(TemporaryFileEnv, deadlines=Deadlines(step=1.0), restart=policy, context=context) as env:
        env.reset(seed=0)
        env.step(1)
        file = Path(env.get_attr("path"))
        assert file.exists()
        (file.parent / "link").symlink_to(tmp_path)
        if how != "close":
            pid = monitor_pid() if how == "monitor killed" else env.statistics().pid or 0
            os.kill(pid, signal.SIGSTOP if how == "hung" else signal.SIGKILL)
            assert becomes_true(lambda: env.step(1)[3])
            assert becomes_true(lambda: not file.parent.parent.exists())
    assert becomes_true(lambda: not file.parent.parent.exists())
    assert (tmp_path / "precious").exists()


def test_temporary_files_stay_for_the_snapshots_of_a_process_that_was_killed() -> None:
    with SubprocessEnv(TemporaryFileEnv, restart=ForkingPolicy(snapshot_every=1)) as env:
        env.reset(seed=0)
        env.step(1)
        file = Path(env.get_attr("path"))
        kept = env.snapshot()
        for steps in (2, 3):
            os.kill(env.statistics().pid or 0, signal.SIGKILL)
            assert not env.step(1)[3]
            assert file.stat().st_size == steps
        env.restore(kept)
        env.step(1)
        assert env.get_attr("path") == str(file)
        assert file.stat().st_size == 4
        del kept
    assert becomes_true(lambda: not file.parent.parent.exists())


def test_recycled_process_has_new_temporary_files() -> None:
    with SubprocessEnv(TemporaryFileEnv, restart=RestartPolicy(recycle_after_steps=2)) as env:
        env.reset(seed=0)
        file = Path(env.get_attr("path"))
        env.step(1)
        env.step(1)
        env.reset(seed=1)
        env.step(1)
        assert Path(env.get_attr("path")).exists()
        assert env.get_attr("path") != str(file)
        assert becomes_true(lambda: not file.parent.parent.exists())


def test_temporary_folder_that_the_user_has_set_is_left_alone(tmp_path: Path) -> None:
    with SubprocessEnv(TemporaryFileEnv, worker_env={"TMPDIR": str(tmp_path)}) as env:
        env.reset(seed=0)
        env.step(1)
        file = Path(env.get_attr("path"))
        assert file.parent.parent == tmp_path
    assert file.exists()


@pytest.mark.parametrize("which", ["the env's", "that of all envs"])
def test_temporary_folder_that_an_env_has_replaced_by_a_link_is_unlinked_and_not_walked_through(
    which: str, tmp_path: Path
) -> None:
    (tmp_path / "in" / "it").mkdir(parents=True)
    for folder in (tmp_path / "in" / "it", tmp_path / "in", tmp_path):
        folder.chmod(0o755)
    modes = lambda: {path: path.stat().st_mode for path in (tmp_path, *tmp_path.rglob("*"))}  # noqa: E731
    before = modes()
    env = SubprocessEnv(partial(LinkingEnv, str(tmp_path), of_all=which != "the env's")).initialize()
    link = Path(env.get_attr("link"))
    assert link.is_symlink()
    assert link.parent.name.startswith("multienv-") == (which == "the env's")
    os.kill(env.statistics().pid or 0, signal.SIGKILL)
    env.close()
    assert becomes_true(lambda: not link.is_symlink())
    assert modes() == before


def hang_with_temporary_files() -> None:
    """Be a trainer whose env does not answer."""
    env = SubprocessEnv(TemporaryFileEnv).initialize()
    env.reset(seed=0)
    env.step(1)
    path = env.get_attr("path")
    os.kill(env.statistics().pid or 0, signal.SIGSTOP)
    print("ready", path, flush=True)
    env.step(1)


def test_temporary_files_of_an_env_that_hangs_go_with_the_trainer() -> None:
    with Trainer("test_7_nothing_left_behind", "hang_with_temporary_files") as trainer:
        file = Path(trainer.expect("ready"))
        assert file.exists()
        trainer.signal(signal.SIGKILL)
        trainer.wait()
        trainer.assert_nothing_lives()
        assert not file.parent.parent.parent.exists()


@pytest.fixture
def without_collections() -> Any:
    """Nothing goes because the collector comes by: the package holds no circle of references to what it keeps open."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", ["multi_env", "vector_env"])
def test_the_last_close_leaves_nothing(kind: str, without_collections: None) -> None:
    before = snapshot_resources(threads=True)
    face = Face(kind, [CounterEnv, CounterEnv], restart=ForkingPolicy(snapshot_every=1))
    face.record(counts(6, 2), 1, lambda step: face.signal() if step == 3 else None)
    assert face.losses() == 1
    kept = [env.snapshot() for env in getattr(face.envs, "envs", [face.envs])]
    assert len(snapshot_resources().processes) > 2 + len(kept)
    face.close()
    # The monitor is not spared here: it ends a second after the last worker.
    assert_nothing_left(before, timeout=GONE_WITHIN)
    del kept


def test_a_close_while_threads_replace_workers_by_plan_leaves_nothing(
    without_collections: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Only an object that nothing refers to any more closes the descriptors by which envs at their own pace wait."""
    before = snapshot_resources(threads=True)
    env_fn = partial(CounterEnv, horizon=3, count_episodes=False)
    envs = SubprocessVectorEnv([env_fn] * 4, envs_per_worker=1, restart=RestartPolicy(recycle_after_steps=1))
    envs.reset_async(seed=1)
    for _ in range(4):
        indices = envs.recv(4)[-1]
        envs.send(np.ones(4, int), indices)  # the last time each worker is replaced in a thread, before its reset
    envs.close()
    del envs
    assert_nothing_left(before, timeout=GONE_WITHIN)
    assert not caplog.records


@pytest.mark.parametrize("kind", AND_ASYNC)
def test_envs_that_are_forgotten_leave_nothing(kind: str, without_collections: None) -> None:
    before = snapshot_resources(threads=True)
    face: Any = Face(kind, [CounterEnv, CounterEnv])
    face.record(counts(3, 2), 1)
    del face
    assert_nothing_left(before, timeout=GONE_WITHIN, ignore=monitor_itself)


def test_an_env_that_is_forgotten_while_it_hangs_leaves_nothing(marker: str, without_collections: None) -> None:
    before = snapshot_resources(threads=True)
    env: Any = SubprocessEnv(partial(FaultyEnv, fault=Fault("hang_c", "step", ignore_sigterm=True, once=marker)))
    env.initialize()
    env.reset(seed=0)
    env.step_async(np.int64(1))
    assert becomes_true(lambda: Path(marker).exists())
    del env
    assert_nothing_left(before, timeout=GONE_WITHIN, ignore=monitor_itself)


def test_worker_that_hangs_ends_when_its_channel_is_released(marker: str) -> None:
    env: Any = SubprocessEnv(partial(FaultyEnv, fault=Fault("hang_c", "step", ignore_sigterm=True, once=marker)))
    env.initialize()
    env.reset(seed=0)
    env.step_async(np.int64(1))
    assert becomes_true(lambda: Path(marker).exists())
    pid = env.statistics().pid
    env._supervisor.channel.release()
    assert becomes_true(lambda: not is_alive(pid), GONE_WITHIN)
    env.close()


@pytest.mark.parametrize("kind", ["multi_env", "vector_env"])
def test_envs_that_cannot_be_built_leave_nothing(kind: str, without_collections: None) -> None:
    before = snapshot_resources(threads=True)
    with pytest.raises(MultienvError):
        Face(kind, [partial(FaultyEnv, fault=Fault("exit", "construct")), CounterEnv])
    assert_nothing_left(before, timeout=GONE_WITHIN)
