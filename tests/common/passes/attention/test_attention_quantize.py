"""core/common/passes/attention/quantize.py: attention ends in codes, bit by bit, also from a cache of codes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from core.common.numerics import judge
from core.common.ops.attention.cache import stored
from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.quantized import ATTENTION_QUANTIZE, ROTARY_ATTENTION_QUANTIZE
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from core.common.ops.canonical import OPS
from core.common.ops.implementation import OpImplementation
from core.common.ops.quantize.symmetric import QUANTIZE
from core.common.passes.attention.quantize import FUSE_ATTENTION_QUANTIZE
from core.common.passes.attention.quantize_examples import examples
from core.common.passes.rewrite import remove_dead
from core.common.passes.rotary.attention import FUSE_ROTARY_ATTENTION
from core.common.passes.standard import COMMON_PASSES
from core.compilation.implementations import BREAK_POINT, ORIGINAL_NODES, choose_implementations
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.snapshot import Snapshot
from core.compilation.rewriting import bound_constants
from core.compilation.trace.tracing import trace
from core.quantization.quantize import quantize
from core.verify.execution import Run, run_graph
from tests.common.passes.attention.attention_before_quantize import (
    NEAR_MISSES,
    attended,
    gated,
    results_read_twice,
    values_of,
    written_between,
)
from tests.common.passes.rotary.rotated_attention import CACHES, Cached, D, H, T, heads_first, inputs_of
from tests.marks import slow_except

NAME = FUSE_ATTENTION_QUANTIZE.name
BRINGS = frozenset({ROTARY_ATTENTION.qualified_name})
F32, BF16, FP8, INT8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8
ops: Any = torch.ops.core


def calls(module: fx.GraphModule, *targets: Any) -> list[fx.Node]:
    wanted = targets or (ATTENTION_QUANTIZE, ROTARY_ATTENTION_QUANTIZE)
    overloads = [op.overload for op in wanted]
    packets = [getattr(ops, op.name) for op in wanted]
    return [node for node in module.graph.nodes if node.target in [*overloads, *packets]]


def targets(module: fx.GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in module.graph.nodes if node.op.startswith("call_"))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def same(one: Run, other: Run) -> bool:
    """Tell whether two runs give the same bits and write the same; of a finished graph, all may be written."""
    outputs = all(torch.equal(bits(a), bits(b)) for a, b in zip(one.outputs, other.outputs, strict=True))
    small, large = sorted((one, other), key=lambda run: len(run.written))
    return outputs and all(torch.equal(bits(v), bits(large.written[n])) for n, v in small.written.items())


# Quantised models on the engine's paged cache, of values and of codes.


@cache
def graph_of(model_type: str, scheme: str, dtype: torch.dtype, kv_cache_dtype: str) -> Any:
    pytest.importorskip("transformers", reason="needs the extra 'hf'")
    from core.engine.check.graphs import engine_graphs
    from core.engine.models.loading import build_model
    from core.engine.models.tiny import tiny_config
    from core.host.selection import select_device

    loaded = build_model(tiny_config(model_type), torch_device=torch.device("cpu"), dtype=dtype)
    quantize(loaded.model, scheme, calibration=[torch.arange(3, 12)[None]])
    for layer in loaded.model.model.layers:
        layer.self_attn.k_scale, layer.self_attn.v_scale = torch.tensor(0.0173), torch.tensor([0.0119, 0.0207])
    phase = "prefill" if dtype == BF16 else "decode"
    with engine_graphs(loaded, select_device("cpu"), phases=(phase,), kv_cache_dtype=kv_cache_dtype) as (graph,):
        return graph


def rewritten(graph: Any, brings: frozenset[str]) -> tuple[fx.GraphModule, fx.GraphModule, PassReport, list[list[Any]]]:
    """Return a copy of a graph after all passes and as it was before this one, the report, and values to run on."""
    module, constants = Snapshot(graph.traced.module).module(), bound_constants(graph.traced)
    seen: dict[str, fx.GraphModule] = {}

    def check(report: PassReport, before: fx.GraphModule, after: fx.GraphModule) -> None:
        seen[report.name] = before

    manager = PassManager(COMMON_PASSES, strict=True, implemented=brings)
    reports = {report.name: report for report in manager.run(module, constants=constants, check=check)}
    added = [tensor for _, tensor in constants.added]
    return module, seen[NAME], reports[NAME], [[*values, *added] for values in graph.values()]


MODELS = [
    ("llama", "fp8-static", F32, "auto"),
    ("llama", "fp8", BF16, "fp8"),
    ("qwen3", "int8-static", BF16, "fp8"),
    ("qwen3", "fp8-static", F32, "fp8"),
    ("gemma3_text", "int8", F32, "auto"),
]


@pytest.mark.slow
@pytest.mark.parametrize("rotated", [True, False], ids=["rotation inside", "rotation apart"])
@pytest.mark.parametrize(("name", "scheme", "dtype", "kv"), slow_except(MODELS, MODELS[0]), ids=str)
def test_each_layer_of_a_model_is_fused_and_no_bit_changes(
    name: str, scheme: str, dtype: torch.dtype, kv: str, rotated: bool
) -> None:
    graph = graph_of(name, scheme, dtype, kv)
    module, before, report, values = rewritten(graph, BRINGS if rotated else frozenset())
    assert (report.matched, report.near_misses) == (2, ())
    assert [site.startswith("model.layers.") for site in report.sites] == [True, True]
    assert len(calls(module, ROTARY_ATTENTION_QUANTIZE if rotated else ATTENTION_QUANTIZE)) == 2
    assert not calls(module, ATTENTION, ROTARY_ATTENTION, QUANTIZE)  # the norms and gates before it end in codes too
    runs = [(run_graph(before, each), run_graph(module, each)) for each in values]
    assert all(same(*pair) for pair in runs)
    for node in calls(module):
        given = (ROTARY_ATTENTION_QUANTIZE if rotated else ATTENTION_QUANTIZE).bind(node.args, node.kwargs).args
        assert given["granularity"] == ("tensor" if "static" in scheme else "token")
        assert (given["out_scale"] is None) is ("static" not in scheme)
        assert (given["k_scale"] is None) is (kv == "auto")
        assert given["key_cache"].meta["example_value"].dtype == (FP8 if kv == "fp8" else dtype)
    restored = Snapshot(module).module()
    choices = choose_implementations(restored, ())
    made = [choice.implementation for choice in choices if choice.op.endswith("attention_quantize")]
    assert made == [ORIGINAL_NODES] * 2 and not calls(restored)
    plain = Snapshot(before).module()
    choose_implementations(plain, ())
    assert targets(restored) == targets(plain)  # no view is left of what the op would have had
    assert all(same(old, run_graph(restored, each)) for (old, _), each in zip(runs, values, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", slow_except((F32, BF16), F32), ids=str)
def test_the_numbers_stay_those_of_the_model(dtype: torch.dtype) -> None:
    graph = graph_of("llama", "fp8-static", dtype, "auto")
    module, _, _, values = rewritten(graph, BRINGS)
    for own, each in zip(graph.values(), values, strict=True):
        exact = run_graph(graph.traced.module, own, fp64=True).outputs[0]
        verdict = judge(run_graph(module, each).outputs[0], run_graph(graph.traced.module, own).outputs[0], exact)
        assert verdict.passed, verdict


@pytest.mark.slow
def test_a_device_that_makes_no_scale_of_all_heads_gets_the_two_ops_back_and_cuts_at_attention() -> None:
    module, *_ = rewritten(graph_of("llama", "fp8", BF16, "fp8"), BRINGS)
    picky = OpImplementation(
        op=ROTARY_ATTENTION_QUANTIZE.qualified_name,
        name="picky",
        fn=ROTARY_ATTENTION_QUANTIZE.reference,
        condition=lambda call: None if call.args["out_scale"] is not None else "its scale is made of all heads",
    )
    own = OpImplementation(op=ROTARY_ATTENTION.qualified_name, name="own", fn=ROTARY_ATTENTION.reference)
    choices = choose_implementations(module, [picky, own], mark=[op.qualified_name for op in OPS if op.break_point])
    chosen = [(choice.implementation, choice.refused) for choice in choices if "attention" in choice.op]
    refused = (("picky", "its scale is made of all heads"),)
    assert chosen == [(ORIGINAL_NODES, refused), ("own", ())] * 2
    cut = [node.meta[BREAK_POINT] for node in module.graph.nodes if BREAK_POINT in node.meta]
    assert cut == ["core::rotary_attention"] * 2


@pytest.mark.slow
def test_piecewise_graphs_are_cut_at_the_op() -> None:
    module, *_ = rewritten(graph_of("llama", "fp8-static", F32, "auto"), BRINGS)
    own = OpImplementation(
        op=ROTARY_ATTENTION_QUANTIZE.qualified_name, name="own", fn=ROTARY_ATTENTION_QUANTIZE.reference
    )
    choose_implementations(module, [own], mark=[op.qualified_name for op in OPS if op.break_point])
    cut = [node.meta[BREAK_POINT] for node in module.graph.nodes if BREAK_POINT in node.meta]
    assert cut == ["core::rotary_attention_quantize"] * 2


# One attention and one quantisation.


class Coded(Cached):
    """The caches hold codes; their scales are the function's too."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function, F32)
        for name, (scale, number) in zip(CACHES, (("k_scale", 0.0113), ("v_scale", 0.0171)), strict=True):
            self.register_buffer(scale, torch.tensor(number))
            setattr(self, name, stored(getattr(self, name), FP8, getattr(self, scale)))


