"""Faults of the attention kernel: each takes the implementations and returns them with attention's function wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from core.common.ops.attention.paged import ATTENTION, fake, write_cache
from core.common.ops.implementation import OpCall, OpImplementation
from torch import Tensor

from core_acme.attention import Options, attend

Implementations = Sequence[OpImplementation]
Arguments = dict[str, Any]
_POSITIONAL = tuple(a.name for a in ATTENTION.overload._schema.arguments if not a.kwarg_only)
_OP = ATTENTION.qualified_name


def _with_function(implementations: Implementations, wrong: Callable[..., Any]) -> Implementations:
    """Return the implementations; `wrong` is attention's, and is given the honest function and all arguments by name.

    It is called with every argument of the schema, defaults filled in.
    """

    def changed(honest: Callable[..., Any]) -> Callable[..., Any]:
        def attention(*args: Any, **options: Any) -> Any:
            return wrong(honest, dict(ATTENTION.bind(args, options).args))

        return attention

    return tuple(replace(i, fn=changed(i.fn)) if i.op == _OP else i for i in implementations)


def _with_arguments(implementations: Implementations, change: Callable[[Arguments], Arguments]) -> Implementations:
    """Return the implementations; attention's honest function is given some arguments changed."""
    return _with_function(implementations, lambda honest, given: honest(**given | change(given)))


@torch.library.custom_op("acme_faults::paged_attention_late", mutates_args=("key_cache", "value_cache"))
def paged_attention_late(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    causal: bool,
    max_query_len: int,
) -> Tensor:
    """Attend, then write key and value into the cache."""
    options = Options(sinks, scale, window, softcap, causal, max_query_len)
    result = attend(query, (key_cache, value_cache, block_table), seq_lens, query_starts, options)
    write_cache(key, value, key_cache, value_cache, slot_mapping)
    return result


@paged_attention_late.register_fake
def _late_fake(query: Tensor, *arguments: Any) -> Tensor:
    return fake(query, *arguments[:8])


def attention_stale_row(implementations: Implementations) -> Implementations:
    """Let the write and the read of the cache race, the read first."""

    def late(honest: Callable[..., Any], given: Arguments) -> Any:
        last = (given[name] for name in ("sinks", "scale", "window", "softcap", "causal", "max_query_len"))
        return paged_attention_late(*(given[name] for name in _POSITIONAL), *last)

    return _with_function(implementations, late)


def attention_length(implementations: Implementations) -> Implementations:
    """Take lengths for last positions."""
    return _with_arguments(implementations, lambda given: {"seq_lens": (given["seq_lens"] - 1).clamp(min=0)})


def attention_scale(implementations: Implementations) -> Implementations:
    """Compute the scale from a rounded head size."""
    return _with_arguments(implementations, lambda given: {"scale": given["scale"] * 1.02})


def attention_padding(implementations: Implementations) -> Implementations:
    """Know no null block: a slot below the first owned one becomes that."""

    def change(given: Arguments) -> Arguments:
        return {"slot_mapping": given["slot_mapping"].clamp(min=given["key_cache"].shape[1])}

    return _with_arguments(implementations, change)


def attention_padding_rows(implementations: Implementations) -> Implementations:
    """Let the last sequence go on to the end of the rows, with nothing said of where it begins there."""

    def unzeroed(honest: Callable[..., Any], given: Arguments) -> Any:
        result, starts = honest(**given), given["query_starts"]
        rows = torch.arange(result.shape[0], device=starts.device)
        last_real = rows.minimum((starts[-1] - 1).clamp(min=0))
        return result[last_real]

    return _with_function(implementations, unzeroed)


def attention_window(implementations: Implementations) -> Implementations:
    """Count the positions to the left of a token, as other libraries do."""
    return _with_arguments(implementations, lambda given: {"window": given["window"] + 1 if given["window"] else 0})


def attention_sinks(implementations: Implementations) -> Implementations:
    """Drop an argument that few models give."""
    return _with_arguments(implementations, lambda given: {"sinks": None})


def attention_heads(implementations: Implementations) -> Implementations:
    """Give query head h the key head h % K instead of h // G."""

    def in_turns(honest: Callable[..., Any], given: Arguments) -> Any:
        num_heads, num_kv_heads = given["query"].shape[1], given["key"].shape[1]
        order = torch.arange(num_heads, device=given["query"].device).view(-1, num_kv_heads).T.flatten()
        sinks = given["sinks"]
        result = honest(**given | {"query": given["query"][:, order], "sinks": None if sinks is None else sinks[order]})
        return result[:, order.argsort()]

    return _with_function(implementations, in_turns)


def attention_blocks(implementations: Implementations) -> Implementations:
    """Read one run of memory per sequence, as a cache without pages would have it."""

    def change(given: Arguments) -> Arguments:
        table = given["block_table"]
        following = table[:, :1] + torch.arange(table.shape[1], dtype=table.dtype, device=table.device)
        return {"block_table": following.clamp(max=given["key_cache"].shape[0] - 1)}

    return _with_arguments(implementations, change)


def attention_nan(implementations: Implementations) -> Implementations:
    """Trust that a weight of zero hides a value: add what 0 * value gives over all positions of the block table."""

    def leaking(honest: Callable[..., Any], given: Arguments) -> Any:
        result, starts = honest(**given), given["query_starts"]
        rows = torch.arange(result.shape[0], dtype=starts.dtype, device=starts.device)
        sequence = torch.bucketize(rows, starts[1:], right=True).clamp(max=given["block_table"].shape[0] - 1)
        values = given["value_cache"][given["block_table"][sequence].long()].flatten(1, 2)  # (T, M * P, K, V)
        leak = (0.0 * values).sum(1).repeat_interleave(result.shape[1] // values.shape[2], dim=1)
        return result + leak.masked_fill((rows >= starts[-1])[:, None, None], 0.0).to(result.dtype)

    return _with_function(implementations, leaking)


def condition_lies(implementations: Implementations) -> Implementations:
    """Ask the condition about everything but the mask."""

    def unasked(honest: OpImplementation) -> OpImplementation:
        def condition(call: OpCall) -> str | None:
            return honest.condition(replace(call, args=MappingProxyType({**call.args, "mask": None})))

        return replace(honest, condition=condition)

    return tuple(unasked(i) if i.op == _OP else i for i in implementations)
