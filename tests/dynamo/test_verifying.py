"""`verify` of the backend: a wrong pass is found on the first call's inputs, and undone or, with strict, an error."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

import core
from core.errors import PassError
from tests.support import cpu, rewrite


def _wrong(module: fx.GraphModule) -> list[str]:
    """Halve what a graph adds."""
    sites = []
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is operator.add:
            node.args = (node.args[0], node.args[1] / 2)
            sites.append(node.name)
    return sites


def run(**options: Any) -> torch.Tensor:
    device = cpu(passes=(rewrite(_wrong, name="halve"),))
    function = torch.compile(
        lambda x: x.exp() + 3.0, backend="core", options={"device": device, "lowering": "inline", **options}
    )
    with torch.no_grad():
        result: torch.Tensor = function(torch.linspace(-1, 1, 256))
    return result


EXPECTED = torch.linspace(-1, 1, 256).exp() + 3.0


def test_a_wrong_pass_is_undone() -> None:
    assert not torch.equal(run(), EXPECTED)  # nobody looked
    torch._dynamo.reset()
    assert torch.equal(run(verify="full"), EXPECTED)
    (graph,) = core.backend_report().graphs
    (report,) = [each for each in graph.passes if each.name == "halve"]
    assert "error over bound" in report.error
    assert "undone: halve" in str(core.backend_report())


def test_strict_makes_it_an_error() -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        run(verify="full", strict=True)
    assert isinstance(caught.value.inner_exception, PassError)
