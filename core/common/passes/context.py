"""What a pass is given: the graph, the device's capabilities, its parameters, and analyses computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import fx
from torch.utils import _pytree as pytree

from core.common.node_meta import value_of
from core.common.passes.pass_guards import Guards, Scalar, Stage
from core.common.passes.values.sizes import expression, same_size
from core.common.passes.writes import find_writes
from core.errors import UsageError

if TYPE_CHECKING:
    from core.capabilities import Capabilities
    from core.common.passes.constants import Constants


def _order(module: fx.GraphModule) -> Mapping[fx.Node, int]:
    return {node: position for position, node in enumerate(module.graph.nodes)}


ANALYSES: Mapping[str, Callable[[fx.GraphModule], Any]] = MappingProxyType({"writes": find_writes, "order": _order})
"""The analyses by name: "writes" gives a `writes.Writes`, "order" the position of each node."""


def check_analyses(names: frozenset[str], asked: str) -> None:
    """Raise `UsageError` if one of the names is not an analysis."""
    unknown = sorted(names - ANALYSES.keys())
    if unknown:
        raise UsageError(
            f"analyses {unknown} for {asked}",
            found=f"the analyses are: {', '.join(sorted(ANALYSES))}",
            remedy="name only these",
        )


class Analyses:
    """The analyses of one graph, each computed when first asked for and kept until a pass invalidates it."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._known: dict[str, Any] = {}
        self.num_computed = 0

    def get(self, name: str) -> Any:
        """Return the analysis of that name for the graph as it was when the analysis was last invalid."""
        if name not in self._known:
            check_analyses(frozenset({name}), "a graph")
            self._known[name] = ANALYSES[name](self._module)
            self.num_computed += 1
        return self._known[name]

    def invalidate(self, preserved: frozenset[str] = frozenset()) -> None:
        """Forget all analyses but the preserved ones: the graph has changed."""
        self._known = {name: value for name, value in self._known.items() if name in preserved}


@dataclass(kw_only=True, slots=True)
class PassContext:
    """One pass on one graph. A pass rewrites `module.graph` in place and reads everything else."""

    module: fx.GraphModule
    stage: Stage = "torch"
    #: Name and owner of the pass.
    name: str = "pass"
    owner: str = "core"
    #: Passes named in this one's `after`, whose nodes it may rewrite.
    after: frozenset[str] = frozenset()
    guards: Guards = field(default_factory=Guards)
    #: The parameters of the declaration.
    params: Mapping[str, Scalar] = field(default_factory=lambda: MappingProxyType({}))
    #: The capabilities of the device, None for a graph without one.
    capabilities: Capabilities | None = None
    world_size: int = 1
    #: Least and most tokens that the graph serves, None where unknown.
    tokens: tuple[int, int] | None = None
    #: For each bucket that the graph serves, the value of each symbolic size. Empty if unknown.
    sizes: tuple[Mapping[Any, int], ...] = ()
    #: The constants of the graph's placeholders, to which a pass may add; None if the caller gave none.
    constants: Constants | None = None
    #: Names of the canonical ops that the device implements; None where unknown: every op may be lifted to then.
    implemented: frozenset[str] | None = None
    analyses: Analyses | None = None
    #: Nodes that belong to sites found so far, for finders that note them.
    taken: set[fx.Node] = field(default_factory=set)

    @property
    def graph(self) -> fx.Graph:
        """The graph to rewrite."""
        return self.module.graph

    def analysis(self, name: str) -> Any:
        """Return the analysis "writes" or "order"; it describes the graph as the pass found it."""
        if self.analyses is None:
            self.analyses = Analyses(self.module)
        return self.analyses.get(name)

    def served(self, size: Any) -> tuple[int, ...] | None:
        """Return a size's value in each bucket, in the same order for all sizes; None if unknown."""
        if type(size) is int:
            return (size,) * max(1, len(self.sizes))
        symbolic = expression(size)
        found = [symbolic.xreplace(sizes) for sizes in self.sizes] if hasattr(symbolic, "xreplace") else []
        # A size that is a single symbol is looked up directly, which gives a plain number.
        plain = all(isinstance(each, int) or each.is_Integer for each in found)
        return tuple(map(int, found)) if found and plain else None

    def served_alike(self, left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
        """Return whether two shapes, or parts of shapes, are known to be equal wherever the graph serves.

        Inputs of one declared dimension have symbols of their own, until an op of the model demands that they be equal.
        """

        def alike(one: Any, other: Any) -> bool:
            return same_size(one, other) or ((found := self.served(one)) is not None and found == self.served(other))

        return len(left) == len(right) and all(map(alike, left, right))

    def values(self) -> Iterator[object]:
        """Yield the fake values of all nodes, the members of tuples one by one."""
        for node in self.graph.nodes:
            value = value_of(node)
            if value is not None:
                yield from pytree.tree_leaves(value)

    def refusal(self) -> str | None:
        """Return why the pass's guards exclude this graph, or None if the pass may run."""
        guards = self.guards
        extra: Mapping[str, object] = getattr(self.capabilities, "extra", {})
        for key, wanted in guards.capabilities.items():
            if extra.get(key) != wanted:
                return f"the device's capability {key!r} is {extra.get(key)!r}, needed is {wanted!r}"
        if not _within(self.world_size, guards.world_size):
            return f"it is for {_text(guards.world_size)} processes, and this graph is for {self.world_size}"
        if guards.tokens is not None:
            if self.tokens is None:
                return f"made for {_text(guards.tokens)} tokens, and how many this graph serves is unknown"
            if not all(_within(bound, guards.tokens) for bound in self.tokens):
                return f"the graph serves {_text(self.tokens)} tokens, outside {_text(guards.tokens)}"
        missing = sorted(guards.implements - (self.implemented or frozenset()))
        if missing:
            unknown = "" if self.implemented is not None else ", as far as is known"
            return f"the device does not implement {' or '.join(missing)}{unknown}"
        if guards.constants and self.constants is None:
            return "it reads the graph's weights, and these are not given"
        return self._no_value() or (guards.nothing and guards.nothing(self.graph)) or None

    def _no_value(self) -> str | None:
        guards = self.guards
        if guards.dtypes is None and guards.min_rank == 0:
            return None
        # Sizes are values too, and say nothing of a dtype.
        if any(guards.refuses_value(value) is None for value in self.values() if hasattr(value, "dtype")):
            return None
        wanted = [] if guards.dtypes is None else sorted(map(str, guards.dtypes))
        return f"no value in the graph has {' or '.join(wanted) or 'any dtype'} and rank {guards.min_rank} or more"


def _within(value: int, bounds: tuple[int, int | None]) -> bool:
    return bounds[0] <= value and (bounds[1] is None or value <= bounds[1])


def _text(bounds: tuple[int, int | None]) -> str:
    least, most = bounds
    return f"{least} or more" if most is None else f"{least} to {most}"
