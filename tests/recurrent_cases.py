"""What the tests of kernels of recurrent layers share: calls, and results and states judged against the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from core.common.numerics import MIN_ELEMENTS, Fp64Mode, judge
from core.common.ops.arguments import Draw
from core.common.ops.declaration import CanonicalOp
from core.common.ops.recurrent import CAUSAL_CONV1D_UPDATE, GATED_DELTA_RULE, SELECTIVE_STATE_UPDATE
from core_conformance.inputs import large_recurrent
from tests.kernel_cases import CPU, faked, laid_out, moved

OPS = (CAUSAL_CONV1D_UPDATE, GATED_DELTA_RULE, SELECTIVE_STATE_UPDATE)


def calls(op: CanonicalOp, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the op's samples, and larger calls past tiles."""
    for sample in op.samples(dtype, CPU):
        yield sample.name, dict(sample.kwargs)
    for source in (large_recurrent.LARGE, large_recurrent.SIZES):
        for sample in source[op.name](Draw(dtype, CPU, seed=9)):
            yield sample.name, dict(sample.kwargs)


def judged(op: CanonicalOp, kernel: Callable[..., Tensor], call: dict[str, Any], device: torch.device) -> None:
    """Expect the results and the states of the reference, within its errors, and the layout of the fake."""
    given, eager, exact = moved(copy.deepcopy(call), device), copy.deepcopy(call), copy.deepcopy(call)
    out, wanted = kernel(**given), op.reference(**eager)
    assert laid_out([out]) == laid_out(faked(op, call))
    wide = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in exact.items()}
    with Fp64Mode():
        true = op.reference(**wide)
    states = given["states"].cpu()
    # Most calls write few of their slots, and judging what nobody wrote takes longer than all else of a test.
    written = (eager["states"] != call["states"].cpu()).flatten(1).any(1)
    torch.testing.assert_close(states[~written], eager["states"][~written], rtol=0, atol=0, equal_nan=True)
    for one, other, truth in (
        (out.cpu(), wanted, true),
        (states[written], eager["states"][written], wide["states"][written]),
    ):
        if one.numel() >= MIN_ELEMENTS:
            verdict = judge(one, other, truth)
            assert verdict.passed, verdict
        else:
            torch.testing.assert_close(one, other)
