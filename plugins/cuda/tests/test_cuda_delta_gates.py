"""core_cuda/passes/delta_gates.py and its kernel: matches, numbers, near-misses, real models, and a planted mistake."""

from __future__ import annotations

from collections.abc import Callable
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

from core_cuda.ops.recurrent.delta_gates import delta_gates
from core_cuda.passes.delta_gates import FUSE_DELTA_GATES

NAME = FUSE_DELTA_GATES.name
HEADS, KEYS, VALUES = 4, 8, 6
Gates = tuple[Tensor, Tensor]


class Layer(nn.Module):
    """A gated delta rule whose gates `how` computes of a projection (T, 8) and the two weights of a layer."""

    def __init__(self, how: Callable[[Layer, Tensor], Gates], dtype: torch.dtype) -> None:
        super().__init__()
        self.how = how
        self.gates, self.heads = (nn.Parameter(randn(n, 32, seed=n, scale=0.2)) for n in (2 * HEADS, HEADS * 22))
        self.log_rate, self.bias = (nn.Parameter(randn(HEADS, seed=seed, dtype=dtype)) for seed in (3, 4))

    def forward(self, x: Tensor) -> Tensor:
        decay, beta = self.how(self, x @ self.gates.t().to(x.dtype))
        heads = (x @ self.heads.t().to(x.dtype)).view(-1, HEADS, 2 * KEYS + VALUES)
        query, key, value = heads.split((KEYS, KEYS, VALUES), -1)
        states = torch.ones(x.shape[0], HEADS, KEYS, VALUES, device=x.device)
        out: Tensor = torch.ops.core.gated_delta_rule(query, key, value, decay, beta, states, scale=0.5, norm_eps=1e-6)
        return out


def plain(layer: Layer, gates: Tensor) -> Gates:
    b, a = gates.chunk(2, -1)
    return -layer.log_rate.float().exp() * functional.softplus(a.float() + layer.bias), b.sigmoid()


def by_head(layer: Layer, gates: Tensor) -> Gates:
    b, a = gates.view(-1, 1, 2, HEADS).split(2, -1)
    b, a = b.reshape(-1, 1, HEADS), a.reshape(-1, 1, HEADS)
    decay = -layer.log_rate.float().exp() * functional.softplus(a.float() + layer.bias)
    return decay[:, 0], (b.sigmoid() * 2.0)[:, 0]


def negated_last(layer: Layer, gates: Tensor) -> Gates:
    b, a = gates.chunk(2, -1)
    beta = torch.sigmoid(b).float()
    return torch.neg(torch.nn.Softplus()(layer.bias.float() + a.float()) * torch.exp(layer.log_rate.float())), beta


def written_out(layer: Layer, gates: Tensor) -> Gates:
    b, a = gates.chunk(2, -1)
    step = (a.float() + layer.bias.float().view(1, -1)).view(-1, HEADS, 1)
    step = torch.where(step > 20.0, step, torch.log(1.0 + torch.exp(step)))
    return (-torch.exp(layer.log_rate.float().view(1, HEADS, 1)) * step)[..., 0], b.sigmoid()


def varied(change: str) -> Callable[[Layer, Tensor], Gates]:
    """Return gates that differ in one thing from those that the pass takes."""

    def how(layer: Layer, gates: Tensor) -> Gates:
        b, a = gates.chunk(2, -1)
        wide = a.dtype if change == "half precision" else torch.float32
        rate = (layer.log_rate[:1] if change == "shared" else layer.log_rate).to(wide).exp()
        step = (a + layer.bias.to(a.dtype)).float() if change == "rounded" else a.to(wide) + layer.bias.to(wide)
        if change == "no bias":
            step = a.to(wide)
        step = functional.softplus(step, beta=2.0) if change == "sharper" else functional.softplus(step)
        rate = {"growing": rate, "other rate": -rate.sqrt()}.get(change, -rate)
        beta = {"tanh": b.tanh(), "strided": b.t().contiguous().t().sigmoid()}.get(change, b.sigmoid())
        return rate * step, beta

    return how


def relu(layer: Layer, gates: Tensor) -> Gates:
    b, a = gates.chunk(2, -1)
    return -functional.relu(a.float()), b.sigmoid()


