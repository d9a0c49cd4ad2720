"""A model compiled with some of the plugin's passes, for their tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import core
from core.common.passes import Pass
from core.compilation.rewrite.pass_report import PassReport
from core.device import Device
from tests.recording import acme


def device_with(kernel_device: torch.device, *passes: Pass) -> Device:
    """Return a device with the plugin's kernels and these passes: a GPU, or a recording one for the interpreter."""
    from core_cuda.implementations import IMPLEMENTATIONS

    if kernel_device.type == "cuda":
        return replace(core.select_device("cuda"), passes=passes)
    return acme(ops=IMPLEMENTATIONS, passes=passes)


def compiled(model: nn.Module, device: Device, x: Tensor, **options: Any) -> tuple[core.Program, dict[str, PassReport]]:
    """Compile for inputs like x, which may have fewer rows; return the report of each pass that ran by name, too."""
    program = core.compile(
        model.eval().to(device.torch_device, x.dtype),
        device,
        inputs={"x": core.InputSpec(("rows", *x.shape[1:]), x.dtype)},
        buckets=[len(x)],
        options=core.CompileOptions(lowering="inline", examples=[{"x": x.to(device.torch_device)}], **options),
    )
    return program, {report.name: report for report in program.report().traces[0].passes}
