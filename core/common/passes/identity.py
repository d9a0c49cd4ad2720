"""The identity of a pass: a digest of all code that it runs and of every value that influences it."""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class _Part:
    """One function, class or object. holder: the object itself, kept alive so that its id is not reused. uses: the
    others that it reads."""

    holder: object
    digest: bytes
    uses: tuple[object, ...]


Known = dict[int, _Part]
"""What has been described, by id."""

_KNOWN: ContextVar[Known | None] = ContextVar("known", default=None)


@contextmanager
def describing_once(known: Known) -> Iterator[None]:
    """Let fingerprints in the block reuse the descriptions in `known` and add new ones.

    Passes share most of their helpers. Values that influence passes must not change while one `known` is in use.
    """
    token = _KNOWN.set(known)
    try:
        yield
    finally:
        _KNOWN.reset(token)


def fingerprint(*parts: object) -> str:
    """Return the sha256 of the parts: functions by bytecode, helpers of their package included; values by content.

    Bytecode, not source: comments and layout are no part of what runs, and reading sources takes ten times as long.
    """
    given = _KNOWN.get()
    known: Known = {} if given is None else given
    texts: list[str] = []
    waiting: list[object] = []
    _describe(parts, texts, waiting)
    digest = hashlib.sha256(f"torch {torch.__version__} python {sys.version_info[:2]}".encode())
    digest.update("\0".join(texts).encode())
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        part = known.get(id(value))
        if part is None:
            part = known[id(value)] = _part(value)
        digest.update(part.digest)
        waiting.extend(part.uses)
    return digest.hexdigest()


def _part(value: object) -> _Part:
    texts: list[str] = []
    uses: list[object] = []
    if isinstance(value, types.FunctionType):
        _describe_function(value, _package(value), texts, uses)
    elif isinstance(value, type):
        for function in _methods(value):
            texts.append(function.__qualname__)
            _describe_function(function, _package(value), texts, uses)
        _describe(_attributes(value), texts, uses)
    else:
        _describe_object(value, texts, uses)
    return _Part(value, hashlib.sha256("\0".join(texts).encode()).digest(), tuple(uses))


# The functions below append to `out` what they describe, and to `uses` what is to be described on its own.


def _describe(value: object, out: list[str], uses: list[object]) -> None:
    if value is None or isinstance(value, (str, int, float, bool, complex, bytes, torch.dtype, torch.device)):
        out.append(repr(value))
    elif isinstance(value, (types.FunctionType, type)):
        out.append(f"{value.__module__}.{value.__qualname__}")
        if _package(value) not in sys.stdlib_module_names and _package(value) != "torch":
            uses.append(value)
    elif isinstance(value, partial):
        _describe((value.func, value.args, value.keywords), out, uses)
    elif isinstance(value, types.MethodType):
        _describe((value.__func__, value.__self__), out, uses)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            _describe(key, out, uses)
            _describe(value[key], out, uses)
    elif isinstance(value, (set, frozenset)):
        _describe_set(value, out, uses)
    elif isinstance(value, (tuple, list)):
        out.append(f"[{len(value)}")
        for item in value:
            _describe(item, out, uses)
    elif isinstance(value, types.ModuleType):
        out.append(value.__name__)
    elif isinstance(value, types.BuiltinFunctionType):
        out.append(f"{value.__module__}.{value.__qualname__}")  # its text would hold an address
    elif isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        out.append(str(value))
    else:
        out.append(f"{type(value).__module__}.{type(value).__qualname__}")
        uses.append(value)


def _describe_set(value: Collection[object], out: list[str], uses: list[object]) -> None:
    # Sets are in hash order, which differs between processes.
    items: list[tuple[str, list[object]]] = []
    for item in value:
        texts, used = list[str](), list[object]()
        _describe(item, texts, used)
        items.append(("\0".join(texts), used))
    for text, used in sorted(items, key=itemgetter(0)):
        out.append(text)
        uses.extend(used)


def _describe_object(value: object, out: list[str], uses: list[object]) -> None:
    if is_dataclass(value):
        _describe(type(value), out, uses)
        for item in fields(value):
            _describe(getattr(value, item.name), out, uses)
    # Objects without a describable state (tensors, modules, torch's own) count by type.
    elif callable(value) and _package(type(value)) != "torch":
        _describe(type(value), out, uses)
        _describe(vars(value) if hasattr(value, "__dict__") else None, out, uses)


def _describe_function(function: types.FunctionType, package: str, out: list[str], uses: list[object]) -> None:
    text, names = bytecode(function.__code__)
    out.append(text)
    _describe((function.__defaults__, function.__kwdefaults__), out, uses)
    for cell in function.__closure__ or ():
        try:
            _describe(cell.cell_contents, out, uses)
        except ValueError:  # an empty cell: a name that gets its value later
            out.append("empty")
    for name in names:
        used = function.__globals__.get(name)
        if isinstance(used, (types.FunctionType, type)) and _package(used) != package:
            out.append(f"{used.__module__}.{used.__qualname__}")
        elif used is not None and not isinstance(used, types.ModuleType):
            _describe(used, out, uses)


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
