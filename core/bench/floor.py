"""Computes the floor of a step: the least bytes and operations that any implementation needs.

Counted: every weight once, of the embedding only the rows looked up, of experts only those that can be hit; the keys
and values of the context read and the new ones written; recurrent states written, and read where there is a context.
Not counted: activations, which a cache may hold, and what recurrent layers compute beside their products.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from core.bench.rates import Rates
from core.engine.inspect.attention import NotPageable, inspect
from core.engine.inspect.masks import ALL, Reach
from core.engine.inspect.recurrent import inspect_recurrence
from core.quantization.layers import QuantizedModule, num_values

CODED_RATE = 2.0
"""Assumed speed of products of 8-bit codes relative to products in the model's dtype, from data sheets of matrix units.
Not measured."""
_EXPERTS = re.compile(r"(?:^|\.)experts\.")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOP_K = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheLayer:
    """One attention layer."""

    bytes_per_position: int
    num_heads: int
    key_size: int
    value_size: int
    reach: Reach = ALL


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes that determine the floor."""

    #: Bytes of an unquantised element.
    itemsize: int
    hidden: int
    vocab: int
    #: Elements of the matrices that every token goes through, except `head`.
    dense: int
    #: Elements of the last matrix, from hidden states to logits.
    head: int
    #: Elements of the matrices of all experts.
    experts: int
    #: Elements of everything with one dimension.
    vectors: int
    num_experts: int
    top_k: int
    layers: tuple[CacheLayer, ...]
    #: Bytes of one sequence's recurrent states.
    state_bytes: int = 0
    #: Bytes of a quantised model's `dense` matrices, scales included; None: `itemsize` for each element.
    dense_bytes: int | None = None
    #: The same of the experts.
    experts_bytes: int | None = None
    #: Part of the matrices' elements whose products take codes of 8 bits on both sides.
    coded: float = 0.0

    def expert_share(self, num_tokens: int) -> float:
        """Return the part of the experts that so many tokens can hit at most."""
        return min(self.num_experts, num_tokens * self.top_k) / self.num_experts if self.num_experts else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """The floor of one step, at the measured rates."""

    weight_bytes: int
    cache_bytes: int
    flops: int
    bytes_ms: float
    flops_ms: float

    @property
    def ms(self) -> float:
        """Milliseconds that a step takes at least: the larger of the times of its bytes and of its operations."""
        return max(self.bytes_ms, self.flops_ms)

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON-ready values."""
        return {**asdict(self), "ms": self.ms}


def shape_of(model: Any, max_len: int, cache_dtype: torch.dtype | None = None) -> Shape:
    """Read the sizes off a model. max_len: the longest context that will occur. cache_dtype: None for the model's."""
    config = model.config.get_text_config()
    embedding: nn.Module = model.get_input_embeddings()
    head: nn.Module | None = model.get_output_embeddings()
    table, last = embedding.weight, None if head is None else head.weight
    quantized = {id(each) for m in model.modules() if isinstance(m, QuantizedModule) for each in m.parameters()}
    coding = {id(p) for m in model.modules() if _multiplies_codes(m) for p in m.parameters()}
    dense = experts = vectors = dense_bytes = experts_bytes = coded = 0
    for name, parameter in model.named_parameters():
        if parameter is table or parameter is last:
            continue
        count = num_values(name, parameter) if id(parameter) in quantized else parameter.numel()
        coded += count if id(parameter) in coding else 0
        if _EXPERTS.search(name):
            experts, experts_bytes = experts + count, experts_bytes + parameter.nbytes
        elif parameter.dim() < 2 and id(parameter) not in quantized:
            vectors += count
        else:
            dense, dense_bytes = dense + count, dense_bytes + parameter.nbytes
    return Shape(
        itemsize=next(model.parameters()).element_size(),
        hidden=int(table.shape[1]),  # type: ignore[index]
        vocab=int(table.shape[0]),  # type: ignore[index]
        dense=dense,
        head=0 if last is None else int(last.numel()),  # type: ignore[operator]
        experts=experts,
        vectors=vectors,
        num_experts=_first(config, _NUM_EXPERTS) if experts else 0,
        top_k=_first(config, _TOP_K) if experts else 0,
        layers=_layers(model, config, max_len, cache_dtype),
        state_bytes=_state_bytes(model),
        dense_bytes=dense_bytes if quantized else None,
        experts_bytes=experts_bytes if quantized else None,
        coded=coded / (dense + experts) if coded else 0.0,
    )


