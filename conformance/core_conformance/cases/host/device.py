"""Level 0, the opened device: its dtypes, memory, modes, streams, and how it refuses what it can't do."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

import core
from core import InputSpec
from core.common.graphs.backend import CallBackend
from core.device import Device, MemoryInfo, Mode
from core.errors import CoreError, DeviceUnavailableError
from core.host.loading import describe
from core.host.selection import select_device
from core_conformance.case import Case
from core_conformance.cases.graphs.promises import GRAPHS, PARTS
from core_conformance.cases.host.presence import base_name, present
from core_conformance.dtypes import dtype_name, working_dtype
from core_conformance.trial import Trial

_MISSING_INDEX = 4096
_PROBE_BYTES = 64 * 2**20
# A host counts resident pages in batches per core and thread: two of its numbers may differ by some hundred KiB.
_HOST_ACCOUNT_BYTES = 2 * 2**20
_BACKEND_METHODS = ("capture_session", "capture_one", "can_run", "replay", "replay_session", "cleanup")


def dtypes(trial: Trial) -> None:
    """Compute in each dtype that is declared, on values whose results are exact in all of them."""
    device = present(trial)
    for dtype in sorted(device.capabilities.dtypes, key=str):
        name = dtype_name(dtype)
        try:
            _compute(trial, device, name, dtype)
        except Exception as error:
            trial.fail(f"{name} is declared, and computing in it raised {describe(error)}")
    _check_fp64(trial, device)


def _compute(trial: Trial, device: Device, name: str, dtype: torch.dtype) -> None:
    # Whole and half numbers, and sums of so few that bfloat16 holds them.
    a, b = (torch.arange(64).reshape(8, 8) * step % 7 - 3 for step in (3, 5))
    left, right = a.double() / 2, b.double()
    x, y = (value.to(dtype).to(device.torch_device) for value in (left, right))
    results: Mapping[str, tuple[Tensor, Tensor, torch.dtype]] = {
        "sum": (x + y, left + right, dtype),
        "product": (x * y, left * right, dtype),
        "matrix product": (x @ y, left @ right, dtype),
        "reduction": (x.sum(-1), left.sum(-1), dtype),
        "cast to float32": (x.to(torch.float32), left, torch.float32),
        "cast from float32": (left.float().to(device.torch_device).to(dtype), left, dtype),
    }
    for what, (result, wanted, kind) in results.items():
        trial.require(
            result.dtype == kind and result.device.type == device.torch_device.type,
            f"{name}, {what}: a tensor of {result.dtype} on {result.device}",
        )
        trial.same(f"{name}, {what}", result.cpu().double(), wanted)


def _check_fp64(trial: Trial, device: Device) -> None:
    if not device.capabilities.fp64:
        lies = torch.float64 in device.capabilities.dtypes
        trial.require(not lies, "float64 is among its dtypes, and fp64 is declared False")
        return
    try:
        fine = 1 + 2.0**-40
        x = torch.full((8, 8), fine, dtype=torch.float64).to(device.torch_device)
        results = {"difference": (x - 1).cpu(), "matrix product": (x @ torch.eye(8).double().to(x.device) - 1).cpu()}
    except Exception as error:
        trial.fail(f"fp64 is declared True, and computing in it raised {describe(error)}")
        return
    for what, result in results.items():
        kept = result.dtype == torch.float64 and bool((result == 2.0**-40).all())
        trial.require(kept, f"fp64 is declared True, and a {what} loses what float64 holds")


def memory(trial: Trial) -> None:
    """Read the account while a large tensor is held and afterwards; area graphs covers the memory of graphs."""
    device = present(trial)
    parts, own = device.parts, device.torch_device.type != "cpu"
    gc.collect()
    before = _account(trial, device, "before")
    parts.reset_peak_memory()
    tensor = torch.ones(_PROBE_BYTES, dtype=torch.uint8).to(device.torch_device)
    during = _account(trial, device, "with a tensor held")
    del tensor
    after = _account(trial, device, "when it is dropped")
    trial.require(
        after.peak_bytes >= during.used_bytes - (0 if own else _HOST_ACCOUNT_BYTES),
        f"the peak of {after.peak_bytes} bytes is below the {during.used_bytes} that were in use since its reset",
    )
    parts.reset_peak_memory()
    again = _account(trial, device, "after a reset of the peak")
    risen, given_back = during.used_bytes - before.used_bytes, during.used_bytes - after.used_bytes
    forgotten = again.peak_bytes < after.peak_bytes or again.peak_bytes == again.used_bytes
    if own:
        trial.require(risen >= _PROBE_BYTES, f"a tensor of {_PROBE_BYTES} bytes raises what is in use by {risen}")
        trial.require(given_back >= _PROBE_BYTES, f"dropping it lowers what is in use by {given_back}")
        trial.require(forgotten, "reset_peak_memory does not begin a new peak")
    else:
        # A host has other users of its memory, and not every system lets a process begin a new peak.
        text = f"a tensor of {_PROBE_BYTES >> 20} MiB moves what is in use by {risen >> 20} MiB and back by"
        trial.note(f"{text} {given_back >> 20}; the peak {'is' if forgotten else 'is not'} forgotten by a reset")


def _account(trial: Trial, device: Device, when: str) -> MemoryInfo:
    device.synchronize()
    device.parts.empty_cache()
    info: Any = device.parts.memory()
    if not isinstance(info, MemoryInfo):
        raise TypeError(f"memory() gave {type(info).__name__} instead of core.device.MemoryInfo")
    trial.require(info.total_bytes > 0, f"{when}: a total of {info.total_bytes} bytes")
    trial.require(0 <= info.used_bytes <= info.total_bytes, f"{when}: {info.used_bytes} of {info.total_bytes} in use")
    trial.require(info.peak_bytes >= info.used_bytes, f"{when}: a peak of {info.peak_bytes} under {info.used_bytes}")
    held = info.taken_bytes
    trial.require(
        info.used_bytes <= held <= info.total_bytes, f"{when}: {held} bytes held, {info.used_bytes} of them in use"
    )
    return info


def modes(trial: Trial) -> None:
    """Compare each declared mode with the methods of the device's graph backend."""
    device = present(trial)
    declared = device.capabilities.modes
    trial.note(f"declares {', '.join(declared) or 'no mode'}")
    trial.require(len(set(declared)) == len(declared), f"a mode is declared twice: {', '.join(declared)}")
    backend = device.graph_backend()
    kind = type(backend).__name__
    _check_methods(trial, backend, _BACKEND_METHODS, "core_graph_backend gives", kind)
    for mode in declared:
        if mode in PARTS:
            _check_methods(trial, backend, ("segment",), f"mode {mode!r} is declared, and its backend is", kind)
        if mode in GRAPHS:
            trial.require(
                type(backend) is not CallBackend,
                f"mode {mode!r} is declared, and the backend is {kind}, which runs the callable instead of a graph",
            )
    if device.capabilities.update:
        _check_methods(trial, backend, ("host_arguments", "update"), "update is declared, and the backend is", kind)


