"""One rank that calls torch_npu's products with a collective, eagerly and captured, and judges them by T1."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch_npu  # type: ignore[import-not-found, unused-ignore]  # noqa: F401  # brings the backend
from torch import Tensor, distributed
from torch.nn import functional

from core.common.numerics import judge
from core.common.ops.canonical import ALL_GATHER_LINEAR, ALL_REDUCE, LINEAR_REDUCE_SCATTER
from core_npu.ops import collective
from simulator import runtime

K, N = 256, 48


def drawn(rank: int, *shape: int) -> Tensor:
    """Return the fp64 values that a rank draws for a shape."""
    generator = torch.Generator().manual_seed(rank + 10 * len(shape) + shape[0])
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def judged(own: Callable[[], Tensor], apart: Callable[[], Tensor], exact: Tensor) -> dict[str, Any]:
    """Judge a fused op and a replay of it against the ops apart; name the kernels of both."""
    runtime.clear()
    eager = apart().cpu()
    before = runtime.kernels("launch")
    runtime.clear()
    results, graph, stream = [own().cpu()], torch.npu.NPUGraph(), torch.npu.Stream()
    after = runtime.kernels("launch")
    torch.npu.synchronize()
    with torch.npu.graph(graph, stream=stream):
        out = own()
    graph.replay()
    torch.npu.synchronize()
    results.append(out.cpu())
    verdicts = [judge(result, eager, exact) for result in results]
    return {
        "reasons": [each.reason for each in verdicts if not each.passed],
        "same": torch.equal(*results),
        "before": [name for name in before if "Copy" not in name],
        "after": [name for name in after if "Copy" not in name],
    }


def products(rank: int, size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Judge every op on rows and on a batch whose tokens are its second dimension, with a bias where one is taken."""
    found = {}
    weights = [(drawn(r, N, K) / 16).to(dtype) for r in range(size)]
    biases = [drawn(r, N).to(dtype) for r in range(size)]
    for name, shape, dim in (("rows", (6, K), 0), ("batch", (1, 4, K), 1)):
        xs = [drawn(r, *shape).to(dtype) for r in range(size)]
        x, weight, bias = xs[rank].npu(), weights[rank].npu(), biases[rank].npu()
        wide = [functional.linear(a.double(), b.double()) for a, b in zip(xs, weights, strict=True)]
        total = sum(wide)
        assert isinstance(total, Tensor)
        found[f"all-reduce, {name}"] = judged(
            lambda x=x, weight=weight, bias=bias: collective.linear_all_reduce(x, weight, bias, ""),  # type: ignore[misc]
            lambda x=x, weight=weight, bias=bias: ALL_REDUCE.reference(functional.linear(x, weight, bias), ""),  # type: ignore[misc]
            total + sum(each.double() for each in biases),
        )
        args = (x, weight, None, "", dim)
        found[f"reduce-scatter, {name}"] = judged(
            lambda args=args: collective.linear_reduce_scatter(*args),  # type: ignore[misc]
            lambda args=args: LINEAR_REDUCE_SCATTER.reference(*args),  # type: ignore[misc]
            total.chunk(size, dim)[rank],
        )
        for index, exact in enumerate(
            (functional.linear(torch.cat(xs, dim).double(), weights[rank].double()), torch.cat(xs, dim).double())
        ):
            found[f"all-gather {index}, {name}"] = judged(
                lambda args=args, index=index: collective.all_gather_linear(*args)[index],  # type: ignore[misc]
                lambda args=args, index=index: ALL_GATHER_LINEAR.reference(*args)[index],  # type: ignore[misc]
                exact,
            )
    return found


if __name__ == "__main__":
    own_rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.npu.set_device(own_rank)
    distributed.init_process_group("hccl", timeout=timedelta(seconds=60))
    told = {str(dtype): products(own_rank, num_ranks, dtype) for dtype in (torch.bfloat16, torch.float16)}
    sys.stdout.write(f"{json.dumps(told)}\n")
    distributed.destroy_process_group()
