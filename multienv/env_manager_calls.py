"""Attributes and methods of all the envs of a manager, and how a call to a manager begins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

from multienv.env_lane import Lane
from multienv.env_manager_loop import Loop
from multienv.errors import ClosedError, MultienvError, catchable_as
from multienv.subprocess_env import SubprocessEnv
from multienv.unique import Unique

_Call = TypeVar("_Call", bound=Callable[..., Any])


def surfacing(call: _Call) -> _Call:
    """For properties: an error that is an AttributeError too must not make Python ask ``__getattr__`` instead."""

    @wraps(call)
    def wrapper(self: EnvCalls) -> Any:
        try:
            return call(self)
        except AttributeError as error:
            self.__dict__["_surfaced"] = error
            raise

    return wrapper  # type: ignore[return-value]


class EnvCalls(Unique):
    """What a manager passes on to its envs."""

    def __init__(self) -> None:
        """Not launched."""
        self._loop: Loop | None = None
        self._methods: dict[str, bool] = {}

    @property
    def closed(self) -> bool:
        """Whether it is not launched."""
        return self._loop is None or self._loop.closed

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every env, side by side, once what is under way has come in; a list by id."""
        return self._all(f"call({name!r})", lambda env: env.call(name, *args, **kwargs))

    def get_attr(self, name: str) -> list[Any]:
        """An attribute of every env, in the same way."""
        return self._all(f"get_attr({name!r})", lambda env: env.get_attr(name))

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute of every env, in the same way."""
        self._all(f"set_attr({name!r})", lambda env: env.set_attr(name, value))

    def render(self) -> list[Any]:
        """What every env renders, in the same way."""
        return self._all("render()", lambda env: env.render())

    def __getattr__(self, name: str) -> Any:
        """An attribute of the envs, as a list by id; of a method, a function that calls it on all of them."""
        if hasattr(type(self), name):  # one of ours, that has raised an error which is an AttributeError too
            raise self.__dict__.pop("_surfaced", None) or AttributeError(name)
        if name[0] == name[-1] == "_" or "_loop" not in self.__dict__:
            raise AttributeError(name)  # Python's and IPython's own questions; or a copy that is not filled yet
        if self.closed:
            error = AttributeError(name)
            raise catchable_as(ClosedError, error, f"{name}: the envs are not running. Call launch() first.")
        if name not in self._methods:
            if not self._ask_first("has_wrapper_attr", name):
                raise AttributeError(f"Neither {type(self).__name__} nor its envs have an attribute {name!r}.")
            try:  # not the method itself, which would come with a copy of the env
                self._methods[name] = bool(self._ask_first("call", f"{name}.__call__.__class__.__name__"))
            except AttributeError:
                self._methods[name] = False
        return partial(self.call, name) if self._methods[name] else self.get_attr(name)

    # --- helpers --------------------------------------------------------------------------------

    @property
    def _lanes(self) -> list[Lane]:
        if self._loop is None:
            raise ClosedError("The envs are not running. Call launch() first.")
        return self._loop.lanes

    def _entered(self, what: str) -> Loop:
        if self._loop is None:
            raise ClosedError(f"{what}: the envs are not running. Call launch() first.")
        self._loop.enter(what)
        return self._loop

    def _each(self, what: str, calls: dict[int, Callable[[], Any]]) -> dict[int, Any]:
        loop = self._entered(what)
        try:
            results = loop.each(what, calls)
        except MultienvError:
            loop.leave()
            raise
        loop.leave()
        return results

    def _all(self, what: str, ask: Callable[[SubprocessEnv], Any]) -> list[Any]:
        return list(self._each(what, {lane.index: partial(ask, lane.env) for lane in self._lanes}).values())

    def _ask_first(self, method: str, name: str) -> Any:
        env = self._lanes[0].env
        return self._each(f"{method}({name!r})", {0: partial(getattr(env, method), name)})[0]
