"""core/common/ops/norm/norms.py against transformers' own modules, bit by bit, and against fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm, Llama4TextRMSNorm
from transformers.models.mamba.modeling_mamba import MambaRMSNorm
from transformers.models.nanochat.modeling_nanochat import NanoChatRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from core.common.ops.norm.norms import ADD_RMS_NORM, LAYER_NORM, RMS_NORM, rms_norm
from tests.common.ops.canonical_oracle import (
    EPS,
    Call,
    assert_bitwise,
    assert_close,
    assert_raises,
    every_sample,
    in_fp64,
    run,
    sample,
)

SIZE = 48
F32, BF16 = torch.float32, torch.bfloat16


def randn(*shape: int, dtype: torch.dtype = F32, seed: int = 0, **moments: float) -> Tensor:
    normal = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (normal * moments.get("scale", 1.0) + moments.get("shift", 0.0)).to(dtype)


def loaded(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give the module weights that are not its initial ones."""
    for number, parameter in enumerate(module.parameters()):
        parameter.data = randn(*parameter.shape, dtype=dtype, seed=90 + number, scale=0.4, shift=0.7)
    return module.eval()


def promoted(x: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype)


Options = Callable[[Tensor, Tensor], Call]

WEIGHTED: dict[str, tuple[Callable[..., nn.Module], Options]] = {
    "llama": (LlamaRMSNorm, lambda x, w: {"normed_dtype": x.dtype, "out_dtype": promoted(x, w)}),
    "llama4": (Llama4TextRMSNorm, lambda x, w: {"normed_dtype": x.dtype, "out_dtype": promoted(x, w)}),
    "mamba": (MambaRMSNorm, lambda x, w: {"normed_dtype": x.dtype, "out_dtype": promoted(x, w)}),
    "olmo2": (Olmo2RMSNorm, lambda x, w: {}),
    "gpt-oss": (GptOssRMSNorm, lambda x, w: {}),
    "helium": (HeliumRMSNorm, lambda x, w: {"weight_dtype": F32}),
    "gemma3": (Gemma3RMSNorm, lambda x, w: {"weight_dtype": F32, "offset": 1.0}),
    "gemma4": (Gemma4RMSNorm, lambda x, w: {"weight_dtype": F32}),
}
INPUTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "odd rows": lambda dtype: randn(37, SIZE, dtype=dtype),
    "no tokens": lambda dtype: randn(0, SIZE, dtype=dtype),
    "transposed heads": lambda dtype: randn(2, 5, 3, SIZE, dtype=dtype).transpose(1, 2),
    "slice of wider rows": lambda dtype: randn(11, 3 * SIZE, dtype=dtype)[:, SIZE : 2 * SIZE],
    "large values": lambda dtype: randn(11, SIZE, dtype=dtype, scale=1e4),
    "tiny values": lambda dtype: randn(11, SIZE, dtype=dtype, scale=1e-4),
}
DTYPES = [(F32, F32), (BF16, BF16), (BF16, F32), (F32, BF16), (torch.float16, torch.float16)]


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize(("x_dtype", "weight_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("model", WEIGHTED)
def test_rms_norm_is_the_models_own(model: str, x_dtype: torch.dtype, weight_dtype: torch.dtype, eps: float) -> None:
    make, options = WEIGHTED[model]
    module = loaded(make(SIZE, eps=eps), weight_dtype)
    for form in INPUTS.values():
        x = form(x_dtype)
        call = {"x": x, "weight": module.weight.data, "eps": eps, **options(x, module.weight)}
        assert_bitwise(RMS_NORM, call, lambda x=x: module(x).detach())


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("norm", [NanoChatRMSNorm, Llama4TextL2Norm])
def test_rms_norm_without_weight(norm: Callable[..., nn.Module], dtype: torch.dtype, eps: float) -> None:
    for form in INPUTS.values():
        x = form(dtype)
        assert_bitwise(RMS_NORM, {"x": x, "weight": None, "eps": eps}, lambda x=x: norm(eps=eps)(x))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_rms_norm_is_torchs_own(dtype: torch.dtype) -> None:
    x, weight = randn(37, SIZE, dtype=dtype), randn(SIZE, dtype=dtype, seed=1, shift=0.7)
    call = {"x": x, "weight": weight, "eps": 1e-5}
    assert_close(RMS_NORM, call, lambda: functional.rms_norm(x, (SIZE,), weight, 1e-5), in_fp64(RMS_NORM, call))


def test_rms_norm_in_half_precision_throughout() -> None:
    x, weight = randn(37, SIZE, dtype=BF16), randn(SIZE, dtype=BF16, seed=1, shift=0.7)
    call = {"x": x, "weight": weight, "eps": 1e-5, "compute_dtype": BF16}
    assert_bitwise(RMS_NORM, call, lambda: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight)


def test_the_options_are_different_functions() -> None:
    """In bf16 every place of rounding gives other bits, so agreement above means something."""
    x, weight = randn(37, SIZE, dtype=BF16), randn(SIZE, dtype=BF16, seed=1, shift=0.7)
    kinds: list[Call] = [{}, {"normed_dtype": BF16}, {"offset": 1.0}, {"offset": 1.0, "weight_dtype": F32}]
    results = [rms_norm(x, weight, 1e-5, **kind) for kind in [*kinds, {"compute_dtype": BF16}]]
    assert all(not torch.equal(a, b) for i, a in enumerate(results) for b in results[:i])


@pytest.mark.parametrize("eps", EPS)
def test_eps_matters_for_small_values(eps: float) -> None:
    x = randn(5, SIZE, scale=1e-3, dtype=torch.float64)
    (got,) = run(RMS_NORM, {"x": x, "weight": None, "eps": eps})
    want = torch.stack([row / (sum(float(v) ** 2 for v in row) / SIZE + eps) ** 0.5 for row in x])
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0)
    (other,) = run(RMS_NORM, {"x": x, "weight": None, "eps": eps * 1.01})
    assert not torch.allclose(got, other, rtol=1e-4)


@pytest.mark.parametrize(("x_dtype", "residual_dtype"), [(F32, F32), (BF16, BF16), (BF16, F32), (F32, BF16)], ids=str)
def test_add_rms_norm_is_addition_then_norm(x_dtype: torch.dtype, residual_dtype: torch.dtype) -> None:
    module = loaded(LlamaRMSNorm(SIZE, eps=3e-4), BF16)
    for form in INPUTS.values():
        x, residual = form(x_dtype), randn(*form(x_dtype).shape, dtype=residual_dtype, seed=5)
        total = x + residual
        options = {"normed_dtype": total.dtype, "out_dtype": promoted(total, module.weight)}
        call = {"x": x, "residual": residual, "weight": module.weight.data, "eps": 3e-4, **options}
        assert_bitwise(ADD_RMS_NORM, call, lambda total=total: (module(total).detach(), total))


@pytest.mark.parametrize("op", [RMS_NORM, ADD_RMS_NORM, LAYER_NORM], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_every_sample_has_errors_of_rounding_only(op: Any, dtype: torch.dtype) -> None:
    for one in every_sample(op, dtype):
        for result, truth in zip(run(op, one.kwargs), in_fp64(op, one.kwargs), strict=True):
            # compute_dtype bf16 rounds four times, the others up to twice.
            torch.testing.assert_close(result.double(), truth, rtol=8 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_layer_norm_is_the_models_own(dtype: torch.dtype) -> None:
    cohere, torchs = loaded(CohereLayerNorm(SIZE), dtype), loaded(nn.LayerNorm(SIZE, eps=3e-4), dtype)
    for name, form in INPUTS.items():
        x = form(dtype)
        plain: Call = {"x": x, "weight": None, "bias": None, "eps": 1e-5}
        assert_bitwise(LAYER_NORM, plain, lambda x=x: OlmoLayerNorm(SIZE)(x))
        if name == "no tokens":
            continue
        for module, eps in ((cohere, 1e-5), (torchs, 3e-4)):
            bias = getattr(module, "bias", None)
            call = {"x": x, "weight": module.weight.data, "bias": None if bias is None else bias.data, "eps": eps}
            truth = in_fp64(LAYER_NORM, call)
            assert_close(LAYER_NORM, call, lambda m=module, x=x: m(x).detach(), truth)


def test_layer_norm_by_hand() -> None:
    call = {
        name: value.double() if isinstance(value, Tensor) else value
        for name, value in sample(LAYER_NORM, "odd rows").items()
    }
    x = call["x"]
    centred = x - x.mean(-1, keepdim=True)
    want = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * call["weight"] + call["bias"]
    torch.testing.assert_close(run(LAYER_NORM, call)[0], want, rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=3),
    size=st.integers(1, 70),
    eps=st.floats(1e-9, 1e-2),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    dtype=st.sampled_from([F32, BF16]),
)
def test_any_shape_and_eps_is_llamas(shape: list[int], size: int, eps: float, scale: float, dtype: torch.dtype) -> None:
    module = loaded(LlamaRMSNorm(size, eps=eps), dtype)
    x = randn(*shape, size, dtype=dtype, scale=scale)
    call = {"x": x, "weight": module.weight.data, "eps": eps, "normed_dtype": dtype}
    assert_bitwise(RMS_NORM, call, lambda: module(x).detach())


NEAR_MISSES: dict[str, tuple[Any, Call, str]] = {
    "integers": (RMS_NORM, {"x": torch.ones(3, 48, dtype=torch.int64)}, "x must be floating-point, not torch.int64"),
    "scalar": (RMS_NORM, {"x": torch.tensor(1.0)}, "x must have rank 1 or more"),
    "short weight": (RMS_NORM, {"weight": torch.ones(1)}, r"weight must have shape \(48,\).*not \(1,\)"),
    "weight per head": (RMS_NORM, {"weight": torch.ones(7, 48)}, r"weight must have shape \(48,\)"),
    "boolean weight": (RMS_NORM, {"weight": torch.ones(48) > 0}, "weight must be floating-point, not torch.bool"),
    "broadcast": (ADD_RMS_NORM, {"residual": torch.ones(1, 48)}, r"residual must have shape \(7, 48\), not \(1, 48\)"),
    "residual of integers": (ADD_RMS_NORM, {"residual": torch.ones(7, 48).int()}, "residual must be floating-point"),
    "added weight": (ADD_RMS_NORM, {"weight": torch.ones(47)}, r"weight must have shape \(48,\)"),
    "long bias": (LAYER_NORM, {"bias": torch.ones(49)}, r"bias must have shape \(48,\).*not \(49,\)"),
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_a_near_miss_raises(near_miss: str) -> None:
    op, change, message = NEAR_MISSES[near_miss]
    assert_raises(op, sample(op, "odd rows") | change, message)
