"""`core::grouped_mlp`: the MLPs of a mixture of experts, with a gate or without, weighted and summed for each token.

Shapes: T tokens, E experts, k experts per token, D hidden size, I intermediate size of one expert.

Source: Shazeer et al., arXiv 1701.06538.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, check, check_floating, check_ranks, check_shape
from core.common.ops.declaration import CanonicalOp, declare
from core.common.ops.mlp.activation import ACTIVATIONS, GPT_OSS, check_gate, gated_activation_fused


def grouped_mlp(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    transposed: bool = False,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    **gate: Any,
) -> Tensor:
    """Return (T, D) in x's dtype: for each token the weighted sum of the MLPs of its k experts.

    x (T, D); weights and indices (T, k) as `moe_route` gives them; gate_up (E, 2 * I, D) and down (E, D, I) as
    nn.Linear stores them, or transposed (E, D, 2 * I) and (E, I, D); gate_up_bias (E, 2 * I), down_bias (E, D). gate:
    kind, interleaved, limit and up_offset, as in `core::gated_activation_fused`, and gated: if False, the kind
    activates all that gate_up gives, which is I wide then, as in Nemotron-H. An index outside 0 to E - 1 adds nothing,
    as for experts of another rank. Each expert's MLP is computed and rounded in x's dtype, weighted in the promotion of
    that with weights, and summed over k there.
    """
    matrices = (gate_up, down) if transposed else (gate_up.transpose(1, 2), down.transpose(1, 2))

    def mlp(rows: Tensor, project: _Project) -> Tensor:
        return project(activated(project(rows, matrices[0], gate_up_bias), **gate), matrices[1], down_bias)

    compute = _sorted_by_expert if can_group(x, *matrices) else _every_expert
    return (compute(x, indices, gate_up.shape[0], mlp) * weights[..., None]).sum(1).to(x.dtype)


def activated(hidden: Tensor, *, gated: bool = True, kind: str, **gate: Any) -> Tensor:
    """Return what an expert's second product multiplies, (..., I), from what its first one gives.

    hidden: (..., 2 * I) if gated, else (..., I). The options are those of `grouped_mlp`.
    """
    return gated_activation_fused(hidden, kind=kind, **gate) if gated else ACTIVATIONS[kind](hidden)


_Project = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Multiplies rows by an expert's own of the matrices (E, in, out) and adds its own of the biases (E, out)."""
_Mlp = Callable[[Tensor, _Project], Tensor]


_HOST_KEY = torch._C._dispatch_key_for_device(torch.UntypedStorage(0).device.type)
"""Dispatch key of tensors in the host's memory: a storage lies there unless told otherwise."""


def in_host_memory(device_type: str) -> bool:
    """Tell whether tensors of a device lie in the host's own memory, where reading them waits for nothing."""
    return torch._C._dispatch_key_for_device(device_type) == _HOST_KEY


def can_group(x: Tensor, *matrices: Tensor) -> bool:
    """Tell whether `torch._grouped_mm` takes these, also as fake tensors and while a graph is captured."""
    return not _waits(x.device.type) and x.dtype == torch.bfloat16 and all(_is_aligned(each) for each in matrices)


def _waits(device_type: str) -> bool:
    """Tell whether grouped products wait for the device there: no graph can hold that.

    A device without a kernel of its own gets one that reads the groups' ends on the host, free in the host's memory.
    """
    key = torch._C._dispatch_key_for_device(device_type)
    own = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", key)
    return not in_host_memory(device_type) and not own


# As `torch.compiler.assume_constant_result` does, without its import of Dynamo: a trace asks and does not look inside.
_waits._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_aligned(matrices: Tensor) -> bool:
    """Tell whether matrices (E, in, out) are dense bf16, and start their rows or columns at multiples of 16 bytes."""
    steps = sorted(matrices.stride()[1:])
    dense = steps[0] == 1 < steps[1]
    return matrices.dtype == torch.bfloat16 and dense and steps[1] % 8 == 0 and matrices.shape[1] % 8 == 0


def _sorted_by_expert(x: Tensor, indices: Tensor, num_experts: int, mlp: _Mlp) -> Tensor:
    """Return the experts' results (T, k, D); each expert sees its own tokens only."""
    top_k = indices.shape[1]
    elsewhere = (indices < 0) | (indices >= num_experts)
    experts, order = torch.sort(torch.where(elsewhere, num_experts, indices).flatten(), stable=True)
    ends = torch.searchsorted(experts, torch.arange(num_experts, device=x.device), right=True, out_int32=True)

    def project(rows: Tensor, matrices: Tensor, biases: Tensor | None) -> Tensor:
        out = torch._grouped_mm(rows, matrices, offs=ends)
        return out if biases is None else out + biases[experts.clamp(max=num_experts - 1)]

    rows = mlp(x[order // top_k], project)
    places = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=x.device))
    # Rows of no group hold anything.
    return rows[places].view(*indices.shape, x.shape[1]).masked_fill(elsewhere[..., None], 0.0)


