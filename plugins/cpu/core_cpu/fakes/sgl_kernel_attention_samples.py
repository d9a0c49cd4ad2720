"""Calls of `sgl_kernel`'s ops of attention, linear attention included: projections, rotary embedding, convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from core.common.ops.arguments import Draw
from core.common.ops.declaration import Calls
from core_cpu.fakes.sgl_kernel_draws import EPS, D, H, K, T, ints


def _rotary(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rest = {"positions": ints(draw, range(T)), "head_size": D, "cos_sin_cache": draw(16, D)}
    return {
        "rows": {"query": draw(T, H * D), "key": draw(T, D), "is_neox": True, **rest},
        "heads": {"query": draw(T, H, D), "key": draw(T, 1, D), "is_neox": False, **rest},
        "batch": {"query": draw(1, T, H, D), "key": draw(1, T, 1, D), "is_neox": True, **rest},
    }


def _vision_rotary(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    tables = {"cos": draw(T, D), "sin": draw(T, D)}
    return {"heads": {"query": draw(T, H, D), "key": draw(T, H, D), **tables}}


def _multimodal_rotary(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rest = {"head_size": D, "cos_sin_cache": draw(16, D), "mrope_interleaved": False, "is_neox": True}
    rows = {"query": draw(T, H * D), "key": draw(T, D)}
    return {"text": {"positions": ints(draw, range(T)), **rows, **rest, "mrope_section": None}}


def _conv(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    none = dict.fromkeys(("bias", "query_start_loc", "cache_indices", "has_initial_state"))
    rest = {"weight": draw(K, 4), "conv_states": None, "silu_activation": True, "pad_slot_id": -1, "is_vnni": False}
    return {"columns of tokens": {"x": draw(1, T, K).transpose(1, 2), **none, **rest}}


def _conv_update(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    none = dict.fromkeys(("bias", "cache_seqlens"))
    rest = {"weight": draw(K, 4), "silu_activation": True, "pad_slot_id": -1, "is_vnni": False}
    states = {"conv_states": draw(4, 3, K).transpose(1, 2), "conv_state_indices": ints(draw, [2, 0, 3], torch.int32)}
    return {"three sequences": {"x": draw(3, K), **states, **none, **rest}}


def _decode(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rows = {"query": draw(2, H, D), "output": draw(2, H, D), "key": draw(2, 1, D), "value": draw(2, 1, D)}
    caches = {"k_cache": draw(16, 1, D), "v_cahce": draw(16, 1, D), "loc": ints(draw, [3, 9])}
    return {"two sequences": {
        **rows, **caches, **_pages(draw), "attn_logits": draw(2, H, 8, D + 1, dtype=torch.float32),
        "sm_scale": 0.125, "logit_cap": 0.0, **_attention_rest(),
    }}  # fmt: skip


def _extend(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    new = {"q_extend": draw(3, H, D), "k_extend": draw(3, 1, D), "v_extend": draw(3, 1, D)}
    caches = {"o_extend": draw(3, H, D), "k_buffer": draw(16, 1, D), "v_buffer": draw(16, 1, D)}
    lengths = {"extend_seq_lens": ints(draw, [2, 1]), "extend_start_loc": ints(draw, [0, 2]), "max_len_extend": 2}
    return {"two sequences": {
        **new, **caches, **_pages(draw), **lengths, "sm_scale": 0.125, "logit_cap": 0.0, **_attention_rest(),
        "tree_mask": None,
    }}  # fmt: skip


def _pages(draw: Draw) -> Mapping[str, Any]:
    slots = ints(draw, [[1, 2, 3, 0], [7, 8, 9, 0]], torch.int32)
    return {"req_to_token": slots, "req_pool_indices": ints(draw, [0, 1]), "seq_lens": ints(draw, [3, 3])}


def _attention_rest() -> Mapping[str, Any]:
    return {"is_cross_attn": False, "sliding_window_size": -1, "encoder_lens": None, "sinks": None}


def _mla(draw: Draw, fused: bool) -> Mapping[str, Mapping[str, Any]]:
    latent, q_latent, rope = 64, 96, 32
    down = draw(q_latent + latent + rope, K)
    projections = (
        {"qkv_a_proj_weight": down, "qkv_a_proj_scale": None, "q_lora_rank": q_latent, "kv_lora_rank": latent,
         "qk_rope_head_dim": rope}
        if fused
        else {"q_a_proj_weight": down[:q_latent], "kv_a_proj_weight": down[q_latent:], "q_a_proj_scale": None,
              "kv_a_proj_scale": None}
    )  # fmt: skip
    norms = {"q_a_layernorm_weight": draw(q_latent), "kv_a_layernorm_weight": draw(latent), "eps": EPS}
    rest = {
        "q_b_proj_weight": draw(H * (D + rope), q_latent), "q_b_proj_scale": None, "w_kc": draw(H, latent, D),
        "positions": ints(draw, range(T)), "cos_sin_cache": draw(16, rope), "w_scale": None, "block_size": None,
        "use_int8_w8a8": False, "use_fp8_w8a16": False, "is_vnni": False,
    }  # fmt: skip
    return {"odd rows": {"hidden_states": draw(T, K), **projections, **norms, **rest}}


def _gating(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    heads = {"A_log": draw(H, dtype=torch.float32), "dt_bias": draw(H)}
    return {"odd rows": {**heads, "a": draw(T, H), "b": draw(T, H)}}


def _chunked(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rows = {"query": draw(1, T, 1, D), "key": draw(1, T, 1, D), "value": draw(1, T, H, D)}
    gates = {"g": -draw(1, T, H, dtype=torch.float32).abs(), "beta": draw(1, T, H).sigmoid()}
    state = {"initial_state": draw(2, H, D, D, dtype=torch.float32), "output_final_state": True}
    rest = {"cu_seqlens": ints(draw, [0, T], torch.int32), "initial_state_indices": ints(draw, [1], torch.int32)}
    flags = {"head_first": False, "use_qk_l2norm_in_kernel": True, "eps": 1e-6}
    return {"one sequence": {**rows, **gates, **state, **rest, **flags}}


def _delta_update(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rows = {"q": draw(1, 3, 1, D), "k": draw(1, 3, 1, D), "v": draw(1, 3, H, D)}
    state = {"initial_state_source": draw(4, H, D, D, dtype=torch.float32), "use_qk_l2norm_in_kernel": True}
    where = {
        "initial_state_indices": ints(draw, [2, 0, 3], torch.int32),
        "cu_seqlens": ints(draw, range(4), torch.int32),
    }
    gates = {"A_log": draw(H, dtype=torch.float32), "dt_bias": draw(H), "a": draw(3, H), "b": draw(3, H)}
    return {"three sequences": {**rows, **state, **where, **gates, "softplus_beta": 1.0, "softplus_threshold": 20.0}}


def _qkvz_ba(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    heads = {"num_heads_qk": 1, "num_heads_v": H, "head_qk": D, "head_v": D}
    return {"odd rows": {"mixed_qkvz": draw(T, 2 * D + 2 * H * D), "mixed_ba": draw(T, 2 * H), **heads}}


ATTENTION_CALLS: Mapping[str, Calls] = {
    "apply_multidimensional_rope_cpu": _vision_rotary,
    "apply_rotary_pos_emb_cpu": _vision_rotary,
    "causal_conv1d_fwd_cpu": _conv,
    "causal_conv1d_update_cpu": _conv_update,
    "chunk_gated_delta_rule_cpu": _chunked,
    "decode_attention_cpu": _decode,
    "extend_attention_cpu": _extend,
    "fused_gdn_gating_cpu": _gating,
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": _qkvz_ba,
    "fused_qkvzba_split_reshape_cat_cpu": _qkvz_ba,
    "fused_sigmoid_gating_delta_rule_update_cpu": _delta_update,
    "multimodal_rotary_embedding_cpu": _multimodal_rotary,
    "qkv_proj_with_rope": partial(_mla, fused=False),
    "qkv_proj_with_rope_fused_weight": partial(_mla, fused=True),
    "rotary_embedding_cpu": _rotary,
}
