"""Tracing: a module or function and its example inputs in, one `fx.GraphModule` with bound slots out.

Dynamo traces once, `fullgraph`. Its guards are answered here and now: weights, buffers and closures become constants of
the trace, declared inputs stay inputs, and conditions on symbolic sizes are kept, so that each bucket can be checked
against them (`TracedGraph.holds_for`).
"""

from __future__ import annotations

import re
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental import _config
from torch.utils import _pytree as pytree

from core.errors import CaptureError, TraceError


@dataclass(frozen=True, slots=True)
class InputSlot:
    """A placeholder that receives a declared input."""

    name: str


@dataclass(frozen=True, slots=True)
class ConstantSlot:
    """A placeholder bound once: a weight, a buffer, a cache or another tensor the model closes over."""

    value: Any


@dataclass(frozen=True, slots=True)
class SizeSlot:
    """A placeholder that receives the size of one dimension of a declared input."""

    name: str
    dim: int


Slot = InputSlot | ConstantSlot | SizeSlot


@dataclass(frozen=True, slots=True)
class OutputRef:
    """Where one leaf of the model's output comes from: graph output `index`, declared input `name`, or a constant."""

    index: int = -1
    name: str = ""
    value: Any = None


@dataclass(frozen=True, slots=True)
class OutputTree:
    """Rebuilds the model's own output structure from the graph's flat outputs."""

    leaves: tuple[OutputRef, ...]
    spec: pytree.TreeSpec

    @property
    def is_single(self) -> bool:
        """True where the output is one tensor of the graph, so that there is nothing to rebuild."""
        return self.spec.is_leaf() and self.leaves[0].index >= 0

    def rebuild(self, outputs: Sequence[Tensor], inputs: Mapping[str, Tensor]) -> Any:
        """Return the structure the model would have returned."""
        if self.is_single:
            return outputs[self.leaves[0].index]
        leaves = [
            outputs[ref.index] if ref.index >= 0 else inputs[ref.name] if ref.name else ref.value for ref in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedGraph:
    """A traced model. module: the Dynamo graph. slots: what each placeholder is bound to, in order.

    outputs: the graph's outputs as fake tensors. shapes: of the inputs that the model looks at, when traced. symbols:
    which size of which input each symbol of shape_env stands for.
    """

    module: fx.GraphModule
    slots: tuple[Slot, ...]
    output: OutputTree
    outputs: tuple[Tensor, ...]
    shapes: Mapping[str, tuple[int, ...]]
    symbols: Mapping[Any, SizeSlot]
    shape_env: Any
    elapsed_s: float

    def values(self, inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """Return the placeholders' values for these inputs, in order; sizes as ints."""
        return tuple(self._value(slot, inputs) for slot in self.slots)

    @staticmethod
    def _value(slot: Slot, inputs: Mapping[str, Tensor]) -> Any:
        if isinstance(slot, ConstantSlot):
            return slot.value
        tensor = inputs[slot.name]
        return tensor if isinstance(slot, InputSlot) else tensor.shape[slot.dim]

    def holds_for(self, inputs: Mapping[str, Tensor]) -> str | None:
        """Return None if the trace is valid for inputs of these shapes, else the condition that fails."""
        symbolic = {(slot.name, slot.dim) for slot in self.symbols.values()}
        for name, shape in self.shapes.items():
            for dim, (traced, actual) in enumerate(zip(shape, inputs[name].shape, strict=True)):
                if traced != actual and (name, dim) not in symbolic:
                    return f"{name} was fixed at size {traced} in dimension {dim}"
        return self._out_of_range(self._sizes(inputs)) or self.branches_differ(inputs)

    def _out_of_range(self, sizes: Mapping[Any, int]) -> str | None:
        for symbol, size in sizes.items():
            bounds = self.shape_env.var_to_range.get(symbol)
            if bounds is not None and not bounds.lower <= size <= bounds.upper:
                slot = self.symbols[symbol]
                return f"{slot.name} has size {size} in dimension {slot.dim}, traced for {bounds.lower} and up"
        return None

    def branches_differ(self, inputs: Mapping[str, Any]) -> str | None:
        """Return None if the model takes the same way for these sizes as when traced, else the condition that differs.

        Unlike `holds_for` this does not ask whether the trace may run at these sizes, but whether a run at larger ones
        stands for them: padding must not change which branch is taken.
        """
        if self.shape_env is None:
            return None
        sizes = self._sizes(inputs)
        for guard in self.shape_env.guards:
            if guard.expr.xreplace(sizes) != True:  # noqa: E712  # a sympy relation that stays open is not True
                return f"the model branches on a size: {guard.expr}"
        for symbol, replacement in self.shape_env.replacements.items():
            if symbol in sizes and replacement.xreplace(sizes) != sizes[symbol]:
                return f"the model ties sizes together: {symbol} = {replacement}"
        return None

    def _sizes(self, inputs: Mapping[str, Any]) -> dict[Any, int]:
        return {symbol: inputs[slot.name].shape[slot.dim] for symbol, slot in self.symbols.items()}

    def crop(self, inputs: Mapping[str, Any]) -> list[tuple[slice, ...]]:
        """Return the part of each graph output that belongs to inputs of these shapes, when run at larger ones.

        A dimension of an output is cut where its size is that of a symbolic dimension. Sizes computed from one (as of a
        flattened tensor) do not tell where padding lies: these raise `CaptureError`.
        """
        sizes = self._sizes(inputs)
        return [tuple(self._cut(size, sizes) for size in fake.shape) for fake in self.outputs]

    @staticmethod
    def _cut(size: Any, sizes: Mapping[Any, int]) -> slice:
        expression = getattr(getattr(size, "node", None), "expr", None)
        if expression is None or not expression.free_symbols:
            return slice(None)
        if expression not in sizes:
            raise CaptureError(
                "padding the inputs",
                found=f"an output has size {expression} in one dimension: where padding lies in it is unknown",
                remedy="fill a bucket exactly, or return tensors whose dimensions are those of the inputs",
            )
        return slice(sizes[expression])


def trace(
    model: Callable[..., Any], inputs: Mapping[str, Tensor], *, dynamic: Mapping[str, Sequence[int]] | None = None
) -> TracedGraph:
    """Trace `model(**inputs)` as one graph, running nothing of it.

    dynamic: per input, the dimensions to keep symbolic where the model allows. Raises `TraceError` with Dynamo's reason
    and the user code's place if the model breaks the graph or returns something that is not a tree of tensors.
    """
    start = time.perf_counter()
    capture = _Capture(inputs)
    for name, dims in (dynamic or {}).items():
        for dim in dims:
            torch._dynamo.maybe_mark_dynamic(inputs[name], dim)
    step = _fresh_step(model)
    # Without duck shaping each dimension gets a symbol of its own; sizes that are equal by chance stay independent.
    with torch.no_grad(), _SHAPES.patch(use_duck_shape=False), torch._dynamo.config.patch(_DYNAMO):
        try:
            result = torch.compile(step, backend=capture.backend, fullgraph=True)(**inputs)
        except Exception as error:
            # What our own backend raises arrives wrapped by Dynamo.
            inner = getattr(error, "inner_exception", error)
            raise inner if isinstance(inner, TraceError) else _trace_error(model, error) from error
    if capture.graph is None:
        raise TraceError(
            f"tracing {_name(model)}",
            found="it runs no torch operation on its inputs",
            remedy="pass a module or function that computes with the declared inputs",
        )
    return TracedGraph(
        module=capture.graph,
        slots=capture.slots,
        output=capture.output_tree(result),
        outputs=capture.fakes,
        shapes={name: tuple(tensor.shape) for name, tensor in inputs.items() if name in capture.used},
        symbols=capture.symbols,
        shape_env=capture.shape_env,
        elapsed_s=time.perf_counter() - start,
    )


_SIZE = re.compile(r"\.size\(\)\[(\d+)\]$")  # how Dynamo names the source of a size
_SHAPES: Any = _config  # torch installs `patch` on its config modules at run time
_DYNAMO = {"automatic_dynamic_shapes": False, "assume_static_by_default": True, "suppress_errors": False}


def _fresh_step(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return `model(**kwargs)` as a function with a code object of its own.

    Dynamo keeps compiled code and its recompile count per code object: shared ones would reach the limit after a few
    programs and keep every traced model alive.
    """

    def step(**inputs: Any) -> Any:
        return model(**inputs)

    fresh = types.FunctionType(step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__)
    return fresh


class _Capture:
    """The Dynamo backend of one trace: keeps the graph and returns stand-ins instead of computing."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self._tensors = inputs
        self._inputs = {id(tensor): name for name, tensor in inputs.items()}
        self.used: set[str] = set()
        self.graph: fx.GraphModule | None = None
        self.slots: tuple[Slot, ...] = ()
        self.symbols: dict[Any, SizeSlot] = {}
        self.shape_env: Any = None
        self.fakes: tuple[Tensor, ...] = ()
        self._outputs: list[Tensor] = []

    def backend(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., list[Tensor]]:
        self.graph = graph
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        for name, tensor in self._tensors.items():
            self._note_symbols(name, tensor)
        self.slots = tuple(self._slot(node, example) for node, example in zip(nodes, examples, strict=True))
        outputs: Any = graph.graph.output_node().args[0]
        for node in outputs:
            if not isinstance(node.meta.get("example_value"), Tensor):
                raise TraceError(
                    "tracing a model whose output holds a size or a number computed from its inputs",
                    found=f"graph output {node} is no tensor",
                    remedy="return tensors only; read sizes off the inputs",
                )
        self._refuse_written_inputs(nodes, examples)
        # Kept apart from the graph: passes may put nodes without metadata in the outputs' place.
        self.fakes = tuple(node.meta["example_value"] for node in outputs)
        # Stand-ins with identities of their own: Dynamo builds the model's output structure around them.
        self._outputs = [torch.empty(0) for _ in outputs]
        return lambda *_: self._outputs

    def _refuse_written_inputs(self, nodes: Sequence[fx.Node], examples: Sequence[Any]) -> None:
        for node, example in zip(nodes, examples, strict=True):
            # A fake tensor counts writes as a real one does, those through views included.
            if id(example) in self._inputs and node.meta["example_value"]._version > 0:
                name = self._inputs[id(example)]
                raise TraceError(
                    f"tracing a model that writes into its declared input {name!r}",
                    found="a program runs on its own copy of the inputs, so the caller would not see the write",
                    remedy="make the tensor a buffer of the model (it is then bound once), or copy before writing",
                )

    def _note_symbols(self, name: str, tensor: Tensor) -> None:
        # Asked of Dynamo, not read off the placeholders: a model may look at nothing but an input's size. An input it
        # never looks at is unknown here, and may have any size.
        context: Any = torch._guards.TracingContext.get()
        known = context.tensor_to_context.get(tensor)
        if known is None:
            return
        self.used.add(name)
        sizes: Mapping[str, Any] = next(iter(known.shape_env_to_source_to_symbol_cache.values()), {})
        for source, size in sizes.items():
            match = _SIZE.search(source)
            if match is not None and getattr(size, "is_Symbol", False):
                # As first given, before replacements: so ties between sizes can be checked.
                self.shape_env = context.fake_mode.shape_env
                self.symbols.setdefault(size, SizeSlot(name, int(match[1])))

    def _slot(self, node: fx.Node, example: Any) -> Slot:
        if id(example) in self._inputs:
            return InputSlot(self._inputs[id(example)])
        fake: Any = node.meta["example_value"]
        if isinstance(fake, torch.SymInt):
            symbol = fake.node._expr
            if symbol not in self.symbols:
                raise TraceError(
                    f"tracing with the symbolic size {symbol}",
                    found="it belongs to none of the declared inputs",
                    remedy="declare the tensor it comes from as an input",
                )
            return self.symbols[symbol]
        return ConstantSlot(example)

    def output_tree(self, result: Any) -> OutputTree:
        leaves, spec = pytree.tree_flatten(result)
        positions = {id(tensor): index for index, tensor in enumerate(self._outputs)}
        refs = []
        for leaf in leaves:
            if id(leaf) in positions:
                refs.append(OutputRef(index=positions[id(leaf)]))
            elif id(leaf) in self._inputs:
                refs.append(OutputRef(name=self._inputs[id(leaf)]))
            elif leaf is None or isinstance(leaf, (int, float, bool, str, Tensor)):
                refs.append(OutputRef(value=leaf))
            else:
                raise TraceError(
                    f"tracing a model that returns {type(leaf).__name__!r}",
                    found="it is not a tree of tensors that torch.utils._pytree knows",
                    remedy="return tensors, tuples, dicts or a registered output class",
                )
        if {ref.index for ref in refs if ref.index >= 0} != set(positions.values()):
            raise TraceError(
                "tracing a model that keeps a computed tensor",
                found="besides its output it assigns one to an attribute or puts it into a list or dict, which a "
                "captured graph would not repeat; an empty stand-in is there now",
                remedy="write into a buffer in place (buffer.copy_(new)) or return the tensor, and load the model anew",
            )
        return OutputTree(tuple(refs), spec)


def _name(model: Callable[..., Any]) -> str:
    return type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", repr(model))


def _trace_error(model: Callable[..., Any], error: Exception) -> TraceError:
    text = str(error).split("\n\nSet TORCHDYNAMO_VERBOSE")[0].strip() or type(error).__name__
    return TraceError(
        f"tracing {_name(model)} as one graph",
        found=f"{type(error).__name__}: {text}",
        remedy="mend the place named above, or run this phase with mode 'off' (eager)",
    )
