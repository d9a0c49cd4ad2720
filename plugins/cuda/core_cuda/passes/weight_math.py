"""Compute at once what each layer of a model computes of a weight of its own alone, number by number.

Layers of Mamba hold the logarithms of their rates, and every step begins with `-exp(A_log.float())`: three launches of
a few hundred bytes in each layer, of which no input is part. Computed ahead they would be right only until weights are
loaded anew. So the weights of all layers are laid end to end in each step, and one launch does for all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from core.common.passes import LIFTS, Guards, NearMiss, Pass, PassContext, PassTraits, Site, near_miss, value_of, view
from core_cuda.passes.examples.recurrent import rated_layers

_POINTWISE = frozenset(
    {"cast", "exp", "log", "neg", "sigmoid", "softplus", "tanh", "relu", "square", "sqrt", "rsqrt", "reciprocal"}
    | {"add", "sub", "mul", "div", "pow", "clamp", "clamp_min", "clamp_max"}
)
_FEWEST_STEPS = 2  # laying weights end to end is a launch of its own
_MOST_NUMBERS = 2**17
"""Of a weight: of longer ones a launch takes longer than it takes to begin."""
_ALIGNMENT = 16  # bytes; kernels are compiled for tensors that begin at a multiple of it
_WEIGHT = "the weight"


@dataclass(frozen=True, slots=True)
class _Step:
    """One op of a number of the weight. args: `_WEIGHT` in place of what the step before gives."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class _Chain:
    """What is computed of a weight, up to `end`, which others read."""

    end: fx.Node
    weight: fx.Node
    nodes: tuple[fx.Node, ...]
    steps: tuple[_Step, ...]

    @property
    def value(self) -> Tensor:
        found: Tensor = value_of(self.weight)
        return found

    @property
    def kind(self) -> tuple[Any, ...]:
        """What chains that can be computed together have in common."""
        return self.value.dtype, self.value.device, self.steps


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return all chains of this one's kind, of which it is the first; a near-miss where they can't lie end to end."""
    chain = None if node in context.taken else _chain(context, node)
    if chain is None:
        return None
    alike = [each for each in _chains(context) if each.kind == chain.kind]
    context.taken.update(each.end for each in alike)
    reasons = {each: reason for each in alike if (reason := _why_not(each))}
    fitting = [each for each in alike if each not in reasons]
    if len({each.weight for each in fitting}) < 2:
        first = next(iter(reasons), None)
        return None if first is None or len(alike) < 2 else near_miss(first.end, reasons[first])
    return Site(
        anchor=fitting[0].end,
        target=_joined(fitting),
        args=tuple(each.weight for each in fitting),
        interior=tuple(dict.fromkeys(inner for each in fitting for inner in each.nodes)),
        outputs=tuple(each.end for each in fitting),
    )


def _why_not(chain: _Chain) -> str:
    """Return why a weight can't lie end to end with others, or ""."""
    weight, end = chain.value, value_of(chain.end)
    if not weight.is_contiguous():
        return f"the numbers of {chain.weight} are not in one run"
    if weight.numel() > _MOST_NUMBERS:
        return f"{chain.weight} has {weight.numel()} numbers, and up to {_MOST_NUMBERS} are worth it"
    if (end.numel() * end.itemsize) % _ALIGNMENT:
        return f"{chain.end} has {end.numel() * end.itemsize} bytes, and what lies behind it would begin unaligned"
    return ""


def _chains(context: PassContext) -> Iterator[_Chain]:
    yield from (chain for node in context.graph.nodes if (chain := _chain(context, node)) is not None)


def _chain(context: PassContext, node: fx.Node) -> _Chain | None:
    """Return the chain that ends at a node, with steps enough; None where others go on with it, or it has an input."""
    if _source(node) is None or all(_source(user) is node for user in node.users):
        return None
    nodes, steps, source = [node], [_step(node)], _source(node)
    while source is not None and source.op != "placeholder":
        nodes.append(source)
        steps.append(_step(source))
        source = _source(source)
    if source is None or len(steps) < _FEWEST_STEPS:
        return None
    assert context.constants is not None  # the guard has seen to it
    if context.constants.value(source) is None or context.analysis("writes").writers(source):
        return None
    return _Chain(node, source, tuple(nodes), tuple(reversed(steps)))


def _source(node: fx.Node) -> fx.Node | None:
    """Return the one tensor, with numbers, of which a node computes number by number; None for any other node."""
    if view.kind(node) not in _POINTWISE or len(node.all_input_nodes) != 1:
        return None
    source = node.all_input_nodes[0]
    if source not in node.args:  # among other names, or inside of a list
        return None
    value, made = value_of(source), value_of(node)
    if not isinstance(value, Tensor) or not isinstance(made, Tensor) or not value.dim() or made.shape != value.shape:
        return None
    return source if all(type(size) is int for size in value.shape) else None


def _step(node: fx.Node) -> _Step:
    args = tuple(_WEIGHT if isinstance(each, fx.Node) else each for each in node.args)
    return _Step(node.op, node.target, args, tuple(sorted(node.kwargs.items())))


def _joined(chains: list[_Chain]) -> fx.GraphModule:
    """Return the graph that lays the weights end to end, computes, and takes the results apart."""
    graph = fx.Graph()
    weights = [graph.placeholder(f"weight_{index}") for index in range(len(chains))]
    flat = [graph.call_method("reshape", (weight, -1)) for weight in weights]
    whole = graph.call_function(torch.cat, (flat,))
    for step in chains[0].steps:
        args = tuple(whole if each is _WEIGHT else each for each in step.args)
        whole = graph.create_node(step.op, step.target, args, dict(step.kwargs))
    shapes = [tuple(each.value.shape) for each in chains]
    parts = graph.call_function(torch.split, (whole, [prod(shape) for shape in shapes]))
    made = (graph.call_function(operator.getitem, (parts, index)) for index in range(len(chains)))
    graph.output(tuple(graph.call_method("view", (each, *shape)) for each, shape in zip(made, shapes, strict=True)))
    return fx.GraphModule(torch.nn.Module(), graph)


JOIN_WEIGHT_MATH = Pass(
    name="join_weight_math",
    does="Compute at once what several layers compute of weights of their own alone.",
    find=find,
    owner="core_cuda",
    after=("remove_no_ops", "eliminate_common_subexpressions", "fuse_delta_gates", *LIFTS),
    guards=Guards(constants=True),
    examples=rated_layers,
    traits=PassTraits(reads_content=False),
)
