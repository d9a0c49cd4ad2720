"""core_conformance/cases/ops/torch_ops.py: honest operators pass and wrong ones fail, also where the device is the
host.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from core.common.conformance import ConformanceProfile
from core.device import Device
from core_conformance.cases.ops.torch_ops import collect, judge_cast, judge_mover, judge_operator
from core_conformance.dtypes import DTYPES
from core_conformance.inputs.casts import CASTS, cast_values, rounded
from core_conformance.inputs.movement import MOVING
from core_conformance.inputs.operators import ROUNDING
from core_conformance.trial import Trial
from tests.conformance.support import run_case
from tests.marks import slow_except
from tests.recording import acme
from tests.support import cpu

OPERATORS = {operator.name: operator for operator in ROUNDING}
MOVERS = {mover.name: mover for mover in MOVING}


def _truncated(x: Tensor) -> Tensor:
    """Round to 10 bits after the point, as fast matrix units read fp32."""
    return ((x.float().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _in_bf16(a: Tensor, b: Tensor) -> Tensor:
    result = (a[..., :, :1] * b[..., :1, :]).bfloat16()
    for k in range(1, a.shape[-1]):
        result = (result + a[..., :, k : k + 1] * b[..., k : k + 1, :]).bfloat16()
    return result.to(a.dtype)


def _unbiased(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    wide = x.float()
    return ((wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, keepdim=True) + 1e-5).sqrt() * weight + bias).to(
        x.dtype
    )


def _moments(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    wide = x.float()
    mean, square = wide.mean(-1, keepdim=True), wide.square().mean(-1, keepdim=True)
    return ((wide - mean) / (square - mean.square() + 1e-5).sqrt() * weight + bias).to(x.dtype)


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1))


def _scores_rounded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.matmul(torch.softmax((query @ key.mT) / 8, -1), value)


def _in_parts(a: Tensor, b: Tensor) -> Tensor:
    """Sum a quarter of K at a time, each rounded to the dtype."""
    parts = zip(a.chunk(4, -1), b.chunk(4, -2), strict=True)
    return torch.stack([(x.float() @ y.float()).to(a.dtype) for x, y in parts]).sum(0)


def _upside_down(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    seen = torch.ones(17, 17, dtype=torch.bool).tril(1)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)


WRONG: dict[str, tuple[str, Callable[..., Tensor], str]] = {
    "gelu in tanh form": ("gelu", lambda x: functional.gelu(x, approximate="tanh"), "float32 bfloat16 float16"),
    "tanh form as erf": ("gelu_tanh", functional.gelu, "float32 bfloat16 float16"),
    "products of 10 bits": ("matmul", lambda a, b: (_truncated(a) @ _truncated(b)).to(a.dtype), "float32"),
    "summed in bf16": ("matmul", _in_bf16, "float32 bfloat16 float16"),
    "no bias": ("linear", lambda x, weight, _: functional.linear(x, weight), "float32 bfloat16 float16"),
    "unbiased variance": ("layer_norm", _unbiased, "float32"),
    "other eps": ("layer_norm", lambda x, w, b: functional.layer_norm(x, (768,), w, b, 1e-6), "float32 bfloat16"),
    "eps left out": ("rms_norm", lambda x, w, _: functional.rms_norm(x, (768,), w, 0.0), "float32 bfloat16"),
    "exp 2 ** -12 off": ("exp", lambda x: (x.float().exp() * (1 + 2**-12)).to(x.dtype), "float32"),
    "badly reduced": ("cos", lambda x: (x - (x / (2 * math.pi)).round() * 6.2831855).cos(), "float32"),
    "scale 2 % off": (
        "attention",
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, scale=1.02 / 8),
        "float32 bfloat16 float16",
    ),
    "heads in another order": ("attention-grouped", _repeated, "float32 bfloat16"),
    "sees the next token": ("attention-causal", _upside_down, "float32 bfloat16"),
    "mask ignored": ("attention-mask", lambda q, k, v, _: functional.scaled_dot_product_attention(q, k, v), "bfloat16"),
}
LEGITIMATE: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "by parts": ("matmul", _in_parts),
    "rounded between": ("baddbmm", lambda start, a, b: 0.5 * start + 2 * torch.bmm(a, b)),
    "variance by moments": ("layer_norm", _moments),
    "scores rounded": ("attention", _scores_rounded),
    "softmax step by step": (
        "softmax",
        lambda x: (x - x.amax(-1, True)).exp() / (x - x.amax(-1, True)).exp().sum(-1, True),
    ),
    "sigmoid by tanh": ("sigmoid", lambda x: (0.5 * (1 + (x.float() / 2).tanh())).to(x.dtype)),
}


def ratio(name: str, call: Callable[..., Tensor], dtype: torch.dtype) -> float:
    """Judge an operator that runs `call`; return its worst ratio, and see that it alone decides."""
    trial = Trial("acme", lambda: (cpu(), ConformanceProfile()))
    judge_operator(trial, operator=replace(OPERATORS[name], call=call), dtype=dtype)
    worst = max(each.ratio for each in trial.measurements)
    assert bool(trial.failures) is (worst > 1)
    return worst


@pytest.mark.parametrize("make", slow_except([cpu, acme], acme))
def test_the_operators_of_honest_devices_pass(make: Callable[[], Device]) -> None:
    device = make()
    cases = list(collect(device, ConformanceProfile()))
    if make is acme:  # the same operators of the same torch: a few of each kind
        cases = cases[::9]
    assert {case.id: failures for case in cases if (failures := run_case(case, device))} == {}
    assert make is acme or len({case.id.split("/")[1] for case in cases}) >= 50


DEAR = ("summed in bf16",)
"""Those that compute term by term."""


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in DEAR else name for name in WRONG]
)
def test_a_wrong_operator_is_rejected(name: str) -> None:
    operator, call, dtypes = WRONG[name]
    for dtype in dtypes.split():
        assert ratio(operator, call, getattr(torch, dtype)) > 1.5, dtype


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", LEGITIMATE)
def test_another_way_to_compute_the_same_passes(name: str) -> None:
    operator, call = LEGITIMATE[name]
    for dtype in DTYPES:
        assert ratio(operator, call, dtype) < 0.6, dtype


@contextmanager
def replaced(op: str, kernel: Callable[..., Any]) -> Iterator[None]:
    """Replace a kernel of torch itself for tensors in the host's memory."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a kernel is overridden
        library.impl(op, kernel, "CPU")
    yield
    library._destroy()


