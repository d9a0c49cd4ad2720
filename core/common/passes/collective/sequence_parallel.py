"""Split each all-reduce in front of a norm: a reduce-scatter, the norm of a part of the tokens, and an all-gather.

Sequence parallelism after Korthikanti et al., arXiv 2205.05198. Between two such norms each process needs only its part
of the residual stream, so the stream stays split: each norm reads the part that the norm before it returned. A whole
tensor that comes in (after the embedding) is cut locally, which sends nothing. A sum that some node reads whole, such
as a norm that could not be split, is gathered. As many bytes are sent as before, in two collectives; norms run on one
part of the tokens, and `async_tensor_parallel` may hide both collectives behind the products next to them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from core.common.ops.canonical import (
    ADD_RMS_NORM,
    ADD_RMS_NORM_QUANTIZE,
    ALL_GATHER,
    ALL_REDUCE,
    LOCAL_SHARD,
    REDUCE_SCATTER,
    RMS_NORM,
    RMS_NORM_QUANTIZE,
)
from core.common.passes import (
    Guards,
    NearMiss,
    Pass,
    PassContext,
    PassResult,
    PassTraits,
    Site,
    apply_sites,
    calls,
    expression,
    find_op,
    near_miss,
    value_of,
    view,
)
from core.common.passes.collective.limits import call_of, divided_dim, refused_bytes, refused_group

_NORMS = (RMS_NORM, ADD_RMS_NORM, RMS_NORM_QUANTIZE, ADD_RMS_NORM_QUANTIZE)
_WITH_SUM = (ADD_RMS_NORM, ADD_RMS_NORM_QUANTIZE)


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return an all-reduce and the norm of its sum."""
    reduced = call_of(node, ALL_REDUCE)
    if reduced is None:
        return None
    group = str(reduced["group"])
    norm = view.only_user(node)
    if norm is None:
        return near_miss(node, f"{node} is read by {', '.join(user.name for user in node.users) or 'nothing'}")
    given = _read(norm, node)
    if given is None:
        return near_miss(node, f"{norm}, which alone reads {node}, is no norm of it")
    reason = refused_group(context, group) or refused_bytes(context, group, node) or _refusal(norm, given)
    if reason:
        return near_miss(node, reason)
    dim = divided_dim(context, group, node)
    if isinstance(dim, str):
        return near_miss(node, dim)
    outputs = calls.outputs(norm)
    read = tuple(filter(None, outputs))
    if not read:
        return None
    split = _Split(norm, {**given, "reduced": reduced["x"]}, group, dim)
    inputs = dict.fromkeys(value for value in split.given.values() if isinstance(value, fx.Node) and value is not node)
    size = _size(context, node, dim)
    inputs |= dict.fromkeys(each for each in (size,) if isinstance(each, fx.Node))
    return Site(
        anchor=read[0],
        target=split.graph(node, outputs, tuple(inputs), size),
        args=tuple(inputs),
        interior=(node, norm),
        outputs=read,
    )


def _size(context: PassContext, node: fx.Node, dim: int) -> fx.Node | None:
    """Return the placeholder of a symbolic number of tokens; None if the number is fixed or computed."""
    size = value_of(node).shape[dim]
    if type(size) is int:
        return None
    wanted = expression(size)
    inputs = context.graph.find_nodes(op="placeholder")
    sizes = (each for each in inputs if isinstance(value_of(each), torch.SymInt))
    return next((each for each in sizes if expression(value_of(each)) == wanted), None)


def _read(norm: fx.Node, node: fx.Node) -> Mapping[str, Any] | None:
    """Return all arguments of a norm node by name, None for any other node."""
    op = find_op(norm.target)
    if op is None or op not in _NORMS:
        return None
    given = dict(op.bind(norm.args, norm.kwargs).args)
    return given if node in (given["x"], given.get("residual")) else None


