"""`core::all_reduce`, `core::reduce_scatter` and `core::all_gather` through memory that processes share."""

from __future__ import annotations

import torch

from core.common.ops.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from core.common.ops.implementation import OpCall, OpImplementation
from core_cpu.own_ops import own_op
from core_cpu.shared_groups import join

SUMMED = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
)


def why_not_reduce(call: OpCall) -> str | None:
    """Return why the kernel can't take a call that sums, or None; joins the processes of the group.

    call: as it stands in the graph.
    """
    dtype = call.args["x"].dtype
    if dtype not in SUMMED:
        return f"x is {dtype}, and the kernel sums {', '.join(map(str, SUMMED))}"
    return why_not_gather(call)


def why_not_gather(call: OpCall) -> str | None:
    """Return the same for a call that moves numbers, of whatever dtype."""
    return join(call.args["group"]) or None


all_reduce, reduce_scatter, all_gather = (own_op(op, "collectives") for op in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER))

IMPLEMENTATIONS = (
    OpImplementation(op=ALL_REDUCE.qualified_name, name="cpu_shared_memory", fn=all_reduce, condition=why_not_reduce),
    OpImplementation(
        op=REDUCE_SCATTER.qualified_name, name="cpu_shared_memory", fn=reduce_scatter, condition=why_not_reduce
    ),
    OpImplementation(op=ALL_GATHER.qualified_name, name="cpu_shared_memory", fn=all_gather, condition=why_not_gather),
)
