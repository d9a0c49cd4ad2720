"""What `tools/cuda/tune_cuda.py` tunes of mixtures: the experts' MLPs, and their products with quantised weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch
from cuda_calls import DTYPE, randn
from torch import Tensor

FORMATS: Mapping[str, tuple[torch.dtype, torch.dtype, int]] = MappingProxyType(
    {
        "fp8": (torch.float8_e4m3fn, torch.float8_e4m3fn, 0),
        "int8": (torch.int8, torch.int8, 0),
        "w8a16": (DTYPE, torch.int8, 0),
        "w4a16": (DTYPE, torch.int32, 128),
        "w4a16-g32": (DTYPE, torch.int32, 32),
    }
)
"""By scheme the dtypes of x and of the weight's codes, and the inputs that share a scale; 0: all of a row."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a mixture, `top_k` of them for each token, chosen evenly."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    inner: int
    gated: bool = True

    op = "grouped_mlp"
    library = None

    @property
    def shape(self) -> Mapping[str, Any]:
        """What the plugin looks it up by."""
        return asdict(self._shape())

    @property
    def num_bytes(self) -> int:
        """What it must move: the experts that are hit."""
        return 2 * (self._parts + 1) * self.hidden * self.inner * min(self.experts, self.tokens * self.top_k)

    def make(self, device: str) -> dict[str, Any]:
        """Return a call."""
        scores = torch.rand(self.tokens, self.experts, device=device)
        return {
            "x": randn(self.tokens, self.hidden, device=device),
            "weights": torch.rand(self.tokens, self.top_k, device=device).to(DTYPE),
            "indices": scores.topk(self.top_k, dim=-1).indices,
            "gate_up": randn(self.experts, self._parts * self.inner, self.hidden, device=device),
            "down": randn(self.experts, self.hidden, self.inner, device=device),
        }

    @property
    def _parts(self) -> int:
        return 2 if self.gated else 1

    @property
    def _kind(self) -> str:
        """SiLU behind a gate, as Qwen3 has it; the square of ReLU without one, as Nemotron-H has it."""
        return "silu" if self.gated else "relu2"

    def candidates(self) -> list[Any]:
        """Return configurations to try."""
        from core_cuda.ops.moe.grouped_configs import candidates

        return list(candidates(self._shape()))

    def run(self, data: dict[str, Any], config: Any) -> Tensor:
        """Compute it by the plugin's kernels."""
        from core_cuda.ops.activation import Gate
        from core_cuda.ops.moe.grouped_mlp import Experts as Weights
        from core_cuda.ops.moe.grouped_mlp import run_grouped_mlp

        weights = Weights(data["gate_up"], data["down"], gated=self.gated)
        return run_grouped_mlp(data["x"], data["weights"], data["indices"], weights, Gate(self._kind), config=config)

    def wanted(self, data: dict[str, Any]) -> Tensor:
        """Compute it by the op's reference."""
        result: Tensor = torch.ops.core.grouped_mlp(**data, kind=self._kind, gated=self.gated)
        return result

    def same_kernel(self, config: Any) -> tuple[Any, ...]:
        """Return what the compiled kernels depend on."""
        return (self.top_k, self.experts, self.hidden, self.inner, self.gated, config)

    def _shape(self) -> Any:
        from core_cuda.ops.moe.grouped_configs import GroupedShape

        return GroupedShape(**asdict(self))


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """One product of the experts of a quantised mixture, `top_k` of them for each token, chosen evenly."""

    tokens: int
    top_k: int
    experts: int
    columns: int
    depth: int
    scheme: str

    op = "quantized_grouped_linear"
    library = None

    @property
    def shape(self) -> Mapping[str, Any]:
        """What the plugin looks it up by."""
        return asdict(self._shape())

    @property
    def num_bytes(self) -> int:
        """What it must move: the experts that are hit, rows and results."""
        shape = self._shape()
        weights = min(self.experts, shape.rows) * self.columns * self.depth * shape.w_bits // 8
        return weights + shape.rows * (self.depth * shape.x_bits // 8 + 2 * self.columns)

    def make(self, device: str) -> dict[str, Any]:
        """Return a call."""
        x_dtype, w_dtype, group = FORMATS[self.scheme]
        rows, packed = self.tokens * self.top_k, w_dtype == torch.int32
        chosen = torch.rand(self.tokens, self.experts, device=device).topk(self.top_k, dim=-1).indices.flatten()
        ends = torch.bincount(chosen, minlength=self.experts).cumsum(0).to(torch.int32)
        x = randn(rows, self.depth, device=device)
        codes = _codes(
            w_dtype, self.experts, self.columns, -(-self.depth // 8) if packed else self.depth, device=device
        )
        groups = self.depth // group if group else 1
        coded = x_dtype != DTYPE
        return {
            "x": (x * 40).clamp(-120, 120).to(x_dtype) if coded else x,
            "x_scale": torch.rand(rows, 1, device=device) * 0.01 + 0.005 if coded else None,
            "ends": ends,
            "w_codes": codes,
            "w_scale": torch.rand(self.experts, self.columns, groups, device=device) * 0.01 + 0.005,
            "w_zero_point": None,
            "out_dtype": DTYPE,
            "num_bits": 4 if packed else 8,
        }

    def candidates(self) -> list[Any]:
        """Return configurations to try."""
        from core_cuda.ops.moe.quantized_configs import candidates

        return list(candidates(self._shape()))

    def run(self, data: dict[str, Any], config: Any) -> Tensor:
        """Compute it by the plugin's kernel."""
        from core_cuda.ops.moe.quantized_grouped import run_quantized_grouped

        return run_quantized_grouped(**data, config=config)

    def wanted(self, data: dict[str, Any]) -> Tensor:
        """Compute it by the op's reference."""
        result: Tensor = torch.ops.core.quantized_grouped_linear(**data)
        return result

    def same_kernel(self, config: Any) -> tuple[Any, ...]:
        """Return what the compiled kernel depends on."""
        return (self.experts, self.columns, self.depth, self.scheme, config)

    def _shape(self) -> Any:
        from core_cuda.ops.moe.quantized_configs import QuantizedShape

        x_dtype, w_dtype, group = FORMATS[self.scheme]
        return QuantizedShape(
            rows=self.tokens * self.top_k,
            experts=self.experts,
            columns=self.columns,
            depth=self.depth,
            group=group or self.depth,
            w_bits=4 if w_dtype == torch.int32 else 8,
            x_bits=8 * x_dtype.itemsize,
        )


def _codes(dtype: torch.dtype, *shape: int, device: str) -> Tensor:
    """Return random codes, made without a wider copy; on the host, where nothing reads them, memory as it is."""
    if device == "cpu":
        return torch.empty(*shape, dtype=dtype)
    if dtype == torch.int32:
        return torch.randint(-(2**31), 2**31, shape, dtype=dtype, device=device)
    bits = torch.randint(-120, 120, shape, dtype=torch.int8, device=device)
    # Only odd bits stand for NaN in fp8.
    return bits if dtype == torch.int8 else bits.bitwise_and_(-2).view(dtype)
