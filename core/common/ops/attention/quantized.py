"""`core::attention_quantize`, `core::rotary_attention_quantize`: attention whose result is only needed as codes.

Each is the attention of paged.py or rotary.py followed by `core::quantize` of its rows, the heads of a token behind one
another as the output projection reads them.

Shapes: T tokens, H query heads, V value size; codes (T, H * V), contiguous; their scale () or (T, 1).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, check_choice
from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from core.common.ops.composition import followed
from core.common.ops.declaration import CanonicalOp, declare
from core.common.ops.quantize.symmetric import QUANTIZE

GRANULARITIES = ("token", "tensor")


def _rows(quantize: Callable[..., Any]) -> Callable[..., Any]:
    """Return `core::quantize` of the rows that heads (T, H, V) make, of its reference or its fake."""

    def run(x: Tensor, scale: Tensor | None, *, dtype: torch.dtype, granularity: str = "token") -> Any:
        check_choice("attention_quantize", "granularity", granularity, GRANULARITIES)
        return quantize(x.flatten(1), scale, dtype=dtype, granularity=granularity)

    return run


def _in_codes(op: CanonicalOp) -> CanonicalOp:
    """Return the op that gives the result of an attention as codes, and their scale."""

    def calls(draw: Draw) -> dict[str, dict[str, Any]]:
        """Return each call with one form of codes, in turn; most have a scale given, as kernels want it."""
        fp8, int8 = torch.float8_e4m3fn, torch.int8
        forms: list[tuple[torch.dtype, str, float | None]] = [
            (fp8, "tensor", 0.00931),
            (fp8, "token", None),
            (int8, "tensor", 0.02713),
            (fp8, "tensor", 0.00167),
            (int8, "token", None),
            (fp8, "tensor", None),
        ]
        made = {}
        for sample, (dtype, granularity, number) in zip(
            op.samples(draw.dtype, draw.device), cycle(forms), strict=False
        ):
            scale = None if number is None else torch.tensor(number, dtype=draw.wide, device=draw.device)
            form = f"{str(dtype).removeprefix('torch.')} by {granularity}{'' if scale is None else ', given scale'}"
            options = {"out_scale": scale, "dtype": dtype, "granularity": granularity}
            made[f"{sample.name}, {form}"] = {**sample.kwargs, **options}
        return made

    return followed(op, _QUANTIZE_ROWS, calls)


_QUANTIZE_ROWS = CanonicalOp(
    schema='quantize(Tensor x, Tensor? out_scale, *, ScalarType dtype, str granularity="token") '
    "-> (Tensor codes, Tensor scale)",
    reference=_rows(QUANTIZE.reference),
    fake=_rows(QUANTIZE.fake),
    calls=lambda draw: {},
)
ATTENTION_QUANTIZE = declare(_in_codes(ATTENTION))
ROTARY_ATTENTION_QUANTIZE = declare(_in_codes(ROTARY_ATTENTION))
"""Their arguments are those of the attention, out_scale () or (T, 1) or None behind the tensors, and by name dtype and
granularity, "token" or "tensor": of `core::quantize`, which takes no groups here."""
