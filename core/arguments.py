"""What `core.compile` checks of its arguments before anything is traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from core.common.graphs.inputs import BucketTable, InputSpec
from core.common.ops.declaration import declared_ops
from core.common.passes.declaration import Pass
from core.device import Device
from core.errors import PassError, PluginError, UsageError


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


def chosen_passes(device: Device, names: tuple[str, ...] | None) -> tuple[Pass, ...]:
    """Return the device's passes that were asked for by name; None asks for all."""
    if names is None:
        return device.passes
    known = {declared.name: declared for declared in device.passes}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"passes {unknown}",
            found=f"{device.name} has: {', '.join(known) or 'none'}",
            remedy="name only these, or leave `passes` out to run all",
        )
    return tuple(known[name] for name in names)


def check_signature(model: Callable[..., Any], inputs: Mapping[str, InputSpec]) -> None:
    """Refuse input names that the model does not take, before Dynamo says so in its own words."""
    function = model.forward if isinstance(model, torch.nn.Module) else model
    if not callable(function):
        raise UsageError(f"compiling {model!r}", found="it can't be called", remedy="pass a module or a function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(**inputs)
    except TypeError as error:
        name = getattr(model, "__name__", type(model).__name__)
        raise UsageError(
            f"calling {name} with the inputs {', '.join(map(repr, inputs))}",
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


def check_stages(device: Device) -> None:
    """Refuse passes of a stage that is not run: they would match nothing, silently."""
    late = [declared for declared in device.passes if declared.stage != "torch"]
    if late:
        raise PassError(
            f"pass {late[0].name!r} of {late[0].owner} (stage {late[0].stage!r})",
            found="this version of core.compile runs stage 'torch' only",
            remedy="run it by core.common.passes.inductor.as_inductor_pass, or register it for stage 'torch'",
        )
