"""Factors that every program has in common: versions, source, torch's own state, and what a device's plugin brings."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from core._version import __version__
from core.common.passes.identity import fingerprint
from core.compilation.cache.code import is_whole, name_of, package_of
from core.compilation.cache.source import source_digest

if TYPE_CHECKING:
    from core.common.ops.implementation import OpImplementation
    from core.common.passes.declaration import Pass


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
    return {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines}


def source_factors(packages: Iterable[str]) -> dict[str, str]:
    """Return a digest of all source of each package."""
    return {package: source_digest(package) for package in sorted({"core", *packages})}


def torch_factors(device: torch.device) -> dict[str, str]:
    """Return what of torch's global state a trace can depend on."""
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


def _rank() -> str:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return "single"
    return f"{distributed.get_rank()} of {distributed.get_world_size()}"


def pass_factors(passes: Sequence[Pass], packages: frozenset[str]) -> dict[str, str]:
    """Return the identity of each pass in order: its uuid, or where it is whose source counts as a whole, its name.

    A uuid goes through all code that a pass reaches, which takes milliseconds each.
    """
    return {f"{number:02} {each.name}": _pass(each, packages) for number, each in enumerate(passes)}


def _pass(declared: Pass, packages: frozenset[str]) -> str:
    functions = [each for each in (declared.run, declared.expect) if callable(each)]
    if declared.patterns or not all(_is_plain(each, packages) for each in functions):
        return declared.uuid()
    guards = as_text({item.name: getattr(declared.guards, item.name) for item in fields(declared.guards)})
    rest = {"params": declared.params, "guards": guards, "after": declared.after, "before": declared.before}
    number = declared.expect if isinstance(declared.expect, int) else ""
    return f"{declared.owner} {' '.join(map(name_of, functions))} {number} {as_text(rest)}"


def implementation_factor(implementation: OpImplementation, packages: frozenset[str]) -> str:
    """Return the identity of an op's implementation: its name, and its code where that is of no whole package."""
    fn, condition = implementation.fn, implementation.condition
    if all(_is_plain(each, packages) for each in (fn, condition)):
        return f"{implementation.name} {name_of(fn)} if {name_of(condition)}"
    return f"{implementation.name} {fingerprint(fn, condition)}"


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
