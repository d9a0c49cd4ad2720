"""The plugin's declarations for a conformance run, and the example call for the renewal of host-side lists."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from core.common.conformance import ConformanceProfile, HostArgumentExample
from core_npu.ops.attention import attend
from core_npu.updates import FromInputs

__all__ = ["PROFILE"]

_IN_PARTS = "host-side lists are renewed in whole graphs; in a graph in parts the ops that take them are break points"
_BATCH, _HEADS, _SIZE, _PAGE = 3, 2, 64, 16
_LENGTHS = ([1, 7, 16], [16, 2, 9], [5, 5, 5])


@torch.library.custom_op("core_npu::attend_decode", mutates_args=())
def _attend_decode(query: Tensor, keys: Tensor, values: Tensor, block_table: Tensor, seq_lens: Tensor) -> Tensor:
    """Attend for one token of each sequence: query (B, H, D), pages (N, P, H * D), seq_lens (B,); returns (B, H, D)."""
    options = {
        "num_heads": query.shape[1],
        "num_key_value_heads": query.shape[1],
        "scale": query.shape[2] ** -0.5,
        "block_size": keys.shape[1],
        "block_table": block_table,
        "input_layout": "BSND",
    }
    host = {"actual_seq_lengths_kv": FromInputs(seq_lens)}
    return attend(query.unsqueeze(1), [keys, values], host, options).squeeze(1)


@_attend_decode.register_fake
def _attend_decode_fake(query: Tensor, keys: Tensor, values: Tensor, block_table: Tensor, seq_lens: Tensor) -> Tensor:
    return torch.empty_like(query)


def _example(device: torch.device) -> HostArgumentExample:
    """Return a decode step of attention over pages, whose lengths the kernel takes from the host."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.float16).to(device)

    return HostArgumentExample(
        function=_attend_decode,
        inputs={
            "query": noise(_BATCH, _HEADS, _SIZE),
            "keys": noise(_BATCH, _PAGE, _HEADS * _SIZE),
            "values": noise(_BATCH, _PAGE, _HEADS * _SIZE),
            "block_table": torch.arange(_BATCH, dtype=torch.int32).view(_BATCH, 1).to(device),
            "seq_lens": torch.tensor(_LENGTHS[0], dtype=torch.int32).to(device),
        },
        steps=tuple({"seq_lens": lengths} for lengths in _LENGTHS),
    )


_UNWRITTEN = "torch_npu 2.13 leaves a result of {} that is not asked for as the memory was: two calls differ"
_MASKED = (
    "torch_npu 2.13 gives the masked results of npu_add_rms_norm_dynamic_quant another shape on fake tensors than on "
    "real ones, and leaves them as the memory was"
)
_FAKES = {
    "fakes/moe_route/npu_moe_route": _UNWRITTEN.format("npu_moe_gating_top_k"),
    "fakes/grouped_mlp/npu_grouped_mlp": _UNWRITTEN.format("npu_moe_init_routing_v2"),
    "fakes/add_rms_norm_quantize/npu_add_rms_norm_quantize": _MASKED,
}
"""Failures of torch's check of traced calls that come from results which no implementation here reads."""

_HIDDEN_WRITE = "torch_npu 2.13: its kernel writes {}, and its schema says that it does not"
_OWN_INPUT = (
    "torch_npu 2.13: it returns its input itself where that has the storage format already (which is so for every call "
    "while private formats are off), and its schema says a new tensor"
)
_SCHEMAS = {
    "fakes/foreign/atb._npu_group_topk": _HIDDEN_WRITE.format("self"),
    "fakes/foreign/npu.npu_fused_infer_attention_score.out": _HIDDEN_WRITE.format("out, which it returns"),
    "fakes/foreign/npu.npu_fused_infer_attention_score_v2.out": _HIDDEN_WRITE.format("out, which it returns"),
    "fakes/foreign/npu.npu_format_cast": _OWN_INPUT,
    "fakes/foreign/npu.npu_format_cast.tensor": _OWN_INPUT,
}
"""Ops with wrong schemas, which no fake can correct; tests compare everything else of these ops."""

PROFILE = ConformanceProfile(
    not_supported=MappingProxyType(
        {
            **{f"graphs/host-arguments/{mode}": _IN_PARTS for mode in ("piecewise", "segmented")},
            **_FAKES,
            **_SCHEMAS,
        }
    ),
    host_argument_example=_example,
)
