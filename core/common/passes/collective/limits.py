"""Limits of a pass over collectives: which groups, how many bytes, and sizes that the processes divide evenly.

The limits are parameters of the pass, one per number of processes: `most_bytes_of_2` is the largest tensor that the
pass takes from 2 processes, `least_bytes_of_2` the smallest for which it pays. A symbolic size is checked in every
bucket that the trace serves.
"""

from __future__ import annotations

import re
from math import prod

import torch
from torch import fx

from core.common.ops.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, group_size
from core.common.passes import CanonicalOp, PassContext, find_op, view
from core.common.passes.metadata import ASKS

_LIMIT = re.compile(r"(most|least)_bytes_of_(\d+)")


def call_of(node: fx.Node, op: CanonicalOp) -> dict[str, object] | None:
    """Return the arguments of a node that calls this op, by name, or None for any other node."""
    return dict(op.bind(node.args, node.kwargs).args) if find_op(node.target) is op else None


def group_of(node: fx.Node) -> str | None:
    """Return the group of a plain collective, or None for any other node."""
    op = find_op(node.target)
    if op not in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER):
        return None
    return str(op.bind(node.args, node.kwargs).args["group"])


def refused_group(context: PassContext, group: str) -> str:
    """Return why a pass does not take a group, or ""."""
    size = group_size(group)
    if size == 1:
        return f"the group {group!r} has one process"
    listed = sorted({int(found[2]) for found in map(_LIMIT.fullmatch, context.params) if found})
    if size in listed:
        return ""
    return f"the group {group!r} has {size} processes, the pass is for {' or '.join(map(str, listed)) or 'none'}"


def refused_bytes(context: PassContext, group: str, x: view.Operand) -> str:
    """Return why a tensor is too large or too small in a bucket that the graph serves, or ""."""
    size = group_size(group)
    most, least = (context.params.get(f"{end}_bytes_of_{size}") for end in ("most", "least"))
    if most is None and not least:
        return ""
    found, dtype = view.shape(x), view.dtype(x)
    if found is None or dtype is None:
        return f"{x} has no known size"
    counts = context.served(prod(found))
    if counts is None:
        return f"{x} {ASKS}: how many elements shape {tuple(found)} has"
    num_bytes = sorted(count * torch.empty((), dtype=dtype, device="meta").element_size() for count in counts)
    if most is not None and num_bytes[-1] > int(most):
        return f"{x} has {num_bytes[-1]} bytes, the pass is for {most} at most where {size} processes reduce"
    if least is not None and num_bytes[0] < int(least):
        return f"{x} has {num_bytes[0]} bytes, the pass is for {least} at least where {size} processes reduce"
    return ""


def divided_dim(context: PassContext, group: str, x: view.Operand) -> int | str:
    """Return the first dimension of tokens that the processes divide in every bucket, or why there is none.

    All dimensions but the last are tokens.
    """
    found, num_processes = view.shape(x), group_size(group)
    if not found:
        return f"{x} has no known shape"
    served = [context.served(size) for size in found]
    for dim, sizes in enumerate(served[:-1]):
        if sizes is not None and all(each > 0 and each % num_processes == 0 for each in sizes):
            return dim
    known = [sizes for sizes in served if sizes is not None]
    if len(known) < len(served):
        return f"{x} {ASKS}: whether {num_processes} processes divide the tokens of shape {tuple(found)}"
    shapes = ", ".join(map(str, sorted(set(zip(*known, strict=True)))))
    return f"{num_processes} processes do not divide the tokens of {x}, of shape {shapes}"
