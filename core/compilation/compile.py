"""`core.compile` and `core.capture`: the two functions that make a `Program`. The stages are in pipeline.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import core.common.ops.canonical  # noqa: F401  # declares the canonical ops that graphs may hold
from core.common.fakes import apply_late
from core.compilation.capture.inputs import Buckets
from core.compilation.declared import Declared, Dynamic, ExampleInputs, declare
from core.compilation.options import CompileOptions, Verify, options_of
from core.compilation.pipeline import make_program
from core.compilation.program import Program
from core.compilation.request import CompileRequest, Models
from core.device import Device, Mode
from core.errors import UsageError
from core.host.selection import select_device

if TYPE_CHECKING:
    import torch

    from core.compilation.options import ModeChoice

__all__ = ["capture", "compile"]

_UNTRACED: tuple[Mode, ...] = ("segmented", "full", "compile", "off")
_OF_A_TRACE = (
    "lowering",
    "passes",
    "disable_passes",
    "enable_passes",
    "break_at",
    "verify",
    "shared",
    "cache",
)
"""Options about a traced graph, which `core.capture` refuses."""


def compile(
    model: Models,
    device: str | Device | torch.device = "auto",
    *,
    inputs: Declared | None = None,
    example_inputs: ExampleInputs | None = None,
    dynamic: Dynamic | None = None,
    buckets: Buckets | None = None,
    mode: ModeChoice | Mapping[str, ModeChoice] | None = None,
    lowering: str | None = None,
    passes: tuple[str, ...] | None = None,
    strict: bool | None = None,
    verify: Verify | None = None,
    options: CompileOptions | Mapping[str, Any] | None = None,
) -> Program:
    """Compile a model for a device and return the `Program` that runs it.

    - model: a module (an `fx.GraphModule` too) or function called with the declared inputs by name, its tensors already
      on the device; or one per phase.
    - device: a name, a `Device`, or a `torch.device`, which asks for the device of its type.
    - example_inputs: tensors by name, or in the order of the model's parameters, whose shapes and dtypes are declared;
      or the one tensor.
    - dynamic: names for dimensions of these, `{"x": {0: "batch"}}`, as torch.export's `dynamic_shapes`.
    - inputs: instead of the two, an `InputSpec` by name; or a list, as for example_inputs. A named dimension is padded:
      `InputSpec` says what that assumes. A dimension named "tokens" tells passes with a token range how many tokens a
      graph serves; calls larger than all buckets are split along one named "batch".
    - buckets: sizes of the named dimensions to capture: a list, `{"batch": [1, 8], "length": [64]}` for each with each,
      or a list per phase. None stands for the sizes of example_inputs, and for inputs of fixed shape.
    - lowering: "inductor" takes minutes for whole models, where "inline" takes seconds.
    - options: everything else, as `CompileOptions` or a mapping; mode, lowering, passes, strict and verify may be given
      there instead.

    The model runs at least once per bucket during capture, on inputs full of zeros (or of their sentinel): in-place
    writes go where these inputs point. Programs read the weights and buffers that the model has now. They see what is
    written into these, and do not see others that are assigned (`load_state_dict(assign=True)`, `model.half()`); with
    `debug` that is an error.

    A model whose forward changes Python state (an attribute, an item, a global, an iterator) can't be traced. That is
    an error where strict or where the mode is named; else the model runs eagerly, with a note. A model that can be
    traced but not captured (because of a host read) is treated alike: see docs/capture.md. Ambient modes of torch
    (autocast) apply at each call of a lowering that runs torch ops, such as `inline`.

    Raises `CoreError` subclasses: `UsageError`, `TraceError`, `PassError`, `LoweringError` and `CaptureError`.
    """
    options = options_of(options, mode=mode, lowering=lowering, passes=passes, strict=strict, verify=verify)
    device = select_device(device)
    apply_late(device.fakes)  # a library may have been loaded since the device was selected
    declared = declare(model, inputs, example_inputs, dynamic, buckets)
    if declared.examples and options.verify != "off":
        options = options.with_defaults(examples=[declared.examples])
    return make_program(CompileRequest.of(model, device, declared.inputs, declared.buckets, options))


def capture(
    function: Models,
    device: str | Device | torch.device = "auto",
    *,
    inputs: Declared | None = None,
    example_inputs: ExampleInputs | None = None,
    dynamic: Dynamic | None = None,
    buckets: Buckets | None = None,
    mode: ModeChoice | Mapping[str, ModeChoice] | None = None,
    strict: bool | None = None,
    options: CompileOptions | Mapping[str, Any] | None = None,
) -> Program:
    """Capture a callable as it is, with no tracing, passes or lowering, and return the `Program` that replays it.

    Arguments are those of `core.compile`; options that only a traced graph has are refused. Without a mode, "segmented"
    is taken, else "full", else any mode of the device.

    Python runs at capture only: its decisions about data are frozen. So each capture is replayed on further inputs
    (`examples`; else random floating-point ones) and compared with the callable itself, in every bit. Raises
    `CaptureError` where they differ, or where something can't be captured, naming the module to run eagerly.
    """
    options = options_of(options, mode=mode, strict=strict)
    idle = [name for name in options.stated if name in _OF_A_TRACE]
    if idle:
        raise UsageError(
            f"core.capture with {', '.join(idle)}",
            found="it traces nothing, so there is no graph that these could say anything of",
            remedy="leave them out, or trace the model by core.compile",
        )
    device = select_device(device)
    preferred = next(m for m in _UNTRACED if m == "off" or m in device.capabilities.modes)
    options = options.with_defaults(mode=preferred, passes=())
    declared = declare(function, inputs, example_inputs, dynamic, buckets, asked="core.capture")
    return make_program(CompileRequest.of(function, device, declared.inputs, declared.buckets, options, traced=False))
