"""Checks of `core.compile`'s arguments before anything is traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.common.ops.declaration import declared_ops
from core.compilation.capture.inputs import BucketTable, InputSpec
from core.compilation.implementations import REFERENCE
from core.compilation.trace.model_tensors import model_tensors
from core.device import Device, Mode
from core.errors import PluginError, UsageError

if TYPE_CHECKING:
    from core.compilation.options import CompileOptions, Examples, ModeChoice


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


def check_bound(bound: Mapping[str, Tensor] | None, inputs: Mapping[str, InputSpec]) -> Mapping[str, Tensor]:
    """Return the tensors of the inputs declared "bound", checked against their declaration."""
    bound = {} if bound is None else bound
    if not isinstance(bound, Mapping):
        raise _wrong("bound", bound, "a mapping from the names of bound inputs to their tensors")
    declared = {name for name, spec in inputs.items() if spec.padding == "bound"}
    if bound.keys() != declared:
        raise UsageError(
            f"bound={sorted(bound)}",
            found=f"inputs declared with padding 'bound' are: {', '.join(sorted(declared)) or 'none'}",
            remedy="give the tensor of each of these, and of no other: "
            "options=core.CompileOptions(bound={name: tensor})",
        )
    for name, tensor in bound.items():
        if not isinstance(tensor, Tensor):
            raise _wrong(f"bound[{name!r}]", tensor, "the tensor itself, on the device")
        if tuple(tensor.shape) != inputs[name].shape or tensor.dtype != inputs[name].dtype:
            raise UsageError(
                f"bound input {name!r} of {tensor.dtype} and shape {tuple(tensor.shape)}",
                found=f"it is declared as {inputs[name].dtype} of shape {inputs[name].shape}",
                remedy="declare the tensor's own shape, of numbers only: no bucket can pad it",
            )
    return bound


def check_outputs(outputs: Any, dims: Sequence[str]) -> None:
    """Refuse outputs that are not declared by dimensions, or that name a dimension which is not among `dims`."""
    if outputs is None:
        return
    known = ", ".join(dims) or "none"
    form = 'one tuple of dimensions per output tensor, such as outputs=[("tokens", None)]'
    if isinstance(outputs, str) or not isinstance(outputs, Sequence):
        raise _wrong("outputs", outputs, form)
    for entry in outputs:
        if isinstance(entry, str) or not isinstance(entry, Sequence):
            raise _wrong("outputs", outputs, form)
        named = InputSpec(tuple(0 if dim is None else dim for dim in entry), torch.bool).dims()
        unknown = sorted(set(named) - set(dims))
        if unknown:
            raise UsageError(
                f"outputs={tuple(outputs)!r}",
                found=f"no bucket dimension is named {', '.join(map(repr, unknown))}; the inputs' are: {known}",
                remedy="name one of these, or give None for a dimension that no bucket changes",
            )


def check_callable(name: str, given: object) -> None:
    """Refuse an argument that is neither None nor a function."""
    if given is not None and not callable(given):
        raise _wrong(name, given, "a function, or leave it out")


def _wrong(name: str, given: object, wanted: str) -> UsageError:
    return UsageError(f"{name}={given!r}", found=f"a {type(given).__name__}", remedy=f"give {wanted}")


def check_breaks(phase: str, break_at: Sequence[str], names: Mapping[str, str]) -> None:
    """Refuse break points that name nothing in a phase's graphs. names: every name in the graphs -> its short
    spelling."""
    unknown = [name for name in break_at if name not in names]
    if unknown:
        near = get_close_matches(unknown[0], sorted(set(names.values())), n=10, cutoff=0)
        raise UsageError(
            f"break_at={tuple(break_at)!r} for phase {phase!r}",
            found=f"its graphs call nothing named {', '.join(map(repr, unknown))}",
            remedy=f"name what they call: {', '.join(near) or 'nothing, so leave it out'}"
            + (", …" if len(set(names.values())) > len(near) else ""),
        )


def check_model(model: object) -> None:
    """Refuse what is no module and no function: a class is called to make one."""
    if isinstance(model, type) or not callable(model):
        raise UsageError(
            f"compiling {model!r}",
            found="a class, not an instance of it" if isinstance(model, type) else "it can't be called",
            remedy="make the model first: core.compile(Model(), …)"
            if isinstance(model, type)
            else "pass a module or a function",
        )


def check_signature(model: Callable[..., Any], inputs: Mapping[str, InputSpec], guards: Mapping[str, object]) -> None:
    """Refuse names of inputs and guards that the model does not take, before Dynamo says so in its own words."""
    check_model(model)
    function = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(**inputs, **guards)
    except TypeError as error:
        called = f"calling {getattr(model, '__name__', type(model).__name__)} with the inputs "
        called += ", ".join(map(repr, inputs)) + (f" and the guards {', '.join(map(repr, guards))}" if guards else "")
        refused = next((name for name in guards if _takes(signature, *inputs) and not _takes(signature, name)), None)
        remedy = "name the inputs as the model's forward names its parameters"
        if refused is not None:
            remedy = f"a guard goes to the model by name: add a parameter {refused!r} to it, or leave the guard out"
        raise UsageError(called, found=f"its signature is {signature}: {error}", remedy=remedy) from None


def _takes(signature: inspect.Signature, *names: str) -> bool:
    try:
        signature.bind_partial(**dict.fromkeys(names))
    except TypeError:
        return False
    return True


def check_placement(model: Callable[..., Any], device: Device) -> None:
    """Refuse a module with weights elsewhere than on the device; single numbers (0-dim) may be, torch takes them."""
    tensors = model_tensors(model) if isinstance(model, torch.nn.Module) else ()
    own = torch.empty(0, device=device.torch_device).device  # with its index, which the caller may have left out
    for name, tensor in tensors:
        if tensor.dim() and tensor.device != own:
            raise UsageError(
                f"compiling {type(model).__name__} for {device.name} ({device.torch_device})",
                found=f"its {name} is on {tensor.device}",
                remedy=f"move the model there first: model.to({str(device.torch_device)!r})",
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


def check_providers(options: CompileOptions, device: Device) -> None:
    """Refuse a request for an implementation of an op that the device does not have, or that can't be used there."""
    for op, wanted in (options.providers or {}).items():
        named = {each.name: each for each in device.ops if each.op == op}
        unknown = op not in declared_ops()
        if unknown or (wanted != REFERENCE and (wanted not in named or named[wanted].missing)):
            missing = named[wanted].missing if wanted in named else ""
            usable = [name for name, each in named.items() if not each.missing]
            raise UsageError(
                f"implementation {wanted!r} of {op!r} on {device.name!r}",
                found=missing or ("there is no canonical op of that name" if unknown else "the device has none"),
                remedy=f"name one of: {', '.join([*usable, REFERENCE])}"
                if not unknown
                else f"name one of the ops: {', '.join(sorted({each.op for each in device.ops})) or 'none here'}",
            )


