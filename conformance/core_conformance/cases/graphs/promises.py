"""Promises about capture, and the cases they become: one per capture mode, and per dtype where values are rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, get_args

import torch

from core.device import Device, Mode
from core_conformance.case import Case
from core_conformance.dtypes import dtype_name

MODES: tuple[Mode, ...] = tuple(mode for mode in get_args(Mode) if mode != "off")
GRAPHS: tuple[Mode, ...] = ("full", "piecewise", "segmented")
"""Modes in which a graph of the device is replayed, and the captured Python does not run again."""
PARTS: tuple[Mode, ...] = ("piecewise", "segmented")
"""Modes in which calls run eagerly between graphs."""


class Scope(NamedTuple):
    """The modes that a promise covers, and why it does not cover the others."""

    modes: Sequence[Mode]
    elsewhere: str


EVERYWHERE = Scope(MODES, "")
IN_PARTS = Scope(PARTS, "nothing runs eagerly between graphs in this mode")
WITHOUT_PYTHON = Scope(GRAPHS, "a compiled program is called at each replay, and may run Python")


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """One promise of capture."""

    name: str
    what: str
    #: Tests the promise in a mode; if `dtypes` are given, in each of them (the third argument).
    run: Callable[..., None]
    scope: Scope = EVERYWHERE
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
    names: dict[str, object] = {"mode": mode} if dtype is None else {"mode": mode, "dtype": dtype}
    return Case(
        id="/".join(("graphs", promise.name, mode, *([dtype_name(dtype)] if dtype is not None else []))),
        what=promise.what,
        run=partial(promise.run, **names),
        not_supported=not_supported,
        timeout_s=promise.timeout_s,
        exclusive=promise.exclusive,
    )


def _why_not(promise: Promise, mode: Mode, dtype: torch.dtype | None, device: Device) -> str:
    if mode not in device.capabilities.modes:
        return f"the device does not declare mode {mode!r}"
    if mode not in promise.scope.modes:
        return promise.scope.elsewhere
    if dtype is not None and dtype not in device.capabilities.dtypes:
        return f"the device does not declare {dtype_name(dtype)}"
    return ""
