"""The routed experts of a mixture and, beside them on a second stream, its shared expert: a gated MLP of every token.

Each is what `core::grouped_mlp`, and `core::linear` of `core::gated_linear`, give, in every bit: the same kernels run,
in the same configurations. Only which of them run at a time differs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from core.common.ops.linear.gated import GATED_LINEAR, LINEAR
from core.common.ops.moe.experts import GROUPED_MLP
from core_cuda.ops.beside import run_beside
from core_cuda.ops.linear import products
from core_cuda.ops.moe.grouped_mlp import grouped_mlp
from core_cuda.ops.registration import own_kernel

MOST_TOKENS = 256
"""Tokens up to which two streams are used, not measured: with more, either alone keeps all multiprocessors busy."""

_GATE = "str {0}kind, bool {0}interleaved=False, float {0}limit=0.0, float {0}up_offset=0.0"
_SCHEMA = (
    "experts_beside_shared(Tensor x, Tensor weights, Tensor indices, Tensor gate_up, Tensor down, Tensor shared_x, "
    "Tensor shared_gate_up, Tensor? shared_gate_up_bias, Tensor shared_down, Tensor? shared_down_bias, *, "
    f"{_GATE.format('')}, bool gated=True, bool transposed=False, Tensor? gate_up_bias=None, Tensor? down_bias=None, "
    f"{_GATE.format('shared_')}, bool shared_gate_first=True) -> (Tensor routed, Tensor shared)"
)
PREFIX = "shared_"
"""How the names of the shared expert's options begin; the rest is as `core::gated_linear` has it."""


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of `core::grouped_mlp`, and those of `core::gated_linear`."""
    routed = {name: value for name, value in options.items() if not name.startswith(PREFIX)}
    shared = {name.removeprefix(PREFIX): v for name, v in options.items() if name.startswith(PREFIX)}
    return routed, shared


def _fake(
    x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor, shared_x: Tensor,
    shared_gate_up: Tensor, shared_gate_up_bias: Any, shared_down: Tensor, shared_down_bias: Any, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    of_routed, of_shared = _split(options)
    routed: Tensor = GROUPED_MLP.fake(x, weights, indices, gate_up, down, **of_routed)
    inner = GATED_LINEAR.fake(shared_x, shared_gate_up, shared_gate_up_bias, **of_shared)
    shared: Tensor = LINEAR.fake(inner, shared_down, shared_down_bias)
    return routed, shared


def _reference(*operands: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    x, weights, indices, gate_up, down, shared_x, shared_gate_up, gate_up_bias, shared_down, down_bias = operands
    of_routed, of_shared = _split(options)
    routed: Tensor = GROUPED_MLP.reference(x, weights, indices, gate_up, down, **of_routed)
    inner = GATED_LINEAR.reference(shared_x, shared_gate_up, gate_up_bias, **of_shared)
    shared: Tensor = LINEAR.reference(inner, shared_down, down_bias)
    return routed, shared


@own_kernel(_SCHEMA, _fake, _reference)
def experts_beside_shared(
    x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor, shared_x: Tensor,
    shared_gate_up: Tensor, shared_gate_up_bias: Tensor | None, shared_down: Tensor, shared_down_bias: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (routed, shared): the experts' weighted sum of x (T, D), and the shared expert of shared_x (..., D).

    For calls whose parts the conditions of `core_cuda.ops.moe.grouped_mlp` and `core_cuda.ops.linear.products` take.
    """
    of_routed, of_shared = _split(options)

    def routed() -> Any:
        return grouped_mlp(x, weights, indices, gate_up, down, **of_routed)

    def shared() -> Any:
        inner = products.gated_linear(shared_x, shared_gate_up, shared_gate_up_bias, **of_shared)
        return products.linear(inner, shared_down, shared_down_bias)

    if x.shape[0] > MOST_TOKENS:
        return routed(), shared()
    return run_beside(x.device, routed, shared)