def fused(function: Any, dtype: torch.dtype = F32, *, dynamic: Any = None, coded: bool = False) -> Any:
    """Run both fusions of attention, and check that no bit has changed, with the old nodes back neither."""
    module = function if isinstance(function, nn.Module) else Coded(function) if coded else Cached(function, dtype)
    inputs = inputs_of(dtype)
    graph = trace(lambda **given: module(**given), inputs, dynamic=dynamic)
    values = graph.values(inputs)
    before = run_graph(graph.module, values)
    passes = (FUSE_ROTARY_ATTENTION, FUSE_ATTENTION_QUANTIZE)
    *_, report = PassManager(passes, strict=True, implemented=BRINGS).run(graph.module)
    assert same(before, run_graph(graph.module, values))
    restored = Snapshot(graph.module).module()
    choose_implementations(restored, ())
    assert same(before, run_graph(restored, values)) and not calls(restored)
    return graph.module, report


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda out: out.flatten(1),
    "rows of one sequence": lambda out: out[None].reshape(1, T, -1).contiguous(),
    "rows behind two dimensions": lambda out: out.view(T, -1).unsqueeze(0).unsqueeze(0),
    "rows, the sequence last": lambda out: out.reshape(-1, H * D)[None, :, :],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "token": {},
    "tensor": {"granularity": "tensor"},
    "int8 tensor, given": {"dtype": INT8, "granularity": "tensor", "scale": 0.0271},
    "fp8 tensor, given": {"granularity": "tensor", "scale": 0.0093},
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_fused(form: str, options: str, dtype: torch.dtype) -> None:
    given = dict(OPTIONS[options])
    number = given.pop("scale", None)
    scale = None if number is None else torch.tensor(number)

    def model(**tensors: Tensor) -> Tensor:
        return values_of(FORMS[form](attended(**tensors)), scale, **given)

    module, report = fused(model, dtype)
    assert (report.matched, report.near_misses) == (1, ())
    (node,) = calls(module, ATTENTION_QUANTIZE)
    codes = next(user for user in node.users if user.args[1] == 0)
    assert tuple(codes.meta["example_value"].shape) == (T, H * D)
    assert not [n for n in module.graph.nodes if n.target in ("flatten", "reshape", "contiguous")]


