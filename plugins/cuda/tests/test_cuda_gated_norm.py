"""core_cuda/passes/gated_norms.py and its kernel: matches, numbers, near-misses, and mistakes that are found."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from core.common.numerics import Fp64Mode, judge
from core.errors import CoreError
from core.verify.planted import Mistake, with_mistake
from tests.kernel_cases import DTYPES, randn

pytest.importorskip("triton", reason="needs triton")
from cuda_compiled import compiled, device_with

from core_cuda.ops.norm import gated_norm as module
from core_cuda.ops.norm.gated_norm import gated_norm
from core_cuda.passes.gated_norms import FUSE_GATED_NORM

HALF = torch.bfloat16
NAME = FUSE_GATED_NORM.name


def weight_of(width: int) -> nn.Parameter:
    return nn.Parameter(1 + 0.3 * randn(width, seed=width))


class GateFirst(nn.Module):
    """As in Mamba 2; of its variants, each differs in one thing from what the pass takes."""

    def __init__(self, width: int, groups: int, variant: str = "") -> None:
        super().__init__()
        self.weight, self.groups, self.variant = weight_of(width), groups, variant

    def forward(self, x: Tensor) -> Tensor:
        value, gate = x.chunk(2, -1)
        wide = x.dtype if self.variant == "half" else torch.float32
        gated = value.sin().to(wide) * functional.silu(gate if self.variant == "half gate" else gate.to(wide))
        normed = gated.unflatten(-1, (self.groups, -1)).to(torch.float32)
        normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + 1e-5)
        if self.variant == "apart":
            cosines: Tensor = normed.to(x.dtype).cos()
            return cosines.flatten(-2)
        if self.variant == "of a group":
            shared: Tensor = self.weight[: normed.shape[-1]] * normed.to(x.dtype)
            return shared.flatten(-2)
        if self.variant == "rounded early":
            return (normed.to(x.dtype).flatten(-2).float() * self.weight.float()).to(x.dtype)
        if self.variant == "mask":
            return normed.flatten(-2).to(x.dtype) * (self.weight > 1)
        result: Tensor = self.weight * normed.flatten(-2).to(x.dtype)
        return result + gated.to(x.dtype) if self.variant == "reread" else result


class NormFirst(nn.Module):
    """As in layers of the gated delta rule."""

    def __init__(self, width: int, variant: str = "") -> None:
        super().__init__()
        self.weight, self.variant = weight_of(width), variant

    def forward(self, x: Tensor) -> Tensor:
        value, gate = x.chunk(2, -1)
        wide = value.sin().to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        normed = self.weight * normed.to(x.dtype)
        result = (normed * functional.silu(gate.to(torch.float32))).to(x.dtype)
        return result + normed if self.variant == "reread" else result


class Layers(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat((layer(x), x[..., : x.shape[-1] // 2]), -1)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one group": partial(GateFirst, 48, 1),
    "groups": partial(GateFirst, 48, 4),
    "norm first": partial(NormFirst, 48),
    "rounded early": partial(GateFirst, 48, 4, "rounded early"),
}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@torch.no_grad()
def test_every_site_is_one_launch_with_the_numbers_of_the_graph_before(
    case: str, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    x, device = randn(9, 96, dtype=dtype), device_with(kernel_device, FUSE_GATED_NORM)
    program, reports = compiled(Layers(MODELS[case]), device, x, verify="full", strict=True)
    report = reports[NAME]
    assert (report.matched, report.near_misses, report.verification) == (2, (), "verified")
    apart, reports = compiled(Layers(MODELS[case]), device, x, disable_passes=(NAME,))
    assert NAME not in reports
    found, wanted = (each(x=x.to(device.torch_device)).cpu() for each in (program, apart))
    with Fp64Mode():
        exact = Layers(MODELS[case]).to(dtype).double()(x.double())
    verdict = judge(found, wanted, exact)
    assert verdict.passed, verdict


@torch.no_grad()
def test_every_example_has_a_match(kernel_device: torch.device) -> None:
    assert FUSE_GATED_NORM.examples is not None
    for model, (x,) in FUSE_GATED_NORM.examples():
        reports = compiled(model, device_with(kernel_device, FUSE_GATED_NORM), x, strict=True)[1]
        assert reports[NAME].matched == 1, model


class Own(nn.Module):
    """A norm with a gate of transformers' own."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        value, gate = x.chunk(2, -1)
        result: Tensor = self.norm(value.sin(), gate)
        return result


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        *(("mamba2", "MambaRMSNormGated"), ("nemotron_h", "NemotronHRMSNormGated"), ("bamba", "BambaRMSNormGated")),
        *(("zamba2", "Zamba2RMSNormGated"), ("granitemoehybrid", "GraniteMoeHybridRMSNormGated")),
        *(("qwen3_next", "Qwen3NextRMSNormGated"), ("qwen3_5", "Qwen3_5RMSNormGated")),
        ("olmo_hybrid", "OlmoHybridRMSNormGated"),
    ],
)
@torch.no_grad()
def test_norms_of_transformers_models_match(model_type: str, name: str, kernel_device: torch.device) -> None:
    source = pytest.importorskip(f"transformers.models.{model_type}.modeling_{model_type}", reason="no such models")
    kind = getattr(source, name)
    groups = {"group_size": 12} if "group_size" in inspect.signature(kind).parameters else {}
    device = device_with(kernel_device, FUSE_GATED_NORM)
    report = compiled(Own(kind(48, **groups)), device, randn(9, 96, dtype=HALF), strict=True)[1][NAME]
    assert (report.matched, report.near_misses) == (1, ())


