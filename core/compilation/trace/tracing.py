"""Tracing: a module or function and its example inputs in, one `fx.GraphModule` with bound slots out.

Dynamo traces once, `fullgraph`. Its guards are answered here and now: weights, buffers and closures become constants of
the trace, declared inputs stay inputs, and conditions on symbolic sizes are kept, so that each bucket can be checked
against them (`TracedGraph.holds_for`).
"""

from __future__ import annotations

import re
import time
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.fx.experimental import _config
from torch.utils import _pytree as pytree

from core.common.node_meta import value_of
from core.common.passes.effects import written_args
from core.common.passes.view import kind, operand
from core.common.passes.writes import find_writes
from core.compilation.trace.flattening import flatten_constants, refused_class
from core.compilation.trace.state import Change, Snapshot, model_tensors
from core.compilation.trace.traced import ConstantSlot, InputSlot, OutputRef, OutputTree, SizeSlot, Slot, TracedGraph
from core.errors import TraceError


def trace(
    model: Callable[..., Any],
    inputs: Mapping[str, Tensor],
    *,
    dynamic: Mapping[str, Sequence[int]] | None = None,
    constants: Mapping[str, Any] | None = None,
    writable: Collection[str] = (),
    least: Literal[1, 2] = 2,
) -> TracedGraph:
    """Trace `model(**inputs, **constants)` as one graph, running nothing of it.

    dynamic: per input, the dimensions to keep symbolic where the model allows. constants: further arguments, fixed by
    the trace. writable: inputs that the model may write into, since their memory is the caller's own. least: 1 asks for
    a trace that also serves sizes of 1, where the model does the same there, which becomes a condition like others (but
    for what it decides by the strides of a copy, of which torch tells nothing); the inputs themselves must be larger
    for that. Raises `TraceError` with Dynamo's reason and the user code's place if
    the model breaks the graph or returns something that is not a tree of tensors.
    """
    start = time.perf_counter()
    capture = _Capture(inputs, writable)
    for name, dims in (dynamic or {}).items():
        for dim in dims:
            torch._dynamo.maybe_mark_dynamic(inputs[name], dim)
            if inputs[name].shape[dim] < 2:
                least = 2  # it is fixed at this size
    step = _fresh_step(model, dict(constants or {}))
    state = Snapshot(model)
    # Without duck shaping each dimension gets a symbol of its own; sizes that are equal by chance stay independent.
    from_one = least == 1 and hasattr(_config, _FROM_ONE)
    shapes = {"use_duck_shape": False, **({_FROM_ONE: True} if from_one else {})}
    with torch.no_grad(), _SHAPES.patch(**shapes), _settings():
        try:
            result = torch.compile(step, backend=capture.backend, fullgraph=True)(**inputs)
        except Exception as error:
            # What our own backend raises arrives wrapped by Dynamo.
            inner = getattr(error, "inner_exception", error)
            if not isinstance(inner, TraceError):
                inner = refused_class(model_tensors(model), str(error)) or _trace_error(model, error)
            raise inner from error
        else:
            names = {id(tensor): path for path, tensor in model_tensors(model)}
            return capture.finish(_name(model), result, state.changes(), start, names)
        finally:
            state.restore()
            _forget(step, capture)


def _forget(step: Callable[..., Any], capture: _Capture) -> None:
    """Take from Dynamo what it keeps for good: the compiled code of `step`, and the backend with all it captured."""
    torch._C._dynamo.eval_frame.reset_code(step.__code__)
    vars(capture).clear()


_SIZE = re.compile(r"\.size\(\)\[(\d+)\]$")  # how Dynamo names the source of a size
_SHAPES: Any = _config  # torch installs `patch` on its config modules at run time
_FROM_ONE = "backed_size_oblivious"
"""Torch's setting under which a size may turn out to be 1, and code that asks leaves a guard.

Without it sizes are taken to be 2 and more, and such code leaves no trace of having asked."""
_DYNAMO = {"automatic_dynamic_shapes": False, "assume_static_by_default": True, "suppress_errors": False}
_WASTE = {"guard_nn_modules": False, "run_gc_after_compile": False}
"""What costs time for nothing here: no guard is ever asked, and captures begin with a collection."""


def _settings() -> Any:
    """Return the settings of a trace, to be entered; those that not every torch has where it has them."""
    config: Any = torch._dynamo.config
    return config.patch(_DYNAMO | {name: value for name, value in _WASTE.items() if hasattr(config, name)})


