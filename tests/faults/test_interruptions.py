"""An exception of a signal handler at any place of a call: what the simulation of it cannot show.

That is: descriptors and processes, real time, threads, envs that raise, envs without processes. *At every place* means
each place within multienv where CPython looks for signals, one after the other, or every so many-th of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from kit import (
    CounterEnv,
    FarewellEnv,
    Fault,
    FaultyEnv,
    NondeterministicEnv,
    first_difference,
    kill_worker,
    monitor_pid,
)
from kit.ctrl_c import is_waiting
from kit.interruption import EVENTS_AND_LOCKS, Interruption, Ledger, disarm, every_place
from kit.process_table import alive
from kit.trainer_process import STUCK_AFTER, becomes_true
from multienv import (
    AsyncEnv,
    AutoResetWrapper,
    Deadlines,
    MultiEnv,
    RestartPolicy,
    SubprocessEnv,
    SubprocessVectorEnv,
    create_subprocess_envs,
)
from multienv._engine import interrupts
from multienv._engine.asking.fanout import FanOut
from multienv._engine.recovery.loss_recovery import LossRecovery
from multienv._engine.recovery.supervisor import Supervisor
from multienv.envs.subprocess_env import supervisor_of
from multienv.errors import ClosedError, EnvsFailedError, ResetNeededError, WorkerLostError

# A signal that lands in the callback of a weak reference is swallowed by the interpreter, which says so.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function WeakSet:pytest.PytestUnraisableExceptionWarning"
)

ENDLESS = partial(CounterEnv, horizon=None)
UNREPEATABLE = partial(NondeterministicEnv, horizon=None)
NO_SNAPSHOTS = RestartPolicy(snapshots=False)
STEP = np.int64(1)


# --- descriptors and processes --------------------------------------------------------------------------


def descriptors() -> dict[str, int]:
    """Return how many descriptors this process has of each kind."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists the directory
            kind = os.readlink(f"/proc/self/fd/{name}").partition("[")[0]
            found[kind] = found.get(kind, 0) + 1
    return found


