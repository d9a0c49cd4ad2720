"""`core::grouped_mlp` in two, four or five launches, by how many pairs of a token and an expert there are.

Few: activated products of each pair, then each token's weighted sum of second products. Many: pairs are sorted by
expert; both products by tiles of one expert's pairs; the weighted sum. Sums are in fp32 and a fixed order, so that a
call gives the same bits each time, and a token the same in any call by `grouped_mlp_alike`, whose tiles do not depend
on their number; what lies between the products is rounded to x's dtype, and of many pairs each
result too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from core.common.ops.implementation import OpCall
from core.common.ops.moe.experts import GROUPED_MLP
from core_cuda.ops import launching
from core_cuda.ops.activation import Gate
from core_cuda.ops.conditions import all_of, dtypes
from core_cuda.ops.moe.grouped_configs import GroupedConfig, GroupedShape, Tile, alike_config, default_config
from core_cuda.ops.moe.grouped_row_kernel import row_down_kernel, row_up_kernel
from core_cuda.ops.moe.grouped_sort import sort_pairs
from core_cuda.ops.moe.grouped_tile_kernel import product_kernel, sum_kernel
from core_cuda.ops.registration import kernel_of
from core_cuda.tuned import winner

MAX_EXPERTS = 1024
MAX_TOP_K = 64
_DTYPES = (torch.bfloat16, torch.float16)
_FEW = 2**18
"""Elements of the result up to which it is cut into smaller parts, so that every multiprocessor has some."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts' weights."""

    #: (E, 2 * I, D), or (E, I, D) without a gate, of any strides
    gate_up: Tensor
    #: (E, D, I), of any strides
    down: Tensor
    #: (E, 2 * I), or (E, I) without a gate
    gate_up_bias: Tensor | None = None
    #: (E, D)
    down_bias: Tensor | None = None
    #: whether the first product is of gate and up, else of up alone
    gated: bool = True


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of the kernels."""

    #: each row is one run of memory
    x: Tensor
    #: contiguous
    weights: Tensor
    #: contiguous
    indices: Tensor
    experts: Experts
    gate: Gate
    shape: GroupedShape
    #: written by the kernels
    out: Tensor


def _grouped_mlp(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gated: bool,
    transposed: bool,
    config_of: Callable[[GroupedShape], GroupedConfig] | None = None,
    **gate: Any,
) -> Tensor:
    """Compute the experts' MLPs as the configuration for these sizes says."""
    if transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    experts = Experts(gate_up, down, gate_up_bias, down_bias, gated)
    config = None if config_of is None else config_of(shape_of(x, indices, experts))
    return run_grouped_mlp(x, weights, indices, experts, Gate(**gate), config=config)


grouped_mlp = kernel_of(GROUPED_MLP)(_grouped_mlp)
grouped_mlp_alike = kernel_of(GROUPED_MLP, "alike")(partial(_grouped_mlp, config_of=alike_config))


def run_grouped_mlp(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    experts: Experts,
    gate: Gate,
    *,
    config: GroupedConfig | None = None,
) -> Tensor:
    """Return (T, D) in x's dtype of x (T, D), weights and indices (T, k); config defaults to `default_config`."""
    out = x.new_empty(x.shape)
    if not out.numel():
        return out
    gate_up_bias, down_bias = (b if b is None else _rows(b) for b in (experts.gate_up_bias, experts.down_bias))
    experts = replace(experts, gate_up_bias=gate_up_bias, down_bias=down_bias)
    shape = shape_of(x, indices, experts)
    call = _Call(_rows(x), weights.contiguous(), indices.contiguous(), experts, gate, shape, out)
    config = config or _measured(shape) or default_config(shape)
    compute = _by_pair if config.kernel == "row" else _by_expert
    compute(call, config)
    return out


def _measured(shape: GroupedShape) -> GroupedConfig | None:
    """Return the fastest configuration measured for this shape on this GPU, or None."""
    _, won = winner("grouped_mlp", asdict(shape), ranged=("tokens",))
    return GroupedConfig(**{**won, "up": Tile(**won["up"]), "down": Tile(**won["down"])}) if won else None


def shape_of(x: Tensor, indices: Tensor, experts: Experts) -> GroupedShape:
    """Return the sizes by which a configuration is chosen."""
    num_experts, hidden, inner = experts.down.shape
    up_columns, down_columns = (w.stride(2) != 1 for w in (experts.gate_up, experts.down))
    return GroupedShape(
        tokens=x.shape[0],
        top_k=indices.shape[1],
        experts=num_experts,
        hidden=hidden,
        inner=inner,
        gated=experts.gated,
        up_columns=up_columns,
        down_columns=down_columns,
    )


