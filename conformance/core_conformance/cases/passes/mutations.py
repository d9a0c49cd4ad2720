"""Near-misses made from matches: the graph in which a pass matched, changed in one place at a site.

No mutation knows what the pass looks for. Each gives a graph that runs, and whose numbers the pass must keep whether it
matches there or not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from core.common.node_meta import ATEN, TRACED, value_key, value_of
from core.common.passes import view
from core.common.passes.effects import written_args
from core.common.passes.sites import MADE_BY
from core.compilation.rewrite.snapshot import Snapshot
from core.compilation.trace.traced import ConstantSlot
from core_conformance.cases.passes.claims import touched
from core_conformance.cases.passes.runs import Change

aten = torch.ops.aten
_ARITHMETIC = frozenset({"add", "sub", "mul", "div"})
_FUNCTIONS: tuple[tuple[Any, Any], ...] = (
    (torch.tanh, torch.sigmoid),
    ("tanh", "sigmoid"),
    (aten.tanh.default, aten.sigmoid.default),
    (F.silu, F.relu),
    (aten.silu.default, aten.relu.default),
    (torch.sin, torch.cos),
    ("sin", "cos"),
    (aten.sin.default, aten.cos.default),
    (torch.rsqrt, torch.reciprocal),
    ("rsqrt", "reciprocal"),
    (aten.rsqrt.default, aten.reciprocal.default),
)
"""Replacements of a node's function: same arguments, same shape and dtype of the result."""
_INSTEAD = {first: second for pair in _FUNCTIONS for first, second in (pair, pair[::-1])}
Edit = tuple[str, Callable[[], object]]
"""A description of a change, and the function that makes it."""
Mutation = Callable[[fx.GraphModule, list[fx.Node], Change], Iterator[Edit]]
"""Yields the changes that it could make to a graph, whose nodes are those of sites; only one of them is made."""