def _fresh_step(model: Callable[..., Any], constants: dict[str, Any]) -> Callable[..., Any]:
    """Return `model(**kwargs, **constants)` as a function with a code object of its own.

    Dynamo keeps compiled code and its recompile count per code object: shared ones would reach the limit after a few
    programs and keep every traced model alive.
    """

    def step(**inputs: Any) -> Any:
        return model(**inputs, **constants)

    fresh = types.FunctionType(step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__)
    return fresh


class _Capture:
    """The Dynamo backend of one trace: keeps the graph and returns stand-ins instead of computing."""

    def __init__(self, inputs: Mapping[str, Tensor], writable: Collection[str]) -> None:
        self._tensors = inputs
        self._writable = frozenset(writable)
        self._inputs = {id(tensor): name for name, tensor in inputs.items()}
        self.used: set[str] = set()
        self.graph: fx.GraphModule | None = None
        self.slots: tuple[Slot, ...] = ()
        self.symbols: dict[Any, SizeSlot] = {}
        self.shape_env: Any = None
        self.fakes: tuple[Tensor, ...] = ()
        self.code: tuple[types.CodeType, ...] = ()
        self.literals: tuple[Tensor, ...] = ()
        self._outputs: list[Tensor] = []

    def backend(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., list[Tensor]]:
        self.graph = graph
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        for name, tensor in self._tensors.items():
            self._note_symbols(name, tensor)
        self.slots = tuple(self._slot(node, example) for node, example in zip(nodes, examples, strict=True))
        outputs: Any = graph.graph.output_node().args[0]
        for node in outputs:
            if not isinstance(value_of(node), Tensor):
                raise TraceError(
                    "tracing a model whose output holds a size or a number computed from its inputs",
                    found=f"graph output {node} is no tensor",
                    remedy="return tensors only; read sizes off the inputs",
                )
        self._refuse_written_inputs(nodes, examples)
        _note_squeezes(graph)
        self.code = tuple(dict.fromkeys(torch._guards.TracingContext.get_traced_code() or ()))
        held = (getattr(graph, str(node.target), None) for node in graph.graph.find_nodes(op="get_attr"))
        self.literals = tuple(value for value in held if isinstance(value, Tensor))
        # Kept apart from the graph: passes may put nodes without metadata in the outputs' place.
        self.fakes = tuple(map(value_of, outputs))
        # Stand-ins with identities of their own: Dynamo builds the model's output structure around them.
        self._outputs = [torch.empty(0) for _ in outputs]
        return lambda *_: self._outputs

    def _refuse_written_inputs(self, nodes: Sequence[fx.Node], examples: Sequence[Any]) -> None:
        for node, example in zip(nodes, examples, strict=True):
            # A fake tensor counts writes as a real one does, those through views included.
            name = self._inputs.get(id(example))
            if name is not None and name not in self._writable and value_of(node)._version > 0:
                raise _written_input(name)

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
        fake = value_of(node)
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

    def finish(
        self, name: str, result: Any, changes: Sequence[Change], start: float, names: Mapping[int, str]
    ) -> TracedGraph:
        """Return the traced graph; raise `TraceError` where the model keeps state that a graph would not repeat."""
        if self.graph is None:
            raise TraceError(
                f"tracing {name}",
                found="it runs no torch operation on its inputs",
                remedy="pass a module or function that computes with the declared inputs",
            )
        self._refuse_writes_to_inputs()
        repeated = {self._repeated(change) for change in changes}
        least = self._take_ranges()
        slots = flatten_constants(self.graph, self.slots, names)
        return TracedGraph(
            module=self.graph,
            slots=slots,
            output=self._output_tree(result, repeated),
            outputs=self.fakes,
            shapes={name: tuple(tensor.shape) for name, tensor in self._tensors.items() if name in self.used},
            symbols=self.symbols,
            least=least,
            shape_env=self.shape_env,
            elapsed_s=time.perf_counter() - start,
            code=self.code,
            literals=self.literals,
        )

    def _take_ranges(self) -> dict[Any, int]:
        """Return the smallest size that each symbol may be; from here on, it counts as 2 and more.

        Passes are to find what they find in any trace: what they ask is about the graph, not about the model.
        """
        from torch.utils._sympy.numbers import int_oo  # imports sympy, which only who traces has loaded
        from torch.utils._sympy.value_ranges import ValueRanges

        least = {symbol: max(int(self.shape_env.var_to_range[symbol].lower), 1) for symbol in self.symbols}
        for symbol in self.symbols:
            self.shape_env._update_var_to_range(symbol, ValueRanges(2, int_oo))
        # What was asked while tracing is kept under this number; with torch 2.11 the answers would outlive the ranges.
        if self.symbols:
            self.shape_env._version_counter += 1
        return least

    def _repeated(self, change: Change) -> int:
        """Return the graph output that a changed attribute now names, if the graph itself repeats the change.

        `self.count += 1` writes into the tensor and assigns the same tensor again: the write is in the graph.
        """
        index = next((i for i, output in enumerate(self._outputs) if output is change.after), -1)
        if index >= 0 and self.graph is not None:
            outputs: Any = self.graph.graph.output_node().args[0]
            placeholders = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
            values = dict(zip(placeholders, self.slots, strict=True))
            for written in written_args(outputs[index]):
                slot = values.get(written)
                if isinstance(slot, ConstantSlot) and slot.value is change.before:
                    return index
        raise TraceError(
            f"tracing a model that assigns to {change.place}",
            found="what a forward assigns happens once, while tracing; a captured graph would not repeat it",
            remedy="keep state in a buffer and write into it in place (buffer.copy_(new)), or move it out of forward",
        )

    def _refuse_writes_to_inputs(self) -> None:
        assert self.graph is not None
        writes = find_writes(self.graph)
        for node, slot in zip(self.graph.graph.find_nodes(op="placeholder"), self.slots, strict=True):
            if isinstance(slot, InputSlot) and slot.name not in self._writable and writes.writers(node):
                raise _written_input(slot.name)

    def _output_tree(self, result: Any, repeated: set[int]) -> OutputTree:
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
        if {ref.index for ref in refs if ref.index >= 0} | repeated != set(positions.values()) | repeated:
            error = TraceError(
                "tracing a model that keeps a computed tensor",
                found="besides its output it assigns one to an attribute or puts it into a list or dict, which a "
                "captured graph would not repeat; an empty stand-in may be there now",
                remedy="write into a buffer in place (buffer.copy_(new)), or return the tensor; or load the model anew "
                "and run it with mode 'off' or 'segmented'",
            )
            error.spoiled = True
            raise error
        return OutputTree(tuple(refs), spec)


