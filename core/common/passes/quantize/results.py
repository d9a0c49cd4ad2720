"""Fuse norms and gates with the quantisation of what they give: `core::rms_norm_quantize` and its like.

The walk starts at each `core.quantize`: the op whose value it reads must be a norm or a gate that nothing else reads.
Where others read the value too (a router, a head, a second format of codes) it has to be written anyway; then the op
stays as it is, with a near-miss that names the reader. Layers that quantise the same value alike are one reader, since
what they compute twice has been joined before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from core.common.ops.canonical import (
    ADD_RMS_NORM,
    ADD_RMS_NORM_QUANTIZE,
    GATED_ACTIVATION,
    GATED_ACTIVATION_FUSED,
    GATED_ACTIVATION_QUANTIZE,
    RMS_NORM,
    RMS_NORM_QUANTIZE,
)
from core.common.passes import (
    LIFTS,
    CanonicalOp,
    NearMiss,
    Pass,
    PassContext,
    PassResult,
    Site,
    Writes,
    calls,
    find_op,
    fuse,
    near_miss,
    view,
)
from core.common.passes.quantize import examples
from core.common.passes.quantize.calls import Quantize, behind, read_quantize

_SEVERAL = (ADD_RMS_NORM,)
"""Ops of several results, of which the first is the one to be quantised."""


@dataclass(frozen=True, slots=True)
class _Fusion:
    """What one of the passes looks for: values of `sources`; fused: the op that gives their codes."""

    sources: tuple[CanonicalOp, ...]
    fused: CanonicalOp

    def find(self, context: PassContext, node: fx.Node) -> Site | NearMiss | None:
        """Return an op and the quantisation of its value, with all results of both."""
        quantize = read_quantize(node)
        if quantize is None:
            return self._other_codes(node)
        value, between = behind(quantize.x)
        call = self.source(value)
        if call is None:
            return None
        reason = self._refusal(quantize, value, call, between)
        return near_miss(node, reason) if reason else self._site(quantize, value, call)

    def source(self, value: fx.Node) -> fx.Node | None:
        """Return the call whose value to be quantised a node is, or None."""
        call = value
        if view.kind(value) == "getitem" and isinstance(value.args[0], fx.Node):
            call = value.args[0]
            if find_op(call.target) not in _SEVERAL or value.args[1] != 0:
                return None
        op = find_op(call.target)
        return call if op in self.sources and (op in _SEVERAL) is (call is not value) else None

    def _other_codes(self, node: fx.Node) -> NearMiss | None:
        """Return the near-miss of another kind of quantisation, of which there is no op that ends in its codes."""
        op = find_op(node.target)
        if op is None or not op.name.startswith("quantize_") or not isinstance(node.args[0], fx.Node):
            return None
        call = self.source(behind(node.args[0])[0])
        if call is None:
            return None
        return near_miss(node, f"{op.qualified_name} gives other codes than {self.fused.qualified_name}")

    def _refusal(self, quantize: Quantize, value: fx.Node, call: fx.Node, between: fx.Node | None) -> str:
        if between is not None:
            return f"{between} stands between {call} and its codes"
        if quantize.unknown:
            return f"it sets {', '.join(quantize.unknown)}, which {self.fused.qualified_name} does not take"
        others = [user for user in value.users if user is not quantize.node]
        return f"{others[0]} reads {value} too" if others else ""

    def _site(self, quantize: Quantize, value: fx.Node, call: fx.Node) -> Site | None:
        op = find_op(call.target)
        assert op is not None  # the search has seen it
        given: dict[str, Any] = {**calls.arguments(call, op), "scale": quantize.scale, **quantize.options}
        if "gate_up" in given:
            given["gate"] = given.pop("gate_up")
        positional = [a.name for a in self.fused.overload._schema.arguments if not a.kwarg_only]
        outputs = (*calls.outputs(quantize.node), *calls.outputs(call)[1:])
        anchor = next(filter(None, outputs), None)
        if anchor is None:  # nothing reads the codes
            return None
        return Site(
            anchor=anchor,
            target=self.fused.overload,
            args=tuple(given.pop(name, None) for name in positional),
            kwargs=given,
            interior=(call, value, quantize.node),
            outputs=outputs,
        )

    def run(self, context: PassContext) -> PassResult:
        """Fuse every such op."""
        return fuse(context, self.find)

    def expect(self, context: PassContext) -> int | None:
        """Count from the other side: values of these ops that a quantisation alone reads; None where there are writes.

        A write may come in between, which only the graph's order tells.
        """
        writes: Writes = context.analysis("writes")
        if writes.all_written:
            return None
        values = [
            (calls.results(node).get(0) if find_op(node.target) in _SEVERAL else node)
            for node in context.graph.nodes
            if find_op(node.target) in self.sources
        ]
        readers = [view.only_user(value) for value in values if value is not None]
        quantized = [read_quantize(reader) for reader in readers if reader is not None]
        return sum(call is not None and not call.unknown for call in quantized)


_AFTER = (*LIFTS, "eliminate_common_subexpressions", "merge_linears", "fuse_gate_up")


def _declared(sources: tuple[CanonicalOp, ...], fused: CanonicalOp, shown: Callable[[], Any]) -> Pass:
    fusion = _Fusion(sources, fused)
    return Pass(name=f"fuse_{fused.name}", run=fusion.run, after=_AFTER, expect=fusion.expect, examples=shown)


FUSE_RMS_NORM_QUANTIZE = _declared((RMS_NORM,), RMS_NORM_QUANTIZE, examples.norms)
FUSE_ADD_RMS_NORM_QUANTIZE = _declared((ADD_RMS_NORM,), ADD_RMS_NORM_QUANTIZE, examples.norms_of_sums)
FUSE_GATED_ACTIVATION_QUANTIZE = _declared(
    (GATED_ACTIVATION, GATED_ACTIVATION_FUSED), GATED_ACTIVATION_QUANTIZE, examples.gates
)
