"""What the tests of canonical ops share: one op called on a sample, in fp64, and judged against an eager model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from core.common.numerics import Fp64Mode, judge
from core.common.ops.declaration import CanonicalOp, Sample

CPU = torch.device("cpu")

Call = dict[str, Any]
"""An op's arguments by name."""

EPS = (1e-5, 1e-6, 3e-4, 1.5625e-7)


def every_sample(op: CanonicalOp, dtype: torch.dtype = torch.float32) -> Iterator[Sample]:
    return op.samples(dtype, CPU)


@functools.cache
def _drawn(op: CanonicalOp, dtype: torch.dtype) -> dict[str, Sample]:
    """The samples by name, drawn once for all tests of a process; to be copied."""
    return {one.name: one for one in every_sample(op, dtype)}


def sample(op: CanonicalOp, name: str, dtype: torch.dtype = torch.float32) -> Call:
    return copy.deepcopy(dict(_drawn(op, dtype)[name].kwargs))


def outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def run(op: CanonicalOp, call: Mapping[str, Any]) -> tuple[Tensor, ...]:
    return outputs(op.overload(**call))


def faked(call: Mapping[str, Any]) -> tuple[FakeTensorMode, Call]:
    mode = FakeTensorMode()
    return mode, {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in call.items()}


def in_fp64(op: CanonicalOp, call: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Run the op on the same rounded arguments with every floating dtype widened, those it is told included."""
    codes = (torch.float8_e4m3fn,)
    wide = {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() and v.dtype not in codes else v
        for k, v in call.items()
    }
    with Fp64Mode():
        return outputs(op.reference(**wide))


def assert_bitwise(op: CanonicalOp, call: Mapping[str, Any], eager: Callable[[], Any]) -> None:
    """Expect what eager torch gives: every bit, dtype and shape."""
    got, want = run(op, call), outputs(eager())
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert torch.equal(one, other), f"max difference {(one.double() - other.double()).abs().max()}"


def assert_close(op: CanonicalOp, call: Mapping[str, Any], eager: Callable[[], Any], truth: Any) -> None:
    """Expect errors like eager torch's from `truth`, computed in fp64."""
    for one, other, exact in zip(run(op, call), outputs(eager()), outputs(truth), strict=True):
        verdict = judge(one, other, exact)
        assert verdict.passed, verdict


def assert_raises(op: CanonicalOp, call: Mapping[str, Any], message: str) -> None:
    """Expect the same error from the kernel and from the fake, naming the op."""
    match = f"core::.*{message}"
    with pytest.raises(RuntimeError, match=match):
        run(op, call)
    mode, fakes = faked(call)
    with mode, pytest.raises(RuntimeError, match=match):
        run(op, fakes)
