"""Calls of `sgl_kernel`'s ops, on which its fakes are compared with its kernels: small, bf16, of odd token counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from core.common.ops.arguments import Draw
from core.common.ops.declaration import Calls, Sample
from core_cpu.fakes.sgl_kernel_attention_samples import ATTENTION_CALLS
from core_cpu.fakes.sgl_kernel_draws import EPS, INNER, D, E, H, K, N, T, codes, ints, wide


def _gated(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    return {
        "odd rows": {"input": draw(T, 2 * INNER)},
        "rank 3": {"input": draw(2, 3, 2 * INNER)},
        "no tokens": {"input": draw(0, 2 * INNER)},
    }


def _norm(draw: Draw, **more: Any) -> Mapping[str, Mapping[str, Any]]:
    rest = {"weight": draw(K), "eps": EPS, **more}
    return {
        "odd rows": {"input": draw(T, K), **rest},
        "wider rows": {"input": wide(draw, T, K), **rest},
    }


def _added_norm(draw: Draw, **more: Any) -> Mapping[str, Mapping[str, Any]]:
    rest = {"residual": draw(T, K), "weight": draw(K), "eps": EPS, **more}
    return {"odd rows": {"input": draw(T, K), **rest}}


def _layer_norm(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    norm = {name.replace("rows", "rows and bias"): call for name, call in _norm(draw, bias=draw(K)).items()}
    return {**_norm(draw, bias=None), **norm}


def _gated_norm(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    return {"odd rows": {"input": draw(T, D), "weight": draw(D), "gate": draw(T, D), "eps": EPS}}


def _qk_norm(draw: Draw, **more: Any) -> Mapping[str, Mapping[str, Any]]:
    rest = {"q_weight": draw(2 * K), "k_weight": draw(K), "eps": EPS, **more}
    joined = draw(T, 4 * K)
    return {
        "odd rows": {"q": draw(T, 2 * K), "k": draw(T, K), **rest},
        "parts of one projection": {"q": joined[:, : 2 * K], "k": joined[:, 2 * K : 3 * K], **rest},
    }


def _heads_norm(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rest = {"q_weight": draw(D), "k_weight": draw(D), "eps": EPS, "head_dim": D}
    return {"odd rows": {"q": draw(T, H * D), "k": draw(T, D), **rest}}


def _gated_heads_norm(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rest = {"q_weight": draw(D), "k_weight": draw(D), "eps": EPS, "head_dim": D, "num_head": H}
    return {"odd rows": {"q_gate": draw(T, H * D * 2), "k": draw(T, D), **rest}}


def _topk(draw: Draw, **more: Any) -> Mapping[str, Mapping[str, Any]]:
    rest = {"topk": 2, "renormalize": True, **more}
    return {"odd rows": {"hidden_states": draw(T, K), "gating_output": draw(T, E), **rest}}


def _grouped_topk(draw: Draw, **more: Any) -> Mapping[str, Mapping[str, Any]]:
    groups = {"num_expert_group": 4, "topk_group": 2, "num_fused_shared_experts": 0}
    return _topk(draw, **groups, routed_scaling_factor=None, num_token_non_padded=None, **more)


def _router(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    weight = draw(E, K, dtype=torch.float32)
    rest = {"topk": 2, "renormalize": False, "moe_softcapping": 30.0, "correction_bias": None}
    return {"odd rows": {"hidden_states": draw(T, K), "gating_output": weight, **rest}}


def _linear(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rest = {"mat1": draw(T, K), "is_vnni": False}
    return {
        "odd rows": {"mat2": draw(N, K), "bias": None, **rest},
        "bias": {"mat2": draw(N, K), "bias": draw(N, dtype=torch.float32), **rest},
        "fewer rows than a tile": {"mat1": draw(T, 8), "mat2": draw(8, 3), "bias": None, "is_vnni": False},
    }


def _scaled_mm(draw: Draw, kind: str) -> Mapping[str, Mapping[str, Any]]:
    scales = draw(N, dtype=torch.float32, shift=3.0)
    rest = {"bias": None, "out_dtype": torch.bfloat16, "is_vnni": False}
    fp8 = codes(draw, N, K, dtype=torch.float8_e4m3fn)
    calls: Mapping[str, Mapping[str, Any]] = {
        "int8": {
            "mat1": codes(draw, T, K).view(torch.uint8), "mat2": codes(draw, N, K), "scales2": scales,
            "scales1": draw(T, dtype=torch.float32, shift=3.0), **rest,
        },
        "quantised": {"mat1": draw(T, K), "mat2": codes(draw, N, K), "scales2": scales, **rest},
        "blocks": {
            "mat1": draw(T, K), "mat2": fp8, "block_size": [32, 32],
            "scales2": draw(3, 2, dtype=torch.float32), **rest,
        },
        "tensor": {"mat1": draw(T, K), "mat2": fp8, "scale2": draw(1, dtype=torch.float32), **rest},
    }  # fmt: skip
    return {f"{kind}, odd rows": calls[kind]}


def _mxfp4(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    packed, scales = codes(draw, N, K // 2).view(torch.uint8), codes(draw, N, K // 32).view(torch.uint8)
    rest = {"mat2": packed, "scales2": scales, "bias": None, "is_vnni": False}
    return {"odd rows": {"mat1": draw(T, K), **rest}}


def _int4(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    # (N / 32, groups, 32), as packed by the library: blocks of 32 columns.
    blocks, groups = N // 32, 2
    packed = {
        "w": codes(draw, blocks, groups, K // groups, 16).view(torch.uint8),
        "w_zeros": codes(draw, blocks, groups, 32), "w_scales": draw(blocks, groups, 32, dtype=torch.float32),
        "bias": None,
    }  # fmt: skip
    return {"odd rows": {"x": draw(T, K), **packed}, "rank 3": {"x": draw(2, 3, K), **packed}}


def _experts(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    weights = {"w1": draw(E, 2 * INNER, K), "w2": draw(E, K, INNER)}
    routed = {
        "topk_weights": draw(T, 2, dtype=torch.float32).softmax(-1),
        "topk_ids": ints(draw, [[row % E, (row + 1) % E] for row in range(T)], torch.int32),
    }
    none = ("w1_scale", "w2_scale", "w1_zero", "w2_zero", "block_size", "w1_bias", "w2_bias", "alpha", "limit")
    rest = {**dict.fromkeys(none), "moe_comp_method": 0, "is_vnni": False}
    return {"not in place": {"hidden_states": draw(T, K), **weights, **routed, "inplace": False, **rest}}


def _shared_expert(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rest = {
        "w1": draw(2 * INNER, K),
        "w2": draw(K, INNER),
        "fused_experts_out": draw(T, K),
        "routed_scaling_factor": 2.0,
    }
    flags = {"use_int8_w8a8": False, "use_fp8_w8a16": False, "is_vnni": False}
    none = dict.fromkeys(("w1_scale", "w2_scale", "block_size"))
    return {"not in place": {"hidden_states": draw(T, K), **rest, **flags, **none, "inplace": False}}


_CALLS: Mapping[str, Calls] = {
    **ATTENTION_CALLS,
    "biased_grouped_topk_cpu": lambda draw: _grouped_topk(draw, correction_bias=draw(E, dtype=torch.float32)),
    "bmm_cpu": lambda draw: {"odd rows": {
        "out": draw(2, T, N), "mat1": draw(2, T, K), "mat2": draw(2, N, K), "is_vnni": False, "scale": None,
    }},
    "fp8_per_tensor_scaled_mm_cpu": partial(_scaled_mm, kind="tensor"),
    "fp8_scaled_mm_cpu": partial(_scaled_mm, kind="blocks"),
    "fused_add_layernorm_cpu": partial(_added_norm, bias=None),
    "fused_add_rmsnorm_cpu": _added_norm,
    "fused_dual_residual_rmsnorm_cpu": lambda draw: {"odd rows": {
        "x": draw(T, K), "residual": draw(T, K), "weight1": draw(K), "weight2": draw(K), "eps": EPS,
    }},
    "fused_experts_cpu": _experts,
    "fused_input_proj_cpu": lambda draw: {"odd rows": {
        "hidden_states": draw(T, K), "qkvz_weight": draw(N, K), "ba_weight": draw(32, K), "is_vnni": False,
    }},
    "fused_linear_sigmoid_mul": lambda draw: {"odd rows": {
        "mat1": draw(T, K), "mat2": draw(K, 1, dtype=torch.float32), "bias": None, "is_vnni": True,
        "post_mul_mat": draw(T, N),
    }},
    "fused_moe_router_cpu": _router,
    "fused_qk_gemma_rmsnorm_cpu": _heads_norm,
    "fused_qk_gemma_rmsnorm_with_gate_cpu": _gated_heads_norm,
    "fused_qk_rmsnorm_apply_from_stats_cpu": lambda draw: _qk_norm(
        draw, sum_sq=draw(T, 2, dtype=torch.float32, shift=9.0), tp_world_size=2
    ),
    "fused_qk_rmsnorm_cpu": _qk_norm,
    "fused_qk_rmsnorm_sumsq_cpu": lambda draw: {"odd rows": {"q": draw(T, 2 * K), "k": draw(T, K)}},
    "fused_rmsnorm_gated_cpu": _gated_norm,
    "fused_sigmoid_mul_cpu": lambda draw: {"odd rows": {"input": draw(T, K), "gate": draw(T, K)}},
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
    "l2norm_cpu": lambda draw: {"odd rows": {"input": draw(T, D), "eps": EPS}},
    "layernorm_cpu": _layer_norm,
    "mxfp4_scaled_mm_cpu": _mxfp4,
    "per_token_quant_int8_cpu": lambda draw: {"odd rows": {"A": draw(T, K)}},
    "rmsnorm_cpu": _norm,
    "shared_expert_cpu": _shared_expert,
    "shm_allgather": lambda draw: {
        "rows": {"data": draw(T, K), "dim": 0}, "columns": {"data": draw(T, K), "dim": 1},
    },
    "shm_allreduce": lambda draw: {"odd rows": {"data": draw(T, K), "reduce_op": 0}},
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
