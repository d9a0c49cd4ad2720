"""RMSNorm, alone, behind a sum and before codes: aclnnRmsNorm and its kin, written out row by row in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.bounds import CODE_MAX, HALF, demand
from simulator.marshal import kernel


def _normed(rows: Tensor, gamma: Tensor, epsilon: float, plus: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return rows (..., D) over the root of their mean square, times gamma + plus, and the reciprocal of the root."""
    demand(gamma.dim() == 1 and gamma.shape[0] == rows.shape[-1], f"gamma {tuple(gamma.shape)}: a row's size")
    values = rows.to(torch.float32)
    square = (values * values).sum(dim=-1, keepdim=True) / rows.shape[-1]
    reciprocal = 1.0 / (square + epsilon).sqrt()
    return values * reciprocal * (gamma.to(torch.float32) + plus), reciprocal


def _sum(first: Tensor, second: Tensor, total: Tensor) -> Tensor:
    demand(first.dtype == second.dtype and first.shape == second.shape, "x1 and x2 differ")
    demand(first.numel() > 0, "x1 has no elements")
    total.copy_(torch.add(first.to(torch.float32), second.to(torch.float32)))
    return total


@kernel("aclnnRmsNorm", "TTDTT")
def rms_norm(x: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor) -> None:
    demand(gamma.dtype in (x.dtype, torch.float32), f"x {x.dtype} with gamma {gamma.dtype}")
    result, reciprocal = _normed(x, gamma, epsilon)
    y.copy_(result)
    rstd.copy_(reciprocal)


@kernel("aclnnGemmaRmsNorm", "TTDTT")
def gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor) -> None:
    demand(gamma.dtype == x.dtype, f"x {x.dtype} with gamma {gamma.dtype}")
    result, reciprocal = _normed(x, gamma, epsilon, plus=1.0)
    y.copy_(result)
    rstd.copy_(reciprocal)


@kernel("aclnnAddRmsNorm", "TTTDTTT")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor, total: Tensor) -> None:
    demand(gamma.dtype == x1.dtype, f"x1 {x1.dtype} with gamma {gamma.dtype}")
    result, reciprocal = _normed(_sum(x1, x2, total), gamma, epsilon)
    y.copy_(result)
    rstd.copy_(reciprocal)


@kernel("aclnnAddRmsNormQuantV2", "TTTTTTTTIDbTTTT")
def add_rms_norm_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    scales1: Tensor,
    scales2: Tensor | None,
    zeros1: Tensor | None,
    zeros2: Tensor | None,
    beta: Tensor | None,
    axis: int,
    epsilon: float,
    divides: bool,
    y1: Tensor,
    y2: Tensor,
    total: Tensor,
    normed: Tensor | None,
) -> None:
    """Codes by scales of the row's size. Only what is documented for Atlas A2 and A3."""
    pairs = {(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)}
    demand((x1.dtype, scales1.dtype) in pairs, f"x1 {x1.dtype} with scales1 {scales1.dtype}")
    demand(scales1.shape == gamma.shape, f"scales1 {tuple(scales1.shape)}: the shape of gamma")
    demand(scales2 is None and zeros2 is None and normed is None, "not simulated")
    demand(zeros1 is None or zeros1.dtype in (torch.int32, torch.bfloat16), "zero points of int32 or bf16")
    demand(beta is None or (divides and beta.dtype == x1.dtype), "a bias of x1's dtype, and scales that divide")
    demand(axis == -1, "axis -1 alone")
    values, _ = _normed(_sum(x1, x2, total), gamma, epsilon)
    values = values if beta is None else values + beta.to(torch.float32)
    scales = scales1.to(torch.float32)
    coded = values / scales if divides else values * scales
    coded = coded if zeros1 is None else coded + zeros1.to(torch.float32)
    y1.copy_(coded.round().clamp(-128, CODE_MAX))


@kernel("aclnnAddRmsNormDynamicQuantV2", "TTTTTTDBTTTTT")
def add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    smooth1: Tensor | None,
    smooth2: Tensor | None,
    beta: Tensor | None,
    epsilon: float,
    mask: list[bool] | None,
    y1: Tensor,
    y2: Tensor,
    total: Tensor,
    scale1: Tensor,
    scale2: Tensor,
) -> None:
    """Codes with a scale for each row; of the two, those that the mask names, or the smoothing factors without one."""
    demand(x1.dtype in HALF and gamma.dtype == x1.dtype and x1.dim() >= 2, f"x1 {x1.dtype} of rank {x1.dim()}")
    demand(beta is None or beta.dtype == x1.dtype, "a bias of x1's dtype")
    wanted = mask or [True, smooth1 is not None and smooth2 is not None]
    demand(any(wanted), "the mask names neither result")
    values, _ = _normed(_sum(x1, x2, total), gamma, epsilon)
    values = values if beta is None else values + beta.to(torch.float32)
    for wants, smooth, codes, scale in zip(wanted, (smooth1, smooth2), (y1, y2), (scale1, scale2), strict=True):
        if wants:
            coded = values if smooth is None else values * smooth.to(torch.float32)
            largest = coded.abs().amax(dim=-1)
            scale.copy_(largest / CODE_MAX)
            codes.copy_((coded * (CODE_MAX / largest).unsqueeze(-1)).nan_to_num(0.0).round())
