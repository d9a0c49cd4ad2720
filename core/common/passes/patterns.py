"""Patterns by which a pass may be declared: for the matcher of `torch.fx` and for Inductor's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._inductor.pattern_matcher import Match, PatternExpr


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """A pattern and its replacement, both functions of the same parameters, traced by `torch.fx`.

    The match is literal: calls, methods and operand order count.
    """

    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    #: Parameters that stand for a number or dtype in the graph; all others stand for nodes.
    literals: tuple[str, ...] = ()
    #: Takes the match of each parameter (a node or a literal). Returns why the match must not be replaced, or None.
    check: Callable[[Mapping[str, Any]], str | None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class InductorReplacement:
    """A pattern of `torch._inductor.pattern_matcher.register_replacement`; search and replace share their parameters.

    examples: gives the inputs to trace search with, called under a fake mode, scalars left out. scalars: parameters of
    search that stand for numbers, each with an odd value that appears nowhere else in the pattern; one pattern then
    matches every value. check: takes the match and returns why it must not be replaced, or None. bound: parameters that
    must be constants of the graph, or views of ones, which nothing writes.
    """

    search: Callable[..., Any]
    replace: Callable[..., Any]
    examples: Callable[[], Sequence[Any]]
    scalars: Mapping[str, float | int] = field(default_factory=lambda: MappingProxyType({}))
    check: Callable[[Match], str | None] | None = None
    bound: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class InductorGraphPattern:
    """A pattern of `register_graph_pattern`: a tree of `CallFunction`, and a handler that rewrites the match.

    check, bound: as `InductorReplacement` has them; parameters are the tree's `KeywordArg`s.
    """

    pattern: Callable[[], PatternExpr]
    handler: Callable[..., None]
    check: Callable[[Match], str | None] | None = None
    bound: tuple[str, ...] = ()
