"""The linear layers that can be merged: plain ones, `core::quantized_linear` and `core::weight_only_linear`.

How scales of weights are joined is decided here: those by channel, by group and by block are laid end to end as the
weights are. A scale for a whole weight is one number where the joined weight has one per channel: it is spread, in a
new tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from core.common.ops.linear import WEIGHT_ONLY_LINEAR
from core.common.ops.quantize import QUANTIZED_LINEAR
from core.common.passes import calls, find_op, site_name, value_of, view

_SHARED = frozenset({"out_dtype", "x_zero_point", "num_bits"})
"""Further arguments of quantised layers, equal in all of them, that the merged call takes over."""


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a quantised layer. x: of its input, None where that is no codes; weight: of its weight, () or one
    row for each `block` channels; zeros: its zero points, which lie as the scales do."""

    x: fx.Node | None
    weight: fx.Node
    num_channels: int
    zeros: fx.Node | None = None

    @property
    def num_rows(self) -> int:
        """How many channels, or blocks of them, have a scale of their own."""
        shape = value_of(self.weight).shape
        return int(shape[0]) if shape else 1

    @property
    def num_columns(self) -> int:
        """How many groups of a channel have one."""
        shape = value_of(self.weight).shape
        return int(shape[1]) if shape else 1

    @property
    def block(self) -> int:
        """How many channels share a scale; 0 if all channels share one."""
        return 0 if self.num_rows == 1 < self.num_channels else self.num_channels // self.num_rows


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear layer: the node, its operands, the path of its module; scales: None for a plain one.

    further: the other arguments of a quantised one, by name.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    path: str
    scales: Scales | None = None
    further: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unfit(self) -> str:
        """Why the layer can be merged with no other, or ""."""
        own = [name for name in self.further if name not in _SHARED]
        return f"it has {', '.join(own)}, which are not joined" if own else ""

    @property
    def num_rows(self) -> int:
        """The size of its result's last dimension."""
        return int(value_of(self.weight).shape[0])

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """What layers must share to be merged: the input, its scales and its zero points."""
        scales = () if self.scales is None or self.scales.x is None else (self.scales.x,)
        shared = (node for name, node in self.further.items() if name in _SHARED and isinstance(node, fx.Node))
        return self.x, *scales, *shared

    @property
    def constants(self) -> tuple[fx.Node, ...]:
        """The operands that are joined with those of other layers."""
        scales = () if self.scales is None else (self.scales.weight, self.scales.zeros)
        return tuple(node for node in (self.weight, self.bias, *scales) if node is not None)

    @property
    def form(self) -> str:
        """What the weights' scales must share to be joined; "" for a plain layer."""
        if self.scales is None:
            return ""
        zeros = "" if self.scales.zeros is None else ", with zero points"
        bits = f", {self.further['num_bits']} bits" if "num_bits" in self.further else ""
        return f"{value_of(self.scales.weight).dtype}, {self.scales.num_columns} to a channel{zeros}{bits}"

    def call(
        self,
        graph: fx.Graph,
        weight: fx.Node,
        bias: fx.Node | None,
        scale: fx.Node | None,
        zeros: fx.Node | None,
    ) -> fx.Node:
        """Insert the same call with other weights and return it."""
        target: Any = self.node.target
        if self.scales is None:
            return graph.call_function(target, (self.x, weight, bias))
        if self.scales.x is None:
            return graph.call_function(target, (self.x, weight, scale, zeros, bias), dict(self.further))
        return graph.call_function(target, (self.x, self.scales.x, weight, scale, bias), dict(self.further))


def read_linear(node: fx.Node) -> Linear | None:
    """Return the linear layer at a node, or None."""
    if view.kind(node) == "linear":
        x, weight, bias = (view.operand(node, i, name) for i, name in enumerate(("input", "weight", "bias")))
        return _plain(x, weight, bias, node)
    if find_op(node.target) is WEIGHT_ONLY_LINEAR:
        return _weight_only(node)
    if find_op(node.target) is not QUANTIZED_LINEAR:
        return None
    given = calls.arguments(node, QUANTIZED_LINEAR)
    x, x_scale, weight, scale = (given.pop(name) for name in ("x_codes", "x_scale", "w_codes", "w_scale"))
    found = _plain(x, weight, given.pop("bias", None), node)
    if found is None or not isinstance(x_scale, fx.Node) or not isinstance(scale, fx.Node):
        return None
    return replace(found, scales=Scales(x_scale, scale, found.num_rows), further=given)


def _weight_only(node: fx.Node) -> Linear | None:
    given = calls.arguments(node, WEIGHT_ONLY_LINEAR)
    x, weight, scale = (given.pop(name) for name in ("x", "w_codes", "w_scale"))
    zeros = given.pop("w_zero_point", None)
    found = _plain(x, weight, given.pop("bias", None), node)
    if found is None or not isinstance(scale, fx.Node):
        return None
    sizes = value_of(weight).shape[0], *value_of(scale).shape[:1]
    if any(type(size) is not int for size in sizes) or len(set(sizes)) > 1:  # a symbol would become a condition
        return None
    zeros = zeros if isinstance(zeros, fx.Node) else None
    return replace(found, scales=Scales(None, scale, found.num_rows, zeros), further=given)


def _plain(x: Any, weight: Any, bias: Any, node: fx.Node) -> Linear | None:
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        return None
    return Linear(node, x, weight, bias if isinstance(bias, fx.Node) else None, site_name(node))


def are_alike(scales: Sequence[Scales]) -> bool:
    """Tell whether scales of weights can be laid end to end as they are: all are of blocks of one size."""
    return len({each.block for each in scales}) == 1 and scales[0].block > 0


def spread(scales: Sequence[Scales], values: Sequence[Tensor]) -> Tensor:
    """Return a new tensor (channels, columns): the scale of each channel, layer by layer."""
    with torch.no_grad():
        rows = [
            value.reshape(each.num_rows, each.num_columns).repeat_interleave(each.num_channels // each.num_rows, 0)
            for each, value in zip(scales, values, strict=True)
        ]
        return torch.cat(rows)
