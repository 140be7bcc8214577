"""Pickle what runs in a worker: functions travel by value, with the names of their files."""

from __future__ import annotations

import io
import pickle
from collections import ChainMap
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, ClassVar

import cloudpickle

from multienv.worker.main_module import is_of_main, offered, registered_in_main

_reduce_code = cloudpickle.CloudPickler.dispatch_table[CodeType]


def _with_its_file(code: CodeType) -> tuple[Any, ...]:
    """Reduce a code object as cloudpickle does, but keep the name of its file.

    From 3.1.3 on cloudpickle writes "<dynamic-code>" there, so that equal functions give equal bytes. A traceback out
    of the worker would then not show the lines of the user's env.
    """
    build, arguments = _reduce_code(code)
    return build, tuple(code.co_filename if one == "<dynamic-code>" else one for one in arguments)


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    dispatch_table: ClassVar = ChainMap({CodeType: _with_its_file}, cloudpickle.CloudPickler.dispatch_table)


class _EnvFnPickler(_Pickler):
    """Notes which functions and classes of the main script it pickles: they travel by value.

    Attributes:
        of_main: These, by name.
    """

    def __init__(self, file: io.BytesIO, buffer_callback: Callable[[pickle.PickleBuffer], bool]) -> None:
        super().__init__(file, buffer_callback=buffer_callback)
        self.of_main: dict[str, Any] = {}

    def reducer_override(self, value: Any) -> Any:
        """Reduce a value as cloudpickle does."""
        if isinstance(value, type | FunctionType) and is_of_main(value):
            self.of_main[value.__name__] = value
        return super().reducer_override(value)


class _Offer:
    """Is unpickled as ``env_fns``; puts what it notes of the main script into ``__main__`` there.

    Args:
        env_fns: What travels.
        registered: Entry points of registered envs, by name; they travel too.
        of_main: Filled while these two are pickled.
    """

    def __init__(self, env_fns: tuple[Any, ...], registered: dict[str, Any], of_main: dict[str, Any]) -> None:
        self._parts = env_fns, registered, of_main

    def __reduce__(self) -> tuple[Any, ...]:
        return offered, self._parts


def pickled_env_fns(env_fns: tuple[Any, ...], least: int | None = None) -> tuple[bytes, list[memoryview]]:
    """Pickle the functions that build envs, with what they need of the main script; raises whatever pickling raises.

    Unpickled, it is the tuple; ``__main__`` then has the functions and classes of the main script that travelled with
    it, and entry points of registered envs if they can be pickled.

    Args:
        env_fns: The functions.
        least: Bytes from which on a buffer, that of a numpy array, is left out; ``None``: none is.

    Returns:
        The pickle, and the buffers that ``pickle.loads`` is to be given with it: memory of what was pickled itself.
    """
    registered = registered_in_main()
    try:
        return _offer(env_fns, registered, least)
    except Exception:  # code of the user
        if not registered:
            raise
    return _offer(env_fns, {}, least)


def _offer(env_fns: tuple[Any, ...], registered: dict[str, Any], least: int | None) -> tuple[bytes, list[memoryview]]:
    file, buffers = io.BytesIO(), list[memoryview]()

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        with memoryview(buffer) as view:
            if least is None or view.nbytes < least or not view.contiguous:
                return True
        buffers.append(buffer.raw())
        return False

    pickler = _EnvFnPickler(file, stays_inside)
    pickler.dump(_Offer(env_fns, registered, pickler.of_main))
    return file.getvalue(), buffers


def pickled(value: object) -> bytes:
    """Pickle ``value`` for a process of this machine. Raises whatever pickling raises: it runs code of the user."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()
