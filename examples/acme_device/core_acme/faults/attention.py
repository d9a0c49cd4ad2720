"""Faults of the attention kernel: each takes the implementations and returns them with attention's function wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from core.common.ops.attention.paged import ATTENTION, fake, write_cache
from core.common.ops.implementation import OpCall, OpImplementation
from torch import Tensor

from core_acme.attention import PAGED_ATTENTION, Options, attend
from core_acme.faults.ops import Fault, Implementations, changing

Arguments = dict[str, Any]
Function = Callable[..., Any]


def _wrong(wrong: Callable[[Function, Arguments], Any]) -> Fault:
    """Make a function the fault of its name: it attends, given the honest function and all arguments by name.

    They are all arguments of the schema, defaults filled in.
    """

    def change(honest: Function) -> Function:
        return lambda *args, **options: wrong(honest, dict(ATTENTION.bind(args, options).args))

    return changing(change, "attention")


def _given(change: Callable[[Arguments], Arguments]) -> Fault:
    """Make a function the fault of its name: it says which arguments the honest function is given instead."""
    return _wrong(lambda honest, given: honest(**given | change(given)))


_POSITIONAL = tuple(a.name for a in ATTENTION.overload._schema.arguments if not a.kwarg_only)


def _late(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    """Attend, then write key and value into the cache."""
    key_cache, value_cache, block_table, slot_mapping, seq_lens, query_starts, *options = rest
    result = attend(query, (key_cache, value_cache, block_table), seq_lens, query_starts, Options(*options))
    write_cache(key, value, key_cache, value_cache, slot_mapping)
    return result


paged_attention_late = torch.library.custom_op(
    "acme_faults::paged_attention_late",
    _late,
    mutates_args=("key_cache", "value_cache"),
    schema=str(PAGED_ATTENTION._schema).removeprefix("acme::paged_attention"),
)
paged_attention_late.register_fake(lambda query, *arguments: fake(query, *arguments[:8]))


@_wrong
def attention_stale_row(honest: Function, given: Arguments) -> Any:
    """Let the write and the read of the cache race, the read first."""
    return paged_attention_late(*(given[name] for name in (*_POSITIONAL, *Options._fields)))


@_given
def attention_length(given: Arguments) -> Arguments:
    """Take lengths for last positions."""
    return {"seq_lens": (given["seq_lens"] - 1).clamp(min=0)}


@_given
def attention_rejected(given: Arguments) -> Arguments:
    """Forget to take a rejected draft back: a sequence goes on behind it, where its blocks have room."""
    lengths, room = given["seq_lens"], given["block_table"].shape[1] * given["key_cache"].shape[1]
    return {"seq_lens": torch.where((lengths > 0) & (lengths < room), lengths + 1, lengths)}


@_given
def attention_scale(given: Arguments) -> Arguments:
    """Compute the scale from a rounded head size."""
    return {"scale": given["scale"] * 1.02}


@_given
def attention_padding(given: Arguments) -> Arguments:
    """Know no null block: a slot below the first owned one becomes that."""
    return {"slot_mapping": given["slot_mapping"].clamp(min=given["key_cache"].shape[1])}


@_wrong
def attention_padding_rows(honest: Function, given: Arguments) -> Any:
    """Let the last sequence go on to the end of the rows, with nothing said of where it begins there."""
    result, starts = honest(**given), given["query_starts"]
    rows = torch.arange(result.shape[0], device=starts.device)
    return result[rows.minimum((starts[-1] - 1).clamp(min=0))]


@_given
def attention_window(given: Arguments) -> Arguments:
    """Count the positions to the left of a token, as other libraries do."""
    return {"window": given["window"] + 1 if given["window"] else 0}


@_given
def attention_chunk_as_window(given: Arguments) -> Arguments:
    """Know windows alone, as most kernels do."""
    return {"chunked": False}


@_given
def attention_chunk_size(given: Arguments) -> Arguments:
    """Count a chunk's last position twice."""
    return {"window": given["window"] + given["chunked"]}


@_wrong
def attention_chunk_of_step(honest: Function, given: Arguments) -> Any:
    """Take the step's tokens for whole sequences: chunks then hold no earlier ones."""
    result, starts, page = honest(**given), given["query_starts"], given["key_cache"].shape[1]
    if not given["chunked"]:
        return result
    num_seqs, width = given["block_table"].shape[0], -(-result.shape[0] // page)
    rows = torch.arange(result.shape[0], dtype=starts.dtype, device=starts.device)
    sequence = torch.bucketize(rows, starts[1:], right=True).clamp(max=num_seqs - 1)
    slots = (1 + sequence * width) * page + rows - starts[sequence]
    blocks = 1 + torch.arange(num_seqs * width, dtype=torch.int32, device=starts.device)
    own: Arguments = {
        name: torch.zeros_like(given[name][:1]).repeat(1 + num_seqs * width, 1, 1, 1)
        for name in ("key_cache", "value_cache")
    }
    own["slot_mapping"] = slots.masked_fill(rows >= starts[-1], 0).long()
    return honest(**given | own | {"block_table": blocks.view(num_seqs, width), "seq_lens": starts.diff()})


@_given
def attention_sinks(given: Arguments) -> Arguments:
    """Drop an argument that few models give."""
    return {"sinks": None}


@_wrong
def attention_heads(honest: Function, given: Arguments) -> Any:
    """Give query head h the key head h % K instead of h // G."""
    num_heads, num_kv_heads = given["query"].shape[1], given["key"].shape[1]
    order = torch.arange(num_heads, device=given["query"].device).view(-1, num_kv_heads).T.flatten()
    sinks = None if given["sinks"] is None else given["sinks"][order]
    return honest(**given | {"query": given["query"][:, order], "sinks": sinks})[:, order.argsort()]


@_given
def attention_blocks(given: Arguments) -> Arguments:
    """Read one run of memory per sequence, as a cache without pages would have it."""
    table = given["block_table"]
    following = table[:, :1] + torch.arange(table.shape[1], dtype=table.dtype, device=table.device)
    return {"block_table": following.clamp(max=given["key_cache"].shape[0] - 1)}


@_wrong
def attention_nan(honest: Function, given: Arguments) -> Any:
    """Trust that a weight of zero hides a value: add what 0 * value gives over all positions of the block table."""
    result, starts = honest(**given), given["query_starts"]
    rows = torch.arange(result.shape[0], dtype=starts.dtype, device=starts.device)
    sequence = torch.bucketize(rows, starts[1:], right=True).clamp(max=given["block_table"].shape[0] - 1)
    values = given["value_cache"][given["block_table"][sequence].long()].flatten(1, 2)  # (T, M * P, K, V)
    leak = (0.0 * values).sum(1).repeat_interleave(result.shape[1] // values.shape[2], dim=1)
    return result + leak.masked_fill((rows >= starts[-1])[:, None, None], 0.0).to(result.dtype)


def condition_lies(implementations: Implementations) -> Implementations:
    """Ask the condition about everything but the mask."""

    def unasked(honest: OpImplementation) -> OpImplementation:
        def condition(call: OpCall) -> str | None:
            return honest.condition(replace(call, args=MappingProxyType({**call.args, "mask": None})))

        return replace(honest, condition=condition)

    return tuple(unasked(i) if i.op == ATTENTION.qualified_name else i for i in implementations)
