"""Opening an accelerator of torch: the functions of `DeviceParts`, each tried once before it is promised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from core.accelerator import asked
from core.accelerator.memory import memory_of
from core.common.graphs.streams import capture_lock
from core.device import Capabilities, DeviceParts, Mode
from core.errors import DeviceUnavailableError, one_line

WHAT = "generic: torch's own kernels"
RECORDED_MODES: tuple[Mode, ...] = ("full", "piecewise", "segmented")

_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def open_accelerator(device_type: str, index: int = 0, *, modes: tuple[Mode, ...] = RECORDED_MODES) -> DeviceParts:
    """Open a device of the type of accelerator that torch drives; what was tried and failed is in `capabilities.extra`.

    Raises `DeviceUnavailableError` where torch has no support for that type, finds no device of it or too few, or can't
    compute there.

    modes: capture modes of the graph backend that goes with it.
    """
    refuse_absent(device_type, index)
    device = torch.device(device_type, index)
    dtypes = _working_dtypes(device)
    memory = memory_of(device)
    streamless = _problem(lambda: _try_stream(device))
    eventless = _problem(lambda: _wait_for_event(device)())
    limits = {"memory": memory.uncounted, "total_memory": memory.untold, "streams": streamless, "events": eventless}
    capabilities = Capabilities(
        device_name=f"{asked.product_name(device)} ({WHAT})",
        dtypes=dtypes,
        modes=modes,
        fp64=torch.float64 in dtypes,
        extra={"generic": True, **{f"no {name}": reason for name, reason in limits.items() if reason}},
    )
    return DeviceParts(
        torch_device=device,
        capabilities=capabilities,
        memory=memory.read,
        reset_peak_memory=memory.reset_peak,
        synchronize=partial(_synchronize, device),
        empty_cache=partial(_empty_cache, device),
        side_stream=nullcontext if streamless else partial(_side_stream, device),
        record=None if eventless else partial(_wait_for_event, device),
    )


def refuse_absent(device_type: str, index: int = 0) -> None:
    """Raise `DeviceUnavailableError` unless torch has support for that type and finds a device of that index."""
    wanted = f"device {device_type!r}" if index == 0 else f"device {device_type!r}, index {index}"
    offered = asked.offered_type()
    if offered != device_type:
        has = f"its accelerator here is {offered!r}" if offered else "it has no accelerator here"
        raise DeviceUnavailableError(
            wanted,
            found=f"torch {torch.__version__} has no support for devices of type {device_type!r}: {has}",
            remedy="install a torch that was built for it, or the extension of torch that brings it",
        )
    count = asked.count_devices()
    if count == 0:
        raise DeviceUnavailableError(
            wanted,
            found=f"torch {torch.__version__} has support for {device_type!r}, but finds no device",
            remedy="check that the device's driver is installed and that this process may use it; "
            "torch.accelerator.device_count() tells whether torch finds it",
        )
    if index >= count:
        raise DeviceUnavailableError(
            wanted, found=f"torch finds {count} device(s) of that type", remedy=f"choose an index below {count}"
        )


def _working_dtypes(device: torch.device) -> frozenset[torch.dtype]:
    """Return the floating dtypes in which a small product and sum are right on the device."""
    problems = {dtype: _problem(partial(_compute, device, dtype)) for dtype in _FLOATING}
    dtypes = frozenset(dtype for dtype, problem in problems.items() if not problem)
    if not dtypes:
        raise DeviceUnavailableError(
            f"device {str(device)!r}",
            found=f"torch finds it, and can't compute on it: {problems[torch.float32]}",
            remedy="check the installation of the device's driver and of its extension of torch",
        )
    return dtypes


def _compute(device: torch.device, dtype: torch.dtype) -> None:
    # float64 must keep what no smaller dtype holds.
    fine = 1 + 2.0**-40 if dtype == torch.float64 else 1.5
    x = torch.full((2, 2), fine, dtype=torch.float64).to(dtype).to(device)
    result = ((x @ torch.eye(2, dtype=dtype).to(device)) + x).cpu()
    if result.dtype != dtype or not bool((result.double() == 2 * fine).all()):
        raise RuntimeError(f"{dtype}: wrong results")


def _try_stream(device: torch.device) -> None:
    with _side_stream(device):
        torch.ones(2, device=device).add_(1)
    torch.accelerator.synchronize(device)


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    caller, stream = torch.accelerator.current_stream(device), torch.Stream(device)
    stream.wait_stream(caller)
    entered: AbstractContextManager[object] = stream
    try:
        with entered:
            yield
    finally:
        caller.wait_stream(stream)


def _wait_for_event(device: torch.device) -> Callable[[], None]:
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event.synchronize


def _synchronize(device: torch.device) -> None:
    with capture_lock(device):
        torch.accelerator.synchronize(device)


def _empty_cache(device: torch.device) -> None:
    # torch empties the caches of all devices of the type; while a graph is captured there is nothing to empty.
    with capture_lock(device):
        torch.accelerator.empty_cache()


def _problem(attempt: Callable[[], object]) -> str:
    """Return why an attempt failed on the device, "" where it did not."""
    try:
        attempt()
    except Exception as error:  # whatever the device's code raises is the reason
        return one_line(str(error)) or type(error).__name__
    return ""
