"""Attention over the paged cache, plain and behind a rotation, by `npu_fused_infer_attention_score`.

Shapes as in core/common/ops/attention/paged.py. The kernel sees pages of P positions as (N, P, K * D), and the query
in one of two forms:

    packed   (T, H, D) with the ends of the sequences among the rows; heads of 64 and 128, any number of tokens
    decode   (T, 1, H, D), one row a sequence; any head size that 16 divides, without a window: with a single query the
             kernel reads neither mask nor window

Lengths are lists of the host. In a captured graph they belong to a task that is renewed before each replay
(core_npu/updates.py). The workspace is then the kernel's largest, since it can't change with the lengths.

What CANN documents contradicts itself in two places. Pages: multiples of 128 up to 512 for several queries in general,
multiples of 16 up to 1024 for the packed form in particular; the latter is taken. Heads of 64: for as many query as
key/value heads in the guide, for all in the kernel's own check; the latter is taken.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from core.common.ops.implementation import OpCall
from core_npu.ops import rotary
from core_npu.ops.attention_lengths import decode_keys, packed_ends, packed_keys
from core_npu.ops.conditions import HALF, all_of, dtypes, same_dtype
from core_npu.ops.registration import kernel_of
from core_npu.updates import FromInputs, host_values, is_capturing, updatable

__all__ = ["attend", "attention", "attention_condition", "rotary_attention", "rotary_attention_condition"]

PACKED_HEAD_SIZES = (64, 128)
DECODE_HEAD_STEP, MAX_HEAD_SIZE = 16, 512
PAGE_STEP, MAX_PACKED_PAGE, MAX_DECODE_PAGE = 16, 1024, 512
MAX_HEADS, MAX_GROUP = 256, 64
MAX_SEQUENCES = 4096
MAX_ROW = 65535
"""The most elements of all key/value heads of one position."""

_ALL, _CAUSAL, _BAND = 0, 3, 4
"""Sparse modes: no mask; keys up to the query's own position, the last query standing at the last key; and of those
only so many before it."""
_MASK_SIZE = 2048
_MASKS: dict[torch.device, Tensor] = {}

_ROTATION = ("style", "rotary_dim", "compute_dtype", "out_dtype")
_NORM = ("query_weight", "key_weight", "eps", "offset", "norm_compute_dtype", "normed_dtype", "weight_dtype")


@kernel_of(ATTENTION)
def attention(*operands: Tensor, **options: Any) -> Tensor:
    """Do what `core::attention` does, for calls that `attention_condition` lets pass; returns (T, H, V), contiguous."""
    return _write_and_attend(**ATTENTION.bind(operands, options).args)


@kernel_of(ROTARY_ATTENTION)
def rotary_attention(*operands: Tensor, **options: Any) -> Tensor:
    """Do what `core::rotary_attention` does, for calls that `rotary_attention_condition` lets pass."""
    args = dict(ROTARY_ATTENTION.bind(operands, options).args)
    turning = {name: args.pop(name) for name in _ROTATION}
    norm = {name: args.pop(name) for name in _NORM}
    turned = {name: args[name] for name in ("query", "key")}
    turned |= {name: args.pop(name).unsqueeze(1) for name in ("cos", "sin")}
    if args.pop("normalize"):
        query, key = rotary.qk_norm_rotary(**turned, **norm, **turning)
    else:
        query, key = rotary.rotary(**turned, **turning)
    return _write_and_attend(**{**args, "query": query, "key": key})


def _write_and_attend(
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
    scale: float,
    window: int = 0,
    causal: bool = True,
    **_: Any,
) -> Tensor:
    if not query.numel():
        return query.new_empty((*query.shape[:2], value.shape[2]))
    for new, cache in ((key, key_cache), (value, value_cache)):
        write_rows(new, cache, slot_mapping)
    pages = [cache.view(*cache.shape[:2], -1) for cache in (key_cache, value_cache)]
    options: dict[str, Any] = {
        "num_heads": query.shape[1],
        "num_key_value_heads": key.shape[1],
        "scale": scale,
        "block_size": key_cache.shape[1],
        "block_table": block_table,
    }
    if query.shape[2] in PACKED_HEAD_SIZES:
        out = _packed(query.contiguous(), pages, seq_lens, query_starts, options, (causal, window))
    else:
        out = _decode(query.contiguous(), pages, seq_lens, query_starts, options)
    padding = torch.arange(out.shape[0], device=out.device) >= query_starts[-1]
    return out.masked_fill_(padding[:, None, None], 0.0)


def write_rows(new: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write new (T, K, D) into a paged cache (N, P, K, D) at slot_mapping (T,), in place.

    By `npu_scatter_nd_update_`: `npu_scatter_pa_kv_cache` is documented for caches in the device's own format alone.
    Padding rows share a slot of the null block; the order of their writes does not matter.
    """
    rows = cache.view(-1, new.shape[1] * new.shape[2])
    torch.ops.npu.npu_scatter_nd_update_(rows, slot_mapping.view(-1, 1), new.reshape(new.shape[0], -1))


