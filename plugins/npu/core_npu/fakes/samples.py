"""Small calls of torch_npu's own ops, as CANN documents them, on which fakes are compared with kernels.

Legend: T tokens, B sequences, N query heads, G heads of keys and values, D head size, P tokens of a page, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw
from core.common.ops.declaration import Sample

__all__ = ["SAMPLES", "Calls", "ints", "samples_of"]

Calls = Callable[[Draw], Mapping[str, Mapping[str, Any]]]

_T, _N, _G, _D, _P = 5, 4, 2, 64, 16
_TILES, _PLAIN = 29, 2
"""Storage formats: matrices in tiles, and rows."""

_FIRST_OF_ASCEND_950 = 260
"""torch_npu's number of the first chip with the formats of `npu_dual_level_quant_matmul`."""


def ints(draw: Draw, values: object, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return whole numbers on the device of the call."""
    return torch.tensor(values, dtype=dtype, device=draw.device)


def _paged(draw: Draw) -> dict[str, Any]:
    """Return the arguments that both versions of attention take under the same names: 2 sequences in pages (blocks, P,
    G * D)."""
    return {
        "query": draw(_T, _N, _D),
        "key": draw(9, _P, _G * _D),
        "value": draw(9, _P, _G * _D),
        "input_layout": "TND",
        "num_key_value_heads": _G,
        "block_size": _P,
        "block_table": ints(draw, [[3, 1], [0, 7]]),
    }


def _first(draw: Draw) -> dict[str, Any]:
    lengths = {"actual_seq_lengths": [2, _T], "actual_seq_lengths_kv": [10, 20]}
    return {**_paged(draw), **lengths, "num_heads": _N, "scale": _D**-0.5}


def _second(draw: Draw) -> dict[str, Any]:
    lengths = {"actual_seq_qlen": [2, _T], "actual_seq_kvlen": [10, 20]}
    return {**_paged(draw), **lengths, "num_query_heads": _N, "softmax_scale": _D**-0.5}


def _written(draw: Draw, call: Callable[[Draw], dict[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    out = [draw(_T, _N, _D), draw(0, dtype=torch.float32)]
    return {"pages": {**call(draw), "out": out}}


_LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "BSH": ("BSH", "BSH_BNSD", "BSH_NBSD"),
    "BSND": ("BSND", "BSND_BNSD", "BSND_NBSD"),
    "BNSD": ("BNSD", "BNSD_BSND", "BNSD_NBSD"),
    "NSD": ("NSD",),
    "TND": ("TND", "TND_NTD"),
    "NTD": ("NTD", "NTD_TND"),
}
"""Layout of the query -> those of query and result."""


def _inferred(draw: Draw, heads: str, log_sum: str, scale: str) -> Mapping[str, Mapping[str, Any]]:
    """Each layout with smaller values than keys; pages of each rank; arguments that decide the dtype. Nothing is
    computed."""
    sizes = {"B": 2, "S": 3, "T": _T, "D": _D}
    rest = {heads: _N, "num_key_value_heads": _G}
    calls: dict[str, Mapping[str, Any]] = {}
    for given, names in _LAYOUTS.items():
        query = draw(*({**sizes, "N": _N, "H": _N * _D}[letter] for letter in given))
        value = draw(*({**sizes, "D": _D // 2, "N": _G, "H": _G * _D // 2}[letter] for letter in given))
        for name in names:
            calls[name] = {"query": query, "value": value, "input_layout": name, **rest}
        calls[f"{given}, with the log-sum"] = {**calls[names[0]], log_sum: True}
    pages = {**calls["TND"], "block_table": ints(draw, [[3, 1]])}
    for shape in ((9, _P, _G * _D), (9, _G, _P, _D // 2), (9, _G, _D // 16, _P, 16)):
        calls[f"pages of rank {len(shape)}"] = {**pages, "value": draw(*shape)}
    codes = {**calls["BNSD"], "query": draw(2, _N, 3, _D).to(torch.int8)}
    calls["to codes"] = {**calls["TND"], scale: draw(1, dtype=torch.float32)}
    calls["of codes"] = codes
    calls["of codes and rotary features"] = {**codes, "query_rope": draw(2, _N, 3, _D, dtype=torch.bfloat16)}
    calls["values packed by eight"] = {**calls["BNSD"], "value": ints(draw, [[[list(range(_D // 8))] * 3] * _G] * 2)}
    return calls


def _casts(draw: Draw, **target: Any) -> Mapping[str, Mapping[str, Any]]:
    """Tiles need rank 2; where torch_npu allows no private formats, it copies into a plain one."""
    return {
        "rows": {"input": draw(20, 70), **target},
        "codes": {"input": (draw(2, 20, 70) * 20).clamp(-100, 100).to(torch.int8), **target},
        "turned rows": {"input": draw(70, 20).t(), **target},
        "rows that lie apart": {"input": draw(20, 80)[:, :70], **target},
    }


def _casts_in_place(draw: Draw, **target: Any) -> Mapping[str, Mapping[str, Any]]:
    return {"rows": {"input": draw(20, 70), **target}}


def _routing(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    tokens, experts, width = 7, 8, 64
    rest = {
        "x": draw(tokens, width),
        "expert_idx": ints(draw, [[(3 * row + at) % experts for at in range(2)] for row in range(tokens)]),
        "expert_num": experts,
    }
    one = {"scale": draw(1, dtype=torch.float32, shift=20.0), "offset": draw(1, dtype=torch.float32)}
    drops = {"drop_pad_mode": 1, "expert_capacity": 3}
    return {
        "by row": rest,
        "by row, the first": {**rest, "active_num": 5},
        "by row, with counts": {**rest, "active_num": 0, "expert_tokens_num_mode": 2},
        "by one scale": {**rest, **one, "quant_mode": 0, "expert_tokens_num_mode": 1},
        "blocks of experts": {**rest, **drops},
        "blocks of experts, with counts": {**rest, **drops, "expert_tokens_before_capacity_flag": True},
    }


def _sampling(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    rows, words = 3, 100
    noise = draw(rows, words, dtype=torch.float32).abs() + 0.1
    rest = {
        "logits": draw(rows, words, scale=3.0),
        "top_k": ints(draw, [1, 7, 32]),
        "top_p": torch.tensor([0.5, 0.9, 1.0]).to(draw.dtype).to(draw.device),
    }
    # Without its logits the second result is memory that nobody wrote.
    return {"with logits": {**rest, "q": noise, "is_need_logits": True}, "tokens only": {**rest, "q": noise}}


def _pages(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    caches = {"key_cache": draw(9, _P, _G, _D), "value_cache": draw(9, _P, _G, _D // 2)}
    rest = {**caches, "block_tables": ints(draw, [[3, 1], [0, 7]]), "key": draw(23, _G, _D)}
    rest["value"] = draw(23, _G, _D // 2)
    return {
        "lengths": {**rest, "seq_lens": ints(draw, [18, 5])},
        "running sums": {**rest, "seq_lens": ints(draw, [0, 18, 23]), "is_seq_lens_cumsum": True},
        "from the second page": {**rest, "seq_lens": ints(draw, [10, 5]), "seq_offset": ints(draw, [_P, 0])},
    }


def _stored(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    slots = ints(draw, [17, 0, 143, 5, -1])
    return {"rows": {"key": draw(_T, _G, _D), "slot_mapping": slots, "key_cache": draw(9, _P, _G, _D)}}


def _fp4(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    """Codes of 4 bits, two in a byte, with scales of 512 and of 32 neighbours."""
    if draw.device.type == "npu":
        import torch_npu

        if torch_npu.npu.get_soc_version() < _FIRST_OF_ASCEND_950:
            raise NotImplementedError("npu_dual_level_quant_matmul: only Ascend 950 has its formats")
    rows, columns, inner = 4, 24, 1024
    x1, x2 = (ints(draw, [list(range(inner // 2))] * n).to(torch.uint8) for n in (rows, columns))
    call: dict[str, Any] = {
        "x1": x1,
        "x2": torch.ops.npu.npu_format_cast(x2, _TILES) if draw.device.type == "npu" else x2,
    }
    for name, number in (("x1", rows), ("x2", columns)):
        call[f"{name}_level0_scale"] = draw(number, inner // 512, dtype=torch.float32)
        call[f"{name}_level1_scale"] = ints(draw, [[[127, 127]] * (inner // 64)] * number).to(torch.uint8)
    return {"half": {**call, "output_dtype": 5}, "bfloat16": call}


_PREFIX = "_npu_fused_infer_attention_score"
_CALLS: Mapping[str, Calls] = {
    f"{_PREFIX}_get_max_workspace": lambda draw: {"pages": _first(draw)},
    f"{_PREFIX}_infer_output": partial(
        _inferred, heads="num_heads", log_sum="softmax_lse_flag", scale="quant_scale2"
    ),
    f"{_PREFIX}_v2_get_max_workspace": lambda draw: {"pages": _second(draw)},
    f"{_PREFIX}_v2_infer_output": partial(
        _inferred, heads="num_query_heads", log_sum="return_softmax_lse", scale="quant_scale_out"
    ),
    "npu_dual_level_quant_matmul": _fp4,
    "npu_format_cast": partial(_casts, acl_format=_TILES),
    "npu_format_cast.Tensor": lambda draw: _casts(draw, dst=draw(20, 70)),
    "npu_format_cast_": lambda draw: _casts_in_place(draw, src=draw(20, 70)),
    "npu_format_cast_.acl_format": partial(_casts_in_place, acl_format=_PLAIN),
    "npu_fused_infer_attention_score.out": partial(_written, call=_first),
    "npu_fused_infer_attention_score_v2.out": partial(_written, call=_second),
    "npu_gather_pa_kv_cache": _pages,
    "npu_moe_init_routing_quant": _routing,
    "npu_scatter_pa_cache.value": _stored,
    "npu_silu_": lambda draw: {"rows": {"input": draw(_T, _D)}, "rows that lie apart": {"input": draw(_T, 80)[:, :_D]}},
    "npu_top_k_top_p_sample": _sampling,
    "npu_transpose.out": lambda draw: {"turned": {"input": draw(4, 6, 8), "perm": [2, 0, 1], "out": draw(8, 4, 6)}},
}  # fmt: skip


def samples_of(calls: Calls) -> Callable[[torch.device], Iterator[Sample]]:
    """Return device -> samples, of calls by name; half precision, since ATB's masks of bf16 mean something else."""

    def samples(device: torch.device) -> Iterator[Sample]:
        for name, kwargs in calls(Draw(torch.float16, device)).items():
            yield Sample(name=name, kwargs=kwargs)

    return samples


SAMPLES: Mapping[str, Callable[[torch.device], Iterator[Sample]]] = {
    f"npu::{name}": samples_of(calls) for name, calls in _CALLS.items()
}
"""Op -> device -> calls, arguments by the names of its schema."""
