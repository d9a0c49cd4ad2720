"""The forms of a graph after the passes on Dynamo's ops: functional where passes ask for it, then plain ATen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from core.common.passes.declaration import Pass
from core.common.passes.pass_guards import Form, Stage
from core.compilation.rewrite.aten import to_aten, to_functional
from core.errors import TraceError

_FORMS: tuple[Form, ...] = ("v1", "v2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """A graph in the form of a stage. refused: why it can't have that form; module is then unchanged."""

    stage: Stage
    form: Form
    module: fx.GraphModule
    refused: TraceError | None = None


def later_stages(
    passes: Sequence[Pass], module: fx.GraphModule, prepare: Callable[[fx.GraphModule], object]
) -> Iterator[Staged]:
    """Yield the graph for each stage after `torch` that one of the passes has; the caller rewrites it before the next.

    prepare: puts back the canonical ops that a device lacks, in place, before a graph is turned into ATen ops: patterns
    on ATen then see them as the model wrote them. Functional graphs come first, one for each form asked for, and leave
    a graph of ATen ops that writes in place. One that cannot have a form says why.
    Where no pass of stage `aten` has anything to do, the graph stays as it is, and these passes say so.
    """
    asked = {declared.stage for declared in passes}
    if asked <= {"torch"}:
        return
    if "functional" not in asked and not any(_may_match(each, module) for each in passes if each.stage == "aten"):
        yield Staged(stage="aten", form="v2", module=module)
        return
    prepare(module)
    is_aten = False
    forms = {
        declared.traits.form for declared in passes if declared.stage == "functional" and not declared.traits.closes
    }
    for form in _FORMS if "functional" in asked else ():
        if form not in (forms or {"v2"}):
            continue
        try:
            module, is_aten = to_functional(module, form), True
        except TraceError as error:
            yield Staged(stage="functional", form=form, module=module, refused=error)
        else:
            yield Staged(stage="functional", form=form, module=module)
    if "aten" in asked:
        try:
            module = module if is_aten else to_aten(module)
        except TraceError as error:
            yield Staged(stage="aten", form="v2", module=module, refused=error)
        else:
            yield Staged(stage="aten", form="v2", module=module)


def _may_match(declared: Pass, module: fx.GraphModule) -> bool:
    nothing = declared.guards.nothing
    return nothing is None or not nothing(module.graph)
