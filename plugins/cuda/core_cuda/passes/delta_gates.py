"""Fuse the decays of a gated delta rule and its learning rates, which layers compute number by number, to one launch.

Qwen3-Next, Qwen3.5 and OLMo hybrid have a decay for each head, Kimi and GLM one for each feature of its keys. That is
eight to twelve launches, and three of them compute of a weight alone what every step computes anew. Where a model cuts
the projection by heads (Qwen3-Next), the kernel reads it as it lies, and two copies are gone too.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from core.common.ops.canonical import GATED_DELTA_RULE
from core.common.passes import (
    LIFTS,
    NearMiss,
    Pass,
    PassContext,
    Refused,
    Site,
    find_op,
    near_miss,
    same_sizes,
    value_of,
    view,
)
from core.common.passes.values.layouts import in_order
from core_cuda.ops.conditions import DTYPES
from core_cuda.ops.recurrent.delta_gates import delta_gates, why_not
from core_cuda.passes.examples.recurrent import delta_gate_layers
from core_cuda.passes.taking import given

_REARRANGED = frozenset({"view", "reshape", "unflatten", "flatten", "unsqueeze"})
"""Views that keep all numbers in their order, whatever the strides."""
_WIDE = torch.float32


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the gates of a gated delta rule; a near-miss where they are computed otherwise than the kernel does."""
    if find_op(node.target) is not GATED_DELTA_RULE:
        return None
    decay, beta = (_computed(given(node)[name]) for name in ("decay", "beta"))
    if decay in context.taken:
        return None
    try:
        return _site(context, decay, beta)
    except Refused as refused:
        return near_miss(node, f"{refused.node}: {refused.reason}")


def _computed(node: fx.Node) -> fx.Node:
    """Return the node that computes what a node shows, behind views and casts that keep all values."""
    while (source := _source(view.behind_views(node))) is not None:
        node = source
    return view.behind_views(node)


def _site(context: PassContext, decay: fx.Node, beta: fx.Node) -> Site:
    rates, exponential, step = _product(decay)
    log_rate = _before(exponential.all_input_nodes[0])[-1]
    sizes = _sizes(decay, rates, log_rate)
    a, bias = _sum(step, prod(sizes))
    a, a_dims = _projected(a, decay, sizes)
    if not in_order(value_of(decay)):
        raise Refused(decay, "its numbers are not in one run, and the kernel's are")
    if reason := why_not(value_of(a), value_of(log_rate), value_of(bias), sizes):
        raise Refused(decay, reason)
    learned = _learned(context, beta, sizes[0], (decay, a, log_rate, bias))
    b, options = learned or (None, {})
    context.taken.update((decay, *((beta,) if learned else ())))
    return Site(
        anchor=decay,
        target=delta_gates,
        args=(a, log_rate, bias, b),
        kwargs={"sizes": list(sizes), "a_dims": a_dims, **options},
        interior=(*view.between(decay, a, log_rate, bias), *(view.between(beta, b) if learned else ())),
        outputs=(decay, beta if learned else None),
    )


def _learned(
    context: PassContext, beta: fx.Node, heads: int, others: tuple[fx.Node, ...]
) -> tuple[fx.Node, dict[str, Any]] | None:
    """Return the projection of learning rates and how the kernel takes it, beside the decay and its operands, `others`.

    None where it can't: a sigmoid is one launch anyway. Both are computed where the first of them is read.
    """
    found, factor = view.times_number(beta) or (beta, 1.0)
    dtypes = {view.dtype(found), view.dtype(beta)}
    if view.kind(found) != "sigmoid" or len(dtypes) > 1 or not dtypes < {*DTYPES} or beta in (*context.taken, *others):
        return None
    try:
        b, dims = _projected(found.all_input_nodes[0], beta, (heads,))
    except Refused:
        return None
    order = context.analysis("order")
    decay, *operands = others
    first = min(order[each] for each in (decay, *decay.users, *beta.users))
    if max(order[each] for each in (b, *operands)) >= first:
        return None
    if not in_order(value_of(beta)) or view.dtype(b) not in DTYPES:
        return None
    return b, {"b_dims": dims, "rounded": view.dtype(beta), "factor": factor}


