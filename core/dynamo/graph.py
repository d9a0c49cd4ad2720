"""One graph of Dynamo on the way to callables: passes once, then implementations, lowering and capture per shape."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from core.common.lowering import FlatCallable, LoweringRequest
from core.common.passes.metadata import equalities_guarded
from core.compilation.implementations import choose_implementations
from core.compilation.rewriting import Rewriter
from core.compilation.shared_trace import copy_graph
from core.compilation.trace.positions import by_position
from core.compilation.trace.traced import ConstantSlot, InputSlot, OutputTree, TracedGraph
from core.dynamo.arguments import Arguments, Weights, fix_numbers, hint, sizes_of
from core.dynamo.captures import Captures, Run
from core.dynamo.original import SHARED, drop_idle_autocast
from core.errors import CoreError, one_line

if TYPE_CHECKING:
    from core.device import Device
    from core.dynamo.options import BackendOptions
    from core.dynamo.report import GraphAccount

_MAX_NUMBERS = 4
"""Sets of Python's floating numbers that a graph is rewritten for; further ones stay symbols, which few passes know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """The graph after the passes."""

    module: fx.GraphModule
    #: What passes added, as further arguments.
    added: tuple[Tensor, ...]
    #: The weights that lie in these, each with its address.
    places: tuple[tuple[int, int], ...] = ()
    #: Whether it still reads Python's floating numbers from its arguments. Inductor returns what it computes of these
    #: rounded to fp32.
    reads_numbers: bool = False

    def holds(self, args: Sequence[Any]) -> bool:
        """Tell whether the weights that passes have joined are still where they were joined."""
        return all(args[i].data_ptr() == address for i, address in self.places)


