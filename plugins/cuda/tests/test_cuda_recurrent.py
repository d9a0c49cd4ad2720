"""core_cuda/ops/recurrent: the steps of recurrent layers against their references, states included."""

from __future__ import annotations

import pytest
import torch

from core.common.ops.declaration import CanonicalOp
from tests.kernel_cases import DTYPES
from tests.recurrent_cases import OPS, calls, judged

pytest.importorskip("triton", reason="needs triton")
from core_cuda.implementations import IMPLEMENTATIONS
from core_cuda.ops.recurrent.states import block_of

BY_OP = {each.op: each for each in IMPLEMENTATIONS}
EACH = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EACH
def test_calls_agree_with_the_reference(op: CanonicalOp, dtype: torch.dtype, kernel_device: torch.device) -> None:
    own = BY_OP[op.qualified_name]
    for name, call in calls(op, dtype):
        assert own.condition(op.bind((), call)) is None, name
        judged(op, own.fn, call, kernel_device)


@EACH
def test_states_that_are_no_run_are_refused(op: CanonicalOp) -> None:
    call = next(dict(each.kwargs) for each in op.samples(torch.float32, torch.device("cpu")) if each.name == "slots")
    call["states"] = call["states"].mT.contiguous().mT
    reason = BY_OP[op.qualified_name].condition(op.bind((), call))
    assert reason is not None and "one run of memory" in reason


def test_wide_keys_and_states_are_refused() -> None:
    for op, name, size in ((OPS[1], "key", 513), (OPS[2], "B", 513)):
        call = {name: torch.empty(1, 1, size)}
        reason = BY_OP[op.qualified_name].condition(op.bind((), call))
        assert reason is not None and "takes up to 512" in reason


def test_few_states_are_shared_out_among_more_programs(kernel_device: torch.device) -> None:
    assert block_of(1, 128, most=64, least=8) == 8
    assert block_of(10_000, 128, most=64, least=8) == 64
    assert block_of(10_000, 5, most=64, least=8) == 8
