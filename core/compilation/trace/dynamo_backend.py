"""The Dynamo backend of one trace: keeps the graph that Dynamo made, and says which value each placeholder receives."""

from __future__ import annotations

import re
import time
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from core.common.node_meta import value_of
from core.common.passes.view import kind, operand
from core.common.passes.writes import find_writes
from core.compilation.trace.counters import Counted, Counter
from core.compilation.trace.flattening import flatten_constants
from core.compilation.trace.positions import by_position
from core.compilation.trace.side_effects import SideEffect, side_effects
from core.compilation.trace.traced import (
    ConstantSlot,
    CounterSlot,
    InputSlot,
    OutputRef,
    OutputTree,
    SizeSlot,
    Slot,
    TracedGraph,
)
from core.errors import TraceError

_SIZE = re.compile(r"\.size\(\)\[(\d+)\]$")  # how Dynamo names the source of a size


class Capture:
    """The Dynamo backend of one trace: keeps the graph and returns stand-ins instead of computing."""

    def __init__(
        self,
        model: Callable[..., Any],
        inputs: Mapping[str, Tensor],
        writable: Collection[str],
        counted: Counted,
    ) -> None:
        self._model = model
        self._counted = counted
        #: the integers that could be counted, where nothing else of Python's state is changed
        self.countable: Counted = {}
        self.counters: tuple[Counter, ...] = ()
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
        self._refuse_state(side_effects(self._model, dict(zip(nodes, examples, strict=True))))
        for name, tensor in self._tensors.items():
            self._note_symbols(name, tensor)
        self._refuse_unknown_numbers()
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
        by_position(graph.graph)
        _note_squeezes(graph)
        self.code = tuple(dict.fromkeys(torch._guards.TracingContext.get_traced_code() or ()))
        held = (getattr(graph, str(node.target), None) for node in graph.graph.find_nodes(op="get_attr"))
        self.literals = tuple(value for value in held if isinstance(value, Tensor))
        # Kept apart from the graph: passes may put nodes without metadata in the outputs' place.
        self.fakes = tuple(map(value_of, outputs))
        # Stand-ins with identities of their own: Dynamo builds the model's output structure around them.
        self._outputs = [torch.empty(0) for _ in outputs]
        return lambda *_: self._outputs

    def _refuse_state(self, effects: Sequence[SideEffect]) -> None:
        """Raise `TraceError` for Python state that the model changes, but for that which is counted."""
        changed = {effect.number[2]: effect for effect in effects if effect.number is not None}
        if len(changed) == len(effects):
            self.countable = {source: effect.number[:2] for source, effect in changed.items() if effect.number}
        for effect in effects:
            if effect.number is None or effect.number[2] not in self._counted or effect.after is None:
                raise _kept_state(effect)
        if self._counted:
            context: Any = torch._guards.TracingContext.get()
            self.shape_env = context.fake_mode.shape_env
            self.counters = tuple(self._counters(changed))

    def _counters(self, changed: Mapping[str, SideEffect]) -> Iterator[Counter]:
        from sympy import Symbol  # type: ignore[import-untyped]  # loaded by who traces

        for number, (source, (owner, name)) in enumerate(self._counted.items()):
            symbol = self.shape_env.source_to_var.get(source)
            if symbol is None:
                # The model does not read this value, but the values that it writes may depend on others.
                symbol = Symbol(f"unread_{number}", integer=True)
            after = changed[source].after if source in changed else symbol
            yield Counter(source=source, owner=owner, name=name, symbol=symbol, after=after)

    def _refuse_unknown_numbers(self) -> None:
        known = {*self.symbols, *(counter.symbol for counter in self.counters)}
        for counter in self.counters:
            if not counter.after.free_symbols <= known:
                raise _kept_state(SideEffect(counter.source, "by a number that is none of a declared input's sizes"))

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
                # The original expressions, before replacements, so that equalities between sizes can be checked.
                self.shape_env = context.fake_mode.shape_env
                self.symbols.setdefault(size, SizeSlot(name, int(match[1])))

    def _slot(self, node: fx.Node, example: Any) -> Slot:
        if id(example) in self._inputs:
            return InputSlot(self._inputs[id(example)])
        fake = value_of(node)
        if isinstance(fake, torch.SymInt):
            symbol = fake.node._expr
            counter = next((counter for counter in self.counters if counter.symbol == symbol), None)
            if counter is not None:
                return CounterSlot(counter.owner, counter.name)
            if symbol not in self.symbols:
                raise TraceError(
                    f"tracing with the symbolic size {symbol}",
                    found="it belongs to none of the declared inputs",
                    remedy="declare the tensor it comes from as an input",
                )
            return self.symbols[symbol]
        return ConstantSlot(example)

    def finish(self, name: str, result: Any, start: float, names: Mapping[int, str]) -> TracedGraph:
        """Return the traced graph; raise `TraceError` where it computes nothing or returns what no graph can."""
        if self.graph is None:
            raise TraceError(
                f"tracing {name}",
                found="it runs no torch operation on its inputs",
                remedy="pass a module or function that computes with the declared inputs",
            )
        self._refuse_writes_to_inputs()
        least = self._take_ranges()
        slots = flatten_constants(self.graph, self.slots, names)
        return TracedGraph(
            module=self.graph,
            slots=slots,
            output=self._output_tree(result),
            outputs=self.fakes,
            shapes={name: tuple(tensor.shape) for name, tensor in self._tensors.items() if name in self.used},
            symbols=self.symbols,
            least=least,
            shape_env=self.shape_env,
            elapsed_s=time.perf_counter() - start,
            code=self.code,
            literals=self.literals,
            counters=self.counters,
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
        # torch caches answers about sizes under this number; with torch 2.11 they would outlive the ranges.
        if self.symbols:
            self.shape_env._version_counter += 1
        return least

    def _refuse_writes_to_inputs(self) -> None:
        assert self.graph is not None
        writes = find_writes(self.graph)
        for node, slot in zip(self.graph.graph.find_nodes(op="placeholder"), self.slots, strict=True):
            if isinstance(slot, InputSlot) and slot.name not in self._writable and writes.writers(node):
                raise _written_input(slot.name)

    def _output_tree(self, result: Any) -> OutputTree:
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
                "tracing a model that returns an object with a tensor of its own",
                found="the tensor is no part of the tree that torch.utils._pytree makes of what the model returns",
                remedy="return it as an entry of a tuple, a dict or a registered output class",
            )
        return OutputTree(tuple(refs), spec)


def _kept_state(effect: SideEffect) -> TraceError:
    error = TraceError(
        f"tracing a model that assigns to {effect.place}",
        found=f"its forward changes {effect.place} ({effect.kind}), which no replay of a graph would"
        + (effect.line and f"\n\nfrom user code:\n  {effect.line}"),
        remedy="keep state in a buffer and write into it in place (buffer.copy_(new)), or move it out of forward; or "
        "run this phase with mode 'off' (eager)",
    )
    error.keeps_state = True
    return error


def _note_squeezes(graph: fx.GraphModule) -> None:
    """Add a guard for each size that is squeezed: a size of 1 would disappear, which may change the model's further
    course.

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


def _written_input(name: str) -> TraceError:
    return TraceError(
        f"tracing a model that writes into its declared input {name!r}",
        found="a program runs on its own copy of the inputs, so the caller would not see the write",
        remedy="make the tensor a buffer of the model (it is then bound once), or copy before writing",
    )
