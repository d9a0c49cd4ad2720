"""The mechanism `replace_pattern`: patterns of `torch.fx`'s matcher, found and replaced as any site is.

A parameter of the pattern that is listed in `literals` matches any number.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.fx.passes.utils.matcher_utils import InternalMatch, SubgraphMatcher

from core.common.passes.context import PassContext
from core.common.passes.patterns import Replacement
from core.common.passes.results import NearMiss, PassResult
from core.common.passes.rewrite import apply_sites
from core.common.passes.sites import Site, near_miss
from core.errors import PassError

Literal = bool | int | float | torch.dtype


def replace_patterns(context: PassContext, patterns: Sequence[Any]) -> PassResult:
    """Replace every safe match of the patterns, in their order; each sees the graph that the last one left."""
    results: list[PassResult] = []
    for index, pattern in enumerate(patterns):
        if not isinstance(pattern, Replacement):
            raise _wrong_kind(context, pattern, "Replacement")
        if index and results[-1].matched:
            assert context.analyses is not None
            context.analyses.invalidate()
        results.append(_replace(context, pattern))
    return PassResult(
        matched=sum(result.matched for result in results),
        sites=tuple(site for result in results for site in result.sites),
        near_misses=tuple(miss for result in results for miss in result.near_misses),
    )


def _wrong_kind(context: PassContext, pattern: object, wanted: str) -> PassError:
    return PassError(
        f"pass {context.name!r} of {context.owner}",
        found=f"its pattern {pattern!r} is no {wanted}",
        remedy="declare the patterns in the form that the pass's mechanism takes",
    )


def _replace(context: PassContext, pattern: Replacement) -> PassResult:
    searched, new = traced(pattern.pattern), traced(pattern.replacement)
    names = [str(node.target) for node in searched.graph.nodes if node.op == "placeholder"]
    matcher = _Matcher(searched.graph, match_output=False, match_placeholder=False, remove_overlapping_matches=True)
    sites: list[Site] = []
    misses: list[NearMiss] = []
    with _MATCHING:
        matches = matcher.match(context.graph)
    for match in matches:
        matched = dict(zip(names, match.placeholder_nodes, strict=True))
        reason = _literals(pattern, matched) or (pattern.check(matched) if pattern.check is not None else None)
        if reason:
            misses.append(near_miss(match.returning_nodes[0], reason))
        else:
            sites.append(_site(match, new, tuple(matched[name] for name in _parameters(pattern.replacement))))
    return apply_sites(context, sites, misses)


_MATCHING = threading.Lock()
"""Held while a pattern's graph, which threads share, is rewritten to the spelling of the graph it is matched
against."""


class _Matcher(SubgraphMatcher):
    """Treats keywords at their defaults as equal to omitted keywords.

    A pattern traced by fx writes `relu(x, inplace=False)` for `relu(x)`, and Dynamo writes what the model wrote.
    """

    def _match_nodes(self, pn: fx.Node, gn: fx.Node, *rest: Any, **named: Any) -> bool:
        kept = pn.kwargs
        if pn.op == "call_function" and pn.target == gn.target and list(kept) != list(gn.kwargs):
            pn.kwargs = _spelled_like(pn, gn)
        try:
            return super()._match_nodes(pn, gn, *rest, **named)
        finally:
            pn.kwargs = kept


def _spelled_like(pattern: fx.Node, node: fx.Node) -> dict[str, Any]:
    """Return the pattern's keywords, those at their default left out or written out as the node has them."""
    defaults = _defaults(pattern.target)
    missing = [name for name in pattern.kwargs if name not in node.kwargs]
    added = [name for name in node.kwargs if name not in pattern.kwargs]
    if any(name not in defaults or pattern.kwargs[name] != defaults[name] for name in missing):
        return dict(pattern.kwargs)
    if any(name not in defaults for name in added):
        return dict(pattern.kwargs)
    return {name: pattern.kwargs.get(name, defaults.get(name)) for name in node.kwargs}


def _defaults(target: Any) -> dict[str, Any]:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return {}
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def _literals(pattern: Replacement, matched: Mapping[str, Any]) -> str | None:
    for name, value in matched.items():
        if (name in pattern.literals) != isinstance(value, Literal):
            kind = "a number" if name in pattern.literals else "a tensor"
            return f"{name} is {value!r}, the pattern wants {kind} there"
    return None


def _site(match: InternalMatch, new: fx.GraphModule, args: tuple[Any, ...]) -> Site:
    interior = tuple(node for pattern, node in match.nodes_map.items() if pattern.op not in ("placeholder", "output"))
    outputs = tuple(match.returning_nodes)
    return Site(anchor=outputs[0], target=new, args=args, interior=interior, outputs=outputs)


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


@lru_cache(maxsize=256)
def traced(function: Callable[..., Any]) -> fx.GraphModule:
    """Trace a pattern or replacement once."""
    module = fx.symbolic_trace(function)
    if any(node.op in ("get_attr", "call_module") for node in module.graph.nodes):
        raise PassError(
            f"tracing the pattern {getattr(function, '__qualname__', function)!r}",
            found="it holds a tensor or module of its own",
            remedy="make it a parameter",
        )
    return module
