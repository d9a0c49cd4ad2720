"""The declaration of a graph pass and the result every pass returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import fx

Mechanism = Literal["graph", "replace_pattern", "inductor"]
Stage = Literal["torch", "aten"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NearMiss:
    """A place that almost matched. site: module path or node name. reason: the guard or node that failed."""

    site: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PassResult:
    """What one pass did to one graph; `matched` is the number of rewritten sites, each named in `sites`."""

    matched: int
    sites: tuple[str, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()


PassFunction = Callable[["fx.GraphModule"], PassResult]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One graph rewrite, declared once; order, switches and reports derive from this.

    name: unique among the passes of a run. run: rewrites the graph in place and reports its matches. mechanism: `graph`
    (a walk over an `fx.Graph`) in this version. stage: `torch` runs on the traced graph, `aten` after AOTAutograd.
    before/after: names of passes that must come later/earlier; absent names are allowed and mean nothing.
    expect: matches owed per graph, or None for no promise; a broken promise is logged, and an error when strict.
    """

    name: str
    run: PassFunction
    mechanism: Mechanism = "graph"
    stage: Stage = "torch"
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    expect: int | None = None
    owner: str = "core"