def _note_squeezes(graph: fx.GraphModule) -> None:
    """Have each size that is squeezed leave a guard: one of 1 would go, and what the model does next may differ.

    Of torch's ops whose outcome depends on a size of 1, these alone leave none.
    """
    for node in graph.graph.nodes:
        if kind(node) != "squeeze" and node.target != "squeeze_":
            continue
        source, dims = value_of(operand(node, 0, "input")), operand(node, 1, "dim")
        if not isinstance(source, Tensor):
            continue
        for dim in range(source.dim()) if dims is None else dims if isinstance(dims, (tuple, list)) else (dims,):
            if isinstance(source.shape[dim], torch.SymInt):
                bool(source.shape[dim] != 1)  # asking is what records it


def _name(model: Callable[..., Any]) -> str:
    return type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", repr(model))


def _written_input(name: str) -> TraceError:
    return TraceError(
        f"tracing a model that writes into its declared input {name!r}",
        found="a program runs on its own copy of the inputs, so the caller would not see the write",
        remedy="make the tensor a buffer of the model (it is then bound once), or copy before writing",
    )


def _trace_error(model: Callable[..., Any], error: Exception) -> TraceError:
    text = str(error).split("\n\nSet TORCHDYNAMO_VERBOSE")[0].strip() or type(error).__name__
    faked = re.search(r"unsupported operator: ([\w.]+)\.\w+", text)
    if faked is not None:
        _, called, place = text.partition("from user code:")
        op = faked[1].replace(".", "::", 1)
        where = f", called here:{place}" if called else ""
        return TraceError(
            f"tracing {_name(model)} as one graph",
            found=f"the op {op} has no fake kernel, which tracing runs in its place{where}",
            remedy=f"declare one (docs/fakes.md; torch.library.register_fake({op!r}, …) for one process), or run this "
            "phase with mode 'off' (eager)",
        )
    return TraceError(
        f"tracing {_name(model)} as one graph",
        found=f"{type(error).__name__}: {text}",
        remedy="mend the place named above, or run this phase with mode 'off' (eager)",
    )
