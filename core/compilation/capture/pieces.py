"""Piecewise graphs: an FX graph cut at break points, every piece lowered by itself, equal pieces once.

The result is one callable in which break points are marked; capturing it in parts makes a graph of each piece.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import _get_qualified_name
from torch.fx.passes.split_module import split_module

from core.common.graphs.weak import overlaps
from core.common.lowering import FlatCallable, LoweringRequest
from core.common.node_meta import value_of
from core.compilation.capture.breaks import call_break
from core.compilation.implementations import BREAK_POINT

__all__ = ["PieceLowering", "lower_pieces", "mark_breaks", "op_names"]


def mark_breaks(graph: fx.GraphModule, names: Iterable[str]) -> int:
    """Mark the nodes that call something of one of these names (see `op_names`); return how many nodes are marked."""
    wanted = frozenset(names)
    for node in graph.graph.nodes:
        name = next((name for name in _spellings(node) if name in wanted), None)
        if name is not None and BREAK_POINT not in node.meta:
            node.meta[BREAK_POINT] = _spellings(node)[0]
    return sum(BREAK_POINT in node.meta for node in graph.graph.nodes)


def op_names(graph: fx.GraphModule) -> dict[str, str]:
    """Return the names of everything that a graph calls and could be cut at, each with its shortest spelling.

    An op is "ns::op" or "ns::op.overload"; a function or method of torch is called what fx writes in generated code, or
    where it is public, such as "torch.tanh", "torch.nn.functional.gelu" or "torch.Tensor.tanh".
    """
    spelled = [_spellings(node) for node in graph.graph.nodes]
    return {name: names[0] for names in spelled for name in names}


def _spellings(node: fx.Node) -> tuple[str, ...]:
    """Return the names of the op that a node calls, the shortest first; () if it calls no op of torch."""
    target: Any = node.target
    if node.op == "call_method":
        return (f"torch.Tensor.{target}",)
    if node.op != "call_function":
        return ()
    if isinstance(target, torch._ops.OpOverload):
        name = str(target._schema.name)
        return name, f"{name}.{target._overloadname}"
    name = str(getattr(target, "_qualified_op_name", ""))
    if name:
        return (name,)
    try:
        name = _get_qualified_name(target)
    except (AttributeError, RuntimeError):  # a callable object, or a function without a module
        return ()
    if not name.startswith("torch."):
        return ()
    short = target.__name__
    if getattr(nn.functional, short, None) is target:  # fx names the defining module, which may be torch._C._nn
        return tuple(dict.fromkeys((f"torch.nn.functional.{short}", name)))
    return (name,)


class PieceLowering:
    """Lowers the pieces of one program; keeps what it lowered, so that layers of the same code share it."""

    def __init__(self, lowering: Callable[[LoweringRequest], FlatCallable]) -> None:
        self._lowering = lowering
        self._known: dict[str, FlatCallable] = {}

    @property
    def num_lowered(self) -> int:
        """How many distinct pieces were lowered."""
        return len(self._known)

    def lower(self, graph: fx.GraphModule, examples: tuple[Any, ...]) -> FlatCallable:
        """Return a callable for the piece, whose graph returns a tuple; the same one for equal code and examples."""
        signature = _signature(graph, examples)
        if signature not in self._known:
            self._known[signature] = self._lowering(LoweringRequest(graph=graph, example_inputs=examples))
        return self._known[signature]


def lower_pieces(graph: fx.GraphModule, values: tuple[Any, ...], pieces: PieceLowering) -> FlatCallable:
    """Cut `graph`, which is consumed, at its marked nodes, and lower the pieces between; return one callable.

    values: of its placeholders; the graph runs once on them, so that each piece is lowered for its real inputs.
    """
    split = _split(graph)
    runner = _Lowerer(split, pieces)
    with torch.no_grad():
        runner.run(*values)
    for node in list(split.graph.nodes):
        if node.op == "call_module":
            node.op, node.target = "call_function", runner.callables[node.target]
    split.recompile()
    return split.forward


def _split(graph: fx.GraphModule) -> fx.GraphModule:
    """Split into submodules in the order of execution: one per marked node, and one for the nodes between two.

    A node with several results keeps its `getitem` nodes in its piece, so that only tensors and sizes cross pieces.
    """
    # Move each `getitem` directly behind the node whose results it picks.
    for node in filter(_picks, list(graph.graph.nodes)):
        node.args[0].append(node)
    partition, after_break = 0, False
    numbers: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if _picks(node):
            numbers[node] = numbers[node.args[0]]
            continue
        if BREAK_POINT in node.meta or after_break:
            partition += 1
        after_break = BREAK_POINT in node.meta
        numbers[node] = partition
    names = {numbers[n]: n.meta[BREAK_POINT] for n in numbers if BREAK_POINT in n.meta}
    split = split_module(graph, graph, lambda node: numbers[node], keep_original_order=True)
    for number, name in names.items():
        getattr(split, f"submod_{number}").meta[BREAK_POINT] = name
    return split


def _picks(node: fx.Node) -> bool:
    """Return whether a node picks one of several results; `x[0]` of a tensor, which may be written before, does not."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    source, index = node.args
    if not isinstance(source, fx.Node) or source.op == "placeholder" or not isinstance(index, int):
        return False
    if isinstance(source.target, torch._ops.OpOverload):
        returns = source.target._schema.returns
        return len(returns) > 1 or (len(returns) == 1 and isinstance(returns[0].type, torch.ListType))
    return isinstance(value_of(source), (tuple, list))


