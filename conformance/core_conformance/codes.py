"""The rule for quantised codes: they are no integers to be equal, a legitimate rounding moves a few of them by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core_conformance.judging import Judged
from core_conformance.tolerances import CODE_SHARES, FEW_CODES
from core_conformance.trial import Trial

_INF = float("inf")


def judge_quantized(trial: Trial, judged: Judged) -> None:
    """Judge codes and scales of `core::quantize`.

    Scales: as any float. Codes: at most one step from the fp64 ones, the share of differing ones under a bound per
    dtype of x. Dequantised values: by T1 with a floor of one step.
    """
    (codes, scale), (eager_codes, eager_scale) = judged.results, judged.eager
    judged.judge(trial, f"{judged.name}, scale", scale, eager_scale, lambda: judged.references[1])
    exact_codes, exact_scale = judged.references
    name = f"{judged.name}, codes"
    if codes.shape != exact_codes.shape or codes.dtype != exact_codes.dtype:
        trial.record(name, "T0", _INF, f"{tuple(codes.shape)} {codes.dtype} instead of {tuple(exact_codes.shape)}")
        return
    if not codes.numel():
        return
    given, wanted = _ordinals(codes), _ordinals(exact_codes)
    trial.record(name, "T0", *_steps(given, wanted, CODE_SHARES[judged.kwargs["x"].dtype]), like=codes)
    pairs = ((codes, scale), (eager_codes, eager_scale), (exact_codes, exact_scale))
    values = [_dequantized(c, s, judged.kwargs) for c, s in pairs]
    step = (_step(exact_codes) * _expanded(exact_scale, exact_codes, judged.kwargs)).abs()
    trial.record(f"{judged.name}, dequantised", "T1", *_by_steps(values, step), like=codes)


def _ordinals(codes: Tensor) -> Tensor:
    """Number the codes so that neighbours differ by one."""
    if codes.dtype == torch.int8:
        return codes.cpu().long()
    bits = codes.detach().cpu().contiguous().view(torch.uint8).long()
    return torch.where(bits >= 128, -(bits - 128), bits)


def _steps(given: Tensor, wanted: Tensor, share: float) -> tuple[float, str]:
    """Return the ratio of the share of differing codes to its bound, and why it fails."""
    apart = (given - wanted).abs()
    far, differing = int((apart > 1).sum()), int((apart > 0).sum())
    if far:
        return _INF, f"{far} of {apart.numel()} codes are more than one step off, by up to {int(apart.max())}"
    bound = max(share * apart.numel(), FEW_CODES)
    ratio = differing / bound
    return ratio, f"{differing} of {apart.numel()} codes are one step off, over {bound:.3g}" if ratio > 1 else ""


def _step(codes: Tensor) -> Tensor:
    """Return the distance of each code from its neighbour away from zero, in codes."""
    if codes.dtype == torch.int8:
        return torch.ones(codes.shape, dtype=torch.float64)
    _, exponent = torch.frexp(codes.cpu().double())
    # Three bits after the point; the smallest normal number is 2 ** -6.
    return torch.pow(2.0, (exponent.clamp(min=-5) - 4).double())


def _expanded(scale: Tensor, codes: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    wide = scale.detach().cpu().double()
    if kwargs.get("granularity") == "group":
        wide = wide.repeat_interleave(kwargs["group_size"], -1)
    return wide.expand(codes.shape)


def _dequantized(codes: Tensor, scale: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    return codes.detach().cpu().double() * _expanded(scale, codes, kwargs)


def _by_steps(values: list[Tensor], step: Tensor) -> tuple[float, str]:
    """Judge result, eager and exact values: T1, its floor one quantisation step."""
    result, eager, exact = values
    ours, theirs = (result - exact).abs(), (eager - exact).abs()
    # Where eager is exact, a code one step off lies at the bound of the largest step: it passes.
    bounds = (2 * _rms(theirs) + _rms(step), 3 * float(theirs.max()) + 1.01 * float(step.max()))
    ratios = [
        error / bound if bound else 0.0 for error, bound in zip((_rms(ours), float(ours.max())), bounds, strict=True)
    ]
    worst = max(ratios) if result.isfinite().all() else _INF
    return worst, "" if worst <= 1 else f"error over bound: rms {ratios[0]:.3g}, max {ratios[1]:.3g} (1 passes)"


def _rms(values: Tensor) -> float:
    return float(values.pow(2).mean().sqrt())
