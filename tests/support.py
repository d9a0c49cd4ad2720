"""What several test files share: a processor to change, a check of error texts, a model with a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import core
from core import Program
from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass
from core.common.passes.results import NearMiss, PassResult
from core.device import Device
from core.errors import CoreError
from core.host.selection import select_device


def cpu(**changes: Any) -> Device:
    """Return device "cpu" with some of its fields replaced."""
    return replace(select_device("cpu"), **changes)


def compile_with(model: Any, device: Device, **options: Any) -> Program:
    """Compile a model; all but inputs and buckets are fields of `CompileOptions`."""
    given = {name: options.pop(name) for name in ("inputs", "buckets") if name in options}
    return core.compile(model, device, **given, options=core.CompileOptions(**options))


@contextmanager
def refused(kind: type[CoreError], *phrases: str) -> Iterator[None]:
    """Expect an error of exactly this type that says what was asked, found and to do, and holds each phrase."""
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    assert all(part.strip() for part in (caught.value.asked, caught.value.found, caught.value.remedy))
    text = str(caught.value)
    missing = [phrase for phrase in phrases if phrase not in text]
    assert not missing, f"{missing} not in:\n{text}"


class Norm(nn.Module):
    """RMSNorm that casts to fp32 inside, as models do, with weights far from 1."""

    def __init__(self, size: int = 16, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.3, 1.7, size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Block(nn.Module):
    """Norm, gated projection and residual over rows of 16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.norm = Norm()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


class Cache(nn.Module):
    """Writes its rows into a buffer at given slots, in place, and counts the writes in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(32, 2))
        self.register_buffer("writes", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        self.rows.index_put_((slots,), x)
        self.writes.add_(1)
        return self.rows[slots] * 2


def rewrite(
    change: Callable[[fx.GraphModule], list[str]],
    *,
    name: str = "acme_pass",
    misses: tuple[str, ...] = (),
    **fields: Any,
) -> Pass:
    """Return a `graph` pass that reports the sites `change` returns, and these near-misses."""

    def run(context: PassContext) -> PassResult:
        sites = change(context.module)
        near = tuple(NearMiss(site=site, reason="the constant is no 1") for site in misses)
        return PassResult(matched=len(sites), sites=tuple(sites), near_misses=near)

    return Pass(name=name, run=run, owner="acme", **fields)


def break_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `import torch` fail in new processes, as with an installed backend extension whose libraries are missing."""
    (folder / "torch_dev.py").write_text("def autoload():\n    raise ImportError('libdev.so is missing')\n")
    described = folder / "torch_dev-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-dev\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[torch.backends]\ntorch_dev = torch_dev:autoload\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
