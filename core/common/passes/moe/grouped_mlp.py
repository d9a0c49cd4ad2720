"""Lift a mixture's experts, sorted tokens through two grouped products and a gate, to `core::grouped_mlp`.

The matcher starts at the first product of a pair and reads back to tokens, weights of the routing and indices, on
through gate, second product, weighting and the way back to token order. Experts without a gate have an activation
there instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from core.common.ops.canonical import GATED_ACTIVATION_FUSED, GROUPED_MLP
from core.common.passes import NearMiss, Pass, PassContext, Refused, Site, near_miss, view
from core.common.passes.mlp import gated_activation
from core.common.passes.mlp.activation_forms import read_activation
from core.common.passes.moe.grouped_mlp_order import Order, is_cleared, other_form, read_order, read_sum

# transformers wraps the product in its own op if torch has none.
_FALLBACK = ("transformers.grouped_mm_fallback", "transformers.grouped_mm_fallback.default")
_PRODUCTS = (torch._grouped_mm, torch.ops.aten._grouped_mm.default, getattr(torch.nn.functional, "grouped_mm", None))


@dataclass(slots=True)
class _Product:
    """One grouped product: each row times the matrix of its expert, plus that expert's bias.

    end: the result. writer: the node that adds the biases in place, if so.
    """

    node: fx.Node
    end: fx.Node
    rows: fx.Node
    matrices: fx.Node
    transposed: bool
    bias: fx.Node | None = None
    writer: fx.Node | None = None
    nodes: list[fx.Node] = field(default_factory=list)


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the experts around their first product, a near-miss if the op can't express them, or None for other
    nodes."""
    if not _is_product(node):
        return other_form(node)
    try:
        rows = _without_own_casts(node.args[0], [])
        if view.kind(rows) != "getitem" or not isinstance(rows.args[1], fx.Node):
            return _second(node)
        return _site(context, node)
    except Refused as refused:
        return near_miss(refused.node, refused.reason)


