"""core/compilation/cache/summary.py: an entry in short, read off real entries, and off those that lack most of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core
from core.compilation.cache.store import Store
from core.compilation.cache.summary import PhaseSummary, Summary, summarize
from tests.compilation.cache.cached_model import Model, cache_of, start

pytestmark = pytest.mark.usefixtures("cache_folder")


class Cached(nn.Module):
    """Linear layers, two of which share a weight, and what the paged cache leaves in a model."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.two.weight = self.one.weight
        self.wide = nn.Linear(8, 16)
        self.attention = nn.Module()
        self.attention.key_cache = torch.zeros(4, 8).to(torch.float8_e4m3fn)
        self.attention.value_cache = torch.zeros(4, 8).to(torch.float8_e4m3fn)
        self.register_buffer("table", torch.zeros(100))

    def forward(self, x: Tensor) -> Tensor:
        kept = self.attention.key_cache.to(x.dtype).sum() + self.attention.value_cache.to(x.dtype).sum()
        result: Tensor = self.wide(self.two(self.one(x))) + self.table[0] + kept
        return result


def summary_of(model: Any, **options: Any) -> Summary:
    report = cache_of(start(model.eval().requires_grad_(False), **options))
    assert report.state == "miss", report
    return Store.of_user().summary(report.key)


def test_weights_and_caches_are_counted_once_by_dtype() -> None:
    found = summary_of(Cached())
    assert found.weights == {"float32": 4 * (64 + 128 + 16)} and found.cache == {"float8_e4m3fn": 64}
    assert found.quantization == () and found.torch_device == "cpu"
    assert found.phases == (PhaseSummary(phase="main", mode="compile", buckets=2, sizes=(4, 8)),)
    assert found.lines() == (
        "weights 0.8 KiB fp32; kv cache 0.1 KiB fp8",
        "main compile 4-8 (2); inline; with merge_linears",
    )
    assert json.loads(json.dumps(found.to_json()))["phases"][0]["sizes"] == [4, 8]


@pytest.mark.slow
def test_entries_of_one_model_look_different() -> None:
    made = [
        summary_of(Model()),
        summary_of(Model().to(torch.bfloat16), inputs={"x": core.InputSpec(("n", 8), torch.bfloat16)}),
        *(summary_of(core.quantize(Model(), scheme)) for scheme in ("fp8", "int8")),
        summary_of(Model(), buckets=[16]),
        summary_of(Model(), enable_passes=(), disable_passes=("lift_linear", "merge_linears")),
    ]
    texts = [found.lines() for found in made]
    assert len(set(texts)) == len(texts)
    assert [found.quantization for found in made[2:4]] == [("fp8",), ("int8",)]
    assert texts[1][0].endswith("bf16") and texts[2][0].startswith("fp8; weights ")
    assert texts[4][1].startswith("main compile 16; ") and texts[5][1].endswith("without lift_linear, merge_linears")


def test_an_entry_without_factors_has_nothing_to_say() -> None:
    assert summarize({}, {}).lines() == ("", "")
    phases = {"phases": [{"phase": "main", "mode": "full"}]}
    assert summarize({"values": {"a": "1", "b.key_cache": "None"}}, phases).lines() == ("", "main full")
