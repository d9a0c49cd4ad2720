"""Time the CUDA plugin's kernels against torch's and FlashInfer's at the sizes of well-known models.

    python tools/cuda/bench_cuda_kernels.py [--out kernels.json] [--only attention]

Each line: op, size, microseconds of each way, the bytes that any of them must move over the bandwidth of a copy on this
device (the floor), and the error against torch. Ways that need a plan on the host show what that takes apart.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import typer
from cuda_calls import DTYPE, PAGE, dense, moved_bytes, paged, randn
from cuda_codes_problems import problems as codes_problems
from cuda_expert_problems import FORMATS, QuantizedExperts
from cuda_timing import copy_bandwidth, num_sets, relative_error, require_gpu, time_us
from torch.nn import functional

Ways = Mapping[str, Callable[[Any], Any]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op at one size. make: a set of data; ways: by name, "core" the plugin's own; num_bytes: that must move.

    wanted: what the first tensor of a way's result is compared with. plans: by way, what it does on the host before.
    """

    op: str
    size: str
    make: Callable[[], Any]
    ways: Ways
    num_bytes: int
    wanted: Callable[[Any], torch.Tensor]
    plans: Ways = field(default_factory=dict)


def rows() -> Iterator[Case]:
    """Yield norms and gates."""
    ops = torch.ops.core_cuda
    for width in (2048, 4096):
        weight = randn(width)
        for count in (1, 8, 64, 1024, 4096):
            ways: dict[str, Callable[[Any], Any]] = {
                "core": lambda d, w=weight: ops.add_rms_norm(d[0], d[1], w, 1e-5),
                "torch": lambda d, w=weight: functional.rms_norm(d[0] + d[1], w.shape, w, 1e-5),
            }
            if find_spec("flashinfer"):
                import flashinfer

                ways["flashinfer"] = lambda d, w=weight: flashinfer.fused_add_rmsnorm(d[2], d[3], w, 1e-5)
            yield Case(
                op="add_rms_norm",
                size=f"{count} x {width}",
                make=lambda n=count, w=width: [randn(n, w) for _ in range(4)],
                ways=ways,
                num_bytes=4 * 2 * count * width,
                wanted=lambda d, w=weight: functional.rms_norm(d[0] + d[1], w.shape, w, 1e-5),
            )
    for width in (8192, 14336):
        for count in (1, 8, 64, 1024, 4096):
            ways = {
                "core": lambda d: ops.gated_activation_fused(d, kind="silu"),
                "torch": lambda d: functional.silu(d.chunk(2, -1)[0]) * d.chunk(2, -1)[1],
            }
            if find_spec("flashinfer"):
                import flashinfer

                ways["flashinfer"] = flashinfer.silu_and_mul
            yield Case(
                op="silu_and_mul",
                size=f"{count} x {width}",
                make=lambda n=count, w=width: randn(n, 2 * w),
                ways=ways,
                num_bytes=3 * 2 * count * width,
                wanted=lambda d: functional.silu(d.chunk(2, -1)[0]) * d.chunk(2, -1)[1],
            )


def flashinfer_attention(
    batch: int, new: int, context: int, heads: tuple[int, int, int]
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return FlashInfer's way over the same cache, and its plan for one set of data."""
    import flashinfer

    num_heads, num_kv, size = heads
    workspace = torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")
    blocks = -(-context // PAGE)
    planned: dict[int, Any] = {}

    def plan(call: Any) -> None:
        starts = torch.arange(batch + 1, dtype=torch.int32) * blocks
        last = torch.full((batch,), (context - 1) % PAGE + 1, dtype=torch.int32)
        common = (num_heads, num_kv, size)
        if new == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(
                starts, call["block_table"].flatten(), last, *common, PAGE, q_data_type=DTYPE, kv_data_type=DTYPE
            )
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(
                torch.arange(batch + 1, dtype=torch.int32) * new, starts, call["block_table"].flatten(), last, *common,
                PAGE, causal=True, q_data_type=DTYPE, kv_data_type=DTYPE,
            )  # fmt: skip
        planned[id(call)] = wrapper

    def run(call: Any) -> Any:
        caches = (call["key_cache"], call["value_cache"])
        for name, cache in zip(("key", "value"), caches, strict=True):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, call["slot_mapping"], call[name])
        return planned[id(call)].run(call["query"], caches)

    return run, plan


def attention() -> Iterator[Case]:
    """Yield decode at several batch sizes and prefill at several lengths, of the heads of models of 1 and 8 B."""
    sizes = [(b, 1, c) for b, c in ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 16384), (8, 16384))]
    sizes += [(1, n, n) for n in (128, 1024, 4096)] + [(4, 256, 1280)]
    for heads in ((32, 8, 64), (32, 8, 128), (32, 4, 128)):
        for batch, new, context in sizes:
            ways: dict[str, Callable[[Any], Any]] = {"core": lambda d: torch.ops.core_cuda.attention(**d)}
            plans: dict[str, Callable[[Any], Any]] = {}
            if new == context:
                ways["torch"] = lambda d, n=new, c=context: dense(d, n, c)
            if find_spec("flashinfer"):
                ways["flashinfer"], plans["flashinfer"] = flashinfer_attention(batch, new, context, heads)
            yield Case(
                op="decode attention" if new == 1 else "prefill attention",
                size=f"{batch} x {new} at {context}, heads {heads}",
                make=lambda b=batch, n=new, c=context, h=heads: paged(b, n, c, h),
                ways=ways,
                num_bytes=moved_bytes(batch, new, context, heads),
                # A chunk behind a context is causal from below: torch has no such flag, and the op's reference is used.
                wanted=(lambda d, n=new, c=context: dense(d, n, c))
                if new in (1, context)
                else lambda d: torch.ops.core.attention(**d),
                plans=plans,
            )


