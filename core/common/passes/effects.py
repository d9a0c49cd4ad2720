"""Side effects of graph nodes: which tensors they write, and whether an unused node may be removed.

Dynamo graphs hide writes: to `fx`, `cache.index_copy_(…)` and `x.add_(1)` are pure. A call that is not known to be
harmless counts as having an effect. Ops write what their schemas say, and also what fakes declare
(`FakeOp.also_writes`); in that case a result may be the written argument itself.
"""

from __future__ import annotations

import builtins
import inspect
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

_COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "symm_mem"})
_EFFECTS_OF_BUILTINS = frozenset({"print", "setattr", "delattr", "exec", "eval", "input", "next", "open"})
_EFFECTS_OF_METHODS = frozenset({"backward", "register_hook", "retain_grad", "record_stream", "set_", "resize_"})


class _Undeclared:
    """Names of written arguments by the text of the op's schema: a library loaded again has other op objects of one
    name.

    It is an object so that its content is no part of a pass's identity: it describes ops in this process, not a pass.
    """

    def __init__(self) -> None:
        self.names: dict[str, frozenset[str]] = {}


_UNDECLARED = _Undeclared()


def declare_writes(op: OpOverload[..., Any], names: Iterable[str]) -> None:
    """Declare, for this process, that an op writes these arguments although its schema calls them read-only."""
    denied = _UNDECLARED.names.get(str(op._schema), frozenset())
    if denied >= frozenset(names):
        return
    _UNDECLARED.names[str(op._schema)] = denied.union(names)
    _written_positions.cache_clear()
    denies_writes.cache_clear()
    for target in (op, op.overloadpacket):  # fx's own removal of dead code goes by schemas too
        fx.node.has_side_effect(target)


@lru_cache(maxsize=4096)
def denies_writes(target: Any) -> bool:
    """Tell whether a call writes arguments that its schema calls read-only; its results may then be these arguments."""
    return isinstance(target, (OpOverload, OpOverloadPacket)) and any(
        str(schema) in _UNDECLARED.names for schema in _schemas(target)
    )


_KEEPING = {
    **dict.fromkeys(("embedding", "embedding_bag"), ("max_norm", ("weight",))),
    "batch_norm": ("training", ("running_mean", "running_var")),
    "instance_norm": ("use_input_stats", ("running_mean", "running_var")),
}
"""By name of a functional layer: the argument by which it writes, and those that it writes into then."""


