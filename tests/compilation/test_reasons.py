"""What users are told of a capture or a lowering that fails: the cause, and a way out that is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from core import InputSpec, Program
from core.common.graphs.backend import CallBackend, GraphKey
from core.common.inductor import INLINE_AND_INDUCTOR
from core.compilation.capture.runner import GraphRunner
from core.errors import CaptureError, LoweringError, one_line
from core.verify.execution import error_line, run_graph
from tests.recording import acme
from tests.support import compile_with, cpu

ROWS = {"x": InputSpec(("n", 4), torch.float32)}
DEVICE_ERROR = """run:OpCommand.cpp:1 device function error: call the_kernel failed, error code is 500000
[ERROR] 2026-01-01-00:00:00 (PID:1, Device:0, RankID:-1) ERR00100 call of the device's interface failed.
[Error]: The execution of the core is abnormal. {}
        Rectify the fault based on the error information in the log.
        TraceBack (most recent call last):
        the table has 4 rows, and row 9 was asked for
""".format("Nothing of this line says what is wrong. " * 8)


@torch.library.custom_op("reasons::fails", mutates_args=())
def fails(x: Tensor) -> Tensor:
    """Fail as an op of a device does, with the cause in the last of many lines."""
    raise RuntimeError(DEVICE_ERROR)


@fails.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        called: Tensor = fails(x)
        return called


def compiled(model: Any, device: Any = None, **options: Any) -> Program:
    return compile_with(model, device or acme(update=False), inputs=ROWS, buckets=[2], **options)


def test_a_long_message_keeps_its_first_and_its_last_line() -> None:
    line = one_line(DEVICE_ERROR)
    assert line.startswith("run:OpCommand.cpp:1 device function error: call the_kernel failed, error code is 500000")
    assert line.endswith("… the table has 4 rows, and row 9 was asked for") and len(line) <= 300


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("one\n\n  two  words\n", "one two words"),
        ("x" * 400, "x" * 298 + " …"),
        ("a" * 200 + "\n^^^^\n" + "b" * 400 + "\n  ^^^\n", "a" * 148 + " … " + "b" * 147 + " …"),
        (
            "wrong size\n\nWhile executing %view : [num_users=1]\nOriginal traceback:\n  File x\nUse tlparse",
            "wrong size",
        ),
    ],
)
def test_one_line(text: str, line: str) -> None:
    assert one_line(text) == line and len(line) <= 300


def test_the_line_of_an_error_of_a_graph_ends_with_the_cause() -> None:
    graph = fx.symbolic_trace(Failing())
    with pytest.raises(RuntimeError) as caught:
        run_graph(graph, [torch.ones(2, 4)])
    line = error_line(caught.value)
    assert line.startswith("RuntimeError: run:OpCommand.cpp") and line.endswith("row 9 was asked for")


class Once(nn.Module):
    """Runs on the host and fails in a capture, for a reason that only the last line of its error tells."""

    def __init__(self) -> None:
        super().__init__()
        self.step = Step()

    def forward(self, x: Tensor) -> Tensor:
        called: Tensor = self.step(x)
        return called


class Step(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        called: Tensor = sometimes(x)
        return called


RUNS: list[int] = []


@torch.library.custom_op("reasons::sometimes", mutates_args=())
def sometimes(x: Tensor) -> Tensor:
    """Fail at its second run."""
    RUNS.append(1)
    if len(RUNS) == 2:
        raise RuntimeError(DEVICE_ERROR)
    return x * 2


@sometimes.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_the_note_of_a_downgrade_ends_with_the_cause() -> None:
    RUNS.clear()
    notes = compiled(Once().eval(), lowering="inline", passes=(), mode=("full", "segmented")).report().notes
    note = next(note for note in notes if "instead of 'full'" in note)
    assert "error code is 500000" in note and "row 9 was asked for" in note and len(note) < 450


def test_a_lowering_that_failed_is_no_way_out() -> None:
    lowerings = INLINE_AND_INDUCTOR
    broken = dict.fromkeys(lowerings.available, _broken)
    for name, offered in (("inline", "mode 'off'"), ("inductor", "lowering 'inline'")):
        device = cpu(lowerings=type(lowerings)(available=broken, default="inline"))
        with pytest.raises(LoweringError, match=f"lowering main\\[2\\] by '{name}'") as caught:
            compiled(torch.sin, device, lowering=name)
        assert offered in caught.value.remedy and f"lowering '{name}'" not in caught.value.remedy


def _broken(request: Any) -> Any:
    raise NotImplementedError("no such op")


def item(x: Tensor) -> tuple[Tensor]:
    return (x * x.sum().item(),)


def condition(x: Tensor) -> tuple[Tensor]:
    return (x * 2 if x.sum() > 0 else x,)


def to_the_host(x: Tensor) -> tuple[Tensor]:
    return (x.cpu(),)


def as_float(x: Tensor) -> tuple[Tensor]:
    return (x * float(x.sum()),)


def refused_by_the_runtime(x: Tensor) -> tuple[Tensor]:
    raise RuntimeError("operation not permitted when stream is capturing")


def no_kernel(x: Tensor) -> tuple[Tensor]:
    return (x * 2 if x.view(7) is not None else x,)


def no_table(x: Tensor) -> tuple[Tensor]:
    raise ValueError("aclmdlRICaptureEnd: no such table")


def no_shape_of_what_is_read(x: Tensor) -> tuple[Tensor]:
    return (torch.zeros(3).view(torch.zeros(1).item() == 0 or 1, 7),)


@pytest.mark.parametrize("cause", [item, condition, to_the_host, as_float, refused_by_the_runtime])
def test_a_host_read_is_called_one(cause: Callable[[Tensor], tuple[Tensor]]) -> None:
    assert "host reads can't be captured" in remedy_of(cause)


@pytest.mark.parametrize("cause", [no_kernel, no_table, no_shape_of_what_is_read])
def test_nothing_else_is_called_a_host_read(cause: Callable[[Tensor], tuple[Tensor]]) -> None:
    assert "host read" not in remedy_of(cause)


def remedy_of(cause: Callable[[Tensor], tuple[Tensor]]) -> str:
    """Return the remedy for a capture that fails so; tensors without content refuse what a capturing device does."""
    runner, x = GraphRunner(cpu(), CallBackend()), torch.empty(4, device="meta")
    with pytest.raises(CaptureError) as caught, runner.capture_session():
        runner.capture(GraphKey("main", (4,)), lambda: cause(x), {"x": x})
    assert "mode 'off'" in caught.value.remedy
    return caught.value.remedy
