"""core/quantization/calibrate.py: what may be a batch, and one error for each thing that is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import core
from core.errors import UsageError
from core.quantization.layers import QuantizedModule
from core.quantization.report import report_of
from tests.quantization.models import ids, model


def _failing(*_: Any) -> Any:
    raise torch.OutOfMemoryError("no memory left")


CALIBRATIONS: dict[str, tuple[Any, str]] = {
    "tensor": (ids(), r"calibration is one tensor of shape \(2, 9\).*to do: pass calibration=\[tensor\]"),
    "mapping": ({"ids": ids()}, r"calibration is one mapping \(ids\).*to do: pass calibration=\[mapping\]"),
    "none": (None, "calibration is None.*to do: leave calibration out, or pass"),
    "number": (7, "calibration is 7, an int.*to do: pass calibration="),
    "text": ("some text", "calibration is 'some text', a str.*to do: pass calibration="),
    "list of numbers": ([[1, 2, 3]], "calibration batch 0 is a list without a tensor.*torch.tensor"),
    "number among batches": ([ids(), 3], "calibration batch 1 is an int"),
    "text among batches": (["once"], "calibration batch 0 is a str.*token ids"),
    "nothing among batches": ([None], "calibration batch 0 is a NoneType"),
    "mapping of no tensors": ([{"ids": [1, 2]}], "calibration batch 0 is a dict without a tensor"),
    "mapping by number": ([{0: ids()}], "calibration batch 0 names its arguments by 0, an int"),
    "wrong dtype": ([ids(), ids().float()], "calling Model with calibration batch 1 raised (RuntimeError|TypeError)"),
    "wrong name": ([{"tokens": ids()}], "calling Model with calibration batch 0 raised TypeError: .*tokens"),
    "one too many": ([(ids(), ids())], "calling Model with calibration batch 0 raised TypeError"),
    "beyond the vocabulary": ([ids() + 50], "calling Model with calibration batch 0 raised IndexError"),
}


@pytest.mark.parametrize("scheme", ["int8", "fp8-static"])
@pytest.mark.parametrize("name", CALIBRATIONS)
def test_calibration_that_is_no_input_of_the_model_is_one_error(name: str, scheme: str) -> None:
    given, message = CALIBRATIONS[name]
    whole = model()
    with pytest.raises(UsageError, match=f"(?s)quantise a Model by '{scheme}'\n  found: {message}"):
        core.quantize(whole, scheme, calibration=given)
    assert not any(isinstance(module, QuantizedModule) for module in whole.modules())
    assert not any(module._forward_hooks for module in whole.modules())


def test_running_out_of_memory_is_told_as_that() -> None:
    whole = model()
    whole.layers[0].o_proj.register_forward_pre_hook(_failing)
    with pytest.raises(torch.OutOfMemoryError):
        core.quantize(whole, "int8", calibration=[ids()])


def test_batches_may_come_from_a_loader_or_a_generator() -> None:
    data = torch.utils.data.TensorDataset(ids(rows=4))
    for given in (torch.utils.data.DataLoader(data, batch_size=2), (ids(seed=seed) for seed in (1, 2)), (ids(),)):
        assert report_of(core.quantize(model(), "int8-static", calibration=given)) is not None


def test_batches_may_be_tensors_mappings_and_tuples() -> None:
    scales = []
    for batch in (ids(), {"ids": ids()}, (ids(),)):
        quantized: Any = core.quantize(model(), "int8-static-asymmetric", calibration=[batch])
        scales.append(quantized.layers[0].q_proj.input_scale.item())
        assert quantized.layers[0].q_proj.input_zero_point.dtype == torch.int8
    assert len(set(scales)) == 1


def test_calibration_that_reaches_no_layer_or_meets_nan_is_an_error() -> None:
    skipping = model()
    skipping.extra = nn.Linear(8, 8)
    with pytest.raises(UsageError, match=r"(?s)calibrate layer 'extra'.*saw no input"):
        core.quantize(skipping, "int8-static", calibration=[ids()])
    spoiled = model()
    spoiled.embed.weight[int(ids()[0, 0])] = torch.nan
    with pytest.raises(UsageError, match="was given NaN or infinity"):
        core.quantize(spoiled, "int8-static", calibration=[ids()])
