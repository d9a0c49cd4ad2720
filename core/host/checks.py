"""Checks of each hook's result, made once at selection, so that a plugin's mistake is reported at its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from core.capabilities import Capabilities, Mode
from core.device import DeviceParts
from core.errors import one_line

if TYPE_CHECKING:
    import torch

Check = Callable[[Any], str]
"""Returns "" for a good result, else what was returned and what was expected, to follow "returned"."""


def _kind(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def check_parts(value: Any) -> str:
    """Check the result of `core_open_device`."""
    import torch

    from core.common.kernel_compilers import INDUCTOR, KernelCompiler
    from core.common.peers import Peer

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
    wrong = _wrong_function(value) or _wrong_capability(value.capabilities)
    if wrong:
        return wrong
    wrong = _wrong_place(value.torch_device)
    if wrong:
        return f"DeviceParts whose torch_device is {str(value.torch_device)!r}, {wrong}"
    compilers = (
        _sequence(value.kernel_compilers, KernelCompiler)
        or _duplicate([INDUCTOR, *value.kernel_compilers], lambda item: f"kernel compiler {item.name!r}")
        or _no_folder([item.name for item in value.kernel_compilers])
    )
    if compilers:
        return f"DeviceParts whose kernel_compilers are {compilers}"
    peers = _sequence(value.peers, Peer) or _duplicate(value.peers, lambda item: f"peer {item.name!r}")
    if peers:
        return f"DeviceParts whose peers are {peers}"
    return ""


def _wrong_place(place: torch.device) -> str:
    import torch

    try:
        torch.empty(1, device=place).cpu()
    except Exception as error:
        return f"where no tensor can be made and read: {one_line(str(error))}"
    return ""


def _wrong_function(parts: DeviceParts) -> str:
    optional = ("record", "sleeping_memory", "read_rates")
    for name in ("memory", "synchronize", "empty_cache", "reset_peak_memory", "side_stream", *optional):
        function = getattr(parts, name)
        if not callable(function) and not (name in optional and function is None):
            return f"DeviceParts whose {name} is {_kind(function)} instead of a function without arguments"
    return ""


def _wrong_capability(capabilities: Capabilities) -> str:
    import torch

    fields: dict[str, tuple[type, ...]] = {
        "device_name": (str,),
        "dtypes": (Set,),
        "modes": (tuple, list),
        **dict.fromkeys(
            ("fp64", "deterministic", "update", "asynchronous", "keeps_strides", "device_lengths"), (bool,)
        ),
        "extra": (Mapping,),
        "unprofitable": (Mapping,),
    }
    for name, kinds in fields.items():
        field = getattr(capabilities, name)
        if not isinstance(field, kinds):
            return f"Capabilities whose {name} is {_kind(field)} instead of {kinds[0].__name__}"
    strays = [dtype for dtype in capabilities.dtypes if not isinstance(dtype, torch.dtype)]
    if strays:
        return f"Capabilities whose dtypes hold {_kind(strays[0])} instead of torch.dtype"
    unknown = sorted(map(str, (mode for mode in capabilities.modes if mode not in get_args(Mode))))
    return f"Capabilities with unknown modes {unknown} (known: {', '.join(get_args(Mode))})" if unknown else ""


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
