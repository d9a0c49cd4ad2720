"""What expressions of read values look up besides attributes and items: facts, and calls that are made again."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from core.compilation.cache.literals import decode, encode
from core.compilation.cache.uncacheable import Uncacheable
from core.compilation.trace.model_tensors import content_digest

ABSENT = "(absent)"
"""The text of a missing value: an unset environment variable, a missing builtin, an expression that resolves to
nothing."""


class Fact(str):
    """A text that prints as it is."""

    __slots__ = ()


def module_of(name: str) -> Any:
    """Return a module by name, imported if it is not yet."""
    return sys.modules.get(name) or importlib.import_module(name)


def _own(value: Any, name: str) -> Fact:
    return Fact(name in getattr(value, "__dict__", ()))


def _environment(name: str) -> Fact:
    return Fact(repr(os.environ[name]) if name in os.environ else ABSENT)


def _builtin(module: str, name: str) -> Any:
    try:
        space = vars(module_of(module))
    except ImportError:
        raise Uncacheable(f"the model's code is of a module {module}, which can't be imported") from None
    if name in space:
        return Fact(f"a global of {module}")
    builtins = vars(sys.modules["builtins"])
    return builtins[name] if name in builtins else Fact(ABSENT)


def _call(name: str, arguments: str, answer: str = "") -> Any:
    """Call a function again. answer: what it has to return, or the value has no text; "" for anything."""
    module, _, path = name.partition(":")
    found = module_of(module)
    for part in path.split("."):
        found = getattr(found, part)
    args, kwargs = (decode(each, {}) for each in json.loads(arguments))
    if not answer:
        return found(*args, **kwargs)
    if isinstance(found, functools._lru_cache_wrapper):  # which a trace steps past, too
        found = found.__wrapped__
    try:
        now = found(*args, **kwargs)
        same = json.dumps(encode(now)) == answer
    except Exception as error:
        raise Uncacheable(f"the model reads what {name} returns, which raises {type(error).__name__} now") from error
    if not same:
        raise Uncacheable(f"the model reads what {name} returns: another value now than in the trace")
    return now


LOOKUPS: dict[str, Callable[..., Any]] = {
    "type": lambda value: type(value),
    "dict": lambda value: dict(value),
    "list": lambda value: list(value),
    "getattr": lambda value, name: getattr(value, name),
    "object.__getattribute__": object.__getattribute__,
    "list.__getitem__": list.__getitem__,
    "dict.__getitem__": dict.__getitem__,
    "dict.keys": dict.keys,
    "hasattr": lambda value, name: Fact(hasattr(value, name)),
    "own": _own,
    "environment": _environment,
    "builtin": _builtin,
    "call": _call,
    "content": lambda tensor: Fact(content_digest(tensor)),
}
"""By the name of the function in an expression."""
