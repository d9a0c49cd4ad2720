"""core_cuda/passes over norms, and their kernels: matches, numbers, near-misses, and mistakes that are found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from core.common.numerics import Fp64Mode, judge
from core.common.ops.norm.norms import ADD_RMS_NORM, RMS_NORM
from core.common.passes import Pass
from core.errors import CoreError
from core.verify.planted import Mistake, with_mistake
from tests.kernel_cases import DTYPES, laid_out, randn

pytest.importorskip("triton", reason="needs triton")
from cuda_compiled import compiled, device_with

from core_cuda.ops.norm import normed_sum as sums
from core_cuda.ops.norm import norms
from core_cuda.ops.norm.pair import two_rms_norms, why_not
from core_cuda.passes.norm_pairs import JOIN_RMS_NORMS
from core_cuda.passes.normed_sums import FUSE_NORMED_SUM

HALF = torch.bfloat16
ROUNDING: list[dict[str, Any]] = [
    {},
    {"normed_dtype": HALF, "out_dtype": HALF},
    {"offset": 1.0, "weight_dtype": torch.float32},
    {"out_dtype": torch.float32},
]


class Norm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5, *, weighted: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(width)
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(width, generator=generator)) if weighted else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed if self.weight is None else self.weight * normed).to(x.dtype)


class Attention(nn.Module):
    """What norms a query and its key; `chained` norms the query's result in place of a key."""

    def __init__(self, first: nn.Module, second: nn.Module, *, chained: bool = False) -> None:
        super().__init__()
        self.q_norm, self.k_norm, self.chained = first, second, chained

    def forward(self, x: Tensor) -> Tensor:
        query, key = x.split((96, 32), -1)
        query = self.q_norm(query)
        key = self.k_norm(query.sin() if self.chained else key)
        return torch.cat((query.sin(), key.cos()), -1)[..., :128]


class Rows(nn.Module):
    """Norms of which the second reads rows, not columns, that are cut out after the first one's result is used."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(128) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first = self.norms[0](x).sin()
        rows = x.split((2, 3), 0)[1]
        return torch.cat((first, self.norms[1](rows).cos()), 0)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(Norm(96), Norm(32)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Sandwich(nn.Module):
    """Layers that norm their result before they add it; the second layer norms its input too."""

    def __init__(self, *, reread: bool = False, scaled: bool = False) -> None:
        super().__init__()
        self.after = nn.ModuleList(Norm(96, 1e-6) for _ in range(2))
        self.before = Norm(96, 1e-3)
        self.reread, self.scaled = reread, scaled

    def forward(self, x: Tensor) -> Tensor:
        normed = self.after[0](x.sin())
        x = torch.add(x, normed, alpha=2) if self.scaled else x + normed
        x = x + self.after[1](self.before(x).cos())
        return x * normed if self.reread else x


class Compressed(nn.Module):
    """Two layers of norms, of which the second reads what is cut out after the first one's result is used."""

    def __init__(self, *, weighted: bool = True, dim: int = -1) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(width, weighted=weighted) for width in (96, 20, 96, 20))
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 2):
            query, compressed = x.split((96, 32), -1)
            query = self.norms[index](query).sin()
            key, turned = compressed.split((20, 12), self.dim)
            x = torch.cat((query, self.norms[index + 1](key).cos(), turned), -1)
        return x


SITES: dict[str, tuple[Pass, Callable[..., nn.Module], int]] = {
    "side by side": (JOIN_RMS_NORMS, Layers, 128),
    "cut out late": (JOIN_RMS_NORMS, Compressed, 128),
    "without weights": (JOIN_RMS_NORMS, partial(Compressed, weighted=False), 128),
    "sums": (FUSE_NORMED_SUM, Sandwich, 96),
}
"""Passes, each with a model with two sites and the width of its rows."""


