"""Which activation a node computes, in one call or written out, rounding as `core::gated_activation` does."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from core.common.passes import view

QUICK_GELU = 1.702
"""The factor of `x * sigmoid(factor * x)` that the op's kind `quick_gelu` stands for."""


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation of `x`. kind: the op's name for it, or "" if the op does not have it; `reason` then says why."""

    kind: str
    x: fx.Node
    reason: str = ""


_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def read_activation(node: view.Operand) -> Activation | None:
    """Return the activation that a node computes, or None where it computes none."""
    kind = view.kind(node)
    if kind in ("silu", "gelu", "relu", "sigmoid"):
        return _single(node, kind)
    if kind in ("square", "pow", "mul"):
        squared = view.square(node)
        if view.kind(squared) == "relu":
            inner = _single(squared, "relu")
            return None if inner is None else Activation("relu2", inner.x)
        return None if kind != "mul" else _times_sigmoid(node) or _tanh_gelu(node)
    return None


def _single(node: view.Operand, kind: str) -> Activation | None:
    x = view.operand(node, 0, "input")
    if not isinstance(x, fx.Node) or (kind != "gelu" and view.operand(node, 1, "inplace", False) is True):
        return None
    return Activation(_GELU.get(str(node.kwargs.get("approximate", "none")), "") if kind == "gelu" else kind, x)


def _times_sigmoid(node: fx.Node) -> Activation | None:
    """Read `x * sigmoid(factor * x)`."""
    for x, gate in view.orders(node):
        if view.kind(gate) != "sigmoid" or not isinstance(x, fx.Node):
            continue
        if gate.args[0] is x:
            return Activation("", x, "silu is written out as x * sigmoid(x), which rounds once more")
        scaled = view.times_number(gate.args[0])
        if scaled is not None and scaled[0] is x:
            same = scaled[1] == QUICK_GELU
            reason = f"the factor in the sigmoid is {scaled[1]}, and quick_gelu's is {QUICK_GELU}"
            return Activation("quick_gelu", x) if same else Activation("", x, reason)
    return None


def _tanh_gelu(node: fx.Node) -> Activation | None:
    """Read `0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))`."""
    for half, factor in view.orders(node):
        shifted = view.plus_number(factor)
        if shifted is None or shifted[1] != 1.0 or view.kind(shifted[0]) != "tanh":
            continue
        halved = view.times_number(half)
        if halved is None or halved[1] != 0.5:
            continue
        x = halved[0]
        if _is_cubic(shifted[0].args[0], x):
            return Activation("gelu_new", x)
        return Activation("", x, "a gelu by tanh is written out in another form than gelu_new")
    return None


def _is_cubic(node: view.Operand, x: fx.Node) -> bool:
    """Tell whether the node is `sqrt(2 / pi) * (x + 0.044715 * x ** 3)`."""
    scaled = view.times_number(node)
    if scaled is None or scaled[1] != math.sqrt(2.0 / math.pi) or view.kind(scaled[0]) != "add":
        return False
    cubic = view.times_number(view.other(scaled[0], x))
    if cubic is None or cubic[1] != 0.044715 or view.kind(cubic[0]) != "pow":
        return False
    return cubic[0].args[0] is x and view.operand(cubic[0], 1, "exponent") == 3
