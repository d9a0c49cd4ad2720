"""An op that takes host-side lists, in the two forms that torch_npu's attention has, for tests without torch_npu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

torch.library.define(
    "npu_test::windows",
    "(Tensor x, *, int[]? lengths=None, int[]? starts=None, Tensor? workspace=None, Tensor(a!) out) -> Tensor(a!)",
)


@torch.library.impl("npu_test::windows", "CompositeExplicitAutograd")
def _windows(
    x: Tensor,
    *,
    lengths: list[int] | None = None,
    starts: list[int] | None = None,
    workspace: Tensor | None = None,
    out: Tensor,
) -> Tensor:
    """Sum `lengths[i]` entries of row i of x (B, N), from `starts[i]` on; out (B,)."""
    rows = range(x.shape[0])
    first = starts or [0 for _ in rows]
    out.copy_(torch.stack([x[i, first[i] : first[i] + (lengths or [])[i]].sum() for i in rows]))
    return out


WINDOWS: Any = torch.ops.npu_test.windows.default


def expected(x: Tensor, lengths: list[int], starts: list[int] | None = None) -> list[float]:
    """Return what the op gives, as a list."""
    first = starts or [0] * len(lengths)
    return [float(x[i, s : s + n].sum()) for i, (s, n) in enumerate(zip(first, lengths, strict=True))]
