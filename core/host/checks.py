"""What each hook must return: checks made once, at selection, so that a plugin's mistake is found where it was made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from core.capabilities import Capabilities, Mode
from core.device import DeviceParts

Check = Callable[[Any], str]
"""Returns "" for a good result, else what was returned and what was expected, to follow "returned"."""


def _kind(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def check_parts(value: Any) -> str:
    """Check the result of `core_open_device`."""
    import torch

    from core.common.kernel_compilers import INDUCTOR, KernelCompiler

    if not isinstance(value, DeviceParts):
        return f"{_kind(value)} instead of core.device.DeviceParts"
    # A frozen dataclass does not check its fields; to mypy they are what they are declared to be.
    fields: dict[str, tuple[Any, type]] = {
        "torch_device": (value.torch_device, torch.device),
        "capabilities": (value.capabilities, Capabilities),
    }
    for name, (field, kind) in fields.items():
        if not isinstance(field, kind):
            return f"DeviceParts whose {name} is {_kind(field)} instead of {kind.__name__}"
    compilers = (
        _sequence(value.kernel_compilers, KernelCompiler)
        or _duplicate([INDUCTOR, *value.kernel_compilers], lambda item: f"kernel compiler {item.name!r}")
        or _no_folder([item.name for item in value.kernel_compilers])
    )
    if compilers:
        return f"DeviceParts whose kernel_compilers are {compilers}"
    unknown = sorted(set(value.capabilities.modes) - set(get_args(Mode)))
    if unknown:
        return f"Capabilities with unknown modes {unknown} (known: {', '.join(get_args(Mode))})"
    return ""


def check_lowerings(value: Any) -> str:
    """Check the result of `core_lowering`."""
    from core.common.lowering import Lowerings

    if not isinstance(value, Lowerings):
        return f"{_kind(value)} instead of core.common.lowering.Lowerings"
    if value.default not in value.available:
        return f"Lowerings whose default {value.default!r} is not among {sorted(value.available)}"
    return ""


def check_factory(value: Any) -> str:
    """Check the result of `core_graph_backend`."""
    return "" if callable(value) else f"{_kind(value)} instead of a callable that makes a GraphBackend"


def check_passes(value: Any) -> str:
    """Check the result of `core_register_passes`."""
    from core.common.passes.declaration import Pass

    return _sequence(value, Pass) or _duplicate(value, lambda item: f"pass {item.name!r}")


def check_ops(value: Any) -> str:
    """Check the result of `core_register_ops`."""
    from core.common.ops.implementation import OpImplementation

    return _sequence(value, OpImplementation) or _duplicate(value, lambda item: f"{item.name!r} of op {item.op!r}")


def check_fakes(value: Any) -> str:
    """Check the result of `core_register_fakes`."""
    from core.common.fakes import FakeOp

    return _sequence(value, FakeOp) or _duplicate(value, lambda item: f"fake of op {item.op!r}")


def check_profile(value: Any) -> str:
    """Check the result of `core_conformance`."""
    from core.common.conformance import ConformanceProfile

    return "" if isinstance(value, ConformanceProfile) else f"{_kind(value)} instead of ConformanceProfile"


RESULT_CHECKS: Mapping[str, Check] = {
    "core_open_device": check_parts,
    "core_lowering": check_lowerings,
    "core_graph_backend": check_factory,
    "core_register_passes": check_passes,
    "core_register_ops": check_ops,
    "core_register_fakes": check_fakes,
    "core_conformance": check_profile,
}


def _sequence(value: Any, item_type: type) -> str:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return f"{_kind(value)} instead of a sequence of {item_type.__name__}"
    for number, item in enumerate(value):
        if not isinstance(item, item_type):
            return f"a sequence whose item {number} is {_kind(item)} instead of {item_type.__name__}"
    return ""


def _no_folder(names: Sequence[str]) -> str:
    """Name a compiler whose kernels could not lie in a folder of their own, where `core cache` finds them."""
    wrong = [name for name in names if name in ("", "..") or Path(name).name != name]
    return f"kernel compiler {wrong[0]!r}, whose name can't be that of a folder" if wrong else ""


def _duplicate(items: Sequence[Any], label: Callable[[Any], str]) -> str:
    labels = [label(item) for item in items]
    repeated = sorted({name for name in labels if labels.count(name) > 1})
    return f"{repeated[0]} twice" if repeated else ""
