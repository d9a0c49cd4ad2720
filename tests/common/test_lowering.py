"""core/common/inductor.py and lowering.py: a finished graph becomes a callable with the same numbers."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import cpp_extension

from core.common.inductor import INLINE_AND_INDUCTOR, inductor, specialize
from core.common.lowering import FlatCallable, LoweringRequest, Lowerings, inline
from core.common.node_meta import value_of
from core.compilation.rewrite.aten import to_aten
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from core.errors import LoweringError, UsageError
from tests.support import Block, refused


def traced(rows: int = 6) -> tuple[TracedGraph, Tensor]:
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(0))
    return trace(Tail(), {"x": x.clone()}, dynamic={"x": [0]}), x


class Tail(torch.nn.Module):
    """A block, then a size-dependent view, so that the traced graph takes a size as its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.block(x)
        return y, y.view(x.shape[0] * 4, 4).sum(-1)


def placeholders(graph: fx.GraphModule) -> int:
    return sum(node.op == "placeholder" for node in graph.graph.nodes)


@pytest.mark.cases(1)
@pytest.mark.parametrize("rows", [6, 9])
def test_inline_runs_at_every_size_and_exactly_as_eager(rows: int) -> None:
    graph, x = traced()
    call = inline(LoweringRequest(graph=graph.module, example_inputs=graph.values({"x": x})))
    other = torch.randn(rows, 16)
    with torch.no_grad():
        got, want = call(*graph.values({"x": other})), Tail()(other)
    assert isinstance(got, tuple) and len(got) == 2
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_specialize_makes_sizes_constants() -> None:
    graph, x = traced()
    values = graph.values({"x": x})
    assert any(isinstance(value, int) for value in values)
    fixed, kept = specialize(graph.module, values)
    assert [values[i] for i in kept] == [v for v in values if isinstance(v, Tensor)]
    assert placeholders(fixed) == len(kept) < len(values)
    fixed.graph.lint()
    with torch.no_grad():
        got, want = fixed(*[values[i] for i in kept]), Tail()(x)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_specialize_forgets_the_symbolic_values_of_either_form_of_graph() -> None:
    """Inductor believes values that nodes hold: a graph of ATen ops with those of the trace has no size at all."""
    graph, x = traced()
    values = graph.values({"x": x})
    for module in (to_aten(graph.module), graph.module):
        assert any(value_of(node) is not None for node in module.graph.nodes)
        fixed, _ = specialize(module, values)
        assert not [node for node in fixed.graph.nodes if value_of(node) is not None]


@pytest.mark.slow
def test_inductor_takes_the_same_arguments_and_agrees() -> None:
    graph, x = traced()
    values = graph.values({"x": x})
    call = inductor(LoweringRequest(graph=graph.module, example_inputs=values))
    with torch.no_grad():
        got, want = call(*values), Tail()(x)
    assert isinstance(got, tuple)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_inductors_code_has_the_sizes_of_the_examples_as_numbers() -> None:
    graph, x = traced()
    values = graph.values({"x": x})
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(inductor, LoweringRequest(graph=graph.module, example_inputs=values))
    assert codes and not [line for code in codes for line in code.splitlines() if ".size()" in line]


def test_resolve_gives_the_default_or_the_named_one() -> None:
    assert INLINE_AND_INDUCTOR.resolve(None) == ("inline", inline)
    assert INLINE_AND_INDUCTOR.resolve("inductor") == ("inductor", inductor)


def test_an_unknown_lowering_names_the_known_ones() -> None:
    own = Lowerings(available={"zeta": inline, "alpha": inline}, default="zeta")
    with refused(
        UsageError,
        "lowering 'inductor'",
        "this device has: alpha, zeta",
        "--lowering NAME, or lowering=NAME among the options",
    ):
        own.resolve("inductor")


def test_tensors_in_a_tuple_do_not_become_constants() -> None:
    graph = fx.Graph()
    pair = graph.placeholder("pair")
    graph.output((graph.call_function(operator.getitem, (pair, 0)),))
    with pytest.raises(LoweringError, match="a tuple that holds tensors"):
        specialize(fx.GraphModule(torch.nn.Module(), graph), ((torch.ones(2), torch.ones(2)),))


@pytest.mark.slow
def test_inductor_refuses_a_write_that_is_read_through_another_input() -> None:
    def add_and_read(x: Tensor, y: Tensor) -> tuple[Tensor]:
        x.add_(1)
        return (x + y,)

    def lowered(*values: Tensor) -> FlatCallable:
        graph = make_fx(add_and_read)(torch.ones(8), torch.ones(8))
        return inductor(LoweringRequest(graph=graph, example_inputs=values))

    apart, memory = (torch.ones(8), torch.ones(8)), torch.ones(16)
    assert lowered(*apart)(*apart)[0].tolist() == [3.0] * 8
    with refused(LoweringError, "share memory, and one of them is written", "lowering 'inline'"):
        lowered(memory[:8], memory[4:12])


@pytest.mark.slow
def test_inductor_links_where_torch_lies_below_a_folder_with_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = tmp_path / "a b"
    libraries.symlink_to(cpp_extension.TORCH_LIB_PATH)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(libraries))
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "a b" / "__init__.py"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # where nothing was compiled before
    graph = fx.symbolic_trace(lambda x: (x * 3 + 1,))
    x = torch.arange(6.0)
    call = inductor(LoweringRequest(graph=graph, example_inputs=(x,)))
    assert torch.equal(call(x)[0], x * 3 + 1)
    assert list((tmp_path / "cache").rglob("*.so")) and str(libraries) == cpp_extension.TORCH_LIB_PATH
