"""Fakes of `sgl_kernel`, the kernels of SGLang for processors: what each op returns and writes, as data.

The rules follow the library's schemas and kernels (sgl-project/sglang, kernels/aot/csrc/cpu, 2026). Names of arguments
are those of the schemas; where a version has others, the fake is left out with the reason. What differs from the fakes
that SGLang registers itself: `rotary_embedding_cpu` gives new tensors for rows of rank 2 and 4 as well, and
`layernorm_cpu` and `fused_add_layernorm_cpu` give a tensor, as kernels and schemas do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from core.common.fakes import (
    FakeOp,
    Rule,
    ShapeRule,
    arg,
    computed,
    half_last,
    like,
    new,
    nothing,
    part,
    results,
    with_last,
)
from core.common.fakes import size as of
from core.common.fakes.sizes import Size
from core_cpu.fakes.sgl_kernel_samples import SAMPLES

LIBRARY = "sgl_kernel"
_TILE = 16


def gathered(data: Tensor, dim: int) -> Tensor:
    """Be the rule of `shm_allgather`: the ranks' tensors one after the other along `dim`."""
    if not torch.distributed.is_initialized():
        raise RuntimeError(
            "sgl_kernel::shm_allgather: the number of ranks is that of torch.distributed; start it first"
        )
    sizes = list(data.shape)
    sizes[dim] *= torch.distributed.get_world_size()
    return data.new_empty(sizes)


def columns(mat2: Tensor, is_vnni: bool) -> int:
    """Return the number of a linear's output columns. The weight is (N, K), or (K, N) if tiles do not pay."""
    turned = mat2.dtype == torch.float32 or (not is_vnni and mat2.dim() == 2 and mat2.shape[0] < _TILE)
    return mat2.shape[1] if turned else mat2.shape[0]


def _topk(tokens: str = "hidden_states") -> Rule:
    """Weights and expert numbers (T, topk)."""
    return results(
        new(of(tokens, 0), arg("topk"), like=tokens, dtype=torch.float32),
        new(of(tokens, 0), arg("topk"), like=tokens, dtype=torch.int32),
    )


def _mla(width: Size) -> Rule:
    """Query (T, H, R + P), key (T, 1, R + P), and as value the key's leading R columns: R latent, P rotary."""
    return results(
        new(of("hidden_states", 0), of("w_kc", 0), width, like="hidden_states"),
        new(of("hidden_states", 0), 1, width, like="hidden_states"),
        part(1, of("w_kc", 1)),
    )


_SCALED_MM = new(of("mat1", 0), of("mat2", 0), like="mat1", dtype="out_dtype")
_Q_AND_K = results(like("q"), like("k"))
_BATCH = of("mixed_qkvz", 0)
_QKVZ_BA = results(
    new(
        _BATCH,
        arg("num_heads_qk") * arg("head_qk") * 2 + arg("num_heads_v") * arg("head_v"),
        like="mixed_qkvz",
    ),
    new(_BATCH, arg("num_heads_v"), arg("head_v"), like="mixed_qkvz"),
    new(_BATCH, arg("num_heads_v"), like="mixed_ba"),
    new(_BATCH, arg("num_heads_v"), like="mixed_ba"),
)
_GATED_HEADS = new(of("q_gate", 0) * arg("num_head"), arg("head_dim"), like="q_gate")

