"""Fuse `npu_swiglu` and the quantisation of its result by token to `npu_dequant_swiglu_quant`.

The fused op's own dequantisation is left out (no weight scale); `activate_left` says that the first half is the gate,
as in `npu_swiglu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from core.common.passes import Guards, NearMiss, Pass, PassContext, PassTraits, Site, near_miss, view
from core_npu.passes.calls import called, op, other_reader, read, results
from core_npu.passes.conditions import CODES, aligned_rows, first_reason, not_row
from core_npu.passes.inlined import Caller, Inputs, call_site
from core_npu.passes.norm.dynamic_quantize import other_codes, unread
from core_npu.passes.streams import streams

_QUANTISES_BY_TOKEN = 1
_ALIGNED = 64


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the quantisation at a node and the gate before it."""
    if called(node) != "npu_dynamic_quant":
        return None
    given = read(node)
    gate = given["input"]
    if called(gate) != "npu_swiglu":
        return None
    whole, dim = (read(gate)[name] for name in ("input", "dim"))
    rank = len(view.shape(whole) or ())
    reason = first_reason(
        other_codes(given),
        other_reader(gate, node),
        unread(node),
        "" if rank == 2 else f"{whole} has rank {rank}, the kernel takes 2",
        "" if dim in (-1, rank - 1) else f"it halves dimension {dim}, the kernel the last",
        aligned_rows(context, gate),
        _unaligned(whole),
        not_row("the smooth scale", given["smooth_scales"], gate),
    )
    return near_miss(node, reason) if reason else _site(node, gate, whole, given["smooth_scales"])


def _unaligned(whole: fx.Node) -> str:
    size = (view.shape(whole) or (0,))[-1]
    whole_blocks = type(size) is int and size % _ALIGNED == 0
    return "" if whole_blocks else f"rows of {whole} have {size} elements, no multiple of {_ALIGNED}"


def _site(node: fx.Node, gate: fx.Node, whole: fx.Node, smooth: fx.Node | None) -> Site:
    def call(caller: Caller, inputs: Inputs) -> fx.Node:
        options: dict[str, Any] = {"activate_left": True, "quant_mode": _QUANTISES_BY_TOKEN}
        if inputs["smooth"] is not None:  # one row per group of tokens; there is one group
            options["quant_scale"] = caller(torch.unsqueeze, inputs["smooth"], 0)
        return caller(op("npu_dequant_swiglu_quant"), inputs["x"], **options)

    readers = results(node) or {}
    outputs = [(reader, index) for index in sorted(readers) for reader in readers[index]]
    return call_site({"x": whole, "smooth": smooth}, call, outputs, interior=(gate, node))


def expect(context: PassContext) -> int | None:
    """Count independently: gates of rows that one quantisation reads; None if the graph has writes or streams."""
    if context.analysis("writes").all_written or streams(context.graph):
        return None
    count = 0
    for gate in (node for node in context.graph.nodes if called(node) == "npu_swiglu"):
        reader = view.only_user(gate)
        if reader is None or called(reader) != "npu_dynamic_quant" or not reader.users:
            continue
        given = read(reader)
        plain = len(view.shape(gate) or ()) == 2 and read(gate)["dim"] in (-1, 1)
        plain = plain and not other_codes(given) and not _unaligned(read(gate)["input"])
        count += plain and not aligned_rows(context, gate) and not not_row("", given["smooth_scales"], gate)
    return count


class _Gates(nn.Module):
    """Gates whose products are quantised, one of them smoothed."""

    def __init__(self) -> None:
        super().__init__()
        self.smooth = nn.Parameter(torch.linspace(0.2, 1.7, 64))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        found = []
        for rows, smooth in ((x, None), (y, self.smooth)):
            gate = torch.ops.npu.npu_swiglu(rows)
            codes, scale = torch.ops.npu.npu_dynamic_quant(gate, smooth_scales=smooth)
            found.append((codes.to(scale.dtype) * scale[..., None]).to(x.dtype))
        return tuple(found)


def examples() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield the two gates."""
    rows = partial(torch.randn, 7, 128, generator=torch.Generator().manual_seed(3))
    yield _Gates(), (rows(), rows())


FUSE_SWIGLU_DYNAMIC_QUANT = Pass(
    name="fuse_npu_swiglu_dynamic_quant",
    find=find,
    does="Fuse every gate whose product is quantised by token, and only that.",
    guards=Guards(scopes=streams, dtypes=CODES),
    after=("eliminate_common_subexpressions",),
    expect=expect,
    examples=examples,
    owner="npu",
    traits=PassTraits(codes=("npu::npu_dynamic_quant",)),
)