def _product(decay: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return the factor of rates, the exponential in it, and x of the softplus that it is multiplied with."""
    product = decay.all_input_nodes[0] if view.kind(decay) == "neg" else decay
    for rates, softplus in view.orders(product) if view.kind(product) == "mul" else ():
        if (step := _inside_softplus(softplus)) is None:
            continue
        node = _before(rates)[-1]
        negated = (view.kind(decay) == "neg") != (view.kind(node) == "neg")
        node = _before(node.all_input_nodes[0])[-1] if view.kind(node) == "neg" else node
        if not negated or view.kind(node) != "exp":
            raise Refused(rates, "it is not the negative exponential of a weight")
        wide = (view.dtype(each) for each in (node, step, softplus, decay))
        if any(dtype != _WIDE for dtype in wide):
            raise Refused(decay, f"it is not computed in {_WIDE}, and the kernel computes in that")
        return rates, node, step
    raise Refused(decay, "it is no product with a softplus")


def _inside_softplus(node: Any) -> Any:
    """Return x of softplus(x), called or written out as log(1 + exp(x)) where x is no more than 20; else None."""
    if view.kind(node) == "softplus":
        plain = view.operand(node, 1, "beta", 1.0) == 1 and view.operand(node, 2, "threshold", 20.0) == 20
        return node.all_input_nodes[0] if plain else None
    if view.kind(node) != "where" or len(node.args) != 3 or view.kind(node.args[0]) != "gt":
        return None
    large, x, logarithm = node.args
    grown = view.plus_number(logarithm.args[0]) if view.kind(logarithm) == "log" else None
    if grown is None or grown[1] != 1 or view.kind(grown[0]) != "exp":
        return None
    return x if grown[0].args[0] is x and tuple(large.args) == (x, 20.0) else None


def _source(node: Any) -> Any:
    """Return what a cast reads that keeps all values, or None."""
    source = view.source_of_cast(node)
    return source if source is not None and view.is_exact(view.dtype(source), view.dtype(node)) else None


def _before(node: Any) -> list[Any]:
    """Return a node, and each one before it whose numbers it shows in the same order, the last one first computed."""
    found = [node]
    while (source := node.all_input_nodes[0] if view.kind(node) in _REARRANGED else _source(node)) is not None:
        found.append(node := source)
    return found


def _sizes(decay: fx.Node, rates: fx.Node, log_rate: fx.Node) -> tuple[int, ...]:
    """Return the decays of a token: one for each head, (H,), or (H, D) with one for each feature of its keys."""
    weights, whole, own = value_of(log_rate), view.shape(decay) or (), view.shape(rates) or ()
    heads = weights.numel() if isinstance(weights, Tensor) else None
    for dims in (1, 2):
        wanted = (heads, *(1,) * (dims - 1))
        if len(whole) >= dims and whole[len(whole) - dims] == heads and _trimmed(own) == _trimmed(wanted):
            return whole[len(whole) - dims :]
    raise Refused(rates, f"its shape is {own}, and the decays of a token are {whole}")


def _trimmed(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a shape as it is broadcast: without the ones in front, but for the last number."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def _sum(step: fx.Node, count: int) -> tuple[Any, fx.Node]:
    """Return x and the bias of `x + bias`, of which the bias has so many numbers, those of a token."""
    node = _before(step)[-1]
    whole = view.shape(node) or ()
    if view.kind(node) == "add" and view.dtype(node) != _WIDE:
        raise Refused(node, f"it is not computed in {_WIDE}, and the kernel computes in that")
    for x, bias in view.orders(node) if view.kind(node) == "add" else ():
        own = _trimmed(view.shape(bias) or ())
        if own and same_sizes(own, whole[-len(own) :]) and prod(own) == count and view.same_shape(x, node):
            return x, _before(bias)[-1]
    raise Refused(node, f"it is no sum of a projection and {count} numbers, the bias of a token")


def _projected(x: Any, result: fx.Node, sizes: tuple[int, ...]) -> tuple[fx.Node, int]:
    """Return the first node that has a token's numbers in its last dimensions, one or two, and how many these are."""
    lead = (view.shape(result) or ())[: -len(sizes)]
    for node in reversed(_before(x)):
        shape = view.shape(node) or ()
        for dims in (1, 2):
            last = shape[len(shape) - dims :]
            if (
                all(type(size) is int for size in last)
                and prod(last) == prod(sizes)
                and same_sizes(shape[:-dims], lead)
            ):
                return node, dims
    raise Refused(x, f"a token's numbers are not the last ones of its shape {view.shape(x)}")


FUSE_DELTA_GATES = Pass(
    name="fuse_delta_gates",
    does="Fuse the decays and learning rates of every gated delta rule.",
    find=find,
    owner="core_cuda",
    after=("eliminate_common_subexpressions", "merge_linears", *LIFTS),
    examples=delta_gate_layers,
)
