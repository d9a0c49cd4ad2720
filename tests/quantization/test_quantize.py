"""core.quantize on small models: what becomes of layers, what is left out, errors, memory, calibration, the report."""

from __future__ import annotations

import copy
import json
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import core
from core.errors import UsageError
from core.quantization.layers import (
    QuantizedLinear,
    QuantizedModule,
    WeightOnlyLinear,
    continuous,
    num_weights,
    rounds_inputs,
)
from core.quantization.report import report_of
from core.quantization.scheme import SCHEMES, find_scheme
from tests.quantization.models import Attention, ids, model, relative

NAMES = [
    name.replace("w4a16", "w4a16-g32") if name == "w4a16" else name for name in SCHEMES if name != "w4a16-asymmetric"
]
NAMES += ["w4a16-asymmetric-g16", "w8a16-g32"]
BOUNDS = {"fp8": 0.06, "int": 0.03, "w8a": 0.02, "w4a": 0.2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", NAMES)
@torch.no_grad()
def test_a_quantised_model_is_close_to_the_model(scheme: str, dtype: torch.dtype) -> None:
    exact, quantized = model(dtype), model(dtype)
    assert core.quantize(quantized, scheme, calibration=[ids()]) is quantized
    off = relative(quantized(ids()), exact(ids()))
    assert 1e-4 < off < BOUNDS[scheme[:3]], off
    kind = WeightOnlyLinear if scheme.startswith("w") else QuantizedLinear
    assert sum(type(module) is kind for module in quantized.modules()) == 8


@torch.no_grad()
def test_layers_are_the_two_ops_of_their_codes() -> None:
    layer, x = Attention().q_proj.requires_grad_(False), torch.randn(3, 5, 64)
    holder = nn.Sequential(layer)
    core.quantize(holder, "fp8")
    made: Any = holder[0]
    assert made.weight.dtype == torch.float8_e4m3fn and made.weight.shape == (64, 64)
    assert made.weight_scale.dtype == torch.float32 and made.weight_scale.shape == (64, 1)
    codes, scale = torch.ops.core.quantize(x, None, dtype=torch.float8_e4m3fn)
    want = torch.ops.core.quantized_linear(codes, scale, made.weight, made.weight_scale, made.bias, out_dtype=x.dtype)
    assert torch.equal(holder(x), want)
    graph = torch.export.export(holder, (x,)).graph
    names = [str(node.target) for node in graph.nodes if "core" in str(node.target)]
    assert names == ["core.quantize.default", "core.quantized_linear.default"]


def test_heads_routers_and_what_is_named_stay_as_they_are() -> None:
    quantized = core.quantize(model(), "int8", ignore=["layers.0.o_proj", r"re:layers\.1\.[qk]_proj$"])
    left = {name for name, module in quantized.named_modules() if isinstance(module, nn.Linear)}
    assert left == {"layers.0.o_proj", "layers.1.q_proj", "layers.1.k_proj", "gate", "lm_head"}
    report = report_of(quantized)
    assert report is not None and {each.name for each in report.ignored} == left
    assert len(report.layers) == 5 and quantized.lm_head.weight is quantized.embed.weight


@pytest.mark.parametrize("scheme", ["fp8-static", "int8", "w4a16-g32"])
@torch.no_grad()
def test_casts_and_copies_leave_codes_and_scales_alone(scheme: str) -> None:
    quantized = core.quantize(model(torch.bfloat16), scheme, calibration=[ids()])
    before = copy.deepcopy(quantized.state_dict())
    wide = copy.deepcopy(quantized).double()
    assert wide.embed.weight.dtype == torch.float64 and wide.layers[0].q_proj.bias.dtype == torch.float64
    for name, tensor in wide.state_dict().items():
        if "_proj" in name and not name.endswith("bias"):
            assert tensor.dtype == before[name].dtype
            assert torch.equal(tensor.double(), before[name].double()), name
    assert wide(ids()).dtype == torch.float64 and relative(quantized(ids()), wide(ids())) < 0.03
    assert not any(parameter.requires_grad for parameter in wide.parameters())


@torch.no_grad()
def test_layers_given_one_tensor_share_one_static_scale() -> None:
    quantized = core.quantize(model(), "int8-static", calibration=[ids(seed=1), ids(seed=2)])
    first: Any = quantized.layers[0]
    assert first.q_proj.input_scale is first.k_proj.input_scale is first.v_proj.input_scale
    assert first.o_proj.input_scale is not first.q_proj.input_scale
    assert quantized.layers[1].q_proj.input_scale is not first.q_proj.input_scale
    moved: Any = copy.deepcopy(quantized).double().layers[0]
    assert moved.q_proj.input_scale is moved.v_proj.input_scale
    # The scale reaches the largest value of all batches.
    seen = []
    whole = model()
    whole.layers[0].q_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].abs().max()))
    for seed in (1, 2):
        whole(ids(seed=seed))
    torch.testing.assert_close(first.q_proj.input_scale, max(seen) / 127)


