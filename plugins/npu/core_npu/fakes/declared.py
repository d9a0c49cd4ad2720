"""Fakes of torch_npu's ops for inference that bring none: what each returns and writes, as data.

The rules follow torch_npu 2.13 and its kernels' host code (Ascend/op-plugin, 2026). Names of arguments are those of the
schemas; where a version has others, the fake is left out with the reason. Not here: the `npu_nsa_*` ops, and formats
that only Ascend 950 has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.common.fakes import FakeOp, ShapeRule, arg, argument, new, nothing, results, size
from core_npu.fakes.attention import scored, scored_v2
from core_npu.fakes.samples import SAMPLES
from core_npu.fakes.samples_atb import ATB_SAMPLES

__all__ = ["NPU_FAKES", "NPU_WRITES"]

_DTYPES: Mapping[int, torch.dtype] = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
"""Numbers of dtypes in torch_npu's ops for the result of a product."""


def _unknown(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a new tensor (n,) of a size that only a run can tell."""
    return like.new_empty((torch.library.get_ctx().new_dynamic_size(),), dtype=dtype)


def in_bytes(query: Tensor, *_: Any, **__: Any) -> Tensor:
    """The rule of ATB's workspaces: as many bytes as the kernel asks for."""
    return _unknown(query, torch.uint8)


def of_its_dtype(query: Tensor, *_: Any, **__: Any) -> Tensor:
    """Be the rule of workspaces of attention: as many elements of the query's dtype as the kernel asks for bytes."""
    return _unknown(query)


def given_out(*_: Any, out: list[Tensor], **__: Any) -> tuple[Tensor, ...]:
    """Be the rule of ops that write a list `out` and return it, which their schemas call new tensors."""
    return tuple(torch.empty_like(each) for each in out)


def same_layout(input: Tensor, *_: Any, **__: Any) -> Tensor:
    """Be the rule of casts of a storage format: the sizes and strides that torch sees stay."""
    return input.new_empty_strided(input.shape, input.stride())


def loaded(
    key_cache: Tensor, value_cache: Tensor, block_table: Tensor, context_lens: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    """Be the rule of `npu_paged_cache_load`: as many tokens as the lengths add up to."""
    tokens = torch.library.get_ctx().new_dynamic_size()
    return tuple(each.new_empty((tokens, *each.shape[2:])) for each in (key_cache, value_cache))  # type: ignore[return-value]


def dual_level_product(x1: Tensor, x2: Tensor, *_: Any, output_dtype: int = 15, **__: Any) -> Tensor:
    """Be the rule of `npu_dual_level_quant_matmul`: (M, N) of codes (M, K / 2) and (N, K / 2)."""
    if output_dtype not in _DTYPES:
        known = ", ".join(f"{number} ({dtype})" for number, dtype in _DTYPES.items())
        raise RuntimeError(f"npu::npu_dual_level_quant_matmul: output_dtype {output_dtype} is none of {known}")
    return x1.new_empty((x1.shape[0], x2.shape[0]), dtype=_DTYPES[output_dtype])


def routed(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = 1024,
    expert_capacity: int = 0,
    expert_num: int = 256,
    drop_pad_mode: int = 0,
    expert_tokens_num_mode: int = 0,
    expert_tokens_before_capacity_flag: bool = False,
    quant_mode: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Be the rule of `npu_moe_init_routing_quant`: rows sorted by expert; None for what the modes leave out."""
    choices, width = x.shape[0] * expert_idx.shape[1], x.shape[1]
    if drop_pad_mode == 1:
        shape: tuple[Any, ...] = (expert_num, expert_capacity, width)
        scales = expert_num * expert_capacity
    else:
        scales = torch.sym_min(choices, active_num) if active_num > 0 else choices
        shape = (scales, width)

    def counts(wanted: bool) -> Tensor | None:
        return x.new_empty((expert_num,), dtype=torch.int32) if wanted else None

    return (
        x.new_empty(shape, dtype=torch.int8),
        expert_idx.new_empty((choices,)),
        counts(drop_pad_mode == 0 and expert_tokens_num_mode > 0),
        counts(drop_pad_mode == 1 and expert_tokens_before_capacity_flag),
        x.new_empty((scales,), dtype=torch.float32) if quant_mode == 1 else None,
    )


_RULES: Mapping[str, ShapeRule] = {
    # Writes only.
    "atb::_npu_flash_attention": nothing,
    "atb::_npu_flash_attention_qlens": nothing,
    "atb::_npu_flash_attention_unpad": nothing,
    "atb::_npu_flash_attention_unpad_v2": nothing,
    "atb::_npu_flash_attention_v3": nothing,
    "atb::_npu_group_topk": nothing,
    "atb::_npu_matmul_add_fp32": nothing,
    "atb::_npu_paged_attention": nothing,
    "atb::_npu_paged_attention_mla": nothing,
    "atb::_npu_paged_attention_quant": nothing,
    "atb::_npu_paged_attention_splitfuse": nothing,
    "atb::_npu_paged_attention_splitfuse_v2": nothing,
    "atb::_npu_quant_rms_norm": nothing,
    "atb::_npu_quantize_per_tensor": nothing,
    "atb::_npu_reshape_and_cache": nothing,
    "atb::_npu_reshape_and_cache_siso": nothing,
    "atb::_npu_rotary_embedding": nothing,
    "npu::npu_gather_pa_kv_cache": nothing,
    # Rules of ops that return the arguments they write.
    "atb::_npu_flash_attention_prefix_v2.out": argument("out"),
    "atb::_npu_flash_attention_v2.out": argument("out"),
    "atb::_npu_paged_attention_v2.out": argument("out"),
    "atb::npu_fused_add_topk_div.out": results(argument("y"), argument("indices")),
    "atb::npu_mla_preprocess.out": results(
        argument("q_out0"), argument("kv_cache_out0"), argument("q_out1"), argument("kv_cache_out1")
    ),
    "atb::npu_multi_head_latent_attention.out": argument("output"),
    "atb::npu_multi_head_latent_attention.lse_out": results(argument("output"), argument("lse")),
    "atb::npu_paged_cache_load.out": results(argument("key"), argument("value")),
    "atb::npu_ring_mla.out": results(argument("output"), argument("softmax_lse")),
    "atb::npu_self_attention_prefix_encoder.out": argument("output"),
    "npu::npu_format_cast_": argument("input"),
    "npu::npu_format_cast_.acl_format": argument("input"),
    "npu::npu_fused_infer_attention_score.out": given_out,
    "npu::npu_fused_infer_attention_score_v2.out": given_out,
    "npu::npu_scatter_pa_cache.value": argument("key_cache"),
    "npu::npu_silu_": argument("input"),
    "npu::npu_transpose.out": argument("out"),
    # Workspaces.
    "atb::_npu_multi_head_latent_attention_get_workspace.lse": in_bytes,
    "atb::_npu_paged_attention_get_workspace": in_bytes,
    "atb::_npu_paged_attention_v2_get_workspace": in_bytes,
    "npu::_npu_fused_infer_attention_score_get_max_workspace": of_its_dtype,
    "npu::_npu_fused_infer_attention_score_v2_get_max_workspace": of_its_dtype,
    # New tensors.
    "atb::npu_paged_cache_load": loaded,
    "atb::npu_ring_mla": results(
        new(size("q_nope", 0), arg("head_num"), size("value", 2), like="q_nope"),
        new(arg("head_num"), size("q_nope", 0), like="q_nope", dtype=torch.float32),
    ),
    "npu::_npu_fused_infer_attention_score_infer_output": scored,
    "npu::_npu_fused_infer_attention_score_v2_infer_output": scored_v2,
    "npu::npu_dual_level_quant_matmul": dual_level_product,
    "npu::npu_format_cast": same_layout,
    "npu::npu_format_cast.Tensor": same_layout,
    "npu::npu_moe_init_routing_quant": routed,
    "npu::npu_top_k_top_p_sample": results(
        new(size("logits", 0), like="logits", dtype=torch.int64),
        new(size("logits", 0), size("logits", 1), like="logits", dtype=torch.float32),
    ),
}
"""Op -> its rule."""

_UNDECLARED: Mapping[str, tuple[str, ...]] = {
    "atb::_npu_group_topk": ("self",),
    "npu::npu_fused_infer_attention_score.out": ("out",),
    "npu::npu_fused_infer_attention_score_v2.out": ("out",),
}
"""Op -> the arguments that its kernel writes although its schema says otherwise."""

_UNWRITTEN = (in_bytes, of_its_dtype, scored, scored_v2)
"""Rules of ops that only allocate."""

_SAMPLES = {**SAMPLES, **ATB_SAMPLES}

NPU_FAKES = tuple(
    FakeOp(
        op=op,
        rule=rule,
        samples=_SAMPLES[op],
        also_writes=_UNDECLARED.get(op, ()),
        changes=True,
        unwritten=rule in _UNWRITTEN,
    )
    for op, rule in _RULES.items()
)
"""The fakes that the plugin declares; each is applied where torch_npu has the op and no fake of it."""

NPU_WRITES = (FakeOp(op="npu::npu_apply_rotary_pos_emb", rule=None, also_writes=("query", "key"), changes=True),)
"""Arguments that ops with a fake of torch_npu write although their schemas say otherwise."""
