"""A mixture of experts: the choice of experts by a fused top-k, and their MLPs as grouped products.

Shapes: T tokens, E experts, k experts per token, D hidden size, I intermediate size of one expert, G expert groups.
Experts' rows are sorted, multiplied group by group and put back weighted; the numbers of rows stay on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.implementation import OpCall
from core.common.ops.moe.experts import activated
from core_npu.ops.activation import gate, gate_refusal
from core_npu.ops.conditions import dtypes, same_dtype

__all__ = ["grouped_mlp", "grouped_mlp_condition", "moe_route", "moe_route_condition"]

MAX_EXPERTS, MAX_CHOSEN = 2048, 1024
GROUP_STEP = 32
"""To multiples of which `npu_moe_gating_top_k` fills up the experts of a group."""

MAX_GROUPED_EXPERTS, MAX_GROUPED_SIZE = 1024, 65535

_SOFTMAX, _SIGMOID = 0, 1
_SCORES = {1: 0, 2: 1}
"""How many scores of a group its own score is the sum of -> mode of the kernel."""

_ROW_ORDER = 2
"""Mode of `npu_moe_finalize_routing`: nothing was dropped, and rows are numbered token by token."""


def moe_route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    renormalize: bool = False,
    renormalize_eps: float = 0.0,
    scale: float = 1.0,
    num_groups: int = 0,
    top_groups: int = 0,
    scored_per_group: int = 2,
    out_dtype: torch.dtype | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Do what `core::moe_route` does, for calls that `moe_route_condition` lets pass."""
    # Weights have the dtype of what the kernel reads.
    x = logits.to(out_dtype or logits.dtype).contiguous()
    npu = torch.ops.npu
    if not x.numel():
        shape = (x.shape[0], top_k)
        return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
    if _is_plain_softmax(scoring, bias, scale, num_groups):
        # The softmax of the chosen logits is that of all, divided by its sum over the chosen.
        chosen = renormalize or scoring == "softmax_selected"
        weights, indices, _softmax = npu.npu_moe_gating_top_k_softmax_v2(x, k=top_k, renorm=int(chosen))
    else:
        weights, indices, _scores = npu.npu_moe_gating_top_k(
            x,
            top_k,
            bias=None if bias is None else bias.to(x.dtype),
            k_group=top_groups or 1,
            group_count=num_groups or 1,
            group_select_mode=_SCORES[scored_per_group] if num_groups else 0,
            norm_type=_SIGMOID if scoring == "sigmoid" else _SOFTMAX,
            routed_scaling_factor=scale,
            eps=renormalize_eps,
        )
    return weights, indices.long()


def _is_plain_softmax(scoring: str, bias: Tensor | None, scale: float, num_groups: int) -> bool:
    return scoring != "sigmoid" and bias is None and scale == 1.0 and not num_groups