def _check_methods(trial: Trial, backend: object, names: tuple[str, ...], claim: str, kind: str) -> None:
    missing = [name for name in names if not callable(getattr(backend, name, None))]
    trial.require(not missing, f"{claim} {kind}, which has no {', '.join(missing)}")


def errors(trial: Trial) -> None:
    """Ask for what the device does not have: each is refused by name, and the device works on."""
    device = present(trial)
    missing = f"{base_name(trial)}:{_MISSING_INDEX}"
    refusal = _refusal(trial, f"opening {missing}", lambda: select_device(missing))
    if refusal is not None:
        trial.require(
            isinstance(refusal, DeviceUnavailableError),
            f"core_open_device of index {_MISSING_INDEX} raises no DeviceUnavailableError; {describe(refusal)}",
        )
    dtype = working_dtype(device)
    inputs = {"x": InputSpec((4, 8), dtype)}
    absent: list[Mode] = [mode for mode in get_args(Mode) if mode not in (*device.capabilities.modes, "off")]
    for mode in absent:
        _refusal(trial, f"mode {mode!r}", partial(core.compile, _double, device, inputs=inputs, mode=mode))
    unknown = partial(core.compile, _double, device, inputs=inputs, lowering="none-such")
    _refusal(trial, "an unknown lowering", unknown)
    x = torch.ones(4, 8, dtype=dtype).to(device.torch_device)
    trial.same("computing afterwards", _double(x).cpu().double(), torch.full((4, 8), 2.0).double())


def _double(x: Tensor) -> Tensor:
    return x * 2


def _refusal(trial: Trial, what: str, ask: Callable[[], Any]) -> CoreError | None:
    """Return the error by which `ask` is refused; note a failure if it is not refused, or the error lacks the usual
    form."""
    try:
        ask()
    except CoreError as error:
        for part in ("asked", "found", "remedy"):
            trial.require(bool(str(getattr(error, part)).strip()), f"{what}: the error has no {part!r}")
        return error
    except Exception as error:
        trial.fail(f"{what}: no CoreError, but {describe(error)}")
        return None
    trial.fail(f"{what}: it is not refused")
    return None


class _Planted(Exception):
    """The exception that ends work on a side stream."""


def side_stream(trial: Trial) -> None:
    """Work on the side stream, twice, and leave it by an exception: results are right there and afterwards."""
    device = present(trial)
    x = torch.ones(128, 128, dtype=working_dtype(device)).to(device.torch_device)
    device.synchronize()
    for turn in ("first", "second"):
        with device.parts.side_stream():
            result = (x @ x) + 1
        device.synchronize()
        trial.same(f"on the side stream, {turn} time", result.cpu().double(), torch.full((128, 128), 129.0).double())
    passed_on = False
    try:
        with device.parts.side_stream():
            raise _Planted
    except _Planted:
        passed_on = True
    trial.require(passed_on, "side_stream swallows an exception")
    trial.same("afterwards", (x + x).cpu().double(), torch.full((128, 128), 2.0).double())


def synchronizing(trial: Trial) -> None:
    """Wait for queued work, with none queued, and from another thread."""
    device = present(trial)
    x = torch.ones(512, 512, dtype=working_dtype(device)).to(device.torch_device)
    raised: list[BaseException] = []

    def elsewhere() -> None:
        try:
            device.synchronize()
        except BaseException as error:
            raised.append(error)

    device.synchronize()
    for _ in range(20):
        x = (x @ x) / 512
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    trial.require(not raised, f"on another thread it raised {describe(raised[0])}" if raised else "")
    device.synchronize()
    trial.same("work done", x.cpu().double(), torch.ones(512, 512).double())


def _case(name: str, what: str, run: Callable[[Trial], None], *, exclusive: bool = False) -> Case:
    return Case(id=f"host/{name}", what=what, run=run, exclusive=exclusive)


DEVICE_CASES: tuple[Case, ...] = (
    _case("dtypes", "it computes in each dtype that it declares, and in fp64 if it says so", dtypes),
    _case("memory", "its account of memory adds up", memory, exclusive=True),
    _case("modes", "its graph backend has what the declared modes need", modes),
    _case("errors", "what it does not have is refused, and says what to do instead", errors),
    _case("side-stream", "work on the side stream is right, and leaves the default one as it was", side_stream),
    _case("synchronize", "waiting for the device works at any time and on any thread", synchronizing),
)
