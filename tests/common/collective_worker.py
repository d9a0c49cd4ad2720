"""One process of two that call each collective op and run layers written by hand, with the passes off and on."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, distributed

from core.common.numerics import judge
from core.common.ops.canonical import OPS
from core.common.ops.collective.collectives import ALL_GATHER, LOCAL_SHARD, REDUCE_SCATTER
from core.common.ops.declaration import CanonicalOp, declared_ops
from core.compilation.rewrite.snapshot import Snapshot
from core.engine.models.distributed import initialize
from core.verify.execution import run_graph
from tests.common.passes.collective import layers
from tests.common.passes.collective.layers import SIZE, Gated, Sharded, rewritten, traced
from tests.common.passes.collective.test_norm import Ending, PostNorm
from tests.common.processes import counts, drawn

CPU = torch.device("cpu")
FUSIONS = ("sequence_parallel", "fuse_all_reduce_norm", "async_tensor_parallel")
DTYPES = (torch.float32, torch.bfloat16)


def moving(rank: int, size: int) -> list[str]:
    """Return what is wrong with the ops that move parts, in every dimension and several dtypes."""
    wrong = []
    for dtype in (*DTYPES, torch.int64, torch.float8_e4m3fn, torch.uint8):
        for dim in (0, 1, -1):
            all_x = [(drawn(4, 6, 8, seed=each) * 8).round().abs().to(dtype) for each in range(size)]
            x, before = all_x[rank].transpose(0, 1), all_x[rank].transpose(0, 1).clone()
            parts = [each.transpose(0, 1) for each in all_x]
            whole = torch.cat([part.float() for part in parts], dim).to(dtype)
            got = {"gather": (ALL_GATHER.overload(x, "", dim), whole)}
            got["shard"] = (LOCAL_SHARD.overload(x, "", dim), x.float().chunk(size, dim)[rank].to(dtype))
            if dtype.itemsize > 1:
                total = sum(part.double() for part in parts).to(dtype)
                got["scatter"] = (REDUCE_SCATTER.overload(x, "", dim), total.chunk(size, dim)[rank])
            for name, (one, other) in got.items():
                same = one.is_contiguous() and one.shape == other.shape and torch.equal(one.float(), other.float())
                if not same or one.dtype != dtype or not torch.equal(x.float(), before.float()):
                    wrong.append(f"{name} {dtype} {dim}")
    for op in (REDUCE_SCATTER, LOCAL_SHARD):
        try:
            op.overload(torch.ones(3, 4), "")
            wrong.append(f"{op.name} takes odd sizes")
        except RuntimeError as error:
            if "size 3, which 2 processes do not divide" not in str(error):
                wrong.append(str(error))
    return wrong


def fused_ops(rank: int, size: int) -> dict[str, Any]:
    """Compare each fused op, on every sample, with the op that its name ends in, on the sum of all processes' x."""
    found: dict[str, Any] = {}
    for op in OPS:
        if op.name.startswith("all_reduce_"):
            after = op.name.removeprefix("all_reduce_").removesuffix("_quantize_fp4")
            found[op.name] = [
                wrong for sample in op.samples(torch.float32, CPU) if (wrong := _other(op, after, sample))
            ]
    layer = {"weight": drawn(16, 8, seed=9), "bias": drawn(16, seed=8), "group": ""}
    parts = [drawn(4, 8, seed=each) for each in range(size)]
    linear = torch.nn.functional.linear
    products = [linear(part, layer["weight"], layer["bias"]) for part in parts]
    result, gathered = torch.ops.core.all_gather_linear(parts[rank], **layer)
    scattered = torch.ops.core.linear_reduce_scatter(parts[rank], **layer)
    close = torch.allclose(result, torch.cat(products), atol=1e-5) and torch.equal(gathered, torch.cat(parts))
    found["all_gather_linear"] = [] if close else ["differs"]
    wanted = sum(products).chunk(size)[rank]
    found["linear_reduce_scatter"] = [] if torch.allclose(scattered, wanted, atol=1e-5) else ["differs"]
    return found


