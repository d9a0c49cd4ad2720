"""A device-neutral way from a PyTorch model to a captured, measured program on any accelerator.

Importing this package imports neither torch nor a plugin; each public name is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from core._version import __version__
from core.compilation.cache.load_time import LOAD_TIME as LOAD_TIME

if TYPE_CHECKING:
    from core.common.graphs.backend import GraphKey
    from core.compilation.capture.breaks import eager_break
    from core.compilation.capture.inputs import InputSpec
    from core.compilation.compile import capture, compile
    from core.compilation.options import CompileOptions
    from core.compilation.program import Program
    from core.device import Device
    from core.dynamo.backend import backend_report
    from core.dynamo.optimize import optimize
    from core.engine.config import SamplingParams
    from core.engine.serve.async_engine import AsyncEngine
    from core.engine.serve.engine import Engine
    from core.engine.steps.runner import EngineConfig
    from core.errors import CoreError
    from core.host.selection import list_devices, select_device
    from core.quantization.quantize import quantize

_EXPORTS = {
    "AsyncEngine": "core.engine.serve.async_engine",
    "CompileOptions": "core.compilation.options",
    "CoreError": "core.errors",
    "Device": "core.device",
    "Engine": "core.engine.serve.engine",
    "EngineConfig": "core.engine.steps.runner",
    "GraphKey": "core.common.graphs.backend",
    "InputSpec": "core.compilation.capture.inputs",
    "Program": "core.compilation.program",
    "SamplingParams": "core.engine.config",
    "backend_report": "core.dynamo.backend",
    "capture": "core.compilation.compile",
    "compile": "core.compilation.compile",
    "eager_break": "core.compilation.capture.breaks",
    "list_devices": "core.host.selection",
    "optimize": "core.dynamo.optimize",
    "quantize": "core.quantization.quantize",
    "select_device": "core.host.selection",
}

__all__ = [
    "AsyncEngine",
    "CompileOptions",
    "CoreError",
    "Device",
    "Engine",
    "EngineConfig",
    "GraphKey",
    "InputSpec",
    "Program",
    "SamplingParams",
    "__version__",
    "backend_report",
    "capture",
    "compile",
    "eager_break",
    "list_devices",
    "optimize",
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
    return sorted(__all__)
