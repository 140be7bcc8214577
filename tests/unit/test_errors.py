"""The tree of errors, and errors that are also of the type somebody else raised."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import traceback

import gymnasium
import pytest

from kit import FaultError, TwoArgumentError
from multienv import errors
from multienv.errors import (
    ActionError,
    CallPendingError,
    EnvRaisedError,
    EnvsFailedError,
    MultienvError,
    NothingPendingError,
    RemoteTraceback,
    UsageError,
    WorkerDiedError,
    WorkerHungError,
    catchable_as,
    rebuilt,
)

PUBLIC = [getattr(errors, name) for name in errors.__all__]
ALSO = {
    "UsageError": ValueError,
    "ClosedError": gymnasium.error.ClosedEnvironmentError,
    "ResetNeededError": gymnasium.error.ResetNeeded,
    "CallPendingError": gymnasium.error.AlreadyPendingCallError,
    "NothingPendingError": gymnasium.error.NoAsyncCallError,
    "ActionError": gymnasium.error.InvalidAction,
    "SeedError": gymnasium.error.Error,
    "EnvFnError": TypeError,
    "WaitTimeout": TimeoutError,
    "WorkerHungError": TimeoutError,
}


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
    assert len(tree) >= 20
    for child, parent in tree.items():
        assert issubclass(getattr(errors, child), getattr(errors, parent)), (child, parent)
    shown = {*tree, "MultienvError", "RemoteTraceback"}
    assert set(errors.__all__) == shown


@pytest.mark.parametrize("name", ALSO)
def test_gymnasiums_and_pythons_users_can_catch_them(name):
    assert issubclass(getattr(errors, name), ALSO[name])


def test_everything_but_the_remote_text_is_a_multienv_error():
    assert [kind for kind in PUBLIC if not issubclass(kind, MultienvError)] == [RemoteTraceback]


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


@pytest.mark.parametrize("kind", [CallPendingError, NothingPendingError])
def test_gymnasiums_name_of_the_call_is_kept(kind):
    error = kind("say what", "step")
    assert error.name == "step"
    assert str(error) == "say what"
    assert pickle.loads(pickle.dumps(error)).name == "step"


def test_attributes_survive_pickling():
    error = WorkerDiedError("gone")
    error.env_index, error.exit_code, error.stack = 3, -9, "stack"
    again = pickle.loads(pickle.dumps(error))
    assert (again.env_index, again.exit_code, again.stack) == (3, -9, "stack")


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


class Final(Exception):
    def __init_subclass__(cls) -> None:
        raise TypeError("final")


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
    WorkerDiedError("gone"),
    Exception("x"),
]
NOT_COMBINED = [WithMetaclass("x"), WithNew(1, 2), ReadOnly("x"), Gate("x")]
# To subclass it runs its own code, so the object itself must come from elsewhere.
BASE_EXCEPTIONS = [KeyboardInterrupt(), SystemExit(3), GeneratorExit()]


@pytest.mark.parametrize("cause", COMBINED, ids=lambda cause: type(cause).__name__)
def test_an_error_is_catchable_as_its_cause(cause):
    error = catchable_as(EnvRaisedError, cause, "the message")
    with pytest.raises(type(cause)):
        raise error
    assert isinstance(error, EnvRaisedError)
    assert "the message" in str(error)
    assert error.args == ("the message",)
    assert "the message" in "".join(traceback.format_exception(error))
    assert repr(error)


@pytest.mark.parametrize("cause", [*NOT_COMBINED, *BASE_EXCEPTIONS], ids=lambda cause: type(cause).__name__)
def test_where_types_do_not_combine_there_is_still_an_error(cause):
    error = catchable_as(EnvRaisedError, cause, "the message")
    assert isinstance(error, EnvRaisedError)
    assert str(error) == "the message"


def test_a_class_that_wants_no_children_is_left_alone():
    assert type(catchable_as(EnvRaisedError, Final("x"), "the message")) is EnvRaisedError


def test_exceptions_that_end_a_process_are_not_disguised():
    for cause in BASE_EXCEPTIONS:
        assert type(catchable_as(EnvRaisedError, cause, "x")) is EnvRaisedError


def test_attributes_of_the_cause_are_there():
    error = catchable_as(EnvRaisedError, TwoArgumentError(7, "detail"), "x")
    assert (error.code, error.detail) == (7, "detail")


def test_the_constructor_of_the_cause_is_never_called():
    calls = []

    class Counted(Exception):
        def __init__(self, *args):
            calls.append(args)

    cause = Counted(1)
    calls.clear()
    assert isinstance(catchable_as(EnvRaisedError, cause, "x"), Counted)
    assert calls == []


@pytest.mark.parametrize("cause", COMBINED, ids=lambda cause: type(cause).__name__)
def test_a_combined_error_pickles_as_its_base_with_what_it_knew(cause):
    error = catchable_as(EnvRaisedError, cause, "the message")
    error.env_index, error.command, error.step, error.remote_traceback = 3, "step", 7, "remote"
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, EnvRaisedError)
    assert str(again) == "the message"
    assert (again.env_index, again.command, again.step, again.remote_traceback) == (3, "step", 7, "remote")


@pytest.mark.parametrize("cause", [*COMBINED, WithMetaclass("x")], ids=lambda cause: type(cause).__name__)
def test_exceptions_are_rebuilt_from_their_parts(cause):
    again = rebuilt((type(cause), cause.args, dict(vars(cause))))
    assert type(again) is type(cause)
    assert again.args == cause.args
    assert vars(again) == vars(cause)
    assert isinstance(str(again), str)


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


@pytest.mark.parametrize("kind", [ActionError, WorkerHungError])
def test_several_causes_of_one_type_are_catchable_by_it(kind):
    error = EnvsFailedError.collect("step()", {0: kind("a"), 2: kind("b")}, [None, 1, None])
    assert isinstance(error, kind)
    assert isinstance(error, EnvsFailedError)


def test_a_nested_cause_keeps_its_type():
    inner = catchable_as(EnvRaisedError, FaultError("x"), "inner")
    error = EnvsFailedError.collect("step()", {0: inner}, [None])
    assert isinstance(error, EnvsFailedError)
    assert isinstance(error, EnvRaisedError)
    assert isinstance(error, FaultError)


@pytest.mark.parametrize("failures", [{0: FaultError("x")}, {0: FaultError("x"), 1: KeyError("y")}], ids=["one", "two"])
def test_failures_and_results_survive_pickling(failures):
    error = EnvsFailedError.collect("step()", failures, [None, None, (1, 2.0)])
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, EnvsFailedError)
    assert str(again) == str(error)
    assert list(again.failures) == list(failures)
    assert again.results == [None, None, (1, 2.0)]