class CompiledGraph:
    """What Dynamo calls in place of a graph."""

    def __init__(
        self,
        graph: fx.GraphModule,
        examples: Sequence[Any],
        *,
        options: BackendOptions,
        device: Device,
        account: GraphAccount,
    ) -> None:
        """Run the passes; raise `CoreError` where they fail and strict asks for it.

        examples: the arguments of the first call, as Dynamo gives them to a backend.
        """
        self._original: FlatCallable = graph.forward
        self._graph = copy_graph(graph, lazy=True)  # kept as it was traced: other numbers need other rewrites
        drop_idle_autocast(self._graph)
        by_position(self._graph.graph)
        self._arguments = Arguments(self._graph, examples)
        self._options, self._device, self._account = options, device, account
        self._rewriter = Rewriter(device, options.switches, strict=options.strict, verify=options.verify)
        self._captures = Captures(device, account) if options.captures(device) else None
        self._lowering = device.lowerings.resolve(options.lowering)[0]
        account.device, account.lowering = device.name, self._lowering
        for note in device.lowerings.notes(options.lowering):
            account.note(note)
        self._joins_weights = True
        self._lock = RLock()
        self._runs: dict[tuple[Any, ...], tuple[_Form, Run]] = {}
        self._generic: dict[int, Run] = {}
        self._weights = {i: examples[i] for i in self._arguments.weights}
        self._sizes = sizes_of(examples, self._arguments.nodes)
        self._forms: dict[tuple[float, ...] | None, _Form] = {}
        numbers = self._arguments.number_key(examples)
        with equalities_guarded():  # Dynamo makes its guards after this returns
            self._form_of(numbers, [tuple(map(hint, examples))])
        self._weights.clear()  # the model's own, which may go before this graph does

    def __call__(self, *args: Any) -> Sequence[Tensor]:
        """Run the graph on these arguments; Dynamo has checked its guards."""
        arguments = self._arguments
        if arguments.written and arguments.shares_memory(args):
            return self.run_original(SHARED, args)
        key = (arguments.number_key(args), arguments.shape_key(args))
        known = self._runs.get(key)
        if known is None or not known[0].holds(args):
            known = self._prepare(key, args)
        form, run = known
        with torch.no_grad():
            try:
                result = run(*args, *form.added)
            except RuntimeError as error:
                self._blame(args, error)
                raise
        self._account.calls += 1
        return result

    def _blame(self, args: Sequence[Any], error: RuntimeError) -> None:
        """Raise what the graph's own ops say of arguments that its kernels failed on, where they fail, too."""
        if self._arguments.written or isinstance(error, torch.OutOfMemoryError):
            return
        try:
            self._original(*args)
        except RuntimeError as own:
            raise own from error

    def run_original(self, why: str, args: Sequence[Any]) -> Sequence[Tensor]:
        """Run the graph as Dynamo traced it, and count that."""
        self._account.originals[why] += 1
        return self._original(*args)

    def _prepare(self, key: tuple[Any, ...], args: Sequence[Any]) -> tuple[_Form, Run]:
        with self._lock:
            form = self._forms.get(key[0])
            if form is not None and not form.holds(args):
                self._account.note("weights that a pass had joined were moved or replaced: now they stay apart")
                self._joins_weights = False
                self._forms.clear()
                self._runs.clear()
                self._generic.clear()
            start = time.perf_counter()
            form = self._form_of(key[0], ())
            try:
                run = self._run_of(form, args)
            except CoreError as error:
                if self._options.strict:
                    raise
                why = f"{one_line(str(error))}"
                self._account.note(f"runs as it was traced: {why}")
                run = lambda *given: self.run_original(why, given[: len(args)])  # noqa: E731
            self._account.seconds += time.perf_counter() - start
            self._runs[key] = form, run
            return form, run

    def _form_of(self, numbers: tuple[float, ...], examples: Sequence[tuple[Any, ...]]) -> _Form:
        """Return the rewritten graph for these numbers."""
        wanted: tuple[float, ...] | None = numbers
        if numbers not in self._forms and len(self._forms) >= _MAX_NUMBERS:
            self._account.note(
                f"more than {_MAX_NUMBERS} sets of Python's floating numbers: they stay arguments, as it was traced"
            )
            wanted = None
        if wanted not in self._forms:
            self._forms[wanted] = self._rewrite(wanted, examples)
        return self._forms[wanted]

    def _rewrite(self, numbers: tuple[float, ...] | None, examples: Sequence[tuple[Any, ...]]) -> _Form:
        start = time.perf_counter()
        module = copy_graph(self._graph, lazy=True)
        if numbers:
            fix_numbers(module, dict(zip(self._arguments.numbers, numbers, strict=True)))
        known = self._weights if self._joins_weights else {}
        names = [node.name for node in module.graph.find_nodes(op="placeholder")]
        constants = Weights({names[i]: tensor for i, tensor in known.items()})
        traced = _traced(module, names, known)
        rewritten = self._rewriter.rewrite(traced, sizes=[self._sizes], examples=examples, constants=constants)
        module = rewritten.traced.module
        ops = choose_implementations(module, self._device.ops)
        self._account.passes, self._account.ops = rewritten.passes, ops
        self._account.seconds += time.perf_counter() - start
        added = [slot for slot in rewritten.traced.slots[len(names) :] if isinstance(slot, ConstantSlot)]
        parts = {id(part) for slot in added if slot.packing for part in slot.packing.present}
        places = tuple((i, tensor.data_ptr()) for i, tensor in known.items() if id(tensor) in parts)
        return _Form(
            module=module,
            added=tuple(slot.value for slot in added),
            places=places,
            reads_numbers=numbers is None and bool(self._arguments.numbers),
        )

    def _run_of(self, form: _Form, args: Sequence[Any]) -> Run:
        """Lower a graph for the shapes of these arguments, and capture it where the device does."""
        values = (*(arg.detach() if isinstance(arg, Tensor) else arg for arg in args), *form.added)
        lowerings = self._device.lowerings
        any_size = next(iter(sorted(lowerings.any_size)), None)
        shared = self._lowering in lowerings.any_size
        name = self._lowering
        if not shared and any_size is not None:
            many = len(self._runs) >= self._options.max_shapes
            if form.reads_numbers:
                self._account.note(f"numbers that stay arguments are computed with by lowering {any_size!r}")
            elif many:
                self._account.note(
                    f"more than {self._options.max_shapes} shapes: the others share one callable of lowering "
                    f"{any_size!r}"
                )
            if form.reads_numbers or many:
                name, shared = any_size, True
        lowered = self._generic.get(id(form)) if shared else None
        if lowered is None:
            lowered = self._lower(name, form.module, values)
            if shared:
                self._generic[id(form)] = lowered
        self._account.num_shapes += 1
        if self._captures is None:
            return lowered
        return self._captures.capture(lowered, values, self._arguments) or lowered

    def _lower(self, name: str, module: fx.GraphModule, values: tuple[Any, ...]) -> Run:
        request = LoweringRequest(graph=copy_graph(module), example_inputs=values, note=self._account.note)
        try:
            # Tensors made in inference mode could not be written outside of it.
            with torch.inference_mode(False), torch.no_grad():
                return self._device.lowerings.available[name](request)
        except CoreError:
            raise
        except Exception as error:
            from core.errors import LoweringError

            raise LoweringError(
                f"lowering {self._account.name} by {name!r}",
                found=f"{type(error).__name__}: {one_line(str(error))}",
                remedy="use options={'lowering': 'inline'} to go on without this compiler",
            ) from error


def _traced(module: fx.GraphModule, names: Sequence[str], known: dict[int, Tensor]) -> TracedGraph:
    """Return the graph as passes take it."""
    slots = [ConstantSlot(known[i]) if i in known else InputSlot(name) for i, name in enumerate(names)]
    return TracedGraph(
        module=module,
        slots=tuple(slots),
        output=OutputTree((), pytree.tree_structure(())),
        outputs=(),
        shapes={},
        symbols={},
        least={},
        shape_env=None,
        elapsed_s=0.0,
    )
