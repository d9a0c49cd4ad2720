"""The factors of a program that are known before its model is read; their digest is the key of its entries."""

from __future__ import annotations

import json
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core._version import __version__
from core.common.passes.identity import fingerprint
from core.compilation.cache.differences import Factors
from core.compilation.cache.reports import encode_key
from core.compilation.cache.source import source_digest
from core.compilation.cache.values import Texts, name_of
from core.compilation.capture.breaks import modules_of
from core.compilation.capture.inputs import InputSpec
from core.device import Device

if TYPE_CHECKING:
    from core.common.ops.implementation import OpImplementation
    from core.common.passes.declaration import Pass
    from core.compilation.request import CompileRequest

_NO_FACTORS = frozenset({"verify", "debug", "eager", "outputs", "reset", "relocate", "examples", "progress", "cache"})
_NO_FACTORS |= {"background"}
"""Options that do not change a traced graph; with `verify` the cache is not used at all."""
_OWN_GROUPS = frozenset({"guards", "bound", "shared"})
"""Options that are factors under a group of their own."""
_WHOLE = frozenset({"torch", "torchgen", "functorch", "core"}) | sys.stdlib_module_names - {"__main__"}
"""Packages whose code counts as a whole, by version or by the text of all of it."""


def plugin_packages(device: Device) -> frozenset[str]:
    """Return the top packages of a device's plugin: their source counts as a whole."""
    owners = [device.plugin.entry_point, *(str(getattr(each.fn, "__module__", "")) for each in device.ops)]
    found = frozenset(owner.partition(":")[0].partition(".")[0] for owner in owners)
    return found - {"", "torch", "core", "builtins", "__main__", "None"}


def runtime_packages(device: Device) -> frozenset[str]:
    """Return the top package of torch's module for a device, if it is not torch: its version is a factor.

    Such a package replaces functions of torch and so affects every model.
    """
    package = torch.get_device_module(device.torch_device).__name__.partition(".")[0]
    return frozenset({package}) - {"torch"}


def compiler_packages(device: Device) -> frozenset[str]:
    """Return the packages of a device's kernel compilers, whose versions are factors."""
    return frozenset(compiler.package for compiler in device.kernel_compilers) - {""}


_EXTRAS_OF_TOOLS = frozenset({"dev", "test", "tests", "docs"})
"""Extras by whose names, as they are used everywhere, their packages take no part in a trace or a kernel."""
_EXTRAS_OF_CORE = frozenset({"conformance", "ray", "serve", "structured"})
"""Further ones of core's own distribution. A vendor's may bring kernels under such a name."""


def factors_of(request: CompileRequest, passes: Sequence[Pass], packages: frozenset[str]) -> Factors:
    """Return the factors of a program. passes: those that may run, in order. packages: those of its device's plugin."""
    device, options, table = request.device, request.options, request.table
    names = [item.name for item in fields(options) if item.name not in _NO_FACTORS | _OWN_GROUPS]
    chosen = {name: getattr(options, name) for name in names}
    capabilities = {item.name: getattr(device.capabilities, item.name) for item in fields(device.capabilities)}
    named = {"name": device.name, "plugin": device.plugin, "torch device": device.torch_device}
    shared = options.shared
    return {
        "model": {phase: _model_name(model) for phase, model in request.models.items()},
        "quantization": {phase: _schemes(model) for phase, model in request.models.items()},
        "versions": version_factors(device.plugin.distribution, runtime_packages(device), compiler_packages(device)),
        "source": source_factors(packages),
        "device": as_text(named | capabilities),
        "torch": torch_factors(device.torch_device),
        "inputs": {name: _input(spec, request.bound.get(name)) for name, spec in request.inputs.items()},
        "buckets": {phase: json.dumps([encode_key(key) for key in keys]) for phase, keys in table.phases.items()},
        "guards": {phase: _guards(guards) for phase, guards in table.guards.items()},
        "options": as_text({**chosen, "lowering": device.lowerings.resolve(options.lowering)[0]}),
        "shared": {} if shared is None else {shared.op: f"{shared.argument} {dict(shared.values)}"},
        "passes": pass_factors(passes, packages),
        "implementations": {
            f"{number:02} {each.op}": implementation_factor(each, packages) for number, each in enumerate(device.ops)
        },
    }


