"""What the tests of kernels over rows share: a call judged against its op's reference, layouts included."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from core.common.numerics import MIN_ELEMENTS, Fp64Mode, judge, judge_pooled
from core.common.ops.declaration import CanonicalOp

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODED = ((torch.float32, torch.int8), (torch.bfloat16, torch.float8_e4m3fn), (torch.float16, torch.float8_e4m3fn))
"""Dtypes of rows, each with one of codes."""
CPU = torch.device("cpu")

Call = Mapping[str, Any]


@cache
def _calls(op: CanonicalOp, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    return {each.name: dict(each.kwargs) for each in op.samples(dtype, CPU)}


def sample_call(op: CanonicalOp, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of one of an op's samples on the processor, copied with their strides."""
    return copy.deepcopy(_calls(op, dtype)[name])


def randn(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0, shift: float = 0.0
) -> Tensor:
    normal = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (normal * scale + shift).to(dtype)


def listed(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def in_fp64(op: CanonicalOp, call: Call) -> list[Tensor]:
    codes = (torch.float8_e4m3fn,)
    wide = {
        name: v.double() if isinstance(v, Tensor) and v.is_floating_point() and v.dtype not in codes else v
        for name, v in call.items()
    }
    with Fp64Mode():
        return listed(op.reference(**wide))


def faked(op: CanonicalOp, call: Call) -> list[Tensor]:
    """Return what tracing takes the results for."""
    mode = FakeTensorMode()
    with mode:
        return listed(op.overload(**{k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in call.items()}))


class OpsSeen(TorchDispatchMode):
    """Names the ops that run inside, as `aten.mm.default`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def moved(call: Call, device: torch.device) -> dict[str, Any]:
    """Put the tensors on a device; strides stay as they are there."""
    made = {}
    for name, value in call.items():
        if isinstance(value, Tensor) and value.device != device:
            span = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
            memory = value.as_strided((span,), (1,)) if value.numel() else value.new_empty(0)
            made[name] = memory.to(device).as_strided(value.shape, value.stride())  # also where elements share a place
        else:
            made[name] = value
    return made


def laid_out(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    return [(tuple(t.shape), t.stride(), t.dtype) for t in tensors]


def check(op: CanonicalOp, kernel: Callable[..., Any], calls: Iterable[Call], device: torch.device) -> None:
    """Expect the layout of the fake and the numbers of the reference; the smallest results are judged together."""
    pools: dict[tuple[int, torch.dtype], list[tuple[Tensor, Tensor, Tensor]]] = {}
    for call in calls:
        results, eager = listed(kernel(**moved(call, device))), listed(op.reference(**call))
        assert laid_out(results) == laid_out(faked(op, call)), call
        if not any(t.numel() for t in results):
            continue
        for at, judged in enumerate(zip((t.cpu() for t in results), eager, in_fp64(op, call), strict=True)):
            if judged[0].numel() >= MIN_ELEMENTS:
                verdict = judge(*judged)
                assert verdict.passed, (op.name, at, call, verdict)
            else:
                pools.setdefault((at, judged[0].dtype), []).append(judged)
    for (at, _), small in pools.items():
        if sum(of[0].numel() for of in small) >= MIN_ELEMENTS:
            verdict = judge_pooled(*zip(*small, strict=True))
            assert verdict.passed, (op.name, at, verdict)
        else:
            for result, wanted, _ in small:
                torch.testing.assert_close(result, wanted)


def code_steps(codes: Tensor, wanted: Tensor) -> Tensor:
    """Return by how many codes each one lies from the one wanted."""

    def ordinals(c: Tensor) -> Tensor:
        if c.dtype == torch.int8:
            return c.long()
        bits = c.view(torch.uint8).long()
        return torch.where(bits >= 128, 128 - bits, bits)

    return (ordinals(codes) - ordinals(wanted)).abs()


def check_codes(op: CanonicalOp, calls: Iterable[Call], kernel: Callable[..., Any], device: torch.device) -> None:
    """Expect the layout of the fake, and of results (codes, scale, …) codes and scales as good as the reference's.

    Scales: equal up to a rounding of the largest value. Codes: one step from the reference's own in a hundredth of the
    places (four in any case: values of few digits often lie on the middle between codes); where the values before them
    may be computed otherwise, no further from those of fp64 than twice what the reference is.
    """
    for call in calls:
        results, wanted = listed(kernel(**moved(call, device))), listed(op.reference(**call))
        assert laid_out(results) == laid_out(faked(op, call)), call
        exact = in_fp64(op, call)
        codes, scale, *others = (t.cpu() for t in results)
        half = any(isinstance(v, Tensor) and v.dtype.itemsize == 2 for v in call.values())
        torch.testing.assert_close(scale, wanted[1], rtol=2e-2 if half else 1e-6, atol=0)
        few = max(0.01 * codes.numel(), 4)
        if codes.numel() and not _apart(codes, wanted[0], 1, few):
            theirs = code_steps(wanted[0], exact[0])
            far, differing = int(theirs.max()), int((theirs > 0).sum())
            assert _apart(codes, exact[0], max(2 * far, 1), 2 * differing + few), (op.name, call)
        for other, right in zip(others, wanted[2:], strict=True):
            torch.testing.assert_close(other, right)


def _apart(codes: Tensor, wanted: Tensor, far: int, count: float) -> bool:
    """Tell whether codes lie at most so far from others, and at most so many of them."""
    steps = code_steps(codes, wanted)
    return int(steps.max()) <= far and int((steps > 0).sum()) <= count
