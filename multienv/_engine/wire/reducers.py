"""Pickle by value what scripts have, beyond what cloudpickle can: C libraries, caches, slots, typed dicts.

Each reducer is a function from a value to what ``__reduce__`` returns. They are to be offered to cloudpickle's authors.
"""

from __future__ import annotations

import ctypes
import io
import operator
import struct
import sys
import typing
import weakref
from collections import ChainMap
from collections.abc import Callable
from enum import Enum
from functools import cached_property, lru_cache, partial, reduce
from inspect import signature
from pickle import PicklingError
from types import CodeType, MemberDescriptorType, MethodType
from typing import Any, ClassVar, TypedDict

import cloudpickle

LruCache = type(lru_cache(abs))
_Reduced = tuple[Any, ...]
_FunctionPointer, _FunctionType = ctypes.CFUNCTYPE(None).__mro__[1], type(ctypes.CFUNCTYPE(None))
_Pointer, _Array = type(ctypes.POINTER(ctypes.c_int)), type(ctypes.c_int * 1)
_Records = type(ctypes.Structure), type(ctypes.Union)
# ctypes does not export the types of its types: each is found as that of one of them.
_KINDS = {type(one): one for one in (ctypes.c_int, ctypes.Structure, ctypes.Union, _FunctionPointer)}
# Attributes that a class makes of its slots and fields.
_MADE = MemberDescriptorType, type(vars(type("_", (ctypes.Structure,), {"_fields_": [("x", ctypes.c_int)]}))["x"])
# Each must be set before _fields_, which can be set once: from then on the size is known.
_LAYOUT = ("_pack_", "_align_", "_layout_", "_anonymous_", "_fields_")


def _has_a_name(value: Any) -> bool:
    """Tell whether an importable module has this under its own name: then it need not travel by value."""
    module = sys.modules.get(value.__module__)
    if value.__module__ in ("__main__", "__mp_main__") or module is None:
        return False
    try:
        return reduce(getattr, value.__qualname__.split("."), module) is value
    except AttributeError:
        return False


def _code(code: CodeType) -> _Reduced:
    """Reduce a code object as cloudpickle does, but keep the name of its file.

    From 3.1.3 on cloudpickle writes "<dynamic-code>" there, so that equal functions give equal bytes. A traceback out
    of the worker would then not show the lines of the user's env.
    """
    build, arguments = cloudpickle.CloudPickler.dispatch_table[CodeType](code)
    return build, tuple(code.co_filename if one == "<dynamic-code>" else one for one in arguments)


# --- functools, struct, weakref -----------------------------------------------------------------


def _cached_property(value: cached_property[Any]) -> _Reduced:
    return cached_property, (value.func,), {name: one for name, one in vars(value).items() if name != "lock"}


def _lru_cache(value: Any) -> Any:
    if _has_a_name(value):
        return value.__qualname__
    return _cached, (value.__wrapped__, value.cache_parameters())


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return lru_cache(**parameters)(function)


def _new_type(value: Any) -> Any:
    return value.__qualname__ if _has_a_name(value) else (typing.NewType, (value.__name__, value.__supertype__))


def _reference(value: weakref.ref[Any]) -> _Reduced:
    return weakref.ref, (value(),) if value() is not None else (set(),)


# --- classes ------------------------------------------------------------------------------------


def _typed_dict(name: str) -> Any:
    return TypedDict(name, {})  # type: ignore[operator]


