"""core/common/passes/attention/cache.py: attention writes the cache it reads, exactly and in its old place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.common.ops.attention.dense import DENSE_ATTENTION
from core.common.passes.attention.cache import FUSE_ATTENTION_CACHE
from core.common.passes.attention.lift import LIFT_ATTENTION
from core.compilation.implementations import choose_implementations
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from core.verify.verify import checker

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
B, H, K, T, S, D = 2, 4, 2, 3, 12, 16
PASSES = (LIFT_ATTENTION, FUSE_ATTENTION_CACHE)


class Layer:
    """An attention over a static cache, as transformers writes one."""

    def __init__(self, dtype: torch.dtype, *, eager: bool = False) -> None:
        self.keys, self.values = (
            torch.linspace(start, 1, B * K * S * D).view(B, K, S, D).to(dtype) for start in (0, 2)
        )
        self.length = torch.tensor(4)
        self.eager = eager

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(k.shape[2]) + self.length
        self.length.add_(k.shape[2])
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        return self.keys, self.values

    def attend(self, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        k, v = (x[:, :, None].expand(B, K, H // K, S, D).reshape(B, H, S, D) for x in (k, v))
        if not self.eager:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=m)
        weights = F.softmax(q @ k.transpose(2, 3) * 0.25 + m, dim=-1, dtype=torch.float32)
        return weights.to(q.dtype) @ v

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Any:
        return self.attend(q, *self.update(k, v), m)


def inputs_of(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def draw(heads: int) -> Tensor:
        return torch.randn(B, T, heads, D, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2)

    mask = torch.zeros(B, 1, T, S, dtype=dtype).masked_fill(torch.ones(T, S).tril(4) == 0, torch.finfo(dtype).min)
    return {"q": draw(H), "k": draw(K), "v": draw(K), "m": mask}


def run(model: Callable[..., Any], inputs: dict[str, Tensor]) -> tuple[TracedGraph, PassReport]:
    graph = trace(lambda q, k, v, m: model(q, k, v, m), inputs)
    check = checker([graph.values(inputs)], "full")
    lifted, cached = PassManager(PASSES, strict=True).run(graph.module, check=check)
    assert lifted.matched > 0 and not lifted.near_misses
    return graph, cached


def ops(graph: TracedGraph) -> list[Any]:
    return [node for node in graph.module.graph.nodes if node.target is DENSE_ATTENTION.overload]


def left(graph: TracedGraph) -> list[Any]:
    return [node for node in graph.module.graph.nodes if str(node.target) in ("index_copy_", "expand", "softmax")]


@pytest.mark.cases(2)
@DTYPES
@pytest.mark.parametrize("eager", [False, True], ids=["one op", "written out"])
def test_attention_takes_in_both_writes(eager: bool, dtype: torch.dtype) -> None:
    inputs = inputs_of(dtype)
    graph, report = run(Layer(dtype, eager=eager), inputs)
    assert report.matched == 1 and not report.near_misses
    (node,) = ops(graph)
    assert not left(graph)
    assert [node.kwargs[name].op for name in ("key_cache", "value_cache")] == ["placeholder"] * 2
    assert [operand.meta["example_value"].shape[2] for operand in node.args] == [T, T, T]
    # Counting the tokens stays outside.
    assert len(graph.module.graph.find_nodes(op="call_method", target="add_")) == 1


@DTYPES
def test_the_caches_hold_every_bit_they_held_before(dtype: torch.dtype) -> None:
    inputs, layer = inputs_of(dtype), Layer(dtype)
    graph, _ = run(layer, inputs)
    by_hand = Layer(dtype)
    by_hand(**inputs)
    graph.module(*graph.values(inputs))
    assert torch.equal(layer.keys, by_hand.keys) and torch.equal(layer.values, by_hand.values)
    assert int(layer.length) == int(by_hand.length) == 4 + T


def test_without_an_implementation_the_original_comes_back_bit_by_bit() -> None:
    inputs, by_hand = inputs_of(torch.bfloat16), Layer(torch.bfloat16)
    graph, report = run(Layer(torch.bfloat16), inputs)
    assert report.matched == 1
    # The op with the caches becomes writes and an op without them, and that the model's own nodes.
    assert [choice.implementation for choice in choose_implementations(graph.module, ())] == ["original", "original"]
    assert torch.equal(graph.module(*graph.values(inputs))[0], by_hand(**inputs))


class Indexed(Layer):
    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(k.shape[2]) + self.length
        self.keys[:, :, positions] = k
        self.values[:, :, positions] = v
        return self.keys, self.values


class Returned(Layer):
    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(k.shape[2]) + self.length
        return self.keys.index_copy_(-2, positions, k), self.values.index_copy_(-2, positions, v)


@pytest.mark.cases(2)
@DTYPES
@pytest.mark.parametrize("spelling", [Indexed, Returned])
def test_other_spellings_of_the_write(spelling: type[Layer], dtype: torch.dtype) -> None:
    graph, report = run(spelling(dtype), inputs_of(dtype))
    assert report.matched == 1 and not left(graph)


class Shared(Layer):
    """A second layer reads the cache of the first (Gemma 3n)."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Any:
        keys, values = self.update(k, v)
        return self.attend(self.attend(q, keys, values, m), keys, values, m)


@DTYPES
def test_the_first_of_two_readers_writes(dtype: torch.dtype) -> None:
    graph, report = run(Shared(dtype), inputs_of(dtype))
    first, second = ops(graph)
    assert report.matched == 1 and not report.near_misses and not left(graph)
    assert "key_cache" in first.kwargs and "key_cache" not in second.kwargs
    assert second.args[1] is first.kwargs["key_cache"]


class ReadBetween(Layer):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Any:
        keys, values = self.update(k, v)
        return self.attend(q, keys, values, m + values.sum())


class ReturnedToo(Returned):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Any:
        keys, values = self.update(k, v)
        return self.attend(q, keys, values, m), keys * 2


class TwoPlaces(Layer):
    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, torch.arange(T) + self.length, k)
        self.values.index_copy_(2, torch.arange(T) + 1, v)
        return self.keys, self.values


class KeysAlone(Layer):
    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, torch.arange(T) + self.length, k)
        return self.keys, self.values


class Added(Layer):
    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(T) + self.length
        return self.keys.index_copy_(2, positions, k), self.values.index_add_(2, positions, v)


class Causal(Layer):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (ReadBetween, "uses in between what the new op writes"),
        (ReturnedToo, "has an effect and"),
        (TwoPlaces, "keys are written at"),
        (KeysAlone, "is not a cache that was written along its tokens"),
        (Added, "is not a cache that was written along its tokens"),
        (Causal, "counts from the first row"),
    ],
)
def test_near_misses_keep_their_writes_with_the_reason(layer: type[Layer], reason: str) -> None:
    graph, report = run(layer(torch.float32), inputs_of(torch.float32))
    assert report.matched == 0 and "key_cache" not in ops(graph)[0].kwargs
    (miss,) = report.near_misses
    assert reason in miss.reason


def test_an_attention_without_a_cache_is_none() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    graph, report = run(model, inputs_of(torch.float32))
    assert len(ops(graph)) == 1 and report.matched == 0 and not report.near_misses
