"""FlashInfer itself, where it is installed and there is a GPU: numbers by the criterion, and captured graphs.

Its attention is compiled for heads of 128 in bfloat16, with and without a window: build it ahead, or these tests wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from core.common.ops.mlp.activation import GATED_ACTIVATION_FUSED
from core.common.ops.norm.norms import RMS_NORM
from core.common.ops.quantize.symmetric import QUANTIZED_LINEAR
from tests.attention_cases import CACHES, CASES, judged, steps
from tests.kernel_cases import check, in_fp64, moved, randn

pytest.importorskip("triton", reason="needs triton")
from core.common.numerics import judge
from core_cuda.flashinfer import attention, gate, norm, presence, products
from core_cuda.ops.launching import INTERPRETED

MISSING = presence.why_not() or ("" if torch.cuda.is_available() and not INTERPRETED else "needs an NVIDIA GPU")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=MISSING or "it is here")]
GPU = torch.device("cuda")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SERVED = (
    *("prompts", "chunks", "single tokens", "padding", "padding alone", "window below a tile", "window over tiles"),
    *("pages of one", "pages of 24", "three heads of one", "no group", "lengths of int64", "both ways"),
)
BACKENDS = ("fa2", "fa3")


def needs(backend: str) -> None:
    if backend == "fa3" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashAttention 3 is for compute capability 9.0")


def call_of(name: str, **options: Any) -> dict[str, Any]:
    return steps(**{"heads": (4, 2), **CASES[name], "dtype": BF16, "sizes": (128, 128), **options})


def kernel(op: Any, backend: str) -> Any:
    return (attention.ATTENTIONS if op is ATTENTION else attention.ROTARY_ATTENTIONS)[backend][0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SERVED)
def test_attention(name: str, backend: str) -> None:
    needs(backend)
    if backend == "fa2" or "window" not in CASES[name]:
        judged(ATTENTION, kernel(ATTENTION, backend), call_of(name), GPU)


LONG = {
    "one": (((1, 3000),), {}),
    "many": (tuple((1, 60 * i + 1) for i in range(40)), {}),
    "padded": (((1, 900), (1, 13), (0, 0)), {"padding": (1, 0)}),
    "in a window": (((1, 2900), (1, 40)), {"window": 700}),
    "a sequence without a token": (((1, 150), (0, 20), (1, 30)), {"padding": (1, 0)}),
}


@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (10, 2)], ids=str)
@pytest.mark.parametrize("name", LONG)
def test_decode_in_parts(name: str, heads: tuple[int, int]) -> None:
    lens, options = LONG[name]
    call = steps(lens, dtype=BF16, heads=heads, sizes=(128, 128), page=16, **options)
    run = kernel(ATTENTION, "fa2")
    judged(ATTENTION, lambda **c: run(**c, max_query_len=1), call, GPU)


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_prompts(backend: str) -> None:
    needs(backend)
    for lens in (((700, 700),), ((300, 900), (1, 500), (257, 257)), ((513, 1300), (130, 130))):
        judged(ATTENTION, kernel(ATTENTION, backend), steps(lens, dtype=BF16, heads=(8, 2), sizes=(128, 128)), GPU)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rotation_before_it(backend: str) -> None:
    needs(backend)
    call = call_of("padding")
    angles = torch.outer(torch.arange(len(call["query"])).float(), 1e4 ** (-torch.arange(64) / 64))
    call |= {"cos": angles.cos().to(BF16), "sin": angles.sin().to(BF16)}
    judged(ROTARY_ATTENTION, kernel(ROTARY_ATTENTION, backend), call, GPU)


def captured(run: Any, call: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return what replays the call's graph for other values of the same sizes, and the tensors that it reads."""
    static = moved(call, GPU)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(**static)  # plans, on the stream of the capture
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = run(**static)

    def replay(**given: Any) -> Any:
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                static[name].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        for name in ("key_cache", "value_cache"):
            if name in given:
                given[name].copy_(static[name])
        return out.clone()

    return replay, static


