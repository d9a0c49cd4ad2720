"""Declared calls of ATB's and torch_npu's ops on the host, and how tests run them on the device."""

from __future__ import annotations

from typing import Any

import torch
from npu_kernel_cases import moved, npu

from core.common.fakes.schema import find_overload
from core_npu.fakes.declared import NPU_FAKES

Call = dict[str, Any]
HOST = torch.device("cpu")

_SAMPLES = {fake.op: fake.samples for fake in NPU_FAKES}


def names(op: str) -> list[str]:
    """Return what the calls declared for an op are called."""
    samples = _SAMPLES[op]
    assert samples is not None
    return [each.name for each in samples(HOST)]


def sample(op: str, name: str) -> Call:
    """Return a declared call, its tensors on the host."""
    samples = _SAMPLES[op]
    assert samples is not None
    return next(dict(each.kwargs) for each in samples(HOST) if each.name == name)


def placed(op: str, call: Call) -> Call:
    """Move to the device what the op's samples put there: lengths that ATB reads on the host stay."""
    samples = _SAMPLES[op]
    assert samples is not None
    on_device = {
        name
        for each in samples(npu())
        for name, value in each.kwargs.items()
        if isinstance(value, torch.Tensor) and value.device.type == "npu"
    }
    move = {name: value for name, value in call.items() if name in on_device}
    return {**call, **moved(move, npu())}


def run(op: str, call: Call) -> Any:
    """Call an op and wait for it."""
    overload = find_overload(op)
    assert overload is not None
    result = overload(**call)
    torch.npu.synchronize()
    return result