@pytest.mark.parametrize("case", SITES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@torch.no_grad()
def test_every_site_is_one_launch_with_the_numbers_of_the_graph_before(
    case: str, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    declared, model, width = SITES[case]
    x, name = randn(5, width, dtype=dtype), declared.name
    device = device_with(kernel_device, declared)
    program, reports = compiled(model(), device, x, verify="full", strict=True)
    report = reports[name]
    assert (report.matched, report.near_misses) == (2, ())
    assert report.verification == "verified"
    apart, reports = compiled(model(), device, x, disable_passes=(name,))
    assert name not in reports
    results = [each(x=x.to(device.torch_device)).cpu() for each in (program, apart)]
    verdict = judge(*results, model().to(dtype).double()(x.double()))
    assert verdict.passed, verdict


@pytest.mark.parametrize("case", SITES)
@torch.no_grad()
def test_every_example_has_a_match(case: str, kernel_device: torch.device) -> None:
    declared, _, _ = SITES[case]
    assert declared.examples is not None
    for model, (x,) in declared.examples():
        reports = compiled(model, device_with(kernel_device, declared), x, strict=True)[1]
        assert reports[declared.name].matched > 0, model


@pytest.mark.parametrize(
    ("model", "matched", "reason"),
    [(Sandwich(reread=True), 1, "is used otherwise than in"), (Sandwich(scaled=True), 1, None)],
    ids=["read twice", "scaled"],
)
@torch.no_grad()
def test_sums_of_another_form_stay(
    model: nn.Module, matched: int, reason: str | None, kernel_device: torch.device
) -> None:
    device = device_with(kernel_device, FUSE_NORMED_SUM)
    report = compiled(model, device, randn(5, 96), strict=True)[1]["fuse_normed_sum"]
    assert report.matched == matched
    assert [str(reason) in miss.reason for miss in report.near_misses] == [True] * (reason is not None)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Attention(Norm(96), Norm(32, 1e-3)), "has eps 1e-05, and "),
        (Attention(Norm(96), Norm(32, weighted=False)), "has no weight"),
        (Attention(Norm(96), Norm(96), chained=True), None),
        (Rows(), None),
    ],
    ids=["another eps", "one weight", "in a chain", "rows cut out late"],
)
@torch.no_grad()
def test_norms_that_differ_stay_apart(model: nn.Module, reason: str | None, kernel_device: torch.device) -> None:
    device = device_with(kernel_device, JOIN_RMS_NORMS)
    report = compiled(model, device, randn(5, 128), strict=True)[1]["join_rms_norms"]
    assert report.matched == 0
    assert [reason is not None and reason in miss.reason for miss in report.near_misses] == [True] * (
        reason is not None
    )


def shift_weights(node: fx.Node) -> bool:
    """Give norms an offset, or an eps, that they do not have."""
    if node.target not in (two_rms_norms, sums.normed_sum_rms_norm):
        return False
    if node.args[2] is None:  # an offset is one of weights
        node.args = (*node.args[:4], 0.5)
    else:
        node.kwargs = {**node.kwargs, "offset": 0.5}
    return True


@pytest.mark.parametrize("case", SITES)
@torch.no_grad()
def test_a_planted_mistake_is_found(case: str, kernel_device: torch.device) -> None:
    declared, model, width = SITES[case]
    mistake = Mistake(name="wrong", of=declared.name, what=str(shift_weights.__doc__), make=shift_weights)
    device = device_with(kernel_device, with_mistake(declared, mistake))
    with pytest.raises(CoreError, match=declared.name):
        compiled(model(), device, randn(5, width), verify="full", strict=True)


