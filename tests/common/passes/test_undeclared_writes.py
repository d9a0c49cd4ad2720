"""Ops that write arguments though their schemas deny it: what fakes declare of them, every pass and run goes by."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from core.common.fakes import FakeOp, apply_fakes, nothing
from core.common.passes.cleanup.cse import ELIMINATE_COMMON_SUBEXPRESSIONS
from core.common.passes.cleanup.no_ops import REMOVE_NO_OPS
from core.common.passes.effects import is_impure, written_args
from core.common.passes.functional.reinplace import reinplace
from core.common.passes.identity import fingerprint
from core.common.passes.writes import find_writes
from core.compilation.rewrite.aten import to_aten, to_functional
from core.compilation.rewrite.manager import PassManager
from core.compilation.trace.tracing import trace
from core.errors import TraceError
from core.verify.execution import run_graph
from tests.support import refused

ops: Any = torch.ops.denies_test
DECLARED = (
    FakeOp(op="denies_test::turn", rule=None, also_writes=("query", "key")),
    FakeOp(op="denies_test::mask", rule=nothing, also_writes=("x",)),
)


def turn(query: Tensor, key: Tensor, by: float = 0.5) -> tuple[Tensor, Tensor]:
    return query.mul_(by).clone(), key.mul_(by).clone()  # torch warns of ops in Python that return their arguments


def mask(x: Tensor) -> None:
    x.mul_(0.25)


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[torch.library.Library]:
    """Ops that write, `turn` with a fake of its own, `mask` with a declared one."""
    lib = torch.library.Library("denies_test", "DEF")
    lib.define("turn(Tensor query, Tensor key, float by=0.5) -> (Tensor, Tensor)")
    lib.impl("turn", turn, "CPU")
    torch.library.register_fake(
        "denies_test::turn", lambda query, key, by=0.5: (torch.empty_like(query), torch.empty_like(key)), lib=lib
    )
    lib.define("mask(Tensor x) -> ()")
    lib.impl("mask", mask, "CPU")
    node = called("turn")
    assert written_args(node) == () and not is_impure(node)  # asked before they are declared
    results = [result for _, result in apply_fakes(DECLARED)]
    assert [result.applied for result in results] == [True, True]
    assert results[0].reason == (
        "its library's fake serves; the kernel also writes query, key, which its schema does not declare"
    )
    yield lib
    lib._destroy()


def called(name: str, overload: str = "") -> fx.Node:
    graph = fx.Graph()
    args = tuple(graph.placeholder(each) for each in ("first", "second"))
    target = getattr(ops, name)
    return graph.call_function(getattr(target, overload) if overload else target, args if name == "turn" else args[:1])


@pytest.mark.parametrize("overload", ["", "default"])
@pytest.mark.parametrize(("name", "written"), [("turn", ["first", "second"]), ("mask", ["first"])])
def test_the_declared_arguments_are_written_and_the_call_stays(name: str, overload: str, written: list[str]) -> None:
    node = called(name, overload)
    assert [each.name for each in written_args(node)] == written and is_impure(node)
    node.graph.output(None)
    node.graph.eliminate_dead_code()
    assert node in node.graph.nodes


def copied(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    kept = torch.empty_like(y)
    kept.copy_(y)
    turned, _ = ops.turn(kept, x * 1.5)
    return turned + 0.5, y * 2


def repeated(x: Tensor) -> tuple[Tensor, ...]:
    turned, _ = ops.turn(x.sin(), x * 1.5)
    return turned + 0.5, x.sin() * 2


def cloned(x: Tensor) -> tuple[Tensor, ...]:
    turned, other = ops.turn(x.clone(), x.clone())
    return turned + 0.5, other + 0.25, x.mean(-1)


def masked(x: Tensor) -> tuple[Tensor, ...]:
    first, second = x * 2, x * 2
    ops.mask(first)
    return first + 0.5, second + 0.5


def written_result(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    turned, _ = ops.turn(y, x * 1.5)
    kept = turned.clone()
    y.copy_(x)
    return turned + 0.5, kept + 0.5


FUNCTIONS = (copied, repeated, cloned, masked, written_result)


@pytest.mark.cases(3)
@pytest.mark.parametrize("stage", ["traced", "aten", "functional"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_rewritten_graph_gives_what_eager_gives(function: Callable[..., Any], stage: str) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    module = trace(function, {"x": x.clone()}).module
    module = {"traced": lambda given: given, "aten": to_aten, "functional": to_functional}[stage](module)
    PassManager([REMOVE_NO_OPS, ELIMINATE_COMMON_SUBEXPRESSIONS], strict=True).run(module)
    reinplace(module) if stage == "functional" else module.recompile()
    given = x.clone()
    assert all(map(torch.equal, module(given), function(x.clone())))
    assert torch.equal(given, x)


class Table(nn.Module):
    """Turns a copy of a buffer."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(3, 8, generator=torch.Generator().manual_seed(2)))

    def forward(self, x: Tensor) -> Tensor:
        turned, _ = ops.turn(self.table.clone(), x * 1.5)
        return turned + x


