"""How many places a slot has for an adapter's rank: a few more than asked for where a kernel then takes the calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from core.common.ops.implementation import OpCall, OpImplementation
from core.common.ops.linear import ADD_LORA
from core.engine.lora.layers import FoundLayer

MOST_MORE = 15
"""Places that are added at most: kernels ask for multiples of what a vector holds, 16 numbers or fewer."""
_ROWS, _SLOTS = 8, 2
"""Of the calls that implementations are asked about; conditions are those of ranks, features and dtypes."""


def slot_rank(
    max_rank: int, layers: Iterable[FoundLayer], implementations: Sequence[OpImplementation], device: torch.device
) -> int:
    """Return the least number of places, `max_rank` or up to `MOST_MORE` more, at which kernels take the most layers.

    Places beyond an adapter's rank hold zeros, which add nothing to any sum. implementations: the device's, of all ops.
    """
    known = [each for each in implementations if each.op == ADD_LORA.qualified_name and not each.missing]
    forms = {(each.size_in, each.size_out, each.dtype): each for each in layers}.values()

    def num_taken(rank: int) -> int:
        return sum(any(each.condition(_call(form, rank, device)) is None for each in known) for form in forms)

    candidates = range(max_rank, max_rank + MOST_MORE + 1) if known else (max_rank,)
    taken = {}
    for rank in candidates:
        taken[rank] = num_taken(rank)
        if taken[rank] == len(forms):
            break
    return max(taken, key=taken.__getitem__)  # the first of equals, which is the least


def _call(layer: FoundLayer, rank: int, device: torch.device) -> OpCall:
    """Return a call on one layer, of tensors without memory."""
    width = _SLOTS * rank
    shapes = {
        "base": (_ROWS, layer.size_out),
        "x": (_ROWS, layer.size_in),
        "a": (width, layer.size_in),
        "b": (layer.size_out, width),
    }
    with FakeTensorMode():
        tensors = {name: torch.empty(shape, dtype=layer.dtype, device=device) for name, shape in shapes.items()}
        slots = torch.empty(_ROWS, dtype=torch.int64, device=device)
    args = {**tensors, "slots": slots, "rank": rank, "sizes": [layer.size_out]}
    return OpCall(op=ADD_LORA.qualified_name, args=args)
