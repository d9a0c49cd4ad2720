"""core_cuda/passes/expert_pairs.py and core_cuda/ops/moe/pairs.py: matches, numbers, near-misses, and a mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from core.compilation.rewrite.manager import PassManager
from core.compilation.trace.tracing import trace
from core.errors import CoreError
from core.verify.planted import Mistake, with_mistake
from tests.kernel_cases import randn

pytest.importorskip("triton", reason="needs triton")
from cuda_compiled import compiled, device_with

from core_cuda.ops.moe.pairs import order_pairs, weighted_sum
from core_cuda.passes.examples.mixture import quantised_experts
from core_cuda.passes.expert_pairs import SORT_EXPERT_PAIRS, SUM_EXPERT_ROWS

PASSES = {each.name: each for each in (SORT_EXPERT_PAIRS, SUM_EXPERT_ROWS)}
ALL = tuple(PASSES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("index", [0, 1], ids=["wide weights", "weights of the dtype"])
@torch.no_grad()
def test_pairs_are_sorted_and_rows_summed_in_a_launch_each(
    index: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    model, (x,) = list(quantised_experts())[index]
    x = x.to(dtype)
    device = device_with(kernel_device, *PASSES.values())
    program, reports = compiled(model, device, x, verify="full", strict=True)
    for name in PASSES:
        report = reports[name]
        assert (report.matched, report.near_misses, report.verification) == (1, (), "verified"), name
    apart, reports = compiled(model, device, x, disable_passes=ALL)
    assert not reports.keys() & PASSES.keys()
    inputs = x.to(device.torch_device)
    torch.testing.assert_close(program(x=inputs), apart(x=inputs))


class Experts(nn.Module):
    """What sorts pairs and sums rows, with one thing changed."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        num_experts = 6
        weights, indices = torch.topk(x[:, :num_experts].sigmoid(), 2)
        most = 5 if self.change == "bound" else num_experts
        elsewhere = (indices < 0) | (indices >= most)
        experts, order = torch.sort(
            torch.where(elsewhere, num_experts, indices).flatten(), stable=self.change != "unstable"
        )
        each = torch.arange(4 if self.change == "experts" else num_experts, device=x.device)
        ends = torch.searchsorted(experts, each, right=self.change != "left", out_int32=True)
        rows = x[order // 2] * (1 + ends.sum() / 64).to(x.dtype)
        if self.change == "order":
            rows = rows + (order % 3)[:, None]
        places = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=x.device))
        picked = rows[places].view(-1, 2, 40) if self.change != "rows" else rows[places].view(-1, 2, 20, 2).flatten(2)
        return (picked * weights[..., None]).sum(0 if self.change == "tokens" else 1)


@pytest.mark.parametrize(
    ("change", "sorted_", "summed", "reason"),
    [
        ("bound", 0, 1, ""),
        ("left", 0, 1, ""),
        ("experts", 0, 1, "does not count the 6 experts"),
        ("unstable", 0, 1, "may put pairs of one expert in another order"),
        ("order", 0, 1, "is used otherwise than for the tokens and places of pairs"),
        ("tokens", 1, 0, ""),
        ("rows", 1, 0, ""),
    ],
)
@torch.no_grad()
def test_other_sorts_and_sums_stay(
    change: str, sorted_: int, summed: int, reason: str, kernel_device: torch.device
) -> None:
    x = randn(7, 40)
    device = device_with(kernel_device, *PASSES.values())
    program, reports = compiled(Experts(change), device, x, strict=True)
    assert tuple(reports[name].matched for name in PASSES) == (sorted_, summed)
    assert [reason in miss.reason for miss in reports["sort_expert_pairs"].near_misses] == [True] * bool(reason)
    wanted = Experts(change).to(device.torch_device)(x.to(device.torch_device))
    torch.testing.assert_close(program(x=x.to(device.torch_device)), wanted)


