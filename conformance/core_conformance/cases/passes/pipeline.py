"""All passes of a device together: small models and tiny ones of transformers, against the models run eagerly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from core.common.lowering import LoweringRequest
from core.compilation.implementations import choose_implementations
from core.compilation.rewrite.order import PassSwitches
from core.compilation.rewrite.snapshot import Snapshot
from core.compilation.rewriting import Rewriter, device_passes
from core.device import Device
from core.engine.check.graphs import phase_graphs
from core.verify.bisect.bisection import bisect
from core.verify.bisect.model import judge_model
from core.verify.compare import Comparison
from core.verify.execution import own_inputs, run_graph, written_inputs
from core_conformance.cases.passes.runs import CORPUS, CannotRun, bench, copied
from core_conformance.trial import Skip, Trial

TINY = ("llama", "gemma2", "qwen3_moe")
"""Models of transformers: plain; with soft caps and windows; with normed heads and experts."""


def unprofitable(device: Device) -> tuple[str, ...]:
    """Return the passes that run only where asked for by name."""
    names = {declared.name for declared in device_passes(device)}
    return tuple(name for name in device.capabilities.unprofitable if name in names)


def check_program(trial: Trial, name: str, dtype: torch.dtype) -> None:
    """Rewrite a small model by all passes, lower it, and judge results and writes by the model itself."""
    device = trial.device
    try:
        graph = copied(bench(device).graph(CORPUS[name], dtype))
    except CannotRun as error:
        raise Skip(str(error)) from error
    original = Snapshot(graph.traced.module).module()
    rewritten = Rewriter(device, PassSwitches(enable=unprofitable(device))).rewrite(graph.traced)
    for report in rewritten.passes:
        trial.require(not report.error, f"pass {report.name!r} of {report.owner} fails: {report.error}")
    module = rewritten.traced.module
    choose_implementations(module, device.ops)
    (example,) = graph.examples
    placeholders = (node.name for node in module.graph.find_nodes(op="placeholder"))
    inputs = own_inputs(module, rewritten.traced.values(example), written=frozenset(placeholders))
    lowering = "inline" if "inline" in device.lowerings.available else device.lowerings.default
    lowered = device.lowerings.available[lowering](LoweringRequest(graph=module, example_inputs=tuple(inputs.values())))
    with torch.no_grad():
        outputs = [value.clone() if isinstance(value, Tensor) else value for value in lowered(*inputs.values())]
    device.synchronize()
    step, fault = judge_model(graph, original, [outputs], owner=device.plugin.distribution)
    reason = "" if fault is None else f"{fault.name} against the model: {fault.reason}"
    trial.record("results", "T1", step.worst_ratio, reason)
    _check_writes(trial, original, graph.values()[0], inputs)


def _check_writes(trial: Trial, original: fx.GraphModule, values: Sequence[Any], inputs: dict[str, Any]) -> None:
    """Judge what the program wrote into by what the traced model writes."""
    names = sorted(written_inputs(original))
    if not names:
        return
    run, found = run_graph(original, values), Comparison()

    def exact() -> list[Any]:
        wide = run_graph(original, values, fp64=True, pinned=run.decided)
        return [wide.written[name] for name in names]

    found.add(names, [inputs[name] for name in names], [run.written[name] for name in names], exact)
    trial.record("writes", "T1", found.worst, found.reason)


def check_tiny_model(trial: Trial, model_type: str, dtype: torch.dtype) -> None:
    """Judge each pass, each op implementation and the program over the decode step of a tiny model."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise Skip("transformers is not installed (extra 'hf')") from error
    from core.engine.models.loading import build_model
    from core.engine.models.tiny import tiny_config

    device = trial.device
    loaded = build_model(tiny_config(model_type), torch_device=device.torch_device, dtype=dtype, seed=trial.seed)
    graphs = phase_graphs(loaded, device, phases=("decode",))
    lowering = "inline" if "inline" in device.lowerings.available else None
    found = bisect(graphs, device, device_passes(device), lowering=lowering, asked=unprofitable(device))
    faults = {(fault.kind, fault.name): fault for fault in found.faults}
    for step in found.steps:
        fault = faults.get((step.kind, step.name))
        if step.num_values or fault is not None:
            reason = "" if fault is None else f"at {fault.site or 'the whole'}: {fault.reason}"
            trial.record(f"{step.kind} {step.name}", "T1", step.worst_ratio, reason)
    trial.require(any(step.kind == "pass" and step.matched for step in found.steps), "no pass matched anything")
