"""Products with few rows at the sizes of models of 1 and 8 B parameters, for tools/cuda/compile_cuda_kernels.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from core_cuda.ops.activation import Gate
from core_cuda.ops.linear.scaled import scaled_linear
from core_cuda.ops.linear.skinny import skinny_linear
from core_cuda.ops.linear.skinny_configs import SkinnyConfig, default_config

ROW = SkinnyConfig("row", 8, 1024)
SIZES = ((6144, 4096, False), (4096, 14336, False), (28672, 4096, True), (2048, 2048, False), (16384, 2048, True))


def half(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the default configurations."""
    for rows in (1, 8, 64):
        for columns, depth, gated in SIZES:
            gate = Gate("silu") if gated else None
            x, weight = half(rows, depth), half(columns, depth)
            name = f"linear {rows} x {columns} x {depth}{', gated' if gated else ''}"
            yield name, partial(skinny_linear, x, weight, gate=gate)
            config = default_config(rows, columns // (2 if gated else 1), depth, gated=gated, portable=True)
            if config.kernel == "tile":
                yield f"{name}, portable", partial(skinny_linear, x, weight, gate=gate, config=config)
    for rows in (1, 8, 64):
        for columns, depth, _ in SIZES[:3]:
            x, weight = (torch.empty(n, depth, dtype=torch.float8_e4m3fn) for n in (rows, columns))
            scales = (torch.empty(rows), torch.empty(columns))
            configs = [default_config(rows, columns, depth, bits=8, portable=portable) for portable in (False, True)]
            for config in dict.fromkeys((*configs, *([ROW] if rows == 1 else []))):
                call = partial(skinny_linear, x, weight, scales=scales, out_dtype=torch.bfloat16, config=config)
                yield f"codes {rows} x {columns} x {depth}, {config.kernel}", call
                if config.kernel == "hopper":
                    yield f"codes {rows} x {columns} x {depth}, early", partial(call, early=True)
    # The product is the host's own, so it is a small one.
    codes = torch.zeros(16, 64).to(torch.float8_e4m3fn)
    scales = (torch.empty(16), torch.empty(16))
    for name, bias in (("", None), (", bias", half(16))):
        call = partial(scaled_linear, codes, codes, scales, bias, torch.bfloat16, "tensor")
        yield f"scales after the product{name}", call
