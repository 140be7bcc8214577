"""Invariant 3, of the code: a replay by other code is not exact, and a source that cannot be imported ends no run."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from kit import ForkingPolicy, kill_worker
from kit.limits import set_limit
from kit.makers import multi_env
from kit.trainer_process import becomes_true
from multienv import Deadlines, Recovery, Recycled, RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv.errors import EnvError, EnvsFailedError, NotRestoredError, WorkerLostError

NO_SNAPSHOTS = RestartPolicy(snapshots=False, backoff=0.0)
EXACT_ALONE = RestartPolicy(snapshots=False, backoff=0.0, accept="exact")
# Another slope shows nothing in the first eight steps.
SOURCE = """
    import gymnasium, numpy as np

    class Slope(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1e9, 1e9, (1,), np.float64)
        action_space = gymnasium.spaces.Discrete(2)

        def __init__(self):
            self.steps = 0

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.steps = 0
            return np.zeros(1), {}

        def step(self, action):
            self.steps += 1
            return np.array([self.steps * 1.0 if self.steps <= 8 else self.steps * SLOPE]), 0.0, False, False, {}
"""
NUMBERS = count()


class Module:
    """A module of the user, in a file.

    Attributes:
        name, path: Of it.
        env_fn: Builds its env.
    """

    def __init__(self, folder: Path) -> None:
        self.name = f"edited_env_{os.getpid()}_{next(NUMBERS)}"
        self.path = folder / f"{self.name}.py"
        self.write()
        self.env_fn = partial(_built, self.name)

    def write(self, slope: float = 1.0, begin: str = "") -> None:
        """Save the file; ``begin``: its first lines."""
        aside = self.path.with_suffix(".new")
        aside.write_text(textwrap.dedent(begin) + f"SLOPE = {slope}\n" + textwrap.dedent(SOURCE))
        aside.replace(self.path)

    def break_(self) -> None:
        """Save half of the file."""
        self.path.write_text("class Slope(gymnas")


def _zeros(envs: int, observation: Any) -> Any:
    return np.int64(0) if envs == 1 else np.zeros(envs, np.int64)


def _built(name: str) -> Any:
    return importlib.import_module(name).Slope()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    monkeypatch.syspath_prepend(str(tmp_path))
    # The file's time and size must differ, and bytecode of the old one must not be taken for it.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    made = Module(tmp_path)
    yield made
    sys.modules.pop(made.name, None)


class Run:
    """An env, or two in a worker, and what became of it."""

    def __init__(self, module: Module, envs: int = 1, **options: Any) -> None:
        self.events: list[Any] = []
        options = {"restart": NO_SNAPSHOTS, **options, "hooks": [self.events.append]}
        self.envs = envs
        self.env: Any = (
            SubprocessEnv(module.env_fn, **options)
            if envs == 1
            else SubprocessVectorEnv([module.env_fn] * envs, envs_per_worker=envs, **options)
        )
        if envs == 1:
            self.env.initialize()
        self.env.reset(seed=1)

    def step(self) -> Any:
        return self.env.step(0 if self.envs == 1 else [0] * self.envs)

    def steps(self, number: int) -> list[float]:
        return [float(self.step()[0].reshape(-1)[0]) for _ in range(number)]

    def outcomes(self, kind: type = Recovery) -> list[str]:
        return [event.outcome for event in self.events if isinstance(event, kind)]


def is_truncated(answer: Any) -> bool:
    return bool(answer[3] if isinstance(answer[3], bool) else answer[3].all())


def reason_of(answer: Any) -> str:
    told = answer[4]["multienv"]
    return str(told["reason"] if isinstance(told["reason"], str) else told["reason"][0])


# --- the code is another --------------------------------------------------------------------------------


@pytest.mark.parametrize("envs", [1, 2])
def test_a_replay_by_code_that_was_edited_is_not_exact_though_all_compares_equal(
    module: Module, caplog: Any, envs: int
) -> None:
    run = Run(module, envs)
    assert run.steps(4) == [1.0, 2.0, 3.0, 4.0]
    module.write(slope=100.0)
    kill_worker(run.env)
    assert run.steps(6) == [5.0, 6.0, 7.0, 8.0, 900.0, 1000.0], "the new code was to be run"
    (recovery,) = [event for event in run.events if isinstance(event, Recovery)]
    assert recovery.outcome == "replayed"
    assert str(module.path) in recovery.reason
    # From here on it is this code that the process runs.
    kill_worker(run.env)
    assert run.steps(1) == [1100.0]
    run.env.close()
    assert run.outcomes() == ["replayed", "exact"]
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith(str(module.path))]
    assert len(lines) == 1, "the log names the file once"


@pytest.mark.parametrize("envs", [1, 2])
def test_who_accepts_exact_recoveries_alone_gets_a_truncation_that_names_the_file(module: Module, envs: int) -> None:
    run = Run(module, envs, restart=EXACT_ALONE)
    run.steps(4)
    module.write(slope=100.0)
    kill_worker(run.env)
    answer = run.step()
    assert is_truncated(answer)
    assert f"{module.path} has changed" in reason_of(answer)
    if envs == 1:
        run.env.reset()
    else:
        run.step()  # resets
    assert run.steps(9)[-1] == 900.0
    run.env.close()
    assert run.outcomes() == ["truncated"]


def test_log_names_a_changed_file_once_for_all_workers_of_a_batch(module: Module, caplog: Any) -> None:
    env = SubprocessVectorEnv([module.env_fn] * 3, envs_per_worker=1, restart=NO_SNAPSHOTS)
    env.reset(seed=1)
    env.step([0] * 3)
    module.write(slope=2.0)
    for worker in range(3):
        kill_worker(env, worker)
    env.step([0] * 3)
    assert [one.replayed_recoveries for one in env.statistics()] == [1, 1, 1]
    env.close()
    assert sum(record.getMessage().startswith(str(module.path)) for record in caplog.records) == 1


def test_a_file_that_is_saved_with_the_same_size_is_another_by_its_time(module: Module) -> None:
    run = Run(module)
    run.steps(2)
    module.write(slope=2.0)
    kill_worker(run.env)
    run.steps(1)
    run.env.close()
    assert run.outcomes() == ["replayed"]


def test_code_that_was_not_edited_is_exact_also_where_other_files_of_its_folder_were(module: Module) -> None:
    run = Run(module)
    run.steps(2)
    (module.path.parent / "results.csv").write_text("1,2,3\n")
    (module.path.parent / "not_imported.py").write_text("raise SystemExit\n")
    kill_worker(run.env)
    assert run.steps(8)[-1] == 10.0
    run.env.close()
    assert run.outcomes() == ["exact"]


def test_a_forked_snapshot_has_the_old_code_and_stays_exact(module: Module) -> None:
    run = Run(module, restart=ForkingPolicy(snapshot_every=2, backoff=0.0))
    run.steps(5)
    assert becomes_true(lambda: run.env.statistics().snapshots > 0)
    module.write(slope=100.0)
    kill_worker(run.env)
    assert run.steps(5) == [6.0, 7.0, 8.0, 9.0, 10.0]
    run.env.close()
    assert run.outcomes() == ["exact"]


def test_a_module_that_was_preloaded_has_the_code_of_its_import_and_a_replay_is_exact(module: Module) -> None:
    run = Run(module, preload=[module.name])
    run.steps(2)
    module.write(slope=100.0)
    kill_worker(run.env)
    assert run.steps(8)[-1] == 10.0, "the process was not forked from the one that has imported the module"
    run.env.close()
    assert run.outcomes() == ["exact"]


def test_replacement_by_plan_by_other_code_counts_as_replayed(module: Module) -> None:
    run = Run(module, restart=RestartPolicy(snapshots=False, recycle_after_steps=64))
    run.steps(40)
    module.write(slope=1.0)  # the same code, saved again
    run.steps(160)
    run.env.close()
    outcomes = run.outcomes(Recycled)
    assert outcomes[0] == "replayed"
    assert outcomes[1:] == ["exact"] * len(outcomes[1:])
    (first, *_) = [event for event in run.events if isinstance(event, Recycled)]
    assert str(module.path) in first.reason


def test_saved_state_is_replayed_by_other_code_with_a_warning_or_refused(module: Module, caplog: Any) -> None:
    run = Run(module)
    run.steps(3)
    state = run.env.state_dict()
    run.env.close()
    module.write(slope=100.0)
    strict = Run(module, restart=EXACT_ALONE)
    with pytest.raises(NotRestoredError, match=module.name):
        strict.env.load_state_dict(state)
    strict.env.close()
    caplog.clear()
    other = Run(module)
    other.env.load_state_dict(state)
    assert str(module.path) in caplog.text
    assert other.steps(1) == [4.0]
    other.env.close()


# --- the code cannot be had for a moment ----------------------------------------------------------------

SHORT = Deadlines(recovery=4.0)


def later(seconds: float, call: Callable[[], Any]) -> threading.Thread:
    def run() -> None:
        time.sleep(seconds)
        call()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("envs", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_a_file_that_is_half_saved_for_a_second_is_waited_for(
    module: Module, caplog: Any, envs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limit(monkeypatch, "_SILENCE", 0.2)
    told = "building again in a new process, because env_fn raised builtins.SyntaxError"
    run = Run(module, envs)
    run.steps(4)
    status = module.path.stat()
    module.break_()

    def save() -> None:
        assert becomes_true(lambda: told in caplog.text)
        aside = module.path.with_suffix(".new")
        aside.write_text(f"SLOPE = 1.0\n{textwrap.dedent(SOURCE)}")
        os.utime(aside, ns=(status.st_atime_ns, status.st_mtime_ns))
        aside.replace(module.path)

    thread = later(1.0, save)
    kill_worker(run.env)
    assert run.steps(6)[-1] == 10.0
    thread.join()
    run.env.close()
    assert run.outcomes() == ["exact"]
    assert told in caplog.text


@pytest.mark.parametrize(
    ("mode", "recovers"),
    [
        ("alone", "replay"),
        ("SAME_STEP", "replay"),
        ("NEXT_STEP", "truncate"),
        *[pytest.param(mode, "replay", marks=pytest.mark.ci) for mode in ("DISABLED", "NEXT_STEP", "MultiEnv")],
    ],
)
def test_a_file_that_stays_broken_truncates_and_only_the_next_reset_raises(
    module: Module, mode: str, recovers: Any
) -> None:
    restart = RestartPolicy(snapshots=False, backoff=0.0, on_crash=recovers)
    options: dict[str, Any] = {"restart": restart, "deadlines": SHORT}
    actions: Any = [0, 0]
    if mode == "alone":
        env: Any = SubprocessEnv(module.env_fn, **options)
        actions = 0
    elif mode == "MultiEnv":
        env = multi_env([module.env_fn] * 2, autoreset_mode="NextStep", **options)
    else:
        autoreset = AutoresetMode[mode]
        env = SubprocessVectorEnv([module.env_fn] * 2, envs_per_worker=2, autoreset_mode=autoreset, **options)
    if mode == "alone":
        env.initialize()
    env.reset(seed=1)
    for _ in range(3):
        env.step(actions)
    module.break_()
    for worker in range(2 if mode == "MultiEnv" else 1):
        kill_worker(env, worker)
    began = time.monotonic()
    observation, reward, terminated, truncated, info = env.step(actions)
    assert time.monotonic() - began < 20.0
    shape = (1,) if mode == "alone" else (2, 1)
    assert np.array_equal(observation, np.full(shape, 3.0)), "not the last known observation"
    assert not np.any(reward)
    assert np.all(truncated)
    assert not np.any(terminated)
    if recovers == "replay":
        assert "env_fn raised builtins.SyntaxError" in str(info)
    if mode == "SAME_STEP":
        assert [one.tolist() for one in info["final_obs"]] == [[3.0]] * 2

    def begin() -> Any:
        if mode in ("alone", "DISABLED"):
            return env.reset(seed=1)[0]
        return env.step(actions)[0]

    with pytest.raises((SyntaxError, EnvsFailedError)) as caught:
        begin()
    assert "SyntaxError" in str(caught.value)
    module.write()
    assert np.ravel(begin())[0] == 0.0
    for number in range(1, 5):
        assert np.ravel(env.step(actions)[0])[0] == number
    kill_worker(env, 0)
    if recovers == "replay":
        assert np.ravel(env.step(actions)[0])[0] == 5.0
    else:
        assert np.ravel(env.step(actions)[3])[0]
    env.close()


@pytest.mark.parametrize("envs", [1, 2])
def test_a_rollout_that_meets_a_broken_file_raises_and_the_next_step_is_truncated(module: Module, envs: int) -> None:
    run = Run(module, envs, deadlines=SHORT)
    run.steps(3)
    module.break_()
    kill_worker(run.env)
    with pytest.raises((WorkerLostError, EnvsFailedError), match="SyntaxError"):
        run.env.rollout(partial(_zeros, envs), 4)
    module.write()
    answer = run.step()
    assert is_truncated(answer)
    assert "SyntaxError" in reason_of(answer)
    if envs == 1:
        run.env.reset()
    else:
        assert run.steps(1) == [0.0]
    assert run.steps(2) == [1.0, 2.0]
    run.env.close()


def test_a_constructor_that_raises_once_in_a_recovery_is_called_again(module: Module, tmp_path: Path) -> None:
    run = Run(module)
    run.steps(3)
    mark = tmp_path / "raise_once"
    mark.write_text("")
    status = module.path.stat()
    module.write(begin=f"import os\nif os.path.exists({str(mark)!r}):\n    os.unlink({str(mark)!r})\n    1 / 0\n")
    os.utime(module.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    kill_worker(run.env)
    assert run.steps(1) == [4.0]
    assert not mark.exists()
    run.env.close()
    assert run.outcomes() == ["replayed"]


def test_first_construction_raises_at_once(module: Module) -> None:
    module.break_()
    env = SubprocessEnv(module.env_fn, restart=NO_SNAPSHOTS)
    began = time.monotonic()
    with pytest.raises(SyntaxError):
        env.initialize()
    assert time.monotonic() - began < 30.0
    module.write()
    env.initialize()
    env.close()


def test_replacement_by_plan_that_cannot_be_built_leaves_the_old_process_running(module: Module, caplog: Any) -> None:
    run = Run(module, restart=RestartPolicy(snapshots=False, recycle_after_steps=64, backoff=0.0))
    run.steps(40)
    pid = run.env.statistics().pid
    module.break_()
    began = time.monotonic()
    assert run.steps(100)[-1] == 140.0
    assert time.monotonic() - began < 20.0
    assert run.env.statistics().pid == pid
    run.env.close()
    assert run.outcomes(Recycled) == ["put off"] * len(run.outcomes(Recycled))
    assert run.outcomes(Recycled)
    assert "SyntaxError" in caplog.text


def test_a_call_whose_reset_cannot_be_built_leaves_no_env_that_is_stepped_without_a_reset(module: Module) -> None:
    run = Run(module, deadlines=SHORT)
    run.steps(3)
    module.break_()
    kill_worker(run.env)
    with pytest.raises(EnvError, match="SyntaxError"):
        run.env.reset()
    module.write()
    with pytest.raises(Exception, match=r"Call reset\(\)"):
        run.step()
    run.env.reset()
    assert run.steps(2) == [1.0, 2.0]
    run.env.close()


def test_close_ends_the_wait_for_a_file_that_is_broken(module: Module) -> None:
    run = Run(module)
    run.steps(3)
    module.break_()
    kill_worker(run.env)
    thread = later(1.0, run.env.close)
    began = time.monotonic()
    with pytest.raises(Exception, match="closed"):
        run.step()
    assert time.monotonic() - began < 30.0
    thread.join()


@pytest.fixture(autouse=True)
def logged(caplog: Any) -> None:
    caplog.set_level(logging.INFO, "multienv")
