"""`acme_kernels`: a library of ops as vendors ship them, registered with torch but without fake kernels.

It stands for somebody else's package that a model calls. Its shape rules are declared to `core` in `FAKES`, so that
graphs with these ops can be traced; `core` registers each rule where the op exists and brings none itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from core.common.fakes import FakeOp, half_last
from core.common.ops.declaration import Sample
from torch import Tensor
from torch.nn import functional

NAMESPACE = "acme_kernels"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
LIBRARY.define("silu_and_mul(Tensor gate_up) -> Tensor")
LIBRARY.define("pad_rows(Tensor x, int multiple) -> Tensor")


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up` of the halves of the last dimension: (..., 2 * I) -> (..., I), contiguous."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul(up).contiguous()


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """Return x (T, D) with rows of zeros up to a multiple of rows; contiguous, and new memory even where none lack."""
    padded = x.new_zeros((_padded(x.shape[0], multiple), x.shape[1]))
    padded[: x.shape[0]] = x
    return padded


def _padded(num_rows: int, multiple: int) -> int:
    return -(-num_rows // multiple) * multiple


def pad_rows_rule(x: Tensor, multiple: int) -> Tensor:
    """Be the shape rule of `pad_rows`."""
    return x.new_empty((_padded(x.shape[0], multiple), x.shape[1]))


KERNELS = {"silu_and_mul": silu_and_mul, "pad_rows": pad_rows}
for _name, _kernel in KERNELS.items():
    LIBRARY.impl(_name, _kernel, "CPU")


def silu_and_mul_samples(device: torch.device) -> Iterator[Sample]:
    """Yield rows in each dtype, more dimensions, no tokens, and rows that lie apart."""
    wide = torch.linspace(-3, 3, 6 * 80, device=device).view(6, 80)
    for dtype in (torch.float32, torch.bfloat16):
        yield Sample(name=str(dtype).removeprefix("torch."), kwargs={"gate_up": wide.to(dtype)})
    yield Sample(name="rank 3", kwargs={"gate_up": wide.view(2, 3, 80).clone()})
    yield Sample(name="no tokens", kwargs={"gate_up": wide[:0].clone()})
    yield Sample(name="slice of wider rows", kwargs={"gate_up": wide[:, 8:40]})


def pad_rows_samples(device: torch.device) -> Iterator[Sample]:
    """Yield rows that lack some, none, and all."""
    rows = torch.linspace(-3, 3, 8 * 5, device=device).view(8, 5)
    for name, num_rows in (("some lack", 7), ("none lack", 8), ("one row", 1), ("no rows", 0)):
        yield Sample(name=name, kwargs={"x": rows[:num_rows].clone(), "multiple": 4})
    yield Sample(name="columns", kwargs={"x": rows.t(), "multiple": 4})


FAKES = (
    FakeOp(op=f"{NAMESPACE}::silu_and_mul", rule=half_last(), samples=silu_and_mul_samples),
    FakeOp(op=f"{NAMESPACE}::pad_rows", rule=pad_rows_rule, samples=pad_rows_samples),
)
