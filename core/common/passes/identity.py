"""The identity of a pass: a digest over the code of everything it runs, and over every value that steers it."""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from typing import Any

import torch


def fingerprint(*parts: object) -> str:
    """Return the sha256 of the parts: functions by bytecode, helpers of their package included; values by content.

    Bytecode, not source: comments and layout are no part of what runs, and reading sources takes ten times as long.
    """
    texts: list[str] = []
    _describe(parts, set(), texts)
    digest = hashlib.sha256(f"torch {torch.__version__} python {sys.version_info[:2]}".encode())
    digest.update("".join(f"{text}\0" for text in texts).encode())
    return digest.hexdigest()


# The functions below append to `out` what they describe: generators within generators would hand each text up through
# every level, and code that calls code goes deep.


def _describe(value: object, seen: set[int], out: list[str]) -> None:
    if value is None or isinstance(value, (str, int, float, bool, complex, bytes, torch.dtype, torch.device)):
        out.append(repr(value))
    elif isinstance(value, (types.FunctionType, types.MethodType, partial, type)):
        _describe_code(value, seen, out)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            _describe(key, seen, out)
            _describe(value[key], seen, out)
    elif isinstance(value, (set, frozenset)):
        # Sets are in hash order, which differs between processes.
        items: list[list[str]] = [[] for _ in value]
        for item, texts in zip(value, items, strict=True):
            _describe(item, seen, texts)
        out.extend(sorted("\0".join(texts) for texts in items))
    elif isinstance(value, (tuple, list)):
        out.append(f"[{len(value)}")
        for item in value:
            _describe(item, seen, out)
    elif id(value) not in seen:
        seen.add(id(value))
        _describe_object(value, seen, out)


def _describe_object(value: object, seen: set[int], out: list[str]) -> None:
    if isinstance(value, types.ModuleType):
        out.append(value.__name__)
    elif isinstance(value, types.BuiltinFunctionType):
        out.append(f"{value.__module__}.{value.__qualname__}")  # its text would hold an address
    elif isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        out.append(str(value))
    elif is_dataclass(value):
        _describe_code(type(value), seen, out)
        for item in fields(value):
            _describe(getattr(value, item.name), seen, out)
    else:
        # Objects without a describable state (tensors, modules, torch's own) count by type.
        out.append(f"{type(value).__module__}.{type(value).__qualname__}")
        if callable(value) and _package(type(value)) != "torch":
            _describe_code(type(value), seen, out)
            _describe(vars(value) if hasattr(value, "__dict__") else None, seen, out)


def _describe_code(value: Any, seen: set[int], out: list[str]) -> None:
    if isinstance(value, partial):
        _describe((value.func, value.args, value.keywords), seen, out)
    elif isinstance(value, types.MethodType):
        _describe((value.__func__, value.__self__), seen, out)
    elif id(value) not in seen:
        seen.add(id(value))
        out.append(f"{value.__module__}.{value.__qualname__}")
        if _package(value) in sys.stdlib_module_names or _package(value) == "torch":
            return
        functions = [value] if isinstance(value, types.FunctionType) else _methods(value)
        for function in functions:
            out.append(function.__qualname__)
            _describe_function(function, _package(value), seen, out)
        if isinstance(value, type):
            _describe(_attributes(value), seen, out)


def _describe_function(function: types.FunctionType, package: str, seen: set[int], out: list[str]) -> None:
    text, names = bytecode(function.__code__)
    out.append(text)
    _describe((function.__defaults__, function.__kwdefaults__), seen, out)
    for cell in function.__closure__ or ():
        try:
            _describe(cell.cell_contents, seen, out)
        except ValueError:  # an empty cell: a name that is bound later
            out.append("empty")
    for name in names:
        used = function.__globals__.get(name)
        if isinstance(used, (types.FunctionType, type)) and _package(used) != package:
            out.append(f"{used.__module__}.{used.__qualname__}")
        elif used is not None and not isinstance(used, types.ModuleType):
            _describe(used, seen, out)


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


@lru_cache(maxsize=8192)
def bytecode(code: types.CodeType) -> tuple[str, tuple[str, ...]]:
    """Describe a code object and those within it; return that and the names that they use, in order."""
    texts = [code.co_code.hex(), repr(code.co_names)]
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            text, used = bytecode(const)
            texts.append(text)
            names.update(used)
        else:
            texts.append(repr(sorted(const, key=repr)) if isinstance(const, frozenset) else repr(const))
    return "\0".join(texts), tuple(sorted(names))
