"""core/common/ops/attention/quantized.py: bit by bit an attention and the quantisation of its rows, cache included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from core.common.ops.attention.quantized import ATTENTION_QUANTIZE, ROTARY_ATTENTION_QUANTIZE
from core.common.ops.declaration import CanonicalOp
from tests.kernel_cases import code_steps, sample_call

CPU = torch.device("cpu")
OPS = (ATTENTION_QUANTIZE, ROTARY_ATTENTION_QUANTIZE)
CASES = [pytest.param(op, s.name, id=f"{op.name}-{s.name}") for op in OPS for s in op.samples(torch.float32, CPU)]
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
every_sample = pytest.mark.parametrize(("op", "name"), CASES)
Call = dict[str, Any]


def sample(op: CanonicalOp, name: str, dtype: torch.dtype = torch.float32) -> Call:
    return sample_call(op, name, dtype)


def copied(call: Call) -> Call:
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in call.items()}


def composed(op: CanonicalOp, call: Call) -> tuple[Tensor, Tensor]:
    """Do what the op stands for by the ops that models call, and quantise as an output projection does."""
    attention = getattr(torch.ops.core, op.name.removesuffix("_quantize"))
    coding = {name: call[name] for name in ("dtype", "granularity")}
    out = attention(**{name: value for name, value in call.items() if name not in ("out_scale", *coding)})
    rows: tuple[Tensor, Tensor] = torch.ops.core.quantize(out.reshape(out.shape[0], -1), call["out_scale"], **coding)
    return rows


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def faked(op: CanonicalOp, call: Call) -> tuple[Tensor, ...]:
    mode = FakeTensorMode()
    with mode:
        found: tuple[Tensor, ...] = op.overload(
            **{k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in call.items()}
        )
    return found


@pytest.mark.cases(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@every_sample
def test_it_is_an_attention_and_a_quantisation_in_every_bit(op: CanonicalOp, name: str, dtype: torch.dtype) -> None:
    ours, theirs, before = (copied(sample(op, name, dtype)) for _ in range(3))
    results, wanted = op.overload(**ours), composed(op, theirs)
    for one, other, fake in zip(results, wanted, faked(op, before), strict=True):
        assert one.dtype == other.dtype and torch.equal(bits(one), bits(other))
        assert (fake.shape, fake.dtype, fake.stride()) == (one.shape, one.dtype, one.stride())
    for key, value in ours.items():
        if isinstance(value, Tensor):
            assert torch.equal(bits(value), bits(theirs[key])), key
            assert torch.equal(bits(value), bits(before[key])) is (key not in op.mutates), key
    inside = {t.untyped_storage().data_ptr() for t in ours.values() if isinstance(t, Tensor)}
    assert not inside & {t.untyped_storage().data_ptr() for t in results if t.numel()}


@every_sample
def test_between_graphs_each_sequence_attends_by_itself(op: CanonicalOp, name: str) -> None:
    assert op.eager is not None
    call, by_itself = (copied(sample(op, name)) for _ in range(2))
    whole, eager = op.overload(**call), op.eager(**by_itself)
    real = int(call["query_starts"][-1])
    # The rounding of another order of summation moves few codes, by one, and scales in their last places.
    assert code_steps(eager[0], whole[0]).max() <= 1
    assert (code_steps(eager[0], whole[0]) == 0).double().mean() > 0.99
    torch.testing.assert_close(eager[1], whole[1], rtol=1e-5, atol=0)
    assert not bits(eager[0][real:]).any()
    for cache in op.mutates:
        assert torch.equal(bits(by_itself[cache][1:]), bits(call[cache][1:]))  # block 0 is nobody's


@each_op
def test_samples_are_deterministic_and_of_every_form(op: CanonicalOp) -> None:
    first, second = (list(op.samples(torch.bfloat16, CPU)) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        assert one.name == two.name
        same = (torch.equal(bits(v), bits(two.kwargs[k])) for k, v in one.kwargs.items() if isinstance(v, Tensor))
        assert all(same)
    kinds = {(s.kwargs["dtype"], s.kwargs["granularity"], s.kwargs["out_scale"] is None) for s in first}
    assert len(kinds) == 5 and {s.kwargs["key_cache"].dtype for s in first} == {torch.bfloat16, torch.float8_e4m3fn}


@each_op
def test_torch_accepts_the_registration(op: CanonicalOp) -> None:
    call = dict(next(op.samples(torch.float32, CPU)).kwargs)
    names = [a.name for a in op.overload._schema.arguments if not a.kwarg_only]
    # torch's own check of the schema multiplies codes, which fp8 can't; the first test covers writes and aliases.
    checks = ["test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(op.overload, tuple(call.pop(name) for name in names), call, test_utils=checks)


NEAR_MISSES: dict[str, tuple[Call, str]] = {
    "groups": ({"granularity": "group"}, "granularity 'group' is none of 'token', 'tensor'"),
    "another format": ({"dtype": torch.float16}, "dtype torch.float16 is none of"),
    "a scale per token for all": ({"out_scale": torch.ones(3, 1)}, r"scale must have shape \(\), not \(3, 1\)"),
    "a scale of no codes": ({"v_scale": torch.ones(())}, "v_scale given, and value_cache is torch.float32"),
    "query of rank 2": ({"query": torch.ones(3, 64)}, "query must have rank 3"),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("case", NEAR_MISSES)
@each_op
def test_other_arguments_are_refused_by_kernel_and_fake(op: CanonicalOp, case: str) -> None:
    change, message = NEAR_MISSES[case]
    call = dict(next(op.samples(torch.float32, CPU)).kwargs) | change
    with pytest.raises(RuntimeError, match=f"core::.*{message}"):
        op.overload(**copied(call))
    with pytest.raises(RuntimeError, match=f"core::.*{message}"):
        faked(op, call)