def test_one_layer_at_a_time_is_held_twice() -> None:
    whole = model()
    weights = {name: weakref.ref(m.weight) for name, m in whole.named_modules() if name.endswith("_proj")}
    alive = []

    def progress(stage: str, done: int, total: int) -> None:
        assert (stage, total) == ("quantize", 8)
        alive.append(sum(reference() is not None for reference in weights.values()))

    core.quantize(whole, "int8", progress=progress)
    assert alive == [8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_a_layer_in_two_places_stays_one() -> None:
    layer = nn.Linear(64, 64)
    both = nn.Sequential(layer, nn.ReLU(), layer)
    core.quantize(both, "int8")
    assert both[0] is both[2] and isinstance(both[0], QuantizedModule)


def test_errors_are_measured_and_reported_by_layer() -> None:
    quantized = core.quantize(model(), "int8", calibration=[ids()])
    report = report_of(quantized)
    assert report is not None and report.scheme == "int8" and len(report.layers) == 8
    for layer in report.layers:
        assert 1e-3 < (layer.weight_error or 0) < 0.02 and 1e-3 < (layer.output_error or 0) < 0.03
        assert layer.bytes_after < layer.bytes_before / 3
    worst = report.worst(1)[0]
    assert worst.name in report.summary() and worst.output_error == max(
        each.output_error or 0 for each in report.layers
    )
    assert all(layer.name in report.text() for layer in report.layers) and "gate: ignored by" in report.text()
    document = json.loads(json.dumps(report.to_json()))
    assert document["layers"][0]["shape"] == [64, 64] and len(document["ignored"]) == 2
    # Weights alone without inputs.
    plain = report_of(core.quantize(model(), "int8"))
    assert plain is not None and plain.layers[0].output_error is None and plain.layers[0].weight_error is not None
    assert report_of(nn.Linear(2, 2)) is None


def test_the_reported_error_is_that_of_weight_and_output() -> None:
    exact, quantized = model(), model()
    core.quantize(quantized, "fp8", calibration=[ids()])
    report = report_of(quantized)
    assert report is not None
    (found,) = (each for each in report.layers if each.name == "layers.0.o_proj")
    layer, made = exact.layers[0].o_proj, quantized.layers[0].o_proj
    given: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    exact(ids())
    assert found.weight_error == pytest.approx(relative(made.values()[0], layer.weight), rel=1e-6)
    assert found.output_error == pytest.approx(relative(made(given[0]), layer(given[0])), rel=1e-6)


@torch.no_grad()
def test_within_continuous_inputs_are_not_rounded() -> None:
    quantized = core.quantize(model(), "fp8")
    dequantised = model()
    for name, module in quantized.named_modules():
        if isinstance(module, QuantizedModule):
            dequantised.get_submodule(name).weight.copy_(module.values()[0])
    assert rounds_inputs(quantized) and relative(quantized(ids()), dequantised(ids())) > 1e-3
    with continuous(quantized):
        assert not rounds_inputs(quantized) and relative(quantized(ids()), dequantised(ids())) < 1e-5
    assert rounds_inputs(quantized) and not rounds_inputs(core.quantize(model(), "w8a16"))


def test_weights_are_counted_not_words_and_scales() -> None:
    count = num_weights(model())
    assert count == sum(parameter.numel() for parameter in model().parameters())
    assert num_weights(core.quantize(model(), "w4a16-g32")) == num_weights(core.quantize(model(), "fp8")) == count


def _broken(value: float) -> nn.Module:
    whole = model()
    whole.layers[1].v_proj.weight[3, 5] = value
    return whole


ERRORS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "unknown": (
        model,
        {"scheme": "fp9"},
        "quantisation scheme 'fp9'\n  found: the schemes are fp8, .*did you mean 'fp8",
    ),
    "grouped activations": (model, {"scheme": "fp8-g32"}, "groups of weights go with weight-only schemes"),
    "group size": (
        model,
        {"scheme": "w4a16"},
        "layer 'layers.0.q_proj'\n.*64 input features do not divide into groups of 128",
    ),
    "nan": (lambda: _broken(torch.nan), {"scheme": "int8"}, "layer 'layers.1.v_proj'\n  found: 1 of its 4096 weights"),
    "infinity": (lambda: _broken(torch.inf), {"scheme": "fp8"}, "NaN or infinite"),
    "no calibration": (model, {"scheme": "fp8-static"}, "no calibration batches"),
    "no layer": (lambda: nn.Sequential(nn.ReLU()), {"scheme": "int8"}, "no linear layer to quantise"),
    "unused": (model, {"scheme": "int8", "ignore": ["layers.7"]}, "ignoring 'layers.7'\n  found: no linear layer"),
    "expression": (model, {"scheme": "int8", "ignore": ["re:(("]}, "no regular expression"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_quantised_is_one_error_and_changes_nothing(name: str) -> None:
    make, options, message = ERRORS[name]
    whole = make()
    with pytest.raises(UsageError, match=f"(?s){message}"):
        core.quantize(whole, **options)
    assert not any(isinstance(module, QuantizedModule) for module in whole.modules())


def test_quantising_twice_is_an_error() -> None:
    quantized = core.quantize(model(), "int8")
    with pytest.raises(UsageError, match=r"'layers.0.q_proj' is quantised already \(int8\)"):
        core.quantize(quantized, "fp8")


@pytest.mark.parametrize("with_kwargs", [False, True])
def test_what_is_done_before_a_layer_is_done_before_its_quantised_form(with_kwargs: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32)), torch.randn(4, 32)
    if with_kwargs:
        model[0].register_forward_pre_hook(lambda _, args, named: ((args[0] * 10,), named), with_kwargs=True)
    else:
        model[0].register_forward_pre_hook(lambda _, args: (args[0] * 10,))
    expected = model(x)
    torch.testing.assert_close(core.quantize(model, "w8a16")(x), expected, rtol=0.02, atol=0.05)


def test_single_layers_with_a_forward_of_their_own_are_left_out() -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(4, 32)
    layer = model[0]
    layer.forward = lambda x: F.linear(x * 10, layer.weight)  # type: ignore[method-assign]
    expected = model(x)
    quantized = core.quantize(model, "w8a16")
    report = report_of(quantized)
    assert report is not None and [each.name for each in report.ignored] == ["0"]
    torch.testing.assert_close(quantized(x), expected, rtol=0.02, atol=0.05)


def test_subclasses_with_a_forward_of_their_own_are_left_out() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    both = nn.Sequential(Scaled(64, 64), nn.Linear(64, 64))
    report = report_of(core.quantize(both, "int8"))
    assert report is not None and [each.reason for each in report.ignored] == [
        "Scaled computes more than a linear layer"
    ]


def test_schemes_have_names_and_sizes_of_groups() -> None:
    assert find_scheme("w4a16").weights.group_size == 128 and find_scheme("w8a16-g64").weights.group_size == 64
    assert find_scheme(SCHEMES["fp8"]) is SCHEMES["fp8"]
    with pytest.raises(UsageError, match="at least one weight"):
        find_scheme("w4a16-g0")