def _refusal(norm: fx.Node, given: Mapping[str, Any]) -> str:
    """Return why a norm can't or should not be computed on parts of the tokens."""
    if given["x"] is given.get("residual"):
        return f"{norm} adds {given['x']} to itself"
    if given.get("granularity") == "tensor" and given["scale"] is None:
        return f"the scale that {norm} gives is that of all tokens"
    shape = view.shape(given.get("scale"))
    if shape:
        return f"{norm} is given a scale of shape {tuple(shape)}"
    if "residual" not in given:
        return ""
    if not view.same_shape(given["x"], given["residual"]):
        return f"{given['x']} and {given['residual']} differ in shape"
    total = calls.outputs(norm)[-1]
    if total is None:
        return ""
    whole = [user.name for user in total.users if not _adds_part(user, total)]
    return f"{', '.join(whole)} reads the whole sum {total} too" if whole else ""


def _adds_part(user: fx.Node, total: fx.Node) -> bool:
    """Tell whether a reader of the residual sum is the next norm, one that adds the result of an all-reduce."""
    if find_op(user.target) not in _WITH_SUM:
        return False
    x, residual = user.args[:2]
    other = residual if x is total else x
    return isinstance(other, fx.Node) and other is not total and find_op(other.target) is ALL_REDUCE


class _Split:
    """Builds the graph that replaces an all-reduce and a norm. given: the norm's arguments, and the tensor that is
    reduced."""

    def __init__(self, norm: fx.Node, given: Mapping[str, Any], group: str, dim: int) -> None:
        self.given, self._norm, self._where = given, norm, (group, dim)

    def graph(
        self, node: fx.Node, outputs: Sequence[fx.Node | None], inputs: tuple[fx.Node, ...], size: fx.Node | None
    ) -> fx.GraphModule:
        """Return a graph of these inputs that returns each output whole, if something reads it; node: the
        all-reduce."""
        graph, given = fx.Graph(), dict(self.given)
        known = {each: graph.placeholder(each.name) for each in inputs}
        reduced = known[given.pop("reduced")]
        tokens: Any = None if size is None else known[size]
        if tokens is None and type(value_of(node).shape[self._where[1]]) is not int:
            tokens = graph.call_method("size", (reduced, self._where[1]))
        # Only the tokens are split. The weight of a norm stays whole, even if it is the same node as a tensor that is
        # split.
        for name in ("x", "residual"):
            if given.get(name) is node:
                given[name] = graph.call_function(REDUCE_SCATTER.overload, (reduced, *self._where))
            elif name in given:
                given[name] = graph.call_function(LOCAL_SHARD.overload, (known[given[name]], *self._where))
        given = {
            name: known.get(value, value) if isinstance(value, fx.Node) else value for name, value in given.items()
        }
        graph.output(self._wholes(graph, given, outputs, tokens))
        return fx.GraphModule(nn.Module(), graph)

    def _wholes(self, graph: fx.Graph, given: dict[str, Any], outputs: Sequence[fx.Node | None], tokens: Any) -> Any:
        op = find_op(self._norm.target)
        assert op is not None  # the finder has seen it
        members = [graph.call_function(op.overload, *calls.split(op, given))]
        if len(outputs) > 1:
            members = [graph.call_function(operator.getitem, (members[0], index)) for index in range(len(outputs))]
        wholes = [
            # One scale for all tokens is the same in every process.
            graph.call_function(ALL_GATHER.overload, (part, *self._where, tokens)) if value_of(old).dim() else part
            for part, old in zip(members, outputs, strict=True)
            if old is not None
        ]
        return tuple(wholes) if len(wholes) > 1 else wholes[0]


def run(context: PassContext) -> PassResult:
    """Split every such all-reduce, then keep split what is gathered only to be split again."""
    found = [find(context, node) for node in context.graph.nodes]
    sites = [item for item in found if isinstance(item, Site)]
    with _parts_of_two(sites):
        result = apply_sites(context, sites, [item for item in found if isinstance(item, NearMiss)])
    if result.matched and context.analyses is not None:
        context.analyses.invalidate()
        _keep_split(context)
    return result