@pytest.mark.parametrize("kind", [pytest.param("multi_env", marks=pytest.mark.ci), "vector_env"])
def test_building_several_envs_interrupted_at_many_places_leaves_no_descriptor(kind: str) -> None:
    def build() -> MultiEnv | SubprocessVectorEnv:
        if kind == "multi_env":
            return MultiEnv(create_subprocess_envs([CounterEnv] * 2))
        return SubprocessVectorEnv([CounterEnv] * 2, envs_per_worker=1)

    fired = 0
    with SubprocessEnv(CounterEnv):  # or the monitor would come and go
        whole = Interruption(sys.maxsize)
        with whole:
            build().close()
        # Each module and each env that other tests have imported and registered here is some places more.
        for interruption in every_place(stride=max(467, whole.passed // 40)):
            gc.collect()
            before, envs = Counter(descriptors()), None
            with interruption:
                envs = build()
            fired += interruption.fired
            if envs is not None:
                envs.close()
            # Fewer of a kind, if what others have left is collected meanwhile.
            assert becomes_true(lambda before=before: Counter(descriptors()) <= before), interruption.where  # type: ignore[misc]
    assert fired > 5


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_step_of_an_async_env_interrupted_at_every_place_is_completed_by_the_next() -> None:
    ledger, loop, fired = Ledger(horizon=None), asyncio.new_event_loop(), 0
    run = loop.run_until_complete
    env = AsyncEnv(ENDLESS)
    ledger.reset(run(env.reset(seed=1)), 1)
    for interruption in every_place():
        with interruption:
            ledger.step(run(env.step(1)), [1])
        fired += interruption.fired
        ledger.step(run(asyncio.wait_for(env.step(2), STUCK_AFTER)), [1, 2])
        ledger.step(run(env.step(3)), [3])
    assert fired > 20
    run(env.close())
    loop.close()


def test_reset_interrupted_at_every_place_writes_nothing_to_descriptors_that_are_somebody_elses(tmp_path: Path) -> None:
    """A reset in a new process is interrupted: a file opened then may have the number that the lost one's pipe had."""
    fired = 0
    for interruption in every_place(stride=331):
        with SubprocessEnv(UNREPEATABLE, restart=NO_SNAPSHOTS) as env:
            env.reset(seed=0)
            env.step(STEP)
            kill_worker(env)
            with interruption:
                env.reset(seed=3)
            fired += interruption.fired
            with contextlib.ExitStack() as files:
                mine = [files.enter_context((tmp_path / str(number)).open("wb")) for number in range(8)]
                with contextlib.suppress(ResetNeededError):
                    env.step(STEP)
                assert [os.fstat(file.fileno()).st_size for file in mine] == [0] * 8, interruption.where
            env.reset(seed=3)
            assert env.step(STEP)[0][0] == 1, interruption.where
    assert fired > 2


def test_snapshot_of_a_call_interrupted_at_every_place_is_freed() -> None:
    """With the next call of snapshot(), or with the env at the latest."""

    others = alive()  # a forkserver of multiprocessing that gymnasium has started, for instance
    fired = 0
    for interruption in every_place(stride=17):
        with SubprocessEnv(ENDLESS, restart=NO_SNAPSHOTS) as env:
            env.reset(seed=1)
            env.step(STEP)
            before = alive()
            with interruption:
                env.snapshot().free()
            fired += interruption.fired
            if interruption.place % 2:
                env.step(STEP)
                env.snapshot().free()
                # The worker may have been replaced.
                assert becomes_true(lambda before=before: len(alive()) <= len(before)), interruption.where  # type: ignore[misc]
        assert becomes_true(lambda: alive() <= {monitor_pid(), *others}), interruption.where
    assert fired > 5


@contextlib.contextmanager
def ctrl_c_in_finalizers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Raise KeyboardInterrupt at the entry of the first finalizer that is written in Python; yield what got swallowed."""
    swallowed: list[Any] = []

    def strike(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code.co_name == "__del__" or code is weakref.finalize.__call__.__code__:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda told: swallowed.append(told.object))
        gc.collect()
        gc.disable()  # what other tests have left is theirs
        sys.settrace(strike)
        try:
            yield swallowed
        finally:
            sys.settrace(None)
            gc.enable()


def test_snapshot_that_is_dropped_when_ctrl_c_comes_is_freed_and_ctrl_c_is_not_swallowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with SubprocessEnv(ENDLESS), SubprocessEnv(ENDLESS, restart=NO_SNAPSHOTS) as env:
        env.reset(seed=1)
        before = alive()
        tokens = [env.snapshot(), env.snapshot()]
        with ctrl_c_in_finalizers(monkeypatch) as swallowed:
            tokens.pop()
        assert swallowed == []
        env.call("has_wrapper_attr", "horizon")  # one of the next calls frees it
        assert becomes_true(lambda: len(alive() - before) == 1)
        with ctrl_c_in_finalizers(monkeypatch) as swallowed:
            tokens.pop()
        env.close()
        assert becomes_true(lambda: not alive() - before)
    assert swallowed == []


def test_envs_that_leave_and_enter_their_own_pace_swallow_no_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(SubprocessVectorEnv([ENDLESS] * 2, envs_per_worker=1)) as envs:
        with ctrl_c_in_finalizers(monkeypatch) as swallowed:
            for _ in range(2):
                envs.reset(seed=0)
                envs.send(np.array([1, 1]))
                envs.recv()
        assert swallowed == []


@pytest.mark.parametrize("kind", ["vector", "list"])
def test_our_handler_of_sigint_is_there_until_all_is_released_that_has_finalizers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Python's own handler raises in a finalizer is dropped: memory and threads go after the last worker."""
    found: list[Any] = []
    drop_round = FanOut.drop_round

    def noting(self: FanOut) -> Any:
        found.append(signal.getsignal(signal.SIGINT))
        return drop_round(self)

    monkeypatch.setattr(FanOut, "drop_round", noting)
    envs: Any = SubprocessVectorEnv([ENDLESS]) if kind == "vector" else MultiEnv(create_subprocess_envs([ENDLESS]))
    envs.reset(seed=0)
    envs.close()
    assert found == [interrupts.handle]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_loss_whose_recovery_is_interrupted_is_one_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the next call is broken off while it sends."""

    def broken_off(*_: Any) -> None:
        raise Tick

    with SubprocessEnv(ENDLESS) as env:
        env.reset(seed=0)
        kill_worker(env)
        with monkeypatch.context() as patch, pytest.raises(Tick):
            patch.setattr(LossRecovery, "recover", broken_off)
            env.snapshot()
        supervisor: Any = supervisor_of(env)
        supervisor.send_step(STEP)
        supervisor.mark_lost(keeps_request=False)
        assert env.step(STEP)[0][0] == 1
        assert (env.statistics().losses, env.statistics().exact_recoveries) == (1, 1)


def test_loss_that_is_interrupted_before_its_error_is_raised_brings_no_earlier_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken_off(*_: Any) -> None:
        raise Tick

    with SubprocessEnv(ENDLESS, restart=RestartPolicy(on_crash="raise")) as env:
        env.reset(seed=0)
        env.step(STEP)
        kill_worker(env)
        with monkeypatch.context() as patch, pytest.raises(Tick):
            patch.setattr(Supervisor, "_end_process", broken_off)
            env.step(STEP)
        with pytest.raises(WorkerLostError):
            env.step(STEP)


@pytest.mark.parametrize("kind", ["one env", "all envs", "own pace"])
def test_call_that_a_handler_leaves_at_every_place_costs_workers_and_no_transition(kind: str) -> None:
    """Each worker is lost once at most, and recovered exactly; where the call only waited, none is lost."""
    envs = SubprocessVectorEnv([ENDLESS] * (1 + (kind != "one env")), envs_per_worker=1)
    lost, waits = Counter[str](), {"in wait", "in _poll", "in wait_any"}

    def step() -> Any:
        if kind != "own pace":
            return envs.step(np.ones(envs.num_envs, int))
        envs.send(np.ones(len(envs.idle_envs), int), envs.idle_envs)
        return envs.recv()

    def losses() -> list[int]:
        return [one.losses for one in envs.statistics()]

    with contextlib.closing(envs):
        envs.reset(seed=0)
        for steps, interruption in enumerate(every_place(stride=1 if kind == "one env" else 2), 1):
            time.sleep(0.002)  # the workers sleep
            before, seen = losses(), None
            with interruption:
                seen = step()
            seen = step() if seen is None else seen
            assert seen[0][:, 0].tolist() == [steps] * envs.num_envs, interruption.where
            more = [after - earlier for earlier, after in zip(before, losses(), strict=True)]
            assert max(more) <= 1, interruption.where
            lost[interruption.where.partition(" ")[2]] += sum(more)
        assert all(one.losses == one.exact_recoveries for one in envs.statistics())
    assert lost.total() > 0
    assert not any(lost[place] for place in waits)


def test_time_limit_that_a_handler_raises_as_a_timeout_error_is_never_swallowed() -> None:
    """It is an OSError: a block that ignores those of a system call must let it through. Most strike in such a block."""
    fired = 0
    with SubprocessEnv(ENDLESS) as env:
        env.reset(seed=0)
        for interruption in every_place(TimeoutError):
            time.sleep(0.002)  # the worker sleeps
            seen = None
            with interruption:
                seen = env.step(STEP)
            assert (seen is None) is interruption.fired, interruption.where
            fired += interruption.fired
            if seen is None:
                env.step(STEP)
    assert fired > 20


# --- what is recorded -----------------------------------------------------------------------------------


def test_step_of_which_one_env_has_made_an_error_is_told_after_an_interruption_at_every_place() -> None:
    """The next step raises the error, with what the other envs returned; or the interrupted one was never sent."""
    culprit, fired = 1, 0
    envs = SubprocessVectorEnv(
        [partial(FaultyEnv, fault=Fault("raise", "step", action=0, per="episode"), horizon=None)] * 4, envs_per_worker=2
    )
    with contextlib.closing(envs):
        for interruption in every_place(stride=11):
            envs.reset(seed=0)
            told: Any = None
            with interruption, pytest.raises(EnvsFailedError) as caught:
                envs.step(np.array([1, 0, 1, 1]))
            if interruption.fired:
                fired += 1
                try:
                    told = envs.step(np.full(4, 2))
                except EnvsFailedError as error:
                    failed = error
            else:
                failed = caught.value
            if told is None:
                assert list(failed.failures) == [culprit], interruption.where
                seen = [None if row is None else row[0][[0, 3]].tolist() for row in failed.results]
                assert seen == [[1, 1], None, [1, 1], [1, 1]], interruption.where
                resumed = {"multienv": {"resumed": True}} if interruption.fired else {}
                assert [row and row[4] for row in failed.results] == [resumed, None, resumed, resumed]
                after = envs.step(np.full(4, 3))[0]
                assert after[:, 0].tolist() == [2, 0, 2, 2], interruption.where
            else:
                assert told[0][:, [0, 3]].tolist() == [[1, 2]] * 4, interruption.where
        assert all(one.exact_recoveries == one.losses < fired for one in envs.statistics())
    assert fired > 5


@pytest.mark.parametrize("hosted", [0, 1])
def test_step_of_envs_in_this_process_interrupted_at_every_place_is_made_once(hosted: int) -> None:
    """Alone, and beside one in a process of its own."""
    steps, fired = 0, 0
    with MultiEnv([CounterEnv(horizon=None), *[SubprocessEnv(ENDLESS)] * hosted]) as envs:
        envs.reset(seed=0)
        for interruption in every_place(stride=5):
            seen: Any = None
            with interruption:
                seen = envs.step([1] * (1 + hosted))
            fired += interruption.fired
            if seen is None:
                seen = envs.step([2] * (1 + hosted))
            steps += 1
            assert [one[0] for one in seen[0]] == [steps] * (1 + hosted), interruption.where
    assert fired > 5


# --- real signals -------------------------------------------------------------------------------------------


class Tick(Exception):
    """What the handler raises: an ordinary exception, which must not be taken for the env's.

    Attributes:
        awaits_sleep: It raises as soon as the trainer sleeps until a worker answers. The worker that sends the signal may
            have begun while the trainer was still sending: then the request would not have been made.
    """

    awaits_sleep = False


@pytest.fixture
def interruption() -> Iterator[type[BaseException]]:
    def strike(*_: Any) -> None:
        if Tick.awaits_sleep and not is_waiting():
            signal.setitimer(signal.ITIMER_REAL, 0.002)
            return
        raise Tick

    before = signal.signal(signal.SIGALRM, strike)
    gc.collect()
    gc.disable()  # what a handler raises inside a finalizer is swallowed by the interpreter
    yield Tick
    Tick.awaits_sleep = False
    gc.enable()
    disarm()
    signal.signal(signal.SIGALRM, before)


class StrikingEnv(CounterEnv):
    """Sends the trainer a signal when it is built or reset for the so many-th time, and goes on when a gate is opened."""

    def __init__(self, *, trainer: int, build: int = 0, reset: int = 0, gate: str = "", **counter: Any) -> None:
        super().__init__(**counter)
        self.trainer, self.gate, self.left = trainer, gate, {"build": build, "reset": reset}
        self._pass("build")

    def _pass(self, moment: str) -> None:
        self.left[moment] -= 1
        if self.left[moment] == 0:
            os.kill(self.trainer, signal.SIGALRM)
            if self.gate:
                Path(self.gate).read_bytes()  # a named pipe: until the trainer opens it, too

    def reset(self, **given: Any) -> Any:
        self._pass("reset")
        return super().reset(**given)


@pytest.fixture
def gate(tmp_path: Path) -> str:
    """Return where a StrikingEnv waits until it is opened."""
    path = str(tmp_path / "gate")
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
@pytest.mark.parametrize("is_hosted", [True, False], ids=["process", "plain"])
def test_step_of_the_autoreset_wrapper_interrupted_in_the_reset_is_completed_by_the_next(
    interruption: type[Tick], mode: str, is_hosted: bool, gate: str
) -> None:
    interruption.awaits_sleep = is_hosted
    quiet = AutoResetWrapper(CounterEnv(horizon=3, count_episodes=False), mode)
    env_fn = partial(StrikingEnv, trainer=os.getpid(), reset=2, gate=gate * is_hosted, horizon=3, count_episodes=False)
    env: Any = SubprocessEnv(env_fn).initialize() if is_hosted else env_fn()
    with contextlib.closing(env):
        wrapped = AutoResetWrapper(env, mode)
        assert first_difference(wrapped.reset(seed=1), quiet.reset(seed=1)) is None
        hits = 0
        for action in [1, 2, 3, 1, 2, 3, 1, 2]:
            try:
                transition = wrapped.step(action)
            except interruption:
                hits += 1
                if is_hosted:
                    Path(gate).write_bytes(b"")
                transition = wrapped.step(0)
                if is_hosted:
                    assert transition[4].pop("multienv") == {"resumed": True}
            assert first_difference(transition, quiet.step(action)) is None
        assert hits == 1


@pytest.mark.parametrize("is_hosted", [True, False], ids=["process", "plain"])
def test_reset_of_several_envs_that_was_interrupted_is_never_made_by_two_threads_at_once(
    interruption: type[Tick], is_hosted: bool, gate: str
) -> None:
    interruption.awaits_sleep = is_hosted
    quiet = [CounterEnv(horizon=None) for _ in range(2)]
    env_fn = partial(StrikingEnv, trainer=os.getpid(), reset=1, gate=gate, horizon=None)
    with MultiEnv([SubprocessEnv(env_fn) if is_hosted else env_fn(), SubprocessEnv(ENDLESS)]) as envs:
        with pytest.raises(interruption):
            envs.reset(seed=1)
        opener = threading.Thread(target=lambda: Path(gate).write_bytes(b""))
        opener.start()
        for index, env in enumerate(quiet):
            env.reset(seed=1 + index)
        expected = [env.step(np.int64(2))[0] for env in quiet]
        assert first_difference(envs.step([2, 2])[0], expected) is None
        opener.join()


@pytest.mark.parametrize("is_made_by", ["create_subprocess_envs", "MultiEnv"])
def test_building_of_several_envs_that_was_interrupted_is_ended_however_long_it_would_have_taken(
    interruption: Any, is_made_by: str, gate: str
) -> None:
    env_fns = [ENDLESS, partial(StrikingEnv, trainer=os.getpid(), build=1, gate=gate)]  # nobody opens the gate
    deadlines = Deadlines(start=None, close=0.1)
    if is_made_by == "create_subprocess_envs":
        with pytest.raises(interruption):
            create_subprocess_envs(env_fns, deadlines=deadlines)
        return
    envs = [SubprocessEnv(env_fn, deadlines=deadlines) for env_fn in env_fns]
    envs[0].initialize()
    with pytest.raises(interruption):
        MultiEnv(envs)
    assert envs[0].statistics().state == "ready"
    for env in envs:
        env.close()


def test_close_of_several_envs_interrupted_at_every_place_is_completed_by_the_next(tmp_path: Path) -> None:
    fired = 0
    for interruption in every_place():
        left = [tmp_path / f"{interruption.place} {index}" for index in range(2)]
        envs = MultiEnv([FarewellEnv(left=one) for one in left])
        with interruption:
            envs.close()
        fired += interruption.fired
        envs.close()
        assert all(map(Path.exists, left)), interruption.where
        with pytest.raises(ClosedError):
            envs.step([1, 1])
    assert fired > 5


@pytest.mark.parametrize(("is_built", "stride"), [(False, 1), (True, 23)])
def test_close_of_one_env_interrupted_at_every_place_is_completed_by_the_next(is_built: bool, stride: int) -> None:
    """Those in Python's own locks and events included."""
    fired = 0
    for interruption in every_place(stride=stride, beside=(EVENTS_AND_LOCKS,)):
        env = SubprocessEnv(CounterEnv)
        if is_built:
            env.initialize()
        with interruption:
            env.close()
        fired += interruption.fired
        again = threading.Thread(target=env.close, daemon=True)
        again.start()
        again.join(STUCK_AFTER)
        assert not again.is_alive(), interruption.where
        env.close()
        channel = env._supervisor.channel
        assert channel is None or channel.descriptors() == (), interruption.where
        with pytest.raises(ClosedError):
            env.step(STEP)
    assert fired > 5
