"""Stand-ins for ops of torch_npu 2.13, so that passes over them are tested where torch_npu is absent.

Schemas are torch_npu's own (a test under the real library compares them). What the ops compute, the references of the
plugin say.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from core.common.fakes import apply_fakes
from core_npu.fakes.declared import NPU_WRITES
from core_npu.passes.references import FORMULAS, register_references

EPSILON = "float epsilon=9.9999999999999995e-07"
SCHEMAS = (
    f"npu_rms_norm(Tensor input, Tensor gamma, {EPSILON}) -> (Tensor, Tensor)",
    f"npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, {EPSILON}) -> (Tensor, Tensor, Tensor)",
    f"npu_add_rms_norm_cast(Tensor x1, Tensor x2, Tensor gamma, {EPSILON}) -> (Tensor, Tensor, Tensor, Tensor)",
    "npu_add_rms_norm_quant(Tensor x1, Tensor x2, Tensor gamma, Tensor scales1, Tensor? zero_points1, "
    "Tensor? beta=None, Tensor? scales2=None, Tensor? zero_points2=None, *, int axis=-1, "
    f"{EPSILON}, bool div_mode=True, int? dst_type=None) -> (Tensor, Tensor, Tensor)",
    "npu_add_rms_norm_dynamic_quant(Tensor x1, Tensor x2, Tensor gamma, *, Tensor? smooth_scale1=None, "
    f"Tensor? smooth_scale2=None, Tensor? beta=None, {EPSILON}, bool[2]? output_mask=None, "
    "int? y_dtype=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "npu_rms_norm_quant(Tensor x, Tensor gamma, Tensor beta, Tensor scale, Tensor offset, "
    f"{EPSILON}, *, int? dst_dtype=None) -> Tensor",
    "npu_quantize(Tensor input, Tensor scales, Tensor? zero_points, int dtype, int axis=1, bool div_mode=True)"
    " -> Tensor",
    "npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, int? dst_type=None, "
    'str quant_mode="pertoken", float dst_type_max=0.) -> (Tensor, Tensor)',
    "npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    "npu_dequant_swiglu_quant(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, "
    "Tensor? bias=None, Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None, "
    "bool activate_left=False, int quant_mode=0, int? dst_type=None, int? round_mode=None, int? activate_dim=None, "
    "int swiglu_mode=0, float clamp_limit=7., float glu_alpha=1.702, float glu_bias=1.) -> (Tensor, Tensor)",
    'npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", Tensor? rotate=None) -> Tensor',
    'npu_apply_rotary_pos_emb(Tensor query, Tensor key, Tensor cos, Tensor sin, str layout="BSND", '
    'str rotary_mode="half") -> (Tensor, Tensor)',
    "npu_mrope(Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, int head_size, *, "
    'int[]? mrope_section=None, str? rotary_mode="half", str? cache_mode="default") -> (Tensor, Tensor)',
    "npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, Tensor? seq_lens=None, "
    'str? cache_mode="PA_NZ") -> ()',
    "npu_qkv_rms_norm_rope_cache(Tensor qkv, Tensor q_gamma, Tensor k_gamma, Tensor cos, Tensor sin, Tensor index, "
    "Tensor(a!) q_out, Tensor(b!) k_cache, Tensor(c!) v_cache, int[4] qkv_size, int[3] head_nums, *, "
    "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? k_offset=None, Tensor? v_offset=None, "
    f'{EPSILON}, str cache_mode="PA_NZ", bool is_output_qkv=False) -> (Tensor, Tensor, Tensor)',
    "npu_transpose_batchmatmul(Tensor input, Tensor weight, *, Tensor? bias=None, Tensor? scale=None, "
    "int[]? perm_x1=None, int[]? perm_x2=None, int[]? perm_y=None, int? batch_split_factor=1) -> Tensor",
)
UNCOMPUTED = (
    'npu_mm_all_reduce_base(Tensor x1, Tensor x2, str hcom, *, str reduce_op="sum", Tensor? bias=None, '
    "Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? x3=None, Tensor? dequant_scale=None, "
    "Tensor? pertoken_scale=None, Tensor? comm_quant_scale_1=None, Tensor? comm_quant_scale_2=None, "
    "int antiquant_group_size=0, int comm_turn=0, int[]? group_sizes=None, int? y_dtype=None, int? x1_dtype=None, "
    "int? x2_dtype=None, int? dequant_scale_dtype=None, int? pertoken_scale_dtype=None, int comm_quant_mode=0, "
    "str? comm_mode=None) -> Tensor",
)
"""Ops that calls of the plugin's own stand for in graphs, so that no host computes them."""


def _fake(name: str, schema: str) -> Callable[..., Any]:
    """Return the formula as a fake kernel; one that writes gives its results only."""
    function = FORMULAS[name]
    if name == "npu_apply_rotary_pos_emb":  # which gives new tensors, as the schema says and the kernel does not
        return lambda query, key, *others, **options: function(query.clone(), key.clone(), *others, **options)
    if "!)" not in schema:
        return function
    if schema.endswith("-> ()"):
        return lambda *args, **kwargs: None
    return lambda qkv, *args, **kwargs: tuple(qkv.new_empty(()) for _ in range(3))


@cache
def install() -> torch.library.Library:
    """Define the ops that nobody has defined, and give all of them the plugin's references; once per process."""
    defined = torch.library.Library("npu", "FRAGMENT")
    for schema in SCHEMAS:
        name = schema.partition("(")[0]
        if not hasattr(torch.ops.npu, name):
            defined.define(schema)
            torch.library.register_fake(f"npu::{name}", _fake(name, schema), lib=defined)
    for schema in UNCOMPUTED:
        if not hasattr(torch.ops.npu, schema.partition("(")[0]):
            defined.define(schema)
    register_references()
    apply_fakes(NPU_WRITES)
    return defined
