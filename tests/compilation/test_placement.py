"""Where tensors of a program lie: inputs come from anywhere, weights have to be on the device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import core
from core import InputSpec
from core.device import Device
from core.errors import UsageError
from tests.support import cpu, refused


def elsewhere() -> Device:
    """Return a device whose tensors are no host's: meta tensors, on which nothing is computed."""
    here = cpu()
    return replace(here, parts=replace(here.parts, torch_device=torch.device("meta")))


def test_an_eager_call_gets_its_inputs_on_the_device_as_a_captured_one_does() -> None:
    model = nn.Linear(8, 8, device="meta").eval()
    specs = {"input": InputSpec(("b", 8), torch.float32)}
    program = core.compile(model, elsewhere(), inputs=specs, buckets=[4], mode="off")
    assert program(input=torch.randn(3, 8)).device.type == "meta"


def test_a_model_that_is_not_on_the_device_is_refused_and_numbers_on_the_host_are_not() -> None:
    specs = {"input": InputSpec(("b", 8), torch.float32)}
    with refused(UsageError, "Linear for cpu (meta)", "its weight is on cpu", "model.to('meta')"):
        core.compile(nn.Linear(8, 8).eval(), elsewhere(), inputs=specs, buckets=[4], mode="off")
    model = nn.Linear(8, 8, device="meta").eval()
    model.register_buffer("factor", torch.tensor(2.0))
    core.compile(model, elsewhere(), inputs=specs, buckets=[4], mode="off")
    model.register_buffer("table", torch.ones(8))
    with refused(UsageError, "its table is on cpu"):
        core.compile(model, elsewhere(), inputs=specs, buckets=[4], mode="off")
