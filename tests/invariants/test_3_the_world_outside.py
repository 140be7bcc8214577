"""Invariant 3, of the world outside: a fork copies memory, not the world.

Each env here has something beyond its memory. It is put back, or there is no snapshot: no recovery is called exact and
is not, no file is damaged, and no other env hangs.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import subprocess
import sys
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingUnixStreamServer
from typing import Any

import pytest
from faces import Face
from outside_envs import (
    BlurEnv,
    ConfiguredEnv,
    DataSetEnv,
    HeadlessEnv,
    HiddenServerEnv,
    HoldsLockEnv,
    LateServerEnv,
    LogEnv,
    PlainEnv,
    ServerEnv,
    StateFileEnv,
    StreamEnv,
    TimerEnv,
    TransactionEnv,
    TurnsEnv,
)

from kit import ForkingPolicy
from multienv import Deadlines, Recovery, RestartPolicy

LINES, STEPS, KILLS = 2000, 60, (14, 31, 32, 50)
SOMETIMES = ForkingPolicy(snapshot_every=5, backoff=0.0)
REPLAYS = RestartPolicy(snapshots=False, backoff=0.0)


class Told:
    """Plays some envs while their workers are killed, and keeps what was told.

    Attributes:
        shown: What each env showed in each step.
        ends: For each env the steps that ended an episode.
        truncated: For each env the steps that were truncated.
        recoveries: The outcomes and methods.
        obstacles: Why there were no snapshots, of each worker; by the end.
    """

    def __init__(
        self,
        env_fns: list[Callable[[], Any]],
        restart: RestartPolicy,
        *,
        kind: str = "vector_env",
        steps: int = STEPS,
        kills: Any = KILLS,
        **options: Any,
    ) -> None:
        events: list[Any] = []
        self.shown: list[list[float]] = [[] for _ in env_fns]
        self.ends: list[list[int]] = [[] for _ in env_fns]
        self.truncated: list[list[int]] = [[] for _ in env_fns]
        with Face(kind, env_fns, restart=restart, hooks=[events.append], **options) as face:
            face.reset(0)
            for step in range(1, steps + 1):
                ended = [bool(told) and told[-1] == step - 1 for told in self.ends]
                if any(ended):
                    face.reset(mask=ended)
                if step in kills:
                    for worker in range(len(face.pids())):
                        face.signal(worker=worker)
                for env, one in enumerate(face.step([0] * len(env_fns))):
                    self.shown[env].append(float(one.observation[0]))
                    if one.ended:
                        self.ends[env].append(step)
                    if one.truncated:
                        self.truncated[env].append(step)
            self.obstacles = [one.no_snapshots for one in face.statistics()]
        self.recoveries = [(event.outcome, event.method) for event in events if isinstance(event, Recovery)]

    def outcomes(self) -> set[str]:
        return {outcome for outcome, _ in self.recoveries}

    def methods(self) -> set[str]:
        return {method for _, method in self.recoveries}


@pytest.fixture
def data_set(tmp_path: Path) -> str:
    path = tmp_path / "data"
    path.write_text("".join(f"{number:5}\n" for number in range(1, LINES + 1)))
    return str(path)


# --- what is put back -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "num_envs"),
    [
        *((how, 1 + number % 2) for number, how in enumerate(["buffered", "raw", "duplicate", "unlinked"])),
        *(
            pytest.param(how, 2 - number % 2, marks=pytest.mark.ci)
            for number, how in enumerate(["buffered", "raw", "duplicate", "unlinked"])
        ),
    ],
)
def test_a_file_that_is_read_goes_on_where_the_copy_was_made(data_set: str, how: str, num_envs: int) -> None:
    told = Told([partial(DataSetEnv, data_set, how)] * num_envs, SOMETIMES, kind="vector_env")
    assert told.shown == [list(map(float, range(1, STEPS + 1)))] * num_envs
    assert set(told.recoveries) == {("exact", "snapshot")}
    assert told.obstacles == [""]


def test_a_file_in_the_place_of_standard_input_is_put_back_by_each_copy(data_set: str) -> None:
    told = Told([partial(DataSetEnv, data_set, "input")], SOMETIMES)
    assert told.shown == [list(map(float, range(1, STEPS + 1)))]
    assert set(told.recoveries) == {("exact", "snapshot")}


OUTPUT = """
import os, signal
from kit import ForkingPolicy
from outside_envs import OutputEnv
from multienv import SubprocessVectorEnv
from multienv.testing import worker_pids

if __name__ == "__main__":
    with SubprocessVectorEnv([OutputEnv], restart=ForkingPolicy(snapshot_every=5, backoff=0.0)) as envs:
        envs.reset(seed=0)
        for step in range(1, 61):
            if step in (14, 31, 32, 50):
                os.kill(worker_pids(envs)[0], signal.SIGKILL)
            envs.step([0])
            os.write(1, f"trainer {step}\\n".encode())
        os.write(1, envs.statistics()[0].no_snapshots.encode())
