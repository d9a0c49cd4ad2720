"""A module whose names models of tests read."""

from __future__ import annotations

import torch
from torch import Tensor

BY = 2.0
INNER = 2.0
LATE = 2.0


def scaled(x: Tensor) -> Tensor:
    return x * INNER


DECLARED = 2.0


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def declared(more: float, *, times: float = 1.0) -> float:
    return DECLARED * times + more
