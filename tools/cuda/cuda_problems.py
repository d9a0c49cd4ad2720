"""What `tools/cuda/tune_cuda.py` tunes: an op at one size each, with its data, its candidates, and what they
compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from cuda_calls import DTYPE, Heads, dense, moved_bytes, paged, randn
from cuda_codes_problems import Int8Linear, WeightOnlyLinear
from cuda_codes_problems import problems as codes_problems
from cuda_expert_problems import FORMATS, Experts, QuantizedExperts
from torch import Tensor
from torch.nn import functional

from core.bench.presets import PRESETS

COUNTS = ((1, 1024), (2, 1024), (4, 1024), (8, 1024), (16, 1024), (32, 1024), (64, 1024), (256, 1024), (1, 8192))
"""Sequences and positions of decode."""
PROMPTS = (128, 512, 1024, 4096)


def _constants(rows: int, depth: int, config: Any) -> tuple[Any, ...]:
    """Return what a kernel of few rows is compiled for; the number of splits only at compute capability 9."""
    least = {"tile": 16, "hopper": 8}.get(config.kernel)
    tall = 1 if least is None else max(least, 1 << (rows - 1).bit_length())
    splits = config.split_k if config.kernel == "hopper" else config.split_k > 1
    return (tall, depth % max(config.block_k, 1) == 0, *{**asdict(config), "split_k": splits}.values())


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer at a number of rows; columns: of its result, behind the gate if it is gated."""

    rows: int
    columns: int
    depth: int
    gated: bool = False

    op = "linear"

    @property
    def shape(self) -> Mapping[str, Any]:
        """What the plugin looks it up by."""
        return asdict(self)

    @property
    def num_bytes(self) -> int:
        """What it must move."""
        return 2 * (self.depth * self.columns * (2 if self.gated else 1) + self.rows * (self.depth + self.columns))

    def make(self, device: str) -> tuple[Tensor, Tensor]:
        """Return x and weight."""
        rows = self.columns * (2 if self.gated else 1)
        return randn(self.rows, self.depth, device=device), randn(rows, self.depth, device=device)

    def candidates(self) -> list[Any]:
        """Return configurations to try."""
        from core_cuda.ops.linear.skinny_configs import candidates

        return list(candidates(self.rows, self.columns, self.depth, gated=self.gated))

    def run(self, data: tuple[Tensor, Tensor], config: Any) -> Tensor:
        """Compute it by the plugin's kernel."""
        from core_cuda.ops.activation import Gate
        from core_cuda.ops.linear.skinny import skinny_linear

        return skinny_linear(*data, gate=Gate("silu") if self.gated else None, config=config)

    def library(self, data: tuple[Tensor, Tensor]) -> Tensor:
        """Compute it by cuBLAS, and its gate by the plugin's kernel."""
        whole = functional.linear(*data)
        if not self.gated:
            return whole
        gated: Tensor = torch.ops.core_cuda.gated_activation_fused(whole, kind="silu")
        return gated

    wanted = library

    def same_kernel(self, config: Any) -> tuple[Any, ...]:
        """Return what the compiled kernel depends on."""
        return (self.gated, *_constants(self.rows, self.depth, config))


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """A linear layer on fp8 codes, with a scale for each row of x and for each row of the weight."""

    rows: int
    columns: int
    depth: int

    op = "quantized_linear"
    library = None

    @property
    def shape(self) -> Mapping[str, Any]:
        """What the plugin looks it up by."""
        return asdict(self)

    @property
    def num_bytes(self) -> int:
        """What it must move."""
        return self.depth * (self.columns + self.rows) + 2 * self.rows * self.columns

    def make(self, device: str) -> tuple[Tensor, ...]:
        """Return x, weight and their scales."""
        codes = [randn(n, self.depth, device=device).to(torch.float8_e4m3fn) for n in (self.rows, self.columns)]
        return (*codes, *(torch.rand(n, device=device) + 0.5 for n in (self.rows, self.columns)))

    def candidates(self) -> list[Any]:
        """Return configurations to try."""
        from core_cuda.ops.linear.quantized import candidates

        return list(candidates(self.rows, self.columns, self.depth))

    def run(self, data: tuple[Tensor, ...], config: Any) -> Tensor:
        """Compute it by the plugin's kernels, or by torch's."""
        from core_cuda.ops.linear.quantized import multiply

        return multiply(data[0], data[1], (data[2], data[3]), None, DTYPE, config)

    def wanted(self, data: tuple[Tensor, ...]) -> Tensor:
        """Compute it by cuBLAS in the dtype of activations."""
        x, weight, x_scale, w_scale = data
        return functional.linear(x.to(DTYPE), weight.to(DTYPE)) * x_scale[:, None] * w_scale

    def same_kernel(self, config: Any) -> tuple[Any, ...]:
        """Return what the compiled kernel depends on."""
        return _constants(self.rows, self.depth, config)


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of sequences with `new` tokens each, of `context` in all; codes: whether the cache holds fp8 codes."""

    batch: int
    new: int
    context: int
    heads: Heads
    codes: bool = False

    library = None

    @property
    def op(self) -> str:
        """Name in the file."""
        return "decode_attention" if self.new == 1 else "prefill_attention"

    @property
    def shape(self) -> Mapping[str, Any]:
        """What the plugin looks it up by."""
        return asdict(self._shape())

    @property
    def num_bytes(self) -> int:
        """What it must move."""
        return moved_bytes(self.batch, self.new, self.context, self.heads, codes=self.codes)

    def make(self, device: str) -> dict[str, Any]:
        """Return a call."""
        return paged(self.batch, self.new, self.context, self.heads, device, codes=self.codes)

    def candidates(self) -> list[Any]:
        """Return configurations to try."""
        from core_cuda.ops.attention import decode_config, prefill_config

        return list((decode_config if self.new == 1 else prefill_config).candidates(self._shape()))

    def run(self, data: dict[str, Any], config: Any) -> Tensor:
        """Compute it by the plugin's kernel."""
        from core_cuda.ops.attention import decode as decode_attention
        from core_cuda.ops.attention.prefill import prefill

        if self.new == 1:
            return decode_attention.decode(**data, config=config)
        return prefill(**{name: value for name, value in data.items() if name != "max_query_len"}, config=config)

    def wanted(self, data: dict[str, Any]) -> Tensor:
        """Compute it by torch."""
        return dense(data, self.new, self.context)

    def same_kernel(self, config: Any) -> tuple[Any, ...]:
        """Return what the compiled kernel depends on."""
        if self.new > 1:
            return (self.op, self.heads, self.codes, *asdict(config).values())
        from core_cuda.ops.attention.decode import tiles

        launched = (config.num_warps, config.num_stages, config.fetch)
        return (self.op, self.heads, self.codes, *launched, *tiles(self._shape(), config, 1).values())

    def _shape(self) -> Any:
        from core_cuda.ops.attention.decode_config import DecodeShape
        from core_cuda.ops.attention.prefill_config import PrefillShape

        num_heads, num_kv, size = self.heads
        if self.new == 1:
            return DecodeShape(
                num_seqs=self.batch, num_kv_heads=num_kv, num_rows=num_heads // num_kv, head_size=size,
                value_size=size, num_positions=self.context, itemsize=1 if self.codes else DTYPE.itemsize,
            )  # fmt: skip
        return PrefillShape(
            num_tokens=self.batch * self.new, num_seqs=self.batch, num_heads=num_heads, num_kv_heads=num_kv,
            key_size=size, value_size=size, element_bytes=DTYPE.itemsize,
        )  # fmt: skip


