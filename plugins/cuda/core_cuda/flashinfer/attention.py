"""`core::attention` and `core::rotary_attention` by FlashInfer's prefill attention over pages.

Rotation and the write of the cache are kernels of this plugin; FlashInfer then reads all keys and values from the
cache. By name there are two: FlashAttention 2, which packs the heads of a group and serves decode too, and
FlashAttention 3, for compute capability 9.0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from core.common.ops.implementation import Condition, OpCall
from core_cuda.flashinfer.building import HALF, HOPPER, attention_module, not_ahead
from core_cuda.flashinfer.planning import Bounds, planned
from core_cuda.ops import launching
from core_cuda.ops.attention import prefill
from core_cuda.ops.cache_write import write_cache
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.rotary.rotation import rotate_and_write

HEAD_SIZES = (64, 128, 256)
_OPTIONS = ("scale", "window", "softcap", "causal", "max_query_len")
_LEFT_OUT = ("chunked", "sinks", "mask", "k_scale", "v_scale")
_ONE_TOKEN = "each sequence has one new token, for which a tile of FlashAttention 3 is mostly padding"
_SEVERAL = "sequences have several new tokens, and FlashAttention 3 serves these on this GPU"


def why_not(backend: str, condition: Condition) -> Condition:
    """Return the condition of one of FlashInfer's two; condition: of the plugin's kernels before it."""

    def refusal(call: OpCall) -> str | None:
        args = call.args
        query, value = args["query"], args["value"]
        if reason := condition(call):
            return reason
        if query.dtype not in HALF:
            return f"query is {query.dtype}, and the kernel takes {', '.join(map(str, HALF))}"
        if args["key_cache"].dtype != query.dtype:
            return "the cache holds codes, whose scales the kernel takes as numbers of the host"
        if args["sinks"] is not None:
            return "it has sinks, and the kernel has none"
        if args["chunked"]:
            return "each token sees its own chunk, and the kernel knows windows that end at a token"
        size = query.shape[2]
        if size not in HEAD_SIZES or value.shape[2] != size:
            return f"heads have {size} and {value.shape[2]} features, and the kernel takes {HEAD_SIZES}, both the same"
        if args["key_cache"].stride() != args["value_cache"].stride():
            return "the caches differ in their strides, and the kernel has one set of them"
        if backend == "fa3" and launching.capability() != HOPPER:
            return "it is a kernel for compute capability 9.0"
        if backend == "fa3" and args["window"]:
            return "positions that left the window may hold anything, and the kernel multiplies some of them by zero"
        return None

    return refusal


def timed(backend: str) -> Condition:
    """Return the condition under which one of FlashInfer's two is worth timing at the sizes of a call."""

    def refusal(call: OpCall) -> str | None:
        args = call.args
        if backend == "fa3" and args["max_query_len"] == 1:
            return _ONE_TOKEN
        query, window = args["query"], args["window"] > 0
        if backend == "fa2" and args["max_query_len"] != 1 and not window and launching.capability() == HOPPER:
            return _SEVERAL
        form = {"window": window, "softcap": args["softcap"] > 0}
        return not_ahead(attention_module(backend, query.dtype, query.shape[2], **form))

    return refusal


def _attend(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor, Tensor],
    options: dict[str, Any],
    backend: str,
) -> Tensor:
    """Attend to what the caches hold. places: block_table, seq_lens and query_starts."""
    table, seq_lens, query_starts = places
    if not len(query):
        return query.new_empty(query.shape)
    query = query if query.stride(2) == 1 else query.contiguous()
    bounds = Bounds(
        backend=backend,
        tokens=query.shape[0],
        sequences=seq_lens.shape[0],
        width=table.shape[1],
        page=caches[0].shape[1],
        heads=query.shape[1],
        kv_heads=caches[0].shape[2],
        size=query.shape[2],
        dtype=query.dtype,
        scale=options["scale"],
        window=options.get("window", 0),
        softcap=options.get("softcap", 0.0),
        causal=options.get("causal", True),
        single=options.get("max_query_len", 0) == 1,
    )
    return planned(bounds, query.device).run(query, caches, seq_lens, query_starts, table)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    *,
    backend: str,
    **options: Any,
) -> Tensor:
    """Do what `core::attention` does, for calls that `why_not` lets pass; returns (T, H, D), contiguous."""
    write_cache(key, value, key_cache, value_cache, slot_mapping, query_starts)
    return _attend(query, (key_cache, value_cache), (block_table, seq_lens, query_starts), options, backend)


def _rotary_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    *,
    backend: str,
    **options: Any,
) -> Tensor:
    """Do what `core::rotary_attention` does, for calls that `why_not` lets pass; returns (T, H, D), contiguous."""
    attention = {name: options.pop(name) for name in _OPTIONS if name in options}
    for name in _LEFT_OUT:
        options.pop(name, None)
    new = (key_cache, value_cache, slot_mapping, query_starts)
    query, _, _ = rotate_and_write(query, key, value, cos, sin, *new, **options)
    return _attend(query, (key_cache, value_cache), (block_table, seq_lens, query_starts), attention, backend)


def _registered(op: Any, run: Callable[..., Tensor], condition: Condition) -> dict[str, tuple[Any, Condition]]:
    """Return the kernel and the condition of an op by FlashInfer's name for the algorithm."""
    return {
        backend: (kernel_of(op, f"flashinfer_{backend}")(partial(run, backend=backend)), why_not(backend, condition))
        for backend in ("fa2", "fa3")
    }


ATTENTIONS = _registered(ATTENTION, _attention, prefill.why_not)
ROTARY_ATTENTIONS = _registered(ROTARY_ATTENTION, _rotary_attention, prefill.why_not_rotary)
