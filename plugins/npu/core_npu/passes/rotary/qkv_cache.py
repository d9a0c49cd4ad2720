"""Fuse split, norms and rotation of query and key, and the write of key and value into an NZ cache, to one kernel.

From the write of the cache (`npu_scatter_pa_kv_cache`, mode PA_NZ) back: its key is a normed and rotated part of a
projection, its value another part, and the query a third one. `npu_qkv_rms_norm_rope_cache` does all of it. It exists
for heads of 128 and caches in blocks of 16 columns; there is no op of torch_npu that does norms and rotation alone, and
without such a cache the kernels stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import fx

from core.common.passes import Guards, NearMiss, Pass, PassContext, Site, near_miss, same_sizes, view
from core_npu.passes.calls import called, read
from core_npu.passes.conditions import HALVES, first_reason, not_row
from core_npu.passes.rotary.qkv_cache_op import CACHE_MODE, qkv_cache_op
from core_npu.passes.rotary.qkv_examples import cached_heads
from core_npu.passes.rotary.rotated import Part, Rotated, others, part_of, rotated, unviewed
from core_npu.passes.streams import streams

_HEAD_SIZE = 128
_COLUMNS = 16
_WRITE = "npu_scatter_pa_kv_cache"


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the write of a cache at a node with all that leads to it, and the query beside it."""
    if called(node) != _WRITE:
        return None
    given = read(node)
    key = rotated(unviewed(given["key"])[0])
    if key is None:
        return None
    value = part_of(unviewed(given["value"])[0])
    query = next(_queries(context.graph, key), None)
    if value is None or query is None or value.split is not key.part.split:
        return near_miss(node, f"{key.result} and what is written beside it come of different projections")
    parts = (query.part.index, key.part.index, value.index)
    reason = first_reason(
        "" if parts == (0, 1, 2) else f"{key.part.split} has its parts in another order than query, key, value",
        _heads(query, key),
        _tables(query, key),
        _cache(given, key),
        _readers(node, given, query, key, value),
    )
    return near_miss(node, reason) if reason else _site(node, given, query, key, value)


def _queries(graph: fx.Graph, key: Rotated) -> Iterator[Rotated]:
    """Yield the other normed and rotated parts of the key's projection."""
    for node in graph.nodes:
        found = rotated(node)
        if found is not None and found.part.split is key.part.split and found.part.index != key.part.index:
            yield found


def _heads(query: Rotated, key: Rotated) -> str:
    source = key.part.source
    sizes, dtype = key.part.sizes, view.dtype(source)
    head = (view.shape(key.given["gamma"]) or (0,))[-1]
    if head != _HEAD_SIZE:
        return f"heads have {head} features, the kernel takes {_HEAD_SIZE}"
    if dtype not in HALVES:
        return f"{source} is {dtype}"
    if len(sizes) != 3 or any(type(size) is not int or size % head for size in sizes) or sizes[1] != sizes[2]:
        return f"{key.part.split} has parts of {sizes}, not of whole heads with as many for keys as for values"
    eps = [side.given["epsilon"] for side in (query, key)]
    return first_reason(
        "" if eps[0] == eps[1] else f"the norms have eps {eps[0]} and {eps[1]}",
        *(not_row("gamma", side.given["gamma"], side.norm_input) for side in (query, key)),
    )


def _tables(query: Rotated, key: Rotated) -> str:
    """Return why query and key are not both rotated by one table row per token over all features, or ""."""
    if (query.cos, query.sin) != (key.cos, key.sin):
        return f"{query.result} and {key.result} are turned by different tables"
    modes = {query.mode, key.mode}
    if modes != {"half"}:
        return f"pairs are {' and '.join(sorted(modes))}, the kernel's half"
    num_tokens = (view.shape(key.part.source) or (0,))[0]
    for table in (key.cos, key.sin):
        for side in (query, key):
            turned, shape = view.shape(side.turned) or (), view.shape(table) or ()
            rows = (*turned[:-2], 1, _HEAD_SIZE)
            if len(shape) != len(rows) or not same_sizes(shape, rows):
                return f"{table} has shape {tuple(shape)}, the kernel takes one row for each token: {rows}"
            if not same_sizes((prod(turned[:-2]),), (num_tokens,)):
                return f"{side.turned} has not its {num_tokens} tokens before its heads"
        if view.dtype(table) != view.dtype(key.part.source):
            return f"{table} is {view.dtype(table)}, not as the values"
    return ""


def _cache(given: Mapping[str, Any], key: Rotated) -> str:
    if given["cache_mode"] != CACHE_MODE:
        return f"the cache lies in mode {given['cache_mode']}, the kernel's in {CACHE_MODE}"
    if any(given[name] is not None for name in ("compress_lens", "compress_seq_offsets", "seq_lens")):
        return "the cache is compressed"
    dtype, width = view.dtype(key.part.source), key.part.sizes[1]
    for name in ("key_cache", "value_cache"):
        cache, shape = given[name], view.shape(given[name]) or ()
        columns = len(shape) == 4 and same_sizes((shape[1], shape[3]), (width // _COLUMNS, _COLUMNS))
        if not columns or view.dtype(cache) != dtype:
            return f"{cache} is {view.dtype(cache)} {tuple(shape)}, the kernel takes {dtype} in columns of {_COLUMNS}"
        if type(shape[2]) is not int or shape[2] % _COLUMNS:
            return f"{cache} has blocks of {shape[2]} tokens, no multiple of {_COLUMNS}"
    slots = given["slot_mapping"]
    if view.dtype(slots) != torch.int64 or len(view.shape(slots) or ()) != 1:
        return f"{slots} is {view.dtype(slots)}, the kernel takes slots in one dimension of int64"
    return ""


def _readers(node: fx.Node, given: Mapping[str, Any], query: Rotated, key: Rotated, value: Part) -> str:
    """Return the other readers of values that the kernel would not return, or ""."""
    turns = (query.turn, key.turn) if query.turn is key.turn else ()
    written = unviewed(given["key"])[1]
    beside = unviewed(given["value"])[1]
    return first_reason(
        *others(query.steps, turns),
        *others((*key.steps, *written, node), turns),
        *others((value.node, *beside, node), ()),
        *(f"{user} reads {key.turn} too" for user in key.turn.users if turns and user not in _results(query, key)),
    )


def _results(query: Rotated, key: Rotated) -> tuple[fx.Node, fx.Node]:
    return query.result, key.result


def _site(node: fx.Node, given: Mapping[str, Any], query: Rotated, key: Rotated, value: Part) -> Site | NearMiss:
    shape = view.shape(query.result) or ()
    sizes = [size if type(size) is int else -1 for size in shape]
    if sizes.count(-1) > 1:
        return near_miss(node, f"tokens are spread over several dimensions of {query.result}")
    tables = (query.given["gamma"], key.given["gamma"], key.cos, key.sin)
    args = (key.part.source, *tables, *(given[name] for name in ("slot_mapping", "key_cache", "value_cache")))
    written = (*unviewed(given["key"])[1], *unviewed(given["value"])[1])
    return Site(
        anchor=query.result,
        target=qkv_cache_op(),
        args=(*args, query.given["epsilon"], sizes),
        interior=(*dict.fromkeys((key.part.split, *query.steps, *key.steps, value.node, *written)), node),
    )


FUSE_QKV_RMS_NORM_ROPE_CACHE = Pass(
    name="fuse_npu_qkv_rms_norm_rope_cache",
    find=find,
    does="Fuse every such write of a cache and what leads to it.",
    guards=Guards(scopes=streams, dtypes=HALVES),
    examples=cached_heads,
    owner="npu",
)