class PickledCall:
    """Pickles as a call of a function: it is unpickled to the return value."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._parts = function, arguments

    def __reduce__(self) -> _Reduced:
        return self._parts


def _lay_out(record: Any, layout: dict[str, Any]) -> None:
    for name, value in layout.items():
        setattr(record, name, value)


def _set_rest(record: Any, state: tuple[None, Callable[..., Any], Any]) -> None:
    state[1](record, state[2])


def _by_value(value: Any, reduced: _Reduced) -> _Reduced:
    """Correct what cloudpickle makes of a class: builder, arguments, (attributes, …), None, None, what sets them."""
    build, arguments, (attributes, *others), *_, finish = reduced
    hook = super(value, value).__init_subclass__
    parameters = signature(hook).parameters.values() if isinstance(hook, MethodType) else ()
    if any(one.kind is one.KEYWORD_ONLY and one.default is one.empty for one in parameters):
        raise PicklingError(f"class {value.__qualname__} was made with arguments that nobody keeps")
    if value.__bases__ == (dict,) and type(value).__name__ == "_TypedDictMeta":
        return _typed_dict, (value.__name__,), *reduced[2:]
    if "__slots__" in attributes and not issubclass(value, tuple):  # a NamedTuple's cannot be given
        arguments[3]["__slots__"] = value.__slots__  # else its instances have a __dict__ there, and none here
    layout = {name: attributes.pop(name) for name in _LAYOUT if name in attributes and isinstance(value, _Records)}
    state: _Reduced = ({name: one for name, one in attributes.items() if not isinstance(one, _MADE)}, *others)
    if layout:  # set before anything is unpickled that needs its size
        state, finish = (PickledCall(_lay_out, value, layout), finish, state), _set_rest
    return build, arguments, state, None, None, finish


# --- ctypes -------------------------------------------------------------------------------------


def _ctypes_class(value: Any) -> _Reduced | None:
    """Reduce a class that ctypes has made of others; ``None``: it was not."""
    kind = type(value)
    if value in _KINDS:
        return type, (_KINDS[value],)
    native = vars(ctypes).get(value.__qualname__)
    if getattr(native, "__ctype_be__", None) is value:  # in the other order of bytes
        return getattr, (native, "__ctype_be__")
    if kind is _Pointer and ctypes.POINTER(value._type_) is value:
        return ctypes.POINTER, (value._type_,)
    if kind is _Array and value._type_ * value._length_ is value:
        return operator.mul, (value._type_, value._length_)
    if kind is _FunctionType and value.__qualname__.startswith("CFUNCTYPE."):
        return partial(ctypes.CFUNCTYPE, use_errno=_uses_errno(value)), (value._restype_, *value._argtypes_)
    return None


def _uses_errno(functions: Any) -> bool:
    return bool(functions._flags_ & 8)  # FUNCFLAG_USE_ERRNO


def _library(value: Any) -> _Reduced:
    """Open the library again by its path, in the same working directory, or by its name; its mode is not known."""
    own = ("_name", "_handle", "_FuncPtr")
    used = {name: one for name, one in vars(value).items() if name not in own}
    kind: Callable[..., Any] = type(value)
    return partial(kind, use_errno=_uses_errno(value._FuncPtr)), (value._name,), used


def _function(pointer: Any) -> Any:
    """Look a function of a library up again, and declare it; of other pointers nobody can tell what they point to."""
    library = (pointer._objects or {}).get("0")
    if not isinstance(library, ctypes.CDLL) or type(pointer) is not library._FuncPtr:
        return NotImplemented
    prototype = pointer.restype, pointer.argtypes, pointer.errcheck
    return operator.getitem, (library, vars(pointer)["__name__"]), prototype, None, None, _declare


def _declare(function: Any, prototype: tuple[Any, Any, Any]) -> None:
    function.restype, function.argtypes, errcheck = prototype
    if errcheck is not None:
        function.errcheck = errcheck


class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickles as cloudpickle does, and more."""

    dispatch_table: ClassVar = ChainMap(
        {
            CodeType: _code,
            cached_property: _cached_property,
            LruCache: _lru_cache,
            struct.Struct: lambda value: (struct.Struct, (value.format,)),
            typing.NewType: _new_type,
            weakref.ref: _reference,
            weakref.WeakKeyDictionary: lambda value: (weakref.WeakKeyDictionary, (dict(value),)),
            weakref.WeakValueDictionary: lambda value: (weakref.WeakValueDictionary, (dict(value),)),
            ctypes.CDLL: _library,
            ctypes.PyDLL: _library,
        },
        cloudpickle.CloudPickler.dispatch_table,
    )

    def reducer_override(self, value: Any) -> Any:
        """Reduce classes that ctypes has made, functions of C libraries, and classes with slots or a fixed layout."""
        if isinstance(value, _FunctionPointer):
            return _function(value)
        if not isinstance(value, type):
            return super().reducer_override(value)
        found = None if _has_a_name(value) else _ctypes_class(value)
        reduced = found or super().reducer_override(value)
        is_by_value = found is None and isinstance(reduced, tuple) and len(reduced) == 6
        return _by_value(value, reduced) if is_by_value and not issubclass(value, Enum) else reduced


def pickled(value: object) -> bytes:
    """Pickle ``value`` for a process of this machine. Raises whatever pickling raises: it runs code of the user."""
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
