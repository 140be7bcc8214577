"""Pickle what runs in a worker: functions travel by value, with the names of their files."""

from __future__ import annotations

import io
import pickle
from collections import ChainMap
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

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


def pickled(value: object) -> bytes:
    """Pickle ``value`` for a process of this machine. Raises whatever pickling raises: it runs foreign code."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def pickled_apart(value: object, least: int) -> tuple[bytes, list[memoryview]]:
    """Pickle ``value`` as :func:`pickled` does, but for its large buffers: those of numpy arrays.

    Args:
        value: What to pickle.
        least: Bytes from which on a buffer is left out.

    Returns:
        The pickle, and the buffers that ``pickle.loads`` is to be given with it: memory of ``value`` itself.
    """
    file, buffers = io.BytesIO(), list[memoryview]()

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        with memoryview(buffer) as view:
            if view.nbytes < least or not view.contiguous:
                return True
        buffers.append(buffer.raw())
        return False

    _Pickler(file, buffer_callback=stays_inside).dump(value)
    return file.getvalue(), buffers