def _input(spec: InputSpec, bound: Tensor | None) -> str:
    where = "" if bound is None else f", bound with strides {tuple(bound.stride())} on {bound.device}"
    return f"{spec}{where}"


def _guards(guards: Mapping[str, Any]) -> str:
    return str([(name, [(type(v).__name__, v) for v in values]) for name, values in sorted(guards.items())])


def _model_name(model: Callable[..., Any]) -> str:
    """Return the class of the first module that a callable runs, or else the callable's own name."""
    module = next(iter(modules_of(model).values()), None)
    if module is not None:
        return name_of(type(module))
    return name_of(model if hasattr(model, "__qualname__") else type(model))


def _schemes(model: Callable[..., Any]) -> str:
    """Return the names of the schemes that a callable's modules are quantised by."""
    found = (getattr(getattr(module, "scheme", None), "name", None) for module in modules_of(model).values())
    return ", ".join(sorted({name for name in found if isinstance(name, str)}))


def version_factors(
    distribution: str, packages: frozenset[str] = frozenset(), compilers: frozenset[str] = frozenset()
) -> dict[str, str]:
    """Return the versions of Python, torch, core, transformers and all that a plugin's distribution requires.

    packages: further loaded packages, whose own `__version__` counts. compilers: packages of compilers of kernels.
    """
    found = {"python": ".".join(map(str, sys.version_info[:3])), "torch": f"{torch.__version__} {_torch_commit()}"}
    found["core"] = __version__
    names = {"transformers", "numpy", distribution, *compilers, *_required(distribution)}
    for name in sorted(names - {"torch", "core"}):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "(not installed)"
    return found | {f"package {name}": str(getattr(sys.modules[name], "__version__", "")) for name in sorted(packages)}


def _torch_commit() -> str:
    return str(getattr(torch.version, "git_version", ""))[:12]


def _required(distribution: str) -> set[str]:
    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return set()
    return {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if not _is_of_tools(line, distribution)}


def _is_of_tools(requirement: str, distribution: str) -> bool:
    """Tell whether a requirement is one of an extra of tools, none of which a program runs: they come and go."""
    extra = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", requirement)
    tools = _EXTRAS_OF_TOOLS | (_EXTRAS_OF_CORE if distribution == "core" else frozenset())
    return extra is not None and extra[1] in tools


def source_factors(packages: Iterable[str]) -> dict[str, str]:
    """Return a digest of all source of each package."""
    return {package: source_digest(package) for package in sorted({"core", *packages})}


def torch_factors(device: torch.device) -> dict[str, str]:
    """Return the parts of torch's global state that a trace can depend on."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    kind = device.type
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": f"{torch.are_deterministic_algorithms_enabled()} "
        f"{torch.is_deterministic_algorithms_warn_only_enabled()}",
        "autocast": f"{torch.get_autocast_dtype(kind)}" if torch.is_autocast_enabled(kind) else "off",
        "modes": ", ".join(f"{type(mode).__module__}.{type(mode).__qualname__}" for mode in modes) or "none",
        "attention": _attention_switches(),
        "backends": _backend_switches(),
        "rank": _rank(),
        "functions": _functions(),
    }


def _attention_switches() -> str:
    names = ("flash", "mem_efficient", "math", "cudnn", "overrideable")
    asked = ((name, getattr(torch._C, f"_get_{name}_sdp_enabled", None)) for name in names)
    return ", ".join(f"{name} {bool(ask())}" for name, ask in asked if ask is not None)


def _backend_switches() -> str:
    """Return the switches that a model's code may ask for, as a kernel's condition may."""
    backends = torch.backends
    found: dict[str, Any] = {"mha.fastpath": backends.mha.get_fastpath_enabled()}
    for name, place in (("cudnn", backends.cudnn), ("mkldnn", backends.mkldnn)):
        switches = [key for key, value in vars(type(place)).items() if isinstance(value, backends.ContextProp)]
        found |= {f"{name}.{key}": getattr(place, key) for key in switches}
    return ", ".join(f"{key} {value}" for key, value in sorted(found.items()))


def _functions() -> str:
    """Return the functions of torch that somebody has replaced: a graph calls them by torch's names."""
    texts, found = Texts(frozenset()), []
    for place in (torch, torch.nn.functional, torch.Tensor):
        for name, value in vars(place).items():
            if isinstance(value, types.FunctionType) and not is_whole(package_of(value)):
                found.append(f"{place.__name__}.{name} {texts.of(value)}")
    return ", ".join(found) or "torch's own"


