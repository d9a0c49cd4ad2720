"""The factors of one program: everything that its finished graphs depend on, as text by group and name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.compilation.cache import factors
from core.compilation.cache.code import name_of
from core.compilation.cache.differences import Factors
from core.compilation.cache.inventory import Inventory
from core.compilation.cache.reports import encode_key
from core.compilation.capture.inputs import InputSpec
from core.device import Device

if TYPE_CHECKING:
    from core.common.passes.declaration import Pass
    from core.compilation.request import CompileRequest

_NO_FACTORS = frozenset({"verify", "debug", "eager", "outputs", "reset", "examples", "progress", "cache"})
"""Options that change nothing of a traced graph; with `verify` the cache is not used at all."""
_OWN_GROUPS = frozenset({"guards", "bound", "shared"})
"""Options that are factors under a group of their own."""


def plugin_packages(device: Device) -> frozenset[str]:
    """Return the top packages of a device's plugin: their source counts as a whole."""
    owners = [device.plugin.entry_point, *(str(getattr(each.fn, "__module__", "")) for each in device.ops)]
    found = frozenset(owner.partition(":")[0].partition(".")[0] for owner in owners)
    return found - {"", "torch", "core", "builtins", "__main__", "None"}


def runtime_packages(device: Device) -> frozenset[str]:
    """Return the top package, other than torch, that torch's module for a device is from: it counts by its version.

    Such a package puts functions of its own in the place of torch's, and so lies on the way of every model.
    """
    package = torch.get_device_module(device.torch_device).__name__.partition(".")[0]
    return frozenset({package}) - {"torch"}


def compiler_packages(device: Device) -> frozenset[str]:
    """Return the packages of a device's compilers of kernels: they count by their version."""
    return frozenset(compiler.package for compiler in device.kernel_compilers) - {""}


def factors_of(
    request: CompileRequest, passes: Sequence[Pass], inventory: Inventory, packages: frozenset[str]
) -> Factors:
    """Return the factors of a program.

    passes: those that may run, in order. inventory: what its callables reach. packages: those of its device's plugin.
    """
    device, options, table = request.device, request.options, request.table
    names = [item.name for item in fields(options) if item.name not in _NO_FACTORS | _OWN_GROUPS]
    chosen = {name: getattr(options, name) for name in names}
    capabilities = {item.name: getattr(device.capabilities, item.name) for item in fields(device.capabilities)}
    named = {"name": device.name, "plugin": device.plugin, "torch device": device.torch_device}
    shared = options.shared
    return {
        "model": {phase: _model_name(inventory, phase, model) for phase, model in request.models.items()},
        "versions": factors.version_factors(
            device.plugin.distribution, runtime_packages(device), compiler_packages(device)
        ),
        "source": factors.source_factors(packages),
        "device": factors.as_text(named | capabilities),
        "torch": factors.torch_factors(device.torch_device),
        "inputs": {name: _input(spec, request.bound.get(name)) for name, spec in request.inputs.items()},
        "buckets": {phase: json.dumps([encode_key(key) for key in keys]) for phase, keys in table.phases.items()},
        "guards": {phase: _guards(guards) for phase, guards in table.guards.items()},
        "options": factors.as_text({**chosen, "lowering": device.lowerings.resolve(options.lowering)[0]}),
        "shared": {} if shared is None else {shared.op: f"{shared.argument} {dict(shared.values)}"},
        "passes": factors.pass_factors(passes, packages),
        "implementations": {
            f"{number:02} {each.op}": factors.implementation_factor(each, packages)
            for number, each in enumerate(device.ops)
        },
        "values": inventory.facts,
        "code": inventory.code,
    }


def _input(spec: InputSpec, bound: Tensor | None) -> str:
    where = "" if bound is None else f", bound with strides {tuple(bound.stride())} on {bound.device}"
    return f"{spec}{where}"


def _guards(guards: Mapping[str, Any]) -> str:
    return str([(name, [(type(v).__name__, v) for v in values]) for name, values in sorted(guards.items())])


def _model_name(inventory: Inventory, phase: str, model: Callable[..., Any]) -> str:
    """Return the class of the first module that a phase reaches, or what its callable is."""
    own = (path for path in inventory.modules if path.partition(".")[0] == phase)
    first = next(own, None) or next(iter(inventory.modules), None)
    if first is not None:
        return inventory.facts[first]
    return name_of(model if hasattr(model, "__qualname__") else type(model))
