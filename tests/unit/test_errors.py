"""The tree of errors, and errors that are also of the type somebody else raised."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import subprocess
import sys
import traceback

import gymnasium
import pytest

from kit import FaultError, TwoArgumentError
from multienv import errors
from multienv.errors import (
    EnvError,
    EnvsFailedError,
    UsageError,
    WaitTimeout,
    WorkerHungError,
    WorkerLostError,
    catchable_as,
)

PUBLIC = [getattr(errors, name) for name in errors.__all__]


def documented_tree() -> dict[str, str]:
    """Child → parent, as the module's docstring draws them."""
    parents: dict[int, str] = {}
    tree = {}
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^    (?P<indent>[│├└─ ]*)(?P<name>[A-Z]\w+)", line)
        if found:
            depth = len(found["indent"]) // 4
            parents[depth] = found["name"]
            if depth:
                tree[found["name"]] = parents[depth - 1]
    return tree


def test_the_tree_is_the_documented_one():
    tree = documented_tree()
    assert len(tree) >= 15
    for child, parent in tree.items():
        assert issubclass(getattr(errors, child), getattr(errors, parent)), (child, parent)
    assert set(errors.__all__) == {*tree, "MultienvError"}


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_errors_are_documented_show_their_message_and_can_be_pickled(kind):
    assert inspect.getdoc(kind)
    assert issubclass(kind, ValueError) == issubclass(kind, UsageError), "wrong calls are ValueErrors, and no other is"
    error = kind("what happened")
    assert "what happened" in str(error)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert str(again) == str(error)
        assert vars(again) == vars(error)


# --- catchable_as -------------------------------------------------------------------------------


class WithSlots(Exception):
    __slots__ = ("detail",)

    def __init__(self, detail: int) -> None:
        self.detail = detail


class Meta(type):
    def __new__(mcs, name, bases, namespace):
        if len(bases) > 1:
            raise RuntimeError("no children of two parents, please")
        return super().__new__(mcs, name, bases, namespace)


class WithMetaclass(Exception, metaclass=Meta):
    pass


class WithNew(Exception):
    def __new__(cls, one, two):
        return super().__new__(cls, one, two)


class OtherOfChildren(Exception):
    def __new__(cls, *args):
        return super().__new__(cls if cls is OtherOfChildren else Exception)


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        self.code = code


class ReadOnly(Exception):
    @property
    def args(self):  # type: ignore[override]
        return ("mine",)


class Gate(Exception):
    def __setattr__(self, name, value):
        raise AttributeError(name)


class Legacy(FaultError, KeyError):
    """Two parents, a built-in layout."""


COMBINED = [
    TwoArgumentError(7, "detail"), KeyError("key"), Legacy("x"), OSError(2, "No such file", "name"), StopIteration(3),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), SyntaxError("bad", ("file", 1, 2, "text")), MemoryError(),
    ImportError("x", name="module"), AssertionError(), WithSlots(7), KeywordOnly(code=3), UsageError("wrong"),
    gymnasium.error.AlreadyPendingCallError("x", "step"), WorkerLostError("gone"), Exception("x"),
]  # fmt: skip
NOT_COMBINED = [
    WithMetaclass("x"), WithNew(1, 2), OtherOfChildren("x"), ReadOnly("x"), Gate("x"), WaitTimeout("x"),
    KeyboardInterrupt(),
]  # fmt: skip


@pytest.mark.parametrize("cause", [*COMBINED, *NOT_COMBINED], ids=lambda cause: type(cause).__name__)
def test_an_error_is_catchable_as_its_cause_where_the_types_combine_and_pickles_with_what_it_knew(cause):
    error = catchable_as(EnvError, cause, "the message")
    assert isinstance(error, EnvError)
    assert isinstance(error, type(cause)) or cause in NOT_COMBINED
    assert "the message" in "".join(traceback.format_exception(error))
    assert repr(error)
    error.env_index, error.command, error.step, error.remote_traceback = 3, "step", 7, "remote"
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, EnvError)
    assert (str(again), again.args) == ("the message", ("the message",))
    assert (again.env_index, again.command, again.step, again.remote_traceback) == (3, "step", 7, "remote")


# --- several envs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failures", "kind"),
    [
        ({1: FaultError("x")}, FaultError),
        ({0: WorkerHungError("a"), 2: WorkerHungError("b")}, WorkerHungError),
        ({0: FaultError("first"), 2: KeyError("second")}, EnvsFailedError),
    ],
    ids=["one", "of one type", "of two types"],
)
def test_failures_of_envs_are_named_held_pickled_and_catchable_by_a_type_they_share(failures, kind):
    error = EnvsFailedError.collect("step()", failures, ["a", None, (1, 2.0)])
    assert isinstance(error, kind)
    assert (error.failures, error.__cause__) == (failures, next(iter(failures.values())))
    assert f"{len(failures)} of 3 envs failed in step()" in str(error)
    assert all(f"env {index}: {type(one).__name__}" in str(error) for index, one in failures.items())
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, EnvsFailedError)
    assert (str(again), list(again.failures)) == (str(error), list(failures))
    assert again.results == error.results == ["a", None, (1, 2.0)]


def test_errors_of_many_envs_that_are_the_same_are_told_once_with_their_indices_and_of_others_the_first() -> None:
    failures: dict[int, Exception] = {}
    for index in range(64):
        error = failures[index] = EnvError(
            f"Env {index} raised ValueError: no licence\nduring reset() (last seed {index})."
        )
        error.remote_traceback = "the same" if index != 7 else "another"
    text = str(EnvsFailedError.collect("reset()", failures, [None] * 64))
    assert len(text.splitlines()) == 5
    assert (
        f"envs {', '.join(str(index) for index in range(64) if index != 7)}, all as the first: EnvError: Env 0" in text
    )
    assert "  env 7: EnvError: Env 7 raised" in text
    text = str(EnvsFailedError.collect("reset()", {index: ValueError(index) for index in range(64)}, [None] * 64))
    assert text.splitlines()[-1] == "  and 56 other errors: `failures` has all."


def test_gymnasium_before_1_1_is_refused_in_one_line() -> None:
    code = "import gymnasium; del gymnasium.vector.AutoresetMode; gymnasium.__version__ = '1.0.0'; import multienv"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = "ImportError: multienv needs gymnasium 1.1 or later, and this is 1.0.0: upgrade it."
    assert ended.stderr.splitlines()[-1] == said