def test_a_replaced_kernel_is_found_on_the_host_itself() -> None:
    def in_tanh_form(x: Tensor, *, approximate: str = "none") -> Tensor:
        inner = math.sqrt(2 / math.pi) * (x.float() + 0.044715 * x.float() ** 3)
        return (0.5 * x.float() * (1 + torch.tanh(inner))).to(x.dtype)

    cases = {case.id: case for case in collect(cpu(), ConformanceProfile())}
    with replaced("gelu", in_tanh_form):
        assert torch.equal(functional.gelu(torch.ones(1)), functional.gelu(torch.ones(1), approximate="tanh"))
        for dtype in ("float32", "bfloat16", "float16"):
            assert run_case(cases[f"torch/gelu/{dtype}"], cpu())
            assert not run_case(cases[f"torch/gelu_tanh/{dtype}"], cpu())
    assert not run_case(cases["torch/gelu/float32"], cpu())


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("topk", lambda x: x.topk(5, dim=-1, largest=False).values),
        ("sort-stable", lambda x: x.shape[1] - 1 - torch.sort(x.flip(-1), stable=True, dim=-1).indices),
        ("bucketize", lambda x, ends: torch.bucketize(x, ends)),
        ("index_put", lambda x, index, rows: x.clone().index_put_((index,), rows, accumulate=True)),
        ("round", lambda x: torch.floor(x + 0.5)),
        ("tril", lambda x: torch.tril(x, 1)),
        ("clamp", lambda x: x.clamp(-1.5, 2.0)),
        ("gather", lambda x, index: torch.gather(x, 1, index.flip(0))),
    ],
)
def test_a_wrong_answer_is_rejected(name: str, call: Callable[..., Tensor]) -> None:
    for dtype in DTYPES:
        trial = Trial("acme", lambda: (cpu(), ConformanceProfile()))
        judge_mover(trial, mover=replace(MOVERS[name], call=call), dtype=dtype)
        assert trial.failures, dtype


def test_casts_are_judged_by_a_rounding_of_our_own() -> None:
    values = torch.tensor(cast_values(), dtype=torch.float64)
    for _, wanted in CASTS:
        own = torch.tensor([rounded(value, wanted) for value in values.tolist()], dtype=torch.float64)
        torch.testing.assert_close(own, values.to(wanted).double(), rtol=0, atol=0, equal_nan=True)


