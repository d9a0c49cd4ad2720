"""The identity of a pass: a digest over the code of everything it runs, and over every value that steers it."""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from typing import Any

import torch

_CONSTANTS = (str, int, float, bool, complex, bytes, torch.dtype, torch.device)


def fingerprint(*parts: object) -> str:
    """Return the sha256 of the parts: functions by bytecode, helpers of their package included; values by content.

    Bytecode, not source: comments and layout are no part of what runs, and reading sources takes ten times as long.
    """
    return fingerprints([parts])[0]


def fingerprints(many: Iterable[tuple[object, ...]]) -> list[str]:
    """Return the fingerprint of each of many parts. What several of them reach, as passes do, is read once for all."""
    reader = _Reader()
    return [reader.digest(parts) for parts in many]


class _Node:
    """A function, class or object, described once. uses: the nodes that its description names, in order."""

    __slots__ = ("digest", "out", "uses", "value")

    def __init__(self, value: object) -> None:
        self.value = value  # held, so that nobody else gets its id
        self.digest = b""
        self.out: list[str] = []
        self.uses: list[_Node] = []

    def close(self) -> bytes:
        self.digest = hashlib.sha256("".join(f"{text}\0" for text in self.out).encode()).digest()
        self.out.clear()
        return self.digest


class _Reader:
    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}

    def digest(self, parts: tuple[object, ...]) -> str:
        """Return a digest of all nodes that the parts reach."""
        start = _Node(parts)
        self._describe(parts, start)
        start.close()
        found = hashlib.sha256(f"torch {torch.__version__} python {sys.version_info[:2]}".encode())
        seen: set[_Node] = set()
        ahead = [start]
        while ahead:
            node = ahead.pop()
            if node not in seen:
                seen.add(node)
                found.update(node.digest or self._read(node))
                ahead += reversed(node.uses)
        return found.hexdigest()

    def _name(self, value: object, into: _Node, label: str) -> None:
        """Write a label of what has a node of its own, and note that the node is used."""
        into.out.append(label)
        node = self._nodes.get(id(value))
        if node is None:
            node = self._nodes[id(value)] = _Node(value)
        into.uses.append(node)

    def _describe(self, value: object, into: _Node) -> None:
        out = into.out
        if value is None or isinstance(value, _CONSTANTS):
            out.append(repr(value))
        elif isinstance(value, (types.FunctionType, type)):
            self._name(value, into, f"{value.__module__}.{value.__qualname__}")
        elif isinstance(value, partial):
            self._describe((value.func, value.args, value.keywords), into)
        elif isinstance(value, types.MethodType):
            self._describe((value.__func__, value.__self__), into)
        elif isinstance(value, (tuple, list)):
            out.append(f"[{len(value)}")
            for item in value:
                self._describe(item, into)
        elif isinstance(value, Mapping):
            out.append(f"{{{len(value)}")
            for key in sorted(value, key=repr):
                self._describe(key, into)
                self._describe(value[key], into)
        elif isinstance(value, (set, frozenset)):
            self._describe_set(value, into)
        elif isinstance(value, types.ModuleType):
            out.append(value.__name__)
        elif isinstance(value, types.BuiltinFunctionType):
            out.append(f"{value.__module__}.{value.__qualname__}")  # its text would hold an address
        elif isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            out.append(str(value))
        else:
            self._name(value, into, f"{type(value).__module__}.{type(value).__qualname__}")

    def _describe_set(self, value: set[object] | frozenset[object], into: _Node) -> None:
        # Sets are in hash order, which differs between processes.
        items = [_Node(item) for item in value]
        for item in items:
            self._describe(item.value, item)
        into.out.append(f"{{{len(items)}")
        for item in sorted(items, key=lambda item: (item.out, [_shown(each.value) for each in item.uses])):
            into.out += item.out
            into.uses += item.uses

    def _read(self, node: _Node) -> bytes:
        value: Any = node.value
        if isinstance(value, types.FunctionType):
            self._read_code(value, [value], node)
        elif isinstance(value, type):
            self._read_code(value, _methods(value), node)
        elif is_dataclass(value):
            self._describe((type(value), [getattr(value, item.name) for item in fields(value)]), node)
        elif callable(value) and _package(type(value)) != "torch":
            self._describe((type(value), vars(value) if hasattr(value, "__dict__") else None), node)
        # Other objects have no state to describe (tensors, modules, torch's own): their type, which is told, counts.
        return node.close()

    def _read_code(self, owner: Any, functions: Iterable[types.FunctionType], node: _Node) -> None:
        package = _package(owner)
        if package in sys.stdlib_module_names or package == "torch":
            return
        for function in functions:
            node.out.append(function.__qualname__)
            self._read_function(function, package, node)
        if isinstance(owner, type):
            self._describe(_attributes(owner), node)

    def _read_function(self, function: types.FunctionType, package: str, node: _Node) -> None:
        text, names = bytecode(function.__code__)
        node.out.append(text)
        self._describe((function.__defaults__, function.__kwdefaults__), node)
        for cell in function.__closure__ or ():
            try:
                self._describe(cell.cell_contents, node)
            except ValueError:  # an empty cell: a name that is bound later
                node.out.append("empty")
        for name in names:
            used = function.__globals__.get(name)
            if isinstance(used, (types.FunctionType, type)) and _package(used) != package:
                node.out.append(f"{used.__module__}.{used.__qualname__}")
            elif used is not None and not isinstance(used, types.ModuleType):
                self._describe(used, node)


def _shown(value: object) -> str:
    """Return what tells apart two members of a set that go by the same name."""
    if isinstance(value, types.FunctionType):
        return bytecode(value.__code__)[0]
    state = [getattr(value, item.name) for item in fields(value)] if is_dataclass(value) else []
    return repr([each for each in state if isinstance(each, _CONSTANTS)])


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