def pairs(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return rows side by side in one tensor, heads first, of unequal numbers, and none at all."""
    merged = randn(2, 5, 6 * 64, dtype=dtype)
    heads = merged.unflatten(-1, (6, 64)).transpose(1, 2)
    return [
        (merged[..., :256], merged[..., 256:]),
        (heads[:, :4], heads[:, 4:]),
        (randn(9, 63, dtype=dtype), randn(2, 300, dtype=dtype, seed=1)),
        (randn(3, 4, 128, dtype=dtype)[..., ::2], randn(1, 64, dtype=dtype).expand(5, 64)),
        (randn(0, 64, dtype=dtype), randn(3, 64, dtype=dtype)),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", ROUNDING, ids=str)
def test_two_norms_are_each_what_its_own_kernel_makes(
    rounding: dict[str, Any], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    for x, y in pairs(dtype):
        x, y = x.to(kernel_device), y.to(kernel_device)
        weights = [randn(each.shape[-1], dtype=dtype, seed=7).to(kernel_device) for each in (x, y)]
        found = two_rms_norms(x, y, *weights, 1e-5, **rounding)
        wanted = [norms.rms_norm(*each, 1e-5, **rounding) for each in zip((x, y), weights, strict=True)]
        assert laid_out(list(found)) == laid_out(wanted)
        for one, other in zip(found, wanted, strict=True):
            # On a GPU the number of warps of the two kernels, and so the order of a sum, may differ.
            exact = {"rtol": 0.0, "atol": 0.0} if kernel_device.type == "cpu" else {}
            torch.testing.assert_close(one, other, **exact)


def test_norms_without_weights(kernel_device: torch.device) -> None:
    x, y = randn(4, 80).to(kernel_device), randn(4, 48, seed=1).to(kernel_device)
    for found, each in zip(two_rms_norms(x, y, None, None, 1e-6), (x, y), strict=True):
        torch.testing.assert_close(found, RMS_NORM.reference(each, None, 1e-6))


def test_rows_that_registers_do_not_hold_are_refused() -> None:
    call = RMS_NORM.bind((torch.empty(2, 40_000, device="meta"), None, 1e-5), {})
    assert why_not(call) == "rows have 40000 elements, and the kernel of two norms takes 32768 at most"
    double = RMS_NORM.bind((torch.empty(2, 64, dtype=torch.float64), None, 1e-5), {})
    assert "x is torch.float64" in str(why_not(double))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", ROUNDING, ids=str)
def test_a_normed_sum_is_what_three_kernels_make(
    rounding: dict[str, Any], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    for x, _ in pairs(dtype):
        x, width = x.to(kernel_device), x.shape[-1]
        residual = randn(*x.shape, dtype=torch.float32 if width == 63 else dtype, seed=4).to(kernel_device)
        first, second = (randn(width, dtype=dtype, seed=seed).to(kernel_device) for seed in (7, 8))
        normed = norms.rms_norm(x, first, 1e-5, **rounding)
        wanted = norms.add_rms_norm(residual, normed, second, 1e-3, offset=1.0)
        found = sums.normed_sum_rms_norm(x, residual, first, 1e-5, second, 1e-3, next_offset=1.0, **rounding)
        total = sums.normed_sum(x, residual, first, 1e-5, **rounding)
        assert laid_out([*found, total]) == laid_out([*wanted, wanted[1]])
        results = list(zip((*found, total), (*wanted, wanted[1]), strict=True))
        if kernel_device.type == "cpu" or not x.numel():
            assert all(torch.equal(one, other) for one, other in results)
            continue
        # On a GPU the compiler may fuse a product and a sum here that other kernels round in between.
        with Fp64Mode():
            wide_x, wide_residual, wide_first, wide_second = (t.double() for t in (x, residual, first, second))
            normed = RMS_NORM.reference(wide_x, wide_first, 1e-5, **rounding)
            exact = ADD_RMS_NORM.reference(wide_residual, normed, wide_second, 1e-3, offset=1.0)
        for (one, other), truth in zip(results, (*exact, exact[1]), strict=True):
            verdict = judge(one, other, truth)
            assert verdict.passed, verdict.reason


def test_sums_that_registers_do_not_hold_are_refused() -> None:
    wide = torch.empty(2, 20_000, device="meta")
    reason = "rows have 20000 elements, and the kernel of normed sums takes 16384 at most"
    assert sums.why_not(RMS_NORM.bind((wide, None, 1e-5), {})) == reason
    double = torch.empty(2, 64, dtype=torch.float64)
    assert "x is torch.float64" in str(sums.why_not(ADD_RMS_NORM.bind((double, double, None, 1e-5), {})))