def examples_per_phase(options: CompileOptions, inputs: Mapping[str, InputSpec], modes: Mapping[str, Mode]) -> Examples:
    """Return the example inputs of each phase, each a full set of the declared inputs by name.

    modes: the first choice of each phase. Raises `UsageError` where a set does not fit its declaration, or where there
    is none for a phase that is to be verified.
    """
    examples, verify = options.examples, options.verify
    form = "a list of input sets, or one list per phase, each set a mapping of all inputs by name"
    if examples is not None and not isinstance(examples, (Mapping, Sequence)):
        raise _wrong("examples", examples, form)
    given = examples if isinstance(examples, Mapping) else dict.fromkeys(modes, examples or ())
    unknown = sorted(given.keys() - modes.keys())
    if unknown:
        raise UsageError(
            f"examples for phases {unknown}",
            found=f"the buckets name the phases {sorted(modes)}",
            remedy="name only these: examples={'decode': [inputs]}",
        )
    for phase, sets in given.items():
        if isinstance(sets, Mapping) or not isinstance(sets, Sequence):
            raise _wrong(f"examples[{phase!r}]", sets, form)
        for example in sets:
            _check_example(phase, example, inputs)
    for phase, mode in modes.items():
        if verify != "off" and mode != "off" and not given.get(phase):
            raise UsageError(
                f"verify={verify!r} for phase {phase!r}",
                found="no example inputs for it; which values its inputs may take is not for core to guess",
                remedy=f"give some of a bucket's shapes: options=core.CompileOptions(examples={{{phase!r}: [inputs]}})",
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
        if not isinstance(example[name], Tensor):
            raise _wrong(f"example input {name!r}", example[name], f"a tensor of {spec.dtype}")
        spec.measure(name, example[name].shape, sizes)
        if example[name].dtype != spec.dtype:
            raise UsageError(
                f"example input {name!r} of dtype {example[name].dtype}",
                found=f"it is declared as {spec.dtype}",
                remedy="pass tensors of the declared dtypes",
            )