def _multiplies_codes(module: nn.Module) -> bool:
    """Tell whether a layer multiplies 8-bit codes by 8-bit codes, rather than dequantised values."""
    return isinstance(module, QuantizedModule) and not module.continuous and module.scheme.activations is not None


def decode_floor(shape: Shape, rates: Rates, batch: int, context: float) -> Floor:
    """Return the floor of a decode step of `batch` sequences with `context` tokens each, the new one included."""
    return _floor(shape, rates, rows=batch, num_tokens=batch, lens=[context] * batch, fresh=1)


def prefill_floor(shape: Shape, rates: Rates, num_tokens: int) -> Floor:
    """Return the floor of a prompt of so many tokens, without reads of cache entries that the prefill itself writes."""
    return _floor(shape, rates, rows=1, num_tokens=num_tokens, lens=[num_tokens], fresh=num_tokens)


def _floor(shape: Shape, rates: Rates, *, rows: int, num_tokens: int, lens: Sequence[float], fresh: int) -> Floor:
    share = shape.expert_share(num_tokens)
    cache, flops = float(len(lens) * shape.state_bytes * (2 if fresh == 1 else 1)), 0.0
    for layer in shape.layers:
        for length in lens:
            seen = _seen(length, layer.reach)
            # A new position counts only its write: its keys and values need not be read from memory.
            cache += layer.bytes_per_position * (max(seen - fresh, 0) + fresh)
            pairs = seen * fresh if fresh == 1 else _causal_pairs(fresh, layer.reach)
            flops += 2 * layer.num_heads * (layer.key_size + layer.value_size) * pairs
    active = shape.top_k / shape.num_experts if shape.num_experts else 0.0
    products = 2 * num_tokens * (shape.dense + active * shape.experts)
    flops += products + 2 * rows * shape.head
    dense = shape.dense * shape.itemsize if shape.dense_bytes is None else shape.dense_bytes
    experts = shape.experts * shape.itemsize if shape.experts_bytes is None else shape.experts_bytes
    weight = dense + share * experts + (shape.head + shape.vectors + num_tokens * shape.hidden) * shape.itemsize
    return Floor(
        weight_bytes=round(weight),
        cache_bytes=round(cache),
        flops=round(flops),
        bytes_ms=(weight + cache) / rates.most_bytes_per_s * 1e3,
        flops_ms=(flops - products * shape.coded * (1 - 1 / CODED_RATE)) / rates.flops_per_s * 1e3,
    )


def _seen(length: float, reach: Reach) -> float:
    """Return how many positions the last token of a sequence sees."""
    if reach.chunked:
        return (length - 1) % reach.window + 1
    return min(length, reach.window) if reach.window else length


def _causal_pairs(num_tokens: int, reach: Reach) -> int:
    """Return the number of (query, key) pairs that a causal mask allows."""
    size = min(reach.window, num_tokens) if reach.window else num_tokens
    whole, rest = divmod(num_tokens, max(size, 1))
    if reach.chunked:
        return whole * (size * (size + 1) // 2) + rest * (rest + 1) // 2
    return size * (size + 1) // 2 + (num_tokens - size) * size


def _layers(model: Any, config: Any, max_len: int, cache_dtype: torch.dtype | None) -> tuple[CacheLayer, ...]:
    try:
        found = inspect(model, max_len=max_len).values()
    except NotPageable:
        heads = int(getattr(config, "num_attention_heads", 0) or 0)
        kv_heads = int(getattr(config, "num_key_value_heads", 0) or heads)
        size = int(getattr(config, "head_dim", 0) or (config.hidden_size // heads if heads else 0))
        width = 2 * kv_heads * size * next(model.parameters()).element_size()
        layer = CacheLayer(bytes_per_position=width, num_heads=heads, key_size=size, value_size=size)
        return (layer,) * int(getattr(config, "num_hidden_layers", 0) or 0)
    return tuple(
        CacheLayer(
            bytes_per_position=replace(layer, dtype=cache_dtype or layer.dtype).bytes_per_position,
            num_heads=layer.num_heads,
            key_size=layer.key_size,
            value_size=layer.value_size,
            reach=layer.reach,
        )
        for layer in found
    )


def _state_bytes(model: Any) -> int:
    try:
        return inspect_recurrence(model).bytes_per_sequence
    except NotPageable:  # it runs on transformers' static cache, which is not looked into
        return 0


def _first(config: Any, names: Sequence[str]) -> int:
    return next((int(value) for name in names if (value := getattr(config, name, None))), 0)
