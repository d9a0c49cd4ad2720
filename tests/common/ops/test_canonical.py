"""What every op of core/common/ops/canonical.py owes, on every one of its samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.ops.attention.dense import DENSE_ATTENTION
from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.quantized import ATTENTION_QUANTIZE, ROTARY_ATTENTION_QUANTIZE
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from core.common.ops.canonical import OPS
from core.common.ops.declaration import CanonicalOp, Sample, declared_ops
from core.common.ops.names import OP_NAMES
from core.common.ops.recurrent import CAUSAL_CONV1D_UPDATE, GATED_DELTA_RULE, SELECTIVE_STATE_UPDATE
from tests.common.ops.canonical_oracle import CPU, every_sample, faked, in_fp64, outputs, run, sample

# test_attention.py, test_dense_attention.py, test_rotary_attention.py and test_attention_quantize.py hold the ops that
# write a cache to the same, recurrent/test_recurrent.py those that write states.
WRITING = (ATTENTION, DENSE_ATTENTION, ROTARY_ATTENTION, ATTENTION_QUANTIZE, ROTARY_ATTENTION_QUANTIZE)
RECURRENT = (CAUSAL_CONV1D_UPDATE, GATED_DELTA_RULE, SELECTIVE_STATE_UPDATE)
FUNCTIONAL = [op for op in OPS if op not in (*WRITING, *RECURRENT)]
CASES = [pytest.param(op, s.name, id=f"{op.name}-{s.name}") for op in FUNCTIONAL for s in every_sample(op)]
COLLECTIVES = {
    *("all_reduce", "reduce_scatter", "all_gather", "all_reduce_rms_norm", "all_reduce_add_rms_norm"),
    *("all_reduce_add_rms_norm_quantize", "all_reduce_add_rms_norm_quantize_fp4"),
    *("all_gather_linear", "linear_reduce_scatter"),
}
HALF_AND_FULL = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def tensors(values: Any) -> list[Tensor]:
    return [v for v in values if isinstance(v, Tensor)]


def test_all_are_declared_once() -> None:
    assert {op.qualified_name: op for op in OPS}.items() <= declared_ops().items()
    assert tuple(sorted(op.qualified_name for op in OPS)) == OP_NAMES  # which are read without torch


def test_only_attention_and_collectives_may_be_cut_at() -> None:
    cut = {op.name for op in WRITING} | COLLECTIVES
    assert {op.name for op in OPS if op.break_point} == cut


@pytest.mark.cases(6)
@pytest.mark.parametrize("op", FUNCTIONAL, ids=lambda op: op.name)
@HALF_AND_FULL
def test_no_reference_reads_values_on_the_host(op: CanonicalOp, dtype: torch.dtype) -> None:
    for each in every_sample(op):
        mode, call = faked(sample(op, each.name, dtype))
        with mode:
            op.reference(**call)  # raises where it needs a value


@pytest.mark.parametrize(("op", "name"), CASES)
def test_torch_accepts_the_registration(op: CanonicalOp, name: str) -> None:
    call = sample(op, name, torch.bfloat16)
    # torch's own check of mutation multiplies, which fp8 can't; test_inputs_and_outputs_are_kept_apart covers those.
    fp8 = any(v.dtype == torch.float8_e4m3fn for v in tensors(call.values()))
    checks = ["test_autograd_registration", "test_faketensor"] + ["test_schema"] * (not fp8)
    torch.library.opcheck(op.overload, (), call, test_utils=checks)


@pytest.mark.cases(4)
@pytest.mark.parametrize("op", FUNCTIONAL, ids=lambda op: op.name)
def test_torch_compiles_the_op(op: CanonicalOp) -> None:
    call = dict(next(every_sample(op)).kwargs)
    torch.library.opcheck(op.overload, (), call, test_utils="test_aot_dispatch_dynamic")


@HALF_AND_FULL
@pytest.mark.parametrize(("op", "name"), CASES)
def test_the_fake_gives_the_metadata_of_the_real_one(op: CanonicalOp, name: str, dtype: torch.dtype) -> None:
    call = sample(op, name, dtype)
    mode, fakes = faked(call)
    with mode:
        guesses = run(op, fakes)
    for fake, real in zip(guesses, run(op, call), strict=True):
        metadata = (fake.shape, fake.dtype, fake.device, fake.stride())
        assert metadata == (real.shape, real.dtype, real.device, real.stride())


@HALF_AND_FULL
@pytest.mark.parametrize(("op", "name"), CASES)
def test_inputs_and_outputs_are_kept_apart(op: CanonicalOp, name: str, dtype: torch.dtype) -> None:
    call, before = sample(op, name, dtype), sample(op, name, dtype)
    results = run(op, call)
    for name, value in call.items():
        assert not isinstance(value, Tensor) or torch.equal(value.double(), before[name].double()), name
    storages = [t.untyped_storage().data_ptr() for t in (*results, *tensors(call.values())) if t.numel()]
    assert len(set(storages[: len(results)]) & set(storages[len(results) :])) == 0
    assert op.mutates == ()


@pytest.mark.parametrize(("op", "name"), CASES)
def test_the_op_is_its_reference(op: CanonicalOp, name: str) -> None:
    call = sample(op, name, torch.bfloat16)
    for one, other in zip(run(op, call), outputs(op.reference(**call)), strict=True):
        assert one.dtype == other.dtype and torch.equal(one.double(), other.double())


@pytest.mark.parametrize(("op", "name"), CASES)
def test_fp64_stays_fp64(op: CanonicalOp, name: str) -> None:
    call = sample(op, name, torch.float64)
    for result, wide in zip(run(op, call), in_fp64(op, call), strict=True):
        assert not result.is_floating_point() or result.dtype in (torch.float64, torch.float8_e4m3fn)
        assert torch.equal(result.double(), wide.double())


@pytest.mark.slow
@pytest.mark.parametrize("op", FUNCTIONAL, ids=lambda op: op.name)
def test_the_reference_is_traceable(op: CanonicalOp) -> None:
    for one in every_sample(op):
        torch._dynamo.reset()
        compiled = torch.compile(op.reference, backend="eager", fullgraph=True, dynamic=False)
        for result, eager in zip(outputs(compiled(**one.kwargs)), run(op, one.kwargs), strict=True):
            assert torch.equal(result.double(), eager.double()), one.name


@HALF_AND_FULL
@pytest.mark.parametrize("op", FUNCTIONAL, ids=lambda op: op.name)
def test_samples_are_deterministic_and_never_constant(op: CanonicalOp, dtype: torch.dtype) -> None:
    first, second = list(every_sample(op, dtype)), list(op.samples(dtype, CPU))
    assert len({one.name for one in first}) == len(first) >= 3
    assert any(holds_no_token(one) for one in first)
    required = {a.name for a in op.overload._schema.arguments if not a.has_default_value()}
    for one, two in zip(first, second, strict=True):
        assert required <= one.kwargs.keys()
        for name, value in one.kwargs.items():
            if isinstance(value, Tensor):
                assert torch.equal(value.double(), two.kwargs[name].double()), (one.name, name)
                assert value.numel() < 2 or value.double().unique().numel() > 1, (one.name, name)


def holds_no_token(one: Sample) -> bool:
    return any(v.numel() == 0 for v in tensors(one.kwargs.values()))
