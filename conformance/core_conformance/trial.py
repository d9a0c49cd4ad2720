"""`Trial`: one run of one case. The case gets the device from it and reports through it what it measured and found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from core.common.conformance import ConformanceProfile
from core.device import Device
from core.verify.compare import compare
from core_conformance.dtypes import dtype_name
from core_conformance.outcome import Measurement
from core_conformance.ranks import DEFAULT_RANKS

_MAX_FAILURES = 20
E = TypeVar("E", bound=BaseException)


class NotSupported(Exception):
    """Raised by a case where the plugin's own declarations (a condition, a capability) say that it does not apply."""


class Skip(Exception):
    """Raised by a case where this environment lacks what it needs; a level is never granted over one."""


class Trial:
    """The argument of a case.

    The device is opened on first use, since cases of area host are about opening it. A case reports each value that it
    judges and goes on after a failure, so that a report shows all of them; it fails if any failed, or if it raises
    anything else than `NotSupported` or `Skip`.
    """

    def __init__(
        self,
        name: str,
        opened: Callable[[], tuple[Device, ConformanceProfile]],
        seed: int = 0,
        fuzz: int = 0,
        timeout_factor: float = 1.0,
        ranks: int = DEFAULT_RANKS,
    ) -> None:
        #: The device as it was asked for.
        self.name = name
        #: Seed of every random choice.
        self.seed = seed
        #: How many examples a case of area fuzz tries.
        self.fuzz = fuzz
        #: Multiplies the time that whatever the case waits for may take.
        self.timeout_factor = timeout_factor
        #: Processes of each case that runs in several.
        self.ranks = ranks
        self._opened = opened
        self.measurements: list[Measurement] = []
        self.failures: list[str] = []
        self.notes: list[str] = []

    @property
    def device(self) -> Device:
        """The opened device, the same for all cases of a worker."""
        return self._opened()[0]

    @property
    def profile(self) -> ConformanceProfile:
        """What its plugin declares about itself."""
        return self._opened()[1]

    def fork(self) -> Trial:
        """Return a trial of the same device that has nothing reported yet."""
        return Trial(self.name, self._opened, self.seed, self.fuzz, self.timeout_factor, self.ranks)

    def require(self, condition: bool, reason: str) -> bool:
        """Note a failure with this reason unless the condition holds; return the condition."""
        if not condition:
            self.fail(reason)
        return condition

    def fail(self, *reasons: str) -> None:
        """Note a failure for each reason, up to the number that a report shows."""
        self.failures += reasons[: _MAX_FAILURES - len(self.failures)]

    def note(self, *texts: str) -> None:
        """Add facts worth reading in the report."""
        self.notes += texts

    def record(self, name: str, criterion: str, ratio: float, reason: str = "", *, like: Tensor | None = None) -> None:
        """Report one judged value; a reason makes the case fail. like: gives dtype and number of elements."""
        if math.isnan(ratio) and not reason:
            reason = "its ratio to the bound is NaN"
        dtype = "" if like is None else dtype_name(like.dtype)
        count = 0 if like is None else like.numel()
        self.measurements.append(
            Measurement(name=name, criterion=criterion, ratio=ratio, reason=reason, dtype=dtype, num_elements=count)
        )
        self.require(not reason, f"{name}: {reason}")

    def judge(self, name: str, result: Any, eager: Any, reference: Any, *, slack: float = 1.0) -> None:
        """Judge a result by T0 and T1.

        eager: what the yardstick gave; reference: the fp64 value, for floats; slack: multiplies the yardstick's errors
        in every bound.
        """
        outcome = compare(result, eager, lambda: reference, slack=slack)
        reason, ratio = outcome if outcome is not None else ("there is no fp64 reference to judge it by", float("inf"))
        exact = not isinstance(eager, Tensor) or not eager.dtype.is_floating_point
        like = result if isinstance(result, Tensor) else None
        self.record(name, "T0" if exact else "T1", ratio, reason, like=like)

    def same(self, name: str, result: Any, wanted: Any) -> None:
        """Require equal bits: the promise of capture and replay. NaN equals NaN."""
        self.record(name, "T0", *_same(result, wanted), like=result if isinstance(result, Tensor) else None)

    def same_metadata(self, name: str, result: Any, wanted: Any) -> None:
        """Require equal shape, dtype, device type and, where there is something to stride over, strides."""
        if not isinstance(result, Tensor) or not isinstance(wanted, Tensor):
            self.require(type(result) is type(wanted), f"{name}: {type(result).__name__}, not {type(wanted).__name__}")
            return
        self.require(_metadata(result) == _metadata(wanted), f"{name}: {_texts(result, wanted)}")


def _same(result: Any, wanted: Any) -> tuple[float, str]:
    if not isinstance(result, Tensor) or not isinstance(wanted, Tensor):
        same = type(result) is type(wanted) and result == wanted
        return (0.0, "") if same else (float("inf"), f"{result!r} instead of {wanted!r}")
    if result.shape != wanted.shape or result.dtype != wanted.dtype:
        return float("inf"), _texts(result, wanted)
    a, b = result.detach().cpu(), wanted.detach().cpu()
    differs = (a != b) & ~((a != a) & (b != b))
    if not bool(differs.any()):
        return 0.0, ""
    return float("inf"), f"{int(differs.sum())} of {a.numel()} elements differ in bits"


def _metadata(tensor: Tensor) -> tuple[Any, ...]:
    # A dimension of one, or an empty tensor, has no stride that anything could read.
    strides = tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1) if tensor.numel() else ()
    return tensor.shape, tensor.dtype, tensor.device.type, strides


def _texts(result: Tensor, wanted: Tensor) -> str:
    """Return how two tensors are laid out, with their devices where these differ."""
    texts = [f"{tuple(t.shape)} {dtype_name(t.dtype)} strides {t.stride()}" for t in (result, wanted)]
    if result.device.type != wanted.device.type:
        texts = [f"{text} on {t.device}" for text, t in zip(texts, (result, wanted), strict=True)]
    return " instead of ".join(texts)


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a nested structure, in order."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def raised(kind: type[E], call: Callable[..., object], *args: object, **kwargs: object) -> E | None:
    """Return the error of a kind that a call raises, None where it returns; other errors go through."""
    try:
        call(*args, **kwargs)
    except kind as error:
        return error
    return None
