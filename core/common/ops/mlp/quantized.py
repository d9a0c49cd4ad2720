"""`core::gated_activation_quantize`: the gate of a gated MLP whose product is only needed as codes.

Shapes: gate and up (..., I), or both halves in one tensor (..., 2 * I); codes (..., I), contiguous; scales as
`core::quantize` has them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from core.common.ops.arguments import Draw, check
from core.common.ops.composition import followed
from core.common.ops.declaration import CanonicalOp, declare
from core.common.ops.mlp.activation import GATED_ACTIVATION, GATED_ACTIVATION_FUSED
from core.common.ops.norm.quantized import in_each_form, in_turn
from core.common.ops.quantize.symmetric import QUANTIZE


def _product(gate: Tensor, up: Tensor | None, **options: Any) -> Any:
    """Return `core::gated_activation` of two tensors, or its fused form of one: the gate, where up is None."""
    if up is None:
        return GATED_ACTIVATION_FUSED.reference(gate, **options)
    plain = options.pop("gate_first", True) and not options.pop("interleaved", False)
    check(plain, "gated_activation_quantize", "gate_first and interleaved say how one tensor holds both, and up is one")
    return GATED_ACTIVATION.reference(gate, up, **options)


_GROUPS = (8, 10)


def _calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return every form of codes with one gate, and every gate of one tensor and of two with one form."""
    first, *others = GATED_ACTIVATION_FUSED.samples(draw.dtype, draw.device)
    calls = in_each_form(first, draw, 40, _GROUPS) | in_turn(others, _GROUPS)
    for call in calls.values():
        call |= {"gate": call.pop("gate_up"), "up": None}
    apart = in_turn(GATED_ACTIVATION.samples(draw.dtype, draw.device), _GROUPS)
    return calls | {f"two tensors, {name}": call for name, call in apart.items()}


_GATE = CanonicalOp(
    schema="gated_activation(Tensor gate, Tensor? up, *, str kind, bool gate_first=True, bool interleaved=False, "
    "float limit=0.0, float up_offset=0.0) -> Tensor",
    reference=_product,
    fake=_product,
    calls=_calls,
)
GATED_ACTIVATION_QUANTIZE = declare(followed(_GATE, QUANTIZE, _calls, seed=23))
"""(codes, scale). Without up the gate holds both halves, as gate_first and interleaved say, which mean nothing else."""