def moe_route_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::moe_route`, or None."""
    args = call.args
    logits, scoring, compute = args["logits"], args["scoring"], args["compute_dtype"]
    if scoring == "sqrtsoftplus":
        return "scoring is 'sqrtsoftplus', and the kernels know softmax and sigmoid"
    if compute not in (None, torch.float32, logits.dtype):
        return f"compute_dtype is {compute}, and the kernel computes in torch.float32"
    if args["out_dtype"] not in (None, torch.float32, logits.dtype):
        return f"out_dtype is {args['out_dtype']} and logits {logits.dtype}, and the kernel has one dtype for both"
    experts = logits.shape[1]
    if experts > MAX_EXPERTS or args["top_k"] > MAX_CHOSEN:
        return f"{args['top_k']} of {experts} experts: the kernel takes {MAX_CHOSEN} of {MAX_EXPERTS}"
    return dtypes(("logits",))(call) or _scoring_condition(call)


def _scoring_condition(call: OpCall) -> str | None:
    args = call.args
    scoring, groups = args["scoring"], args["num_groups"]
    if _is_plain_softmax(scoring, args["bias"], args["scale"], groups):
        plain = not (args["renormalize_eps"] or (args["renormalize"] and scoring == "softmax_selected"))
        return None if plain else "weights are divided once more, and the kernel does it once without an epsilon"
    if scoring == "softmax_selected":
        return "the softmax of the chosen alone goes with a bias, a scale or groups, and no kernel has both"
    if (scoring == "sigmoid") != args["renormalize"]:
        return (
            f"scoring is {scoring!r} and renormalize {args['renormalize']}: the kernel divides sigmoids alone, always"
        )
    # Without groups all experts are one.
    num_groups = groups or 1
    size = args["logits"].shape[1] // num_groups
    if groups and args["scored_per_group"] not in _SCORES:
        return f"a group's score is the sum of {args['scored_per_group']}, and the kernel takes 1 or 2"
    if size <= 2 or -(-size // GROUP_STEP) * GROUP_STEP * num_groups > MAX_EXPERTS:
        most = f"more than 2, and {MAX_EXPERTS} in all, groups filled up to multiples of {GROUP_STEP}"
        found = f"{groups} groups have {size} experts each" if groups else f"there are {size} experts"
        return f"{found}, and the kernel takes {most}"
    return None


def grouped_mlp(
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
    **_: Any,
) -> Tensor:
    """Do what `core::grouped_mlp` does, for calls that `grouped_mlp_condition` lets pass."""
    if not x.numel():
        return x.new_empty(x.shape)
    npu, experts = torch.ops.npu, gate_up.shape[0]
    matrices = (gate_up, down) if transposed else (gate_up.transpose(1, 2), down.transpose(1, 2))
    # An index of an absent expert adds nothing. The kernels accept no such index, so assign it to some expert with
    # weight zero.
    own = indices.clamp(0, experts - 1)
    foreign = own != indices
    factors = weights.masked_fill(foreign, 0.0)
    rows, places, ends, _scale = npu.npu_moe_init_routing_v2(
        x.contiguous(),
        own.to(torch.int32),
        active_num=indices.numel(),
        expert_num=experts,
        expert_tokens_num_type=0,
        expert_tokens_num_flag=True,
        active_expert_range=[0, experts],
        row_idx_type=0,
    )
    hidden = _project(rows, matrices[0], ends)
    options: dict[str, Any] = {"kind": kind, "interleaved": interleaved, "limit": limit, "up_offset": up_offset}
    by_kernel = gated and gate_refusal(**options) is None
    hidden = gate(hidden, **options) if by_kernel else activated(hidden, gated=gated, **options)
    results = _project(hidden.contiguous(), matrices[1], ends)
    # The weight zero times an overflow would not be zero.
    unasked = foreign.new_zeros(foreign.numel()).scatter(0, places.long(), foreign.reshape(-1))
    results = results.masked_fill(unasked[:, None], 0.0)
    # Weighted and summed in the wider of the two dtypes, as the op has it.
    wide = torch.promote_types(results.dtype, factors.dtype)
    summed = npu.npu_moe_finalize_routing(
        results.to(wide), None, None, None, factors.to(wide), places, None, drop_pad_mode=_ROW_ORDER
    )
    return summed.to(x.dtype)  # type: ignore[no-any-return]  # torch.ops is untyped


def _project(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply sorted rows (R, in) by their experts' own of the matrices (E, in, out); ends (E,) of each one's rows."""
    (out,) = torch.ops.npu.npu_grouped_matmul(
        [rows], [matrices], group_list=ends, split_item=3, group_type=0, group_list_type=0
    )
    return out  # type: ignore[no-any-return]  # torch.ops is untyped


def grouped_mlp_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::grouped_mlp`, or None."""
    args = call.args
    if args["gate_up_bias"] is not None or args["down_bias"] is not None:
        return "experts have biases, and the kernel takes none with the matrices of all experts in one tensor"
    experts, *sizes = args["gate_up"].shape
    if experts > MAX_GROUPED_EXPERTS or max(*sizes, args["x"].shape[1]) > MAX_GROUPED_SIZE:
        return (
            f"gate_up is {tuple(args['gate_up'].shape)}: the kernel takes {MAX_GROUPED_EXPERTS} of {MAX_GROUPED_SIZE}"
        )
    return dtypes(("x", "weights"))(call) or same_dtype("x", "gate_up", "down")(call)
