"""The identity of a pass: a digest over the code of everything it runs, and over every value that steers it."""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch


def fingerprint(*parts: object) -> str:
    """Return the sha256 of the parts: functions by bytecode, helpers of their package included; values by content.

    Bytecode, not source: comments and layout are no part of what runs, and reading sources takes ten times as long.
    """
    digest = hashlib.sha256(f"torch {torch.__version__} python {sys.version_info[:2]}".encode())
    for text in _describe(parts, set()):
        digest.update(text.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _describe(value: object, seen: set[int]) -> Iterator[str]:
    if value is None or isinstance(value, (str, int, float, bool, complex, bytes, torch.dtype, torch.device)):
        yield repr(value)
    elif isinstance(value, (types.FunctionType, types.MethodType, partial, type)):
        yield from _describe_code(value, seen)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield from _describe(key, seen)
            yield from _describe(value[key], seen)
    elif isinstance(value, (set, frozenset)):
        # Sets are in hash order, which differs between processes.
        yield from sorted("\0".join(_describe(item, seen)) for item in value)
    elif isinstance(value, (tuple, list)):
        yield f"[{len(value)}"
        for item in value:
            yield from _describe(item, seen)
    elif id(value) not in seen:
        seen.add(id(value))
        yield from _describe_object(value, seen)


def _describe_object(value: object, seen: set[int]) -> Iterator[str]:
    if isinstance(value, types.ModuleType):
        yield value.__name__
    elif isinstance(value, types.BuiltinFunctionType):
        yield f"{value.__module__}.{value.__qualname__}"  # its text would hold an address
    elif isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        yield str(value)
    elif is_dataclass(value):
        yield from _describe_code(type(value), seen)
        for item in fields(value):
            yield from _describe(getattr(value, item.name), seen)
    else:
        # Objects without a describable state (tensors, modules, torch's own) count by type.
        yield f"{type(value).__module__}.{type(value).__qualname__}"
        if callable(value) and _package(type(value)) != "torch":
            yield from _describe_code(type(value), seen)
            yield from _describe(vars(value) if hasattr(value, "__dict__") else None, seen)


def _describe_code(value: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(value, partial):
        yield from _describe((value.func, value.args, value.keywords), seen)
    elif isinstance(value, types.MethodType):
        yield from _describe((value.__func__, value.__self__), seen)
    elif id(value) not in seen:
        seen.add(id(value))
        yield f"{value.__module__}.{value.__qualname__}"
        if _package(value) in sys.stdlib_module_names or _package(value) == "torch":
            return
        functions = [value] if isinstance(value, types.FunctionType) else _methods(value)
        for function in functions:
            yield function.__qualname__
            yield from _describe_function(function, _package(value), seen)
        if isinstance(value, type):
            yield from _describe(_attributes(value), seen)


def _describe_function(function: types.FunctionType, package: str, seen: set[int]) -> Iterator[str]:
    yield from _bytecode(function.__code__)
    yield from _describe((function.__defaults__, function.__kwdefaults__), seen)
    for cell in function.__closure__ or ():
        try:
            yield from _describe(cell.cell_contents, seen)
        except ValueError:  # an empty cell: a name that is bound later
            yield "empty"
    for name in sorted(_names(function.__code__)):
        used = function.__globals__.get(name)
        if isinstance(used, (types.FunctionType, type)) and _package(used) != package:
            yield f"{used.__module__}.{used.__qualname__}"
        elif used is not None and not isinstance(used, types.ModuleType):
            yield from _describe(used, seen)


def _attributes(owner: type) -> Mapping[str, object]:
    """Return what a class holds besides methods: constants, and the bases whose methods it inherits."""
    kinds = (str, int, float, bool, bytes, tuple, frozenset, Mapping, torch.dtype)
    found = {name: value for name, value in vars(owner).items() if isinstance(value, kinds)}
    plain: dict[str, object] = {name: value for name, value in found.items() if not name.startswith("__")}
    return plain | {"bases": tuple(base for base in owner.__bases__ if base is not object)}


def _methods(owner: type) -> list[types.FunctionType]:
    found = [getattr(member, "__func__", getattr(member, "fget", member)) for member in vars(owner).values()]
    return [member for member in found if isinstance(member, types.FunctionType)]


def _package(value: Any) -> str:
    return str(value.__module__ or "").partition(".")[0]


def _names(code: types.CodeType) -> set[str]:
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*(_names(const) for const in inner))


def _bytecode(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _bytecode(const)
        else:
            yield repr(sorted(const, key=repr)) if isinstance(const, frozenset) else repr(const)