@pytest.mark.cases(2)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_rotation_before_and_a_cache_of_codes_are_no_obstacle(options: str) -> None:
    given = dict(OPTIONS[options])
    scale = torch.tensor(given.pop("scale")) if "scale" in given else None

    def model(k_scale: Tensor, v_scale: Tensor, **tensors: Tensor) -> Tensor:
        out = heads_first(**tensors, k_scale=k_scale, v_scale=v_scale)
        return values_of(out[None].reshape(1, T, -1), scale, **given)

    module, report = fused(model, coded=True)
    assert report.matched == 1
    (node,) = calls(module, ROTARY_ATTENTION_QUANTIZE)
    assert node.kwargs["k_scale"] is not None and node.kwargs["v_scale"] is not None


@pytest.mark.slow
def test_symbolic_token_counts_are_no_obstacle() -> None:
    dims = {name: [1] for name in ("query", "key", "value", "cos", "sin")} | {"slot_mapping": [0]}

    def model(**tensors: Tensor) -> Tensor:
        out = heads_first(**tensors)
        return values_of(out[None].reshape(1, out.shape[0], -1).contiguous())

    _, report = fused(model, BF16, dynamic=dims)
    assert report.matched == 1


def test_a_result_that_nothing_reads_is_no_hindrance() -> None:
    def model(**tensors: Tensor) -> Tensor:
        codes: Tensor = ops.quantize(attended(**tensors).flatten(1)[None], None, dtype=INT8)[0].float() * 2
        return codes

    module, report = fused(model)
    assert report.matched == 1 and len(calls(module)) == 1