def _packed(
    query: Tensor,
    pages: list[Tensor],
    seq_lens: Tensor,
    query_starts: Tensor,
    options: dict[str, Any],
    sight: tuple[bool, int],
) -> Tensor:
    """Attend for rows (T, H, D) of any number for each sequence; a sequence of padding takes the rows left over."""
    num_rows, table = query.shape[0], options["block_table"]
    causal, window = sight
    options |= {
        "input_layout": "TND",
        "block_table": torch.nn.functional.pad(table, (0, 0, 0, 1)),  # the null block, for padding rows
        "sparse_mode": (_BAND if window else _CAUSAL) if causal else _ALL,
    }
    if causal:
        options["atten_mask"] = _mask(query.device)
    if window:
        options |= {"pre_tokens": window - 1, "next_tokens": 0}
    capacity = table.shape[1] * options["block_size"]
    host = {
        "actual_seq_lengths": FromInputs(query_starts, transform=partial(packed_ends, num_rows)),
        "actual_seq_lengths_kv": FromInputs(seq_lens, query_starts, transform=partial(packed_keys, num_rows, capacity)),
    }
    return attend(query, pages, host, options)


def _decode(
    query: Tensor, pages: list[Tensor], seq_lens: Tensor, query_starts: Tensor, options: dict[str, Any]
) -> Tensor:
    """Attend for rows (T, H, D) of which row i is the one token of sequence i."""
    num_rows, table = query.shape[0], options["block_table"]
    missing = num_rows - table.shape[0]
    fitting = torch.nn.functional.pad(table, (0, 0, 0, missing)) if missing > 0 else table[:num_rows]
    options |= {"input_layout": "BSND", "block_table": fitting}
    keys = FromInputs(seq_lens, query_starts, transform=partial(decode_keys, num_rows))
    return attend(query.unsqueeze(1), pages, {"actual_seq_lengths_kv": keys}, options).squeeze(1)


def attend(query: Tensor, pages: list[Tensor], host: dict[str, FromInputs], options: dict[str, Any]) -> Tensor:
    """Run the kernel and return a result of the query's shape.

    query: in one of the two forms.
    pages: keys and values.
    host: the lengths, by the names of the kernel's arguments.
    options: all other arguments.
    """
    npu = torch.ops.npu
    out, log_sum = torch.empty_like(query), query.new_empty((0,), dtype=torch.float32)
    workspace = None
    if is_capturing():
        # Uses the lengths of the warm-up; the op returns the largest workspace that other lengths may need.
        lengths = {
            name: each.transform(*map(host_values, each.tensors)) if each.transform else host_values(each.tensors[0])
            for name, each in host.items()
        }
        workspace = npu._npu_fused_infer_attention_score_get_max_workspace(query, *pages, **options, **lengths)
    updatable(
        npu.npu_fused_infer_attention_score.out,
        query,
        *pages,
        host=host,
        out=[out, log_sum],
        workspace=workspace,
        **options,
    )
    return out


