"""Running graphs on real values for verification, each time on tensors of their own.

Large models fit: only what a graph writes into is copied, and the fp64 run widens a weight where it is used and drops
it again. Decisions that a graph makes by comparing floats (the experts of a token) can be pinned to those of another
run. So a decision flipped by rounding neither hides nor fakes a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from core.common.numerics import Fp64Mode
from core.common.passes.sites import site_name
from core.common.passes.writes import find_writes
from core.errors import one_line

if TYPE_CHECKING:
    from core.common.passes.constants import Constants

NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Run:
    """The results of a run."""

    outputs: list[Any]
    #: Every input as the run left it, by the name of its placeholder.
    inputs: Mapping[str, Any]
    #: Of these, the inputs whose memory the graph writes.
    written: Mapping[str, Any]
    #: The integers and booleans that the graph computed from floats, by node name.
    decided: Mapping[str, Any]

    @property
    def results(self) -> list[Any]:
        """The outputs, then the written inputs."""
        return [*self.outputs, *self.written.values()]


class Watcher:
    """Observes a run; does nothing unless a subclass overrides it."""

    def before(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> None:
        """Called before a node runs; env holds the values that are still needed."""

    def after(self, node: fx.Node, value: Any) -> None:
        """Called with a node's value."""


class Place(Watcher):
    """Tracks the node that runs or failed; its text names the node, its op and its module."""

    def __init__(self) -> None:
        self._node: fx.Node | None = None

    def before(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> None:
        """Remember the node."""
        self._node = node

    @property
    def node(self) -> fx.Node | None:
        """The node that is running, or failed; None before the first."""
        return self._node

    def __str__(self) -> str:
        return "before its first node" if self._node is None else node_text(self._node)


def node_text(node: fx.Node) -> str:
    """Return a node's name, what it calls, and its module."""
    site, target = site_name(node), node._pretty_print_target(node.target)
    return f"node {node.name} ({target}){f' in {site}' if site != node.name else ''}"


class ReferenceMode(Fp64Mode):
    """Compute in fp64 on the CPU, whatever dtype and device the graph names, even for ops without an fp64 kernel."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run `func` with every device among its arguments replaced."""
        name = getattr(func, "__name__", "")
        if name in ("_grouped_mm", "grouped_mm"):
            return _grouped_mm(*args, **(kwargs or {}))
        if name == "histc" and not args[0].is_floating_point():  # an accelerator counts integers, the CPU does not
            counts: Tensor = func(args[0].double(), *args[1:], **(kwargs or {}))
            return counts.to(args[0].dtype)
        moved = {name: _cpu(value) for name, value in (kwargs or {}).items()}
        if "device" in moved:  # may be a string
            moved["device"] = torch.device("cpu")
        return super().__torch_function__(func, types, tuple(map(_cpu, args)), moved)


def _grouped_mm(
    rows: Tensor, matrices: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, **_: Any
) -> Tensor:
    """Multiply rows (T, K) up to offs[e] (E,) by matrices (E, K, N)[e], in order; without offs both have E groups."""
    if offs is None or rows.ndim != 2 or matrices.ndim != 3:
        if offs is not None:
            raise NotImplementedError(f"grouped products of rank {rows.ndim} by {matrices.ndim} in fp64")
        return rows @ matrices
    out = rows.new_zeros(rows.shape[0], matrices.shape[-1])
    bounds = [0, *offs.tolist()]
    for index, matrix in enumerate(matrices):
        group = slice(bounds[index], bounds[index + 1])
        out[group] = rows[group] @ matrix + (0 if bias is None else bias[index])
    return out


def _cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


@dataclass(slots=True)
class Copies:
    """Copies tensors so that those sharing memory still do."""

    #: Copy to the host, floats widened to fp64.
    fp64: bool = False
    #: Copy to the host as they are.
    host: bool = False
    bases: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def of(self, value: Any) -> Any:
        """Return the value's copy; what is no tensor is returned as it is."""
        if not isinstance(value, Tensor):
            return value
        key = (value.untyped_storage()._cdata, value.dtype)
        if key not in self.bases:
            size = value.untyped_storage().nbytes() // value.element_size()
            base = value.detach().as_strided((size,), (1,), 0)
            self.bases[key] = (
                widened(base, copy=True) if self.fp64 else base.to("cpu" if self.host else base.device, copy=True)
            )
        return self.bases[key].as_strided(value.shape, value.stride(), value.storage_offset())


def widened(value: Any, *, copy: bool = False) -> Any:
    """Return a tensor on the CPU, floats as fp64 and complex numbers as complex128; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    wide = value.dtype
    if value.is_floating_point() and value.element_size() > 1:  # fp8 tensors are codes
        wide = torch.float64
    elif value.is_complex():
        wide = torch.complex128
    return value.detach().to("cpu", wide, copy=copy)


def run_graph(
    module: fx.GraphModule,
    values: Sequence[Any],
    *,
    fp64: bool = False,
    watchers: Sequence[Watcher] = (),
    pinned: Mapping[str, Any] = NOTHING,
    written: frozenset[str] | None = None,
) -> Run:
    """Run a graph on one value per placeholder; what it writes is copied, and all the rest is only read.

    - fp64: compute on the CPU in fp64.
    - pinned: by node name, integers or booleans that are taken instead of the node's own.
    - written: what `written_inputs` says, for graphs whose own targets do not tell.
    """
    written = written_inputs(module) if written is None else written
    inputs = own_inputs(module, values, fp64=fp64, written=written)
    lazy = frozenset(name for name, value in zip(inputs, values, strict=True) if fp64 and inputs[name] is value)
    attributes = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    interpreter = _Interpreter(module, Copies(fp64), lazy | (attributes if fp64 else written), watchers, pinned)
    with torch.no_grad(), ReferenceMode() if fp64 else nullcontext():
        result = interpreter.run(*inputs.values())
    kept = {name: inputs[name] for name in inputs if name in written}
    return Run(pytree.tree_leaves(result), inputs, kept, interpreter.decided)


def written_inputs(module: fx.GraphModule) -> frozenset[str]:
    """Return the names of the placeholders and attributes that a graph writes into."""
    writes = find_writes(module)
    nodes = [node for node in module.graph.nodes if node.op in ("placeholder", "get_attr")]
    return frozenset(
        node.name if node.op == "placeholder" else str(node.target) for node in nodes if writes.writers(node)
    )


def changing_nodes(module: fx.GraphModule) -> frozenset[str]:
    """Return the names of the nodes whose values lie in memory that the graph writes: they change after them."""
    writes = find_writes(module)
    changing = frozenset().union(*writes.written.values())
    return frozenset(node.name for node in module.graph.nodes if writes.of(node) & changing)


def own_inputs(
    module: fx.GraphModule, values: Sequence[Any], *, fp64: bool = False, written: frozenset[str]
) -> dict[str, Any]:
    """Return inputs for one run by placeholder name, copies where the graph writes them; fp64: copies are widened."""
    nodes = module.graph.find_nodes(op="placeholder")
    # The graph does not show inputs that share memory: copy those that share with a written one too.
    shared = {_memory(value) for node, value in zip(nodes, values, strict=True) if node.name in written}
    copies = Copies(fp64)
    return {
        node.name: copies.of(value) if node.name in written or _memory(value) in shared - {None} else value
        for node, value in zip(nodes, values, strict=True)
    }


def bind(module: fx.GraphModule, values: Sequence[Any], constants: Constants | None = None) -> dict[str, Any]:
    """Return the value of each placeholder by name, in order.

    - values: of the placeholders that the graph was traced with.
    - constants: hold the values of the placeholders that passes have appended.
    """
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    added = {} if constants is None else dict(constants.added)
    return {**dict(zip(names, values, strict=False)), **{name: added[name] for name in names[len(values) :]}}


def _memory(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


class _Interpreter(fx.Interpreter):
    """Runs a graph, telling its watchers."""

    def __init__(
        self,
        module: fx.GraphModule,
        copies: Copies,
        own: frozenset[str],
        watchers: Sequence[Watcher],
        pinned: Mapping[str, Any],
    ) -> None:
        """own: placeholders whose values are widened at each use, and attributes that are copied."""
        super().__init__(module)
        self._copies, self._own, self._watchers, self._pinned = copies, own, watchers, pinned
        self.decided: dict[str, Any] = {}

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        if not self._copies.fp64:
            return super().map_nodes_to_values(args, n)
        return fx.map_arg(args, self._wide)

    def _wide(self, node: fx.Node) -> Any:
        value = self.env[node]
        return widened(value) if node.op == "placeholder" and node.name in self._own else value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._copies.of(value) if target in self._own else value

    def run_node(self, n: fx.Node) -> Any:
        for watcher in self._watchers:
            watcher.before(n, self.env)
        value = super().run_node(n)
        if n.op.startswith("call_") and self._decides(n, value):
            if n.name in self._pinned:
                value = _pin(value, self._pinned[n.name])
            self.decided[n.name] = pytree.tree_map(lambda leaf: leaf.clone() if _is_exact(leaf) else None, value)
        for watcher in self._watchers:
            watcher.after(n, value)
        return value

    def _decides(self, node: fx.Node, value: Any) -> bool:
        """Tell whether a node makes integers or booleans of floats."""
        leaves = (value,) if isinstance(value, Tensor) else pytree.tree_leaves(value)
        return any(map(_is_exact, leaves)) and any(
            isinstance(given, Tensor) and given.is_floating_point()
            for source in node.all_input_nodes
            for given in pytree.tree_leaves(self.env.get(source))
        )


def _is_exact(value: Any) -> bool:
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def _pin(value: Any, decided: Any) -> Any:
    """Return the value with its integers and booleans replaced by those decided in another run."""

    def chosen(own: Any, other: Any) -> Any:
        alike = _is_exact(own) and _is_exact(other) and own.shape == other.shape and own.dtype == other.dtype
        return other.to(own.device) if alike else own

    leaves, spec = pytree.tree_flatten(value)
    others = pytree.tree_leaves(decided)
    if len(others) != len(leaves):  # a node of that name that does something else
        return value
    return pytree.tree_unflatten([chosen(own, other) for own, other in zip(leaves, others, strict=True)], spec)


def error_line(error: BaseException) -> str:
    """Return an error's type and text as one line, without what torch appends."""
    return f"{type(error).__name__}: {one_line(str(error))}"
