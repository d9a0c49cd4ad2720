"""Arguments and targets of graph nodes as JSON that reads back as the same objects or is refused."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from core.common.ops.declaration import declared_ops
from core.common.ops.implementation import OpImplementation
from core.compilation.cache.uncacheable import Uncacheable

_BUILTINS = frozenset(
    {"getattr", "max", "min", "int", "float", "bool", "len", "abs", "round", "sum", "slice", "pow", "divmod"}
)
_PLACES = (
    *("torch", "torch.nn.functional", "torch.Tensor", "torch._C._nn", "torch._C._linalg", "torch._C._special"),
    *("torch._C._fft", "torch.linalg", "torch.special", "torch.fft", "torch._C._VariableFunctions"),
    *("torch._C.TensorBase", "torch._C", "operator", "math"),
)
_CONSTANTS = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


def encode(value: Any) -> Any:
    """Return an argument of a node as JSON; nodes by name. Raises `Uncacheable` for what has no form here."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) is complex:
        return {"complex": [encode(value.real), encode(value.imag)]}
    kind = next((name for each, name in _CONSTANTS.items() if isinstance(value, each)), "")
    if kind:
        return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if value is Ellipsis:
        return {"ellipsis": True}
    return _encode_nested(value)


def _encode_nested(value: Any) -> Any:
    if isinstance(value, slice):
        return {"slice": [encode(value.start), encode(value.stop), encode(value.step)]}
    if isinstance(value, torch.Size):
        return {"torch.Size": [encode(item) for item in value]}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    raise Uncacheable(f"an argument is a {type(value).__module__}.{type(value).__qualname__}")


def decode(text: Any, nodes: Mapping[str, fx.Node]) -> Any:
    """Return the argument that `encode` wrote; nodes: the nodes made so far, by their stored names."""
    if isinstance(text, list):
        return [decode(item, nodes) for item in text]
    if not isinstance(text, dict):
        return text
    ((kind, value),) = text.items()
    make = _DECODERS.get(kind)
    if make is None:
        raise ValueError(f"no value of kind {kind!r}")
    return make(value, nodes)


_Nodes = Mapping[str, fx.Node]
_DECODERS: dict[str, Callable[[Any, _Nodes], Any]] = {
    "node": lambda value, nodes: nodes[value],
    "float": lambda value, _: float(value),
    "complex": lambda value, nodes: complex(*decode(value, nodes)),
    "dtype": lambda value, _: _constant(value, torch.dtype),
    "layout": lambda value, _: _constant(value, torch.layout),
    "memory_format": lambda value, _: _constant(value, torch.memory_format),
    "device": lambda value, _: torch.device(value),
    "ellipsis": lambda _value, _nodes: Ellipsis,
    "slice": lambda value, nodes: slice(*decode(value, nodes)),
    "torch.Size": lambda value, nodes: torch.Size(decode(value, nodes)),
    "tuple": lambda value, nodes: tuple(decode(value, nodes)),
    "dict": lambda value, nodes: {decode(key, nodes): decode(item, nodes) for key, item in value},
}


def _constant(name: str, kind: type) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, kind):
        raise ValueError(f"torch.{name} is no {kind.__name__}")
    return value


class Targets:
    """Names of what graphs call: ops, functions of torch and Python, and a device's implementations of ops."""

    def __init__(self, implementations: tuple[OpImplementation, ...], packages: frozenset[str]) -> None:
        """implementations: the device's; packages: those beside torch and core whose functions may be called."""
        self._implementations = {f"{each.op} {each.name}": each.fn for each in implementations}
        self._packages = packages | {"core", "torch", "_operator", "operator", "math"}
        self._names: dict[int, tuple[Any, str]] = {}

    def name(self, target: Any) -> str:
        """Return a name that resolves to exactly this object; raise `Uncacheable` if there is none."""
        known = self._names.get(id(target))
        if known is None:
            known = self._names[id(target)] = (target, self._name(target))
        return known[1]

    def _name(self, target: Any) -> str:
        for name in self._candidates(target):
            try:
                if self.find(name) is target:
                    return name
            except (AttributeError, KeyError, ImportError, ValueError, RuntimeError):
                continue
        raise Uncacheable(f"the graph calls {_described(target)}, which no name leads to")

    def _candidates(self, target: Any) -> list[str]:
        if isinstance(target, torch._ops.OpOverload):
            return [f"op {target._schema.name}.{target._overloadname}"]
        if isinstance(target, torch._ops.OpOverloadPacket):
            return [f"packet {target._qualified_op_name}"]
        if isinstance(target, torch._ops.HigherOrderOperator):
            raise Uncacheable(f"the graph calls the higher-order operator {target}")
        names = [f"implementation {name}" for name, fn in self._implementations.items() if fn is target]
        for op in declared_ops().values():
            names += [f"reference {op.qualified_name}"] if op.reference is target else []
            names += [f"eager {op.qualified_name}"] if op.eager is target else []
        short = str(getattr(target, "__name__", ""))
        own = f"{getattr(target, '__module__', None)}:{getattr(target, '__qualname__', short)}"
        return names + [f"function {place}" for place in (own, *(f"{place}:{short}" for place in _PLACES))]

    def find(self, name: str) -> Any:
        """Return the object of a name; raise `ValueError` if a graph may not call it, KeyError and the like if it is
        missing."""
        kind, _, rest = name.partition(" ")
        if kind == "op":
            packet, _, overload = rest.rpartition(".")
            return getattr(_packet(packet), overload)
        if kind == "packet":
            return _packet(rest)
        if kind == "implementation":
            return self._implementations[rest]
        if kind in ("reference", "eager"):
            return getattr(declared_ops()[rest], kind)
        if kind != "function":
            raise ValueError(f"no target of kind {kind!r}")
        place, _, path = rest.partition(":")
        if place == "builtins" and path not in _BUILTINS:
            raise ValueError(f"{path} may not be called")
        if place != "builtins" and place.partition(".")[0] not in self._packages:
            raise ValueError(f"{place} is none of the packages {sorted(self._packages)}")
        return _resolve(place, path)


def _packet(name: str) -> Any:
    namespace, _, op = name.partition("::")
    return getattr(getattr(torch.ops, namespace), op)


def _resolve(place: str, path: str) -> Any:
    names = path.split(".")
    try:
        found: Any = importlib.import_module(place)
    except ModuleNotFoundError:  # a class, as in torch.Tensor
        module, _, owner = place.rpartition(".")
        found, names = importlib.import_module(module), [owner, *names]
    for name in names:
        found = getattr(found, name)
    return found


def _described(target: Any) -> str:
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', type(target).__qualname__)}"
