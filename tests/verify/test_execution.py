"""core/verify/execution.py: runs leave what they are given alone, and hold no more than they must."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from core.common.passes.constants import Constants
from core.verify.execution import bind, error_line, run_graph, widened
from tests.common.passes.graphs import Stack, traced_graph

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(9))


def test_a_large_weight_is_widened_alone_and_only_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def counted(value: Any, **options: Any) -> Any:
        nonlocal most
        wide = widened(value, **options)
        if isinstance(wide, Tensor) and wide.shape == (64, 64):
            alive.append(weakref.ref(wide))
            most = max(most, sum(ref() is not None for ref in alive))
        return wide

    monkeypatch.setattr("core.verify.execution.widened", counted)
    model = Stack(4, size=64)
    whole = traced_graph(model, X)
    exact = run_graph(whole.module, whole.values({"x": X}), fp64=True)
    assert exact.outputs[0].dtype == torch.float64 and len(alive) == 8 and most == 1


def test_inputs_that_share_memory_still_do_in_a_run() -> None:
    graph = fx.symbolic_trace(lambda x, y: (x.add_(1), y * 1)[1])
    whole = torch.zeros(2, 4)
    result = run_graph(graph, [whole[0], whole])
    assert result.outputs[0][0].eq(1).all() and whole.eq(0).all()
    exact = run_graph(graph, [whole[0], whole], fp64=True)
    assert exact.outputs[0].dtype == torch.float64 and exact.outputs[0][0].eq(1).all() and whole.eq(0).all()


def test_what_an_attribute_holds_is_not_written_either() -> None:
    module = fx.symbolic_trace(lambda x: x)
    kept = torch.zeros(4)
    module.register_buffer("kept", kept)
    (x,) = module.graph.find_nodes(op="placeholder")
    with module.graph.inserting_after(x):
        attribute = module.graph.get_attr("kept")
    with module.graph.inserting_after(attribute):
        written = module.graph.call_method("add_", (attribute, x))
    module.graph.output_node().args = ((written, attribute),)
    for fp64 in (False, True):
        first, second = run_graph(module, [torch.ones(4)], fp64=fp64).outputs
        assert first.eq(1).all() and second.eq(1).all() and kept.eq(0).all()


@pytest.mark.parametrize("offs", [[2, 2, 7], [1, 4, 5]])
def test_grouped_products_have_an_fp64_form(offs: list[int]) -> None:
    def model(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(rows, matrices, offs=ends)

    rows, matrices = torch.randn(7, 16).bfloat16(), torch.randn(3, 16, 8).bfloat16()
    values = [rows, matrices, torch.tensor(offs, dtype=torch.int32)]
    module = fx.symbolic_trace(model)
    (wide,) = run_graph(module, values, fp64=True).outputs
    (own,) = run_graph(module, values).outputs
    assert wide.dtype == torch.float64
    torch.testing.assert_close(own[: offs[-1]].double(), wide[: offs[-1]], rtol=1e-2, atol=5e-2)


def test_integers_are_counted_on_the_cpu_too() -> None:
    module = fx.symbolic_trace(lambda x: torch.histc(x, bins=4, min=0, max=3))
    (counts,) = run_graph(module, [torch.tensor([0, 3, 3, 1], dtype=torch.int32)], fp64=True).outputs
    assert counts.dtype == torch.int32 and counts.tolist() == [1, 1, 0, 2]


def test_a_placeholder_that_a_pass_added_is_bound_to_its_constant() -> None:
    module = fx.symbolic_trace(lambda x: x + 1)
    constants = Constants({})
    (x,) = module.graph.find_nodes(op="placeholder")
    added = constants.add(module.graph, "joined", X, x)
    assert list(bind(module, [1], constants)) == ["x", added.name]
    assert bind(module, [1], constants)[added.name] is X
    with pytest.raises(KeyError, match="joined"):
        bind(module, [1])


def test_an_error_is_one_line_without_the_node_that_fx_adds() -> None:
    module = fx.symbolic_trace(lambda x: x.reshape(3))
    with pytest.raises(RuntimeError) as caught:
        run_graph(module, [X])
    assert error_line(caught.value) == "RuntimeError: shape '[3]' is invalid for input of size 2048"
