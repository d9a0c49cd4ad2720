"""The mechanism `inductor`: patterns of Inductor's matcher, applied to an aten graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from torch._inductor.pattern_matcher import (
    Match,
    PatternMatcherPass,
    register_graph_pattern,
    register_replacement,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from core.common.node_meta import value_of
from core.common.passes import view
from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass
from core.common.passes.patterns import InductorGraphPattern, InductorReplacement
from core.common.passes.results import NearMiss, PassResult
from core.common.passes.sites import MADE_BY, Made, near_miss, other_maker, site_name
from core.errors import PassError


def apply_inductor(context: PassContext, declared: Pass) -> PassResult:
    """Apply the patterns of the pass to the context's aten graph."""
    compiled = _compiled(declared.uuid(), _Patterns(declared))
    known = set(context.graph.nodes)
    for node in known:
        # Inductor numbers the regions between writes once per graph; earlier passes may have moved them.
        node.meta.pop("mutation_region_id", None)
    with compiled.recording(context) as record:
        compiled.matcher.apply(context.module)
    for node in context.graph.nodes:
        if node not in known:
            node.meta[MADE_BY] = Made(pass_name=context.name, owner=context.owner, site=site_name(node))
    return PassResult(matched=len(record.sites), sites=tuple(record.sites), near_misses=tuple(record.misses))


def prepare(declared: Pass) -> None:
    """Trace and register the patterns of the pass now, not when it first meets a graph."""
    _compiled(declared.uuid(), _Patterns(declared))


class _Record:
    """The matches of one application, in the order in which Inductor came across them."""

    def __init__(self, context: PassContext) -> None:
        self.context = context
        self.sites: list[str] = []
        self.misses: list[NearMiss] = []


class _Patterns:
    """The patterns of one pass, registered with Inductor's matcher once and used for every graph."""

    def __init__(self, declared: Pass) -> None:
        self._declared = declared
        self._record: _Record | None = None
        self.matcher = PatternMatcherPass(pass_name=f"core_{declared.name}")

    def __eq__(self, other: object) -> bool:
        # The cache of registered patterns needs this name; its other key, the uuid, distinguishes passes.
        return isinstance(other, _Patterns)

    def __hash__(self) -> int:
        return 0

    def register(self) -> None:
        """Trace and register every pattern."""
        for pattern in self._declared.patterns:
            check = self._recorded(getattr(pattern, "check", None), getattr(pattern, "bound", ()))
            if isinstance(pattern, InductorReplacement):
                # The graph may be plain aten or Inductor's own, where casts and activations are decomposed further.
                for trace in (_trace_plain, _trace_decomposed):
                    self._register(pattern, check, trace)
            elif isinstance(pattern, InductorGraphPattern):
                register_graph_pattern(pattern.pattern(), extra_check=check, pass_dict=self.matcher)(pattern.handler)
            else:
                raise PassError(
                    f"pass {self._declared.name!r} of {self._declared.owner}",
                    found=f"its pattern {pattern!r} is no InductorReplacement or InductorGraphPattern",
                    remedy="declare the patterns in the form that the pass's mechanism takes",
                )

    def _register(
        self, pattern: InductorReplacement, check: Callable[[Match], bool], trace: Callable[..., fx.GraphModule]
    ) -> None:
        with FakeTensorMode(), torch.no_grad():
            register_replacement(
                pattern.search,
                pattern.replace,
                list(pattern.examples()),
                cast(Any, trace),
                self.matcher,
                extra_check=check,
                scalar_workaround=dict(pattern.scalars),
                skip_duplicates=True,
            )

    @contextmanager
    def recording(self, context: PassContext) -> Iterator[_Record]:
        """Collect the matches of patterns applied in the block."""
        self._record = _Record(context)
        try:
            yield self._record
        finally:
            self._record = None

    def _recorded(self, check: Callable[[Match], str | None] | None, bound: tuple[str, ...]) -> Callable[[Match], bool]:
        """Return the check for Inductor, which wants yes or no; places and reasons are kept here."""

        def extra_check(match: Match) -> bool:
            record = self._record
            assert record is not None
            node = match.output_node()
            reason = _refusal(record.context, match, node) or _unbound(record.context, match, bound)
            reason = reason or (check(match) if check is not None else None)
            if reason:
                record.misses.append(reason if isinstance(reason, NearMiss) else near_miss(node, reason))
            else:
                record.sites.append(site_name(node))
            return not reason

        return extra_check


def _trace_plain(function: Callable[..., Any], args: Sequence[Any], **_: object) -> fx.GraphModule:
    return _trace(function, args, {})


def _trace_decomposed(function: Callable[..., Any], args: Sequence[Any], **_: object) -> fx.GraphModule:
    return _trace(function, args, select_decomp_table())


def _trace(function: Callable[..., Any], args: Sequence[Any], table: dict[Any, Any]) -> fx.GraphModule:
    """Trace as Inductor's `fwd_only` does, by a decomposition table of our choice."""
    with enable_python_dispatcher(), preserve_node_meta():
        module = make_fx(function, table, tracing_mode="real")(*args)
    remove_noop_ops(module.graph)
    module.graph.eliminate_dead_code()  # safe here: a functional graph without writes
    module.recompile()
    return module


def _refusal(context: PassContext, match: Match, node: fx.Node) -> NearMiss | str | None:
    for matched in match.nodes:
        if claimant := other_maker(context, matched):
            return near_miss(matched, f"node {matched.name} was made by pass {claimant}", claimant=claimant)
    return context.guards.refuses_value(value_of(node))


def _unbound(context: PassContext, match: Match, bound: tuple[str, ...]) -> str | None:
    """Return that one of these parameters is no constant of the graph, or None."""
    for name in bound:
        node = view.behind_views(match.kwargs[name])
        if context.constants is None or context.constants.value(node) is None:
            return f"{match.kwargs[name]} is no constant that is bound to the graph"
        if context.analysis("writes").writers(node):
            return f"{match.kwargs[name]} is written by the graph"
    return None


@lru_cache(maxsize=64)
def _compiled(uuid: str, patterns: _Patterns) -> _Patterns:
    patterns.register()
    return patterns