NEAR: dict[str, tuple[Callable[[Layer, Tensor], Gates], str]] = {
    "half precision": (varied("half precision"), "it is not computed in torch.float32"),
    "rounded": (varied("rounded"), "it is not computed in torch.float32"),
    "no bias": (varied("no bias"), "it is no sum of a projection and 4 numbers"),
    "sharper": (varied("sharper"), "it is no product with a softplus"),
    "growing": (varied("growing"), "it is not the negative exponential of a weight"),
    "other rate": (varied("other rate"), "it is not the negative exponential of a weight"),
    "shared": (varied("shared"), "its shape is (1,), and the decays of a token are"),
    "relu": (relu, "it is no product with a softplus"),
}


def late(layer: Layer, gates: Tensor) -> Gates:
    """The decay is read before the learning rate's projection is there."""
    _, a = gates.chunk(2, -1)
    decay = -layer.log_rate.float().exp() * functional.softplus(a.float() + layer.bias)
    return decay, (decay.to(gates.dtype) @ gates.new_ones(HEADS, HEADS)).sigmoid()


def of_rates(layer: Layer, gates: Tensor) -> Gates:
    """The decay's projection is the learning rate."""
    beta = gates.chunk(2, -1)[0].sigmoid()
    return -layer.log_rate.float().exp() * functional.softplus(beta.float() + layer.bias), beta


def of_scaled(layer: Layer, gates: Tensor) -> Gates:
    """The decay's projection is multiplied by the learning rate."""
    b, a = gates.chunk(2, -1)
    beta = b.sigmoid()
    return -layer.log_rate.float().exp() * functional.softplus((a * beta).float() + layer.bias), beta


ALONE = {"tanh": varied("tanh"), "strided": varied("strided"), "late": late, "rates": of_rates, "scaled": of_scaled}
"""Gates of which the decay alone is the kernel's."""


HOW = ["plain", "by head", "negated last", "written out", *ALONE]


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", [plain, by_head, negated_last, written_out, *ALONE.values()], ids=HOW)
@torch.no_grad()
def test_gates_become_one_launch(
    how: Callable[[Layer, Tensor], Gates], dtype: torch.dtype, weights: torch.dtype, kernel_device: torch.device
) -> None:
    model, x = Layer(how, weights), randn(7, 32, dtype=dtype)
    reports = compiled(model, device_with(kernel_device, FUSE_DELTA_GATES), x, verify="full", strict=True)[1]
    assert (reports[NAME].matched, reports[NAME].near_misses) == (1, ())
    assert reports[NAME].verification == "verified"


@torch.no_grad()
def test_every_example_has_a_match(kernel_device: torch.device) -> None:
    for model, (x,) in FUSE_DELTA_GATES.examples():  # type: ignore[misc]  # it has examples
        for dtype in DTYPES:
            device = device_with(kernel_device, FUSE_DELTA_GATES)
            report = compiled(model.to(dtype), device, x.to(dtype), verify="full", strict=True)[1][NAME]
            assert (report.matched, report.verification) == (1, "verified"), (model, dtype)


@pytest.mark.parametrize("case", NEAR)
@torch.no_grad()
def test_what_differs_in_one_thing_stays(case: str, kernel_device: torch.device) -> None:
    how, reason = NEAR[case]
    device = device_with(kernel_device, FUSE_DELTA_GATES)
    report = compiled(Layer(how, torch.float32), device, randn(7, 32, dtype=torch.bfloat16), strict=True)[1][NAME]
    assert report.matched == 0
    assert [reason in miss.reason for miss in report.near_misses] == [True], report.near_misses


class Both(Layer):
    """Two rules that share a learning rate, each with a decay of its own."""

    def forward(self, x: Tensor) -> Tensor:
        b, a = (x @ self.gates.t()).chunk(2, -1)
        decays = [plain(self, torch.cat((b, each), -1))[0] for each in (a, b)]
        heads = (x @ self.heads.t()).view(-1, HEADS, 2 * KEYS + VALUES)
        query, key, value = heads.split((KEYS, KEYS, VALUES), -1)
        beta, found = torch.sigmoid(input=b), []
        for decay in decays:
            states = torch.ones(x.shape[0], HEADS, KEYS, VALUES, device=x.device)
            found.append(torch.ops.core.gated_delta_rule(query, key, value, decay, beta, states, scale=0.5))
        return found[0] + found[1]