@pytest.mark.parametrize(
    ("model", "dtype", "reason"),
    [
        (GateFirst(48, 4, "reread"), torch.float32, "is used otherwise than in"),
        (GateFirst(48, 4, "apart"), torch.float32, "leaves the groups of"),
        (GateFirst(48, 1, "half"), HALF, "and the kernel in torch.float32"),
        (GateFirst(48, 4, "half gate"), HALF, "and the kernel in torch.float32"),
        (GateFirst(48, 4, "of a group"), HALF, "the weight has shape (12,), and rows have 48 columns"),
        (GateFirst(48, 4, "mask"), HALF, "weight is torch.bool"),
        (NormFirst(48, "reread"), torch.float32, "is used otherwise than in"),
    ],
    ids=[
        *("gated read twice", "groups apart", "all in half precision", "gate in half precision"),
        *("a group's weight", "a mask", "normed read twice"),
    ],
)
@torch.no_grad()
def test_what_differs_in_one_thing_stays(
    model: nn.Module, dtype: torch.dtype, reason: str, kernel_device: torch.device
) -> None:
    device = device_with(kernel_device, FUSE_GATED_NORM)
    report = compiled(model, device, randn(9, 96, dtype=dtype), strict=True)[1][NAME]
    assert report.matched == 0
    assert [reason in miss.reason for miss in report.near_misses] == [True]


def shift_weights(node: fx.Node) -> bool:
    """Add to weights what they do not have."""
    if node.target is not gated_norm:
        return False
    node.kwargs = {**node.kwargs, "offset": 0.5}
    return True


@pytest.mark.parametrize("case", MODELS)
@torch.no_grad()
def test_a_planted_mistake_is_found(case: str, kernel_device: torch.device) -> None:
    mistake = Mistake(name="wrong", of=NAME, what=str(shift_weights.__doc__), make=shift_weights)
    device = device_with(kernel_device, with_mistake(FUSE_GATED_NORM, mistake))
    with pytest.raises(CoreError, match=NAME):
        compiled(Layers(MODELS[case]), device, randn(9, 96), verify="full", strict=True)


def operands(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor, int]]:
    """Return x, gate and groups: slices of one tensor, rows in another order, odd sizes, repeated rows, none."""
    merged = randn(2, 5, 200, dtype=dtype)
    heads = randn(2, 3, 5, 64, dtype=dtype, seed=1)
    return {
        "slices": (merged[..., :96], merged[..., 100:196], 4),
        "transposed": (heads.transpose(1, 2), randn(2, 5, 3, 64, dtype=dtype, seed=2), 2),
        "odd": (randn(9, 63, dtype=dtype), randn(9, 63, dtype=dtype, seed=3), 3),
        "repeated": (randn(1, 40, dtype=dtype).expand(5, 40), randn(5, 40, dtype=dtype, seed=4), 2),
        "apart": (randn(3, 128, dtype=dtype)[..., ::2], randn(3, 64, dtype=dtype, seed=5), 2),
        "none": (randn(0, 64, dtype=dtype), randn(0, 64, dtype=dtype), 2),
    }


@pytest.mark.parametrize("norm_first", [False, True], ids=["gate first", "norm first"])
@pytest.mark.parametrize("kind", ["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_computes_what_its_reference_does(
    dtype: torch.dtype, kind: str, norm_first: bool, kernel_device: torch.device
) -> None:
    for name, (x, gate, groups) in operands(dtype).items():
        x, gate = x.to(kernel_device), gate.to(kernel_device)
        for weight in (None, randn(x.shape[-1], dtype=dtype, seed=7).to(kernel_device)):
            rounding: dict[str, Any] = {"normed_dtype": dtype, "middle_dtype": dtype, "out_dtype": dtype}
            options: dict[str, Any] = {"kind": kind, "norm_first": norm_first, "groups": groups, "offset": 0.25}
            found = gated_norm(x, gate, weight, 1e-5, **options, **rounding)
            wanted = module._reference(x, gate, weight, 1e-5, **options, **rounding)
            made = module._fake(x, gate, weight, 1e-5, **options, **rounding)
            assert (found.shape, found.stride(), found.dtype) == (x.shape, made.stride(), dtype), name
            if not found.numel():
                continue
            with Fp64Mode():
                wide = None if weight is None else weight.double()
                exact = module._reference(x.double(), gate.double(), wide, 1e-5, **options)
            verdict = judge(found, wanted, exact)
            assert verdict.passed, (name, verdict)


def test_rows_that_the_kernel_does_not_take_are_refused() -> None:
    x = torch.empty(2, 40_000, device="meta")
    assert "and the kernel takes 16384 at most" in module.why_not(x, x, None, 2)
    assert module.why_not(x, x, x[0], 4, torch.float32, None) == ""
    assert "gate is torch.float64" in module.why_not(x, x.double(), None, 4)
    assert "weight has shape (10000,), and rows have 40000" in module.why_not(x, x, x[0, :10_000], 4)
    assert "it rounds to torch.int32" in module.why_not(x, x, None, 4, torch.int32)
