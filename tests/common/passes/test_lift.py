"""core/common/passes/lift: each lift fires as often as the model owes, changes no bit, and leaves near-misses alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.common.ops.activation import GATED_ACTIVATION, GATED_ACTIVATION_FUSED
from core.common.ops.normalization import ADD_RMS_NORM, RMS_NORM
from core.common.ops.rotary import ROTARY
from core.common.passes.declaration import Pass
from core.common.passes.lift.add_rms_norm import FUSE_ADD_RMS_NORM
from core.common.passes.lift.gated_activation import LIFT_GATED_ACTIVATION
from core.common.passes.lift.rms_norm import LIFT_RMS_NORM
from core.common.passes.lift.rotary import LIFT_ROTARY
from core.common.passes.manager import PassManager, PassReport
from core.common.traced import TracedGraph
from core.common.tracing import trace
from core.engine.loading import build_model
from core.engine.tiny import tiny_config

PASSES = (LIFT_RMS_NORM, FUSE_ADD_RMS_NORM, LIFT_GATED_ACTIVATION, LIFT_ROTARY)
# Residual adds in front of a norm: pre-norm layers have two, less the first; OLMo 2 normalises before it adds.
MODELS = {
    "llama": {"add": 4, "gate": 2, "rotary": 2},
    "qwen3": {"add": 4, "gate": 2, "rotary": 2},
    "gemma3_text": {"add": 4, "gate": 2, "rotary": 2},
    "olmo2": {"add": 1, "gate": 2, "rotary": 2},
    "phi3": {"add": 4, "gate": 2, "rotary": 2},
}


def traced_model(name: str, dtype: torch.dtype, num_tokens: int = 9) -> tuple[TracedGraph, dict[str, Tensor], int]:
    """Trace a tiny model; return it with its inputs and the number of norms that ran, counted by hooks."""
    model: Any = build_model(tiny_config(name), torch_device=torch.device("cpu"), dtype=dtype).model
    inputs = {"input_ids": torch.arange(3, 3 + num_tokens)[None], "position_ids": torch.arange(num_tokens)[None]}
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    ran: Counter[nn.Module] = Counter()
    hooks = [norm.register_forward_hook(lambda module, *_: ran.update([module])) for norm in norms]
    with torch.no_grad():
        model(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    graph = trace(lambda input_ids, position_ids: model(
        input_ids=input_ids, position_ids=position_ids, use_cache=False
    ).logits, inputs)  # fmt: skip
    return graph, inputs, ran.total()


def count(graph: TracedGraph, target: object) -> int:
    return sum(node.target is target for node in graph.module.graph.nodes)


def reports(graph: TracedGraph, *passes: Pass) -> dict[str, PassReport]:
    return {report.name: report for report in PassManager(passes, strict=True).run(graph.module)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_lifted_whole_and_no_bit_changes(name: str, dtype: torch.dtype) -> None:
    graph, inputs, num_norms = traced_model(name, dtype)
    values = graph.values(inputs)
    with torch.no_grad():
        control = graph.module(*values)[0].clone()
    done = reports(graph, *PASSES)
    with torch.no_grad():
        assert torch.equal(graph.module(*values)[0], control)
    owed = MODELS[name]
    assert done["lift_rms_norm"].matched == num_norms
    assert count(graph, RMS_NORM.overload) == num_norms - owed["add"]
    assert count(graph, ADD_RMS_NORM.overload) == done["fuse_add_rms_norm"].matched == owed["add"]
    gates = count(graph, GATED_ACTIVATION.overload) + count(graph, GATED_ACTIVATION_FUSED.overload)
    assert gates == done["lift_gated_activation"].matched == owed["gate"]
    # OLMo 2 casts query and key back after rotating in fp32: that form is not read yet, and must stay right.
    rotary = 0 if (name, dtype) == ("olmo2", torch.bfloat16) else owed["rotary"]
    assert count(graph, ROTARY.overload) == done["lift_rotary"].matched == rotary


def test_a_fused_gate_and_up_projection_is_one_operand() -> None:
    graph, _, _ = traced_model("phi3", torch.float32)
    reports(graph, LIFT_GATED_ACTIVATION)
    assert count(graph, GATED_ACTIVATION_FUSED.overload) == 2
    # Phi 3 multiplies up with the activated gate, and its gate is the first half.
    assert all(n.kwargs["gate_first"] for n in graph.module.graph.nodes if n.target is GATED_ACTIVATION_FUSED.overload)


X, W = torch.randn(5, 8, dtype=torch.float64).float(), torch.linspace(0.5, 1.5, 8)


def norm(x: Tensor, eps: float = 1e-5, dim: int = -1) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + eps)


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "pow": lambda x: norm(x) * W,
    "weight first": lambda x: W * norm(x),
    "product": lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * W,
    "square, negative power": lambda x: x * torch.pow(torch.square(x).mean((-1,), True) + 1e-5, -0.5),
    "one over root": lambda x: x * (1 / torch.sqrt(1e-5 + x.pow(2).mean(-1, keepdim=True))),
    "one plus weight": lambda x: norm(x) * (1.0 + W),
    "single op": lambda x: torch.rms_norm(x, (8,), W, 3e-4),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_lifted_and_right(spelling: str) -> None:
    graph = trace(lambda x: SPELLINGS[spelling](x), {"x": X})
    (report,) = reports(graph, LIFT_RMS_NORM).values()
    assert report.matched == count(graph, RMS_NORM.overload) == 1
    torch.testing.assert_close(graph.module(*graph.values({"x": X}))[0], SPELLINGS[spelling](X), rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 3e-4])
def test_eps_is_read_as_a_value(eps: float) -> None:
    graph = trace(lambda x: norm(x, eps), {"x": X})
    reports(graph, LIFT_RMS_NORM)
    (node,) = (n for n in graph.module.graph.nodes if n.target is RMS_NORM.overload)
    assert node.args[2] == eps


def root(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    factor = root(x)
    return x * factor, factor


NEAR_MISSES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "the root is used twice": (scaled, "is used otherwise than in one product"),
    "something else is scaled": (lambda x: x.abs() * root(x), "not the normalised"),
    "another dimension": (lambda x: norm(x, dim=0), ""),
    "a layer norm's root": (
        lambda x: x * torch.rsqrt((x - x.mean(-1, True)).pow(2).mean(-1, True) + 1e-5),
        "multiplies",
    ),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_are_left_alone_with_the_reason(case: str) -> None:
    function, reason = NEAR_MISSES[case]
    graph = trace(lambda x: function(x), {"x": X})
    (report,) = reports(graph, LIFT_RMS_NORM).values()
    assert report.matched == 0 and count(graph, RMS_NORM.overload) == 0
    assert [miss.reason for miss in report.near_misses if reason in miss.reason] or not reason


def test_a_write_between_input_and_norm_is_a_near_miss() -> None:
    buffer = X.clone()

    def model(x: Tensor) -> Tensor:
        root = torch.rsqrt(buffer.pow(2).mean(-1, keepdim=True) + 1e-5)
        buffer.add_(x)
        return buffer * root

    graph = trace(model, {"x": X})
    (report,) = reports(graph, LIFT_RMS_NORM).values()
    assert report.matched == 0
    assert "written" in report.near_misses[0].reason


def test_a_sum_of_different_shapes_is_not_fused() -> None:
    graph = trace(lambda x: norm(x + W), {"x": X})
    done = reports(graph, LIFT_RMS_NORM, FUSE_ADD_RMS_NORM)
    assert done["lift_rms_norm"].matched == 1 and done["fuse_add_rms_norm"].matched == 0
    assert "different shapes" in done["fuse_add_rms_norm"].near_misses[0].reason


def test_a_residual_used_twice_stays_available() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        total = x + y
        return norm(total) * W + total * 2 + total.sum()

    y = X.flip(0)
    graph = trace(model, {"x": X, "y": y})
    done = reports(graph, LIFT_RMS_NORM, FUSE_ADD_RMS_NORM)
    assert done["fuse_add_rms_norm"].matched == 1
    assert torch.equal(graph.module(*graph.values({"x": X, "y": y}))[0], model(X, y))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.nn.functional.silu(x) * x.sum(-1, keepdim=True),
        lambda x: (lambda a: a * x + a)(torch.nn.functional.silu(x)),
        lambda x: torch.sigmoid(x) * x.abs(),
    ],
    ids=["broadcast", "activation used twice", "another function"],
)
def test_products_that_are_no_gate_stay(function: Callable[[Tensor], Tensor]) -> None:
    graph = trace(lambda x: function(x), {"x": X})
    (report,) = reports(graph, LIFT_GATED_ACTIVATION).values()
    assert report.matched == 0


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float = -1.0) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return x * cos + torch.cat((-second if sign < 0 else second, first), dim=-1) * sin


def test_a_rotation_of_one_tensor_alone_or_of_another_sign_stays() -> None:
    cos, sin = torch.rand(5, 8), torch.rand(5, 8)
    alone = trace(lambda x: rotate(x, cos, sin), {"x": X})
    (report,) = reports(alone, LIFT_ROTARY).values()
    assert report.matched == 0 and "0 other tensors" in report.near_misses[0].reason
    other = trace(lambda x, y: (rotate(x, cos, sin, 1.0), rotate(y, cos, sin, 1.0)), {"x": X, "y": X.flip(0)})
    (report,) = reports(other, LIFT_ROTARY).values()
    assert report.matched == 0
