"""An all-reduce with what follows it in a decoder layer: residual add, RMSNorm, quantisation of its result.

`core::all_reduce_rms_norm`, `core::all_reduce_add_rms_norm`, `core::all_reduce_add_rms_norm_quantize` and
`core::all_reduce_add_rms_norm_quantize_fp4` are the ops that their names end in, on the sum of x over the processes of
`group` (core/common/ops/collective/collectives.py); all other arguments are those of these ops. The residual is not
reduced: every process holds all of it. `group_size` is no number of processes, but of neighbours that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw
from core.common.ops.collective.collectives import ALL_REDUCE
from core.common.ops.composition import Signature, followed
from core.common.ops.declaration import CanonicalOp, declare
from core.common.ops.norm.norms import ADD_RMS_NORM, RMS_NORM
from core.common.ops.norm.quantized import ADD_RMS_NORM_QUANTIZE
from core.common.ops.quantize.fp4 import QUANTIZE_FP4

_KEPT = (
    *("odd rows", "no tokens", "rank 4", "slice of wider rows", "transposed heads", "large values", "wide residual"),
    *("olmo2", "gemma", "no weight", "fp8, one scale, given scale"),
)
"""Beginnings of the names of calls that a reduction before the op makes worth testing again."""


def _reduced(op: CanonicalOp) -> CanonicalOp:
    """Return the op on the sum of its first argument, with the group as one more keyword."""

    def joined(reduce: Callable[..., Tensor], end: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Tensor, *operands: Any, group: str, **options: Any) -> Any:
            return end(reduce(x, group), *operands, **options)

        return run

    def calls(draw: Draw) -> dict[str, dict[str, Any]]:
        """Return some of the calls of the op without the reduction, for the default group."""
        samples = op.samples(draw.dtype, draw.device)
        return {s.name: {**s.kwargs, "group": ""} for s in samples if s.name.startswith(_KEPT)}

    own = Signature.of(op)
    return CanonicalOp(
        schema=own._replace(keywords=["str group", *own.keywords]).schema(f"all_reduce_{op.name}"),
        reference=joined(ALL_REDUCE.reference, op.reference),
        # Strides of a norm's results follow its input, which a reduction makes contiguous.
        fake=joined(ALL_REDUCE.fake, op.fake),
        calls=calls,
        break_point=True,
    )


def _fp4_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return the calls of `core::add_rms_norm`, every other one with a scale given."""
    scale = torch.tensor(0.0017, dtype=draw.wide, device=draw.device)
    samples = enumerate(ADD_RMS_NORM.samples(draw.dtype, draw.device))
    return {s.name: {**s.kwargs, "scale": scale if index % 2 else None} for index, s in samples}


ALL_REDUCE_RMS_NORM = declare(_reduced(RMS_NORM))
ALL_REDUCE_ADD_RMS_NORM = declare(_reduced(ADD_RMS_NORM))
ALL_REDUCE_ADD_RMS_NORM_QUANTIZE = declare(_reduced(ADD_RMS_NORM_QUANTIZE))
ALL_REDUCE_ADD_RMS_NORM_QUANTIZE_FP4 = declare(_reduced(followed(ADD_RMS_NORM, QUANTIZE_FP4, _fp4_calls)))
