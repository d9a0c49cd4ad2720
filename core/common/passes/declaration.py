"""The declaration of a graph pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

from core.common.passes.identity import fingerprint
from core.common.passes.pass_guards import Form, Guards, Scalar, Stage
from core.common.passes.results import NearMiss, PassResult
from core.errors import PassError

if TYPE_CHECKING:
    import torch

    from core.common.passes.context import PassContext
    from core.common.passes.patterns import InductorGraphPattern, InductorReplacement, Replacement

    Pattern: TypeAlias = Replacement | InductorReplacement | InductorGraphPattern
    Example: TypeAlias = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]

__all__ = [
    "Example",
    "Examples",
    "Expect",
    "Form",
    "Guards",
    "Mechanism",
    "NearMiss",
    "Pass",
    "PassFunction",
    "PassResult",
    "Pattern",
    "Scalar",
    "Stage",
]

Mechanism = Literal["graph", "replace_pattern", "inductor"]
PassFunction = Callable[["PassContext"], PassResult]
Expect = Callable[["PassContext"], "int | None"] | int | None
Examples = Callable[[], "Iterable[Example]"]


LIFTS = (
    *("lift_rms_norm", "fuse_add_rms_norm", "lift_layer_norm", "lift_gated_activation", "lift_rotary"),
    *("fuse_qk_norm_rotary", "lift_attention", "fuse_attention_cache", "lift_moe_route", "lift_grouped_mlp"),
)
"""The passes that recognise what a model computes, for `Pass.after` of those that build on it; one that is absent means
nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTraits:
    """What only a few passes have to say of themselves.

    on_request: why the pass runs only where it is asked for by name; empty for one that runs by itself. codes: ops, as
    "acme::quantize", whose int8 results are codes of a quantisation. What the pass puts in their place may quantise
    values that were not rounded before: verification judges its codes by their steps from those of the fp64 run.
    reads_content: run may read what bound tensors hold, not only where and how they lie; a cached graph then serves
    equal contents only. requires: analyses to compute before the pass. preserves: analyses that stay valid although the
    pass changed the graph. form: of `functional` graphs, which of torch's wrappers the writes of custom ops are in.
    closes: it runs last in its stage, wherever another pass of that stage runs, named by the caller or not.

    None but form is part of the identity of a pass.
    """

    on_request: str = ""
    codes: tuple[str, ...] = ()
    reads_content: bool = True
    requires: frozenset[str] = frozenset()
    preserves: frozenset[str] = frozenset()
    form: Form = "v2"
    closes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One graph rewrite, declared once; order, switches, identity and reports derive from this.

    name: unique among the passes of a run. mechanism: `graph` calls run, which rewrites the graph in place and reports
    its matches; `replace_pattern` and `inductor` apply patterns. stage: `torch` is the traced graph, `aten` the one
    after AOTAutograd, `functional` the same without writes (either, for `inductor`). before/after: names of passes that
    must come later/earlier; absent names are allowed and mean nothing. params: what run reads as `context.params`; part
    of the identity. expect: matches owed per graph, a function of the graph before the pass, or None for no promise; a
    broken promise is logged, and an error when strict. examples: gives modules, each with its positional inputs, all in
    fp32 on the host, in every one of which the pass owes a match; each call gives new ones. For tests alone, and no
    part of the identity. traits: what few passes need.
    """

    name: str
    run: PassFunction | None = None
    patterns: tuple[Pattern, ...] = ()
    mechanism: Mechanism = "graph"
    stage: Stage = "torch"
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    guards: Guards = field(default_factory=Guards)
    params: Mapping[str, Scalar] = field(default_factory=lambda: MappingProxyType({}))
    expect: Expect = None
    examples: Examples | None = None
    owner: str = "core"
    traits: PassTraits = field(default_factory=PassTraits)

    def __post_init__(self) -> None:
        if self.mechanism == "graph" and (self.run is None or self.patterns):
            self._refuse("it has no run function, or has patterns", "set run, and no patterns")
        if self.mechanism != "graph" and (self.run is not None or not self.patterns):
            self._refuse("it has no pattern, or has a run function", "set patterns, and no run")
        if self.mechanism == "inductor" and self.stage == "torch":
            self._refuse(f"Inductor's matcher reads aten graphs, and its stage is {self.stage!r}", "set stage='aten'")
        if self.traits.form != "v2" and self.stage != "functional":
            found = f"its form is {self.traits.form!r} and its stage {self.stage!r}"
            self._refuse(found, "set form with stage='functional'")

    def _refuse(self, found: str, remedy: str) -> None:
        raise PassError(
            f"declaring pass {self.name!r} of {self.owner} (mechanism {self.mechanism!r})", found=found, remedy=remedy
        )

    def uuid(self) -> str:
        """Return a digest of what the pass does: its code, parameters, guards and the torch version."""
        stage = self.stage if self.traits.form == "v2" else f"{self.stage} {self.traits.form}"
        return fingerprint(
            self.name, self.mechanism, stage, self.run, self.patterns, self.params, self.guards, self.expect
        )
