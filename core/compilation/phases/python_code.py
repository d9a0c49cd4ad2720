"""The names that the code of functions and classes uses, for the search of Python state that a callable reaches."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any

from core.common.passes.identity import bytecode


def is_dunder(name: str) -> bool:
    """Tell whether Python calls a method of that name by itself."""
    return name.startswith("__") and name.endswith("__")


def package_of(value: Any) -> str:
    """Return the top package in which a function's code, or a class, was written; wrappers copy other names.

    Logging libraries count as part of the standard library: no result depends on them.
    """
    found = value.__globals__.get("__name__") if isinstance(value, types.FunctionType) else value.__module__
    module = str(found or "")
    return "logging" if module.endswith(".logging") else module.partition(".")[0]


def unwrapped(member: Any) -> list[types.FunctionType]:
    """Return the functions behind a member of a class: a method, a property, a class method."""
    if isinstance(member, types.FunctionType):
        return [member]
    if isinstance(member, (staticmethod, classmethod)):
        return unwrapped(member.__func__)
    if isinstance(member, property):
        return [each for each in (member.fget, member.fset) if isinstance(each, types.FunctionType)]
    if isinstance(member, cached_property):
        return unwrapped(member.func)
    return unwrapped(member.__wrapped__) if hasattr(member, "__wrapped__") else []


def names_of(function: types.FunctionType) -> tuple[str, ...]:
    """Return the names of globals and attributes that a function uses, and string constants that may be such names."""
    return _names_in(function.__code__)


@lru_cache(maxsize=16384)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    consts = (const for each in _nested(code) for const in each.co_consts)
    texts = (const for const in consts if isinstance(const, str))  # getattr(x, "name")
    # Names that are no identifiers don't come from source. Tools that rewrite code (pytest's assertions) insert them,
    # and the search would follow them into the tools' own state.
    return tuple(sorted(name for name in {*texts, *bytecode(code)[1]} if name.isidentifier()))


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const)
