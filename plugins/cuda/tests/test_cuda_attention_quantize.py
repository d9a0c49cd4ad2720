"""Attention that ends in codes, by the kernels of decode and of prompts, plain and behind a rotation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.numerics import Fp64Mode, judge_pooled
from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.quantized import ATTENTION_QUANTIZE, ROTARY_ATTENTION_QUANTIZE
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from core.common.ops.declaration import CanonicalOp
from core.common.ops.quantize.symmetric import RANGES
from tests.kernel_cases import CPU, code_steps, faked, laid_out, moved

pytest.importorskip("triton", reason="needs triton")
from core_cuda.implementations import IMPLEMENTATIONS
from core_cuda.ops import launching

Call = dict[str, Any]
OF = {ATTENTION_QUANTIZE.name: ATTENTION, ROTARY_ATTENTION_QUANTIZE.name: ROTARY_ATTENTION}
OPS = (ATTENTION_QUANTIZE, ROTARY_ATTENTION_QUANTIZE)
CACHES = ("key_cache", "value_cache")
DTYPES = (torch.float32, torch.bfloat16)
TAKEN = ("chunk and mixed", "sinks", "codes, a scale per head", "codes, no scale", "half, partial", "gemma3")


@pytest.fixture(autouse=True)
def large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few programs do the work where each takes a while, in the interpreter."""
    if launching.INTERPRETED:
        monkeypatch.setattr(launching, "num_multiprocessors", lambda: 1)


each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def refusal(op: CanonicalOp, call: Call) -> str | None:
    (implementation,) = (each for each in IMPLEMENTATIONS if each.op == op.qualified_name)
    return implementation.condition(op.bind((), call))


def static(op: CanonicalOp, dtype: torch.dtype) -> list[Call]:
    """Return some samples, with one scale given where they have it made of the result."""
    calls = []
    for sample in op.samples(dtype, CPU):
        call = dict(sample.kwargs)
        if call["granularity"] == "tensor" and call["out_scale"] is None:
            call["out_scale"] = torch.tensor(0.01117, dtype=torch.float32)
        if call["granularity"] == "tensor" and sample.name.startswith(TAKEN):
            calls.append(call)
    return calls


def check(op: CanonicalOp, call: Call, device: torch.device) -> tuple[Tensor, ...]:
    """Compare codes, scale and caches with the reference's; return codes, the reference's, and fp64's, not rounded."""
    assert refusal(op, call) is None
    ours, eager, exact = ({n: v.clone() if n in CACHES else v for n, v in moved(call, d).items()}
                          for d in (device, CPU, CPU))  # fmt: skip
    kernel = getattr(torch.ops.core_cuda, op.name)
    results, wanted = kernel(**ours), op.reference(**eager)
    assert laid_out(list(results)) == laid_out(faked(op, call))
    codes, scale = (t.cpu() for t in results)
    assert torch.equal(scale, wanted[1]) and results[1].data_ptr() != ours["out_scale"].data_ptr()
    steps = code_steps(codes, wanted[0])
    # Half precision, rounded otherwise on the way, lies codes apart next to zero; that is judged by T1.
    alike = steps.max() <= 1 and steps.float().mean() <= 0.002
    assert alike or call["query"].itemsize < 4, steps
    real = int(call["query_starts"][-1])
    assert not codes[real:].view(torch.uint8).any()
    for name in CACHES:
        left, right = (x[name][1:].cpu().view(torch.uint8) for x in (ours, eager))
        # A rotated key may be rounded otherwise, which test_cuda_attention.py judges.
        assert torch.equal(left, right) or (op is ROTARY_ATTENTION_QUANTIZE and name == "key_cache")
    wide = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() and v.itemsize > 1 else v
            for n, v in exact.items() if n not in ("out_scale", "dtype", "granularity")}  # fmt: skip
    with Fp64Mode():
        truth = OF[op.name].reference(**wide).flatten(1)[:real] / scale.double()
    low, high = RANGES[codes.dtype]
    return codes[:real].float(), wanted[0][:real].float(), truth.clamp(low, high)


@each_dtype
@each_op
def test_decode_and_prompts_end_in_the_codes_of_the_reference(
    op: CanonicalOp, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    pools: tuple[list[Tensor], ...] = ([], [], [])
    for call in static(op, dtype):
        few = int(call["query_starts"].diff().max())
        for most in {few, 0} if call.get("causal", True) else {0}:
            for pool, each in zip(pools, check(op, call | {"max_query_len": most}, kernel_device), strict=True):
                pool.append(each.flatten())
    verdict = judge_pooled(*([torch.cat(pool)] for pool in pools))
    assert verdict.passed, verdict


def test_a_single_token_is_turned_apart_and_ends_in_codes(kernel_device: torch.device) -> None:
    call = next(iter(static(ROTARY_ATTENTION_QUANTIZE, torch.bfloat16)))
    one = {n: v[:1] if n in ("query", "key", "value", "cos", "sin", "slot_mapping", "block_table", "seq_lens") else v
           for n, v in call.items()} | {"query_starts": torch.tensor([0, 1]), "max_query_len": 1}  # fmt: skip
    check(ROTARY_ATTENTION_QUANTIZE, one, kernel_device)


@each_op
def test_no_tokens_have_a_scale(op: CanonicalOp, kernel_device: torch.device) -> None:
    call = static(op, torch.float32)[0]
    names = ("query", "key", "value", "slot_mapping", "cos", "sin")
    call |= {name: call[name][:0] for name in names if name in call}
    for most in (0, 1):
        codes, scale = getattr(torch.ops.core_cuda, op.name)(
            **moved(call | {"query_starts": call["query_starts"] * 0, "max_query_len": most}, kernel_device)
        )
        assert codes.shape == (0, 64) and scale.item() == call["out_scale"].item()


@pytest.mark.cases(5)
@each_op
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"granularity": "token", "out_scale": None}, "made of all heads"),
        ({"out_scale": None}, "made of all heads"),
        ({"out_scale": torch.tensor(0.1, dtype=torch.bfloat16)}, "out_scale is torch.bfloat16"),
        ({"dtype": torch.float8_e5m2}, "codes of"),
        ({"k_scale": torch.tensor(0.1, dtype=torch.float64)}, "k_scale is torch.float64"),
        ({"value_cache": torch.empty(9, 4, 2, 16, dtype=torch.float8_e4m3fn)}, "value_cache is torch.float8_e4m3fn"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refuses(op: CanonicalOp, change: Call, word: str) -> None:
    call = static(op, torch.float32)[0]
    assert refusal(op, call) is None
    reason = refusal(op, call | change)
    assert reason is not None and word in reason
