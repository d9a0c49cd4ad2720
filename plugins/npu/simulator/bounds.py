"""Shared by the kernels: dtypes and codes by CANN's documentation, and the refusal of calls beyond documented
limits."""

from __future__ import annotations

import torch

HALF = (torch.float16, torch.bfloat16)
CODE_MAX = 127.0
"""The largest code of int8."""
INT8 = 2
"""ACL_INT8, the number of the codes' type in calls of kernels."""


def demand(holds: bool, what: str) -> None:
    """Raise `ValueError` unless a documented limit is kept; this fails the launch like the real kernel's own check."""
    if not holds:
        raise ValueError(what)
