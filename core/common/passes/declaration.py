"""The declaration of a graph pass and the result every pass returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

from core.common.passes.identity import fingerprint, fingerprints
from core.errors import PassError

if TYPE_CHECKING:
    import torch

    from core.common.passes.context import PassContext
    from core.common.passes.patterns import InductorGraphPattern, InductorReplacement, Replacement

    Pattern: TypeAlias = Replacement | InductorReplacement | InductorGraphPattern
    Example: TypeAlias = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]

Mechanism = Literal["graph", "replace_pattern", "inductor"]
Stage = Literal["torch", "functional", "aten"]
Form = Literal["v1", "v2"]
Scalar = str | int | float | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class NearMiss:
    """A place that almost matched. site: module path or node name. reason: what failed. node: where it failed.

    claimant: the pass that made the node, where another pass wanted to replace it without being ordered after it.
    """

    site: str
    reason: str
    node: str = ""
    claimant: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassResult:
    """What one pass did to one graph; `matched` is the number of rewritten sites, each named in `sites`."""

    matched: int
    sites: tuple[str, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()


PassFunction = Callable[["PassContext"], PassResult]
Expect = Callable[["PassContext"], "int | None"] | int | None
Examples = Callable[[], "Iterable[Example]"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Guards:
    """What must hold for a pass to run; asked once per graph, and a refused pass reports the reason.

    dtypes: a graph without a value of one of these is skipped, and `fuse` leaves sites of other dtypes alone.
    min_rank: likewise, for the rank. capabilities: keys of `Capabilities.extra` with the value each must have.
    world_size, tokens: inclusive ranges; an upper end of None is open. A pass with a token range is skipped where the
    caller does not say how many tokens the graph serves. constants: the pass reads the tensors bound to the graph's
    placeholders, and is skipped where the caller does not give them. implements: names of canonical ops, all of which
    the device must bring an implementation of; skipped too where the caller does not say which it brings.
    """

    dtypes: frozenset[torch.dtype] | None = None
    min_rank: int = 0
    capabilities: Mapping[str, Scalar] = field(default_factory=lambda: MappingProxyType({}))
    world_size: tuple[int, int | None] = (1, None)
    tokens: tuple[int, int | None] | None = None
    constants: bool = False
    implements: frozenset[str] = frozenset()

    def refusal(self, context: PassContext) -> str | None:
        """Return why the pass must not run on this graph, or None if it may."""
        extra: Mapping[str, object] = getattr(context.capabilities, "extra", {})
        for key, wanted in self.capabilities.items():
            if extra.get(key) != wanted:
                return f"the device's capability {key!r} is {extra.get(key)!r}, needed is {wanted!r}"
        if not _within(context.world_size, self.world_size):
            return f"world size {context.world_size} is outside {_text(self.world_size)}"
        if self.tokens is not None:
            if context.tokens is None:
                return f"made for {_text(self.tokens)} tokens, and how many this graph serves is unknown"
            if not all(_within(bound, self.tokens) for bound in context.tokens):
                return f"the graph serves {_text(context.tokens)} tokens, outside {_text(self.tokens)}"
        missing = sorted(self.implements - (context.implemented or frozenset()))
        if missing:
            unknown = "" if context.implemented is not None else ", as far as is known"
            return f"the device does not implement {' or '.join(missing)}{unknown}"
        if self.constants and context.constants is None:
            return "it reads the graph's weights, and these are not given"
        return self._no_value(context)

    def _no_value(self, context: PassContext) -> str | None:
        if self.dtypes is None and self.min_rank == 0:
            return None
        # Sizes are values too, and say nothing of a dtype.
        if any(self.refuses_value(value) is None for value in context.values() if hasattr(value, "dtype")):
            return None
        wanted = [] if self.dtypes is None else sorted(map(str, self.dtypes))
        return f"no value in the graph has {' or '.join(wanted) or 'any dtype'} and rank {self.min_rank} or more"

    def refuses_value(self, value: object) -> str | None:
        """Return why a site of this value is none for the pass, or None; values that are no tensors are not judged."""
        dtype, rank = getattr(value, "dtype", None), getattr(value, "ndim", None)
        if dtype is None or rank is None:
            return None
        if self.dtypes is not None and dtype not in self.dtypes:
            return f"dtype {dtype} is none of {', '.join(sorted(map(str, self.dtypes)))}"
        return f"rank {rank} is below {self.min_rank}" if rank < self.min_rank else None


def _within(value: int, bounds: tuple[int, int | None]) -> bool:
    return bounds[0] <= value and (bounds[1] is None or value <= bounds[1])


def _text(bounds: tuple[int, int | None]) -> str:
    return f"{bounds[0]}..{'' if bounds[1] is None else bounds[1]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One graph rewrite, declared once; order, switches, identity and reports derive from this.

    name: unique among the passes of a run. mechanism: `graph` calls run, which rewrites the graph in place and reports
    its matches; `replace_pattern` and `inductor` apply patterns. stage: `torch` is the traced graph, `aten` the one
    after AOTAutograd, `functional` the same without writes (either, for `inductor`). form: of `functional` graphs,
    which of torch's wrappers the writes of custom ops are in. closes: it runs last in its stage, wherever another pass
    of that stage runs, named by the caller or not. before/after: names of passes that must come later/earlier; absent
    names are allowed and mean nothing. params: what run reads as `context.params`; part of the identity. expect:
    matches owed per graph, a function of the graph before the pass, or None for no promise; a broken promise is logged,
    and an error when strict. requires: analyses to compute before. preserves: analyses that stay valid although the
    pass changed the graph. on_request: why the pass runs only where it is asked for by name; empty for one that runs by
    itself. examples: gives modules, each with its positional inputs, all in fp32 on the host, in every one of which the
    pass owes a match; each call gives new ones. For tests alone, and no part of the identity. reads_content: run may
    read what bound tensors hold, not only where and how they lie; a cached graph then serves equal contents only.
    codes: ops, as "acme::quantize", whose int8 results are codes of a quantisation. What the pass puts in their place
    may quantise values that were not rounded before: verification judges its codes by their steps from those of the
    fp64 run. No part of the identity.
    """

    name: str
    run: PassFunction | None = None
    patterns: tuple[Pattern, ...] = ()
    mechanism: Mechanism = "graph"
    stage: Stage = "torch"
    form: Form = "v2"
    closes: bool = False
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    guards: Guards = field(default_factory=Guards)
    params: Mapping[str, Scalar] = field(default_factory=lambda: MappingProxyType({}))
    expect: Expect = None
    requires: frozenset[str] = frozenset()
    preserves: frozenset[str] = frozenset()
    on_request: str = ""
    examples: Examples | None = None
    reads_content: bool = True
    codes: tuple[str, ...] = ()
    owner: str = "core"

    def __post_init__(self) -> None:
        if self.mechanism == "graph" and (self.run is None or self.patterns):
            self._refuse("it has no run function, or has patterns", "set run, and no patterns")
        if self.mechanism != "graph" and (self.run is not None or not self.patterns):
            self._refuse("it has no pattern, or has a run function", "set patterns, and no run")
        if self.mechanism == "inductor" and self.stage == "torch":
            self._refuse(f"Inductor's matcher reads aten graphs, and its stage is {self.stage!r}", "set stage='aten'")
        if self.form != "v2" and self.stage != "functional":
            self._refuse(f"its form is {self.form!r} and its stage {self.stage!r}", "set form with stage='functional'")

    def _refuse(self, found: str, remedy: str) -> None:
        raise PassError(
            f"declaring pass {self.name!r} of {self.owner} (mechanism {self.mechanism!r})", found=found, remedy=remedy
        )

    def uuid(self) -> str:
        """Return a digest of what the pass does: its code, parameters, guards and the torch version."""
        return fingerprint(*self._steered_by())

    def _steered_by(self) -> tuple[object, ...]:
        stage = self.stage if self.form == "v2" else f"{self.stage} {self.form}"
        return (self.name, self.mechanism, stage, self.run, self.patterns, self.params, self.guards, self.expect)


def uuids(passes: Iterable[Pass]) -> list[str]:
    """Return the uuid of each pass. Passes share most of their code: asked one by one, they take ten times as long."""
    return fingerprints(declared._steered_by() for declared in passes)