def test_a_buffer_keeps_its_values() -> None:
    model, x = Table(), torch.randn(3, 8)
    before, wanted = model.table.clone(), model(x)
    graph = trace(model, {"x": x})
    PassManager([REMOVE_NO_OPS, ELIMINATE_COMMON_SUBEXPRESSIONS], strict=True).run(graph.module)
    graph.module.recompile()
    for _ in range(2):
        (found,) = graph.module(*graph.values({"x": x}))
        assert torch.equal(found, wanted) and torch.equal(model.table, before)


def direct(x: Tensor) -> Tensor:
    turned, _ = ops.turn(x, x * 2)
    return turned + 1


def test_runs_for_verification_write_nothing_that_they_are_given() -> None:
    x = torch.randn(3, 8)
    graph, before = trace(direct, {"x": x.clone()}, writable=["x"]), x.clone()
    for fp64 in (False, True):
        run = run_graph(graph.module, graph.values({"x": x}), fp64=fp64)
        assert torch.equal(x, before)
        assert [torch.equal(each.float(), before * 0.5) for each in run.written.values()] == [True]


def test_an_input_that_would_be_written_is_refused() -> None:
    with refused(TraceError, "x"):
        trace(direct, {"x": torch.randn(3, 8)})


def test_a_result_lies_in_the_argument_that_it_may_be() -> None:
    graph = trace(written_result, {"x": torch.randn(3, 8)}).module.graph
    writes = find_writes(graph.owning_module)
    (call,) = (node for node in graph.nodes if "turn" in str(node.target))
    for result in call.users:
        assert writes.of(result) >= writes.of(*call.args[:2])


def test_an_op_without_any_fake_says_so(library: torch.library.Library) -> None:
    library.define("bare(Tensor x) -> Tensor")
    ((_, result),) = apply_fakes([FakeOp(op="denies_test::bare", rule=None, also_writes=("x",))])
    assert not result.applied and result.reason.startswith("op denies_test::bare has no fake kernel; the kernel also")


@pytest.mark.slow
def test_what_ops_write_is_no_part_of_what_a_pass_is() -> None:
    code = (
        "from core.common.passes.identity import fingerprint\n"
        "from core.common.passes.cleanup.no_ops import REMOVE_NO_OPS\n"
        "print(fingerprint(REMOVE_NO_OPS.run))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fingerprint(REMOVE_NO_OPS.run)


class Keeping(nn.Module):
    """Layers that write into what they hold, where they are told to."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        for name, tensor in (("table", torch.randn(10, 4)), ("mean", torch.zeros(4)), ("var", torch.ones(4))):
            self.register_buffer(name, tensor)

    def forward(self, ids: Tensor) -> Tensor:
        x = nn.functional.embedding(ids, self.table, max_norm=0.5 if self.writes else None)
        return nn.functional.batch_norm(x, self.mean, self.var, training=self.writes)


@pytest.mark.parametrize("writes", [True, False])
def test_bounded_embeddings_and_running_statistics_are_writes(writes: bool) -> None:
    module = trace(Keeping(writes), {"ids": torch.arange(8)}).module
    found = find_writes(module)
    written = [node.name for node in module.graph.find_nodes(op="placeholder") if found.writers(node)]
    assert len(written) == (3 if writes else 0), written
