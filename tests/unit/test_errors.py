"""The tree of errors, and errors that are also of the type somebody else raised."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import traceback

import gymnasium
import pytest

import multienv
from kit import FaultError, TwoArgumentError
from multienv import errors
from multienv.errors import (
    ActionError,
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


def test_every_wrong_call_is_a_value_error_and_no_other_is():
    for kind in PUBLIC:
        assert issubclass(kind, ValueError) == issubclass(kind, UsageError)


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_errors_are_documented_show_their_message_and_can_be_pickled(kind):
    assert inspect.getdoc(kind)
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


def unicode_error() -> UnicodeDecodeError:
    try:
        b"\xff".decode()
    except UnicodeDecodeError as error:
        return error
    raise AssertionError


def raised_from_open() -> OSError:
    try:
        open("/nonexistent/file")  # noqa: SIM115, PTH123
    except OSError as error:
        return error
    raise AssertionError


COMBINED = [
    FaultError("x"),
    TwoArgumentError(7, "detail"),
    KeyError("key"),
    Legacy("x"),
    OSError(2, "No such file", "name"),
    raised_from_open(),
    unicode_error(),
    StopIteration(3),
    SyntaxError("bad", ("file", 1, 2, "text")),
    ImportError("x", name="module"),
    AssertionError(),
    ZeroDivisionError("x"),
    RecursionError("x"),
    MemoryError(),
    TimeoutError("x"),
    WithSlots(7),
    KeywordOnly(code=3),
    gymnasium.error.NameNotFound("x"),
    gymnasium.error.AlreadyPendingCallError("x", "step"),
    UsageError("wrong"),
    WorkerLostError("gone"),
    Exception("x"),
]
NOT_COMBINED = [WithMetaclass("x"), WithNew(1, 2), ReadOnly("x"), Gate("x"), WaitTimeout("x")]
# To subclass it runs its own code, so the object itself must come from elsewhere.
BASE_EXCEPTIONS = [KeyboardInterrupt(), SystemExit(3), GeneratorExit()]


@pytest.mark.parametrize("cause", COMBINED, ids=lambda cause: type(cause).__name__)
def test_an_error_is_catchable_as_its_cause(cause):
    error = catchable_as(EnvError, cause, "the message")
    with pytest.raises(type(cause)):
        raise error
    assert isinstance(error, EnvError)
    assert "the message" in str(error)
    assert error.args == ("the message",)
    assert "the message" in "".join(traceback.format_exception(error))
    assert repr(error)


@pytest.mark.parametrize("cause", [*NOT_COMBINED, *BASE_EXCEPTIONS], ids=lambda cause: type(cause).__name__)
def test_where_types_do_not_combine_there_is_still_an_error(cause):
    error = catchable_as(EnvError, cause, "the message")
    assert isinstance(error, EnvError)
    assert str(error) == "the message"


@pytest.mark.parametrize("cause", COMBINED, ids=lambda cause: type(cause).__name__)
def test_a_combined_error_pickles_as_its_base_with_what_it_knew(cause):
    error = catchable_as(EnvError, cause, "the message")
    error.env_index, error.command, error.step, error.remote_traceback = 3, "step", 7, "remote"
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, EnvError)
    assert str(again) == "the message"
    assert (again.env_index, again.command, again.step, again.remote_traceback) == (3, "step", 7, "remote")


# --- several envs -------------------------------------------------------------------------------


def test_one_cause_is_catchable_by_its_own_type():
    error = EnvsFailedError.collect("step()", {1: FaultError("x")}, ["a", None, "c"])
    assert isinstance(error, FaultError)
    assert isinstance(error, EnvsFailedError)
    assert list(error.failures) == [1]
    assert error.results == ["a", None, "c"]
    assert error.__cause__ is error.failures[1]
    assert "1 of 3 envs failed in step()" in str(error)
    assert "env 1: FaultError: x" in str(error)


def test_several_causes_are_all_named_and_held():
    failures = {0: FaultError("first"), 2: KeyError("second")}
    error = EnvsFailedError.collect("reset()", failures, [None, 1, None])
    assert type(error) is EnvsFailedError
    assert error.failures == failures
    assert "env 0: FaultError: first" in str(error)
    assert "env 2: KeyError: 'second'" in str(error)
    assert error.__cause__ is failures[0]


@pytest.mark.parametrize(("failed", "told"), [([1], True), ([0, 1], False)])
def test_of_the_others_nothing_is_said_where_all_failed(failed, told):
    failures = {index: FaultError("x") for index in failed}
    text = str(EnvsFailedError.collect("step()", failures, ["a", None], "Reset them.", "The others go on."))
    assert ("The others go on. Reset them." in text) == told
    assert "Reset them." in text


@pytest.mark.parametrize("kind", [ActionError, WorkerHungError])
def test_several_causes_of_one_type_are_catchable_by_it(kind):
    error = EnvsFailedError.collect("step()", {0: kind("a"), 2: kind("b")}, [None, 1, None])
    assert isinstance(error, kind)
    assert isinstance(error, EnvsFailedError)


@pytest.mark.parametrize("failures", [{0: FaultError("x")}, {0: FaultError("x"), 1: KeyError("y")}], ids=["one", "two"])
def test_failures_and_results_survive_pickling(failures):
    error = EnvsFailedError.collect("step()", failures, [None, None, (1, 2.0)])
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, EnvsFailedError)
    assert str(again) == str(error)
    assert list(again.failures) == list(failures)
    assert again.results == [None, None, (1, 2.0)]


def test_names_of_earlier_versions_still_catch_what_is_raised_and_warn() -> None:
    for name, kind in errors._RENAMED.items():
        with pytest.warns(DeprecationWarning, match=f"{name} is gone: catch {kind.__name__}"):
            assert getattr(multienv, name) is kind
    with pytest.raises(AttributeError):
        multienv.OtherError  # noqa: B018
