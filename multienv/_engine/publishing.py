"""What public things say of where they are from."""

import inspect
from typing import Any


def publish(module: str, *things: Any) -> None:
    """Have classes and functions say that they are from the module that users import them from.

    ``help()``, tracebacks and pickles show it then. What reads annotations of a class evaluates them in its module, so
    they are evaluated before.
    """
    for thing in things:
        if inspect.isclass(thing):
            thing.__annotations__ = inspect.get_annotations(thing, eval_str=True)
        thing.__module__ = module
