"""The slices of a merged result, which stand in the place of the results that it was merged from."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from core.common.passes.values.fresh import fresh, reread


def insert_slices(graph: fx.Graph, whole: fx.Node, sizes: Sequence[int]) -> tuple[fx.Node, list[fx.Node]]:
    """Insert the split of a result into so many columns each; return its node and the slices."""
    parts = graph.call_function(torch.split, (whole, list(sizes), -1))
    return parts, [graph.call_function(operator.getitem, (parts, index)) for index in range(len(sizes))]


def fakes_of(like: FakeTensor, sizes: Sequence[int]) -> tuple[FakeTensor, tuple[FakeTensor, ...]]:
    """Return the fake values of the merged result, contiguous, and of its slices. like: that of one of the results."""
    width = sum(sizes)
    rows = [stride // like.shape[-1] * width for stride in like.stride()[:-1]]
    whole = fresh(like, (*like.shape[:-1], width), (*rows, 1))
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    pairs = zip(starts, sizes, strict=True)
    return whole, tuple(reread(whole, (*like.shape[:-1], size), (*rows, 1), start) for start, size in pairs)
