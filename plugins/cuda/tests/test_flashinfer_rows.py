"""core_cuda/flashinfer: norms, gates and products of codes on a stand-in, and what each of them refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.common.ops.mlp.activation import GATED_ACTIVATION_FUSED
from core.common.ops.norm.norms import RMS_NORM
from core.common.ops.quantize.symmetric import QUANTIZED_LINEAR
from tests.kernel_cases import CPU, check, randn

pytest.importorskip("triton", reason="needs triton")
from fake_flashinfer import plant

from core_cuda.flashinfer import gate, norm, products

pytestmark = [pytest.mark.interpreter, pytest.mark.parametrize("kernel_device", ["interpreter"], indirect=True)]
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _library(kernel_device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, tmp_path)


def taken(op: Any, condition: Any, dtype: torch.dtype) -> list[dict[str, Any]]:
    calls = [dict(sample.kwargs) for sample in op.samples(dtype, CPU)]
    found = [call for call in calls if condition(op.bind((), call)) is None]
    assert found and len(found) < len(calls)
    return found


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_the_norm_is_the_canonical_one(dtype: torch.dtype) -> None:
    check(RMS_NORM, norm.rms_norm, taken(RMS_NORM, norm.why_not, dtype), CPU)
    x, weight = randn(6, 5, 64, dtype=dtype), randn(64, dtype=dtype, shift=1.0)
    forms = [x, x.transpose(0, 1), x[:, ::2], x[:, :0]]
    check(RMS_NORM, norm.rms_norm, [{"x": each, "weight": weight, "eps": 1e-5} for each in forms], CPU)
    gemma = {"offset": 1.0, "weight_dtype": torch.float32}
    check(RMS_NORM, norm.rms_norm, [{"x": x, "weight": weight - 1, "eps": 1e-5, **gemma}], CPU)


NORMS = {
    "rounds before": ({"normed_dtype": BF16}, "rounds before the weight"),
    "no weight": ({"weight": None}, "no weight"),
    "another dtype": ({"weight": torch.ones(64)}, "one dtype"),
    "another result": ({"out_dtype": torch.float32}, "the result is"),
    "an offset": ({"offset": 0.5, "weight_dtype": torch.float32}, "adds 0 or 1"),
    "a rounded offset": ({"offset": 1.0}, "rounded to torch.bfloat16"),
    "fp32": ({"x": torch.ones(2, 64), "weight": torch.ones(64)}, "x is torch.float32"),
}


@pytest.mark.parametrize("name", NORMS)
def test_other_norms_are_refused(name: str) -> None:
    options, wanted = NORMS[name]
    call = {"x": randn(2, 64, dtype=BF16), "weight": randn(64, dtype=BF16), "eps": 1e-5, **options}
    assert wanted in str(norm.why_not(RMS_NORM.bind((), call)))


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_gates(kind: str, dtype: torch.dtype) -> None:
    rows = randn(3, 7, 128, dtype=dtype)
    forms = [rows, rows.transpose(0, 1), rows[..., 32:96], rows[:0]]
    check(GATED_ACTIVATION_FUSED, gate.gated_activation_fused, [{"gate_up": x, "kind": kind} for x in forms], CPU)


def test_other_gates_are_refused() -> None:
    def reason(**call: Any) -> str:
        return str(gate.why_not(GATED_ACTIVATION_FUSED.bind((), {"gate_up": randn(2, 64, dtype=BF16), **call})))

    assert "kernels for silu, gelu, gelu_tanh" in reason(kind="quick_gelu")
    assert "first half" in reason(kind="silu", gate_first=False) and "first half" in reason(
        kind="silu", interleaved=True
    )
    assert "limits" in reason(kind="silu", limit=7.0)
    assert "too coarse" in reason(kind="gelu_tanh", gate_up=randn(2, 64, dtype=FP16))
    assert reason(kind="gelu_tanh") == "None"
    assert "multiples of 16" in reason(kind="silu", gate_up=randn(2, 36, dtype=BF16))
    assert "torch.float32" in reason(kind="silu", gate_up=randn(2, 64))


def product(rows: tuple[int, ...], columns: int, depth: int, scales: tuple[Any, Any]) -> dict[str, Any]:
    codes = [randn(*shape, scale=40.0, seed=i).to(FP8) for i, shape in enumerate(((*rows, depth), (columns, depth)))]
    made = [randn(1, *shape, scale=0.002, shift=0.01, seed=5)[0] for shape in scales]
    keys = ("x_codes", "w_codes", "x_scale", "w_scale")
    return {**dict(zip(keys, (*codes, *made), strict=True)), "bias": None, "out_dtype": BF16}


def test_products_with_one_scale_for_each_tensor() -> None:
    calls = [product(rows, 48, 64, ((), (1, 1))) for rows in ((5,), (2, 3), (0,))]
    assert all(products.why_not_fast(QUANTIZED_LINEAR.bind((), call)) is None for call in calls)
    check(QUANTIZED_LINEAR, products.quantized_linear_fast, calls, CPU)


def test_products_with_scales_of_blocks() -> None:
    calls = [product((*rows, 5), 256, 384, ((*rows, 5, 3), (2, 3))) for rows in ((), (2,))]
    assert [products.why_not_blocks(QUANTIZED_LINEAR.bind((), call)) for call in calls] == [None, None]
    check(QUANTIZED_LINEAR, products.quantized_linear_blocks, calls, CPU)


BLOCKS = {
    "bias": ({"bias": torch.ones(256, dtype=BF16)}, "bias"),
    "result": ({"out_dtype": FP16}, "out_dtype"),
    "rows": ({"x_scale": torch.ones(1, 3)}, "fewer rows"),
    "groups": ({"x_scale": torch.ones(5, 6)}, "each 128 features"),
    "one scale": ({"x_scale": torch.ones(())}, "each 128 features"),
    "channels": ({"w_scale": torch.ones(256, 3)}, "each block of 128"),
    "codes": ({"x_codes": torch.ones(5, 384, dtype=torch.int8)}, "x_codes are torch.int8"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_other_scales_of_blocks_are_refused(name: str) -> None:
    options, wanted = BLOCKS[name]
    call = product((5,), 256, 384, ((5, 3), (2, 3))) | options
    assert wanted in str(products.why_not_blocks(QUANTIZED_LINEAR.bind((), call)))


def test_several_scales_are_refused_by_the_fast_product() -> None:
    call = product((5,), 48, 64, ((5, 1), (48, 1)))
    assert "takes one" in str(products.why_not_fast(QUANTIZED_LINEAR.bind((), call)))
    odd = product((5,), 40, 64, ((), ()))
    assert "multiples of 16" in str(products.why_not_fast(QUANTIZED_LINEAR.bind((), odd)))
