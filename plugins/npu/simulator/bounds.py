"""What the kernels share: dtypes and codes by CANN's documentation, and how a call beyond its bounds is refused."""

from __future__ import annotations

import torch

HALF = (torch.float16, torch.bfloat16)
CODE_MAX = 127.0
"""The largest code of int8."""
INT8 = 2
"""ACL_INT8, as kernels are told the type of codes."""


def demand(holds: bool, what: str) -> None:
    """Raise `ValueError`, which fails the launch as the real kernel's own check would, unless a bound holds."""
    if not holds:
        raise ValueError(what)
