"""What is said of a lost worker and of an env that raised: all that is known, in order."""

from __future__ import annotations

import signal

import pytest

from multienv.errors import (
    EnvError,
    MultienvError,
    RemoteTraceback,
)
from multienv.events import Loss, Recovery
from multienv.reports.texts import (
    env_error,
    exit_text,
    lost_error,
    outcome_text,
    what_happened,
)
from multienv.wire.messages import Failure
from multienv.worker.failures import failure_of

LOSS = Loss(env_index=3, cause="died", command="step", step=17, seed=42, pid=1234, exit_code=-9)


def test_signals_are_named():
    for number in signal.Signals:
        assert number.name in exit_text(-number)
        assert ("out-of-memory" in exit_text(-number)) == (number is signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "text"), [(0, "exited with code 0"), (3, "exited with code 3"), (None, "unknown"), (-200, "signal 200")]
)
def test_exit_codes_in_words(code, text):
    assert text in exit_text(code)


def test_long_last_words_keep_their_end():
    stderr = "\n".join(f"line {number}" for number in range(500))
    text = str(lost_error(Loss(None, "died", "step", 1, None, None, 1, stderr=stderr), ""))
    assert "line 499" in text
    assert "line 1\n" not in text


def failure(error: BaseException) -> Failure:
    try:
        raise error
    except type(error) as caught:
        return failure_of(caught)


def test_an_exception_of_a_class_that_cannot_be_had_here_arrives_as_text():
    error = env_error(
        Failure("simulator.Crash", "wheel lost", "Traceback …", exception=None),
        index=None,
        command="reset",
        step=None,
        seed=None,
    )
    assert type(error) is EnvError
    assert "simulator.Crash: wheel lost" in str(error)
    assert isinstance(error.__cause__, RemoteTraceback)


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


@pytest.mark.parametrize(
    ("outcome", "cost"),
    [("truncated", "the episode has ended"), ("raised", "an error is raised"), ("reset", "in a new process")],
)
def test_no_sentence_stands_twice_in_the_log(outcome, cost):
    reason = what_happened(LOSS)
    text = outcome_text(Recovery(LOSS, outcome, reason, 0, 0, 0.5))
    assert text.count("was killed by SIGKILL") == 1
    assert "(last seed 42) (pid 1234). " in text
    assert text.endswith(f"Outcome: {outcome}, {cost}, in 0.500 s.")
    longer = outcome_text(Recovery(LOSS, outcome, f"{reason} It cannot be brought back.", 0, 0, 0.5))
    assert longer == f"{text} It cannot be brought back."
    other = outcome_text(Recovery(LOSS, outcome, "It is not deterministic.", 0, 0, 0.5, report="/a b/c.json"))
    assert other.endswith("It is not deterministic. To see it again: multienv replay '/a b/c.json'")
