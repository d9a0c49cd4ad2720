"""Flattening: weights that are tensor subclasses become plain tensors in a traced graph; the model stays as it is.

Quantised weights come as classes of their own: torchao's tensors, an engine's parameters with loaders and scales, a
vendor's. Dynamo traces them as they are, so they are constants of the graph. Here each is split into its inner tensors,
and the graph's calls on it are replaced by the calls that its class makes on these: passes, lowerings and captured
graphs then see plain tensors that lie in the model's own memory. Nothing in the model is replaced, not even while it is
traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from core.common.node_meta import TRACED, origin_of, set_value, value_of
from core.compilation.trace.subclasses import (
    PLAIN,
    as_plain,
    class_name,
    comes_in_parts,
    dispatches,
    rule_of,
    unknown_class,
)
from core.compilation.trace.traced import ConstantSlot, Slot
from core.errors import TraceError, UsageError


def register_flattening(
    kind: type[Tensor],
    *,
    inner: Sequence[str],
    rebuild: Callable[[Mapping[str, Tensor], Any], Tensor],
    context: Callable[[Any], Any] = lambda tensor: None,
) -> None:
    """Register how to split a tensor class that does not define this itself; once per process, before any trace.

    inner: names of the attributes that hold its tensors, plain or of a class that can be flattened. context: whatever
    else `rebuild` needs (a dtype, a block size), comparable by `==`. rebuild: makes a tensor of the class from tensors
    by these names and the context. The class gets torch's own protocol for this (`__tensor_flatten__`), which
    torch.compile needs as well. Raises `UsageError` where the class has it already, or handles no operation itself.
    """
    asked = f"a rule to flatten {class_name(kind)}"
    if "__tensor_flatten__" in dir(kind):
        raise UsageError(asked, found="the class brings __tensor_flatten__", remedy="leave the rule out")
    if not dispatches(kind):
        raise UsageError(
            asked,
            found="it has no __torch_dispatch__, so operations see its data as a plain tensor does",
            remedy="leave the rule out: it is traced as a plain tensor",
        )
    if not inner:
        raise UsageError(asked, found="it names no inner tensor", remedy="name the attributes that hold its tensors")

    def flatten(self: Any) -> tuple[list[str], Any]:
        return list(inner), context(self)

    def unflatten(tensors: dict[str, Tensor], made_with: Any, size: Any, stride: Any) -> Tensor:
        return rebuild(tensors, made_with)

    setattr(kind, "__tensor_flatten__", flatten)  # noqa: B010  # mypy knows no such attribute of a tensor
    setattr(kind, "__tensor_unflatten__", staticmethod(unflatten))  # noqa: B010


def flatten_constants(module: fx.GraphModule, slots: Sequence[Slot], names: Mapping[int, str]) -> tuple[Slot, ...]:
    """Rewrite a Dynamo graph, in place, so that no constant of it is a tensor subclass; return its slots after that.

    slots: the values of the placeholders, in order. names: of the model's tensors by identity, for errors. Inner
    tensors and plain views share the memory of what they are taken from. Raises `TraceError` for a class without a
    rule, and where such a tensor is an output of the graph.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    bound = dict(zip(placeholders, slots, strict=True))
    wrapped: dict[fx.Node, Any] = {}
    for node, slot in list(bound.items()):
        if not isinstance(slot, ConstantSlot) or not isinstance(slot.value, Tensor):
            continue
        rule = rule_of(slot.value)
        if rule == "unknown":
            raise unknown_class(names.get(id(slot.value), node.name), slot.value)
        if rule == "view":
            bound[node] = ConstantSlot(as_plain(slot.value))
            node.type = Tensor
            set_value(node, as_plain(value_of(node)))
        elif rule == "parts":
            wrapped[node] = _take_apart(module.graph, node, value_of(node), slot.value, node.name, bound)
    if wrapped:
        _Desugared(module, wrapped).run()
        for node in [each for each in bound if each in wrapped]:
            del bound[node]
    return tuple(bound[node] for node in module.graph.find_nodes(op="placeholder"))


@dataclass(frozen=True, slots=True)
class _Parts:
    """A split tensor of a class. like: a fake tensor of the class; parts: by attribute, nodes of the graph or nested
    parts."""

    like: Tensor
    parts: Mapping[str, Any]
    context: Any

    def rebuild(self, known: Mapping[fx.Node, Any]) -> Tensor:
        """Return a tensor of the class from the values of its nodes."""
        inner = {
            name: part.rebuild(known) if isinstance(part, _Parts) else known[part] for name, part in self.parts.items()
        }
        kind: Any = type(self.like)
        made: Tensor = kind.__tensor_unflatten__(inner, self.context, self.like.shape, self.like.stride())
        return made

    def nodes(self) -> Iterator[fx.Node]:
        for part in self.parts.values():
            if isinstance(part, _Parts):
                yield from part.nodes()
            else:
                yield part


