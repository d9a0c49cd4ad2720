"""`core.quantize`: replace a model's linear layers by quantised ones, in place, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from core.errors import UsageError
from core.quantization.calibrate import Batch, Range, RangeObserver, batches_of, run_batches
from core.quantization.errors import Make, OutputErrors, weight_error
from core.quantization.layers import QuantizedModule, share_input_scales
from core.quantization.make import check_layers, quantized_layer
from core.quantization.report import LayerReport, QuantizationReport
from core.quantization.scheme import QuantizationScheme, find_scheme
from core.quantization.sensitivity import Sensitivity, measure_sensitivity
from core.quantization.targets import check_not_quantized, find_targets

Model = TypeVar("Model", bound=nn.Module)
Progress = Callable[[str, int, int], None]
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


@torch.no_grad()
def quantize(
    model: Model,
    scheme: str | QuantizationScheme,
    *,
    calibration: Iterable[Batch] = (),
    ignore: Sequence[str] = (),
    sensitivity: bool = False,
    progress: Progress | None = None,
) -> Model:
    """Quantise a model's linear layers and stacked experts in place; return it, with a report as `model.quantization`.

    One layer at a time has both its forms in memory. Raises `UsageError` for an unknown scheme, a calibration that is
    missing or that the model cannot be called with, a model without linear layers or with quantised ones, and weights
    that cannot be quantised, all before the first layer is replaced.
    scheme: a name of `SCHEMES`, or a scheme.
    calibration: arguments of the model, one set per batch, on its device. A static scheme takes its scales from them,
    and they are used to measure the error of each layer's output.
    ignore: module paths, or "re:" and a regular expression, to leave out; the output head and routers always are.
    sensitivity: measure on the calibration, too, the errors that pile up from layer to layer, and how far each layer
    alone moves the predictions; the model runs once for each layer.
    progress: called with a stage, done and total.
    """
    found = find_scheme(scheme)
    asked = f"quantise a {type(model).__name__} by {found.name!r}"
    check_not_quantized(model)
    targets = find_targets(model, ignore)
    if not targets.layers:
        raise UsageError(asked, found="it has no linear layer to quantise", remedy="pass a model of torch.nn.Linear")
    check_layers(targets.layers, found)
    batches = batches_of(asked, calibration)
    ranges = _observe(asked, model, targets.layers, found, batches)
    make = partial(quantized_layer, scheme=found, ranges=ranges)
    errors = OutputErrors(make)
    run_batches(asked, model, targets.layers, batches, errors)
    measured = None
    if sensitivity:
        told = partial(progress or _ignored, "sensitivity")
        measured = measure_sensitivity(asked, model, targets.layers, batches, make, told)
    reports = _replace_all(model, targets.layers, make, errors, measured, progress or _ignored)
    share_input_scales(model)
    divergence = None if measured is None else measured.together
    report = QuantizationReport(
        scheme=found.name, layers=tuple(reports), ignored=targets.ignored, divergence=divergence
    )
    model.quantization = report  # type: ignore[assignment]  # torch annotates attributes as tensors and modules
    return model


def _ignored(_stage: str, _done: int, _total: int) -> None:
    """Take progress that nobody asked for."""


def _replace_all(
    model: nn.Module,
    layers: dict[str, nn.Module],
    make: Make,
    errors: OutputErrors,
    measured: Sensitivity | None,
    progress: Progress,
) -> list[LayerReport]:
    """Quantise the layers one by one; each leaves the dict at once, so that its memory is freed."""
    paths: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(name)
    reports: list[LayerReport] = []
    for done, name in enumerate(total := list(layers)):
        progress("quantize", done, len(total))
        layer = layers.pop(name)
        made = make(name, layer)
        _keep_hooks(layer, made)
        reports.append(_report(name, layer, made, errors.relative(name), measured))
        for path in paths[id(layer)]:
            replace_module(model, path, made)
        del layer
    progress("quantize", len(total), len(total))
    return reports


def _keep_hooks(layer: nn.Module, made: nn.Module) -> None:
    """Move the old layer's hooks to the new one, such as the reduction of a sharded model."""
    for name in _HOOKS:
        getattr(made, name).update(getattr(layer, name))


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module at the path name of a model."""
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def _observe(
    asked: str, model: nn.Module, layers: dict[str, nn.Module], scheme: QuantizationScheme, batches: Sequence[Batch]
) -> dict[str, Range]:
    if not scheme.needs_calibration:
        return {}
    if not batches:
        raise UsageError(
            asked,
            found="its activations have static scales, and there are no calibration batches to take them from",
            remedy="pass calibration=[token ids, ...], or a dynamic scheme such as 'fp8' or 'int8'",
        )
    observer = RangeObserver()
    run_batches(asked, model, layers, batches, observer)
    return observer.checked(layers)


def _report(
    name: str, layer: nn.Module, made: QuantizedModule, output_error: float | None, measured: Sensitivity | None
) -> LayerReport:
    return LayerReport(
        name=name,
        kind=type(layer).__name__,
        scheme=made.scheme.name,
        shape=made.weight_shape,
        bytes_before=num_bytes(layer),
        bytes_after=num_bytes(made),
        weight_error=weight_error(layer, made),
        output_error=output_error,
        cumulative_error=None if measured is None else measured.cumulative[name],
        divergence=None if measured is None else measured.alone[name],
    )


def num_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters."""
    return sum(parameter.nbytes for parameter in module.parameters())