def _other(op: CanonicalOp, after: str, sample: Any) -> str:
    call = dict(sample.kwargs)
    # Each process adds another multiple of x, all of them powers of two.
    results = op.overload(**{**call, "x": call["x"] * 2.0 ** (2 * distributed.get_rank())})
    del call["group"]
    scale = call.pop("scale", None) if op.name.endswith("_fp4") else None
    wanted = declared_ops()[f"core::{after}"].reference(**{**call, "x": call["x"] * 5.0})
    if op.name.endswith("_fp4"):
        wanted = (*torch.ops.core.quantize_fp4(wanted[0], scale), wanted[1])
    pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (results, wanted)), strict=True)
    # The reduction rounds once where the product does.
    return "" if all(torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-5) for a, b in pairs) else sample.name


MODELS = {
    "in place": (lambda: Sharded(3), {"fuse_all_reduce_norm": 3}, {"sequence_parallel": 3, "async_tensor_parallel": 5}),
    "post norm": (
        lambda: PostNorm(2),
        {"fuse_all_reduce_norm": 2},
        {"sequence_parallel": 2, "async_tensor_parallel": 2},
    ),
    "gated": (
        lambda: Gated(3),
        {"fuse_all_reduce_norm": 3},
        {"sequence_parallel": 3, "async_tensor_parallel": 5},
    ),
    "fp8": (
        lambda: Ending(layers.codes_fp8),
        {"fuse_all_reduce_norm": 2},
        {"sequence_parallel": 2, "async_tensor_parallel": 3},
    ),
    "fp4": (
        lambda: Ending(layers.codes_fp4),
        {"fuse_all_reduce_norm": 2},
        {"sequence_parallel": 2, "async_tensor_parallel": 3},
    ),
}


def models(rank: int) -> dict[str, Any]:
    """Run each model with passes off and on; each process has weights of its own."""
    found: dict[str, Any] = {}
    for name, (make, *wanted) in MODELS.items():
        for dtype in DTYPES:
            x = drawn(1, 8, SIZE, dtype=dtype, seed=3)
            model = make().to(dtype)
            for parameter in (*model.ups.parameters(), *model.downs.parameters()):
                parameter.data += (drawn(*parameter.shape, seed=rank) * 0.2).to(dtype)
            graph = traced(model, x)
            values = graph.values({"x": x})
            off = run_graph(graph.module, values).outputs
            exact = run_graph(graph.module, values, fp64=True).outputs
            for how, options, fired in (
                ("fused", {"disable": ("sequence_parallel",)}, wanted[0]),
                ("split", {"enable": ("sequence_parallel",)}, wanted[1]),
            ):
                found[f"{name} {how} {dtype}"] = _run(graph, values, options, fired, (off, exact))
    return found


def _run(graph: Any, values: Any, options: Any, fired: Any, known: tuple[list[Tensor], list[Tensor]]) -> str:
    from dataclasses import replace

    copy = replace(graph, module=Snapshot(graph.module).module())
    reports = rewritten(copy, implemented=frozenset(declared_ops()), **options)
    matched = {name: count for name, count in counts(reports.values()).items() if name in FUSIONS}
    on = run_graph(copy.module, values).outputs
    for one, other, truth in zip(on, *known, strict=True):
        if one.numel() >= 64 and one.is_floating_point() and not torch.equal(one, other):
            verdict = judge(one, other, truth)
            if not verdict.passed:
                return verdict.reason
        elif not torch.equal(one, other):
            return f"{one.dtype} {tuple(one.shape)} differs"
    return "" if matched == fired else f"{matched} fired"


if __name__ == "__main__":
    place = initialize("gloo", timeout_s=60)
    results: dict[str, Any] = {"moving": moving(place.rank, place.size), "ops": fused_ops(place.rank, place.size)}
    results["models"] = models(place.rank)
    sys.stdout.write(f"{json.dumps(results)}\n")
    distributed.destroy_process_group()
