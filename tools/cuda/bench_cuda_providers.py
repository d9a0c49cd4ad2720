"""Time every implementation of an op that the CUDA plugin has, its own and FlashInfer's, and write where each one wins.

    python tools/cuda/bench_cuda_providers.py --out providers.json [--only attention] [--seconds 300]

Calls are those of well-known models, in a captured graph, over enough memory that no call finds its data in the cache.
Each line: op, size, microseconds of each implementation that takes the call, the verdict of the numeric criterion on
its result where the fp64 reference is quick enough, and why others refuse. `winner` is what a program would take: the
preferred one, unless another needs 5 % less. Kernels of FlashInfer have to be built before, or the first call waits:
`core kernels build --device cuda --provider flashinfer --head-size 128`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from cuda_calls import DTYPE, dense, moved_bytes, paged, randn
from cuda_timing import copy_bandwidth, num_sets, require_gpu, time_us

from core.common.numerics import Fp64Mode, judge
from core.common.ops.declaration import declared_ops
from core.common.ops.implementation import OpCall, OpImplementation

MARGIN = 0.95
"""Of the preferred implementation's time, as core.compilation.measuring has it."""
MOST_FP64 = 2**31
"""Bytes that the reference may take."""
FP8 = torch.float8_e4m3fn
ATTENTION = "core::attention"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op at one size. call: makes a set of arguments; num_bytes: that must move; fp64_bytes: of the reference."""

    op: str
    size: str
    num_bytes: int
    fp64_bytes: int
    call: Any


def norms() -> Iterator[Case]:
    """Yield norms that compute in fp32 up to the end, as OLMo 2 and gpt-oss have them."""
    for width in (2048, 4096, 5120):
        weight = randn(width)
        for rows in (1, 8, 64, 512, 4096):
            yield Case(
                op="core::rms_norm",
                size=f"{rows} x {width}",
                num_bytes=4 * rows * width,
                fp64_bytes=32 * rows * width,
                call=lambda n=rows, w=weight: {"x": randn(n, len(w)), "weight": w, "eps": 1e-5},
            )


def gates() -> Iterator[Case]:
    """Yield gates of models of 1 and 8 B."""
    for width in (8192, 14336):
        for rows in (1, 8, 64, 512, 4096):
            yield Case(
                op="core::gated_activation_fused",
                size=f"{rows} x {width}",
                num_bytes=6 * rows * width,
                fp64_bytes=64 * rows * width,
                call=lambda n=rows, w=width: {"gate_up": randn(n, 2 * w), "kind": "silu"},
            )


def products() -> Iterator[Case]:
    """Yield products of fp8 codes: one scale for each tensor, and scales of blocks."""
    for columns, depth in ((6144, 4096), (4096, 14336)):
        for rows in (1, 16, 64, 512, 4096):
            for form, scales in (
                ("tensor", ((), ())),
                ("blocks", ((rows, depth // 128), (columns // 128, depth // 128))),
            ):
                yield Case(
                    op="core::quantized_linear",
                    size=f"{rows} x {depth} x {columns}, {form}",
                    num_bytes=columns * depth + rows * (depth + 2 * columns),
                    fp64_bytes=8 * (3 * columns * depth + rows * (depth + columns)),
                    call=lambda n=rows, c=columns, d=depth, s=scales: _codes(n, c, d, s),
                )


def _codes(rows: int, columns: int, depth: int, scales: tuple[tuple[int, ...], tuple[int, ...]]) -> dict[str, Any]:
    return {
        "x_codes": (randn(rows, depth) * 40).to(FP8),
        "w_codes": (randn(columns, depth) * 40).to(FP8),
        "x_scale": torch.rand(scales[0], device="cuda") * 0.01 + 0.001,
        "w_scale": torch.rand(scales[1], device="cuda") * 0.01 + 0.001,
        "bias": None,
        "out_dtype": DTYPE,
    }


def attentions() -> Iterator[Case]:
    """Yield decode and prompts of heads of 128."""
    sizes = [(b, 1, c) for b, c in ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 16384), (8, 16384))]
    sizes += [(1, n, n) for n in (128, 1024, 4096, 8192)] + [(4, 256, 1280), (1, 1024, 8192)]
    for heads in ((32, 8, 128), (40, 10, 128)):
        for batch, new, context in sizes:
            whole = new in (1, context)
            yield Case(
                op=ATTENTION,
                size=f"{batch} x {new} at {context}, heads {heads}",
                num_bytes=moved_bytes(batch, new, context, heads),
                # Judged by the reference, or by torch's attention in fp64 over the same keys, which takes no pages.
                fp64_bytes=8 * heads[0] * context * (3 * new + 2 * heads[2]) if whole else MOST_FP64 + 1,
                call=lambda b=batch, n=new, c=context, h=heads: paged(b, n, c, h) | {"new": n, "context": c},
            )


def taking(device_ops: tuple[OpImplementation, ...], case: Case, call: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """Return the implementations that take a call, the preferred one first, and why the others do not."""
    op = declared_ops()[case.op]
    bound: OpCall = op.bind((), call)
    taken, refused = [], {}
    for each in (each for each in device_ops if each.op == case.op):
        reason = each.missing or each.condition(bound)
        if reason:
            refused[each.name] = reason
        else:
            taken.append(each)
    return taken, refused


def truth(case: Case, call: Mapping[str, Any], lens: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return eager's result and the one in fp64; None where that takes too much memory."""
    if case.fp64_bytes > MOST_FP64:
        return None
    if case.op == ATTENTION:
        wide = {n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in call.items()}
        return dense(call, *lens), _dense_fp64(wide, *lens)
    op = declared_ops()[case.op]
    kept = {
        n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() and v.dtype != FP8 else v
        for n, v in call.items()
    }
    with Fp64Mode():
        exact = op.reference(**kept)
    return op.reference(**call), exact


