"""The lowering `inductor`, for devices that torch's own compiler makes kernels for."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from core.common.graphs.weak import overlaps
from core.common.lowering import FlatCallable, LoweringRequest, Lowerings, inline
from core.common.node_meta import ATEN, TRACED
from core.common.passes.writes import find_writes
from core.errors import LoweringError


def inductor(request: LoweringRequest) -> FlatCallable:
    """Compile the graph with Inductor for the sizes of the example inputs.

    Sizes become constants first: Inductor's code for fixed shapes is faster, and each bucket has its own program.
    """
    graph, kept = specialize(request.graph, request.example_inputs)
    compiled = compile_fixed(graph, [request.example_inputs[i] for i in kept])

    def call(*args: Any) -> tuple[Tensor, ...]:
        return compiled(*[args[i] for i in kept])

    return call


def compile_fixed(
    graph: fx.GraphModule, examples: list[Tensor], *, compiler: Callable[..., Any] | None = None
) -> FlatCallable:
    """Compile a graph whose placeholders are all tensors, with the shapes, strides and dtypes of these examples at each
    call.

    compiler: takes the graph and fake inputs, as Inductor does and as compilers that stand on it do; None for Inductor,
    which is imported here alone, since half of the start of a process goes to it. Raises `LoweringError` where examples
    share memory that the graph writes.
    """
    if compiler is None:
        compiler = torch._inductor.compile
    refuse_shared_writes(graph, examples)
    # Inductor's on-disk cache needs a shape environment, even if no size is symbolic.
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    # From real tensors AOTAutograd would make fakes with symbolic sizes, whatever the shape environment.
    fakes: list[Any] = [mode.from_tensor(example) for example in examples]
    with torch.no_grad(), tracing(TracingContext(mode)), quoted_libraries():
        compiled: Any = compiler(graph, fakes)

    def call(*args: Any) -> tuple[Tensor, ...]:
        return tuple(compiled(*args))

    return call


@contextmanager
def quoted_libraries() -> Iterator[None]:
    """Have Inductor link where torch lies below a folder with a space: it quotes headers' folders only."""
    if shlex.quote(torch.__file__) == torch.__file__:
        yield
        return
    from torch.utils import cpp_extension

    plain = cpp_extension.TORCH_LIB_PATH
    cpp_extension.TORCH_LIB_PATH = shlex.quote(plain)
    try:
        yield
    finally:
        cpp_extension.TORCH_LIB_PATH = plain


def refuse_shared_writes(graph: fx.GraphModule, examples: list[Tensor]) -> None:
    """Refuse a graph that writes memory which it also reads through another input.

    Inductor assumes that inputs do not overlap, and its cache may return code compiled for inputs that do not.
    """
    shared = overlaps(examples)
    if not shared:
        return
    writes, nodes = find_writes(graph), graph.graph.find_nodes(op="placeholder")
    for one, other, _ in shared:
        if writes.writers(nodes[one]) or writes.writers(nodes[other]):
            raise LoweringError(
                "lowering by 'inductor'",
                found=f"inputs {nodes[other].name} and {nodes[one].name} share memory, and one of them is written",
                remedy="use lowering 'inline'",
            )


def specialize(graph: fx.GraphModule, examples: tuple[Any, ...]) -> tuple[fx.GraphModule, list[int]]:
    """Replace symbolic sizes by the examples' ints; return the graph and the indices of the placeholders kept.

    Raises `LoweringError` for a placeholder that holds several tensors.
    """
    kept = []
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for index, (node, example) in enumerate(zip(nodes, examples, strict=True)):
        if isinstance(example, Tensor):
            kept.append(index)
            continue
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(example)):
            raise LoweringError(
                f"fixing the sizes of a graph that takes {node.name}",
                found=f"it is a {type(example).__name__} that holds tensors: they would become constants",
                remedy="hand tensors over one by one, or use lowering 'inline'",
            )
        constant = dict.fromkeys([node], example)
        for user in list(node.users):
            user.args = fx.map_arg(user.args, partial(_replace, constant))
            user.kwargs = fx.map_arg(user.kwargs, partial(_replace, constant))
        graph.graph.erase_node(node)
    for node in graph.graph.nodes:
        for key in (TRACED, ATEN):  # symbolic metadata of the trace no longer holds
            node.meta.pop(key, None)
    graph.recompile()
    return graph, kept


def _replace(constants: Mapping[fx.Node, Any], node: fx.Node) -> Any:
    return constants.get(node, node)


INLINE_AND_INDUCTOR = Lowerings(
    available=MappingProxyType({"inline": inline, "inductor": inductor}),
    default="inline",
    any_size=frozenset({"inline"}),
)
"""For devices that Inductor generates code for, with a graph backend that captures kernels, not dispatched ops."""
