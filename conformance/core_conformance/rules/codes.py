"""The rule for quantised codes: they need not be equal, since legitimate rounding moves a few of them by one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.common.numerics import t1_bounds
from core_conformance.rules.judging import Judged
from core_conformance.rules.tolerances import CODE_SHARES, FEW_CODES
from core_conformance.trial import Trial

_INF = float("inf")


def judge_quantized(trial: Trial, judged: Judged) -> None:
    """Judge codes and scales of `core::quantize`.

    Scales: as any float. Codes: at most one step from the fp64 ones, the share of differing ones under a bound per
    dtype of x. Dequantised values: by T1 with a floor of one step.
    """
    _judge_others(trial, judged, "scale")
    if _comparable(trial, judged):
        codes, exact_codes = judged.results[0], judged.references[0]
        share = CODE_SHARES[judged.kwargs["x"].dtype]
        trial.record(
            f"{judged.name}, codes", "T0", *_steps(_ordinals(codes), _ordinals(exact_codes), share), like=codes
        )
        _judge_dequantized(trial, judged, *_dequantized(judged))


def judge_asymmetric(trial: Trial, judged: Judged) -> None:
    """Judge codes, scales and zero points of `core::quantize_asymmetric`.

    Scales: as any float. Zero points: at most one step from the fp64 ones. Codes: by their distance from the zero
    point, which a step of that moves too, as `judge_quantized` does.
    """
    _judge_others(trial, judged, "scale")
    if not _comparable(trial, judged, 0, 2):
        return
    zeros = [results[2].cpu().long() for results in (judged.results, judged.references)]
    apart = int((zeros[0] - zeros[1]).abs().max())
    reason = f"a zero point is {apart} steps off" if apart > 1 else ""
    trial.record(f"{judged.name}, zero points", "T0", _INF if reason else 0.0, reason, like=judged.results[2])
    sides = (judged.results, judged.eager, judged.references)
    given, eager, wanted = (results[0].cpu().long() - results[2].cpu().long() for results in sides)
    share = CODE_SHARES[judged.kwargs["x"].dtype]
    trial.record(f"{judged.name}, codes", "T0", *_steps(given, wanted, share), like=judged.results[0])
    scales = [results[1].cpu().double() for results in sides]
    values = [codes.double() * scale for codes, scale in zip((given, eager, wanted), scales, strict=True)]
    _judge_dequantized(trial, judged, values, scales[2].expand(wanted.shape))


def judge_coded(trial: Trial, judged: Judged) -> None:
    """Judge codes, scales and further results of an op that computes values and ends in their codes.

    As `judge_quantized` does, but the values before the codes are rounded too, which moves codes of eager also. Codes
    may be twice as far from the fp64 ones as eager's are, or as far as T1 lets the values be. Twice as many as of eager
    may differ, or as many as errors of the rms that T1 passes move, beside the share that quantising alone may move.
    """
    kwargs = judged.kwargs
    _judge_others(trial, judged, "scale", *("further result",) * (len(judged.results) - 2))
    if not _comparable(trial, judged):
        return
    dtype = kwargs[next(name for name in ("x", "gate", "query") if name in kwargs)].dtype
    given, eager, wanted = (_ordinals(side[0]) for side in (judged.results, judged.eager, judged.references))
    values, step = _dequantized(judged)
    rms, most = _passed_errors(judged, values, step, torch.finfo(dtype))
    close = (values[0] - values[2]).abs() <= most + 1.01 * step
    # An error moves a value that lies anywhere between two codes to the next with the probability error / step; 0.8 is
    # the mean size of normally distributed errors of an rms of 1. Their number scatters by its square root.
    moved = float((0.8 * rms / step.clamp(min=torch.finfo(dtype).tiny)).clamp(max=1).sum())
    moved += 2 * moved**0.5
    steps = _steps(given, wanted, CODE_SHARES[dtype], (eager - wanted).abs(), close, moved)
    trial.record(f"{judged.name}, codes", "T0", *steps, like=judged.results[0])
    _judge_dequantized(trial, judged, values, step)


def _judge_others(trial: Trial, judged: Judged, *names: str) -> None:
    """Judge the results after the codes, which have these names, as any float."""
    for index, name in enumerate(names, start=1):
        both = judged.results[index], judged.eager[index]
        judged.judge(trial, f"{judged.name}, {name}", *both, lambda i=index: judged.references[i])  # type: ignore[misc]


def _comparable(trial: Trial, judged: Judged, *indices: int) -> bool:
    """Record results of another shape or dtype as wrong; return whether there are codes to compare."""
    for index in indices or (0,):
        given, wanted = judged.results[index], judged.references[index]
        if given.shape != wanted.shape or given.dtype != wanted.dtype:
            reason = f"{tuple(given.shape)} {given.dtype} instead of {tuple(wanted.shape)}"
            trial.record(f"{judged.name}, codes", "T0", _INF, reason)
            return False
    return bool(judged.results[0].numel())


def _judge_dequantized(trial: Trial, judged: Judged, values: list[Tensor], step: Tensor) -> None:
    trial.record(f"{judged.name}, dequantised", "T1", *_by_steps(values, step), like=judged.results[0])


def _passed_errors(judged: Judged, values: list[Tensor], step: Tensor, dtype: torch.finfo) -> tuple[float, float]:
    """Return the rms and the largest error that T1 passes of the values that become codes.

    Floating-point codes lie closer together near zero, where such an error spans many of them. Where only codes of
    eager are known, its errors count beyond one step, which quantising alone may explain.
    """
    if judged.uncoded is not None:
        return t1_bounds(*judged.uncoded(), dtype)
    _, eager, exact = values
    beyond = (eager - exact).abs() - step
    return t1_bounds(exact + beyond.clamp(min=0), exact, dtype)


def judge_fp4(trial: Trial, judged: Judged) -> None:
    """Judge packed codes of 4 bits, scales of groups, the scale, and further results of an op that ends in such codes.

    A group's scale moves all of its codes: these are judged by the values that they stand for, by T1 with a floor of
    one step. Scales of groups: as codes, of which few may be one step off. Others: as any float.
    """
    for index in range(2, len(judged.results)):
        both = judged.results[index], judged.eager[index]
        judged.judge(trial, f"{judged.name}, result {index}", *both, lambda i=index: judged.references[i])  # type: ignore[misc]
    groups = [results[1] for results in (judged.results, judged.eager, judged.references)]
    for given, wanted in zip(judged.results[:2], judged.references[:2], strict=True):
        if given.shape != wanted.shape or given.dtype != wanted.dtype:
            trial.record(f"{judged.name}, codes", "T0", _INF, f"{tuple(given.shape)} {given.dtype}")
            return
    if not groups[0].numel():
        return
    steps = [_ordinals(each) for each in groups]
    share = CODE_SHARES[judged.kwargs["x"].dtype]
    ratio = _steps(steps[0], steps[2], share, (steps[1] - steps[2]).abs())
    trial.record(f"{judged.name}, scales of groups", "T0", *ratio, like=groups[0])
    sides = [results[:3] for results in (judged.results, judged.eager, judged.references)]
    values = [_fp4_values(codes) * _fp4_unit(*scales) for codes, *scales in sides]
    magnitude = _fp4_values(judged.references[0]).abs()
    step = _fp4_unit(*sides[2][1:]) * torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    _judge_dequantized(trial, judged, values, step)


def _fp4_values(codes: Tensor) -> Tensor:
    """Return the values of packed e2m1 codes, the lower half of each byte first."""
    table = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.float64)
    table = torch.cat((table, -table))
    bits = codes.detach().cpu().long()
    return torch.stack((table[bits & 15], table[bits >> 4]), -1).flatten(-2)


def _fp4_unit(group_scales: Tensor, scale: Tensor) -> Tensor:
    """Return what a code of 1 stands for, at each code."""
    return group_scales.detach().cpu().double().repeat_interleave(16, -1) * scale.detach().cpu().double()


def _ordinals(codes: Tensor) -> Tensor:
    """Number the codes so that neighbours differ by one."""
    if codes.dtype == torch.int8:
        return codes.cpu().long()
    bits = codes.detach().cpu().contiguous().view(torch.uint8).long()
    return torch.where(bits >= 128, -(bits - 128), bits)


def _steps(
    given: Tensor,
    wanted: Tensor,
    share: float,
    eager: Tensor | None = None,
    close: Tensor | None = None,
    moved: float = 0.0,
) -> tuple[float, str]:
    """Return the ratio of the share of differing codes to its bound, and why it fails.

    eager: the distances of eager's codes. close: codes whose values are near enough, whatever their distance in steps.
    moved: how many codes errors that pass are expected to move.
    """
    apart = (given - wanted).abs()
    most = 1 if eager is None else max(2 * int(eager.max()), 1)
    beyond = apart > most if close is None else (apart > most) & ~close
    far, differing = int(beyond.sum()), int((apart > 0).sum())
    if far:
        steps = "one step" if most == 1 else f"{most} steps"
        return _INF, f"{far} of {apart.numel()} codes are more than {steps} off, by up to {int(apart.max())}"
    allowed = moved if eager is None else max(2 * int((eager > 0).sum()), moved)
    bound = max(share * apart.numel(), FEW_CODES) + allowed
    ratio = differing / bound
    off = "one step off" if most == 1 else "off"
    return ratio, f"{differing} of {apart.numel()} codes are {off}, over {bound:.3g}" if ratio > 1 else ""


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


def _dequantized(judged: Judged) -> tuple[list[Tensor], Tensor]:
    """Return the values of result, eager and reference, and the size of a step at each."""
    sides = [side[:2] for side in (judged.results, judged.eager, judged.references)]
    values = [codes.detach().cpu().double() * _expanded(scale, codes, judged.kwargs) for codes, scale in sides]
    codes, scale = sides[2]
    return values, (_step(codes) * _expanded(scale, codes, judged.kwargs)).abs()


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
    return worst, "" if worst <= 1 else f"error over bound: rms {ratios[0]:.3g}, max {ratios[1]:.3g} (allowed: 1)"


def _rms(values: Tensor) -> float:
    return float(values.pow(2).mean().sqrt())
