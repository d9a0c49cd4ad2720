"""core_conformance/cases/passes/many_models.py: what is wrong from some match on, or in wide rows, is rejected."""

from __future__ import annotations

import pytest
import torch
from core_acme.faults import passes as faulty
from core_acme.passes import NAME, declarations
from torch import nn

from core_conformance.cases.passes.firings import firings
from core_conformance.cases.passes.many_models import NUM_SITES, WIDE_MODELS, WIDTH, repeated
from core_conformance.cases.passes.runs import bench
from tests.conformance.cases.passes.pass_support import keep, of
from tests.recording import acme


def test_copies_have_weights_and_inputs_of_their_own() -> None:
    linear, index = nn.Linear(4, 3), torch.tensor([1, 0])
    x = torch.randn(2, 4)
    model, inputs = repeated(lambda: (Chosen(linear), {"x": x, "index": index}), 3)
    assert list(inputs) == ["x_0", "index_0", "x_1", "index_1", "x_2", "index_2"]
    assert torch.equal(inputs["x_0"], x) and torch.equal(inputs["x_1"], x.roll(1, -1))
    assert torch.equal(inputs["index_2"], index)
    with torch.no_grad():
        first, *others = model(*inputs.values())
        assert torch.equal(first, linear(x)[index])
    assert len(others) == 2 and len({p.data_ptr() for p in model.parameters()}) == 6


class Chosen(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.linear(x)[index]
        return rows


@pytest.mark.parametrize("name", WIDE_MODELS)
def test_wide_models_are_wide(name: str) -> None:
    model, inputs = WIDE_MODELS[name]()
    assert inputs["x"].shape[-1] == WIDTH > 8192
    with torch.no_grad():
        assert sum(result.shape[-1] == WIDTH for result in model(*inputs.values())) >= NUM_SITES


def test_each_own_example_comes_several_times_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, "wide-soft-caps")
    device = acme(passes=declarations())
    found = firings(bench(device), declarations()[0], torch.float32)
    counts = {walk.sample.name: walk.matched(NAME) for walk in found.walks}
    several = {name: count for name, count in counts.items() if name.endswith(f", {NUM_SITES} times")}
    assert len(several) == 2 and set(several.values()) == {NUM_SITES}
    assert counts["wide-soft-caps"] == NUM_SITES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [(faulty.pass_fourth, f"{NAME} example 0, {NUM_SITES} times: "), (faulty.pass_wide, "wide-soft-caps: ")],
    ids=["from the fourth match on", "in wide rows"],
)
def test_what_is_wrong_later_or_in_wide_rows_is_rejected(
    fault: faulty.Fault, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(monkeypatch, "wide-soft-caps")
    assert of(acme(passes=declarations()), NAME, "float32") == {}
    assert of(acme(passes=fault(declarations())), NAME, "float32")["float32"].startswith(told)