def _mask(device: torch.device) -> Tensor:
    """Return the mask that the causal modes read, true above the diagonal; made once, in no graph's memory."""
    if device not in _MASKS:
        _MASKS[device] = torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool, device=device).triu_(1)
    return _MASKS[device]


def attention_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::attention`, or None."""
    args = call.args
    if args["mask"] is not None:
        return "there is a mask, and the kernel takes causal ones and windows of the packed cache"
    if not args["causal"] and args["window"]:
        return "there is a window that is not causal"
    return _shared_condition(call)


def rotary_attention_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::rotary_attention`, or None."""
    args = dict(call.args)
    if args["out_dtype"] not in (None, args["query"].dtype):
        return f"query and key go on as {args['out_dtype']}, and the cache holds {args['query'].dtype}"
    turned = {name: args[name] for name in ("query", "key", *_ROTATION)}
    turned |= {name: args[name].unsqueeze(1) for name in ("cos", "sin")}
    if args["normalize"]:
        norm = {name: args[name] for name in _NORM}
        reason = rotary.qk_norm_rotary_condition(OpCall(op="core::qk_norm_rotary", args={**turned, **norm}))
    else:
        reason = rotary.rotary_condition(OpCall(op="core::rotary", args=turned))
    return reason or _shared_condition(call)


def _shared_condition(call: OpCall) -> str | None:
    args = call.args
    if args["chunked"]:
        return "each token sees its own chunk, and the kernel knows windows that end at a token"
    if args["softcap"]:
        return "scores are capped, and the kernel does not cap them"
    if args["sinks"] is not None:
        return "there are sinks, and the kernel has none"
    return _floats(call) or _heads(call) or _form(call) or _memory(call)


_floats = all_of(dtypes(("query",), HALF), same_dtype("query", "key", "value", "key_cache", "value_cache"))


def _heads(call: OpCall) -> str | None:
    query, key, value = (call.args[name] for name in ("query", "key", "value"))
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    if key.shape[2] != value.shape[2]:
        return f"keys have {key.shape[2]} features and values {value.shape[2]}, and paged caches are of one shape"
    if heads > MAX_HEADS or groups > MAX_GROUP:
        return f"{heads} query heads, {groups} to a key/value head: the kernel takes {MAX_HEADS} and {MAX_GROUP}"
    if key.shape[1] * key.shape[2] > MAX_ROW:
        return f"a position has {key.shape[1] * key.shape[2]} features in all heads, and the kernel takes {MAX_ROW}"
    return None


def _form(call: OpCall) -> str | None:
    """Refuse head sizes and pages that neither form takes."""
    args = call.args
    size, page = args["query"].shape[2], args["key_cache"].shape[1]
    most = MAX_PACKED_PAGE
    if size not in PACKED_HEAD_SIZES:
        most = MAX_DECODE_PAGE
        packed = " and ".join(map(str, PACKED_HEAD_SIZES))
        if args["max_query_len"] != 1:
            return f"heads have {size} features, and for several tokens the kernel takes {packed}"
        if args["window"]:
            return f"heads have {size} features, and the kernel knows windows for {packed} alone"
        if size % DECODE_HEAD_STEP or size > MAX_HEAD_SIZE:
            return (
                f"heads have {size} features, and the kernel takes multiples of {DECODE_HEAD_STEP} to {MAX_HEAD_SIZE}"
            )
    if page % PAGE_STEP or page > most:
        return f"blocks have {page} positions, and the kernel takes multiples of {PAGE_STEP} up to {most}"
    sequences = args["seq_lens"].shape[0]
    # A symbolic number of tokens is that of a bucket.
    if isinstance(sequences, int) and sequences >= MAX_SEQUENCES:
        return f"there are {sequences} sequences, and the kernel takes fewer than {MAX_SEQUENCES}"
    return None


def _memory(call: OpCall) -> str | None:
    for name in ("key_cache", "value_cache", "block_table"):
        if not call.args[name].is_contiguous():
            return f"{name} is not contiguous"
    return None
