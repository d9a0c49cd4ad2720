"""Small calls of ATB's ops, as ATB documents them for Atlas A2 and A3, on which fakes are compared with kernels.

Legend: T tokens, B sequences, N query heads, G heads of keys and values, D and V their sizes, P tokens of a page.
Lengths that ATB reads on the host are tensors of the host or lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw
from core.common.ops.declaration import Sample
from core_npu.fakes.samples import Calls, ints, samples_of

__all__ = ["ATB_SAMPLES"]

_N, _G, _D, _V, _P = 4, 2, 64, 32, 128
_LATENT, _ROTARY = 512, 64
_QUERIES, _LENGTHS = [3, 4], [131, 4]
"""Lengths of two sequences; the tokens before the queries fill whole pages."""
_T = sum(_QUERIES)
_SCALE = _D**-0.5
_HEADS = {"num_heads": _N, "num_kv_heads": _G, "scale_value": _SCALE}
_COMPRESSED = {"mask_type": 3, "kernel_type": 1}


def _host(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _triangle(draw: Draw, size: int) -> Tensor:
    """Return a causal mask, which hides positions above the diagonal, in half precision."""
    return torch.full((size, size), -10000.0, dtype=draw.dtype).triu(1).to(draw.device)


def _packed(draw: Draw, **more: Any) -> dict[str, Any]:
    """Return sequences one behind the other."""
    rows = {"query": draw(_T, _N, _D), "key": draw(_T, _G, _D), "value": draw(_T, _G, _V), "out": draw(_T, _N, _V)}
    return {**rows, **_HEADS, **more}


def _prefixed(draw: Draw, **more: Any) -> dict[str, Any]:
    """Return sequences whose keys and values are in pages."""
    caches = {"key_cache": draw(5, _P, _G, _D), "value_cache": draw(5, _P, _G, _D)}
    rows = {"query": draw(_T, _N, _D), "out": draw(_T, _N, _D), "block_table": ints(draw, [[3, 1], [0, 2]])}
    return {**rows, **caches, **_HEADS, **more}


def _decoded(draw: Draw, **more: Any) -> dict[str, Any]:
    """Return one query of each of two sequences in pages."""
    caches = {"key_cache": draw(5, _P, _G, _D), "value_cache": draw(5, _P, _G, _V)}
    rows = {"query": draw(2, _N, _D), "out": draw(2, _N, _V), "block_table": ints(draw, [[3, 1], [0, 2]])}
    return {**rows, **caches, **_HEADS, **more}


def _flash_v2(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    longest = max(_QUERIES)
    plain = _packed(draw, seq_len=_QUERIES)
    return {
        "a triangle": {**plain, "mask": _triangle(draw, longest), "mask_type": 1},
        "slopes": {**plain, "mask": draw(_N, longest, longest), "mask_type": 2},
    }


def _prefix_v2(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    call = _prefixed(draw, mask=_triangle(draw, 128), seq_len=_QUERIES, context_lens=_LENGTHS, **_COMPRESSED)
    return {"pages": call}


def _paged(draw: Draw, *, out: bool = True) -> Mapping[str, Mapping[str, Any]]:
    call = _decoded(draw, context_lens=_host(_LENGTHS))
    space = torch.zeros(1 << 20, dtype=torch.uint8, device=draw.device)
    return {"pages": call, **({"with memory": {**call, "workspace": space}} if out else {})}


def _paged_v2(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    call = _decoded(draw, context_lens=_LENGTHS)
    slopes = {"mask": draw(2, _N, 1, max(_LENGTHS)), "mask_type": 2}
    return {"pages": call, "slopes": {**call, **slopes}}


def _paged_codes(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    def codes(*shape: int) -> Tensor:
        return (draw(*shape) * 20).clamp(-100, 100).to(torch.int8)

    caches = {"key_cache": codes(5, _P, _G, _D), "value_cache": codes(5, _P, _G, _D)}
    scales = {name: draw(_N, dtype=torch.float32).abs() / 100 for name in ("k_descale", "v_descale")}
    kinds = {"quant_type": 3, "outdata_type": 27, "context_lens": _host([100, 7]), "query": codes(2, _N, _D)}
    call = {**_decoded(draw), **caches, **scales, **kinds, "out": draw(2, _N, _D, dtype=torch.bfloat16)}
    return {"codes": call}


def _paged_latent(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    call = _decoded(draw, context_lens=_host(_LENGTHS), mla_vheadsize=_LATENT, num_kv_heads=1)
    del call["value_cache"]
    width = _LATENT + _ROTARY
    return {"pages": {**call, "query": draw(2, _N, width), "key_cache": draw(5, _P, 1, width),
                      "out": draw(2, _N, _LATENT)}}  # fmt: skip


def _splitfuse(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rows = [
        [0.0 if at <= length - queries + row else -10000.0 for at in range(max(_LENGTHS))]
        for queries, length in zip(_QUERIES, _LENGTHS, strict=True)
        for row in range(queries)
    ]
    mask = torch.tensor(rows, dtype=draw.dtype).to(draw.device)
    return {"pages": _prefixed(draw, context_lens=_host(_LENGTHS), seq_len=_host(_QUERIES), mask=mask)}


def _splitfuse_v2(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    tiles = {name: draw(5, _G * _D // 16, _P, 16) for name in ("key_cache", "value_cache")}
    lengths = {"context_lens": _host(_LENGTHS), "seq_len": _host(_QUERIES)}
    return {"pages in tiles": {**_prefixed(draw, mask=_triangle(draw, 2048), **lengths), **tiles}}


def _latent(draw: Draw, **more: Any) -> dict[str, Any]:
    """Return one query a sequence, and latent pages."""
    rows = {"q_nope": draw(2, _N, _LATENT), "q_rope": draw(2, _N, _ROTARY)}
    caches = {"ctkv": draw(5, _P, 1, _LATENT), "k_rope": draw(5, _P, 1, _ROTARY)}
    heads = {"q_headnum": _N, "kv_headnum": 1, "qk_scale": _SCALE, "context_lens": _LENGTHS}
    return {**rows, **caches, **heads, "block_tables": ints(draw, [[3, 1], [0, 2]]), **more}


def _latent_ring(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    out = {"output": draw(2, _N, _LATENT), "lse": draw(2, _N, 1)}
    return {"with log-sums": _latent(draw, return_lse=True, calc_type="calc_type_ring", **out)}


def _latent_space(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    return {"with log-sums": _latent(draw, return_lse=True, calc_type="calc_type_ring")}


def _ring(draw: Draw, *, out: bool) -> Mapping[str, Mapping[str, Any]]:
    nope = 128
    query = {"q_nope": draw(_T, _N, nope), "q_rope": draw(_T, _N, _ROTARY)}
    keys = {"k_nope": draw(_T, _G, nope), "k_rope": draw(_T, _G, _ROTARY), "value": draw(_T, _G, nope)}
    call = {**query, **keys, "mask": _triangle(draw, 512), "seqlen": _host(_QUERIES), "qk_scale": _SCALE}
    call |= {"head_num": _N, "kv_head_num": _G, "mask_type": "mask_type_triu"}
    if out:
        call |= {"output": draw(_T, _N, nope), "softmax_lse": draw(_N, _T, dtype=torch.float32)}
    before = {"pre_out": draw(_T, _N, nope), "prev_lse": draw(_N, _T, dtype=torch.float32)}
    return {"the first block": call, "a block behind others": {**call, **before, "calc_type": "calc_type_default"}}


def _preprocess(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    hidden, query, tokens, page = 7168, 1536, 3, 16
    down, up = _LATENT + _ROTARY + query, _N * (128 + _ROTARY)

    def codes(*shape: int) -> Tensor:
        return draw(*shape, scale=20.0, dtype=torch.float32).clamp(-100, 100).to(torch.int8)

    half = Draw(torch.bfloat16, draw.device)
    caches = {"kv_cache": half(4, page, 1, _LATENT), "kv_cache_rope": half(4, page, 1, _ROTARY)}
    outs = {"q_out0": half(tokens, _N, _LATENT), "q_out1": half(tokens, _N, _ROTARY)}
    outs |= {"kv_cache_out0": half(4, page, 1, _LATENT), "kv_cache_out1": half(4, page, 1, _ROTARY)}
    call = {
        "input": half(tokens, hidden), "wdqkv": codes(down, hidden), "wuq": codes(up, query),
        "gamma0": half(hidden), "beta0": half(hidden), "gamma1": half(query), "beta1": half(query),
        "descale0": half(down, dtype=torch.float32).abs() / 1000, "gamma2": half(_LATENT),
        "descale1": half(up, dtype=torch.float32).abs() / 1000,
        "cos": half(tokens, _ROTARY), "sin": half(tokens, _ROTARY), "wuk": half(_N, 128, _LATENT),
        "slotmapping": ints(draw, [3, 17, 40]), **caches, **outs,
    }  # fmt: skip
    return {"split caches": call}


def _stored(draw: Draw, *, values: bool) -> Mapping[str, Mapping[str, Any]]:
    call = {"key": draw(5, _G, _D), "key_cache": draw(5, 16, _G, _D), "slot_indices": ints(draw, [17, 0, 79, 5, 33])}
    if values:
        call |= {"value": draw(5, _G, _V), "value_cache": draw(5, 16, _G, _V)}
    return {"rows": call}


def _loaded(draw: Draw, *, out: bool) -> Mapping[str, Mapping[str, Any]]:
    caches = {"key_cache": draw(9, 16, _G, _D), "value_cache": draw(9, 16, _G, _V)}
    rest = {**caches, "block_table": ints(draw, [[3, 1, 8], [0, 7, 2]])}
    if out:
        rest |= {"key": draw(23, _G, _D), "value": draw(23, _G, _V)}
    return {
        "lengths": {**rest, "context_lens": ints(draw, [18, 5])},
        "running sums": {**rest, "context_lens": ints(draw, [0, 18, 23]), "cumsum": True},
        "from the second page": {**rest, "context_lens": ints(draw, [18, 5]), "seq_starts": ints(draw, [16, 0])},
    }


def _rotary(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    # torch_npu keeps the table of a process's first call and would ignore another one here.
    angles = torch.arange(32.0)[:, None] * 10000.0 ** (-torch.arange(0.0, _D, 2.0) / _D)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(draw.dtype).to(draw.device)
    rows = {"positions": ints(draw, [0, 3, 31], torch.int64), "query": draw(3, _N * _D), "key": draw(3, _G * _D)}
    rest = {**rows, "head_size": _D, "cos_sin_cache": table}
    return {"halves": {**rest, "is_neox_style": True}, "neighbours": {**rest, "is_neox_style": False}}


def _norm_codes(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    weights = {"gamma": draw(_D), "beta": draw(_D), "scale": draw(1).abs() + 0.05}
    weights["offset"] = ints(draw, [3], torch.int8)
    return {"rows": {"self": draw(5, _D), **weights, "output": draw(5, _D).to(torch.int8)}}


def _codes(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    call = {"x": draw(5, _D), "scale": draw(1).abs() + 0.05, "zero_point": ints(draw, [3], torch.int8)}
    return {"one scale": {**call, "y": draw(5, _D).to(torch.int8)}}


def _experts(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    tokens, experts, k = 5, 64, 6
    call = {"x": draw(tokens, experts), "add_num": draw(experts), "activation_type": "activation_sigmoid"}
    call |= {"group_num": 8, "group_topk": 4, "n": 2, "k": k, "is_norm": True, "scale": 2.5}
    return {"groups": {**call, "y": draw(tokens, k, dtype=torch.float32), "indices": ints(draw, [[0] * k] * tokens)}}


def _product(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    return {"added": {"x": draw(32, 24), "weight": draw(32, 40), "C": draw(24, 40, dtype=torch.float32)}}


def _encoder(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    call: dict[str, Any] = {"query": draw(_T, _N, _D), "key": draw(5, _P, _G, _D), "value": draw(5, _P, _G, _D)}
    call |= {"block_tables": ints(draw, [[3, 1], [0, 2]]), "seqlen": _QUERIES, "kv_seqlen": _LENGTHS}
    call |= {"q_headnum": _N, "qk_scale": _SCALE, "kv_headnum": _G, "output": draw(_T, _N, _D)}
    return {"a prefix": call}


_CALLS: Mapping[str, Calls] = {
    "_npu_flash_attention": lambda draw: {
        "a triangle": _packed(draw, mask=_triangle(draw, max(_QUERIES)), seq_len=_host(_QUERIES))
    },
    "_npu_flash_attention_prefix_v2.out": _prefix_v2,
    "_npu_flash_attention_qlens": lambda draw: {
        "pages": _prefixed(draw, mask=_triangle(draw, 128), seq_len=_host(_QUERIES), context_lens=_host(_LENGTHS))
    },
    "_npu_flash_attention_unpad": lambda draw: {"no mask": _packed(draw, seq_len=_host(_QUERIES))},
    "_npu_flash_attention_unpad_v2": lambda draw: {"no mask": _packed(draw, seq_len=_host(_QUERIES))},
    "_npu_flash_attention_v2.out": _flash_v2,
    "_npu_flash_attention_v3": lambda draw: {
        "a triangle": _packed(draw, mask=_triangle(draw, 2048), seq_len=_host(_QUERIES))
    },
    "_npu_group_topk": lambda draw: {"groups": {"self": draw(5, 64), "k": 4, "group_num": 8, "n": 2}},
    "_npu_matmul_add_fp32": _product,
    "_npu_multi_head_latent_attention_get_workspace.lse": _latent_space,
    "_npu_paged_attention": _paged,
    "_npu_paged_attention_get_workspace": partial(_paged, out=False),
    "_npu_paged_attention_mla": _paged_latent,
    "_npu_paged_attention_quant": _paged_codes,
    "_npu_paged_attention_splitfuse": _splitfuse,
    "_npu_paged_attention_splitfuse_v2": _splitfuse_v2,
    "_npu_paged_attention_v2.out": _paged_v2,
    "_npu_paged_attention_v2_get_workspace": _paged_v2,
    "_npu_quant_rms_norm": _norm_codes,
    "_npu_quantize_per_tensor": _codes,
    "_npu_reshape_and_cache": partial(_stored, values=True),
    "_npu_reshape_and_cache_siso": partial(_stored, values=False),
    "_npu_rotary_embedding": _rotary,
    "npu_fused_add_topk_div.out": _experts,
    "npu_mla_preprocess.out": _preprocess,
    "npu_multi_head_latent_attention.lse_out": _latent_ring,
    "npu_multi_head_latent_attention.out": lambda draw: {"pages": _latent(draw, output=draw(2, _N, _LATENT))},
    "npu_paged_cache_load": partial(_loaded, out=False),
    "npu_paged_cache_load.out": partial(_loaded, out=True),
    "npu_ring_mla": partial(_ring, out=False),
    "npu_ring_mla.out": partial(_ring, out=True),
    "npu_self_attention_prefix_encoder.out": _encoder,
}

ATB_SAMPLES: Mapping[str, Callable[[torch.device], Iterator[Sample]]] = {
    f"atb::{name}": samples_of(calls) for name, calls in _CALLS.items()
}
"""Op -> device -> calls, arguments by the names of its schema."""