def test_a_cast_that_truncates_is_rejected() -> None:
    def truncated(x: Tensor, *args: Any, **options: Any) -> Tensor:
        return (x.view(torch.int32) & ~0xFFFF).view(torch.float32)[...].double().to(torch.bfloat16)

    trial = Trial("acme", lambda: (cpu(), ConformanceProfile()))
    judge_cast(trial, given=torch.float32, wanted=torch.bfloat16)
    assert not trial.failures
    exact = torch.tensor([rounded(value, torch.float32) for value in cast_values()], dtype=torch.float32)
    trial.same("result", truncated(exact), exact.to(torch.bfloat16))
    assert trial.failures


def test_formulas_agree_with_torch_in_fp64() -> None:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    for name in ("gelu", "gelu_tanh", "silu", "sigmoid", "softplus", "tanh", "exp"):
        torch.testing.assert_close(OPERATORS[name].formula(x), OPERATORS[name].call(x), rtol=1e-13, atol=1e-15)


def test_what_a_device_does_not_compute_in_is_not_run() -> None:
    device = cpu()
    parts = replace(device.parts, capabilities=replace(device.capabilities, dtypes=frozenset({torch.bfloat16})))
    cases = {case.id: case.not_supported for case in collect(replace(device, parts=parts), ConformanceProfile())}
    assert cases["torch/matmul/float32"] == "the device declares no arithmetic in float32"
    assert not cases["torch/matmul/bfloat16"] and not cases["torch/one_hot/integers"]
    assert cases["torch/cast/float32/bfloat16"] == "the device declares no arithmetic in float32"


class Wrong(TorchDispatchMode):
    """Lets one operator return something else, on real tensors: torch's fakes stay as they are."""

    def __init__(self, op: Any, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.op, self.change = op, change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        real = isinstance(result, Tensor) and type(result) is Tensor and result.device.type == "cpu"
        return self.change(result) if func is self.op and real else result


def _columns(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def _wide(x: Tensor) -> Tensor:
    return x.double()


ATEN = torch.ops.aten


def test_a_device_that_says_so_may_give_contiguous_results_and_no_others() -> None:
    parts = cpu().parts
    device = replace(cpu(), parts=replace(parts, capabilities=replace(parts.capabilities, keeps_strides=False)))
    found = {each.id: each for each in collect(device, ConformanceProfile())}
    case = found["torch/negative/float32"]
    assert run_case(case, device) == []
    with Wrong(ATEN.neg.default, torch.Tensor.contiguous):
        assert run_case(case, device) == []
    with Wrong(ATEN.neg.default, lambda x: (x + 1).contiguous()):
        assert "by columns: error over bound" in str(run_case(case, device))
    with Wrong(ATEN.tril.default, _columns):
        assert "strides (1, 12) instead of" in str(run_case(found["torch/tril/float32"], device))


@pytest.mark.parametrize(
    ("case", "op", "change", "told"),
    [
        ("number-minus/float32", ATEN.rsub.Scalar, lambda x: x.to("meta"), "result: it lies on 'meta', its arguments"),
        ("full_like/float16", ATEN.full_like.default, lambda x: x.to("meta"), "result: it lies on 'meta'"),
        ("arange/integers", ATEN.arange.start_step, lambda x: x.to("meta"), "result: it lies on 'meta'"),
        ("tril/float32", ATEN.tril.default, _columns, "result, against torch's fake: (12, 33) float32 strides (1, 12)"),
        ("negative/float32", ATEN.neg.default, torch.Tensor.contiguous, "by columns, against torch's fake"),
        ("square/float32", ATEN.pow.Tensor_Scalar, _wide, "result, against torch's fake: (4, 512) float64"),
    ],
)
def test_a_result_elsewhere_or_laid_out_otherwise_is_told(
    case: str, op: Any, change: Callable[[Tensor], Tensor], told: str
) -> None:
    found = next(each for each in collect(cpu(), ConformanceProfile()) if each.id.startswith(f"torch/{case}"))
    assert run_case(found, cpu()) == []
    with Wrong(op, change):
        failures = run_case(found, cpu())
    assert any(failure.startswith(told) or told in failure for failure in failures), failures
