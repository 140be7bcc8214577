"""A worker sees the world as the trainer does: modules, registered envs, directory, environment; not its MPI job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from contract_envs import SurroundingsEnv

from kit import CounterEnv, kill_worker, monitor_pid
from multienv import (
    RestartPolicy,
    SubprocessEnv,
    SubprocessVectorEnv,
    SyncSubprocessEnvManager,
    create_subprocess_envs,
)
from multienv._engine.processes.environment import THREAD_VARIABLES

CONTEXTS = ["forkserver", pytest.param("spawn", marks=pytest.mark.soak)]


class RegisteredHere(CounterEnv):
    """Of this test module alone."""


def found_here() -> dict[str, str]:
    """Return an environment in which a script finds what this process does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture
def register():
    before = dict(gymnasium.registry)
    yield gymnasium.register
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


def horizon_of(env_id: str, context: str = "forkserver", **make: Any) -> tuple[str, int]:
    with SubprocessEnv(partial(gymnasium.make, env_id, **make), context=context) as env:
        env.reset(seed=0)
        steps = 0
        ended = False
        while not ended:
            _, _, terminated, truncated, _ = env.step(0)
            ended = terminated or truncated
            steps += 1
        return env.spec.id, steps


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("entry_point", [f"{__name__}:RegisteredHere", lambda **k: RegisteredHere(**k)],
                         ids=["string", "lambda"])  # fmt: skip
def test_an_env_registered_in_the_trainer_alone_is_found(register, entry_point, context):
    register("contract/Here-v3", entry_point, kwargs={"horizon": 4})
    assert horizon_of("contract/Here-v3", context) == ("contract/Here-v3", 4)


def test_an_entry_point_that_cannot_travel_is_no_obstacle_to_the_others(register):
    cannot = (number for number in range(3))
    register("contract/Stuck-v0", lambda: cannot)
    register("contract/Free-v0", RegisteredHere, kwargs={"horizon": 2})
    assert horizon_of("contract/Free-v0")[1] == 2


@pytest.mark.parametrize("context", CONTEXTS)
def test_modules_of_a_path_added_by_the_trainer_are_found(tmp_path, monkeypatch, context):
    (tmp_path / "module_of_the_trainer.py").write_text(
        "from kit import CounterEnv\nclass Found(CounterEnv):\n    where = __file__\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def build() -> Any:
        from module_of_the_trainer import Found

        return Found()

    with SubprocessEnv(build, context=context) as env:
        assert env.get_attr("where") == str(tmp_path / "module_of_the_trainer.py")
    sys.modules.pop("module_of_the_trainer", None)


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_input_is_the_trainers_alone(context):
    code = f"""
import sys
from multienv import SubprocessEnv
from multienv.errors import EnvError
from contract_envs import SurroundingsEnv
print(sys.stdin.readline())
with SubprocessEnv(SurroundingsEnv, context={context!r}) as env:
    assert env.call("input") == ("", b"")
print(sys.stdin.readline())
"""
    lines = subprocess.check_output(
        [sys.executable, "-c", code], input="first\nsecond\n", timeout=60, env=found_here(), text=True
    )
    assert lines.split() == ["first", "second"]


@pytest.mark.parametrize(
    "streams", [*(pytest.param(one, marks=pytest.mark.soak) for one in ("0", "1", "2", "01", "12")), "012"]
)
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_trainer_without_standard_streams(context, streams):
    """As a daemon: their numbers are given to whatever it opens next, also to what is a worker's."""
    code = f"""
import os, sys
from multienv import SubprocessVectorEnv
from kit import CounterEnv
envs = SubprocessVectorEnv([CounterEnv] * 4, envs_per_worker=2, context={context!r})
envs.reset(seed=0)
for _ in range(3):
    envs.step([1] * 4)
os._exit(int(envs.step([1] * 4)[0][3][0]))
"""
    command = " ".join(f"{stream}{'<' if stream == '0' else '>'}&-" for stream in streams)
    ended = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {command}', sys.executable, code], env=found_here(), timeout=60
    )
    assert ended.returncode == 4


@pytest.mark.parametrize("context", CONTEXTS)
def test_directory_and_environment_are_the_trainers_but_for_its_mpi_job(tmp_path, monkeypatch, context):
    with SubprocessEnv(CounterEnv):  # the monitor is there already, somewhere else
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("MUJOCO_GL_TEST", "egl")
        for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID"):
            monkeypatch.setenv(name, "3")
        monkeypatch.delenv("HOME", raising=False)
        with SubprocessEnv(SurroundingsEnv, context=context) as env:
            assert env.call("directory") == str(tmp_path)
            environment = env.call("environment")
    assert environment["MUJOCO_GL_TEST"] == "egl"
    assert "HOME" not in environment
    assert not [name for name in environment if name.startswith(("OMPI_", "PMI_", "PMIX_", "MPI_"))]