Problem = Linear | QuantizedLinear | WeightOnlyLinear | Int8Linear | Attention | Experts | QuantizedExperts


def problems(preset: str, rows: list[int]) -> Iterator[Problem]:
    """Yield what a shape computes as the passes leave it: query, key and value merged, gate and up too."""
    fields: dict[str, Any] = dict(PRESETS[preset].fields)
    hidden, head, wide = fields["hidden_size"], fields["head_dim"], fields["intermediate_size"]
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    layers = [((heads + 2 * kv_heads) * head, hidden, False), (hidden, heads * head, False)]
    if "num_experts" not in fields:
        layers += [(wide, hidden, True), (hidden, wide, False)]
    layers.append((fields["vocab_size"], hidden, False))
    for layer in layers:
        yield from (Linear(count, *layer) for count in rows)
    # The last product is left as it is by most who quantise.
    coded = [(columns * (2 if gated else 1), depth) for columns, depth, gated in layers[:-1]]
    yield from (QuantizedLinear(count, *layer) for layer in coded for count in rows)
    yield from codes_problems(rows, coded)
    if "num_experts" in fields:
        top_k, experts, inner = (
            fields[f"{n}"] for n in ("num_experts_per_tok", "num_experts", "moe_intermediate_size")
        )
        yield from (Experts(tokens, top_k, experts, hidden, inner) for tokens in (*rows, 1024, 4096))
        for tokens, coded in itertools.product((*rows, 1024, 4096), FORMATS):
            yield QuantizedExperts(tokens, top_k, experts, 2 * inner, hidden, coded)
            yield QuantizedExperts(tokens, top_k, experts, hidden, inner, coded)
    sizes = [(batch, 1, context) for batch, context in COUNTS] + [(1, tokens, tokens) for tokens in PROMPTS]
    yield from (Attention(*size, (heads, kv_heads, head)) for size in sizes)
    yield from (Attention(batch, 1, context, (heads, kv_heads, head), codes=True) for batch, context in COUNTS)
