"""A library with the ops and schemas of `sgl_kernel` for processors and kernels in plain torch, for tests of the fakes.

Results, writes and aliases are those of the library's kernels, as they show from outside, those among them that its
schemas keep quiet about; the arithmetic is the op's, plain and slow, without its tiles and packed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.sgl_kernel.schemas import SCHEMAS

NAMESPACE = "sgl_kernel"
RANKS = 3
"""How many ranks the collectives pretend there are."""


def _norm(x: Tensor, eps: float, weight: Tensor | float = 1.0) -> Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return torch.empty_like(x).copy_(scaled * weight)


def _heads(x: Tensor, head: int, eps: float, weight: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(_norm(x.reshape(-1, head), eps, weight).view(x.shape))


def _gate(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def kernel(input: Tensor) -> Tensor:
        first, second = input.chunk(2, dim=-1)
        return (activation(first.float()) * second).to(input.dtype).contiguous()

    return kernel


def _add_norm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    residual.add_(input)
    input.copy_(_norm(residual, eps, weight))


def _layernorm(input: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return torch.empty_like(input).copy_(F.layer_norm(input, input.shape[-1:], weight, bias, eps))


def _add_layernorm(input: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    residual.add_(input)
    return _layernorm(residual, weight, bias, eps)


def _dual(x: Tensor, residual: Tensor, weight1: Tensor, weight2: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    middle = _norm(x, eps, weight1) + residual
    return _norm(middle, eps, weight2), middle


def _route(scores: Tensor, topk: int, renormalize: bool = False) -> tuple[Tensor, Tensor]:
    weights, ids = scores.float().topk(topk)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    return weights.contiguous(), ids.int()


def _topk(function: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def kernel(x: Tensor, gating: Tensor, topk: int, renormalize: bool, *_: Any) -> tuple[Tensor, Tensor]:
        return _route(function(gating.float()), topk, renormalize)

    return kernel


def _biased(x: Tensor, gating: Tensor, bias: Tensor, topk: int, renormalize: bool, *_: Any) -> tuple[Tensor, Tensor]:
    return _route(gating.float().sigmoid() + bias, topk, renormalize)


def _router(
    cap: float, x: Tensor, weight: Tensor, topk: int, renormalize: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _route((torch.tanh(x.float() @ weight.t() / cap) * cap).softmax(-1), topk)


def _linear(mat1: Tensor, mat2: Tensor, bias: Tensor | None, is_vnni: bool) -> Tensor:
    turned = mat2.dtype == torch.float32 or (not is_vnni and mat2.shape[0] < 16)
    out = mat1.float() @ (mat2.float() if turned else mat2.float().t())
    return (out if bias is None else out + bias).to(mat1.dtype)


def _sigmoid_linear(mat1: Tensor, mat2: Tensor, bias: Tensor | None, is_vnni: bool, factor: Tensor) -> Tensor:
    return (torch.sigmoid(mat1.float() @ mat2) * factor).to(mat1.dtype)


def _quantize(a: Tensor) -> tuple[Tensor, Tensor]:
    scale = a.float().abs().amax(-1) / 127
    return (a.float() / scale[:, None]).round().to(torch.int8), scale


def _int8_mm(
    a: Tensor, b: Tensor, scale1: Tensor, scale2: Tensor, bias: Tensor | None, dtype: torch.dtype, _: bool
) -> Tensor:
    return (a.float() @ b.float().t() * scale1[:, None] * scale2).to(dtype)


def _mm(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype, _: bool) -> Tensor:
    return (a.float() @ b.float().t() * scale).to(dtype)


def _block_mm(a: Tensor, b: Tensor, scale: Tensor, block: list[int], bias: Any, dtype: torch.dtype, _: bool) -> Tensor:
    wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: b.shape[0], : b.shape[1]]
    return (a.float() @ (b.float() * wide).t()).to(dtype)


def _int4_mm(x: Tensor, w: Tensor, zeros: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    columns = (w.float().mean((1, 2, 3))[:, None, None] * scales).mean(1).flatten()
    return (x.float().sum(-1, keepdim=True) * columns).to(x.dtype)


def _mxfp4_mm(mat1: Tensor, mat2: Tensor, scales: Tensor, bias: Tensor | None, is_vnni: bool) -> Tensor:
    return (mat1.float().sum(-1, keepdim=True) * mat2.float().mean(-1)).to(mat1.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.float().chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1).to(x.dtype)


def _rotated(x: Tensor, positions: Tensor, head: int, table: Tensor) -> Tensor:
    cos, sin = table[positions.flatten()].float().chunk(2, dim=-1)
    heads = x.reshape(cos.shape[0], -1, head)
    return torch.empty_like(x).copy_(_turn(heads, cos[:, None], sin[:, None]).view(x.shape))


def _rotary(
    positions: Tensor, query: Tensor, key: Tensor, head: int, table: Tensor, neox: bool
) -> tuple[Tensor, Tensor]:
    return _rotated(query, positions, head, table), _rotated(key, positions, head, table)


def _rotary_in_place(
    positions: Tensor, query: Tensor, key: Tensor, head: int, table: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    query.copy_(_rotated(query, positions, head, table))
    key.copy_(_rotated(key, positions, head, table))
    return query, key


def _vision_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    half = cos.shape[-1] // 2
    for x in (query, key):
        x.copy_(_turn(x, cos[:, None, :half].float(), sin[:, None, :half].float()))
    return query, key


def _experts(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, inplace: bool, *_: Any) -> Tensor:
    out = torch.zeros(x.shape)
    for row, slot in ((row, slot) for row in range(x.shape[0]) for slot in range(ids.shape[1])):
        expert = int(ids[row, slot])
        hidden = _gate(F.silu)(x[row].float() @ w1[expert].float().t())
        out[row] += weights[row, slot] * (hidden @ w2[expert].float().t())
    return x.copy_(out) if inplace else torch.empty_like(x).copy_(out)


def _shared_expert(x: Tensor, w1: Tensor, w2: Tensor, add: Tensor, factor: float, inplace: bool, *_: Any) -> Tensor:
    out = _gate(F.silu)(x.float() @ w1.float().t()) @ w2.float().t() + add * factor
    return x.copy_(out) if inplace else torch.empty_like(x).copy_(out)


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor | None, *_: Any) -> Tensor:
    out = F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight[:, None], groups=x.shape[1])
    if states is not None:
        states.copy_(x[..., -states.shape[-1] :])
    return torch.empty_like(x).copy_(F.silu(out))


def _conv_update(
    x: Tensor, states: Tensor, weight: Tensor, bias: Any, silu: bool, lengths: Any, indices: Tensor, *_: Any
) -> Tensor:
    window = torch.cat((states[indices.long()], x[..., None]), -1)
    states[indices.long()] = window[..., 1:]
    return torch.empty_like(x).copy_(F.silu((window * weight).sum(-1)))


def _decode(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    key: Tensor,
    value: Tensor,
    loc: Tensor,
    logits: Tensor,
    *_: Any,
) -> None:
    k[loc], v[loc] = key, value
    logits.fill_(1.0)
    output.copy_(value.expand_as(output))


def _extend(q: Tensor, k: Tensor, v: Tensor, output: Tensor, *_: Any) -> None:
    output.copy_(v.expand_as(output))


def _mla(x: Tensor, query: Tensor, w_kc: Tensor, rope: int) -> tuple[Tensor, Tensor, Tensor]:
    width = w_kc.shape[1] + rope
    key = x.float().mean(-1)[:, None, None].expand(-1, 1, width).to(x.dtype).contiguous()
    return key.expand(-1, w_kc.shape[0], -1).contiguous(), key, key.narrow(-1, 0, w_kc.shape[1])


def _split(qkvz: Tensor, ba: Tensor, h_qk: int, h_v: int, d_qk: int, d_v: int) -> tuple[Tensor, ...]:
    width = 2 * h_qk * d_qk + h_v * d_v
    b, a = ba.clone().chunk(2, dim=-1)
    return qkvz[:, :width].clone(), qkvz[:, width:].clone().view(-1, h_v, d_v), b.contiguous(), a.contiguous()


def _gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    decay = -A_log.exp() * F.softplus(a.float() + dt_bias)
    return decay[None].contiguous(), b.sigmoid()[None].contiguous()


def _chunked(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor, *_: Any) -> Any:
    state.add_(1.0)
    return (value * beta[..., None]).to(query.dtype).contiguous(), state


def _delta_update(A_log: Tensor, dt: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
                  *_: Any) -> Tensor:  # fmt: skip
    state.add_(1.0)
    return (v * 2).transpose(0, 1).contiguous()


def _gated_heads(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head: int, heads: int
) -> Any:
    q, gate = q_gate.view(-1, heads, 2 * head).split(head, dim=-1)
    normed = (
        _norm(q.reshape(-1, head), eps, q_weight.float() + 1),
        _norm(k.reshape(-1, head), eps, k_weight.float() + 1),
    )
    return *normed, gate.reshape(-1, head).clone()


def _from_stats(q: Tensor, k: Tensor, q_w: Tensor, k_w: Tensor, sums: Tensor, ranks: int, eps: float) -> Any:
    def one(x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        scale = torch.rsqrt(total[:, None] / (x.shape[1] * ranks) + eps)
        return torch.empty_like(x).copy_(x.float() * scale * weight)

    return one(q, q_w, sums[:, 0]), one(k, k_w, sums[:, 1])


def _sums(q: Tensor, k: Tensor) -> Tensor:
    return torch.stack((q.float().square().sum(-1), k.float().square().sum(-1)), -1)


KERNELS: Mapping[str, Callable[..., Any]] = {
    "silu_and_mul_cpu": _gate(F.silu),
    "gelu_tanh_and_mul_cpu": _gate(lambda x: F.gelu(x, approximate="tanh")),
    "gelu_and_mul_cpu": _gate(F.gelu),
    "fused_sigmoid_mul_cpu": lambda x, gate: x.mul_(gate.sigmoid()),
    "rmsnorm_cpu": lambda x, w, eps: _norm(x, eps, w),
    "gemma_rmsnorm_cpu": lambda x, w, eps: _norm(x, eps, w.float() + 1),
    "gemma3_rmsnorm_cpu": lambda x, w, eps: _norm(x, eps, w.float() + 1),
    "gemma4_rmsnorm_cpu": lambda x, w, eps, shift, scaled: _norm(x, eps, w.float() + shift),
    "layernorm_cpu": _layernorm,
    "l2norm_cpu": lambda x, eps: F.normalize(x.float(), eps=eps).to(x.dtype),
    "fused_rmsnorm_gated_cpu": lambda x, w, gate, eps: _norm(x, eps, w) * F.silu(gate),
    "fused_add_rmsnorm_cpu": _add_norm,
    "gemma_fused_add_rmsnorm_cpu": lambda x, r, w, eps: _add_norm(x, r, w.float() + 1, eps),
    "fused_add_layernorm_cpu": _add_layernorm,
    "fused_dual_residual_rmsnorm_cpu": _dual,
    "fused_qk_rmsnorm_cpu": lambda q, k, q_w, k_w, eps: (_norm(q, eps, q_w), _norm(k, eps, k_w)),
    "fused_qk_rmsnorm_sumsq_cpu": _sums,
    "fused_qk_rmsnorm_apply_from_stats_cpu": _from_stats,
    "fused_qk_gemma_rmsnorm_cpu": lambda q, k, q_w, k_w, eps, head: (
        _heads(q, head, eps, q_w.float() + 1),
        _heads(k, head, eps, k_w.float() + 1),
    ),
    "fused_qk_gemma_rmsnorm_with_gate_cpu": _gated_heads,
    "topk_sigmoid_cpu": _topk(torch.sigmoid),
    "topk_softmax_cpu": _topk(lambda x: x.softmax(-1)),
    "grouped_topk_cpu": _topk(lambda x: x.softmax(-1)),
    "biased_grouped_topk_cpu": _biased,
    "fused_moe_router_cpu": _router,
    "decode_attention_cpu": _decode,
    "extend_attention_cpu": _extend,
    "chunk_gated_delta_rule_cpu": _chunked,
    "per_token_quant_int8_cpu": _quantize,
    "int8_scaled_mm_cpu": _int8_mm,
    "int8_scaled_mm_with_quant": _mm,
    "fp8_per_tensor_scaled_mm_cpu": _mm,
    "fp8_scaled_mm_cpu": _block_mm,
    "mxfp4_scaled_mm_cpu": _mxfp4_mm,
    "int4_scaled_mm_cpu": _int4_mm,
    "weight_packed_linear": _linear,
    "fused_linear_sigmoid_mul": _sigmoid_linear,
    "bmm_cpu": lambda out, a, b, *_: out.copy_(a @ b.mT),
    "fused_experts_cpu": _experts,
    "shared_expert_cpu": _shared_expert,
    "qkv_proj_with_rope": lambda x, qa, qb, kva, w_kc, *_: _mla(x, qb, w_kc, kva.shape[0] - w_kc.shape[1]),
    "qkv_proj_with_rope_fused_weight": lambda x, qkv, qb, w_kc, *rest: _mla(x, qb, w_kc, rest[-1]),
    "causal_conv1d_fwd_cpu": _conv,
    "causal_conv1d_update_cpu": _conv_update,
    "shm_allreduce": lambda data, op: data.mul_(RANKS),
    "shm_allgather": lambda data, dim: torch.cat([data] * RANKS, dim),
    "rotary_embedding_cpu": _rotary,
    "apply_rotary_pos_emb_cpu": _vision_rotary,
    "apply_multidimensional_rope_cpu": _vision_rotary,
    "multimodal_rotary_embedding_cpu": _rotary_in_place,
    "fused_sigmoid_gating_delta_rule_update_cpu": _delta_update,
    "fused_gdn_gating_cpu": _gating,
    "fused_qkvzba_split_reshape_cat_cpu": _split,
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": _split,
    "fused_input_proj_cpu": lambda x, qkvz, ba, _: (x @ qkvz.t(), x @ ba.t()),
}
"""Op -> its kernel."""


def _silent(kernel: Callable[..., Any]) -> Callable[..., None]:
    """Return the kernel of an op without results."""

    def run(*args: Any) -> None:
        kernel(*args)

    return run


def kernel_of(schema: str) -> Callable[..., Any]:
    """Return the kernel of the op with that schema."""
    kernel = KERNELS[schema.partition("(")[0]]
    return _silent(kernel) if schema.endswith("()") else kernel


def define(made: torch.library.Library, replaced: Mapping[str, Callable[..., Any]] | None = None) -> None:
    """Define every op in a library, without fakes. replaced: op -> a kernel of another kind."""
    for schema in SCHEMAS:
        name = schema.partition("(")[0]
        made.define(schema)
        made.impl(name, (replaced or {}).get(name) or kernel_of(schema), "CPU")