@pytest.mark.parametrize("context", CONTEXTS)
def test_streams_are_the_trainers_at_the_launch_and_process_attributes_those_of_its_first_env(tmp_path, context):
    """A trainer of its own changes them in between."""
    code = f"""
import os, resource
from kit import CounterEnv
from contract_envs import SurroundingsEnv
from multienv import SubprocessEnv
def attributes():
    umask = os.umask(0)
    os.umask(umask)
    return umask, resource.getrlimit(resource.RLIMIT_CORE), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)
os.umask(0o27)
os.nice(2)
expected = attributes()
with SubprocessEnv(CounterEnv) as first:
    first.initialize()
    os.umask(0o77)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.nice(3)
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {{core}})
    assert attributes() != expected
    log = os.open({str(tmp_path / "log")!r}, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    with SubprocessEnv(SurroundingsEnv, context={context!r}) as env:
        assert env.call("process_attributes") == expected, env.call("process_attributes")
        env.call("say", "said by the first, ")
        env.reset(seed=0)
        os.kill(env.statistics().pid, 9)
        env.step(0)
        assert env.call("process_attributes") == expected
        env.call("say", "said by the second, ")
"""
    done = subprocess.run([sys.executable, "-c", code], env=found_here(), timeout=60, capture_output=True, text=True)
    said = (tmp_path / "log").read_text()
    assert done.returncode == 0, done.stderr + said
    assert said.count("said by the second") == 2
    assert said.count("said by the first") >= 2  # and once more by the replay of the call


@pytest.mark.parametrize("context", CONTEXTS[:1])
def test_native_threads_are_limited_unless_told_otherwise(monkeypatch, context):
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with SubprocessEnv(SurroundingsEnv, context=context) as env:
        assert {env.call("environment")[name] for name in THREAD_VARIABLES} == {"1"}
    with SubprocessEnv(SurroundingsEnv, context=context, native_threads=3) as env:
        assert env.call("environment")["OMP_NUM_THREADS"] == "3"
    with SubprocessEnv(SurroundingsEnv, context=context, native_threads=None) as env:
        assert "OMP_NUM_THREADS" not in env.call("environment")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with SubprocessEnv(SurroundingsEnv, context=context) as env:
        assert env.call("environment")["OMP_NUM_THREADS"] == "2"


@pytest.fixture
def device_module(tmp_path, monkeypatch):
    """A module that reads a variable as it is imported, as simulators choose a GPU."""
    (tmp_path / "reads_its_device.py").write_text("import os\nDEVICE = os.environ.get('DEVICE')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def build() -> Any:
        import reads_its_device

        env = SurroundingsEnv()
        env.device = reads_its_device.DEVICE
        return env

    return build


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("restart", [RestartPolicy(), RestartPolicy(snapshots=False)], ids=["snapshots", "replay"])
def test_variables_of_a_worker_are_there_when_its_env_is_imported_and_in_each_replacement(
    device_module, monkeypatch, context, restart
):
    monkeypatch.setenv("DEVICE", "the trainer's")
    variables = {"DEVICE": "3", "MUJOCO_GL_TEST": "egl"}
    with SubprocessEnv(device_module, worker_env=variables, context=context, restart=restart, reports="") as env:
        variables["DEVICE"] = "too late"
        env.reset(seed=0)
        for losses in range(3):
            if losses:
                kill_worker(env)
            env.step(0)
            environment = env.call("environment")
            assert (environment["DEVICE"], environment["MUJOCO_GL_TEST"]) == ("3", "egl")
            assert env.get_attr("device") == "3"
            assert env.statistics().exact_recoveries == losses
    assert os.environ["DEVICE"] == "the trainer's"


def test_each_worker_has_its_own_variables_by_its_index(device_module):
    asked = []

    def dealt(worker: int) -> dict[str, str]:
        asked.append(worker)
        return {"DEVICE": str(worker % 2)}

    with SubprocessVectorEnv([device_module] * 5, envs_per_worker=2, worker_env=dealt) as envs:
        assert envs.get_attr("device") == ("0", "0", "1", "1", "0")
    assert asked == [0, 1, 2]
    singles = create_subprocess_envs([device_module] * 3, worker_env=dealt)
    assert [env.get_attr("device") for env in singles] == ["0", "1", "0"]
    for env in singles:
        env.close()
    manager = SyncSubprocessEnvManager([device_module] * 2, worker_env=dealt)
    manager.launch()
    assert manager.get_attr("device") == ["0", "1"]
    manager.close()
    with SubprocessEnv(device_module, worker_env=dealt) as env:
        assert env.get_attr("device") == "0"
    with SubprocessEnv(device_module, env_index=7, worker_env=dealt) as env:
        assert env.get_attr("device") == "1"


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("victim", ["worker", "monitor"])
def test_strings_are_hashed_alike_by_every_process_of_an_env(context, victim):
    with SubprocessEnv(SurroundingsEnv, context=context) as env:
        env.reset(seed=0)
        first = env.call("hash_of", "the order of a set")
        kill_worker(env)
        if victim == "monitor":
            os.kill(monitor_pid(), signal.SIGKILL)
        env.step(0)
        assert env.call("hash_of", "the order of a set") == first
        assert env.statistics().losses == 1
        assert env.call("environment").get("PYTHONHASHSEED") == os.environ.get("PYTHONHASHSEED")


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("where", ["itself", pytest.param("in a child", marks=pytest.mark.ci)])
def test_types_of_the_main_script_travel(where, context):
    script = Path(__file__).with_name("script_with_children.py")
    subprocess.run([sys.executable, script, where, context], check=True, timeout=60, env=found_here())