def _dense_fp64(call: Mapping[str, Any], new: int, context: int) -> torch.Tensor:
    """Return attention over gathered keys and values in fp64, the step's own included: (T, H, D)."""
    batch, (_, heads, size) = call["seq_lens"].shape[0], call["query"].shape
    out = []
    for i in range(batch):
        blocks = call["block_table"][i].long()
        mine = slice(i * new, (i + 1) * new)
        keys, values = (call[n][blocks].flatten(0, 1)[:context].clone() for n in ("key_cache", "value_cache"))
        keys[context - new :], values[context - new :] = call["key"][mine], call["value"][mine]
        group = heads // keys.shape[1]
        keys, values = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (keys, values))
        scores = call["query"][mine].transpose(0, 1) @ keys.transpose(1, 2) * call["scale"]
        if new > 1:
            scores += torch.full((new, context), -torch.inf, device=scores.device).triu(context - new + 1)
        out.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(out).view(-1, heads, size)


def measure(case: Case, device_ops: tuple[OpImplementation, ...], bandwidth: float) -> dict[str, Any]:
    """Return the line of a case."""
    sets = [case.call() for _ in range(num_sets(case.num_bytes))]
    lens = (0, 0)
    for call in sets:
        lens = (call.pop("new", 0), call.pop("context", 0))
    taken, refused = taking(device_ops, case, sets[0])
    line: dict[str, Any] = {"op": case.op, "size": case.size, "floor_us": round(case.num_bytes / bandwidth * 1e6, 2)}
    line |= {"us": {}, "verdicts": {}, "failed": {}, "refused": refused}
    known = truth(case, sets[0], lens)
    for each in taken:
        try:
            result = each.fn(**sets[0])
            if known is not None:
                verdict = judge(result, *known, slack=each.slack)
                line["verdicts"][each.name] = {"passed": verdict.passed, "rms_ratio": round(verdict.rms_ratio, 3)}
            line["us"][each.name] = round(time_us(lambda call, fn=each.fn: fn(**call), sets), 2)
        except Exception as problem:
            line["failed"][each.name] = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:300]}"
    exact = {each.name: line["us"][each.name] for each in taken if each.slack <= 1 and each.name in line["us"]}
    if exact:
        preferred, best = next(iter(exact)), min(exact, key=exact.__getitem__)
        line["winner"] = best if exact[best] < MARGIN * exact[preferred] else preferred
    return line


def main(
    only: str = typer.Option("", help="Measure only ops whose name holds this."),
    out: Path | None = typer.Option(None, help="JSON file to write, anew after each line."),
    seconds: float = typer.Option(600.0, help="Begin no further line after so long."),
) -> None:
    """Time the implementations."""
    require_gpu()
    from core import select_device

    device = select_device("cuda")
    bandwidth, start = copy_bandwidth(), time.perf_counter()
    head = {"device": device.capabilities.device_name, "torch": torch.__version__, "bandwidth": bandwidth}
    print(json.dumps(head))
    lines: list[dict[str, Any]] = []
    for case in (*norms(), *gates(), *products(), *attentions()):
        if only not in case.op or time.perf_counter() - start > seconds:
            continue
        lines.append(measure(case, device.ops, bandwidth))
        print(json.dumps(lines[-1]), flush=True)
        if out is not None:
            out.write_text(json.dumps({**head, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
