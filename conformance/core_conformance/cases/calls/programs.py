"""Programs for the cases of calls: made in every mode from functions that have a break point in the middle.

Legend: n rows, the one bucket dimension; W width.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.compilation.capture.breaks import eager_break
from core.compilation.capture.inputs import Buckets, InputSpec
from core.compilation.compile import capture, compile
from core.compilation.options import CompileOptions
from core.compilation.program import Program
from core.compilation.request import Models
from core.device import Device, Mode
from core_conformance.dtypes import working_dtype

WIDTH = 16
BUCKETS = [2, 4, 8]
BREAK = ("core_conformance::doubled",)


class _Armed(threading.local):
    armed = False


ARMED = _Armed()
"""Whether `core_conformance::fragile` raises, on this thread."""


@torch.library.custom_op("core_conformance::doubled", mutates_args=())
def _doubled(x: Tensor) -> Tensor:
    """Return 2 · x; the op at which "piecewise" cuts."""
    return x * 2


@torch.library.custom_op("core_conformance::fragile", mutates_args=())
def _fragile(x: Tensor) -> Tensor:
    """Return 2 · x, or raise while `ARMED` says so: in the middle of a capture, with memory taken."""
    result = x * 2
    if ARMED.armed:
        raise RuntimeError("planted in the capture")
    return result


for _op in (_doubled, _fragile):
    _op.register_fake(torch.empty_like)


@eager_break
def doubled(x: Tensor) -> Tensor:
    """Return 2 · x; in every mode that has break points, one of them."""
    result: Tensor = torch.ops.core_conformance.doubled(x)
    return result


def fragile(x: Tensor) -> Tensor:
    """Return 2 · x, or raise."""
    result: Tensor = torch.ops.core_conformance.fragile(x)
    return result


def lowering_of(device: Device) -> str | None:
    """Return the lowering that runs a graph as torch does, op by op, or None where the device has none such."""
    return "inline" if "inline" in device.lowerings.available else None


def make(
    device: Device,
    mode: Mode,
    function: Models,
    inputs: Mapping[str, InputSpec] | None = None,
    buckets: Buckets | None = None,
    **options: Any,
) -> Program:
    """Return the program of a function in a mode: by `core.compile` where that takes a trace, else `core.capture`.

    inputs: one of rows, x, unless given. options: of `CompileOptions`.
    """
    inputs = {"x": rows_spec(device)} if inputs is None else inputs
    if mode == "piecewise":
        options = {"passes": (), "lowering": lowering_of(device), "break_at": BREAK} | options
        return compile(function, device, inputs=inputs, buckets=buckets, mode=mode, options=CompileOptions(**options))
    return capture(function, device, inputs=inputs, buckets=buckets, mode=mode, options=CompileOptions(**options))


def rows_spec(device: Device, **fields: Any) -> InputSpec:
    """Return the declaration of rows [n, W] in the working dtype."""
    return InputSpec(("n", WIDTH), working_dtype(device), **fields)


def rows(device: Device, count: int, seed: int) -> Tensor:
    """Return whole numbers between -8 and 8 as rows [count, W]."""
    numbers = torch.randint(-8, 9, (count, WIDTH), generator=torch.Generator().manual_seed(seed))
    return numbers.to(device.torch_device, working_dtype(device))
