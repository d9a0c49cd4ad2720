"""A small model that reads all that a model may read, and how tests of the compile cache start it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core import InputSpec, Program
from core.compilation.options import CompileOptions
from core.compilation.pipeline import open_cache, rewriter_of
from core.compilation.report import CacheReport
from core.compilation.request import CompileRequest
from tests.support import compile_with, cpu

ROWS = {"x": InputSpec(("n", 8), torch.float32)}
SCALE = 2.0
TABLE: dict[str, Callable[[Tensor], Tensor]] = {"act": torch.relu}
NONE = {"traces": 0, "passes": 0, "kernels": 0, "measured": 0}


def helper(x: Tensor) -> Tensor:
    return x + 1


class Block(nn.Module):
    """Two linears of one input, so that weights are joined, and all that a forward may look at."""

    factor = 0.5

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Linear(8, 16, bias=bias)
        self.right = nn.Linear(8, 16, bias=bias)
        self.shift = 1.5
        self.register_buffer("offset", torch.arange(16.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.left(x) * TABLE["act"](self.right(x)) + self.offset
        return helper(self.scaled(y)) * self.factor

    def scaled(self, y: Tensor) -> Tensor:
        return y * SCALE + self.shift


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(**options)])

    def forward(self, x: Tensor, flag: bool = False) -> dict[str, Tensor]:
        for block in self.blocks:
            y = block(x)
        return {"y": y, "x": F.silu(x)}


X = torch.linspace(-1, 1, 24).view(3, 8)


DEFAULTS: dict[str, Any] = {
    "inputs": ROWS,
    "buckets": [4, 8],
    "lowering": "inline",
    "enable_passes": ("merge_linears",),
}


def start(model: Any = None, device: dict[str, Any] | None = None, **options: Any) -> Program:
    model = Model().eval() if model is None else model
    return compile_with(model, cpu(**device or {}), **{**DEFAULTS, "cache": True, **options})


def look(model: Any = None, device: dict[str, Any] | None = None, **options: Any) -> CacheReport:
    """Return what the cache says to a start, without the rest of it."""
    given = {**DEFAULTS, **options}
    inputs, buckets = given.pop("inputs"), given.pop("buckets")
    model = Model().eval() if model is None else model
    request = CompileRequest.of(model, cpu(**device or {}), inputs, buckets, CompileOptions(**given, cache=True))
    found = open_cache(request, rewriter_of(request))
    assert found is not None
    return found.report


def cache_of(program: Program) -> CacheReport:
    return program.report().cache


def counts(program: Program) -> dict[str, int]:
    return {name: count for name, count in program.report().counters.items() if name != "captures"}


def assert_warm(program: Program) -> None:
    assert cache_of(program).state == "hit", cache_of(program)
    assert counts(program) == NONE


def assert_miss(report: CacheReport, named: str) -> None:
    """Assert a miss whose differences are named, one of them as given."""
    assert report.state == "miss"
    assert any(named in line for line in report.differences), report.differences