RULES: Mapping[str, ShapeRule] = {
    # Writes only.
    "apply_multidimensional_rope_cpu": nothing,
    "bmm_cpu": nothing,
    "decode_attention_cpu": nothing,
    "extend_attention_cpu": nothing,
    "fused_add_rmsnorm_cpu": nothing,
    "fused_sigmoid_mul_cpu": nothing,
    "gemma_fused_add_rmsnorm_cpu": nothing,
    "multimodal_rotary_embedding_cpu": nothing,
    "shm_allreduce": nothing,
    # Like one argument.
    "causal_conv1d_fwd_cpu": like("x"),
    "causal_conv1d_update_cpu": like("x"),
    "fused_add_layernorm_cpu": like("input"),
    "fused_experts_cpu": like("hidden_states"),
    "fused_rmsnorm_gated_cpu": like("input"),
    "gemma3_rmsnorm_cpu": like("input"),
    "gemma4_rmsnorm_cpu": like("input"),
    "gemma_rmsnorm_cpu": like("input"),
    "l2norm_cpu": like("input"),
    "layernorm_cpu": like("input"),
    "rmsnorm_cpu": like("input"),
    "shared_expert_cpu": like("hidden_states"),
    # Half the last dimension.
    "gelu_and_mul_cpu": half_last("input"),
    "gelu_tanh_and_mul_cpu": half_last("input"),
    "silu_and_mul_cpu": half_last("input"),
    # Two like two.
    "apply_rotary_pos_emb_cpu": results(like("query"), like("key")),
    "fused_dual_residual_rmsnorm_cpu": results(like(0), like(0)),
    "fused_qk_gemma_rmsnorm_cpu": _Q_AND_K,
    "fused_qk_rmsnorm_apply_from_stats_cpu": _Q_AND_K,
    "fused_qk_rmsnorm_cpu": _Q_AND_K,
    "rotary_embedding_cpu": results(like("query"), like("key")),
    # Linears and quantisation.
    "fp8_per_tensor_scaled_mm_cpu": _SCALED_MM,
    "fp8_scaled_mm_cpu": _SCALED_MM,
    "int8_scaled_mm_cpu": _SCALED_MM,
    "int8_scaled_mm_with_quant": _SCALED_MM,
    "int4_scaled_mm_cpu": with_last("x", of("w_scales", 0) * of("w_scales", -1)),
    "mxfp4_scaled_mm_cpu": with_last("mat1", of("mat2", 0)),
    "fused_input_proj_cpu": results(
        new(of("hidden_states", 0), of("qkvz_weight", 0), like="hidden_states"),
        new(of("hidden_states", 0), of("ba_weight", 0), like="hidden_states"),
    ),
    "fused_linear_sigmoid_mul": new(of("mat1", 0), of("post_mul_mat", 1), like="mat1"),
    "per_token_quant_int8_cpu": results(
        new(of("A", 0), of("A", 1), like="A", dtype=torch.int8), new(of("A", 0), like="A", dtype=torch.float32)
    ),
    "weight_packed_linear": new(of("mat1", 0), computed(columns, ("mat2", "tensor"), ("is_vnni", "bool")), like="mat1"),
    # Routing.
    "biased_grouped_topk_cpu": _topk(),
    "fused_moe_router_cpu": _topk(),
    "grouped_topk_cpu": _topk(),
    "topk_sigmoid_cpu": _topk(),
    "topk_softmax_cpu": _topk(),
    # Attention with latents; linear attention.
    "chunk_gated_delta_rule_cpu": results(
        new(of("query", 0), of("query", 1), of("value", 2), of("value", 3), like="query"), like("initial_state")
    ),
    "fused_gdn_gating_cpu": results(
        new(1, of("a", 0), of("a", 1), like="a", dtype=torch.float32), new(1, of("a", 0), of("a", 1), like="b")
    ),
    "fused_qk_gemma_rmsnorm_with_gate_cpu": results(
        _GATED_HEADS,
        new(of("k", 0) * (of("k", 1) // arg("head_dim")), arg("head_dim"), like="k"),
        _GATED_HEADS,
    ),
    "fused_qk_rmsnorm_sumsq_cpu": new(of("q", 0), 2, like="q", dtype=torch.float32),
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": _QKVZ_BA,
    "fused_qkvzba_split_reshape_cat_cpu": _QKVZ_BA,
    "fused_sigmoid_gating_delta_rule_update_cpu": new(of("q", 1), of("q", 0), of("v", 2), of("v", 3), like="q"),
    "qkv_proj_with_rope": _mla(of("kv_a_proj_weight", 0)),
    "qkv_proj_with_rope_fused_weight": _mla(of("w_kc", 1) + arg("qk_rope_head_dim")),
    "shm_allgather": gathered,
}
"""Op -> its rule: the ops that SGLang traces through on processors."""

WRITES: Mapping[str, tuple[str, ...]] = {
    "apply_multidimensional_rope_cpu": ("query", "key"),
    "apply_rotary_pos_emb_cpu": ("query", "key"),
    "bmm_cpu": ("out",),
    "causal_conv1d_fwd_cpu": ("conv_states",),
    "causal_conv1d_update_cpu": ("conv_states",),
    "chunk_gated_delta_rule_cpu": ("initial_state",),
    # The second is how the schema of most versions spells the cache of values.
    "decode_attention_cpu": ("k_cache", "v_cahce", "v_cache", "output", "attn_logits"),
    "extend_attention_cpu": ("o_extend",),
    "fused_add_layernorm_cpu": ("residual",),
    "fused_add_rmsnorm_cpu": ("input", "residual"),
    "fused_experts_cpu": ("hidden_states",),
    "fused_sigmoid_gating_delta_rule_update_cpu": ("initial_state_source",),
    "fused_sigmoid_mul_cpu": ("input",),
    "gemma_fused_add_rmsnorm_cpu": ("input", "residual"),
    "multimodal_rotary_embedding_cpu": ("query", "key"),
    "shared_expert_cpu": ("hidden_states",),
    "shm_allreduce": ("data",),
}
"""Op -> what its kernel writes, declared by the schema or not; of the experts, only with `inplace`."""

SGL_KERNEL = tuple(
    FakeOp(
        op=f"{LIBRARY}::{name}",
        rule=RULES[name],
        samples=SAMPLES[name],
        also_writes=WRITES.get(name, ()),
        changes=True,
    )
    for name in sorted(RULES)
)
