"""From a Dynamo graph to a graph of ATen ops, canonical and other custom ops kept whole, in-place writes kept in place.

Not functionalised unless passes ask for it: a functional graph copies whole caches at every write until a later pass
proves that it need not, and the analyses here (core/common/passes/writes.py) handle writes as they are. Only torch's
composite ops are decomposed, so that nodes no pass takes run on the same kernels as in eager mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.traceback import preserve_node_meta

from core.common.node_meta import value_of
from core.common.passes.effects import written_args
from core.common.passes.functional.updates import WAS_IN_PLACE
from core.common.passes.pass_guards import Form
from core.common.passes.sites import MADE_BY
from core.compilation.rewrite.functional import functionalized, wrapping
from core.errors import TraceError

# Metadata that passes put on nodes; torch itself keeps module paths and stack traces.
_MARKS = (MADE_BY,)


def to_aten(module: fx.GraphModule) -> fx.GraphModule:
    """Return the same computation in ATen ops, with the same placeholders in order and name, as flat outputs.

    module: a graph whose placeholders hold fake values (`meta["example_value"]`); it stays as it is. The new nodes hold
    theirs under `meta["val"]`. Sizes that are symbolic stay so. Raises `TraceError` with the op that fails.
    """
    return _to_aten(module, None)


def to_functional(module: fx.GraphModule, form: Form = "v2") -> fx.GraphModule:
    """Return the same in ATen ops that write nothing: an update returns a new value, copied into its input at the end.

    This is the form that AOTAutograd makes. form: which wrapper, `auto_functionalized` (v1) or
    `auto_functionalized_v2`, custom ops that write get. Nodes that were in-place calls are marked by `WAS_IN_PLACE`.
    `reinplace` is the way back. Raises `TraceError` too for an op that cannot be functionalised, and for inputs that
    share written memory.
    """
    with wrapping(form):
        return _to_aten(module, form)


def _to_aten(module: fx.GraphModule, form: Form | None) -> fx.GraphModule:
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    constants = list(dict.fromkeys(str(node.target) for node in module.graph.nodes if node.op == "get_attr"))
    examples = [value_of(node) for node in inputs]
    # Their own: torch's context may hold another one by now, left by a forward that makes fakes itself.
    mode = next((value.fake_mode for value in examples if isinstance(value, FakeTensor)), None)
    if mode is None or any(value is None for value in examples):
        unknown = [node.name for node, value in zip(inputs, examples, strict=True) if value is None]
        raise TraceError(
            "turning a graph into ATen ops",
            found=f"the placeholders {unknown or 'of the graph'} have no fake value",
            remedy="trace by core.compilation.trace.tracing.trace, or set node.meta['example_value']",
        )
    attributes = [_attribute(module, name) for name in constants]
    with _tracing(mode):
        fakes = [mode.from_tensor(a, static_shapes=True) if isinstance(a, Tensor) else a for a in attributes]
        interpreter = _Interpreter(module, dict(zip(constants, fakes, strict=True)), functional=form is not None)

        def run(*args: Any) -> Any:
            interpreter.attributes = dict(zip(constants, args[len(inputs) :], strict=True))
            return interpreter.run(*args[: len(inputs)])

        try:
            traced = run if form is None else functionalized(run, [*(node.name for node in inputs), *constants])
            graph: fx.GraphModule = make_fx(traced, tracing_mode="real")(*examples, *fakes)
        except TraceError:
            raise
        except Exception as error:
            node = interpreter.current
            raise TraceError(
                f"turning node {node} ({getattr(node, 'target', '')}) into ATen ops",
                found=f"{type(error).__name__}: {' '.join(str(error).split())[:500]}",
                remedy="disable the passes of stage aten (core passes lists them), or mend the op's fake kernel",
            ) from error
    return _rebound(module, graph, [node.name for node in inputs], dict(zip(constants, attributes, strict=True)))


class _Interpreter(fx.Interpreter):
    """Runs the graph under the tracer and copies the passes' marks from each node to the nodes made of it."""

    def __init__(self, module: fx.GraphModule, attributes: dict[str, Any], *, functional: bool) -> None:
        super().__init__(module)
        self.attributes = attributes
        self.current: fx.Node | None = None
        self._functional = functional

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        mode = get_proxy_mode()
        traced = None if mode is None else mode.tracer.graph
        last = None if traced is None else next(iter(reversed(traced.nodes)), None)
        result = super().run_node(n)
        marks = {mark: n.meta[mark] for mark in _MARKS if mark in n.meta}
        if self._functional and written_args(n):
            marks[WAS_IN_PLACE] = True
        if traced is not None and marks:
            for node in reversed(traced.nodes):
                if node is last:
                    break
                node.meta.update(marks)
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.attributes[str(target)]


@contextmanager
def _tracing(mode: FakeTensorMode) -> Iterator[None]:
    with ExitStack() as stack:
        for manager in (mode, torch.no_grad(), enable_python_dispatcher(), preserve_node_meta()):
            stack.enter_context(manager)
        yield


def _rebound(
    module: fx.GraphModule, graph: fx.GraphModule, names: list[str], attributes: dict[str, Any]
) -> fx.GraphModule:
    """Give the placeholders their names back, and constants their place as attributes."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    constants = dict(zip(placeholders[len(names) :], attributes.items(), strict=True))
    taken = {node.name for node in graph.graph.nodes}
    for node, name in zip(placeholders, names, strict=False):
        if node.name != name:
            if name in taken:  # taken by another node, which is renamed
                other = next(each for each in graph.graph.nodes if each.name == name)
                other._rename(f"{name}_")
            node._rename(name)
            node.target = name
    for index, (node, (_, value)) in enumerate(constants.items()):
        name = f"_core_constant_{index}"
        setattr(graph, name, value)
        with graph.graph.inserting_before(node):
            attribute = graph.graph.get_attr(name)
        attribute.meta = dict(node.meta)
        node.replace_all_uses_with(attribute)
        graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()
    return graph


def _attribute(module: fx.GraphModule, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value