def sampling() -> Iterator[Case]:
    """Yield greedy and random choices of tokens; FlashInfer draws numbers of its own, so its errors mean nothing."""
    for count in (1, 64):
        for name, row in (("greedy", (0.0, 0.0, 1.0, 0.0)), ("top-k 50, top-p 0.9", (0.8, 50.0, 0.9, 0.5))):
            params = torch.tensor([row], device="cuda").repeat(count, 1)
            ways: dict[str, Callable[[Any], Any]] = {
                "core": (lambda d: torch.ops.core_cuda.argmax(d))
                if not row[0]
                else lambda d, p=params: torch.ops.core_cuda.sample(d, p),
                "torch": (lambda d: d.argmax(-1)) if not row[0] else lambda d, p=params: torch.ops.core.sample(d, p),
            }
            if find_spec("flashinfer") and row[0]:
                import flashinfer

                ways["flashinfer"] = lambda d: flashinfer.sampling.top_k_top_p_sampling_from_logits(d.float(), 50, 0.9)
            yield Case(
                op="sampling",
                size=f"{count} x 128256, {name}",
                make=lambda n=count: randn(n, 128_256),
                ways=ways,
                num_bytes=2 * count * 128_256,
                wanted=lambda d, p=params: torch.ops.core.sample(d, p),
            )


def experts() -> Iterator[Case]:
    """Yield the first product of Qwen3-30B-A3B's experts in each quantised format, against the op's reference."""
    for scheme, tokens in itertools.product(FORMATS, (1, 8, 64, 256)):
        problem = QuantizedExperts(tokens, 8, 128, 1536, 2048, scheme)
        yield Case(
            op="quantised experts",
            size=f"{tokens} tokens, {scheme}",
            make=lambda p=problem: p.make("cuda"),
            ways={"core": lambda d: torch.ops.core_cuda.quantized_grouped_linear(**d), "torch": problem.wanted},
            num_bytes=problem.num_bytes,
            wanted=problem.wanted,
        )


def codes() -> Iterator[Case]:
    """Yield linear layers of codes of a model of 8 B; torch computes them by the ops' references."""
    for problem in codes_problems([1, 8, 64, 512, 4096], [(6144, 4096), (4096, 14336)]):
        yield Case(
            op=problem.op,
            size=", ".join(map(str, problem.shape.values())),
            make=lambda p=problem: p.make("cuda"),
            ways={"core": problem.default, "torch": problem.wanted},
            num_bytes=problem.num_bytes,
            wanted=problem.wanted,
        )


def measure(case: Case, bandwidth: float) -> dict[str, Any]:
    """Return the line of a case."""
    sets = [case.make() for _ in range(num_sets(case.num_bytes))]
    wanted = case.wanted(sets[0])
    line: dict[str, Any] = {"op": case.op, "size": case.size, "floor_us": round(case.num_bytes / bandwidth * 1e6, 2)}
    for name, way in case.ways.items():
        try:
            if name in case.plans:
                torch.cuda.synchronize()
                start = time.perf_counter()
                for data in sets:
                    case.plans[name](data)
                torch.cuda.synchronize()
                line[f"{name}_plan_us"] = round((time.perf_counter() - start) / len(sets) * 1e6, 1)
            result = way(sets[0])
            first = result[0] if isinstance(result, (tuple, list)) else result
            if isinstance(first, torch.Tensor):
                line[f"{name}_error"] = float(f"{relative_error(first, wanted):.2g}")
            line[f"{name}_us"] = round(time_us(way, sets), 2)
        except Exception as problem:
            line[f"{name}_failed"] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}"
    return line


def main(
    only: str = typer.Option("", help="Measure only ops whose name holds this."),
    out: Path | None = typer.Option(None, help="JSON file to write."),
) -> None:
    """Time the kernels."""
    require_gpu()
    import core_cuda.implementations  # noqa: F401  # registers the ops

    bandwidth = copy_bandwidth()
    found = f"FlashInfer {version('flashinfer-python')}" if find_spec("flashinfer") else "FlashInfer: not installed"
    print(f"copy: {bandwidth / 1e12:.2f} TB/s on {torch.cuda.get_device_name()}; {found}")
    lines = []
    for case in (*rows(), *codes(), *sampling(), *experts(), *attention()):
        if only in case.op:
            lines.append(measure(case, bandwidth))
            print(json.dumps(lines[-1]), flush=True)
    if out is not None:
        out.write_text(json.dumps({"bandwidth": bandwidth, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