class _Lowerer(fx.Interpreter):
    """Runs the split graph once and lowers each piece when its inputs are known."""

    def __init__(self, split: fx.GraphModule, pieces: PieceLowering) -> None:
        super().__init__(split)
        self._pieces = pieces
        self.callables: dict[str, Callable[..., Any]] = {}

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        piece: Any = self.fetch_attr(target)
        name = piece.meta.get(BREAK_POINT)
        if name is not None:
            call = _eager_piece(name, piece.forward)
        else:
            single = _return_tuple(piece)
            call = _graph_piece(self._pieces.lower(piece, args), single=single)
        self.callables[target] = call
        return call(*args)


def _eager_piece(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    def piece(*args: Any) -> Any:
        return call_break(name, forward, args, {})

    piece.__name__ = name.rsplit("::")[-1]
    return piece


def _graph_piece(lowered: FlatCallable, *, single: bool) -> Callable[..., Any]:
    # Plain functions, since fx can write calls of functions but not of bound methods.
    def first(*args: Any) -> Any:
        return lowered(*args)[0]

    def piece(*args: Any) -> Any:
        return lowered(*args)

    return first if single else piece


def _return_tuple(piece: fx.GraphModule) -> bool:
    """Make the piece return a tuple, as lowerings expect; return whether it returned a single value."""
    output = piece.graph.output_node()
    (returned,) = output.args
    single = not isinstance(returned, (tuple, list))
    output.args = ((returned,) if single else tuple(returned),)  # type: ignore[arg-type]
    piece.recompile()
    return single


def _signature(graph: fx.GraphModule, examples: tuple[Any, ...]) -> str:
    """Return text that is equal for graphs that do the same with inputs that look the same."""
    numbers = {node: f"%{index}" for index, node in enumerate(graph.graph.nodes)}
    lines = []
    for node in graph.graph.nodes:
        target = "" if node.op in ("placeholder", "output") else f"{node.target!r}"
        arguments = fx.map_arg((node.args, dict(node.kwargs)), lambda each: _Name(numbers[each]))
        lines.append(f"{node.op} {target} {arguments}")
    lines += [_describe(example) for example in examples]
    # Inputs that share memory: a write to one shows in the other, so the order of reads and writes matters.
    lines += [f"%{one} {distance} %{other}" for one, other, distance in overlaps(examples)]
    return "\n".join(lines)


class _Name(str):
    """Prints a node's number in place of its name."""

    __slots__ = ()
    __repr__ = str.__str__


def _describe(example: Any) -> str:
    if isinstance(example, Tensor):
        return f"{example.dtype} {tuple(example.shape)} {example.stride()} {example.data_ptr() % 16}"
    return repr(example)
