"""Promises about capture, and the cases they become: one per capture mode, and per dtype where values are rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch

from core.device import Device, Mode
from core_conformance.case import Case
from core_conformance.trial import Trial

MODES: tuple[Mode, ...] = tuple(mode for mode in get_args(Mode) if mode != "off")
GRAPHS: tuple[Mode, ...] = ("full", "piecewise", "segmented")
"""Modes in which a graph of the device is replayed, and the captured Python does not run again."""
PARTS: tuple[Mode, ...] = ("piecewise", "segmented")
"""Modes in which calls run eagerly between graphs."""
NO_PARTS = "nothing runs eagerly between graphs in this mode"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """Something that capture promises. run: tries it in a mode. modes: those it is about; elsewhere: why not others.

    dtypes: it is tried in each dtype, which `run` then gets as a third argument.
    """

    name: str
    what: str
    run: Callable[..., None]
    modes: Sequence[Mode] = MODES
    elsewhere: str = ""
    dtypes: Sequence[torch.dtype] = ()
    exclusive: bool = False
    timeout_s: float = 120.0


def cases_of(promises: Iterable[Promise], device: Device) -> Iterable[Case]:
    """Yield the cases of these promises for a device; those about modes or dtypes it does not declare run nothing."""
    declared = [mode for mode in MODES if mode in device.capabilities.modes]
    for promise in promises:
        if not declared:
            yield _case(promise, "off", None, "the device declares no capture mode")
        for mode in MODES if declared else ():
            for dtype in promise.dtypes or (None,):
                yield _case(promise, mode, dtype, _why_not(promise, mode, dtype, device))


def _case(promise: Promise, mode: Mode, dtype: torch.dtype | None, not_supported: str) -> Case:
    run: Callable[[Trial], None] = partial(_run, promise.run, mode, dtype)
    return Case(
        id="/".join(("graphs", promise.name, mode, *([dtype_name(dtype)] if dtype is not None else []))),
        what=promise.what,
        run=run,
        not_supported=not_supported,
        timeout_s=promise.timeout_s,
        exclusive=promise.exclusive,
    )


def _run(run: Callable[..., None], mode: Mode, dtype: torch.dtype | None, trial: Trial) -> None:
    run(trial, mode) if dtype is None else run(trial, mode, dtype)


def _why_not(promise: Promise, mode: Mode, dtype: torch.dtype | None, device: Device) -> str:
    if mode not in device.capabilities.modes:
        return f"the device does not declare mode {mode!r}"
    if mode not in promise.modes:
        return promise.elsewhere
    if dtype is not None and dtype not in device.capabilities.dtypes:
        return f"the device does not declare {dtype_name(dtype)}"
    return ""


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's short name of a dtype."""
    return str(dtype).removeprefix("torch.")


def working_dtype(device: Device) -> torch.dtype:
    """Return the dtype of cases that need only one: the widest of the usual ones that the device declares."""
    return next((dtype for dtype in DTYPES if dtype in device.capabilities.dtypes), torch.float32)