def _every_expert(x: Tensor, indices: Tensor, num_experts: int, mlp: _Mlp) -> Tensor:
    """Return the experts' results (T, k, D); every expert sees every token, as whose own they are is data."""
    slots = x.new_zeros((*indices.shape, x.shape[1]))
    for expert in range(num_experts):
        out = mlp(x, partial(_project, expert=expert))
        slots = torch.where((indices == expert)[..., None], out[:, None], slots)
    return slots


def _project(rows: Tensor, matrices: Tensor, biases: Tensor | None, *, expert: int) -> Tensor:
    out = rows @ matrices[expert]
    return out if biases is None else out + biases[expert]


def _fake(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.new_empty(x.shape)


def _check(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    kind: str,
    gated: bool = True,
    transposed: bool = False,
    interleaved: bool = False,
    limit: float = 0.0,
    up_offset: float = 0.0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> None:
    op = "grouped_mlp"
    check_floating(op, x=x, weights=weights)
    check_gate(op, kind, limit)
    plain = not (interleaved or limit or up_offset)
    check(gated or plain, op, "interleaved, limit and up_offset are of a gate, and gated is False")
    check_ranks(op, 2, x=x, indices=indices)
    check_ranks(op, 3, gate_up=gate_up, down=down)
    check(
        weights.shape == indices.shape and indices.shape[0] == x.shape[0],
        op,
        f"weights {tuple(weights.shape)} and indices {tuple(indices.shape)} must be ({x.shape[0]}, k)",
    )
    whole = indices.dtype in (torch.int32, torch.int64)
    check(whole, op, f"indices must be torch.int32 or torch.int64, not {indices.dtype}")
    experts, size = gate_up.shape[0], x.shape[1]
    inner = down.shape[1 if transposed else 2]
    width = 2 * inner if gated else inner
    shapes = ((experts, size, width), (experts, inner, size))
    expected = shapes if transposed else tuple((e, b, a) for e, a, b in shapes)
    check(
        (tuple(gate_up.shape), tuple(down.shape)) == expected,
        op,
        f"gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)} must be {expected[0]} and {expected[1]} "
        f"for gated={gated} and transposed={transposed}",
    )
    check_shape(op, (experts, width), gate_up_bias=gate_up_bias)
    check_shape(op, (experts, size), down_bias=down_bias)


def _experts(draw: Draw, num_tokens: int, inner: int = 24, **options: Any) -> dict[str, Any]:
    """Return one call with 5 experts, of which the last two get no token."""
    shape, experts = (num_tokens, 2), 5
    indices = draw(num_tokens, 3, dtype=torch.float64).argsort(-1)[:, :2]
    width = 2 * inner if options.get("gated", True) else inner
    gate_up, down = draw(experts, width, 16, scale=0.3), draw(experts, 16, inner, scale=0.3)
    if options.get("transposed"):
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    call = {"x": draw(num_tokens, 16), "weights": draw(*shape).sigmoid(), "indices": indices}
    return {**call, "gate_up": gate_up, "down": down, "kind": "silu", **options}


def _calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return both storage orders, biases, gates and none, wide weights, odd sizes, experts without tokens and the
    reverse."""
    biases = {"gate_up_bias": draw(5, 48), "down_bias": draw(5, 16)}
    ungated: dict[str, Any] = {"gated": False, "kind": "relu2"}
    forms: dict[str, dict[str, Any]] = {
        "qwen3": {},
        "wide weights": {"weights": draw(9, 2, dtype=draw.wide).sigmoid()},
        "gpt-oss": {"interleaved": True, "transposed": True, **GPT_OSS, **biases},
        "transposed": {"transposed": True, "kind": "gelu_tanh"},
        "int32 indices": {"indices": draw(9, 5, dtype=torch.float64).argsort(-1)[:, :2].int()},
        "experts elsewhere": {"indices": draw(9, 9, dtype=torch.float64).argsort(-1)[:, :2] - 2},
        "rows of odd length": {"inner": 13},
        "nemotron-h": ungated,
        "no gate, biases": {**ungated, "gate_up_bias": draw(5, 24), "down_bias": draw(5, 16)},
        "no gate, transposed": {"gated": False, "kind": "silu", "transposed": True, "inner": 13},
    }
    calls = {name: _experts(draw, 9, **options) for name, options in forms.items()}
    one = {"one token": _experts(draw, 1), "one token, no gate": _experts(draw, 1, **ungated)}
    return calls | one | {"no tokens": _experts(draw, 0)}


def _even_indices(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Give the experts the same number of rows each, as far as these go."""
    indices, num_experts = arguments["indices"], arguments["gate_up"].shape[0]
    experts = torch.arange(indices.numel(), device=indices.device) % num_experts
    return {"indices": experts.view_as(indices).to(indices.dtype)}


GROUPED_MLP = declare(
    CanonicalOp(
        schema="grouped_mlp(Tensor x, Tensor weights, Tensor indices, Tensor gate_up, Tensor down, *, str kind, "
        "bool gated=True, bool transposed=False, bool interleaved=False, float limit=0.0, float up_offset=0.0, "
        "Tensor? gate_up_bias=None, Tensor? down_bias=None) -> Tensor",
        reference=grouped_mlp,
        fake=_fake,
        check=_check,
        calls=_calls,
        seed=9,
        costly=True,
        indices=_even_indices,
    )
)
