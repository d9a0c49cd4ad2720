"""Measure how the CUDA plugin's kernels are best configured on this GPU, and write what won as data of the plugin.

    python scripts/tune_cuda.py [--presets llama-1b,llama-8b] [--only linear] [--rows 1,2,4,8,16,32,64,128]

For the linear layers of these shapes at every number of rows, and for their attention in decode and prefill, all
candidates (and cuBLAS for linears) are timed in graphs whose calls go through more memory than the L2 cache holds, and
checked against torch. Kernels are compiled in parallel first. Writes `core_cuda/tuned/<product>.json`, or --out.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from cuda_calls import DTYPE, Heads, dense, moved_bytes, paged, randn
from cuda_timing import num_sets, relative_error, require_gpu, time_us
from torch import Tensor
from torch.nn import functional

from core.bench.presets import PRESETS

WORST_ERROR = 1e-2
"""Largest relative error against torch; results of bfloat16 differ by their rounding, about 2e-3."""
_TOLD = 8  # the best configurations of a shape that are printed
COUNTS = ((1, 1024), (2, 1024), (4, 1024), (8, 1024), (16, 1024), (32, 1024), (64, 1024), (256, 1024), (1, 8192))
"""Sequences and positions of decode."""
PROMPTS = (128, 512, 1024, 4096)


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer at a number of rows; columns: of its result, behind the gate if it is gated."""

    rows: int
    columns: int
    depth: int
    gated: bool = False

    op = "linear"

    @property
    def shape(self) -> Mapping[str, Any]:
        """What the plugin looks it up by."""
        return asdict(self)

    @property
    def num_bytes(self) -> int:
        """What it must move."""
        return 2 * (self.depth * self.columns * (2 if self.gated else 1) + self.rows * (self.depth + self.columns))

    def make(self, device: str) -> tuple[Tensor, Tensor]:
        """Return x and weight."""
        rows = self.columns * (2 if self.gated else 1)
        return randn(self.rows, self.depth, device=device), randn(rows, self.depth, device=device)

    def candidates(self) -> list[Any]:
        """Return configurations to try."""
        from core_cuda.ops.skinny_configs import candidates

        return list(candidates(self.rows, self.columns, self.depth, gated=self.gated))

    def run(self, data: tuple[Tensor, Tensor], config: Any) -> Tensor:
        """Compute it by the plugin's kernel."""
        from core_cuda.ops.activation import Gate
        from core_cuda.ops.skinny import skinny_linear

        return skinny_linear(*data, gate=Gate("silu") if self.gated else None, config=config)

    def library(self, data: tuple[Tensor, Tensor]) -> Tensor:
        """Compute it by cuBLAS, and its gate by the plugin's kernel."""
        whole = functional.linear(*data)
        if not self.gated:
            return whole
        gated: Tensor = torch.ops.core_cuda.gated_activation_fused(whole, kind="silu")
        return gated

    wanted = library

    def same_kernel(self, config: Any) -> tuple[Any, ...]:
        """Return what the compiled kernel depends on: sizes and splits are no constants of it."""
        tall = max(16, 1 << (self.rows - 1).bit_length()) if config.kernel == "tile" else 1
        constants = {**asdict(config), "split_k": config.split_k > 1}
        return (tall, self.gated, self.depth % config.block_k == 0, *constants.values())


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of sequences with `new` tokens each, of `context` in all."""

    batch: int
    new: int
    context: int
    heads: Heads

    library = None

    @property
    def op(self) -> str:
        """Name in the file."""
        return "decode_attention" if self.new == 1 else "prefill_attention"

    @property
    def shape(self) -> Mapping[str, Any]:
        """What the plugin looks it up by."""
        return asdict(self._shape())

    @property
    def num_bytes(self) -> int:
        """What it must move."""
        return moved_bytes(self.batch, self.new, self.context, self.heads)

    def make(self, device: str) -> dict[str, Any]:
        """Return a call."""
        return paged(self.batch, self.new, self.context, self.heads, device)

    def candidates(self) -> list[Any]:
        """Return configurations to try."""
        from core_cuda.ops import decode_attention, prefill_attention

        if self.new == 1:
            return list(decode_attention.candidates(self._shape()))
        return list(prefill_attention.candidates(self._shape()))

    def run(self, data: dict[str, Any], config: Any) -> Tensor:
        """Compute it by the plugin's kernel."""
        from core_cuda.ops import decode_attention, prefill_attention

        if self.new == 1:
            return decode_attention.decode(**data, config=config)
        return prefill_attention.prefill(
            **{name: value for name, value in data.items() if name != "max_query_len"}, config=config
        )

    def wanted(self, data: dict[str, Any]) -> Tensor:
        """Compute it by torch."""
        return dense(data, self.new, self.context)

    def same_kernel(self, config: Any) -> tuple[Any, ...]:
        """Return what the compiled kernel depends on."""
        splits = {"splits": config.splits > 1} if self.new == 1 else {}
        return (self.op, self.heads, *{**asdict(config), **splits}.values())

    def _shape(self) -> Any:
        from core_cuda.ops import decode_attention, prefill_attention

        num_heads, num_kv, size = self.heads
        if self.new == 1:
            return decode_attention.DecodeShape(
                num_seqs=self.batch, num_kv_heads=num_kv, num_rows=num_heads // num_kv, head_size=size,
                value_size=size, num_positions=self.context, itemsize=DTYPE.itemsize,
            )  # fmt: skip
        return prefill_attention.PrefillShape(
            num_tokens=self.batch * self.new, num_seqs=self.batch, num_heads=num_heads, num_kv_heads=num_kv,
            key_size=size, value_size=size, element_bytes=DTYPE.itemsize,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a mixture, `top_k` of them for each token, chosen evenly."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    inner: int

    op = "grouped_mlp"
    library = None

    @property
    def shape(self) -> Mapping[str, Any]:
        """What the plugin looks it up by."""
        return asdict(self._shape())

    @property
    def num_bytes(self) -> int:
        """What it must move: the experts that are hit."""
        return 2 * 3 * self.hidden * self.inner * min(self.experts, self.tokens * self.top_k)

    def make(self, device: str) -> dict[str, Any]:
        """Return a call."""
        scores = torch.rand(self.tokens, self.experts, device=device)
        return {
            "x": randn(self.tokens, self.hidden, device=device),
            "weights": torch.rand(self.tokens, self.top_k, device=device).to(DTYPE),
            "indices": scores.topk(self.top_k, dim=-1).indices,
            "gate_up": randn(self.experts, 2 * self.inner, self.hidden, device=device),
            "down": randn(self.experts, self.hidden, self.inner, device=device),
        }

    def candidates(self) -> list[Any]:
        """Return configurations to try."""
        from core_cuda.ops.grouped_configs import candidates

        return list(candidates(self._shape()))

    def run(self, data: dict[str, Any], config: Any) -> Tensor:
        """Compute it by the plugin's kernels."""
        from core_cuda.ops.activation import Gate
        from core_cuda.ops.grouped_mlp import Experts as Weights
        from core_cuda.ops.grouped_mlp import run_grouped_mlp

        weights = Weights(data["gate_up"], data["down"])
        return run_grouped_mlp(data["x"], data["weights"], data["indices"], weights, Gate("silu"), config=config)

    def wanted(self, data: dict[str, Any]) -> Tensor:
        """Compute it by the op's reference."""
        result: Tensor = torch.ops.core.grouped_mlp(**data, kind="silu")
        return result

    def same_kernel(self, config: Any) -> tuple[Any, ...]:
        """Return what the compiled kernels depend on."""
        return (self.top_k, self.experts, self.hidden, self.inner, config)

    def _shape(self) -> Any:
        from core_cuda.ops.grouped_configs import GroupedShape

        return GroupedShape(**asdict(self))


Problem = Linear | Attention | Experts


def problems(preset: str, rows: list[int]) -> Iterator[Problem]:
    """Yield what a shape computes as the passes leave it: query, key and value merged, gate and up too."""
    fields: dict[str, Any] = dict(PRESETS[preset].fields)
    hidden, head, wide = fields["hidden_size"], fields["head_dim"], fields["intermediate_size"]
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    layers = [((heads + 2 * kv_heads) * head, hidden, False), (hidden, heads * head, False)]
    if "num_experts" not in fields:
        layers += [(wide, hidden, True), (hidden, wide, False)]
    layers.append((fields["vocab_size"], hidden, False))
    for layer in layers:
        yield from (Linear(count, *layer) for count in rows)
    if "num_experts" in fields:
        experts = (fields["num_experts_per_tok"], fields["num_experts"], hidden, fields["moe_intermediate_size"])
        yield from (Experts(tokens, *experts) for tokens in (*rows, 1024, 4096))
    sizes = [(batch, 1, context) for batch, context in COUNTS] + [(1, tokens, tokens) for tokens in PROMPTS]
    yield from (Attention(*size, (heads, kv_heads, head)) for size in sizes)


def compile_one(task: tuple[Problem, Any, int]) -> str:
    """Compile what a candidate launches, in a process without a GPU; return what failed, or nothing."""
    problem, config, capability = task
    from compile_cuda_kernels import compile_only

    try:
        with compile_only(capability):
            problem.run(problem.make("cpu"), config)
    except Exception as error:
        return f"{problem}: {config}: {type(error).__name__}: {(str(error).splitlines() or [''])[-1]}"
    return ""


def distinct(tasks: list[tuple[Problem, Any, int]]) -> list[tuple[Problem, Any, int]]:
    """Leave out tasks whose kernel another one compiles too."""
    return list({(p.op, *p.same_kernel(config)): (p, config, capability) for p, config, capability in tasks}.values())


def ranked(problem: Problem) -> tuple[list[tuple[float, Any]], int]:
    """Return the microseconds of each configuration, the fastest first, None being the library; and how many failed."""
    sets: list[Any] = [problem.make("cuda") for _ in range(num_sets(problem.num_bytes))]
    wanted = problem.wanted(sets[0])
    found: list[tuple[float, Any]] = [] if problem.library is None else [(time_us(problem.library, sets), None)]
    failures = []
    for config in problem.candidates():
        try:
            error = relative_error(problem.run(sets[0], config), wanted)
            if not error < WORST_ERROR:
                failures.append(f"{config}: wrong by {error:.2g}")
                continue
            found.append((time_us(lambda data, config=config: problem.run(data, config), sets), config))
        except Exception as reason:
            failures.append(f"{config}: {type(reason).__name__}: {(str(reason).splitlines() or [''])[0]}")
    for failure in failures:
        print(f"  FAILED {problem}: {failure}", file=sys.stderr)
    found.sort(key=lambda each: each[0])
    for taken, config in found[:_TOLD]:
        print(f"  {taken:.2f} us {config}", file=sys.stderr)
    return found, len(failures)


def measure(problem: Problem) -> dict[str, Any]:
    """Return the entry of a problem: what won, and how far it is from the library."""
    found, failed = ranked(problem)
    taken, winner = found[0]
    library = [time for time, config in found if config is None]
    return {
        "shape": dict(problem.shape),
        "config": asdict(winner) if winner else None,
        "us": round(taken, 2),
        "library_us": round(library[0], 2) if problem.library is not None else None,
        "gbytes_per_s": round(problem.num_bytes / taken / 1e3),
        "failed": failed,
    }


def keep(path: Path, about: Mapping[str, Any], op: str, entry: Mapping[str, Any]) -> None:
    """Put an entry into a file in place of what it knows of this op at this shape; all else stays."""
    known = json.loads(path.read_text()) if path.is_file() else {}
    others = [other for other in known.get(op, ()) if other["shape"] != entry["shape"]]
    path.write_text(json.dumps({**known, **about, op: [*others, entry]}, indent=1) + "\n")


def main(
    presets: str = typer.Option("llama-1b,llama-8b,qwen3-8b,qwen3-30b-a3b", help="Shapes, by name."),
    only: str = typer.Option("", help="Tune only ops whose name holds this; the file keeps what it has of others."),
    rows: str = typer.Option("1,2,4,8,16,32,64,128", help="Numbers of rows of linear layers."),
    out: Path | None = typer.Option(None, help="File to write; default: the plugin's own."),
    processes: int = typer.Option(os.cpu_count() or 1, help="Processes that compile."),
) -> None:
    """Tune the kernels on the current GPU."""
    require_gpu()
    from core_cuda import tuned

    counts = [int(count) for count in rows.split(",")]
    found = dict.fromkeys(p for preset in presets.split(",") for p in problems(preset, counts) if only in p.op)
    major, minor = torch.cuda.get_device_capability()
    tasks = distinct([(p, config, 10 * major + minor) for p in found for config in p.candidates()])
    print(f"compiling {len(tasks)} kernels in {processes} processes")
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for failure in filter(None, pool.imap_unordered(compile_one, tasks)):
            print(f"  FAILED to compile {failure}", file=sys.stderr)
    product = torch.cuda.get_device_name()
    path = out or Path(tuned.__file__).parent / tuned.file_name(product)
    versions = {"torch": torch.__version__, "triton": __import__("triton").__version__, "cuda": torch.version.cuda}
    for problem in found:
        entry = measure(problem)
        keep(path, {"device": product, "versions": versions}, problem.op, entry)  # at once: a tuning may be interrupted
        print(json.dumps({"op": problem.op, **entry}), flush=True)
    print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
