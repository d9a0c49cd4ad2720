"""The pass removes what it says, reports it, and leaves near relatives alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core.common.passes.context import PassContext
from torch import fx

from core_acme.passes import declarations, drop_same_dtype_cast


def _trace(fn: Any, dtype: torch.dtype) -> tuple[fx.GraphModule, torch.Tensor]:
    """Trace `fn` with the metadata that Dynamo would record, by running it node by node."""
    example = torch.arange(6).to(dtype)
    module = fx.symbolic_trace(fn)

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            n.meta["example_value"] = value = super().run_node(n)
            return value

    Recorder(module).run(example)
    return module, example


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_a_cast_to_the_same_dtype_goes(dtype: torch.dtype) -> None:
    module, example = _trace(lambda x: x.to(dtype).to(dtype=dtype).clone(), dtype)
    expected = module(example)
    result = drop_same_dtype_cast(PassContext(module=module))
    module.recompile()
    assert result.matched == len(result.sites) == 2
    assert [node.target for node in module.graph.nodes if node.op == "call_method"] == ["clone"]
    module.graph.lint()
    assert torch.equal(module(example), expected)


def test_aliasing_stays_as_it_was() -> None:
    module, example = _trace(lambda x: x.float(), torch.float32)
    assert drop_same_dtype_cast(PassContext(module=module)).matched == 1
    module.recompile()
    assert module(example) is example


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.to(torch.bfloat16),
        lambda x: x.half(),
        lambda x: x.to("cpu", torch.float32),
        lambda x: x.to(torch.float32, memory_format=torch.contiguous_format),
    ],
)
def test_other_conversions_stay(fn: Any) -> None:
    module, _ = _trace(fn, torch.float32)
    result = drop_same_dtype_cast(PassContext(module=module))
    assert (result.matched, result.near_misses) == (0, ())
    assert any(node.op == "call_method" for node in module.graph.nodes)


def test_near_misses_say_why() -> None:
    copied, _ = _trace(lambda x: x.to(torch.float32, copy=True), torch.float32)
    assert "copy=True" in drop_same_dtype_cast(PassContext(module=copied)).near_misses[0].reason
    bare = fx.symbolic_trace(lambda x: x.to(torch.float32))
    assert "not recorded" in drop_same_dtype_cast(PassContext(module=bare)).near_misses[0].reason


def test_sites_name_the_module_that_dynamo_recorded() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.float32) + 1

    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(torch.nn.Sequential(Block(), Block()), backend=keep, fullgraph=True)(torch.ones(2))
    result = drop_same_dtype_cast(PassContext(module=graphs[0]))
    assert result.matched == 2
    assert result.sites[0] != result.sites[1]
    assert "0" in result.sites[0] and "1" in result.sites[1]


def test_the_declaration_names_its_owner() -> None:
    (declared,) = declarations()
    assert (declared.name, declared.mechanism, declared.stage, declared.owner) == (
        "acme_drop_same_dtype_cast",
        "graph",
        "torch",
        "acme",
    )
