"""core/compilation/rewrite/functional.py and the pass that is its way back: what is refused, what is reported, what
passes see.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from core.common.numerics import Fp64Mode, judge
from core.common.passes.functional.reinplace import FIX_FUNCTIONALIZATION, reinplace
from core.common.passes.pass_guards import Form
from core.compilation.rewrite.aten import to_aten, to_functional
from core.compilation.rewrite.manager import PassManager
from core.compilation.trace.tracing import trace
from core.errors import TraceError
from tests.common.passes.functional.reinplace_cases import FORMS, INC, MIX, aten, calls, define, fix
from tests.support import refused

X = torch.linspace(-2, 2, 24).view(6, 4)
both = pytest.mark.parametrize("form", FORMS)


def projection(x: Tensor) -> Tensor:
    """Write query and key, two views of one buffer, and read the value, a third, later."""
    qkv = torch.cat([x, x + 1, x + 2], -1)
    q, k, v = qkv[:, :4], qkv[:, 4:8], qkv[:, 8:]
    return MIX(q, k) + (q * k).sum() + v.sum()


# --- what cannot be functionalised, or fixed


def test_inputs_that_share_memory() -> None:
    class Shared(nn.Module):
        def __init__(self, start: int) -> None:
            super().__init__()
            base = torch.arange(40.0)
            self.register_buffer("first", base[:24].view(6, 4))
            self.register_buffer("second", base[start : start + 12].view(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            INC(self.first, x)
            return self.second + 1

    for form in FORMS:
        assert fix(Shared(24), {"x": X}, form).copies == ()  # side by side
    with refused(TraceError, "functionalising a graph that writes", "shares a part of its memory"):
        to_functional(trace(Shared(20), {"x": X}).module)


def test_the_same_tensor_given_twice_is_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("first", torch.arange(24.0).view(6, 4))
            self.register_buffer("second", self.first.view(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            INC(self.first, x)
            return self.second + 1

    for form in FORMS:
        assert fix(Twice(), {"x": X}, form).copies == ()


def test_an_op_that_returns_what_it_writes_is_refused() -> None:
    alias = define("alias(Tensor(a!) x) -> Tensor(a!)", lambda x: x.add_(1), lambda x: x)
    with refused(TraceError, "reinplace_test.alias", "alias"):
        to_functional(trace(lambda x: alias(x * 2) + 1, {"x": X}).module)


@both
def test_an_op_whose_schema_lies_about_its_result_stays_wrapped(form: Form) -> None:
    """It returns its argument, and its schema says that it does not."""
    name = f"liar_{form}"
    liar = define(f"{name}(Tensor(a!) x) -> Tensor", lambda x: x.add_(1).view(-1), lambda x: x.view(-1))

    def forward(x: Tensor) -> Tensor:
        h = x * 2
        return liar(h) + h.sum()

    functional = to_functional(trace(forward, {"x": X}).module, form)
    done = reinplace(functional)
    assert (done.functionalized, done.sites) == (1, ())
    assert "returns memory that it was given, which its schema denies" in done.clones[0].reason
    assert calls(functional, liar) == 0


@pytest.mark.skipif(not hasattr(torch.Tag, "out"), reason="this torch refuses ops that return what they write")
def test_ops_that_only_write_their_result() -> None:
    """v2 leaves their results out of the graph: an input takes one if it is copied there, else it gets memory."""
    halve = define(
        "halve.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
        lambda x, *, out: out.copy_(x / 2),
        lambda x, *, out: out,
        tags=(torch.Tag.out,),
        overload="out",
    )

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            halve(x, out=self.cache)
            own = torch.empty_like(x)
            halve(x + 1, out=own)
            return own + self.cache

    found = fix(Halves(), {"x": X}, "v2")
    assert (found.copies, found.done.clones) == ((), ())
    given = [node.kwargs["out"].op for node in found.module.graph.nodes if node.target is halve]
    assert given == ["placeholder", "call_function"]


# --- the pass


@pytest.mark.cases(2)
@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pass_counts_and_keeps_the_numbers(form: Form, dtype: torch.dtype) -> None:
    inputs = {"x": torch.randn(256, 4, generator=torch.Generator().manual_seed(1)).to(dtype)}
    graph = trace(lambda x: projection(x).expand(512) * x.sum(), inputs)
    module = to_functional(graph.module, form)
    (report,) = PassManager([FIX_FUNCTIONALIZATION], enable=["fix_functionalization"], strict=True).run(
        module, "functional", form=form
    )
    assert report.matched == len(report.sites) > 0 and report.near_misses == ()
    (got,), (eager,) = module(*graph.values(inputs)), to_aten(graph.module)(*graph.values(inputs))
    with Fp64Mode():
        (reference,) = graph.module(*(value.double() for value in graph.values(inputs)))
    assert torch.equal(got, eager)
    assert judge(got, eager, reference).passed


@both
def test_a_second_run_finds_nothing(form: Form) -> None:
    found = fix(projection, {"x": X}, form)
    nodes = list(found.module.graph.nodes)
    again = reinplace(found.module)
    assert (again.functionalized, list(found.module.graph.nodes)) == (0, nodes)


def test_values_say_whose_memory_they_lie_in() -> None:
    """For the analyses of later passes: a view of what is written in place lies in its memory."""
    for form in FORMS:
        module = fix(projection, {"x": X}, form).module
        (cat,) = [n for n in module.graph.nodes if n.target is aten.cat.default]
        slices = [n for n in module.graph.nodes if n.target is aten.slice.Tensor]
        memory = {n.meta["val"].untyped_storage()._cdata for n in (cat, *slices)}
        assert len(memory) == 1
