"""Calls of `sgl_kernel`'s ops, on which its fakes are compared with its kernels: small, bf16, of odd token counts.

Sizes are such as the kernels take: head sizes of 64, widths in multiples of 32. Legend: T tokens, H heads, D head size,
K and N in and out features, E experts, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw
from core.common.ops.declaration import Sample

Calls = Callable[[Draw], Mapping[str, Mapping[str, Any]]]

_T, _H, _D, _K, _N, _E, _I = 7, 2, 64, 64, 96, 8, 64
_EPS = 1e-5


def _wide(draw: Draw, rows: int, width: int) -> Tensor:
    """Return rows that lie in rows twice as wide."""
    return draw(rows, 2 * width)[:, :width]


def _ints(draw: Draw, values: object, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=draw.device)


def _gated(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    return {
        "odd rows": {"input": draw(_T, 2 * _I)},
        "rank 3": {"input": draw(2, 3, 2 * _I)},
        "no tokens": {"input": draw(0, 2 * _I)},
    }


def _norm(draw: Draw, **more: Any) -> Mapping[str, Mapping[str, Any]]:
    rest = {"weight": draw(_K), "eps": _EPS, **more}
    return {
        "odd rows": {"input": draw(_T, _K), **rest},
        "wider rows": {"input": _wide(draw, _T, _K), **rest},
    }


def _added_norm(draw: Draw, **more: Any) -> Mapping[str, Mapping[str, Any]]:
    rest = {"residual": draw(_T, _K), "weight": draw(_K), "eps": _EPS, **more}
    return {"odd rows": {"input": draw(_T, _K), **rest}}


def _layer_norm(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    norm = {name.replace("rows", "rows and bias"): call for name, call in _norm(draw, bias=draw(_K)).items()}
    return {**_norm(draw, bias=None), **norm}


def _gated_norm(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    return {"odd rows": {"input": draw(_T, _D), "weight": draw(_D), "gate": draw(_T, _D), "eps": _EPS}}


def _qk_norm(draw: Draw, **more: Any) -> Mapping[str, Mapping[str, Any]]:
    rest = {"q_weight": draw(2 * _K), "k_weight": draw(_K), "eps": _EPS, **more}
    joined = draw(_T, 4 * _K)
    return {
        "odd rows": {"q": draw(_T, 2 * _K), "k": draw(_T, _K), **rest},
        "parts of one projection": {"q": joined[:, : 2 * _K], "k": joined[:, 2 * _K : 3 * _K], **rest},
    }


def _heads_norm(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rest = {"q_weight": draw(_D), "k_weight": draw(_D), "eps": _EPS, "head_dim": _D}
    return {"odd rows": {"q": draw(_T, _H * _D), "k": draw(_T, _D), **rest}}


def _gated_heads_norm(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rest = {"q_weight": draw(_D), "k_weight": draw(_D), "eps": _EPS, "head_dim": _D, "num_head": _H}
    return {"odd rows": {"q_gate": draw(_T, _H * _D * 2), "k": draw(_T, _D), **rest}}


def _rotary(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rest = {"positions": _ints(draw, range(_T)), "head_size": _D, "cos_sin_cache": draw(16, _D)}
    return {
        "rows": {"query": draw(_T, _H * _D), "key": draw(_T, _D), "is_neox": True, **rest},
        "heads": {"query": draw(_T, _H, _D), "key": draw(_T, 1, _D), "is_neox": False, **rest},
        "batch": {"query": draw(1, _T, _H, _D), "key": draw(1, _T, 1, _D), "is_neox": True, **rest},
    }


def _vision_rotary(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    tables = {"cos": draw(_T, _D), "sin": draw(_T, _D)}
    return {"heads": {"query": draw(_T, _H, _D), "key": draw(_T, _H, _D), **tables}}


def _multimodal_rotary(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rest = {"head_size": _D, "cos_sin_cache": draw(16, _D), "mrope_interleaved": False, "is_neox": True}
    rows = {"query": draw(_T, _H * _D), "key": draw(_T, _D)}
    return {"text": {"positions": _ints(draw, range(_T)), **rows, **rest, "mrope_section": None}}


def _topk(draw: Draw, **more: Any) -> Mapping[str, Mapping[str, Any]]:
    rest = {"topk": 2, "renormalize": True, **more}
    return {"odd rows": {"hidden_states": draw(_T, _K), "gating_output": draw(_T, _E), **rest}}


def _grouped_topk(draw: Draw, **more: Any) -> Mapping[str, Mapping[str, Any]]:
    groups = {"num_expert_group": 4, "topk_group": 2, "num_fused_shared_experts": 0}
    return _topk(draw, **groups, routed_scaling_factor=None, num_token_non_padded=None, **more)


def _router(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    weight = draw(_E, _K, dtype=torch.float32)
    rest = {"topk": 2, "renormalize": False, "moe_softcapping": 30.0, "correction_bias": None}
    return {"odd rows": {"hidden_states": draw(_T, _K), "gating_output": weight, **rest}}


def _linear(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rest = {"mat1": draw(_T, _K), "is_vnni": False}
    return {
        "odd rows": {"mat2": draw(_N, _K), "bias": None, **rest},
        "bias": {"mat2": draw(_N, _K), "bias": draw(_N, dtype=torch.float32), **rest},
        "fewer rows than a tile": {"mat1": draw(_T, 8), "mat2": draw(8, 3), "bias": None, "is_vnni": False},
    }


def _codes(draw: Draw, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    return (draw(*shape, dtype=torch.float32) * 20).clamp(-100, 100).to(dtype)


def _scaled_mm(draw: Draw, kind: str) -> Mapping[str, Mapping[str, Any]]:
    scales = draw(_N, dtype=torch.float32, shift=3.0)
    rest = {"bias": None, "out_dtype": torch.bfloat16, "is_vnni": False}
    fp8 = _codes(draw, _N, _K, dtype=torch.float8_e4m3fn)
    calls: Mapping[str, Mapping[str, Any]] = {
        "int8": {
            "mat1": _codes(draw, _T, _K).view(torch.uint8), "mat2": _codes(draw, _N, _K), "scales2": scales,
            "scales1": draw(_T, dtype=torch.float32, shift=3.0), **rest,
        },
        "quantised": {"mat1": draw(_T, _K), "mat2": _codes(draw, _N, _K), "scales2": scales, **rest},
        "blocks": {
            "mat1": draw(_T, _K), "mat2": fp8, "block_size": [32, 32],
            "scales2": draw(3, 2, dtype=torch.float32), **rest,
        },
        "tensor": {"mat1": draw(_T, _K), "mat2": fp8, "scale2": draw(1, dtype=torch.float32), **rest},
    }  # fmt: skip
    return {f"{kind}, odd rows": calls[kind]}


def _mxfp4(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    codes, scales = _codes(draw, _N, _K // 2).view(torch.uint8), _codes(draw, _N, _K // 32).view(torch.uint8)
    rest = {"mat2": codes, "scales2": scales, "bias": None, "is_vnni": False}
    return {"odd rows": {"mat1": draw(_T, _K), **rest}}


def _int4(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    # (N / 32, groups, 32), as packed by the library: blocks of 32 columns.
    blocks, groups = _N // 32, 2
    packed = {
        "w": _codes(draw, blocks, groups, _K // groups, 16).view(torch.uint8),
        "w_zeros": _codes(draw, blocks, groups, 32), "w_scales": draw(blocks, groups, 32, dtype=torch.float32),
        "bias": None,
    }  # fmt: skip
    return {"odd rows": {"x": draw(_T, _K), **packed}, "rank 3": {"x": draw(2, 3, _K), **packed}}


def _experts(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    weights = {"w1": draw(_E, 2 * _I, _K), "w2": draw(_E, _K, _I)}
    routed = {
        "topk_weights": draw(_T, 2, dtype=torch.float32).softmax(-1),
        "topk_ids": _ints(draw, [[row % _E, (row + 1) % _E] for row in range(_T)], torch.int32),
    }
    none = ("w1_scale", "w2_scale", "w1_zero", "w2_zero", "block_size", "w1_bias", "w2_bias", "alpha", "limit")
    rest = {**dict.fromkeys(none), "moe_comp_method": 0, "is_vnni": False}
    return {"not in place": {"hidden_states": draw(_T, _K), **weights, **routed, "inplace": False, **rest}}


def _shared_expert(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rest = {"w1": draw(2 * _I, _K), "w2": draw(_K, _I), "fused_experts_out": draw(_T, _K), "routed_scaling_factor": 2.0}
    flags = {"use_int8_w8a8": False, "use_fp8_w8a16": False, "is_vnni": False}
    none = dict.fromkeys(("w1_scale", "w2_scale", "block_size"))
    return {"not in place": {"hidden_states": draw(_T, _K), **rest, **flags, **none, "inplace": False}}


def _conv(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    none = dict.fromkeys(("bias", "query_start_loc", "cache_indices", "has_initial_state"))
    rest = {"weight": draw(_K, 4), "conv_states": None, "silu_activation": True, "pad_slot_id": -1, "is_vnni": False}
    return {"columns of tokens": {"x": draw(1, _T, _K).transpose(1, 2), **none, **rest}}


def _conv_update(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    none = dict.fromkeys(("bias", "cache_seqlens"))
    rest = {"weight": draw(_K, 4), "silu_activation": True, "pad_slot_id": -1, "is_vnni": False}
    states = {"conv_states": draw(4, 3, _K).transpose(1, 2), "conv_state_indices": _ints(draw, [2, 0, 3], torch.int32)}
    return {"three sequences": {"x": draw(3, _K), **states, **none, **rest}}


def _decode(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rows = {"query": draw(2, _H, _D), "output": draw(2, _H, _D), "key": draw(2, 1, _D), "value": draw(2, 1, _D)}
    caches = {"k_cache": draw(16, 1, _D), "v_cahce": draw(16, 1, _D), "loc": _ints(draw, [3, 9])}
    return {"two sequences": {
        **rows, **caches, **_pages(draw), "attn_logits": draw(2, _H, 8, _D + 1, dtype=torch.float32),
        "sm_scale": 0.125, "logit_cap": 0.0, **_attention_rest(),
    }}  # fmt: skip


def _extend(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    new = {"q_extend": draw(3, _H, _D), "k_extend": draw(3, 1, _D), "v_extend": draw(3, 1, _D)}
    caches = {"o_extend": draw(3, _H, _D), "k_buffer": draw(16, 1, _D), "v_buffer": draw(16, 1, _D)}
    lengths = {"extend_seq_lens": _ints(draw, [2, 1]), "extend_start_loc": _ints(draw, [0, 2]), "max_len_extend": 2}
    return {"two sequences": {
        **new, **caches, **_pages(draw), **lengths, "sm_scale": 0.125, "logit_cap": 0.0, **_attention_rest(),
        "tree_mask": None,
    }}  # fmt: skip


def _pages(draw: Draw) -> Mapping[str, Any]:
    slots = _ints(draw, [[1, 2, 3, 0], [7, 8, 9, 0]], torch.int32)
    return {"req_to_token": slots, "req_pool_indices": _ints(draw, [0, 1]), "seq_lens": _ints(draw, [3, 3])}


def _attention_rest() -> Mapping[str, Any]:
    return {"is_cross_attn": False, "sliding_window_size": -1, "encoder_lens": None, "sinks": None}


def _mla(draw: Draw, fused: bool) -> Mapping[str, Mapping[str, Any]]:
    latent, q_latent, rope = 64, 96, 32
    down = draw(q_latent + latent + rope, _K)
    projections = (
        {"qkv_a_proj_weight": down, "qkv_a_proj_scale": None, "q_lora_rank": q_latent, "kv_lora_rank": latent,
         "qk_rope_head_dim": rope}
        if fused
        else {"q_a_proj_weight": down[:q_latent], "kv_a_proj_weight": down[q_latent:], "q_a_proj_scale": None,
              "kv_a_proj_scale": None}
    )  # fmt: skip
    norms = {"q_a_layernorm_weight": draw(q_latent), "kv_a_layernorm_weight": draw(latent), "eps": _EPS}
    rest = {
        "q_b_proj_weight": draw(_H * (_D + rope), q_latent), "q_b_proj_scale": None, "w_kc": draw(_H, latent, _D),
        "positions": _ints(draw, range(_T)), "cos_sin_cache": draw(16, rope), "w_scale": None, "block_size": None,
        "use_int8_w8a8": False, "use_fp8_w8a16": False, "is_vnni": False,
    }  # fmt: skip
    return {"odd rows": {"hidden_states": draw(_T, _K), **projections, **norms, **rest}}


def _gating(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    heads = {"A_log": draw(_H, dtype=torch.float32), "dt_bias": draw(_H)}
    return {"odd rows": {**heads, "a": draw(_T, _H), "b": draw(_T, _H)}}


def _chunked(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rows = {"query": draw(1, _T, 1, _D), "key": draw(1, _T, 1, _D), "value": draw(1, _T, _H, _D)}
    gates = {"g": -draw(1, _T, _H, dtype=torch.float32).abs(), "beta": draw(1, _T, _H).sigmoid()}
    state = {"initial_state": draw(2, _H, _D, _D, dtype=torch.float32), "output_final_state": True}
    rest = {"cu_seqlens": _ints(draw, [0, _T], torch.int32), "initial_state_indices": _ints(draw, [1], torch.int32)}
    flags = {"head_first": False, "use_qk_l2norm_in_kernel": True, "eps": 1e-6}
    return {"one sequence": {**rows, **gates, **state, **rest, **flags}}


def _delta_update(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rows = {"q": draw(1, 3, 1, _D), "k": draw(1, 3, 1, _D), "v": draw(1, 3, _H, _D)}
    state = {"initial_state_source": draw(4, _H, _D, _D, dtype=torch.float32), "use_qk_l2norm_in_kernel": True}
    where = {
        "initial_state_indices": _ints(draw, [2, 0, 3], torch.int32),
        "cu_seqlens": _ints(draw, range(4), torch.int32),
    }
    gates = {"A_log": draw(_H, dtype=torch.float32), "dt_bias": draw(_H), "a": draw(3, _H), "b": draw(3, _H)}
    return {"three sequences": {**rows, **state, **where, **gates, "softplus_beta": 1.0, "softplus_threshold": 20.0}}


def _qkvz_ba(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    heads = {"num_heads_qk": 1, "num_heads_v": _H, "head_qk": _D, "head_v": _D}
    return {"odd rows": {"mixed_qkvz": draw(_T, 2 * _D + 2 * _H * _D), "mixed_ba": draw(_T, 2 * _H), **heads}}


_CALLS: Mapping[str, Calls] = {
    "apply_multidimensional_rope_cpu": _vision_rotary,
    "apply_rotary_pos_emb_cpu": _vision_rotary,
    "biased_grouped_topk_cpu": lambda draw: _grouped_topk(draw, correction_bias=draw(_E, dtype=torch.float32)),
    "bmm_cpu": lambda draw: {"odd rows": {
        "out": draw(2, _T, _N), "mat1": draw(2, _T, _K), "mat2": draw(2, _N, _K), "is_vnni": False, "scale": None,
    }},
    "causal_conv1d_fwd_cpu": _conv,
    "causal_conv1d_update_cpu": _conv_update,
    "chunk_gated_delta_rule_cpu": _chunked,
    "decode_attention_cpu": _decode,
    "extend_attention_cpu": _extend,
    "fp8_per_tensor_scaled_mm_cpu": partial(_scaled_mm, kind="tensor"),
    "fp8_scaled_mm_cpu": partial(_scaled_mm, kind="blocks"),
    "fused_add_layernorm_cpu": partial(_added_norm, bias=None),
    "fused_add_rmsnorm_cpu": _added_norm,
    "fused_dual_residual_rmsnorm_cpu": lambda draw: {"odd rows": {
        "x": draw(_T, _K), "residual": draw(_T, _K), "weight1": draw(_K), "weight2": draw(_K), "eps": _EPS,
    }},
    "fused_experts_cpu": _experts,
    "fused_gdn_gating_cpu": _gating,
    "fused_input_proj_cpu": lambda draw: {"odd rows": {
        "hidden_states": draw(_T, _K), "qkvz_weight": draw(_N, _K), "ba_weight": draw(32, _K), "is_vnni": False,
    }},
    "fused_linear_sigmoid_mul": lambda draw: {"odd rows": {
        "mat1": draw(_T, _K), "mat2": draw(_K, 1, dtype=torch.float32), "bias": None, "is_vnni": True,
        "post_mul_mat": draw(_T, _N),
    }},
    "fused_moe_router_cpu": _router,
    "fused_qk_gemma_rmsnorm_cpu": _heads_norm,
    "fused_qk_gemma_rmsnorm_with_gate_cpu": _gated_heads_norm,
    "fused_qk_rmsnorm_apply_from_stats_cpu": lambda draw: _qk_norm(
        draw, sum_sq=draw(_T, 2, dtype=torch.float32, shift=9.0), tp_world_size=2
    ),
    "fused_qk_rmsnorm_cpu": _qk_norm,
    "fused_qk_rmsnorm_sumsq_cpu": lambda draw: {"odd rows": {"q": draw(_T, 2 * _K), "k": draw(_T, _K)}},
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": _qkvz_ba,
    "fused_qkvzba_split_reshape_cat_cpu": _qkvz_ba,
    "fused_rmsnorm_gated_cpu": _gated_norm,
    "fused_sigmoid_gating_delta_rule_update_cpu": _delta_update,
    "fused_sigmoid_mul_cpu": lambda draw: {"odd rows": {"input": draw(_T, _K), "gate": draw(_T, _K)}},
    "gelu_and_mul_cpu": _gated,
    "gelu_tanh_and_mul_cpu": _gated,
    "gemma3_rmsnorm_cpu": _norm,
    "gemma4_rmsnorm_cpu": partial(_norm, scale_shift=0.0, with_scale=True),
    "gemma_fused_add_rmsnorm_cpu": _added_norm,
    "gemma_rmsnorm_cpu": _norm,
    "grouped_topk_cpu": _grouped_topk,
    "int4_scaled_mm_cpu": _int4,
    "int8_scaled_mm_cpu": partial(_scaled_mm, kind="int8"),
    "int8_scaled_mm_with_quant": partial(_scaled_mm, kind="quantised"),
    "l2norm_cpu": lambda draw: {"odd rows": {"input": draw(_T, _D), "eps": _EPS}},
    "layernorm_cpu": _layer_norm,
    "multimodal_rotary_embedding_cpu": _multimodal_rotary,
    "mxfp4_scaled_mm_cpu": _mxfp4,
    "per_token_quant_int8_cpu": lambda draw: {"odd rows": {"A": draw(_T, _K)}},
    "qkv_proj_with_rope": partial(_mla, fused=False),
    "qkv_proj_with_rope_fused_weight": partial(_mla, fused=True),
    "rmsnorm_cpu": _norm,
    "rotary_embedding_cpu": _rotary,
    "shared_expert_cpu": _shared_expert,
    "shm_allgather": lambda draw: {
        "rows": {"data": draw(_T, _K), "dim": 0}, "columns": {"data": draw(_T, _K), "dim": 1},
    },
    "shm_allreduce": lambda draw: {"odd rows": {"data": draw(_T, _K), "reduce_op": 0}},
    "silu_and_mul_cpu": _gated,
    "topk_sigmoid_cpu": partial(_topk, correction_bias=None),
    "topk_softmax_cpu": partial(_topk, correction_bias=None),
    "weight_packed_linear": _linear,
}  # fmt: skip


def _samples(device: torch.device, *, calls: Calls) -> Iterator[Sample]:
    for name, kwargs in calls(Draw(torch.bfloat16, device)).items():
        yield Sample(name=name, kwargs=kwargs)


SAMPLES: Mapping[str, Callable[[torch.device], Iterator[Sample]]] = {
    name: partial(_samples, calls=calls) for name, calls in _CALLS.items()
}
"""Op -> device -> calls, arguments by the names of the newest schema known."""