@contextmanager
def _parts_of_two(sites: Sequence[Site]) -> Iterator[None]:
    """Assume, while new values are computed, that symbolic sizes give each part at least 2 tokens.

    Traces make the same assumption (sizes of at least 2) for passes. A norm asks whether a size is 1; the answer
    changes only strides of that dimension, which have no meaning at size 1.
    """
    values = [value_of(site.anchor) for site in sites]
    kept: list[tuple[Any, dict[Any, Any]]] = []
    for env in {id(each.fake_mode.shape_env): each.fake_mode.shape_env for each in values if _is_open(each)}.values():
        from torch.utils._sympy.value_ranges import ValueRanges  # imports sympy, which only open sizes need

        kept.append((env, dict(env.var_to_range)))
        symbols = {symbol for each in values for size in each.shape for symbol in _symbols(size)}
        for symbol in symbols & env.var_to_range.keys():
            known = env.var_to_range[symbol]
            env.var_to_range[symbol] = ValueRanges(max(known.lower, _MANY), known.upper)
        env._version_counter += 1  # answers are kept under this number
    try:
        yield
    finally:
        for env, ranges in kept:
            env.var_to_range.update(ranges)
            env._version_counter += 1


_MANY = 2 * 64
"""Enough tokens for two in each of 64 processes."""


def _is_open(value: Any) -> bool:
    return any(_symbols(size) for size in value.shape)


def _symbols(size: Any) -> frozenset[Any]:
    return frozenset() if type(size) is int else frozenset(getattr(expression(size), "free_symbols", ()))


def _keep_split(context: PassContext) -> None:
    """Replace each part of a gathered tensor by the tensor that was gathered; remove the gathers that nothing reads
    then."""
    writes = context.analysis("writes")
    for node in list(context.graph.nodes):
        part = call_of(node, LOCAL_SHARD)
        if part is None or not isinstance(part["x"], fx.Node):
            continue
        gathered = call_of(part["x"], ALL_GATHER)
        same = gathered is not None and (gathered["group"], gathered["dim"]) == (part["group"], part["dim"])
        if gathered is None or not same or writes.writers(node, part["x"], gathered["x"]):
            continue
        node.replace_all_uses_with(gathered["x"])
        context.graph.erase_node(node)


def _large(context: PassContext) -> list[frozenset[str]]:
    """Return, for each bucket, the sums that are large enough there and whose tokens the processes divide."""
    sums = [(node, str(given["group"])) for node in context.graph.nodes if (given := call_of(node, ALL_REDUCE))]

    def taken(sizes: Mapping[Any, int]) -> frozenset[str]:
        alone = replace(context, sizes=(sizes,))
        large = (each for each in sums if not refused_bytes(alone, each[1], each[0]))
        return frozenset(node.name for node, group in large if isinstance(divided_dim(alone, group, node), int))

    return [taken(sizes) for sizes in context.sizes]


SEQUENCE_PARALLEL = Pass(
    name="sequence_parallel",
    does="Split every such all-reduce, then keep split what is gathered only to be split again.",
    run=run,
    after=(
        *("lift_collectives", "lift_rms_norm", "fuse_add_rms_norm", "eliminate_common_subexpressions"),
        *("share_quantize_scales", "fuse_rms_norm_quantize", "fuse_add_rms_norm_quantize"),
    ),
    guards=Guards(world_size=(2, None)),
    params=MappingProxyType(
        {"least_bytes_of_2": 0, "least_bytes_of_4": 0, "least_bytes_of_8": 0, "least_bytes_of_16": 0}
    ),
    traits=PassTraits(
        reads_content=False,
        tells_apart=_large,
        on_request="two collectives take longer than one unless they are hidden behind products or tensors are large",
    ),
)