STEPS = {
    "fa2": (((1, 2900), (1, 40), (1, 1)), ((1, 7), (1, 8), (1, 1900)), ((1, 600), (1, 600), (1, 600))),
    "fa3": (((40, 900), (1, 60)), ((1, 1), (40, 40)), ((20, 640), (21, 90)), ((0, 0), (41, 2000))),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_step_serves_other_lengths(backend: str) -> None:
    needs(backend)
    calls = []
    for lens in STEPS[backend]:
        call = steps(lens, dtype=BF16, heads=(8, 2), sizes=(128, 128), page=16)
        caches = {name: torch.full((1000, *call[name].shape[1:]), torch.nan, dtype=BF16) for name in CACHES}
        for name, cache in caches.items():
            cache[: len(call[name])] = call[name]
        table = torch.zeros(len(lens), 200, dtype=torch.int32)
        table[:, : call["block_table"].shape[1]] = call["block_table"]
        calls.append(call | caches | {"block_table": table})
    most = {"max_query_len": 1} if backend == "fa2" else {}
    run = kernel(ATTENTION, backend)
    replay, _ = captured(lambda **c: run(**c, **most), calls[0])
    for call in calls:
        judged(ATTENTION, replay, call, GPU)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_norms_and_gates(dtype: torch.dtype) -> None:
    sizes = [(1, 4096), (7, 64), (33, 2048), (5, 8192)]
    for shift, options in ((1.0, {}), (0.0, {"offset": 1.0, "weight_dtype": torch.float32})):
        weights = {width: randn(width, dtype=dtype, scale=0.4, shift=shift) for _, width in sizes}
        calls = [{"x": randn(*size, dtype=dtype), "weight": weights[size[1]], "eps": 1e-5, **options} for size in sizes]
        check(RMS_NORM, norm.rms_norm, calls, GPU)
    for kind in ("silu", "gelu", "gelu_tanh"):
        gates = [{"gate_up": randn(*size, dtype=dtype), "kind": kind} for size in sizes]
        check(GATED_ACTIVATION_FUSED, gate.gated_activation_fused, gates, GPU)


def product(rows: int, columns: int, depth: int, scales: tuple[Any, Any]) -> dict[str, Any]:
    codes = [randn(*shape, scale=40.0, seed=i).to(FP8) for i, shape in enumerate(((rows, depth), (columns, depth)))]
    made = [randn(1, *shape, scale=0.002, shift=0.01, seed=5)[0] for shape in scales]
    keys = ("x_codes", "w_codes", "x_scale", "w_scale")
    return {**dict(zip(keys, (*codes, *made), strict=True)), "bias": None, "out_dtype": BF16}


@pytest.mark.parametrize("rows", [1, 5, 31, 64, 300])
def test_products_of_codes(rows: int) -> None:
    fast = product(rows, 512, 1024, ((), ()))
    found = products.quantized_linear_fast(**moved(fast, GPU)).cpu()
    verdict = judge(found, QUANTIZED_LINEAR.reference(**fast), in_fp64(QUANTIZED_LINEAR, fast)[0], slack=2.0)
    assert verdict.passed, verdict
    if torch.cuda.get_device_capability() == (9, 0):
        blocks = product(rows, 512, 1024, ((rows, 8), (4, 8)))
        check(QUANTIZED_LINEAR, products.quantized_linear_blocks, [blocks], GPU)


def test_a_captured_product_and_norm() -> None:
    call = product(40, 512, 1024, ((), ()))
    replay, _ = captured(products.quantized_linear_fast, call)
    assert torch.equal(replay(**moved(call, GPU)), products.quantized_linear_fast(**moved(call, GPU)))
    rows = {"x": randn(9, 2048, dtype=BF16), "weight": randn(2048, dtype=BF16), "eps": 1e-5}
    again, _ = captured(norm.rms_norm, rows)
    assert torch.equal(again(**moved(rows, GPU)), norm.rms_norm(**moved(rows, GPU)))
