"""torch_npu's own task queue after a failed launch, in processes of their own: nothing runs on with old values."""

from __future__ import annotations

import pytest

from simulator.apart import run

PROGRAM = """
import os
os.environ["TASK_QUEUE_ENABLE"] = "1"
import torch, core
from core.compilation.capture.inputs import InputSpec
from core.errors import CoreError
from simulator import runtime

class Model(torch.nn.Module):
    def forward(self, x):
        return (x * 3).sin() + 1

def compiled():
    specs = {"x": InputSpec(("n", 64), torch.float32)}
    return core.compile(Model(), device=device, inputs=specs, buckets=[1, 2, 4], mode="full")

def attempt(what, fn):
    try:
        fn()
        print(what, "went on")
    except CoreError as error:
        print(what, type(error).__name__, "task queue has ended" in error.found)

device = core.select_device("npu")
x = torch.ones(2, 64, device="npu")
first = compiled()
first(x=x)
"""

CAPTURE = """
runtime.fail_next("aclnnSin", 207008, {after})
attempt("compile", compiled)
runtime.forget_failures()
attempt("call", lambda: first(x=x))
attempt("compile again", compiled)
"""

EAGER = """
runtime.fail_next("aclnnCos", 207008)
try:
    x.cos().cpu()
except RuntimeError:
    print("raised once")
attempt("compile", compiled)
attempt("call", lambda: first(x=x))
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 4, 5])
def test_a_launch_that_fails_in_a_warm_up_or_capture_ends_the_process_s_work(after: int) -> None:
    done = run(PROGRAM + CAPTURE.format(after=after), "--poison")
    assert done.stdout.splitlines() == [
        f"{what} DeviceUnavailableError True" for what in ("compile", "call", "compile again")
    ], done.stderr


@pytest.mark.slow
def test_a_launch_that_fails_elsewhere_is_found_at_the_next_capture() -> None:
    done = run(PROGRAM + EAGER, "--poison")
    assert done.stdout.splitlines() == [
        "raised once",
        "compile DeviceUnavailableError True",
        "call DeviceUnavailableError True",
    ], done.stderr
