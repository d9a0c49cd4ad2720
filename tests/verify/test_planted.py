"""core/verify/planted.py: each in-tree pass has a mistake that `verify` and `bisect` find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.common.ops.attention.rotary import ROTARY_ATTENTION
from core.common.ops.implementation import OpImplementation
from core.common.ops.linear.gated import GATED_LINEAR, LINEAR
from core.common.ops.rotary.table import ROTARY_TABLE
from core.common.passes.declaration import Pass
from core.common.passes.standard import COMMON_PASSES
from core.compilation.implementations import implemented_ops, put_back_unimplemented
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.snapshot import Snapshot
from core.compilation.rewrite.stages import later_stages
from core.compilation.rewriting import bound_constants
from core.device import Device
from core.engine.check.graphs import PhaseGraph, engine_graphs
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.errors import UsageError
from core.quantization.quantize import quantize
from core.verify.bisect.bisection import bisect, injected
from core.verify.planted import MISTAKES, Mistake, argument, mistakes, planted, with_mistake
from core.verify.verify import Verification, failure, verify
from core_conformance.cases.passes.runs import corpus_graph
from tests.support import cpu, refused

# Where Llama gives no room for a mistake: a model that does.
MODELS: Mapping[str, str] = {
    "norm-offset": "gemma3_text",
    "gate-half": "phi3",
    "qk-norm-eps": "qwen3_moe",
    "qk-norm-weights": "qwen3_moe",
    "route-weights": "qwen3_moe",
    "route-scale": "qwen3_moe",
    "experts-kind": "qwen3_moe",
    **dict.fromkeys(("convolution-state", "convolution-slots", "convolution-activation"), "lfm2, paged"),
    **dict.fromkeys(("delta-state", "delta-slots", "delta-norm"), "qwen3_next, paged"),
    **dict.fromkeys(("space-state", "space-slots", "space-step"), "mamba2, paged"),
    "layer-norm-eps": "gpt2",
    "layer-norm-bias": "gpt2",
    "rotary-attention-tables": "llama, paged",
    "rotary-attention-weights": "qwen3, paged",
    **dict.fromkeys(("lora-slices", "lora-slots"), "adapters"),
    "linear-bias": "qwen2",
    "norm-codes-eps": "llama fp8",
    "add-norm-codes-sum": "llama fp8",
    "gate-codes-kind": "llama fp8",
    "attention-codes-scale": "llama fp8, paged",
    "shared-scale": "llama int8-static",
}

# One mistake of each kind, and of each stage: bisect judges a pass by what `verify` finds of it, whichever pass it is.
BISECTED: Mapping[str, Any] = {
    "norm-eps": (),  # an argument of an op
    "add-norm-residual": pytest.mark.slow,  # a node that others use
    "cache-write": pytest.mark.slow,  # a write, whose place is an input
    "merged-slices": pytest.mark.slow,  # a weight that the pass made
    "no-op-eps": pytest.mark.slow,  # no node of its own
    "cse-write": pytest.mark.slow,  # the order of a write and a read
    "norm-codes-eps": pytest.mark.slow,  # codes, judged in steps
    "in-place-copy": pytest.mark.slow,  # the last of the later stages
    "rotary-attention-tables": pytest.mark.slow,  # an op that the device has to bring
}

ALL = [declared.name for declared in COMMON_PASSES]
# Passes that run only where the device brings their op.
BROUGHT = (ROTARY_ATTENTION, ROTARY_TABLE, LINEAR, GATED_LINEAR)
NAMES = frozenset(op.qualified_name for op in BROUGHT)


def device() -> Device:
    return cpu(ops=tuple(OpImplementation(op=op.qualified_name, name="own", fn=op.reference) for op in BROUGHT))


@cache
def _traced(model: str, dtype: torch.dtype) -> PhaseGraph:
    if model == "adapters":  # no model of transformers: the engine puts them there
        return corpus_graph(model, dtype, torch.device("cpu"))
    model_type, _, cache = model.partition(", ")
    model_type, _, scheme = model_type.partition(" ")
    loaded = build_model(tiny_config(model_type), torch_device=torch.device("cpu"), dtype=dtype)
    if scheme:
        quantize(loaded.model, scheme, calibration=[torch.arange(3, 19)[None]])
        for module in loaded.model.modules():  # scales of their own, as foreign checkpoints have them
            if getattr(module, "input_scale", None) is not None:
                module.input_scale = torch.nn.Parameter(module.input_scale.clone(), requires_grad=False)
    with engine_graphs(loaded, cpu(), cache=cache or "static", phases=("decode",)) as (graph,):
        # The model attends to the paged cache no longer than the engine is open.
        return replace(graph, function=None) if cache else graph


@pytest.fixture(scope="module", autouse=True)
def _llama() -> None:
    """Trace what most tests begin with; a test is to be measured without it."""
    _traced("llama", torch.float32)


def decode_of(model_type: str, dtype: torch.dtype = torch.float32) -> PhaseGraph:
    """Return a tiny model's decode on a graph of its own, not yet rewritten.

    "llama, paged": on the paged cache; "llama fp8": quantised.
    """
    graph = _traced(model_type, dtype)
    return replace(graph, traced=replace(graph.traced, module=Snapshot(graph.traced.module).module()))


def up_to(name: str) -> tuple[Pass, ...]:
    """Return the passes that run before the one of that name, and it."""
    closing = [declared.name for declared in COMMON_PASSES if declared.traits.closes and declared.name == name]
    ordered = PassManager(COMMON_PASSES, enable=closing).passes
    return ordered[: [declared.name for declared in ordered].index(name) + 1]


def verified(graph: PhaseGraph, passes: tuple[Pass, ...], name: str) -> tuple[PassReport, Verification]:
    found: dict[str, tuple[PassReport, Verification]] = {}
    constants = bound_constants(graph.traced)

    def check(report: PassReport, before: Any, after: Any) -> None:
        if report.name == name:
            found[name] = (report, verify(report, before, after, graph.values(), constants=constants))

    manager = PassManager(passes, strict=True, implemented=NAMES, enable=[name])
    manager.run(graph.traced.module, constants=constants, check=check)
    for staged in later_stages(
        manager.passes, graph.traced.module, lambda m: put_back_unimplemented(m, implemented_ops(device().ops))
    ):
        manager.run(staged.module, staged.stage, constants=constants, check=check)
    return found[name]


def test_every_pass_has_a_mistake_and_every_mistake_a_pass() -> None:
    names = {declared.name for declared in COMMON_PASSES if declared.guards.world_size[0] == 1}
    # Those that need several processes are judged between two: tests/engine/models/test_distributed.py.
    assert names == {mistake.of for mistake in mistakes()}
    assert {mistake.of for mistake in MISTAKES} - names == set(), "mistakes of passes that are gone"
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)


def on_its_model(mistake: Mistake) -> Any:
    """Return the mistake as a parameter: slow where its model is another than Llama and has to be traced for it, and
    where an earlier mistake of its pass is found in Llama."""
    first = next((each for each in mistakes() if each.of == mistake.of and each.name not in MODELS), None)
    marks = [] if mistake is first else [pytest.mark.slow]
    return pytest.param(mistake, id=mistake.name, marks=marks)


@pytest.mark.cases(2)
@pytest.mark.parametrize("mistake", [on_its_model(mistake) for mistake in mistakes()])
def test_verify_finds_the_mistake_and_names_the_pass(mistake: Mistake) -> None:
    report, found = verified(
        decode_of(MODELS.get(mistake.name, "llama")), injected(up_to(mistake.of), planted(mistake.name)), mistake.of
    )
    assert report.matched > 0 and not any("nowhere to be" in miss.reason for miss in report.near_misses)
    assert not found.passed and found.worst_ratio > 1 and found.fault is not None
    message = str(failure(report, found))
    assert f"verifying pass {mistake.of!r}" in message and found.fault.where in message


@pytest.mark.slow
def test_the_mistake_is_found_in_experts_without_a_gate() -> None:
    (mistake,) = (each for each in mistakes() if each.name == "experts-kind")
    graph = decode_of("nemotron_h, paged")
    report, found = verified(graph, injected(up_to(mistake.of), planted(mistake.name)), mistake.of)
    assert report.matched == 1 and not report.near_misses
    assert not found.passed and found.worst_ratio > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in BISECTED.items()])
def test_bisect_finds_the_mistake_where_verify_does(name: str) -> None:
    mistake, model = next(each for each in mistakes() if each.name == name), MODELS.get(name, "llama")
    passes = injected(up_to(mistake.of), planted(name))
    _, found = verified(decode_of(model), passes, mistake.of)
    graph = replace(decode_of(model), function=None)
    outcome = bisect([graph], device(), passes, lowering="inline", asked=[each.name for each in passes])
    assert not outcome.passed and found.fault is not None
    first = outcome.faults[0]
    assert (first.kind, first.name, first.site) == ("pass", mistake.of, found.fault.where)
    assert first.nodes or first.site.startswith("input ")
    assert mistake.name in first.owner and str(first) in outcome.headline()
    # What comes after the pass at fault is judged without it, and is right.
    assert [fault.name for fault in outcome.faults] == [mistake.of]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("llama", torch.float32),
        pytest.param("llama", torch.bfloat16, marks=pytest.mark.slow),
        *(pytest.param(name, torch.float32, marks=pytest.mark.slow) for name in sorted(set(MODELS.values()))),
    ],
    ids=str,
)
def test_the_passes_themselves_are_accepted(model: str, dtype: torch.dtype) -> None:
    outcome = bisect([decode_of(model, dtype)], device(), COMMON_PASSES, lowering="inline", asked=ALL)
    assert outcome.passed, outcome.headline()
    judged = {step.name: step for step in outcome.steps if step.kind == "pass"}
    for name in {mistake.of for mistake in mistakes() if MODELS.get(mistake.name, "llama") == model}:
        step = judged[name]
        assert step.outcome == "ok" and step.matched > 0 and step.num_values > 0, f"{name} judged nothing"


def test_a_mistake_without_a_site_says_so() -> None:
    lift = next(declared for declared in COMMON_PASSES if declared.name == "lift_rms_norm")
    nowhere = Mistake(name="none", of="lift_rms_norm", what="", make=argument("layer_norm", "eps", lambda eps: 1.0))
    (report,) = PassManager([with_mistake(lift, nowhere)]).run(decode_of("llama").traced.module)
    assert report.matched > 0 and report.near_misses[-1].reason == "the planted mistake 'none' found nowhere to be"


def test_the_planted_pass_has_an_identity_of_its_own() -> None:
    lift = next(declared for declared in COMMON_PASSES if declared.name == "lift_rms_norm")
    assert planted("norm-eps").uuid() != lift.uuid() == replace(lift).uuid()
    assert planted("norm-eps").uuid() != planted("norm-weight").uuid()


def test_an_unknown_mistake_lists_the_known_ones() -> None:
    with refused(UsageError, "planting 'norm-ep'", "norm-weight", "did you mean 'norm-eps'?"):
        planted("norm-ep")
