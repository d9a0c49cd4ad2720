"""How the results of one call of an op are judged: by default value by value, some ops by rules of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from core.common.numerics import MIN_ELEMENTS, judge
from core.verify.fakes.memory import same_bits
from core_conformance.rules.tolerances import T2_FACTOR
from core_conformance.trial import Trial

Judge = Callable[[Trial, str, Any, Any, Callable[[], Any]], None]
"""Judges one value: trial, name, result, yardstick, and a function that gives the fp64 value."""

_T1_FACTOR = 2.0  # the factor by which numerics.judge multiplies the yardstick's rms error


@dataclass(frozen=True)
class Judged:
    """The values of one call."""

    #: Of the call.
    name: str
    kwargs: Mapping[str, Any]
    #: The result under judgement.
    results: Sequence[Any]
    #: The yardstick's result.
    eager: Sequence[Any]
    #: Returns the fp64 values.
    exact: Callable[[], Sequence[Any]]
    #: How floating values are judged: by T1 or T2.
    judge: Judge = field(repr=False)
    #: Of an op that ends in codes: returns the yardstick's values before they become codes, and the fp64 ones.
    uncoded: Callable[[], tuple[Tensor, Tensor]] | None = None

    @cached_property
    def references(self) -> Sequence[Any]:
        """The fp64 values, computed when first asked for."""
        return self.exact()


def each_value(trial: Trial, judged: Judged) -> None:
    """Judge every result for itself."""
    for index, (result, eager) in enumerate(zip(judged.results, judged.eager, strict=True)):
        judged.judge(trial, f"{judged.name}, result {index}", result, eager, lambda i=index: judged.references[i])  # type: ignore[misc]


def by_t1(
    trial: Trial, name: str, result: Any, eager: Any, reference: Callable[[], Any], *, slack: float = 1.0
) -> None:
    """Judge one value of a device by T0 and T1 against eager on the same device; slack: as for `Trial.judge`."""
    trial.judge(name, result, eager, None if _equal(result, eager) else reference(), slack=slack)


def by_t2(trial: Trial, name: str, result: Any, host: Any, reference: Callable[[], Any]) -> None:
    """Judge one value of a device by T2: against the yardstick computed in the host's memory."""
    moved = result.detach().to("cpu") if isinstance(result, Tensor) else result
    floating = isinstance(host, Tensor) and host.dtype.is_floating_point and host.element_size() > 1
    if _equal(moved, host):
        trial.record(name, "T2" if floating else "T0", 0.0, like=moved if isinstance(moved, Tensor) else None)
    elif not floating or host.numel() < MIN_ELEMENTS:
        trial.judge(name, moved, host, reference())
    else:
        verdict = judge(moved, host, reference(), slack=T2_FACTOR / _T1_FACTOR)
        trial.record(name, "T2", max(verdict.rms_ratio, verdict.max_ratio), verdict.reason, like=moved)


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    return one.shape == other.shape and one.dtype == other.dtype and same_bits(one, other)
