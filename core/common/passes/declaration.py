"""The declaration of a graph pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

from core.common.passes.identity import fingerprint
from core.common.passes.pass_guards import Form, Guards, Scalar, Stage
from core.common.passes.results import PassResult
from core.common.passes.rewrite import fuse
from core.common.passes.sites import Finder
from core.errors import PassError

if TYPE_CHECKING:
    import torch

    from core.common.passes.context import PassContext
    from core.common.passes.patterns import InductorGraphPattern, InductorReplacement, Replacement

    Pattern: TypeAlias = Replacement | InductorReplacement | InductorGraphPattern
    Example: TypeAlias = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]

Mechanism = Literal["graph", "replace_pattern", "inductor"]
PassFunction = Callable[["PassContext"], PassResult]
Expect = Callable[["PassContext"], "int | None"] | int | None
Examples = Callable[[], "Iterable[Example]"]


LIFTS = (
    *("lift_rms_norm", "fuse_add_rms_norm", "lift_layer_norm", "lift_gated_activation", "lift_rotary"),
    *("fuse_qk_norm_rotary", "lift_attention", "fuse_attention_cache", "lift_moe_route", "lift_grouped_mlp"),
    *("lift_causal_conv1d", "lift_gated_delta_rule", "lift_selective_state_update"),
)
"""The passes that recognise what a model computes, for the `Pass.after` of a pass that builds on them. Names that no
pass of a run has are ignored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTraits:
    """Declarations that only a few passes need. Only `form` is part of a pass's identity."""

    #: Why the pass runs only where it is asked for by name; empty for one that runs by itself.
    on_request: str = ""
    #: Ops, as "acme::quantize", whose int8 results are codes of a quantisation. The pass's replacement may quantise
    #: values before they are rounded. Verification then counts by how many steps its codes differ from those of the
    #: fp64 run.
    codes: tuple[str, ...] = ()
    #: Whether the pass may read the content of constants, not only their memory layout. A cached graph is then reused
    #: only for equal contents.
    reads_content: bool = True
    #: Whether the pass brings calls of kernels that implement no canonical op, and so can't declare themselves
    #: batch-invariant: programs of `deterministic="batch"` leave it out.
    own_kernels: bool = False
    #: Analyses to compute before the pass.
    requires: frozenset[str] = frozenset()
    #: Analyses that stay valid although the pass changed the graph.
    preserves: frozenset[str] = frozenset()
    #: Returns, for each bucket in the order of `PassContext.sizes`, what the pass would do there; asked of the graph as
    #: it was traced. Buckets of which it says different things get graphs of their own.
    tells_apart: Callable[[PassContext], Sequence[Hashable]] | None = None
    #: Stage `functional` only: which of torch's wrappers holds custom ops that write.
    form: Form = "v2"
    #: Stage `functional` only: the pass runs last whenever another pass of the stage runs, even if the caller does not
    #: name it.
    closes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One graph rewrite, declared once: order, switches, identity and reports derive from this."""

    #: Unique among the passes of a run.
    name: str
    #: What the pass does, in one sentence for `core passes`.
    does: str = ""
    #: Mechanism `graph`, a fusion: asked about every node. `fuse` checks and rewrites the sites that it returns.
    find: Finder | None = None
    #: Mechanism `graph`, any other rewrite: changes the graph in place and reports its matches.
    run: PassFunction | None = None
    #: The patterns of the other two mechanisms.
    patterns: tuple[Pattern, ...] = ()
    mechanism: Mechanism = "graph"
    #: The graph to rewrite. `torch`: as traced. `aten`: of ATen ops. `functional`: of ATen ops that write nothing.
    #: Mechanism `inductor` takes either of the latter two.
    stage: Stage = "torch"
    #: Names of passes that must come later; unknown names are ignored.
    before: tuple[str, ...] = ()
    #: Names of passes that must come earlier; unknown names are ignored.
    after: tuple[str, ...] = ()
    #: Conditions for the pass to run; otherwise it is skipped.
    guards: Guards = field(default_factory=Guards)
    #: Parameters that the pass reads as `context.params`.
    params: Mapping[str, Scalar] = field(default_factory=lambda: MappingProxyType({}))
    #: Matches that the pass promises per graph: a number, or a function of the graph before the pass; None for no
    #: promise. A broken promise is logged; in strict mode it is an error.
    expect: Expect = None
    #: Returns new modules at each call, each with its positional inputs in fp32 on the host. The pass must match in
    #: every one. Used by tests only, and no part of the identity.
    examples: Examples | None = None
    #: The owner of the pass (core or a plugin), for errors.
    owner: str = "core"
    traits: PassTraits = field(default_factory=PassTraits)

    def __post_init__(self) -> None:
        functions = [each for each in (self.find, self.run) if each is not None]
        if self.mechanism == "graph" and (len(functions) != 1 or self.patterns):
            found = "it has no finder and no run function, both of them, or has patterns"
            self._refuse(found, "set either find or run, and no patterns")
        if self.mechanism != "graph" and (functions or not self.patterns):
            self._refuse("it has no pattern, or has a run function or a finder", "set patterns, and no function")
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
        functions = self.run if self.find is None else (self.find, fuse)
        return fingerprint(
            self.name, self.mechanism, stage, functions, self.patterns, self.params, self.guards, self.expect
        )