def near_misses(change: Change) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yield what was changed, in words, and the graph before the pass with that change, one after another."""
    gone, _ = touched(change.before, change.after)
    for mutation, most in _MUTATIONS:
        for index in range(most):
            module = Snapshot(change.before).module()
            nodes = [node for node in module.graph.nodes if node.name in gone and node.op.startswith("call_")]
            edit = next(islice(mutation(module, nodes, change), index, None), None)
            if edit is None:
                break
            what, make = edit
            make()
            module.graph.lint()
            module.recompile()
            yield what, module


def _other_numbers(module: fx.GraphModule, nodes: list[fx.Node], change: Change) -> Iterator[Edit]:
    """Change one number of one node."""
    factor = 1.01 if change.dtype == torch.float32 else 1.25
    for node in nodes:
        for position in range(_count_numbers(node)):
            yield f"a number of {node} is another", partial(_replace_number, node, position, factor)


def _count_numbers(node: fx.Node) -> int:
    return sum(_is_free(node, leaf) for leaf in pytree.tree_leaves((node.args, dict(node.kwargs))))


def _is_free(node: fx.Node, leaf: Any) -> bool:
    """Tell whether a leaf is a number that steers a value, not a shape, a position, a chance or a marker."""
    if isinstance(leaf, bool) or not isinstance(leaf, (int, float)) or not 0 < abs(leaf) < 1e6:
        return False
    value = value_of(node)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return view.kind(node) in _ARITHMETIC or (isinstance(leaf, float) and view.kind(node) not in ("dropout", "pow"))


def _replace_number(node: fx.Node, position: int, factor: float) -> None:
    seen = itertools.count()

    def other(leaf: Any) -> Any:
        if not _is_free(node, leaf) or next(seen) != position:
            return leaf
        # A small number (an eps) is added to something: a change of one per cent could not be seen.
        return leaf * factor if abs(leaf) >= 0.01 else math.copysign(0.01, leaf)

    node.args, node.kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), other)


def _second_users(module: fx.GraphModule, nodes: list[fx.Node], change: Change) -> Iterator[Edit]:
    """Let the graph return one interior value too."""
    output = module.graph.output_node()
    old: Any = output.args[0]
    for node in nodes:
        if isinstance(value_of(node), Tensor) and node not in old:
            yield f"{node} is returned besides", partial(setattr, output, "args", ((*old, node),))


def _writes(module: fx.GraphModule, nodes: list[fx.Node], change: Change) -> Iterator[Edit]:
    """Write into what a site reads, between its first node and its last."""
    for node in nodes[:-1]:
        for source in node.all_input_nodes:
            read_again = source not in nodes or len(source.users) > 1
            if read_again and _writable(source, change):
                yield f"{source} is written after {node} has read it", partial(_scale_in_place, module, source, node)


def _bystanders(module: fx.GraphModule, nodes: list[fx.Node], change: Change) -> Iterator[Edit]:
    """Write into an input once all is computed; nothing reads what the write returns."""
    last = module.graph.output_node().prev
    for source in module.graph.find_nodes(op="placeholder"):
        if _writable(source, change):
            yield f"{source} is written at the end", partial(_scale_in_place, module, source, last)


def _casts(module: fx.GraphModule, nodes: list[fx.Node], change: Change) -> Iterator[Edit]:
    """Round one interior value to bfloat16 on its way to one user that reads it.

    A user that writes into the value would write into the rounded copy, and others would read what memory was.
    """
    for node in nodes:
        value, user = value_of(node), next(iter(node.users), None)
        if user is None or user.op == "output" or node in written_args(user):
            continue
        if isinstance(value, Tensor) and value.dtype == torch.float32:
            yield f"{node} is rounded to bfloat16 before {user}", partial(_round, module, node, user)


def _round(module: fx.GraphModule, node: fx.Node, user: fx.Node) -> None:
    value = value_of(node)
    narrow = _new(module, "to", (node, torch.bfloat16), value.to(torch.bfloat16), after=node)
    wide = _new(module, "to", (narrow, torch.float32), torch.empty_like(value), after=narrow)
    user.replace_input_with(node, wide)


def _functions(module: fx.GraphModule, nodes: list[fx.Node], change: Change) -> Iterator[Edit]:
    """Replace the function of one node by another one of the same arguments."""
    for node in nodes:
        other = _INSTEAD.get(node.target)
        if other is not None:
            yield f"{node} computes {getattr(other, '__name__', other)}", partial(setattr, node, "target", other)


def _writable(source: fx.Node, change: Change) -> bool:
    """Tell whether a value could be scaled in place by a model: it is no weight, and has memory for each element."""
    value = value_of(source)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    if source.op == "placeholder" and source.name in _fixed(change):
        return False
    return all(stride > 0 for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1)


def _fixed(change: Change) -> set[str]:
    slots = zip(change.before.graph.find_nodes(op="placeholder"), change.graph.traced.slots, strict=False)
    free = {node.name for node, slot in slots if not isinstance(slot, ConstantSlot)}
    return {node.name for node in change.before.graph.find_nodes(op="placeholder")} - free


def _scale_in_place(module: fx.GraphModule, source: fx.Node, after: fx.Node) -> None:
    _new(module, "mul_", (source, 1.5), value_of(source), after=after)


def _new(module: fx.GraphModule, method: str, args: tuple[Any, ...], value: Any, *, after: fx.Node) -> fx.Node:
    """Insert a method call, or its ATen op in a graph of these."""
    key = value_key(args[0])
    with module.graph.inserting_after(after):
        if key == TRACED:
            node = module.graph.call_method(method, args)
        elif method == "to":
            node = module.graph.call_function(aten._to_copy.default, args[:1], {"dtype": args[1]})
        else:
            node = module.graph.call_function(aten.mul_.Tensor, args)
    kept = {name: item for name, item in after.meta.items() if name not in (MADE_BY, TRACED, ATEN)}
    node.meta = {**kept, key: value}
    return node


_MUTATIONS: Sequence[tuple[Mutation, int]] = (
    (_other_numbers, 4),
    (_second_users, 2),
    (_writes, 2),
    (_bystanders, 1),
    (_casts, 1),
    (_functions, 2),
)
"""Each mutation, and how many graphs of it are made."""
