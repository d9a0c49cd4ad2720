"""core/quantization/sensitivity.py: what each quantised layer costs the model as a whole, computed plainly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core
from core.errors import UsageError
from core.quantization import quantize as quantizing
from core.quantization.layers import QuantizedModule
from core.quantization.report import QuantizationReport, report_of
from tests.quantization.models import ids, model, relative

PLANTED = "layers.1.v_proj"


def measured(scheme: str = "int8", **options: Any) -> tuple[nn.Module, QuantizationReport]:
    quantized = core.quantize(model(), scheme, calibration=[ids(), ids(seed=1)], sensitivity=True, **options)
    report = report_of(quantized)
    assert report is not None
    return quantized, report


def divergence(exact: Tensor, other: Tensor) -> float:
    p, q = (torch.log_softmax(each.double(), -1).flatten(0, -2) for each in (exact, other))
    return float(nn.functional.kl_div(q, p, log_target=True, reduction="batchmean"))


@torch.no_grad()
def test_divergence_is_that_of_one_layer_alone_and_of_all() -> None:
    exact, (quantized, report) = model(), measured()
    batches = torch.cat((ids(), ids(seed=1)))
    assert report.divergence == pytest.approx(divergence(exact(batches), quantized(batches)), rel=1e-3)
    for layer in report.layers[::3]:
        alone = copy.deepcopy(exact)
        quantizing.replace_module(alone, layer.name, quantized.get_submodule(layer.name))
        assert layer.divergence == pytest.approx(divergence(exact(batches), alone(batches)), rel=1e-3)


@torch.no_grad()
def test_cumulative_errors_are_those_of_the_quantised_model() -> None:
    exact, (quantized, report) = model(), measured()
    outputs: dict[str, list[Tensor]] = {}
    for each in (exact, quantized):
        for layer in report.layers:
            hook = lambda _module, _args, output, name=layer.name: outputs.setdefault(name, []).append(output)  # noqa: E731
            each.get_submodule(layer.name).register_forward_hook(hook)
        each(torch.cat((ids(), ids(seed=1))))
    for layer in report.layers:
        wanted, found = outputs[layer.name]
        assert layer.cumulative_error == pytest.approx(relative(found, wanted), rel=1e-3), layer.name
    first, last = report.layers[0], report.layers[-1]
    assert first.cumulative_error == pytest.approx(first.output_error)
    assert (last.cumulative_error or 0) > (last.output_error or 0)


def test_a_bad_scale_in_one_layer_stands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    own = quantizing.quantized_layer

    def planted(name: str, *args: Any, **options: Any) -> QuantizedModule:
        made = own(name, *args, **options)
        if name == PLANTED:
            made.get_parameter("weight_scale").mul_(1.3)
        return made

    monkeypatch.setattr(quantizing, "quantized_layer", planted)
    report = measured()[1]
    assert report.worst(1)[0].name == PLANTED
    for field in ("weight_error", "output_error", "divergence"):
        values = {layer.name: getattr(layer, field) for layer in report.layers}
        assert max(values, key=values.__getitem__) == PLANTED, field
        others = sorted(value for name, value in values.items() if name != PLANTED)
        assert values[PLANTED] > 10 * others[len(others) // 2], field


def test_the_model_is_whole_afterwards_and_hooks_run_meanwhile() -> None:
    whole = model()
    calls: list[str] = []
    whole.layers[0].q_proj.register_forward_hook(lambda *_: calls.append("q"))
    told: list[tuple[str, int, int]] = []
    core.quantize(whole, "int8", calibration=[ids()], sensitivity=True, progress=lambda *each: told.append(each))
    assert len(calls) == 11  # once for the outputs' errors, twice for all layers, eight times for one of them
    assert [each for each in told if each[0] == "sensitivity"] == [("sensitivity", done, 8) for done in range(8)]
    assert not any("forward" in vars(module) for module in whole.modules())


def test_nan_in_the_predictions_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    own = quantizing.quantized_layer

    def planted(name: str, *args: Any, **options: Any) -> QuantizedModule:
        made = own(name, *args, **options)
        if name == PLANTED:
            made.get_parameter("weight_scale")[0] = torch.nan
        return made

    monkeypatch.setattr(quantizing, "quantized_layer", planted)
    found = {layer.name: layer.divergence for layer in measured()[1].layers}
    assert [name for name, value in found.items() if value != value] == [PLANTED]


def test_without_predictions_or_text_it_is_refused() -> None:
    whole = model()
    with pytest.raises(UsageError, match="no text to measure the predictions on"):
        core.quantize(whole, "int8", sensitivity=True)
    assert not any(isinstance(module, QuantizedModule) for module in whole.modules())
    with pytest.raises(UsageError, match="returns dict, in which there are no logits"):
        core.quantize(Named(), "int8", calibration=[torch.randn(2, 8)], sensitivity=True)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.layer(x)}
