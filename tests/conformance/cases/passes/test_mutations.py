"""core_conformance/cases/passes/mutations.py: a near-miss is a graph whose numbers are determined."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass
from core.common.passes.results import PassResult
from core_conformance.cases.passes.examples import declared_samples
from core_conformance.cases.passes.mutations import near_misses
from core_conformance.cases.passes.runs import bench
from tests.conformance.cases.passes.pass_support import keep
from tests.recording import acme


class Buffered(nn.Module):
    """A value that goes through a buffer, of which the copy's result is not read."""

    def forward(self, x: Tensor) -> Tensor:
        buffer = torch.empty_like(x)
        buffer.copy_(x.sin())
        return buffer.cos().tanh()


def erase(context: PassContext) -> PassResult:
    """Let readers of a buffer that the graph makes read what is copied into it."""
    sites = context.graph.find_nodes(op="call_method", target="copy_")
    for node in sites:
        buffer, source = node.args
        context.graph.erase_node(node)
        buffer.replace_all_uses_with(source)
        context.graph.erase_node(buffer)
    return PassResult(matched=len(sites), sites=tuple(node.name for node in sites))


def examples() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    yield Buffered(), (torch.linspace(-3, 3, 320).view(5, 64),)


ERASE = Pass(name="erase_buffers", run=erase, owner="acme", examples=examples)


def test_no_near_miss_rounds_the_memory_that_a_user_writes_into(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch)
    own = bench(acme(passes=(ERASE,)))
    change = own.walk(declared_samples(ERASE)[0], torch.float32).changes[ERASE.name]
    told = [what for what, _ in near_misses(change)]
    assert any("is returned besides" in what for what in told)
    assert [what for what in told if "is rounded to bfloat16" in what] == ["cos is rounded to bfloat16 before tanh"]
