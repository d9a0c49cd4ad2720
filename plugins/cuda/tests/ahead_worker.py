"""Begins the kernels of calls from stand-ins, then makes the calls, for a GPU of capability 9.0 that need not be there.

Prints one JSON line: the kernels `launched`, how many were compiled `ahead` and `later`, the names of the `threads`
that compiled, and the kernels compiled for a call whose rows begin at an `unaligned` address. With the word "model":
the kernels `compiled` for the programs of a model, and how many of them `ahead`.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools/cuda"))

from compile_cuda_kernels import compile_only
from cuda_calls import paged

import core.common.ops.canonical  # noqa: F401  # declares the ops
from core.common.ops.declaration import declared_ops
from core_cuda.compiler import TRITON
from core_cuda.implementations import IMPLEMENTATIONS

HEADS = (32, 8, 128)


def rows(count: int, width: int) -> Tensor:
    return torch.empty(count, width, dtype=torch.bfloat16)


def calls() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    weight = torch.empty(4096, dtype=torch.bfloat16)
    yield "cuda_rms_norm", (rows(1, 4096), weight, 1e-5), {}
    yield "cuda_attention", (), paged(1, 1, 256, HEADS, "cpu")
    yield "cuda_attention", (), paged(1, 2048, 2048, HEADS, "cpu")  # by tensor descriptors
    yield "cuda_linear", (rows(1, 4096), rows(6144, 4096), None), {}
    yield (
        "cuda_gated_linear",
        (rows(512, 512), rows(1024, 512), None),
        {"kind": "silu"},
    )  # a product, then a kernel of gates
    yield "cuda_argmax", (rows(1, 128256),), {}


def stand_in(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def of_a_model() -> None:
    """Make the programs of a small model, on the recording device, and print how many kernels were compiled when."""
    from core.compilation.options import CompileOptions
    from core.engine.models.loading import build_model
    from core.engine.models.tiny import tiny_config
    from core.engine.serve.engine import Engine
    from core.engine.steps.runner import EngineConfig
    from tests.recording import acme

    options = CompileOptions(lowering="inline", mode="full", measure=False, cache=False)
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 128, "decode_buckets": (2,), "prefill_buckets": (64,)}
    config = EngineConfig(**sizes, sampling=("greedy",), options=options)
    with compile_only(90):
        device = acme(ops=IMPLEMENTATIONS)
        device = replace(device, parts=replace(device.parts, kernel_compilers=(TRITON,)))
        loaded = build_model(tiny_config("llama"), torch_device=device.torch_device, dtype=torch.bfloat16)
        with Engine(loaded, device, config) as engine:
            report = engine.report()
    told = {"compiled": report.num_kernels, "ahead": report.num_ahead, "notes": report.notes}
    sys.stdout.write(json.dumps(told) + "\n")


def main() -> None:
    by_name = {each.name: each for each in IMPLEMENTATIONS}
    launched: list[str] = []
    threads: set[str] = set()

    def tell(told: Mapping[str, Any]) -> None:
        launched.append(told["kernel"])

    with compile_only(90, tell), TRITON.counting() as count:
        listener = triton.knobs.compilation.listener

        def hear(**event: Any) -> None:
            threads.add(threading.current_thread().name.partition("_")[0])
            listener(**event)

        triton.knobs.compilation.listener = hear
        assert TRITON.ahead is not None
        with TRITON.ahead() as begin:
            for name, args, kwargs in calls():
                call = declared_ops()[by_name[name].op].bind(args, kwargs)
                begin(by_name[name].fn, {name: stand_in(value) for name, value in call.args.items()})
            assert not launched, "something ran"
        ahead, compiled_in = count(), sorted(threads)
        for name, args, kwargs in calls():
            by_name[name].fn(*args, **kwargs)
        later = count() - ahead
        weight = torch.empty(4096, dtype=torch.bfloat16)
        by_name["cuda_rms_norm"].fn(rows(1, 4104)[:, 1:4097], weight, 1e-5)
        unaligned = count() - ahead - later
    told = {"launched": launched, "ahead": ahead, "later": later, "threads": compiled_in, "unaligned": unaligned}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    of_a_model() if sys.argv[1:] == ["model"] else main()