@torch.no_grad()
def test_two_rules_that_share_a_rate_are_two_sites(kernel_device: torch.device) -> None:
    model, device = Both(plain, torch.float32), device_with(kernel_device, FUSE_DELTA_GATES)
    report = compiled(model, device, randn(7, 32), verify="full", strict=True)[1][NAME]
    assert (report.matched, report.verification) == (2, "verified")


def swap(node: fx.Node) -> bool:
    """Take the projections of decay and learning rate for each other."""
    if node.target is not delta_gates:
        return False
    a, log_rate, bias, b = node.args
    node.args = (b, log_rate, bias, a)
    return True


@torch.no_grad()
def test_a_planted_mistake_is_found(kernel_device: torch.device) -> None:
    mistake = Mistake(name="swapped", of=NAME, what=str(swap.__doc__), make=swap)
    device = device_with(kernel_device, with_mistake(FUSE_DELTA_GATES, mistake))
    with pytest.raises(CoreError, match=NAME):
        compiled(Layer(plain, torch.float32), device, randn(7, 32), verify="full", strict=True)


def calls(dtype: torch.dtype) -> list[tuple[tuple[Tensor | None, ...], dict[str, Any]]]:
    """Return gates of heads and of features, of whole rows and of slices, of large and small steps, and of no token."""
    rate, bias = randn(6, seed=1, dtype=torch.float32), randn(6, seed=2, dtype=dtype)
    rows = randn(700, 2 * 6, dtype=dtype, scale=9.0)
    extremes = rows[:16, :6].clone()
    extremes[:, :5] = torch.tensor([float("nan"), float("inf"), -float("inf"), -80.0, 20.0], dtype=dtype)
    grouped = randn(30, 1, 3, 7, dtype=dtype)
    features = randn(12, 6 * 40, dtype=dtype)
    one = {"sizes": [6], "a_dims": 1, "b_dims": 1, "rounded": dtype}
    return [
        ((rows[:, 6:], rate, bias, rows[:, :6]), one),
        ((extremes, rate, bias, extremes), one),
        ((rows[:0, 6:], rate, bias, rows[:0, :6]), one),
        ((grouped[..., 1:3], rate, bias, grouped[..., 5:]), {**one, "a_dims": 2, "b_dims": 2, "factor": 2.0}),
        ((features, rate.view(1, 6, 1), randn(6, 40, dtype=dtype), rows[:12, :6]), {**one, "sizes": [6, 40]}),
        ((rows[:, 6:], rate, bias, None), {"sizes": [6], "a_dims": 1}),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_as_near_as_torchs(dtype: torch.dtype, kernel_device: torch.device) -> None:
    for operands, options in calls(dtype):
        sent = [None if each is None else each.to(kernel_device) for each in operands]
        found, eager = delta_gates(*sent, **options), reference(operands, options)
        with Fp64Mode():
            exact = reference([None if each is None else each.double() for each in operands], options)
        for one, near, far in zip(found, eager, exact, strict=True):
            assert (one.shape, one.dtype, one.is_contiguous()) == (near.shape, near.dtype, True)
            assert not one.numel() or judge(one.cpu(), near, far).passed


def reference(operands: Any, options: dict[str, Any]) -> Gates:
    """Return the same, by the formula and a number at a time of each head."""
    a, rate, bias, b = operands
    sizes = options["sizes"]
    steps = a.flatten(-2) if options["a_dims"] == 2 else a
    steps = steps.float() + bias.flatten().float()
    heads = torch.repeat_interleave(rate.flatten().float().exp(), steps.shape[-1] // sizes[0])
    decay = (-heads * functional.softplus(steps)).unflatten(-1, sizes)
    if b is None:
        return decay, decay.new_empty(0)
    learned = b.flatten(-2) if options["b_dims"] == 2 else b
    return decay, learned.float().sigmoid().to(options["rounded"]) * options.get("factor", 1.0)