def _by_pair(call: _Call, config: GroupedConfig) -> None:
    """Launch the kernels that take a pair at a time."""
    x, indices, experts, shape = call.x, call.indices, call.experts, call.shape
    hidden = x.new_empty((shape.pairs, shape.inner))
    up, down, bias = config.up, config.down, experts.gate_up_bias
    launching.launch(
        row_up_kernel, (shape.pairs * triton.cdiv(shape.inner, up.block_n),),
        x, indices, experts.gate_up, bias, hidden, shape.pairs, shape.experts, shape.inner, shape.hidden, x.stride(0),
        *experts.gate_up.stride(), 0 if bias is None else bias.stride(0),
        TOP_K=shape.top_k, BLOCK_N=up.block_n, BLOCK_K=up.block_k, ROWS=not shape.up_columns,
        HAS_BIAS=bias is not None, **_gate(call.gate, experts.gated), num_warps=up.num_warps,
    )  # fmt: skip
    bias = experts.down_bias
    launching.launch(
        row_down_kernel, (shape.tokens * triton.cdiv(shape.hidden, down.block_n),),
        hidden, call.weights, indices, experts.down, bias, call.out, shape.tokens, shape.experts, shape.hidden,
        shape.inner, *experts.down.stride(), 0 if bias is None else bias.stride(0),
        TOP_K=shape.top_k, PICKS=triton.next_power_of_2(shape.top_k), BLOCK_N=down.block_n, BLOCK_K=down.block_k,
        ROWS=not shape.down_columns, HAS_BIAS=bias is not None, num_warps=down.num_warps,
    )  # fmt: skip


def _by_expert(call: _Call, config: GroupedConfig) -> None:
    """Launch the kernels that sort pairs by expert."""
    x, indices, experts, shape = call.x, call.indices, call.experts, call.shape
    pairs, block_m = shape.pairs, config.block_m
    order, tiles = sort_pairs(indices, shape.experts, block_m)
    hidden, results = x.new_empty((pairs, shape.inner)), x.new_empty((pairs, shape.hidden))

    def product(
        rows: Tensor, matrices: Tensor, bias: Tensor | None, to: Tensor, tile: Tile, group: int, gate: dict[str, Any]
    ) -> None:
        columns, depth = to.shape[1], matrices.shape[2]
        by_rows = matrices.stride(2) == 1
        # One product reads x from shared memory once. Interleaved gates and ups are one anyway; others can be, because
        # rows of a tile may lie anywhere in memory.
        merged = gate["GATED"] and (gate["INTERLEAVED"] or (by_rows and config.merged))
        launching.launch(
            product_kernel, (tiles.shape[0] * triton.cdiv(columns, tile.block_n),),
            rows, matrices, bias, to, order, tiles, columns, depth, rows.stride(0), *matrices.stride(),
            0 if bias is None else bias.stride(0),
            TOP_K=shape.top_k, BLOCK_M=block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SWAP=config.swap,
            GROUP=group, HALVES=config.halves, ROWS=by_rows, MERGED=merged,
            EVEN_N=columns % tile.block_n == 0, EVEN_K=depth % tile.block_k == 0, HAS_BIAS=bias is not None,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **gate,
        )  # fmt: skip

    product(x, experts.gate_up, experts.gate_up_bias, hidden, config.up, config.group, _gate(call.gate, experts.gated))
    product(hidden, experts.down, experts.down_bias, results, config.down, 1, _gate(Gate(""), False))
    width = config.width or (256 if call.out.numel() <= _FEW else 1024)
    launching.launch(
        sum_kernel, (shape.tokens * triton.cdiv(shape.hidden, width),),
        results, call.weights, indices, call.out, shape.experts, shape.hidden,
        TOP_K=shape.top_k, PICKS=triton.next_power_of_2(shape.top_k), BLOCK=width, num_warps=4,
    )  # fmt: skip


def _gate(gate: Gate, gated: bool) -> dict[str, Any]:
    options = {"KIND": gate.kind, "LIMIT": gate.limit, "UP_OFFSET": gate.up_offset, "INTERLEAVED": gate.interleaved}
    return {**options, "GATED": gated}


def _rows(tensor: Tensor) -> Tensor:
    """Return the tensor (rows, columns), each row one run of memory."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _one_dtype(call: OpCall) -> str | None:
    """Refuse products of other dtypes than the matrix units' 16-bit ones, and of two."""
    x = call.args["x"].dtype
    if x not in _DTYPES:
        return f"x is {x}, and the kernels take {', '.join(map(str, _DTYPES))}"
    for name in ("gate_up", "down"):
        if call.args[name].dtype != x:
            return f"x is {x} and {name} {call.args[name].dtype}, and the kernels take one dtype"
    return None


def _layout(call: OpCall) -> str | None:
    """Refuse weights without a contiguous dimension, and more experts than a program counts."""
    for name in ("gate_up", "down"):
        if 1 not in call.args[name].stride()[1:]:
            return f"neither rows nor columns of {name} are one run of memory each"
    num_experts, top_k = call.args["down"].shape[0], call.args["indices"].shape[1]
    if num_experts > MAX_EXPERTS or top_k > MAX_TOP_K:
        return f"{top_k} of {num_experts} experts, and the kernels take up to {MAX_TOP_K} of up to {MAX_EXPERTS}"
    return None


grouped_mlp_condition = all_of(dtypes, _one_dtype, _layout)
"""Why the kernels cannot take a call, or None: dtypes, strides, too many experts."""
