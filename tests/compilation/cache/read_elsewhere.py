"""A module whose names models of tests read."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BY = 2.0
INNER = 2.0
LATE = 2.0


def scaled(x: Tensor) -> Tensor:
    return x * INNER


DECLARED = 2.0
SIDES = [True, True]


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def declared(more: float, *, times: float = 1.0) -> float:
    return DECLARED * times + more


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def side(name: str) -> bool:
    return SIDES[name == "right"]


kept = functools.lru_cache(side)
right = functools.partial(side, "right")


@functools.wraps(declared)
def wrapped(more: float) -> float:
    return DECLARED + more


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def method(self: object = None) -> float:
    return 1.0 if self is None else DECLARED


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def in_autocast() -> float:
    return DECLARED if torch.is_autocast_enabled("cpu") else 1.0


class Holding:
    method = method