"""


def test_what_the_trainer_writes_to_standard_output_is_not_overwritten(tmp_path: Path) -> None:
    path, script = tmp_path / "output", tmp_path / "script.py"
    script.write_text(OUTPUT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with path.open("wb") as file:
        subprocess.run([sys.executable, str(script)], check=True, stdout=file, env=environment, timeout=60)
    lines = path.read_text().splitlines()
    assert [line for line in lines if not line.startswith("env ")] == [
        f"trainer {step}" for step in range(1, STEPS + 1)
    ]


@pytest.mark.parametrize("kind", ["subprocess_env", "multi_env", "async_env"])
def test_it_does_so_with_each_kind_of_face(data_set: str, kind: str) -> None:
    told = Told([partial(DataSetEnv, data_set)], SOMETIMES, kind=kind)
    assert told.shown == [list(map(float, range(1, STEPS + 1)))]
    assert set(told.recoveries) == {("exact", "snapshot")}


def test_a_file_that_is_read_is_read_again_by_a_replay(data_set: str) -> None:
    told = Told([partial(DataSetEnv, data_set)], REPLAYS)
    assert told.shown == [list(map(float, range(1, STEPS + 1)))]
    assert set(told.recoveries) == {("exact", "journal")}


def test_what_is_written_again_lies_where_it_lay(tmp_path: Path) -> None:
    told = Told([partial(LogEnv, str(tmp_path / "log"))], SOMETIMES)
    assert (tmp_path / "log").read_text() == "".join(f"{number:5}\n" for number in range(1, STEPS + 1))
    assert set(told.recoveries) == {("exact", "snapshot")}


def test_a_snapshot_that_was_asked_for_has_a_position_of_its_own(data_set: str) -> None:
    with Face("subprocess_env", [partial(DataSetEnv, data_set, "raw")]) as face:
        face.reset(0)
        first = [float(face.step([0])[0].observation[0]) for _ in range(5)]
        kept = face.envs.snapshot()
        for _ in range(3):
            again = [float(face.step([0])[0].observation[0]) for _ in range(5)]
            face.envs.restore(kept)
            assert (first, again) == ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])


# --- what forbids a snapshot ------------------------------------------------------------------------


@pytest.mark.parametrize("restart", [SOMETIMES, REPLAYS, RestartPolicy()], ids=["snapshots", "replays", "default"])
def test_a_database_is_not_damaged(tmp_path: Path, restart: RestartPolicy) -> None:
    path = str(tmp_path / "database")
    told = Told([partial(TransactionEnv, path)], restart, kills=(14, 15, 31, 46))
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = database.execute("SELECT count(*) FROM rows").fetchone()[0]
    database.close()
    assert told.methods() <= {"journal"}
    assert told.shown == [[3.0 * step for step in range(1, STEPS + 1)]]
    assert rows == 3 * STEPS
    assert told.obstacles == ["" if restart is REPLAYS else "files"]


@contextmanager
def server() -> Iterator[str]:
    """Run a server that counts the steps since it was asked to reset."""
    counted = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal counted
            if self.path == "/reset":
                counted = itertools.count()
            body = str(next(counted)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{found.server_port}"
        finally:
            found.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("restart", "num_envs"),
    [
        (SOMETIMES, 2),
        (REPLAYS, 1),
        (RestartPolicy(), 1),
        pytest.param(SOMETIMES, 1, marks=pytest.mark.ci),
        pytest.param(REPLAYS, 2, marks=pytest.mark.ci),
        pytest.param(RestartPolicy(), 2, marks=pytest.mark.ci),
    ],
    ids=[
        f"{how}-{count}" for how, count in zip(["snapshots", "replays", "default"] * 2, [2, 1, 1, 1, 2, 2], strict=True)
    ],
)
def test_a_server_that_is_asked_with_one_connection_a_step_forbids_snapshots(
    restart: RestartPolicy, num_envs: int
) -> None:
    with server() as one, server() as other:
        env_fns = [partial(ServerEnv, one, 50), partial(ServerEnv, other, 55)][:num_envs]
        told = Told(env_fns, restart, kills=(14, 31, 45))
    assert told.ends == [[50], [55]][:num_envs]
    assert told.methods() == {"journal"}
    assert told.obstacles == ["" if restart is REPLAYS else "sockets"]


def test_a_snapshot_from_before_the_first_connection_is_not_woken() -> None:
    """The env asks only from its twentieth step on; by then there is a snapshot."""
    with server() as url:
        told = Told([partial(LateServerEnv, url, 20)], SOMETIMES, kills=(25,), steps=60)
    assert told.ends == [[40]]
    assert told.methods() == {"journal"}


def test_what_only_the_constructor_asks_forbids_no_snapshot(tmp_path: Path) -> None:
    with server() as url:
        told = Told([partial(ConfiguredEnv, url, str(tmp_path / "file"))], SOMETIMES, kills=(7,), steps=12)
    assert told.shown == [list(map(float, range(1, 13)))]
    assert told.recoveries == [("exact", "snapshot")]


def test_a_snapshot_from_before_an_obstacle_was_found_is_not_woken(tmp_path: Path) -> None:
    """What C code asks is not told; but the connection that it keeps is found."""
    path, count = tmp_path / "server", 0

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            nonlocal count
            while data := self.request.recv(1):
                count = 0 if data == b"\0" else count + 1
                self.request.sendall(bytes([count]))

    with ThreadingUnixStreamServer(str(path), Handler) as found:
        found.daemon_threads = True
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        told = Told([partial(HiddenServerEnv, str(path))], SOMETIMES, kills=(17,), steps=45)
        found.shutdown()
        thread.join()
    assert told.ends == [[40]]
    assert told.obstacles == ["sockets"]
    assert told.recoveries == [("exact", "journal")]


@pytest.mark.parametrize("kind", ["fifo", "terminal"])
def test_what_another_process_writes_is_read_once(tmp_path: Path, kind: str) -> None:
    """What was read is gone: the episode is truncated, or went on as it was; never both told and different."""
    path, stop = str(tmp_path / "fifo"), threading.Event()
    if kind == "fifo":
        os.mkfifo(path)
        writer = os.open(path, os.O_RDWR)
    else:
        writer, reader = os.openpty()
        tty.setraw(reader)
        path = os.ttyname(reader)

    def write() -> None:
        for number in itertools.count(1):
            data = f"{number:5}\n".encode()
            while not stop.is_set():
                try:
                    os.write(writer, data)
                    break
                except BlockingIOError:
                    stop.wait(0.001)
            if stop.is_set():
                return

    os.set_blocking(writer, False)
    thread = threading.Thread(target=write)
    thread.start()
    try:
        told = Told([partial(StreamEnv, path)], SOMETIMES, kills=(14,))
    finally:
        stop.set()
        thread.join()
        os.close(writer)
        if kind != "fifo":
            os.close(reader)
    assert told.obstacles == ["pipes" if kind == "fifo" else "devices"]
    assert told.outcomes() == {"truncated"}
    assert told.truncated == [[14]]


def test_a_timer_forbids_snapshots() -> None:
    told = Told([TimerEnv], SOMETIMES)
    assert told.shown == [list(map(float, range(1, STEPS + 1)))]
    assert told.obstacles == ["timers"]
    assert set(told.recoveries) == {("exact", "journal")}


@pytest.mark.parametrize("restart", [SOMETIMES, REPLAYS], ids=["snapshots", "replays"])
def test_a_frozen_copy_does_not_keep_a_lock(tmp_path: Path, restart: RestartPolicy) -> None:
    path = tmp_path / "lock"
    path.touch()
    told = Told([partial(TurnsEnv, str(path))] * 2, restart, envs_per_worker=1, deadlines=Deadlines(step=30.0))
    assert told.shown == [list(map(float, range(1, STEPS + 1)))] * 2
    assert set(told.recoveries) == {("exact", "snapshot" if restart is SOMETIMES else "journal")}


def test_a_lock_that_is_held_forbids_snapshots_and_is_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    told = Told([partial(HoldsLockEnv, str(path))], SOMETIMES)
    assert told.shown == [list(map(float, range(1, STEPS + 1)))]
    assert told.obstacles == ["locks"]
    assert told.outcomes() == {"exact"}


@pytest.mark.parametrize("num_envs", [1, 2])
def test_state_in_a_file_is_never_told_as_exact_and_different(tmp_path: Path, num_envs: int) -> None:
    env_fns = [partial(StateFileEnv, str(tmp_path / f"state{env}")) for env in range(num_envs)]
    told = Told(env_fns, SOMETIMES, kills=(14, 31))
    assert told.obstacles == ["files"]
    assert told.shown == [list(map(float, range(1, STEPS + 1)))] * num_envs  # a replay begins with its reset
    assert told.methods() == {"journal"}


@pytest.mark.parametrize("env", [PlainEnv, BlurEnv, HeadlessEnv])
def test_plain_envs_keep_their_snapshots(env: Callable[[], Any]) -> None:
    told = Told([env] * 2, SOMETIMES)
    assert set(told.recoveries) == {("exact", "snapshot")}
    assert told.obstacles == [""]
