"""Lift the gate of gated MLPs, `act(gate) * up`, to `core::gated_activation` or its form over one tensor.

The matcher starts at the product: one operand is an activation (core/common/passes/mlp/activation_forms.py), the other
a tensor of its shape. Clamps and an offset, as in gpt-oss, are part of the op, and so is the split of one projection
(core/common/passes/rotary/halves.py). The sigmoid of a projection is a gate of any tensor: of what attention gives in
Qwen3-Next, Qwen3.5 and MiniMax.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace

from torch import fx

from core.common.ops.mlp import GATED_ACTIVATION, GATED_ACTIVATION_FUSED
from core.common.passes import NearMiss, Pass, PassContext, Site, near_miss, view
from core.common.passes.mlp.activation_forms import Activation, read_activation
from core.common.passes.rotary.halves import halves

_ALWAYS_GATES = frozenset({"silu", "gelu", "gelu_tanh", "gelu_new", "quick_gelu"})
"""For any other activation, a product is a gate only if its operands are halves or projections of one tensor, or if a
sigmoid of a projection scales the other operand."""
_IN_PLACE = (operator.imul, "mul_", "__imul__")
_TAKES = frozenset({"getitem", "chunk", "split", "split_with_sizes", "unbind", "narrow", "select", "slice"})
_FOLDS = frozenset({"view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "contiguous", "flatten"})
_PROJECTIONS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "_grouped_mm"})


@dataclass(frozen=True, slots=True)
class _Gate:
    """The match so far: the op's operands and options. `computing`: the nodes in between that do arithmetic."""

    gate: fx.Node
    up: fx.Node
    limit: float = 0.0
    up_offset: float = 0.0
    computing: tuple[fx.Node, ...] = field(default=())


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the product of an activation and a tensor of the same shape."""
    if node.target in _IN_PLACE:
        gated = node.args[0]
        known = read_activation(gated) is not None and view.same_shape(gated, view.operand(node, 1, "other"))
        return near_miss(node, f"{node} multiplies {gated} in place") if known else None
    if view.kind(node) != "mul":
        return None
    for gated, up in view.orders(node):
        if not isinstance(gated, fx.Node) or not isinstance(up, fx.Node):
            return None
        found = read_activation(gated) or _hidden(gated)
        if found is not None and _is_gate(found, gated, up):
            return _site(node, gated, up, found)
    return None


def _hidden(gated: fx.Node) -> Activation | None:
    """Return the activation before a cast or a clamp: a candidate, but none that the op can replace."""
    kind = view.kind(gated)
    found = read_activation(gated.args[0]) if kind in ("cast", "clamp", "clamp_max") else None
    if found is None or found.kind not in _ALWAYS_GATES:
        return None
    if kind == "cast" and view.dtype(gated) == view.dtype(gated.args[0]):
        return found
    return replace(found, kind="", reason=f"{gated} is between the activation and the product")


def _is_gate(found: Activation, gated: fx.Node, up: fx.Node) -> bool:
    if found.x is up or up in gated.all_input_nodes:
        return False  # an activation in itself
    if found.kind in _ALWAYS_GATES or found.reason:
        return view.shape(up) is not None
    if not view.same_shape(gated, up):
        return False
    return _are_projections(found.x, up) or (found.kind == "sigmoid" and _scales(found.x, up))


def _scales(gate: fx.Node, up: fx.Node) -> bool:
    """Tell whether the sigmoid of the gate, a projection, scales numbers: the op takes no masks."""
    dtype = view.dtype(up)
    return dtype is not None and dtype.is_floating_point and _projected(gate) is not None


def _are_projections(gate: fx.Node, up: fx.Node) -> bool:
    """Tell whether both are halves of one tensor, or projections of the same tensor."""
    if halves(gate, up) is not None:
        return True
    left, right = _projected(gate), _projected(up)
    return left is not None and left is right


def _projected(node: view.Operand) -> fx.Node | None:
    """Return the tensor of which the node is a projection (or part of one), or None."""
    for _ in range(16):  # a short chain of a bias, a clamp, an offset and views
        kind = view.kind(node)
        if kind in _PROJECTIONS:
            return _unfolded(node.args[1 if kind in ("addmm", "baddbmm") else 0])
        if kind in _TAKES | _FOLDS | {"clamp", "clamp_max", "add", "cast"} or _adds_bias(node):
            node = node.args[0]
        else:
            return None
    return None


def _adds_bias(node: view.Operand) -> bool:
    """Return whether the node adds to a tensor in place, as experts add their biases."""
    return isinstance(node, fx.Node) and node.target in (operator.iadd, "add_", "__iadd__")


def _unfolded(node: view.Operand) -> fx.Node | None:
    while isinstance(node, fx.Node) and view.kind(node) in _FOLDS | {"cast"}:
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _site(node: fx.Node, gated: fx.Node, up: fx.Node, found: Activation) -> Site | NearMiss:
    if not view.same_shape(gated, up):
        return near_miss(node, f"{gated} and {up} differ in shape")
    if not found.kind:
        return near_miss(node, found.reason)
    read = _options(_Gate(found.x, up, computing=(node, *view.between(gated, found.x))), gated)
    for inner in read.computing[1:]:
        if any(user not in read.computing for user in inner.users):
            return near_miss(node, f"the activation {inner} is used a second time")
    options = {"kind": found.kind, "limit": read.limit, "up_offset": read.up_offset}
    taken = halves(read.gate, read.up)
    if taken is None:
        return Site(
            anchor=node,
            target=GATED_ACTIVATION.overload,
            args=(read.gate, read.up),
            kwargs=options,
            interior=read.computing,
        )
    layout = {"gate_first": taken.first, "interleaved": taken.interleaved}
    return Site(
        anchor=node,
        target=GATED_ACTIVATION_FUSED.overload,
        args=(taken.whole,),
        kwargs=options | layout,
        interior=view.between(node, taken.whole),
    )


def _options(read: _Gate, gated: fx.Node) -> _Gate:
    """Match the offset of up and the clamps of both, if the op has them and nothing else reads them."""
    shifted = view.plus_number(read.up)
    if shifted is not None and view.only_user(read.up) is not None:
        read = replace(read, up=shifted[0], up_offset=shifted[1], computing=(*read.computing, read.up))
    gate, up = _bounds(read.gate), _bounds(read.up)
    if gate is None or up is None or any(user not in read.computing for user in (*read.gate.users, *read.up.users)):
        return read
    limit = gate[2]
    if gate[1] is not None or limit is None or limit <= 0 or (up[1], up[2]) != (-limit, limit):
        return read
    return replace(read, gate=gate[0], up=up[0], limit=limit, computing=(*read.computing, read.gate, read.up))


def _bounds(node: fx.Node) -> tuple[fx.Node, float | None, float | None] | None:
    """Return (x, least, most) if the node is x between two numbers, one of them perhaps missing."""
    kind = view.kind(node)
    if kind == "clamp":
        bounds = view.operand(node, 1, "min"), view.operand(node, 2, "max")
    elif kind == "clamp_max":
        bounds = None, view.operand(node, 1, "max")
    else:
        return None
    x, (least, most) = node.args[0], bounds
    if not isinstance(x, fx.Node) or any(bound is not None and not view.is_number(bound) for bound in bounds):
        return None
    return x, least, most


LIFT_GATED_ACTIVATION = Pass(name="lift_gated_activation", find=find, does="Lift every gated activation.")
