"""One test for each mistake seen in DI-engine's managers that the tests of the invariants do not hold down.

Late replies and resets that read the reply of a step: invariant 4; Ctrl-C: 8; exceptions with constructors of their own: 6.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manager_envs import FailingResetEnv

from kit import CounterEnv, SlowEnv
from multienv.managers import EnvState


@pytest.fixture
def errors(tmp_path: Path) -> Path:
    """Return the file that has what the next resets raise, a line each."""
    return tmp_path / "errors"


# --- ready_obs spins forever when every env is done -----------------------------------------------


@pytest.mark.parametrize("action", ["ready_obs", "step"])
def test_waiting_costs_no_time_of_the_processor(manager_of: Any, action: str) -> None:
    slow = partial(SlowEnv, horizon=1, **{"reset_seconds" if action == "ready_obs" else "step_seconds": 0.25})
    with manager_of([slow] * 2) as manager:
        if action == "ready_obs":
            manager.step({0: 1, 1: 1})
        before = time.thread_time()
        manager.ready_obs if action == "ready_obs" else manager.step({0: 1, 1: 1})
        assert time.thread_time() - before < 0.05


# --- a reset failing in the background closes the manager silently --------------------------------


@pytest.mark.parametrize("asked", ["ready_obs", "step"])
def test_a_reset_failing_in_the_background_surfaces_and_closes_nothing(
    manager_of: Any, errors: Path, asked: str
) -> None:
    """Once, and whenever it does, no timestep is lost."""
    fns = [partial(FailingResetEnv, errors=str(errors), horizon=1), partial(CounterEnv, horizon=None)]
    seen: list[Any] = []
    with manager_of(fns) as manager:
        errors.write_text("no more")
        with pytest.raises(ConnectionError, match="no more") as caught:
            seen += manager.step({0: 1, 1: 1}).values()
            while True:
                if asked == "ready_obs":
                    _ = manager.ready_obs
                else:
                    seen += manager.step({1: 1} if 1 in manager.ready_env else {}).values()
        error: Any = caught.value
        assert list(error.failures) == [0]
        if error.results[0] is not None or not isinstance(error.results[1], np.ndarray):  # not what ready_obs gives
            seen += [timestep for timestep in error.results if timestep is not None]
        assert manager.env_states == {0: EnvState.ERROR, 1: EnvState.RUN}
        while sum(timestep.env_id for timestep in seen) < 5:
            seen += manager.step(dict.fromkeys(manager.ready_obs, 1)).values()  # told once
        steps = [[timestep.observation[0] for timestep in seen if timestep.env_id == index] for index in (0, 1)]
        assert steps == [[1], list(range(1, len(steps[1]) + 1))]
        manager.reset({0: None})
        assert set(manager.ready_obs) == {0, 1}


def test_a_reset_in_place_that_fails_keeps_the_timestep(manager_of: Any, errors: Path) -> None:
    with manager_of([partial(FailingResetEnv, errors=str(errors), horizon=1)], reset_inplace=True) as manager:
        errors.write_text("no more")
        with pytest.raises(ConnectionError) as caught:
            manager.step({0: 1})
        error: Any = caught.value
        assert error.results[0].terminated
        assert error.results[0].observation[0] == 1


@pytest.mark.parametrize("retry_type", ["reset", "renew"])
def test_a_reset_is_tried_again_as_told(manager_of: Any, errors: Path, retry_type: str) -> None:
    options = {"max_retry": 3, "retry_type": retry_type, "retry_waiting_time": 0.01}
    with manager_of([partial(FailingResetEnv, errors=str(errors), horizon=1)], **options) as manager:
        pid = manager.ready_info[0]["pid"]
        errors.write_text("once\ntwice" if retry_type == "reset" else "once\nfirst")
        manager.step({0: 1})
        assert len(manager.ready_obs) == 1
        assert (manager.ready_info[0]["pid"] == pid) == (retry_type == "reset")
        assert errors.read_text() == ""
        errors.write_text("first\nfirst\nfirst")
        manager.step({0: 1})
        with pytest.raises(ConnectionError):
            _ = manager.ready_obs
        assert errors.read_text() == ""


def test_resets_asked_for_are_tried_again_too_and_fail_alone(manager_of: Any, errors: Path) -> None:
    fns = [partial(FailingResetEnv, errors=str(errors)), CounterEnv]
    with manager_of(fns, max_retry=2, retry_waiting_time=0.0) as manager:
        errors.write_text("once")
        manager.reset()
        errors.write_text("once\ntwice")
        with pytest.raises(ConnectionError, match="twice") as caught:
            manager.reset()
        error: Any = caught.value
        assert error.results[1][0] == 0
        assert set(manager.ready_obs) == {1}


# --- seeds are used once, and a renewed worker has none -------------------------------------------


def test_a_renewed_worker_has_the_seed_of_its_episode(manager_of: Any, errors: Path) -> None:
    seeds = []
    for lost in (False, True):
        manager = manager_of(
            [partial(FailingResetEnv, errors=str(errors), horizon=1)],
            episode_num=3,
            max_retry=2,
            retry_type="renew",
            retry_waiting_time=0.0,
        )
        manager.seed([5])
        with manager:
            pids, given = set(), []
            while not manager.done:
                ready = manager.ready_obs
                if lost:
                    errors.write_text("once")  # while nobody looks
                timestep = manager.step(dict.fromkeys(ready, 1)).get(0)
                if timestep is not None:
                    pids.add(timestep.info["pid"])
                    given.append((timestep.info["reset"], timestep.observation.tolist()))
        assert (len(pids) > 1) == lost
        seeds.append(given)
    assert seeds[0] == seeds[1]
    assert len({seed for (seed, _), _ in seeds[0]}) == 3
