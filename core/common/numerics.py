"""The numeric criterion: judge a result G against eager E by their errors from an fp64 reference R.

T0: metadata, positions of NaN and infinity, and integer or boolean outputs are equal.
T1: `rms(G-R) <= k * rms(E-R) + f` and `max|G-R| <= 3 * max|E-R| + 4f` with `f = eps(dtype) / 4 * rms(R)` and k = 2 from
512 elements, 3 from 64; smaller outputs have to be pooled before they can be judged.

A few elements must not decide for all others, in R (a mask, a massive activation) or in E (a fault of eager):
- Special elements (E or R not finite, |R| from half the dtype's maximum) have no rounding to measure. G holds E's value
  there, to one rounding where it is finite; they take no part in T1.
- Elements over 1000 times the median |R| of the others are judged separately, so that `f` and the errors belong to one
  magnitude each: by T1 from 64 such elements on, fewer one by one, `|G-R| <= 3 * |E-R| + (eps + 4p) * |R|`, where p is
  the relative rms error of E on the others (E may be right by chance in a single place).
- E is unusable as a yardstick where it is NaN and R is finite, or where its rms error is above a quarter of rms(R): the
  check then fails.
- Where max|E-R| is over 20 times the rms of the other errors (512 elements and more), the rms bound has to hold also
  without the largest 1 % of the errors of each side: one large error of E must not excuse errors of G everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from core.common.fp64 import Fp64Mode as Fp64Mode  # the dtype of the reference
from core.errors import UsageError

MIN_ELEMENTS = 64
_ENOUGH = 512
_FAR = 1000
_ISOLATED = 20
_ABSURD = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The outcome of one check. Errors are absolute, against the fp64 reference, of the ordinary elements."""

    passed: bool
    #: why not; empty when passed
    reason: str
    rms_error: float
    max_error: float
    eager_rms_error: float
    eager_max_error: float
    #: rms error over its bound: at most 1 passes; infinite where no bound could be set
    rms_ratio: float
    #: largest error over its bound, likewise
    max_ratio: float
    num_elements: int

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON-ready values."""
        return asdict(self)


def judge(result: Tensor, eager: Tensor, reference: Tensor, *, slack: float = 1.0) -> Verdict:
    """Apply T0 and T1 to one floating output; all three tensors share one shape, reference is fp64.

    slack: multiplies the errors of eager in every bound. Raises `UsageError` below 64 elements, where the ratio is
    noise: pool outputs first (`judge_pooled`).
    """
    if not eager.dtype.is_floating_point:
        raise UsageError(
            f"the numeric criterion on {eager.dtype}",
            found="it measures rounding, and such outputs have none",
            remedy="compare them with torch.equal",
        )
    if result.numel() < MIN_ELEMENTS:
        raise UsageError(
            f"the numeric criterion on {result.numel()} elements",
            found=f"ratios of fewer than {MIN_ELEMENTS} elements are noise",
            remedy="pool several outputs with judge_pooled, or use larger inputs",
        )
    if result.shape != eager.shape or result.dtype != eager.dtype or reference.shape != eager.shape:
        return _failed(
            f"metadata differs: {tuple(result.shape)} {result.dtype} against {tuple(eager.shape)} {eager.dtype}",
            result.numel(),
        )
    g, e, r = (t.detach().to("cpu", torch.float64).flatten() for t in (result, eager, reference))
    if (e.isnan() & r.isfinite()).any():
        return _failed("the yardstick itself is NaN", g.numel())
    dtype = torch.finfo(eager.dtype)
    special = ~(e.isfinite() & r.isfinite()) | (r.abs() >= dtype.max / 2)
    if not _same(g[special], e[special], dtype.eps) or not g[~special].isfinite().all():
        return _failed(
            "NaN or infinity, or a value next to it, where eager has none or another, or the reverse", g.numel()
        )
    if special.all():
        return _failed("the reference has no finite element that could be judged", g.numel())
    return _verdict(_measure(g[~special], e[~special], r[~special], dtype, slack), g.numel())


def judge_pooled(results: Sequence[Tensor], eagers: Sequence[Tensor], references: Sequence[Tensor]) -> Verdict:
    """Judge several outputs of one dtype as one, so that small outputs reach the number of elements T1 needs."""
    if not results:
        raise UsageError(
            "the numeric criterion on no outputs", found="an empty list", remedy="pool at least one output"
        )
    for result, eager, reference in zip(results, eagers, references, strict=True):
        if result.shape != eager.shape or result.dtype != eager.dtype or reference.shape != eager.shape:
            return _failed(f"metadata differs: {tuple(result.shape)} against {tuple(eager.shape)}", result.numel())
    return judge(*(torch.cat([t.flatten() for t in tensors]) for tensors in (results, eagers, references)))


def _same(g: Tensor, e: Tensor, eps: float) -> bool:
    near = e.isfinite() & ((g - e).abs() <= eps * e.abs())
    return bool(((g == e) | (g.isnan() & e.isnan()) | near).all())


@dataclass(frozen=True, slots=True)
class _Measured:
    """Errors of G and E in elements of one magnitude."""

    rms: float
    top: float
    eager_rms: float
    eager_top: float
    rms_ratio: float
    max_ratio: float
    #: rms error of E over rms(R)
    off: float


def _measure(g: Tensor, e: Tensor, r: Tensor, dtype: torch.finfo, slack: float) -> list[_Measured]:
    """Measure each magnitude of R on its own, the ordinary one first."""
    found: list[_Measured] = []
    for group in _magnitudes(r, dtype.tiny):
        part = (g[group], e[group], r[group])
        if found and group.numel() < MIN_ELEMENTS:
            found.append(_one_by_one(*part, dtype.eps + 4 * found[0].off, slack))
        else:
            found.append(_ratio_test(*part, dtype, slack))
    return found


def _magnitudes(r: Tensor, tiny: float) -> list[Tensor]:
    """Return the positions of ordinary elements, then of elements of a far larger magnitude, and so on upwards."""
    groups, remaining = [], torch.arange(r.numel())
    while remaining.numel():
        size = r[remaining].abs()
        present = size[size > 0]
        # Zeros are no scale (a sparse output), and below `tiny` errors are no longer relative.
        scale = max(float(present.median()), tiny) if present.numel() else math.inf
        groups.append(remaining[size <= _FAR * scale])
        remaining = remaining[size > _FAR * scale]
    return groups


def _ratio_test(g: Tensor, e: Tensor, r: Tensor, dtype: torch.finfo, slack: float) -> _Measured:
    ours, theirs = (g - r).abs(), (e - r).abs()
    rms, top, eager_rms, eager_top = _rms(ours), float(ours.max()), _rms(theirs), float(theirs.max())
    # An exactly zero bound (an all-zero reference) admits only an exactly equal result.
    most_rms, most = t1_bounds(e, r, dtype, slack)
    rms_ratio, max_ratio = _over(rms, most_rms), _over(top, most)
    if g.numel() >= _ENOUGH and eager_top > _ISOLATED * _trimmed_rms(theirs):
        trimmed = most_rms - 2 * slack * (eager_rms - _trimmed_rms(theirs))
        rms_ratio = max(rms_ratio, _over(_trimmed_rms(ours), trimmed))
    return _Measured(rms, top, eager_rms, eager_top, rms_ratio, max_ratio, _over(eager_rms, max(_rms(r), dtype.tiny)))


def t1_bounds(eager: Tensor, reference: Tensor, dtype: torch.finfo, slack: float = 1.0) -> tuple[float, float]:
    """Return the rms and the largest error that T1 passes, of values of one magnitude and of this dtype."""
    errors, floor = eager - reference, dtype.eps / 4 * _rms(reference)
    factor = 2 if reference.numel() >= _ENOUGH else 3
    return factor * slack * _rms(errors) + floor, 3 * slack * float(errors.abs().max()) + 4 * floor


def _one_by_one(g: Tensor, e: Tensor, r: Tensor, relative: float, slack: float) -> _Measured:
    ours, theirs, size = (g - r).abs(), (e - r).abs(), r.abs()
    ratio = float((ours / (3 * slack * theirs + relative * size)).max())
    off = float((theirs / size).max())
    return _Measured(_rms(ours), float(ours.max()), _rms(theirs), float(theirs.max()), ratio, ratio, off)


def _rms(values: Tensor) -> float:
    top = float(values.abs().max())
    # Scaled, since the squares of large numbers overflow and those of small ones vanish.
    return top * float((values / top).pow(2).mean().sqrt()) if 0 < top < math.inf else top


def _trimmed_rms(errors: Tensor) -> float:
    return _rms(errors.sort().values[: errors.numel() - math.ceil(errors.numel() / 100)])


def _verdict(measured: Sequence[_Measured], num_elements: int) -> Verdict:
    ratios = [max(m.rms_ratio for m in measured), max(m.max_ratio for m in measured)]
    off, ordinary = max(m.off for m in measured), measured[0]
    reason = ""
    if off > _ABSURD:
        reason = f"the yardstick itself is off: eager's error is {off:.2g} of the reference"
        ratios = [math.inf, math.inf]
    elif not all(ratio <= 1 for ratio in ratios):  # a NaN ratio must fail
        reason = f"error over bound: rms {ratios[0]:.3g}, max {ratios[1]:.3g} (allowed: 1)"
    return Verdict(
        passed=not reason,
        reason=reason,
        rms_error=ordinary.rms,
        max_error=ordinary.top,
        eager_rms_error=ordinary.eager_rms,
        eager_max_error=ordinary.eager_top,
        rms_ratio=ratios[0],
        max_ratio=ratios[1],
        num_elements=num_elements,
    )


def _over(value: float, bound: float) -> float:
    if value == 0:
        return 0.0
    return value / bound if bound else float("inf")


def _failed(reason: str, num_elements: int) -> Verdict:
    inf = float("inf")
    return Verdict(
        passed=False,
        reason=reason,
        rms_error=inf,
        max_error=inf,
        eager_rms_error=inf,
        eager_max_error=inf,
        rms_ratio=inf,
        max_ratio=inf,
        num_elements=num_elements,
    )