def _take_apart(graph: fx.Graph, node: fx.Node, fake: Any, real: Any, name: str, bound: dict[fx.Node, Slot]) -> _Parts:
    """Give each inner tensor of a constant a placeholder; one that already has a placeholder keeps it."""
    attributes, context = fake.__tensor_flatten__()
    parts: dict[str, Any] = {}
    for attribute in attributes:
        inner, inner_fake = getattr(real, attribute), getattr(fake, attribute)
        if comes_in_parts(inner):
            parts[attribute] = _take_apart(graph, node, inner_fake, inner, f"{name}_{attribute}", bound)
            continue
        if rule_of(inner) == "unknown":
            raise unknown_class(f"{name}.{attribute}", inner)
        plain = inner if type(inner) in PLAIN else as_plain(inner)
        known = (each for each, slot in bound.items() if isinstance(slot, ConstantSlot) and slot.value is plain)
        place = next(known, None)
        if place is None:
            with graph.inserting_before(node):
                place = graph.placeholder(f"{name}_{attribute}")
            place.target = place.name
            place.meta[TRACED] = inner_fake if type(inner) in PLAIN else as_plain(inner_fake)
            bound[place] = ConstantSlot(plain)
        parts[attribute] = place
    return _Parts(fake, parts, context)


class _Desugared:
    """Replaces a graph's calls on tensors of a class by the calls that the class makes on their parts.

    wrapped: the values that hold such a tensor, by node, as trees of nodes and `_Parts`. Nodes that take none of these
    stay as Dynamo wrote them, so that passes still match them.
    """

    def __init__(self, module: fx.GraphModule, wrapped: dict[fx.Node, Any]) -> None:
        self._module, self._graph, self.wrapped = module, module.graph, wrapped
        self._mode = detect_fake_mode([value_of(node) for node in module.graph.find_nodes(op="placeholder")])

    def run(self) -> None:
        for node in list(self._graph.nodes):
            taken = [source for source in node.all_input_nodes if source in self.wrapped]
            if not taken:
                continue
            if node.op == "output":
                raise TraceError(
                    "tracing a model that returns one of its weights, or what it made of it",
                    found=f"output {taken[0].name} is a {class_name(type(value_of(taken[0])))}",
                    remedy="return plain tensors",
                )
            self._inline(node)
        for node in reversed(list(self._graph.nodes)):
            if node in self.wrapped:
                self._graph.erase_node(node)
        self._graph.lint()
        self._module.recompile()

    def _inline(self, node: fx.Node) -> None:
        """Replace a call by the calls that the class makes of it."""
        sources = list(dict.fromkeys(leaf for source in node.all_input_nodes for leaf in self._leaves(source)))
        found: list[Any] = []

        def call(*values: Any) -> list[Any]:
            known = dict(zip(sources, values, strict=True))
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda each: self._value(each, known))
            target: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
            result = target(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)
            tree, leaves = _opened(result)
            found[:] = [tree]
            return leaves

        assert self._mode is not None
        with self._mode, torch.no_grad(), enable_python_dispatcher():
            traced = make_fx(call, tracing_mode="real")(*(value_of(source) for source in sources))
        leaves = self._copy(traced, node, sources)
        (tree,) = found
        value = _closed(tree, iter(leaves))
        if isinstance(value, fx.Node):
            node.replace_all_uses_with(value)
            self._graph.erase_node(node)
        else:
            self.wrapped[node] = value

    def _leaves(self, node: fx.Node) -> Iterator[fx.Node]:
        for part in pytree.tree_leaves(self.wrapped.get(node, node), is_leaf=_is_leaf):
            yield from part.nodes() if isinstance(part, _Parts) else (part,)

    def _value(self, node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
        def leaf(part: Any) -> Any:
            return part.rebuild(known) if isinstance(part, _Parts) else known[part]

        return pytree.tree_map(leaf, self.wrapped.get(node, node), is_leaf=_is_leaf)

    def _copy(self, traced: fx.GraphModule, node: fx.Node, sources: Sequence[fx.Node]) -> list[Any]:
        """Copy a traced graph before a node; return the nodes of its outputs."""
        known: dict[fx.Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), sources, strict=True))
        with self._graph.inserting_before(node):
            for each in traced.graph.nodes:
                if each.op in ("placeholder", "output"):
                    continue
                copied = known[each] = self._graph.node_copy(each, known.__getitem__)
                if each.op == "get_attr":  # a constant in the class's own code
                    copied.target = f"_flattened_{node.name}_{each.name}"
                    setattr(self._module, copied.target, getattr(traced, str(each.target)))
                copied.meta = {**origin_of(node), TRACED: value_of(each)}
        outputs: Any = traced.graph.output_node().args[0]
        return [known[output] if isinstance(output, fx.Node) else output for output in outputs]


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (_Parts, fx.Node))


def _opened(value: Any) -> tuple[Any, list[Any]]:
    """Return the structure of a result, and its leaves: plain values, and the parts of tensors."""
    leaves: list[Any] = []

    def place(each: Any) -> Any:
        if comes_in_parts(each):
            attributes, context = each.__tensor_flatten__()
            return _Parts(each, {name: place(getattr(each, name)) for name in attributes}, context)
        leaves.append(each)
        return _PLACE

    return pytree.tree_map(place, value), leaves


_PLACE = object()


def _closed(tree: Any, leaves: Iterator[Any]) -> Any:
    """Fill the leaves of a structure with nodes, in order."""

    def fill(each: Any) -> Any:
        if isinstance(each, _Parts):
            return _Parts(each.like, {name: fill(part) for name, part in each.parts.items()}, each.context)
        return next(leaves)

    return pytree.tree_map(fill, tree, is_leaf=lambda each: isinstance(each, _Parts))
