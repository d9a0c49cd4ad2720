"""What `core.compile` checks of its arguments before anything is traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.common.config import Verify
from core.common.graphs.inputs import BucketTable, InputSpec
from core.common.ops.declaration import declared_ops
from core.device import Device, Mode
from core.errors import PluginError, UsageError

if TYPE_CHECKING:
    from core.common.config import ModeChoice

Examples = Mapping[str, Sequence[Mapping[str, Tensor]]]
"""Input sets per phase, on which passes are verified; each a full set of the declared inputs by name."""


def models_per_phase(
    model: Callable[..., Any] | Mapping[str, Callable[..., Any]], table: BucketTable
) -> dict[str, Callable[..., Any]]:
    """Return the callable of each phase: the same for all, or those given one per phase."""
    if not isinstance(model, Mapping):
        return dict.fromkeys(table.phases, model)
    if model.keys() != table.phases.keys():
        raise UsageError(
            f"models for phases {sorted(model)}",
            found=f"the buckets name the phases {sorted(table.phases)}",
            remedy="give one model for all phases, or exactly one per phase",
        )
    return dict(model)


def check_phases(mode: ModeChoice | Mapping[str, ModeChoice] | None, table: BucketTable) -> None:
    """Refuse modes of phases that the buckets do not name."""
    unknown = sorted(mode.keys() - table.phases.keys()) if isinstance(mode, Mapping) else []
    if unknown:
        raise UsageError(
            f"modes for phases {unknown}",
            found=f"the buckets name the phases {sorted(table.phases)}",
            remedy="name only these; a phase without a mode takes the device's preferred one",
        )


def check_bound(bound: Mapping[str, Tensor], inputs: Mapping[str, InputSpec]) -> Mapping[str, Tensor]:
    """Return the tensors of the inputs declared "bound", checked against their declaration."""
    declared = {name for name, spec in inputs.items() if spec.padding == "bound"}
    if bound.keys() != declared:
        raise UsageError(
            f"bound={sorted(bound)}",
            found=f"inputs declared with padding 'bound' are: {', '.join(sorted(declared)) or 'none'}",
            remedy="give the tensor of each of these, and of no other: bound={name: tensor}",
        )
    for name, tensor in bound.items():
        if tuple(tensor.shape) != inputs[name].shape or tensor.dtype != inputs[name].dtype:
            raise UsageError(
                f"bound input {name!r} of {tensor.dtype} and shape {tuple(tensor.shape)}",
                found=f"it is declared as {inputs[name].dtype} of shape {inputs[name].shape}",
                remedy="declare the tensor's own shape, of numbers only: no bucket can pad it",
            )
    return bound


def check_signature(model: Callable[..., Any], inputs: Mapping[str, InputSpec], guards: Mapping[str, object]) -> None:
    """Refuse input names that the model does not take, before Dynamo says so in its own words."""
    function = model.forward if isinstance(model, torch.nn.Module) else model
    if not callable(function):
        raise UsageError(f"compiling {model!r}", found="it can't be called", remedy="pass a module or a function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(**inputs, **guards)
    except TypeError as error:
        name = getattr(model, "__name__", type(model).__name__)
        raise UsageError(
            f"calling {name} with the inputs {', '.join(map(repr, (*inputs, *guards)))}",
            found=f"its signature is {signature}: {error}",
            remedy="name the inputs as the model's forward names its parameters",
        ) from None


def check_training_mode(model: Callable[..., Any]) -> None:
    """Refuse a model that would drop out or update statistics: what training mode does must not be captured."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    layers = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm)
    training = [type(m).__name__ for m in modules if m.training and isinstance(m, layers)]
    if training:
        raise UsageError(
            f"compiling {type(model).__name__}",
            found=f"{training[0]} in it is in training mode",
            remedy="call model.eval() first",
        )


def check_ops(device: Device) -> None:
    """Refuse implementations of ops that nobody declared: a misspelt name would never be used."""
    unknown = [i.op for i in device.ops if i.op not in declared_ops()]
    if unknown:
        raise PluginError(
            f"implementations of {unknown} by {device.plugin}",
            found=f"the canonical ops are: {', '.join(sorted(declared_ops()))}",
            remedy="name one of these in OpImplementation.op",
        )


def examples_per_phase(
    examples: Examples | Sequence[Mapping[str, Tensor]] | None,
    inputs: Mapping[str, InputSpec],
    modes: Mapping[str, Mode],
    verify: Verify,
) -> Examples:
    """Return the example inputs of each phase, checked against their declaration.

    Raises `UsageError` where they don't fit it, or where there are none for a phase that is to be verified.
    """
    given = examples if isinstance(examples, Mapping) else dict.fromkeys(modes, examples or ())
    unknown = sorted(given.keys() - modes.keys())
    if unknown:
        raise UsageError(
            f"examples for phases {unknown}",
            found=f"the buckets name the phases {sorted(modes)}",
            remedy="name only these: examples={'decode': [inputs]}",
        )
    for phase, sets in given.items():
        for example in sets:
            _check_example(phase, example, inputs)
    for phase, mode in modes.items():
        if verify != "off" and mode != "off" and not given.get(phase):
            raise UsageError(
                f"verify={verify!r} for phase {phase!r}",
                found="no example inputs for it; which values its inputs may take is not for core to guess",
                remedy=f"give some of a bucket's shapes: core.compile(..., examples={{{phase!r}: [inputs]}})",
            )
    return given


def _check_example(phase: str, example: Mapping[str, Tensor], inputs: Mapping[str, InputSpec]) -> None:
    inputs = {name: spec for name, spec in inputs.items() if spec.padding != "bound"}
    if not isinstance(example, Mapping) or example.keys() != inputs.keys():
        found = sorted(example) if isinstance(example, Mapping) else type(example).__name__
        raise UsageError(
            f"examples for phase {phase!r}",
            found=f"a set holds {found}",
            remedy=f"each set is a mapping with exactly the declared inputs: {', '.join(inputs)}",
        )
    sizes: dict[str, int] = {}
    for name, spec in inputs.items():
        spec.measure(name, example[name].shape, sizes)
        if example[name].dtype != spec.dtype:
            raise UsageError(
                f"example input {name!r} of dtype {example[name].dtype}",
                found=f"it is declared as {spec.dtype}",
                remedy="pass tensors of the declared dtypes",
            )