def _is_product(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    return node.target in _PRODUCTS or str(node.target) in _FALLBACK


def _second(node: fx.Node) -> NearMiss | None:
    """Return None for the second product of a pair (reported at the first), and a near-miss for a product without a
    partner."""
    pending, seen = [node.args[0]], 0
    while pending and seen < 32:
        current = pending.pop()
        seen += 1
        if isinstance(current, fx.Node):
            if _is_product(current):
                return None
            pending += current.all_input_nodes
    return near_miss(node, f"{node} multiplies {node.args[0]}, which is no choice of tokens by expert")


def _site(context: PassContext, node: fx.Node) -> Site:
    nodes: list[fx.Node] = []
    positions = context.analysis("order")
    rows, num_experts = _without_own_casts(node.args[0], nodes), (view.shape(node.args[1]) or (None,))[0]
    order = read_order(rows, view.operand(node, 2, "offs"), num_experts, positions)
    first = _product(node, order, positions)
    gated, second = _next_product(first)
    gate, gate_nodes = _activation(gated, first.end) or _gate(context, gated, first.end)
    following = _product(second, order, positions)
    if following.transposed != first.transposed:
        raise Refused(second, f"{first.matrices} and {following.matrices} are stored in different orders")
    total = read_sum(following.end, order, following.writer)
    _check_dtypes(node, order, first, following, total.end)
    return Site(
        anchor=total.end,
        target=GROUPED_MLP.overload,
        args=(order.x, total.weights, order.indices, first.matrices, following.matrices),
        kwargs={
            **gate,
            "transposed": first.transposed,
            "gate_up_bias": first.bias,
            "down_bias": following.bias,
        },
        interior=tuple(
            dict.fromkeys([*order.nodes, *nodes, *first.nodes, *gate_nodes, *following.nodes, *total.nodes])
        ),
    )


def _without_own_casts(value: Any, nodes: list[fx.Node]) -> Any:
    """Strip casts to the dtype that a node has already; the casts join `nodes`."""
    while (source := view.source_of_cast(value)) is not None and view.dtype(source) == view.dtype(value):
        nodes.append(value)
        value = source
    return value


def _product(node: fx.Node, order: Order, positions: Mapping[fx.Node, int]) -> _Product:
    """Read one product with its matrices and biases."""
    if view.operand(node, 3, "bias") is not None or view.operand(node, 4, "out_dtype") is not None:
        raise Refused(node, f"{node} has a bias or an output dtype of its own")
    if view.operand(node, 2, "offs") is not order.offsets:
        raise Refused(node, f"{node} divides its rows otherwise than {order.offsets}")
    casts: list[fx.Node] = []
    rows, matrices = _without_own_casts(node.args[0], casts), node.args[1]
    if not isinstance(matrices, fx.Node):
        raise Refused(node, f"{node} multiplies by {matrices}, which is no node")
    found = _Product(node, node, rows, matrices, True, nodes=[*casts, node])
    if view.kind(matrices) == "transpose" and isinstance(matrices.args[0], fx.Node):
        dims = view.swapped_dims(matrices)
        if {*(dims or ())} != {1, 2}:
            raise Refused(matrices, f"{matrices} transposes dimensions {dims}, not the last two")
        found.matrices, found.transposed = matrices.args[0], False
        found.nodes.append(matrices)
    _read_bias(found, order, positions)
    cleared = [user for user in found.end.users if user is not found.writer]
    if (
        len(cleared) == 1
        and view.kind(cleared[0]) == "masked_fill"
        and is_cleared(cleared[0], found.end, order.elsewhere)
    ):
        found.nodes.append(cleared[0])
        found.end, found.writer = cleared[0], None
    return found


def _read_bias(product: _Product, order: Order, positions: Mapping[fx.Node, int]) -> None:
    """Match `product + bias[expert of the row]`. If added in place, later nodes read the sum as the product."""
    node = product.node
    writer = next((user for user in node.users if user.target == "add_" and user.args[0] is node), None)
    added = writer or view.only_user(node)
    if writer is None and view.kind(added) != "add":
        return
    assert added is not None
    rows: Any = added.args[1] if writer is not None and len(added.args) == 2 else view.other(added, node)
    bias = rows.args[0] if view.kind(rows) == "getitem" and rows.args[1] is order.experts else None
    if not isinstance(bias, fx.Node) or added.kwargs:
        raise Refused(added, f"{added} adds {rows}, which is no bias of each row's expert")
    product.bias = bias
    product.nodes += [rows, added]
    others = [user for user in node.users if user is not added]
    if writer is None or not others:
        product.end = added
    elif writer.users or any(positions[user] < positions[writer] for user in others):
        raise Refused(added, f"{node} is read before {added} adds the biases, or by both names")
    else:
        product.writer = writer


def _next_product(first: _Product) -> tuple[fx.Node, fx.Node]:
    """Return (what the second product multiplies, the second product), casts between them left out."""
    frontier, seen = [first.end], {first.end}
    while frontier:
        for user in frontier.pop().users:
            if _is_product(user):
                return _without_own_casts(user.args[0], []), user
            if user not in seen and len(seen) < 24:
                seen.add(user)
                frontier.append(user)
    raise Refused(first.node, f"no second product follows {first.node}")


_Gate = tuple[dict[str, Any], tuple[fx.Node, ...]]
"""The op's options for what stands between the products, and its nodes."""


def _activation(between: fx.Node, whole: fx.Node) -> _Gate | None:
    """Return the activation of all that the first product gives, or None where there is none but perhaps a gate."""
    found = read_activation(between)
    if found is None or found.x is not whole:
        return None
    if not found.kind:
        raise Refused(between, found.reason)
    return {"kind": found.kind, "gated": False}, view.between(between, whole)


def _gate(context: PassContext, gated: fx.Node, whole: fx.Node) -> _Gate:
    """Return the gate of the first product's halves, as `lift_gated_activation` finds it."""
    gate = gated_activation.find(context, gated)
    if isinstance(gate, NearMiss):
        raise Refused(gated, gate.reason)
    if gate is None or gate.target is not GATED_ACTIVATION_FUSED.overload or gate.args[0] is not whole:
        raise Refused(gated, f"{gated} is no activation of {whole} that the op knows, and no gate of its two halves")
    if not gate.kwargs["gate_first"]:
        raise Refused(gated, f"{gated} activates the second half of {whole}, and the op the first")
    return {name: option for name, option in gate.kwargs.items() if name != "gate_first"}, tuple(gate.nodes)


def _check_dtypes(node: fx.Node, order: Order, first: _Product, second: _Product, end: fx.Node) -> None:
    kinds = {str(view.dtype(each)) for each in (order.x, first.matrices, second.matrices, node, second.node, end)}
    if len(kinds) != 1:
        raise Refused(node, f"tokens, experts and result differ in dtype: {', '.join(sorted(kinds))}")


# The gate is replaced together with its experts.
LIFT_GROUPED_MLP = Pass(
    name="lift_grouped_mlp", find=find, does="Lift every group of experts.", before=("lift_gated_activation",)
)
