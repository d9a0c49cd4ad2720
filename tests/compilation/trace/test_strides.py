"""core/compilation/trace/strides.py: which graphs need the strides of fakes, and what becomes of them elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import core
from core.compilation.trace.strides import stride_dependence
from core.compilation.trace.tracing import trace
from tests.recording import acme

Model = Callable[[Tensor], Tensor]
ROWS = torch.arange(24.0).view(4, 6)


def by_strides(x: Tensor) -> Tensor:
    y = x.T + 1
    return y.as_strided(y.shape, y.stride())


def through_a_view(x: Tensor) -> Tensor:
    y = x.T + 1
    y[0].mul_(2)
    return y


def copied(x: Tensor) -> Tensor:
    y = x.T + 1
    z = y.contiguous()
    z.mul_(2)
    return y + z


def not_copied(x: Tensor) -> Tensor:
    y = x.T + 1
    z = y.T.contiguous()  # a copy where y is contiguous, y itself where y lies by columns
    y.mul_(2)
    return z


def made_of_such(x: Tensor) -> Tensor:
    y = torch.nn.functional.gelu((x.T + 1).T)  # in order by its fake, which its input is not on such a device
    z = y.reshape(-1)
    z.mul_(2)
    return y


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (by_strides, "as_strided reads the strides of y"),
        (through_a_view, "mul_ writes into getitem, which may share its memory with y or not"),
        (copied, "mul_ writes into z, which"),
        (not_copied, "mul_ writes into y, which may share its memory with y or not"),
        (made_of_such, "mul_ writes into z, which may share its memory with y or not"),
    ],
)
def test_what_depends_on_strides_is_told(model: Model, told: str) -> None:
    assert told in stride_dependence(trace(model, {"x": ROWS}).module)


def whole(x: Tensor) -> Tensor:
    y = x.T + 1
    y.mul_(2)
    return y.contiguous().sin().reshape(-1)


def of_an_input(x: Tensor) -> Tensor:
    return x.as_strided((2, 3), (1, 2)) + 1


def in_order(x: Tensor) -> Tensor:
    y = x + 1
    y[0].mul_(2)
    return y.reshape(-1)


def after_a_product(x: Tensor) -> Tensor:
    y = (x.T + 1) @ x
    y[0].mul_(2)
    return y


def converted(x: Tensor) -> Tensor:
    y = (x.T + 1).to(torch.bfloat16)
    y.mul_(2)
    return y


@pytest.mark.parametrize("model", [whole, of_an_input, in_order, after_a_product, converted])
def test_what_means_the_same_with_any_strides_is_not(model: Model) -> None:
    assert stride_dependence(trace(model, {"x": ROWS}).module) == ""


@pytest.mark.parametrize("keeps", [True, False])
def test_a_device_that_keeps_no_strides_runs_such_a_model_without_a_trace(keeps: bool) -> None:
    device = acme(keeps_strides=keeps, modes=("piecewise", "segmented"))
    program = core.compile(by_strides, example_inputs={"x": ROWS}, device=device)
    report = program.report()
    assert set(report.modes.values()) == {"piecewise" if keeps else "segmented"}
    assert ("as_strided reads the strides of y" in str(report)) is not keeps
    torch.testing.assert_close(program(x=ROWS), by_strides(ROWS), rtol=0, atol=0)


def test_its_graphs_of_torch_compile_run_as_dynamo_traced_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.dynamo.backend._selected", lambda name: acme(keeps_strides=False))
    core.backend_report(reset=True)
    compiled = torch.compile(copied, backend="core", fullgraph=True)
    torch.testing.assert_close(compiled(ROWS), copied(ROWS), rtol=0, atol=0)
    assert "mul_ writes into z" in str(core.backend_report(reset=True))
