"""What `tools/cuda/tune_cuda.py` tunes of linear layers whose weight is codes: see cuda_problems.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from cuda_calls import DTYPE, randn
from torch import Tensor

WORD_CODES = 8
GROUP = 128
FORMATS = ("int4", "int8", "float8_e4m3fn")


@dataclass(frozen=True, slots=True)
class WeightOnlyLinear:
    """A linear layer with a weight of codes; group: codes that share a scale, depth for all of a row."""

    rows: int
    columns: int
    depth: int
    group: int
    #: one of `FORMATS`
    codes: str

    op = "weight_only_linear"

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.codes == "int4" else 8

    @property
    def shape(self) -> Mapping[str, Any]:
        """What the plugin looks it up by: it knows packed codes by their dtype."""
        return asdict(self) | {"codes": "int32" if self.codes == "int4" else self.codes}

    @property
    def num_bytes(self) -> int:
        """What it must move."""
        weight = self.columns * (self.depth * self.bits // 8 + 4 * self.depth // self.group)
        return weight + 2 * self.rows * (self.depth + self.columns)

    def make(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, codes and scales."""
        sizes = (self.columns, self.depth)
        if self.codes == "int4":
            whole = (self.columns, self.depth // WORD_CODES)
            codes = torch.randint(-(2**31), 2**31, whole, dtype=torch.int32, device=device)
        elif self.codes == "int8":
            codes = torch.randint(-128, 128, sizes, dtype=torch.int8, device=device)
        else:
            codes = randn(*sizes, device=device).to(torch.float8_e4m3fn)
        scales = torch.rand(self.columns, self.depth // self.group, device=device) + 0.5
        return randn(self.rows, self.depth, device=device), codes, scales

    def candidates(self) -> list[Any]:
        """Return configurations to try."""
        from core_cuda.ops.linear.coded_configs import CodedShape
        from core_cuda.ops.linear.weight_only import candidates

        return list(candidates(CodedShape(self.rows, self.columns, self.depth, self.bits, self.group)))

    def run(self, data: tuple[Tensor, Tensor, Tensor], config: Any) -> Tensor:
        """Compute it by the plugin's kernel; None: by cuBLAS, after the codes have become numbers."""
        from core_cuda.ops.linear.weight_only import multiply

        x, codes, scales = data
        return multiply(x, codes, scales, None, None, self.bits, config)

    def default(self, data: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Compute it as a model does."""
        result: Tensor = torch.ops.core_cuda.weight_only_linear(*data, None, None, num_bits=self.bits)
        return result

    def library(self, data: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Compute it by cuBLAS."""
        return self.run(data, None)

    def wanted(self, data: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Compute it by the op's reference."""
        result: Tensor = torch.ops.core.weight_only_linear(*data, None, None, num_bits=self.bits)
        return result

    def same_kernel(self, config: Any) -> tuple[Any, ...]:
        """Return what the compiled kernel depends on."""
        return (self.codes, self.group < self.depth and self.group, *_constants(self.depth, config))


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """A linear layer on codes of int8, with a scale for each row of x and for each row of the weight."""

    rows: int
    columns: int
    depth: int

    op = "int8_linear"
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
        sizes = (self.rows, self.columns)
        codes = [torch.randint(-128, 128, (n, self.depth), dtype=torch.int8, device=device) for n in sizes]
        return (*codes, *(torch.rand(n, device=device) + 0.5 for n in sizes))

    def candidates(self) -> list[Any]:
        """Return configurations to try."""
        from core_cuda.ops.linear.coded_configs import candidates
        from core_cuda.ops.linear.quantized import int8_shape

        return list(candidates(int8_shape(self.rows, self.columns, self.depth)))

    def run(self, data: tuple[Tensor, ...], config: Any) -> Tensor:
        """Compute it by the plugin's kernel."""
        from core_cuda.ops.linear.quantized import multiply_int8

        return multiply_int8(data[0], data[1], (data[2], data[3]), None, DTYPE, config)

    def default(self, data: tuple[Tensor, ...]) -> Tensor:
        """Compute it as a model does."""
        return self._by(torch.ops.core_cuda.quantized_linear, data)

    def wanted(self, data: tuple[Tensor, ...]) -> Tensor:
        """Compute it by the op's reference."""
        return self._by(torch.ops.core.quantized_linear, data)

    def _by(self, op: Any, data: tuple[Tensor, ...]) -> Tensor:
        x, weight, x_scale, w_scale = data
        result: Tensor = op(x, x_scale[:, None], weight, w_scale[:, None], None, out_dtype=DTYPE)
        return result

    def same_kernel(self, config: Any) -> tuple[Any, ...]:
        """Return what the compiled kernel depends on."""
        return _constants(self.depth, config)


def _constants(depth: int, config: Any) -> tuple[Any, ...]:
    """Return what of a configuration is constant in the kernel, where a share's length decides what is fetched."""
    shared = config.split_k if config.fetch else config.split_k > 1
    return (depth if config.fetch else depth % config.block_k == 0, *{**asdict(config), "split_k": shared}.values())


def problems(rows: list[int], layers: list[tuple[int, int]]) -> Iterator[WeightOnlyLinear | Int8Linear]:
    """Yield the products of layers (columns, depth) in each format."""
    for columns, depth in layers:
        for count in rows:
            for codes in FORMATS:
                yield WeightOnlyLinear(count, columns, depth, GROUP if codes == "int4" else depth, codes)
            yield Int8Linear(count, columns, depth)
