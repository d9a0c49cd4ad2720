"""core_cuda/ops/registration.py: kernels that only passes call compute by torch's ops on tensors of the host."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from core.common.numerics import Fp64Mode
from core.verify.execution import run_graph
from tests.kernel_cases import randn

pytest.importorskip("triton", reason="needs triton")

from core_cuda.ops import launching
from core_cuda.ops.gather_columns import gather_columns
from core_cuda.ops.linear.widened import widened_linear
from core_cuda.ops.moe.pairs import order_pairs, weighted_sum
from core_cuda.ops.moe.shared_gate import add_gated_expert
from core_cuda.ops.norm.normed_sum import normed_sum, normed_sum_rms_norm
from core_cuda.ops.norm.pair import two_rms_norms
from core_cuda.ops.recurrent.delta_gates import delta_gates
from core_cuda.ops.squared_relu import squared_relu

HALF = torch.bfloat16
INDICES = torch.tensor([[2, 0], [5, 2], [0, -1]])


def half(*shape: int, seed: int) -> Tensor:
    return randn(*shape, dtype=HALF, seed=seed)


ROUNDING = {"normed_dtype": HALF, "out_dtype": HALF}
CALLS: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
    two_rms_norms: ((half(3, 64, seed=1), half(3, 32, seed=2), half(64, seed=3), None, 1e-5), ROUNDING),
    normed_sum: ((half(3, 64, seed=1), half(3, 64, seed=2), half(64, seed=3), 1e-5), ROUNDING),
    normed_sum_rms_norm: (
        (half(3, 64, seed=1), half(3, 64, seed=2), half(64, seed=3), 1e-5, half(64, seed=4), 1e-5),
        {**ROUNDING, "next_out_dtype": HALF},
    ),
    widened_linear: ((half(3, 64, seed=1), half(8, 64, seed=2)), {}),
    add_gated_expert: ((half(3, 64, seed=1), half(1, 64, seed=2), half(3, 40, seed=3), half(3, 40, seed=4)), {}),
    squared_relu: ((half(3, 64, seed=1),), {}),
    delta_gates: (
        (half(30, 4, seed=1), half(4, seed=2), half(4, seed=3), half(30, 4, seed=4)),
        {"sizes": [4], "a_dims": 1, "rounded": HALF},
    ),
    weighted_sum: ((half(6, 40, seed=1), torch.randperm(6), half(3, 2, seed=2)), {"out_dtype": HALF}),
}


@pytest.fixture(autouse=True)
def compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the kernels take no tensors of the host."""
    monkeypatch.setattr(launching, "INTERPRETED", False)


@pytest.mark.parametrize("kernel", CALLS, ids=lambda kernel: kernel._opname)
def test_what_an_fp64_run_calls_keeps_fp64_and_is_what_half_precision_rounds(kernel: Any) -> None:
    operands, options = CALLS[kernel]
    near = kernel(*operands, **options)
    wide = [each.double() if isinstance(each, Tensor) and each.is_floating_point() else each for each in operands]
    with Fp64Mode():
        exact = kernel(*wide, **options)
    pairs = zip(near, exact, strict=True) if isinstance(near, tuple) else [(near, exact)]
    for one, truth in pairs:
        assert truth.dtype == torch.float64 and not torch.equal(truth, truth.to(HALF).double())
        torch.testing.assert_close(one.double(), truth, rtol=0.03, atol=0.03)


def test_columns_are_copied_as_they_are() -> None:
    x = randn(3, 64).double()
    with Fp64Mode():
        first, second = gather_columns(x, [32, 2, -32, 16, 60, 1, 0, 4], [1, 1])
    assert torch.equal(first, torch.cat((x[:, 32:48], x[:, :16]), 1)) and torch.equal(second, x[:, 60:])


def test_a_graph_with_such_kernels_has_an_fp64_run() -> None:
    """By which a pass is judged that runs after the one that made the calls."""
    graph = fx.Graph()
    indices, rows, weights = (graph.placeholder(name) for name in ("indices", "rows", "weights"))
    pairs = graph.call_function(order_pairs, (indices, 4))
    places = graph.call_function(operator.getitem, (pairs, 2))
    graph.output((graph.call_function(weighted_sum, (rows, places, weights)),))
    values = [INDICES, randn(6, 40), randn(3, 2, seed=1)]
    (found,) = run_graph(fx.GraphModule(torch.nn.Module(), graph), values, fp64=True).results
    order = torch.sort(torch.where((INDICES < 0) | (INDICES >= 4), 4, INDICES).flatten(), stable=True).indices
    sorted_rows = torch.empty(6, 40, dtype=torch.float64)
    sorted_rows[order] = values[1].double()[torch.arange(6)]
    wanted = (sorted_rows.view(3, 2, 40) * values[2].double()[..., None]).sum(1)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted)
