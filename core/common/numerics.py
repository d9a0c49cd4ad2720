"""The numeric criterion: judge a result G against eager E by their errors from an fp64 reference R.

T0: metadata, positions of NaN and infinity, and integer or boolean outputs are equal.
T1: `rms(G-R) <= k * rms(E-R) + f` and `max|G-R| <= 3 * max|E-R| + 4f` with `f = eps(dtype) / 4 * rms(R)` and k = 2 from
512 elements, 3 from 64; smaller outputs have to be pooled before they can be judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from core.errors import UsageError

MIN_ELEMENTS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The outcome of one check; errors are absolute, against the fp64 reference.

    rms_ratio and max_ratio are measured over bound: at most 1 passes. reason is empty when passed.
    """

    passed: bool
    reason: str
    rms_error: float
    max_error: float
    eager_rms_error: float
    eager_max_error: float
    rms_ratio: float
    max_ratio: float
    num_elements: int

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON-ready values."""
        return asdict(self)


def judge(result: Tensor, eager: Tensor, reference: Tensor) -> Verdict:
    """Apply T0 and T1 to one floating output; all three tensors share one shape, reference is fp64.

    Raises `UsageError` below 64 elements, where the ratio is noise: pool outputs first (`judge_pooled`).
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
    if not torch.equal(_specials(g), _specials(r)):
        return _failed("NaN or infinity where the reference has none or another, or the reverse", g.numel())
    finite = torch.isfinite(r)
    if not finite.any():
        return _failed("the reference has no finite element", g.numel())
    g, e, r = g[finite], e[finite], r[finite]
    return _ratio_test(g, torch.where(torch.isfinite(e), e, r), r, torch.finfo(eager.dtype).eps)


def judge_pooled(results: Sequence[Tensor], eagers: Sequence[Tensor], references: Sequence[Tensor]) -> Verdict:
    """Judge several outputs of one dtype as one, so that small outputs reach the number of elements T1 needs."""
    for result, eager in zip(results, eagers, strict=True):
        if result.shape != eager.shape or result.dtype != eager.dtype:
            return _failed(f"metadata differs: {tuple(result.shape)} against {tuple(eager.shape)}", result.numel())
    return judge(*(torch.cat([t.flatten() for t in tensors]) for tensors in (results, eagers, references)))


def _specials(tensor: Tensor) -> Tensor:
    """Mark NaN by 2, infinities by their sign, anything else by 0."""
    return torch.where(tensor.isnan(), 2.0, torch.where(tensor.isinf(), tensor.sign(), 0.0))


def _ratio_test(g: Tensor, e: Tensor, r: Tensor, eps: float) -> Verdict:
    rms = [float((t - r).pow(2).mean().sqrt()) for t in (g, e)]
    top = [float((t - r).abs().max()) for t in (g, e)]
    floor = eps / 4 * float(r.pow(2).mean().sqrt())
    factor = 2 if g.numel() >= 512 else 3
    # An exactly zero bound (an all-zero reference) admits only an exactly equal result.
    rms_ratio = _over(rms[0], factor * rms[1] + floor)
    max_ratio = _over(top[0], 3 * top[1] + 4 * floor)
    passed = rms_ratio <= 1 and max_ratio <= 1
    return Verdict(
        passed=passed,
        reason="" if passed else f"error over bound: rms {rms_ratio:.3g}, max {max_ratio:.3g} (1 passes)",
        rms_error=rms[0],
        max_error=top[0],
        eager_rms_error=rms[1],
        eager_max_error=top[1],
        rms_ratio=rms_ratio,
        max_ratio=max_ratio,
        num_elements=g.numel(),
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


_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Fp64Mode(TorchFunctionMode):
    """Keep a computation in fp64 although its code casts to fp32 or half on the way (as norms and softmax do).

    Every floating dtype named in a call becomes fp64, and the casting methods become casts to fp64. Constants computed
    in a narrower dtype beforehand keep their rounding, as the criterion wants: they are inputs.
    """

    _CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func` with every narrow floating dtype among its arguments widened."""
        if func in self._CASTS:
            return args[0].double()
        return func(*map(_widen, args), **{name: _widen(value) for name, value in (kwargs or {}).items()})


def _widen(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value
