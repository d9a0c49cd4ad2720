"""`core.compile` and `core.capture`: the two ways to a `Program`. What they do is in pipeline.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

import core.common.ops.canonical  # noqa: F401  # declares the canonical ops that graphs may hold
from core.common.fakes import apply_late
from core.compilation.capture.guards import GuardValues
from core.compilation.capture.inputs import Buckets, InputSpec
from core.compilation.capture.untraced import OutputDims
from core.compilation.options import CompileOptions, Progress, Verify
from core.compilation.pipeline import make_program
from core.compilation.program import Program
from core.compilation.request import CompileRequest, Models
from core.compilation.shared_trace import SharedTrace
from core.device import Device, Mode
from core.errors import UsageError
from core.host.selection import select_device

if TYPE_CHECKING:
    from core.compilation.options import ModeChoice

__all__ = ["Progress", "capture", "compile"]

Guards = GuardValues | Mapping[str, GuardValues]
AnyExamples = Mapping[str, Sequence[Mapping[str, Tensor]]] | Sequence[Mapping[str, Tensor]]
UNTRACED: tuple[Mode, ...] = ("segmented", "full", "compile", "off")


def compile(
    model: Models,
    device: str | Device = "auto",
    *,
    inputs: Mapping[str, InputSpec],
    buckets: Buckets | None = None,
    guards: Guards | None = None,
    mode: ModeChoice | Mapping[str, ModeChoice] | None = None,
    lowering: str | None = None,
    passes: tuple[str, ...] | None = None,
    disable_passes: tuple[str, ...] = (),
    enable_passes: tuple[str, ...] = (),
    break_at: tuple[str, ...] | None = None,
    eager: tuple[str, ...] | None = None,
    strict: bool = False,
    debug: bool = False,
    verify: Verify = "off",
    outputs: Sequence[OutputDims] | None = None,
    bound: Mapping[str, Tensor] | None = None,
    reset: Callable[[], None] | None = None,
    examples: AnyExamples | None = None,
    shared: SharedTrace | None = None,
    cache: bool = False,
    progress: Progress | None = None,
) -> Program:
    """Compile a model for a device and return the `Program` that runs it.

    model: a module (an `fx.GraphModule` too) or function called with the declared inputs by name, its tensors already
    on the device; or one per phase. inputs: name -> `InputSpec`; a named dimension is padded, so read there what that
    assumes. buckets: sizes of the bucket dimensions to capture, as a list, or a list per phase; None for inputs of
    fixed shape. guards: what else a phase is captured for, name -> values, for all phases or per phase: the model gets
    one value of each by name, calls name theirs. mode, lowering, passes, disable_passes, enable_passes, break_at,
    eager, strict, debug, verify: see `CompileOptions`. outputs: as in `capture`, for phases that run without a trace.
    bound: the tensors of inputs declared "bound". reset: called between warm-up and capture of each bucket, and after
    it, to undo what these wrote into state. examples: sets of inputs by name, per phase or for a single phase, on which
    `verify` judges the passes and on which captures without a trace are checked. A bucket dimension named "tokens"
    tells passes with a token range how many tokens a graph serves. shared: phases that one trace may serve, since their
    models differ in one argument of one op only. cache: keep the finished graphs on disk, and take them from there
    where nothing has changed that they depend on (docs/cache.md); `CORE_CACHE=0` overrules it. progress: called as
    `progress(what, done, total)` before each capture and once after the last, on the first rank only. Lowering
    "inductor" takes minutes for whole models, where "inline" takes seconds.

    The model runs at least once per bucket during capture, on inputs full of zeros (or of their sentinel): in-place
    writes go where these point. Weights and buffers are bound: writing into them is seen, assigning others
    (`load_state_dict(assign=True)`, `model.half()`) is not, unless `debug` is on. A model that assigns to attributes in
    its forward can't be traced: an error where strict or where the mode is named, else it runs in a mode without a
    trace, with a note. What traces but can't be captured (a host read) is an error likewise: see docs/capture.md.
    Ambient modes of torch (autocast) apply at each call of a lowering that runs torch ops, such as `inline`. Raises
    `CoreError` subclasses: `UsageError`, `TraceError`, `PassError`, `LoweringError` and `CaptureError`.
    """
    options = CompileOptions(
        guards=guards,
        outputs=outputs,
        bound=bound,
        reset=reset,
        examples=examples,
        shared=shared,
        cache=cache,
        progress=progress,
        mode=mode,
        lowering=lowering,
        passes=passes,
        disable_passes=disable_passes,
        enable_passes=enable_passes,
        break_at=break_at,
        eager=eager,
        strict=strict,
        debug=debug,
        verify=verify,
    )
    device = _device(device)
    apply_late(device.fakes)  # a library may have been loaded since the device was selected
    return make_program(CompileRequest.of(model, device, inputs, buckets, options))


def capture(
    function: Models,
    device: str | Device = "auto",
    *,
    inputs: Mapping[str, InputSpec],
    buckets: Buckets | None = None,
    guards: Guards | None = None,
    mode: ModeChoice | Mapping[str, ModeChoice] | None = None,
    outputs: Sequence[OutputDims] | None = None,
    eager: tuple[str, ...] | None = None,
    strict: bool = False,
    debug: bool = False,
    bound: Mapping[str, Tensor] | None = None,
    reset: Callable[[], None] | None = None,
    examples: AnyExamples | None = None,
    progress: Progress | None = None,
) -> Program:
    """Capture a callable as it is, with no tracing, passes or lowering, and return the `Program` that replays it.

    Arguments are those of `core.compile`. mode: None takes "segmented", else "full", else what the device has. outputs:
    the dimensions of each output tensor, in order, as in `InputSpec.shape` and None for those that no bucket changes,
    for example `[("tokens", None)]`; None reads them off the shapes in the buckets captured, and refuses calls where
    these do not tell.

    Python runs at capture only: what it decides by data stays decided. So each capture is replayed on further inputs
    (`examples`; else random floating-point ones) and compared with the callable itself, in every bit. Raises
    `CaptureError` where they differ, or where something can't be captured, naming the module to run eagerly.
    """
    device = _device(device)
    preferred = next(m for m in UNTRACED if m == "off" or m in device.capabilities.modes)
    options = CompileOptions(
        mode=preferred if mode is None else mode,
        passes=(),
        eager=eager,
        strict=strict,
        debug=debug,
        guards=guards,
        outputs=outputs,
        bound=bound,
        reset=reset,
        examples=examples,
        progress=progress,
    )
    return make_program(CompileRequest.of(function, device, inputs, buckets, options, traced=False))


def _device(device: str | Device) -> Device:
    if not isinstance(device, (str, Device)):
        raise UsageError(
            f"compiling for {device!r}",
            found=f"a {type(device).__name__}",
            remedy="pass a device name such as 'auto', or a Device from core.select_device",
        )
    return device if isinstance(device, Device) else select_device(device)