class Positional(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **given: Tensor) -> Any:
        return self.module(*given.values())


@pytest.mark.slow
def test_the_examples_of_the_pass_owe_a_match_each() -> None:
    found = list(examples())
    assert len(found) == 3
    for module, _ in found:
        _, report = fused(Positional(module))
        assert report.matched == 1


@pytest.mark.cases(3)
@pytest.mark.parametrize("model", NEAR_MISSES, ids=lambda model: model.__name__)
def test_near_misses_stay_as_they_are_with_the_reason(model: Callable[..., Any]) -> None:
    module = Cached(model, F32)
    graph = trace(lambda **given: module(**given), inputs_of(F32))

    def listed() -> list[tuple[Any, ...]]:
        remove_dead(graph.module.graph)  # the pass gives each result of a quantisation a node
        nodes = [node for node in graph.module.graph.nodes if node.op != "output"]
        order: dict[Any, Any] = {node: index for index, node in enumerate(nodes)}
        return [
            (node.target, str(fx.map_arg(node.args, order.__getitem__)), str(node.meta["example_value"]))
            for node in nodes
        ]

    before = listed()
    (report,) = PassManager((FUSE_ATTENTION_QUANTIZE,), strict=True, implemented=BRINGS).run(graph.module)
    assert report.matched == 0
    assert NEAR_MISSES[model] in report.near_misses[0].reason, report.near_misses
    assert listed() == before


def test_what_is_computed_in_between_makes_no_noise() -> None:
    module, report = fused(gated)
    assert (report.matched, report.near_misses) == (0, ()) and not calls(module)


def test_results_that_are_read_twice_are_one_result() -> None:
    _, report = fused(results_read_twice)
    assert report.matched == 1


def test_a_refused_site_leaves_the_others_alone() -> None:
    def model(**given: Tensor) -> tuple[Tensor, Tensor]:
        second = {name: given[name].clone() for name in CACHES}
        return written_between(**given), values_of(attended(**{**given, **second}).flatten(1)[None])

    module, report = fused(model)
    assert (report.matched, len(report.near_misses)) == (1, 1)
    assert len(calls(module)) == len(calls(module, QUANTIZE)) == 1


def test_a_second_run_finds_nothing() -> None:
    module, _ = fused(lambda **tensors: values_of(attended(**tensors).flatten(1)))
    (report,) = PassManager((FUSE_ATTENTION_QUANTIZE,), strict=True, implemented=BRINGS).run(module)
    assert (report.matched, report.near_misses) == (0, ())
