"""Matrix products, convolutions and triangular systems.

Products accumulate in float32 and round once, as a cube unit does; integers stay exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simulator.bounds import demand
from simulator.formulas import stored
from simulator.marshal import kernel


def product(x: Tensor, y: Tensor) -> Tensor:
    """Return x @ y in the type of accumulation: float32 for floating types, int32 for int8, else the inputs' own."""
    if x.dtype in (torch.float16, torch.bfloat16):
        return x.float() @ y.float()
    if x.dtype == torch.int8:
        return x.int() @ y.int()
    return x @ y


def _added(x: Tensor, y: Tensor, z: Tensor, beta: Any, alpha: Any) -> Tensor:
    result = product(y, z)
    if alpha != 1:
        result = result * alpha
    # A beta of zero leaves NaN of x out, as torch documents.
    return result if beta == 0 else result + (x.to(result.dtype) if beta == 1 else x.to(result.dtype) * beta)


def _sum_out(x: Tensor, y: Tensor, z: Tensor, beta: Any, alpha: Any, out: Tensor, cube_math: int) -> None:
    out.copy_(_added(x, y, z, beta, alpha))


def _sum_in_place(x: Tensor, y: Tensor, z: Tensor, beta: Any, alpha: Any, cube_math: int) -> None:
    x.copy_(_added(x, y, z, beta, alpha))


@kernel("aclnnMv", "TTTh")
def _mv(x: Tensor, y: Tensor, out: Tensor, cube_math: int) -> None:
    out.copy_(product(x, y.unsqueeze(-1)).squeeze(-1))


def _product_out(x: Tensor, y: Tensor, out: Tensor, cube_math: int) -> None:
    out.copy_(product(x, y).view(out.shape))


stored({"Dot": ("TTT", product)})
for _name in ("aclnnMatmul", "aclnnMm", "aclnnBatchMatMul"):
    kernel(_name, "TTTh")(_product_out)
for _name in ("addmm", "baddbmm"):
    kernel(f"aclnn{_name.capitalize()}", "TTTSSTh")(_sum_out)
    kernel(f"aclnnInplace{_name.capitalize()}", "TTTSSh")(_sum_in_place)


@kernel("aclnnTriangularSolve", "TTbbbTT")
def triangular_solve(
    known: Tensor, matrix: Tensor, upper: bool, transpose: bool, unit: bool, out: Tensor, triangle: Tensor
) -> None:
    """Solve triangular systems, and keep a copy of the triangle. Half precision is not documented."""
    demand(known.dtype == matrix.dtype and known.dtype in (torch.float32, torch.float64), f"systems of {known.dtype}")
    triangle.copy_(matrix.triu() if upper else matrix.tril())
    solved = triangle.mT if transpose else triangle
    out.copy_(torch.linalg.solve_triangular(solved, known, upper=upper is not transpose, unitriangular=unit))


@kernel("aclnnConvolution", "TTTAAAbAITh")
def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    out: Tensor,
    cube_math: int,
) -> None:
    """Convolve, as torch does: sums in float32, rounded once."""
    demand(x.dtype in (torch.float32, torch.float16, torch.bfloat16) and x.dtype == weight.dtype, f"x {x.dtype}")
    wide = None if bias is None else bias.float()
    sizes = (stride, padding, dilation, transposed, output_padding, groups)
    out.copy_(torch.convolution(x.float(), weight.float(), wide, *sizes))