@torch.no_grad()
def test_places_of_unknown_origin_are_left_to_torch(kernel_device: torch.device) -> None:
    """The kernel reads as many as there are weights, and no negative ones."""

    def summed(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        return (rows[places].view(-1, 2, 40) * weights[..., None]).sum(1)

    graph = trace(summed, {"rows": randn(12, 40), "places": torch.arange(12) - 12, "weights": randn(6, 2)})
    (report,) = PassManager([PASSES["sum_expert_rows"]], strict=True).run(graph.module)
    assert report.matched == 0 and "may not be where each pair went" in report.near_misses[0].reason


@torch.no_grad()
def test_rows_of_a_dtype_without_a_kernel_are_refused(kernel_device: torch.device) -> None:
    model = Experts("")
    device = device_with(kernel_device, SUM_EXPERT_ROWS)
    report = compiled(model, device, randn(7, 40, dtype=torch.float64), strict=True)[1]["sum_expert_rows"]
    assert report.matched == 0 and "rows are torch.float64" in report.near_misses[0].reason


class Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


@torch.no_grad()
def test_a_graph_that_sums_nothing_is_not_searched(kernel_device: torch.device) -> None:
    device = device_with(kernel_device, SUM_EXPERT_ROWS)
    report = compiled(Tanh(), device, randn(7, 40), strict=True)[1]["sum_expert_rows"]
    assert report.skipped == "nothing is summed"


def exchange(node: fx.Node) -> bool:
    """Take for each pair's place its token; of which there are fewer, so that no kernel reads out of bounds."""
    if node.target is not order_pairs:
        return False
    places = next(user for user in node.users if user.args[1] == 2)
    places.args = (node, 1)
    return True


@torch.no_grad()
def test_a_planted_mistake_is_found(kernel_device: torch.device) -> None:
    mistake = Mistake(name="wrong", of=SORT_EXPERT_PAIRS.name, what=str(exchange.__doc__), make=exchange)
    device = device_with(kernel_device, with_mistake(SORT_EXPERT_PAIRS, mistake))
    model, (x,) = next(quantised_experts())
    with pytest.raises(CoreError, match=SORT_EXPERT_PAIRS.name):
        compiled(model, device, x, verify="full", strict=True)


def sorted_by_torch(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    elsewhere = (indices < 0) | (indices >= num_experts)
    experts, order = torch.sort(torch.where(elsewhere, num_experts, indices).flatten(), stable=True)
    ends = torch.searchsorted(experts, torch.arange(num_experts), right=True, out_int32=True)
    places = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0]))
    return ends, order // indices.shape[1], places


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(1, 1, 1), (1, 8, 128), (5, 2, 3), (64, 8, 5), (700, 3, 2), (0, 2, 4)]
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_pairs_are_where_a_stable_sort_puts_them(
    tokens: int, top_k: int, experts: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    indices = torch.randint(-1, experts + 2, (tokens, top_k), generator=generator, dtype=dtype)
    found: Any = order_pairs(indices.to(kernel_device), experts)
    for one, other in zip(found, sorted_by_torch(indices, experts), strict=True):
        assert one.dtype == other.dtype and torch.equal(one.cpu(), other)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16], ids=str)
def test_rows_are_weighted_and_summed_as_torch_does(
    out_dtype: torch.dtype | None, weight_dtype: torch.dtype, kernel_device: torch.device
) -> None:
    for tokens, top_k, size in ((5, 3, 72), (1, 8, 300), (3, 1, 1), (0, 2, 64)):
        rows, weights = randn(tokens * top_k, size, dtype=torch.bfloat16), randn(tokens, top_k, dtype=weight_dtype)
        places = torch.randperm(tokens * top_k, generator=torch.Generator().manual_seed(size))
        wanted = (rows[places].view(-1, top_k, size) * weights[..., None]).sum(1)
        wanted = wanted if out_dtype is None else wanted.to(out_dtype)
        found = weighted_sum(*(each.to(kernel_device) for each in (rows, places, weights)), out_dtype=out_dtype)
        torch.testing.assert_close(found.cpu(), wanted)
