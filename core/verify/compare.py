"""Judging the values of a run by the numeric criterion: tensors of any size and dtype, and numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from core.common.numerics import MIN_ELEMENTS, judge
from core.verify.codes import are_codes, judge_codes
from core.verify.execution import error_line

_INF = float("inf")


@dataclass(slots=True)
class Comparison:
    """The result so far of comparing two runs."""

    #: Tensors and numbers judged.
    num_values: int = 0
    #: The largest error over its bound.
    worst: float = 0.0
    #: The reason of the first value that fails; "" while none does.
    reason: str = ""
    #: The error of that value over its bound.
    ratio: float = 0.0
    #: Why there is no fp64 reference for values that differ.
    unjudged: str = ""

    @property
    def outcome(self) -> Literal["fault", "unjudged", "ok", "nothing"]:
        """The verdict in one word; "nothing" if no value was compared."""
        if self.reason:
            return "fault"
        return "unjudged" if self.unjudged else "ok" if self.num_values else "nothing"

    def add(
        self,
        names: Sequence[str],
        results: Sequence[Any],
        olds: Sequence[Any],
        exact: Callable[[], Sequence[Any]],
        codes: Collection[int] = (),
    ) -> list[tuple[str, str, float]]:
        """Judge results by their expected values; return name, reason and ratio of each that fails.

        - exact: gives all fp64 values; called at most once, and only if something differs in a bit.
        - codes: which of the results are codes of a quantisation.
        """
        if len(results) != len(olds):
            return [self.fail("the results", f"{len(results)} instead of {len(olds)}")]
        reference = _Reference(exact)
        failed = []
        for index, (name, result, old) in enumerate(zip(names, results, olds, strict=True)):
            outcome = compare(result, old, partial(reference.value, index), codes=index in codes)
            if outcome is None:
                continue
            reason, ratio = outcome
            self.num_values += 1
            self.worst = max(self.worst, ratio)
            if reason:
                failed.append(self.fail(name, reason, ratio))
        self.unjudged = self.unjudged or reference.error
        return failed

    def fail(self, name: str, reason: str, ratio: float = _INF) -> tuple[str, str, float]:
        """Note something that failed; its ratio is infinite where there is no value to compare."""
        self.worst = max(self.worst, ratio)
        if not self.reason:
            self.reason, self.ratio = f"{name}: {reason}", ratio
        return name, reason, ratio


class _Reference:
    """The fp64 values, computed when first asked for; error: why they could not be."""

    def __init__(self, exact: Callable[[], Sequence[Any]]) -> None:
        self._exact = exact
        self._values: Sequence[Any] | None = None
        self.error = ""

    def value(self, index: int) -> Any:
        if self._values is None and not self.error:
            try:
                self._values = self._exact()
            except Exception as error:  # a kernel without fp64 or without a CPU form leaves the cause unknown
                self.error = f"the fp64 run failed with {error_line(error)}"
        return None if self._values is None else self._values[index]


def compare(
    result: Any, old: Any, reference: Callable[[], Any], *, codes: bool = False, slack: float = 1.0
) -> tuple[str, float] | None:
    """Judge a result by T0 and T1; return the reason why it fails ("" if it does not) and its error over the bound.

    - reference: gives the fp64 value; asked only where floats or codes differ in a bit. Where it gives None, floats
      that differ are not judged, and None is returned; codes must be equal.
    - codes: int8 results are codes of a quantisation, which a rounding may move.
    - slack: multiplies the errors of the expected value in every bound of floats.
    """
    if not isinstance(old, Tensor) or not isinstance(result, Tensor):
        return ("", 0.0) if type(result) is type(old) and result == old else (f"{result!r} instead of {old!r}", _INF)
    if result.shape != old.shape or result.dtype != old.dtype:
        kinds = [f"{tuple(t.shape)} {t.dtype}" for t in (result, old)]
        return f"{kinds[0]} instead of {kinds[1]}", _INF
    if result.device != old.device:
        return f"on {result.device} instead of {old.device}", _INF
    if torch.equal(result, old) or _both_nan(result, old):
        return "", 0.0
    if codes and are_codes(old) and are_codes(exact := reference()) and exact.shape == old.shape:
        return judge_codes(result, old, exact)
    if not old.dtype.is_floating_point:
        return f"{int((result != old).sum())} of {old.numel()} elements differ", _INF
    exact = reference()
    if exact is None:
        return None
    if exact.shape != old.shape:
        return f"{tuple(old.shape)}, where the fp64 run has {tuple(exact.shape)}", _INF
    if old.numel() < MIN_ELEMENTS:
        return _few(result, old, exact, slack)
    verdict = judge(result, old, exact, slack=slack)
    return verdict.reason, max(verdict.rms_ratio, verdict.max_ratio)


def strides_problem(result: Any, wanted: Any) -> str:
    """Return how a tensor's strides differ from those of another one of its shape, "" where no reader could tell."""
    if not isinstance(result, Tensor) or not isinstance(wanted, Tensor) or not result.numel():
        return ""
    # A dimension of one has no stride that anything could read.
    pairs = zip(result.shape, result.stride(), wanted.stride(), strict=True)
    same = result.shape != wanted.shape or all(size == 1 or have == want for size, have, want in pairs)
    return "" if same else f"strides {tuple(result.stride())} instead of {tuple(wanted.stride())}"


def _few(result: Tensor, old: Tensor, reference: Tensor, slack: float) -> tuple[str, float]:
    """Judge a value too small for T1 by its largest error, with a floor of four roundings of its size."""
    g, e, r = (t.detach().to("cpu", torch.float64) for t in (result, old, reference))
    if not torch.equal(g.isfinite(), r.isfinite()):
        return "NaN or infinity where the reference has none, or the reverse", _INF
    keep = r.isfinite() & e.isfinite()
    errors = [float((t - r)[keep].abs().max()) if keep.any() else 0.0 for t in (g, e)]
    bound = 3 * slack * errors[1] + 4 * torch.finfo(old.dtype).eps * (
        float(r[keep].pow(2).mean().sqrt()) if keep.any() else 0
    )
    ratio = errors[0] / bound if bound else (_INF if errors[0] else 0.0)
    return (f"error over bound: max {ratio:.3g} (allowed: 1)" if ratio > 1 else ""), ratio


def _both_nan(result: Tensor, old: Tensor) -> bool:
    """Tell whether two tensors are equal in every element, NaN where the other is NaN."""
    return bool(((result == old) | ((result != result) & (old != old))).all())
