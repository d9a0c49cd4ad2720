"""Ops that write, and graphs of them: traced, made functional and put in place again, each compared with the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from core.common.passes.effects import written_args
from core.common.passes.functional.reinplace import Reinplaced, reinplace
from core.common.passes.functional.updates import VIEWS
from core.common.passes.functional.wrapped import FUNCTIONALIZED
from core.common.passes.pass_guards import Form
from core.compilation.rewrite.aten import to_functional
from core.compilation.trace.tracing import trace
from core.verify.execution import Run, run_graph

LIBRARY = torch.library.Library("reinplace_test", "DEF")
FORMS: tuple[Form, ...] = ("v1", "v2")
aten = torch.ops.aten


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    tags: tuple[torch.Tag, ...] = (),
    overload: str = "default",
) -> Any:
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=tags)
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"reinplace_test::{name}", fake, lib=LIBRARY)
    return getattr(getattr(torch.ops.reinplace_test, name.partition(".")[0]), overload)


def _mix(first: Tensor, second: Tensor) -> Tensor:
    first.mul_(2).add_(1)
    second.mul_(3).sub_(1)
    return first.sum() - second.sum()


def _store(key: Tensor, cache: Tensor, slots: Tensor, out: Tensor) -> None:
    cache[slots] = key
    out.copy_(cache.cumsum(0)[slots])


def _each(values: list[Tensor], by: Tensor) -> None:
    for value in values:
        value.add_(by)


def _some(value: Tensor | None, other: Tensor) -> None:
    other.add_(1)
    if value is not None:
        value.add_(other)


INC = define("inc(Tensor(a!) x, Tensor by) -> ()", lambda x, by: (x.add_(by), None)[1], lambda x, by: None)
OWN = define("own(Tensor(a!) x) -> ()", lambda x: (x.mul_(2).add_(1), None)[1], lambda x: None)
MIX = define("mix(Tensor(a!) q, Tensor(b!) k) -> Tensor", _mix, lambda q, k: q.new_empty(()))
STORE = define("store(Tensor k, Tensor(a!) cache, Tensor slots, Tensor(b!) out) -> ()", _store, lambda *_: None)
EACH = define("each(Tensor(a!)[] xs, Tensor by) -> ()", _each, lambda xs, by: None)
SOME = define("some(Tensor(a!)? x, Tensor(b!) y) -> ()", _some, lambda x, y: None)
TWO = define(
    "two(Tensor(a!) x, *, float by=1.0) -> (Tensor, Tensor)",
    lambda x, by=1.0: (x.clone(), x.add_(by).clone()),
    lambda x, by=1.0: (torch.empty_like(x), torch.empty_like(x)),
)


@dataclass(frozen=True)
class Fixed:
    """A graph that was made functional and fixed. copies: its nodes that copy a value."""

    module: fx.GraphModule
    done: Reinplaced
    copies: tuple[str, ...]

    @property
    def reasons(self) -> str:
        return "; ".join(miss.reason for miss in self.done.clones)


def fix(
    model: Callable[..., Any],
    inputs: Mapping[str, Tensor],
    form: Form,
    *,
    change: Callable[[fx.GraphModule], None] | None = None,
    **options: Any,
) -> Fixed:
    """Trace, functionalise and fix; outputs and all that is written must be equal in every bit after each step.

    change: rewrites the functional graph before it is fixed, without a change of what it computes.
    """
    graph = trace(model, inputs, **options)
    values = graph.values(inputs)
    wanted = run_graph(graph.module, values)
    functional = to_functional(graph.module, form)
    assert updates(functional) == []
    same(run_graph(functional, values), wanted)
    if change is not None:
        change(functional)
        functional.recompile()
        same(run_graph(functional, values), wanted)
    done = reinplace(functional)
    functional.graph.lint()
    same(run_graph(functional, values), wanted)
    return Fixed(functional, done, tuple(copying(functional)))


def same(got: Run, wanted: Run) -> None:
    assert len(got.outputs) == len(wanted.outputs)
    assert all(torch.equal(a, b) for a, b in zip(got.outputs, wanted.outputs, strict=True))
    assert got.written.keys() == wanted.written.keys()
    assert all(torch.equal(got.written[name], wanted.written[name]) for name in wanted.written)


def updates(module: fx.GraphModule) -> list[str]:
    """Name the nodes that write, but for the copies into inputs that end a functional graph."""
    owned = ("placeholder", "get_attr")
    writing = [n for n in module.graph.nodes if written_args(n)]
    return [n.name for n in writing if n.target is not aten.copy_.default or n.args[0].op not in owned]


COPIES = (aten.clone.default, aten.copy_.default, *FUNCTIONALIZED, *VIEWS)
UPDATES = ("index_put", "index_copy", "index_add")


def copying(module: fx.GraphModule) -> list[str]:
    """Name the nodes that copy a value, updates that are still functional included."""
    names = {node: str(getattr(node.target, "__name__", "")).partition(".")[0] for node in module.graph.nodes}
    return [node.name for node, name in names.items() if node.target in COPIES or name in UPDATES]


def calls(module: fx.GraphModule, target: Any) -> int:
    return sum(node.target is target for node in module.graph.nodes)