def _rank() -> str:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return "single"
    return f"{torch.distributed.get_rank()} of {torch.distributed.get_world_size()}"


def pass_factors(passes: Sequence[Pass], packages: frozenset[str]) -> dict[str, str]:
    """Return the identity of each pass in order: its uuid, or its name if its package's source is a factor as a whole.

    A uuid goes through all code that a pass reaches, which takes milliseconds each.
    """
    return {f"{number:02} {each.name}": _pass(each, packages) for number, each in enumerate(passes)}


def _pass(declared: Pass, packages: frozenset[str]) -> str:
    functions = [each for each in (declared.find, declared.run, declared.expect) if callable(each)]
    if declared.patterns or not all(_is_plain(each, packages) for each in functions):
        return declared.uuid()
    guards = as_text({item.name: getattr(declared.guards, item.name) for item in fields(declared.guards)})
    rest = {"params": declared.params, "guards": guards, "after": declared.after, "before": declared.before}
    number = declared.expect if isinstance(declared.expect, int) else ""
    return f"{declared.owner} {' '.join(map(name_of, functions))} {number} {as_text(rest)}"


def implementation_factor(implementation: OpImplementation, packages: frozenset[str]) -> str:
    """Return the identity of an op's implementation: its name, and its code unless its package is a factor as a
    whole."""
    fn, asked = implementation.fn, (implementation.condition, implementation.timed)
    rest = f"slack {implementation.slack} {implementation.missing}"
    rest += f" {implementation.batch_invariant} {implementation.on_request}"
    # Of an op of torch a fingerprint has no more than the name. Its kernels are code of the package that declares it.
    named = isinstance(fn, torch._ops.OpOverload)
    if (named or _is_plain(fn, packages)) and all(_is_plain(each, packages) for each in asked):
        return f"{implementation.name} {fn if named else name_of(fn)} if {' '.join(map(name_of, asked))} {rest}"
    return f"{implementation.name} {fingerprint(fn, *asked)} {rest}"


def _is_plain(function: Any, packages: frozenset[str]) -> bool:
    """Tell whether a function is the one that its module has under its name, in a package that counts as a whole."""
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return False
    if not is_whole(package_of(function), packages):
        return False
    return getattr(sys.modules.get(function.__module__), function.__name__, None) is function


def as_text(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the values as text that is the same in every process: sets sorted."""
    return {name: _text(value) for name, value in values.items()}


def _text(value: Any) -> str:
    if isinstance(value, (set, frozenset)):
        return ", ".join(sorted(map(_text, value)))
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(value[key])}" for key in sorted(value, key=str))
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_text, value)) + ")"
    return str(value)


def is_whole(package: str, more: frozenset[str] = frozenset()) -> bool:
    """Tell whether a package's code is a factor as a whole. more: further such packages."""
    return package in _WHOLE or package in more


def package_of(function: types.FunctionType) -> str:
    """Return the top package in which a function's code was written; wrappers copy other names."""
    return str(function.__globals__.get("__name__") or "").partition(".")[0]


def is_foreign_code(code: types.CodeType, more: frozenset[str] = frozenset()) -> bool:
    """Tell whether code lies outside of the packages that count as a whole. more: further such packages."""
    return not code.co_filename.startswith("<frozen ") and is_foreign_path(code.co_filename, more)


def is_foreign_path(path: str, more: frozenset[str] = frozenset()) -> bool:
    """Tell whether a file lies outside of the packages that count as a whole. more: further such packages."""
    return not any(os.path.abspath(path).startswith(each) for each in _places(more))


@lru_cache(maxsize=16)
def _places(more: frozenset[str]) -> tuple[str, ...]:
    """Return the folders and files of all loaded packages that count as a whole."""
    found: set[str] = set()
    for package in [name for name in sys.modules if "." not in name and is_whole(name, more)]:
        module = sys.modules[package]
        found.update(os.path.join(os.path.abspath(path), "") for path in getattr(module, "__path__", ()))
        if getattr(module, "__file__", None) and not hasattr(module, "__path__"):
            found.add(os.path.abspath(str(module.__file__)))
    return tuple(found)