def written_args(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the arguments that the node writes into; all of them where the callable is unknown."""
    return tuple(dict.fromkeys(_written(node))) if node.op.startswith("call_") else ()


def _written(node: fx.Node) -> Iterator[fx.Node]:
    target = node.target
    if not isinstance(target, HigherOrderOperator):  # whose keywords may be those of the op it wraps
        yield from _nodes(node.kwargs.get("out"))
    if node.op == "call_method":
        if _in_place(str(target)):
            yield from _nodes(node.args[:1])
    elif isinstance(target, (OpOverload, OpOverloadPacket)):
        yield from _written_by_schema(target, node.args, node.kwargs)
    elif isinstance(target, HigherOrderOperator):
        if "mutation" in target.name():
            yield from node.all_input_nodes
    elif node.op == "call_module" or not _is_torch(target):
        yield from node.all_input_nodes
    elif _in_place(target_name(target)) or _asked_in_place(node):
        yield from _nodes(node.args[:1] or node.kwargs.get("input"))
    else:
        yield from _kept(node)


def _kept(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what torch's functional layers write on the way: embeddings that are bounded, running statistics."""
    flag, names = _KEEPING.get(target_name(node.target), ("", ()))
    if names and inspect.isfunction(node.target):
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        given.apply_defaults()
        if given.arguments[flag]:
            yield from _nodes([given.arguments[name] for name in names])


def written_by(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[fx.Node, ...]:
    """Return the arguments that a call of an op would write into; none where the callable has no schema."""
    if not isinstance(target, (OpOverload, OpOverloadPacket)):
        return ()
    return tuple(_written_by_schema(target, args, kwargs))


def _written_by_schema(
    target: OpOverload[..., Any] | OpOverloadPacket[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[fx.Node]:
    for written in _written_positions(target):
        for position, name in written:
            yield from _nodes(kwargs.get(name, args[position] if position < len(args) else None))


@lru_cache(maxsize=4096)
def _written_positions(target: Any) -> tuple[tuple[tuple[int, str], ...], ...]:
    return tuple(
        tuple(
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in denied
        )
        for schema in _schemas(target)
        for denied in (_UNDECLARED.names.get(str(schema), ()),)
    )


def _schemas(target: Any) -> list[Any]:
    if isinstance(target, OpOverload):
        return [target._schema]
    # Which overload a packet will choose depends on the values: each of them counts.
    return [getattr(target, name)._schema for name in target.overloads()]


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _nodes(item)


def _in_place(name: str) -> bool:
    if name.startswith("__"):
        # `__iadd__` is the in-place form of `__add__`, but `__invert__` and `__index__` only look like such forms.
        return name in ("__setitem__", "__delitem__") or (name.startswith("__i") and hasattr(operator, "__" + name[3:]))
    return name.endswith("_")


def target_name(target: Any) -> str:
    """Name a function so that operators read as the methods they call: `operator.iadd` is `__iadd__`."""
    name = str(getattr(target, "__name__", ""))
    return f"__{name.strip('_')}__" if getattr(target, "__module__", None) == "_operator" else name


def _asked_in_place(node: fx.Node) -> bool:
    if node.kwargs.get("inplace") is True:
        return True
    if not any(argument is True for argument in node.args) or not inspect.isfunction(node.target):
        return False
    parameters = list(inspect.signature(node.target).parameters)
    return any(name == "inplace" and value is True for name, value in zip(parameters, node.args, strict=False))


@lru_cache(maxsize=4096)
def _is_torch(target: Any) -> bool:
    """Tell whether a callable is torch's own or Python's, so that its name says what it does."""
    if getattr(target, "__objclass__", None) in (Tensor, torch._C.TensorBase):
        return True
    package = str(getattr(target, "__module__", None) or "").partition(".")[0]
    return package in ("torch", "_operator", "math", "builtins")


def is_impure(node: fx.Node) -> bool:
    """Tell whether removing an unused node could change what the graph does."""
    if node.op in ("placeholder", "output", "call_module"):
        return True
    if node.op == "get_attr":
        return False
    if node.op == "call_method":
        return not _pure_method(str(node.target)) or "out" in node.kwargs
    return _impure_function(node) or bool(written_args(node)) or node.is_impure()


@lru_cache(maxsize=4096)
def _pure_method(name: str) -> bool:
    known = hasattr(Tensor, name) or hasattr(torch.SymInt, name)
    return known and not _in_place(name) and name not in _EFFECTS_OF_METHODS and not _is_random(name)


def _impure_function(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    if name.endswith("dropout") and (node.kwargs.get("training") is False or node.kwargs.get("p") == 0):
        return False
    if "scaled_dot_product" in name and not node.kwargs.get("dropout_p") and len(node.args) < 5:
        return bool(written_args(node))
    return not _pure_function(node.target)


@lru_cache(maxsize=4096)
def _pure_function(target: Any) -> bool:
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return all(_pure_schema(target, schema) for schema in _schemas(target))
    if isinstance(target, HigherOrderOperator) or not _is_torch(target):
        return False
    name, module = target_name(target), getattr(target, "__module__", None)
    if module == "builtins":
        return getattr(builtins, name, None) is target and name not in _EFFECTS_OF_BUILTINS
    if module in ("_operator", "math"):
        return hasattr(math, name) or not _in_place(name)
    # torch also has functions that switch modes, seed or log; a function that aten has an op for only computes.
    return (
        bool(torch._C._jit_get_schemas_for_operator(f"aten::{name}")) and not _in_place(name) and not _is_random(name)
    )


def _pure_schema(target: Any, schema: Any) -> bool:
    namespace = schema.name.partition("::")[0]
    overload = isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
    return not schema.is_mutable and bool(schema.returns) and namespace not in _COLLECTIVES and not overload


@lru_cache(maxsize=4096)
def _is_random(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None) if not name.startswith("__") else None
    if packet is None:
        return False
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, each).tags for each in packet.overloads())
