"""What is said of a lost worker and of an env that raised: all that is known, in order."""

from __future__ import annotations

import signal

import pytest

import multienv
from multienv._engine.reports.texts import (
    env_error,
    exit_text,
    foreign_frames,
    lost_error,
    outcome_text,
)
from multienv._engine.wire.messages import Failure
from multienv._engine.worker.replies import failure_of
from multienv.errors import (
    MultienvError,
)
from multienv.events import Loss, Recovery


def test_signals_are_named():
    for number in signal.Signals:
        assert number.name in exit_text(-number)
        assert ("out-of-memory" in exit_text(-number)) == (number is signal.SIGKILL)


def test_one_of_a_thing_is_no_plural() -> None:
    loss = Loss(None, "died", "step", 1, None, None, 1)
    for number, words in ((1, "1 request replayed"), (2, "2 requests replayed"), (1_000, "1,000 requests replayed")):
        assert words in outcome_text(Recovery(loss, "exact", "", number, 1, 0.1, "journal"))


def test_long_last_words_keep_their_end():
    stderr = "\n".join(f"line {number}" for number in range(500))
    text = str(lost_error(Loss(None, "died", "step", 1, None, None, 1, stderr=stderr), ""))
    assert "line 499" in text
    assert "line 1\n" not in text


def test_a_stack_without_a_frame_of_the_env_is_shown_as_it_is() -> None:
    ours = f'  File "{multienv.__path__[0]}/_engine/processes/monitor.py", line 5 in main\n  File "<string>", line 1 in <module>'
    bare = f"Current thread 0x7 (most recent call first):\n{ours}"
    assert foreign_frames(bare) == bare
    kept = 'Current thread 0x7 (most recent call first):\n  File "/home/me/multienv/worker/sim.py", line 3 in step'
    assert foreign_frames(f"{kept}\n{ours}\n\nExtension modules: numpy.random.mtrand (total: 1)\n") == kept


def failure(error: BaseException) -> Failure:
    try:
        raise error
    except type(error) as caught:
        return failure_of(caught)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("held")
        self.lock = (number for number in ())


class Recursive(Exception):
    def __init__(self) -> None:
        super().__init__("round")
        self.itself = self


@pytest.mark.parametrize(
    "error", [Unprintable("x"), Unpicklable(), Recursive()], ids=lambda error: type(error).__name__
)
def test_exceptions_of_any_kind_travel_catchable(error):
    arrived = env_error(failure(error), index=None, command="step", step=1, seed=None)
    assert isinstance(arrived, MultienvError)
    assert isinstance(arrived, type(error))
    assert type(error).__name__ in str(arrived)
