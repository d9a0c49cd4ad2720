"""A site where a fusion fits, its name in reports, and the mark on nodes that a pass made."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import fx

from core.common.passes.results import NearMiss
from core.common.passes.viewed import Viewed, sources_of, viewed

if TYPE_CHECKING:
    from core.common.passes.context import PassContext

MADE_BY = "core_pass"
"""Key of `node.meta` under which a node that a pass made holds its `Made`."""

# Dynamo writes L['model'].layers.0. Leave out the local variable and the way to it (a closure, a private attribute of a
# wrapper), which tell a reader nothing.
_ORIGIN = re.compile(
    r"^(?:G\['__import_[^']*'\]\.\w+|[LG]\['[^']*'\])"
    r"(?:\.__closure__\[\d+\]\.cell_contents|\._(?!modules|parameters|buffers)\w+)*"
)
_INDEXED = re.compile(r"(?:\b_modules)?\['?([^'\]]+)'?\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One place where a fusion fits.

    An argument or an output may be a `Viewed` of a node, if the op has another order of dimensions than the graph. The
    views are made with the op.
    """

    #: The first node whose value the new op gives.
    anchor: fx.Node
    #: Usually `op.overload` of a canonical op; an `fx.GraphModule` is inlined.
    target: Callable[..., Any]
    #: Arguments of the new call; they may hold nodes.
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    #: The nodes that the op replaces, the anchor included; a node that is also used elsewhere stays.
    interior: tuple[fx.Node, ...] = ()
    #: For an op with several results: the node that each result replaces, None if nothing reads it.
    outputs: tuple[fx.Node | Viewed | None, ...] = ()
    #: Inputs into which the interior writes the value of the first result; later readers of them read that result.
    overwritten: tuple[fx.Node, ...] = ()

    @property
    def results(self) -> tuple[Viewed | None, ...]:
        """The node that each output of the op replaces, None if nothing reads it; the anchor by default."""
        return tuple(None if each is None else viewed(each) for each in self.outputs or (self.anchor,))

    @property
    def replaced(self) -> tuple[fx.Node, ...]:
        """The nodes whose uses the new op takes over."""
        return tuple(each.node for each in self.results if each is not None)

    @property
    def nodes(self) -> dict[fx.Node, None]:
        """All nodes that the op replaces, each once."""
        return dict.fromkeys((*self.interior, *self.replaced))

    @property
    def origin(self) -> fx.Node:
        """The node whose module the new op belongs to: the anchor, unless it lies outside of every module."""
        return next((node for node in (self.anchor, *reversed(self.interior)) if _module_path(node)), self.anchor)

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The nodes among the arguments."""
        return tuple(each.node for each in self.sources)

    @property
    def sources(self) -> tuple[Viewed, ...]:
        """The nodes, and views of nodes, among the op's arguments."""
        return sources_of(self.args, self.kwargs)


class Refused(Exception):
    """A site must stay: a check failed at a node, for a reason."""

    def __init__(self, node: fx.Node, reason: str, claimant: str = "") -> None:
        super().__init__(reason)
        self.node, self.reason, self.claimant = node, reason, claimant


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """Which pass made a node, at which site, and the names of the nodes it replaced (empty for inner nodes)."""

    pass_name: str
    owner: str
    site: str
    replaced: tuple[str, ...] = ()


def other_maker(context: PassContext, node: fx.Node) -> str:
    """Return the pass that made a node if this pass is not ordered after it and so may not claim the node; else ""."""
    made: Made | None = node.meta.get(MADE_BY)
    if made is None or made.pass_name == context.name or made.pass_name in context.after:
        return ""
    return f"{made.pass_name!r} of {made.owner}"


Finder = Callable[["PassContext", fx.Node], Site | NearMiss | None]


def later_readers(site: Site, order: Mapping[fx.Node, int]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield each later reader of the memory that the site overwrites, with the node that it reads."""
    for node in site.overwritten:
        yield from ((user, node) for user in node.users if order.get(user, -1) > order[site.anchor])


def site_name(node: fx.Node) -> str:
    """Return the path of the module that the node came from (`model.layers.3.input_layernorm`), else its name."""
    return _module_path(node) or node.name


def _module_path(node: fx.Node) -> str:
    """Return the path of the node's module, "" for nodes of the outermost one."""
    stack = node.meta.get("nn_module_stack")
    path = str(list(stack.values())[-1][0]) if stack else ""
    path = _INDEXED.sub(r".\1", _ORIGIN.sub("", path))
    return ".".join(part for part in path.split(".") if part)


def near_miss(node: fx.Node, reason: str, *, claimant: str = "") -> NearMiss:
    """Return a near-miss at this node's site."""
    return NearMiss(site=site_name(node), reason=reason, node=node.name, claimant=claimant)
