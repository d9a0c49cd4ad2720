"""What the tests of the plugin's passes share: a function rewritten, and run before and after and in fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from core.common.numerics import judge
from core.common.passes.declaration import Pass
from core.compilation.rewrite.order import PassSwitches
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewriting import Rewriter
from core.compilation.trace.tracing import trace
from core.verify.execution import Run, run_graph
from core_npu.passes.calls import called
from tests.support import cpu

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALVES)


def draw(*shape: int, seed: int = 1, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale


def cast(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


@dataclass(frozen=True)
class Rewritten:
    """A graph after the passes: its reports, and runs of the graph before, after, and before in fp64."""

    module: fx.GraphModule
    reports: Mapping[str, PassReport]
    before: Run
    after: Run
    exact: Run
    was: tuple[str, ...]

    @property
    def report(self) -> PassReport:
        """The report of the one pass that was asked for."""
        (report,) = self.reports.values()
        return report

    @property
    def matched(self) -> int:
        return self.report.matched

    @property
    def reasons(self) -> str:
        return "; ".join(miss.reason for miss in self.report.near_misses)

    @property
    def calls(self) -> list[str]:
        """The ops of torch_npu, and those made for them, that the graph calls now, in order."""
        return kernels(self.module)

    def node(self, name: str) -> fx.Node:
        """The one call of an op of torch_npu."""
        (found,) = (node for node in self.module.graph.nodes if called(node) == name)
        return found

    def check(self) -> None:
        """Judge outputs and written tensors: floats by the numeric criterion, codes by their distance to fp64."""
        pairs = [*zip(self.after.outputs, self.before.outputs, self.exact.outputs, strict=True)]
        for name, old in self.before.written.items():
            pairs.append((self.after.written[name], old, self.exact.written[name]))
        for new, old, exact in pairs:
            assert new.shape == old.shape and new.dtype == old.dtype
            if old.dtype == torch.int8:
                check_codes(new, old, exact)
            elif old.dtype.is_floating_point and not torch.equal(new, old):
                verdict = judge(new, old, exact)
                assert verdict.passed, verdict.reason


def check_codes(new: Tensor, old: Tensor, exact: Tensor) -> None:
    """Judge codes: a rounding that the fused op leaves out may tip a value that lies between two, and no other.

    So none is more than a step away, and as the numeric criterion has it of errors: those that differ from the codes in
    fp64 are at most twice as many as before, of which rounding in the dtype of the values is the cause.
    """
    assert (new.int() - old.int()).abs().max() <= 1
    wrong, as_before = ((codes.int() != exact.int()).double().mean() for codes in (new, old))
    assert wrong <= 2 * as_before + 1e-3, f"{wrong:.2%} of the codes differ from fp64, {as_before:.2%} before"


def kernels(module: fx.GraphModule) -> list[str]:
    found = []
    for node in module.graph.nodes:
        own = getattr(node.target, "namespace", "") == "core_npu"
        found += [called(node)] if called(node) else [node.target._schema.name] if own else []
    return found


def rewritten(
    function: Callable[..., Any], *passes: Pass, dynamic: Mapping[str, tuple[int, ...]] | None = None, **inputs: Tensor
) -> Rewritten:
    """Trace a function of named tensors, run the passes and no other, strictly, and run the graph before and after."""
    graph = trace(function, inputs, dynamic=dynamic, writable=[name for name in inputs if name.endswith("cache")])
    was, values = tuple(kernels(graph.module)), graph.values(inputs)
    before, exact = run_graph(graph.module, values), run_graph(graph.module, values, fp64=True)
    names = tuple(declared.name for declared in passes)
    rewriter = Rewriter(cpu(passes=passes), PassSwitches(only=names), strict=True)
    made = rewriter.rewrite(graph)
    made.traced.module.recompile()
    made.traced.module.graph.lint()
    after = run_graph(made.traced.module, made.traced.values(inputs))
    reports = {report.name: report for report in made.passes if report.name in names}
    return Rewritten(made.traced.module, reports, before, after, exact, was)
