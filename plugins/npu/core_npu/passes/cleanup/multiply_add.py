"""Take `x * number + y` for one call of `torch.add(y, x, alpha=number)`.

Models scale what the experts give (`routed_scaling_factor`) or a residual so. torch_npu has no op of its own for it;
the device's add has a factor, and takes both in one kernel. It rounds once where the model rounds twice, so the result
is not the same in every bit, and not further from the exact one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, fx, nn

from core.common.passes import LIFTS, Guards, NearMiss, Pass, PassContext, Site, near_miss, value_of, view
from core_npu.passes.calls import other_reader
from core_npu.passes.conditions import HALVES, first_reason, same_tensors
from core_npu.passes.streams import streams


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the sum at a node if one of its terms is a product with a number."""
    if view.kind(node) != "add":
        return None
    for product, y in view.orders(node):
        scaled = view.times_number(product)
        if scaled is None or not isinstance(y, fx.Node):
            continue
        x, number = scaled
        reason = first_reason(same_tensors(context, x, y), other_reader(product, node))
        reason = reason or _other_strides(context, x, y)
        if reason:
            return near_miss(node, reason)
        return Site(anchor=node, target=torch.add, args=(y, x), kwargs={"alpha": number}, interior=(product, node))
    return None


def _other_strides(context: PassContext, x: fx.Node, y: fx.Node) -> str:
    """Return why a sum with x and y in the other order would be laid out otherwise, or nothing."""
    (ours, sizes), (theirs, _) = ((each.stride(), each.shape) for each in map(value_of, (x, y)))
    kept = [dim for dim, size in enumerate(sizes) if not context.served_alike((size,), (1,))]
    same = context.served_alike(*(tuple(strides[dim] for dim in kept) for strides in (ours, theirs)))
    return "" if same else f"{x} has strides {tuple(ours)} and {y} {tuple(theirs)}: the first term rules the result's"


class _Scaled(nn.Module):
    """What experts give, scaled and added, in several spellings."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first = x * 2.5 + y
        second = first.sin() + 0.22 * y
        return first, second, torch.add(torch.mul(second, 1.7), x).cos()


def examples() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield the three sums."""
    rows = partial(torch.randn, 6, 64, generator=torch.Generator().manual_seed(5))
    yield _Scaled(), (rows(), rows())


FUSE_MULTIPLY_ADD = Pass(
    name="fuse_npu_multiply_add",
    find=find,
    does="Fuse every such product and its sum.",
    guards=Guards(scopes=streams, dtypes=HALVES),
    # Norms, gates and rotations are written with such sums too, and a norm takes the add for nothing.
    after=(*LIFTS, "fuse_npu_add_rms_norm"),
    examples=examples,
    owner="npu",
)
