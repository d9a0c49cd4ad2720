"""A device-neutral way from a PyTorch model to a captured, measured program on any accelerator.

Importing this package imports neither torch nor a plugin; each public name is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from core._version import __version__
from core.common.began import BEGAN as BEGAN

if TYPE_CHECKING:
    from core.common.config import CompileOptions
    from core.common.graphs.backend import GraphKey
    from core.common.graphs.breaks import eager_break
    from core.common.graphs.inputs import InputSpec
    from core.common.quantization.quantize import quantize
    from core.compilation import capture, compile
    from core.device import Device
    from core.errors import CoreError
    from core.host import list_devices, select_device
    from core.program import Program

_EXPORTS = {
    "CompileOptions": "core.common.config",
    "CoreError": "core.errors",
    "Device": "core.device",
    "GraphKey": "core.common.graphs.backend",
    "InputSpec": "core.common.graphs.inputs",
    "Program": "core.program",
    "capture": "core.compilation",
    "compile": "core.compilation",
    "eager_break": "core.common.graphs.breaks",
    "list_devices": "core.host",
    "quantize": "core.common.quantization.quantize",
    "select_device": "core.host",
}

__all__ = [
    "CompileOptions",
    "CoreError",
    "Device",
    "GraphKey",
    "InputSpec",
    "Program",
    "__version__",
    "capture",
    "compile",
    "eager_break",
    "list_devices",
    "quantize",
    "select_device",
]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'core' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
