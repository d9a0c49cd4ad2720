"""Products with weights of codes at the sizes of a model of 8 B parameters, for tools/cuda/compile_cuda_kernels.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from core_cuda.ops.linear.coded import coded_linear
from core_cuda.ops.linear.coded_configs import CodedConfig
from core_cuda.ops.linear.hopper_coded import hopper_coded_linear
from core_cuda.ops.linear.weight_only import dequantized

COLUMNS, DEPTH, GROUP = 4096, 4096, 128
CODES = {"int4": (torch.int32, 4), "int8": (torch.int8, 8), "fp8": (torch.float8_e4m3fn, 8)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SMALL = CodedConfig(16, 64, 64, num_stages=3, split_k=2)


def weight(code: str, groups: int, *, zeros: bool) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Return codes, scales, zero points and the bits of a code."""
    dtype, bits = CODES[code]
    codes = torch.empty(COLUMNS, DEPTH // 8 if bits == 4 else DEPTH, dtype=dtype)
    zero = torch.empty(COLUMNS, groups, dtype=torch.int8) if zeros else None
    return codes, torch.empty(COLUMNS, groups), zero, bits


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the default configurations, and in one small configuration each kind of weight."""
    for rows, code in itertools.product((8, 64, 128), CODES):
        codes, scale, _, bits = weight(code, DEPTH // GROUP if code == "int4" else 1, zeros=False)
        x = torch.empty(rows, DEPTH, dtype=torch.bfloat16)
        yield f"weight-only {code}, {rows}", partial(coded_linear, x, codes, scale, bits=bits)
    for rows, code, zeros in ((1, "int4", False), (16, "int4", True), (1, "int8", False), (8, "fp8", False)):
        codes, scale, zero, bits = weight(code, DEPTH // GROUP if code == "int4" else 1, zeros=zeros)
        x = torch.empty(rows, DEPTH, dtype=torch.float16 if zeros else torch.bfloat16)
        yield f"streamed {code}, {rows}", partial(hopper_coded_linear, x, codes, scale, zero, None, bits=bits)
    for rows in (8, 64, 512, 4096):
        x = torch.empty(rows, DEPTH, dtype=torch.int8)
        codes, scale, *_ = weight("int8", 1, zeros=False)
        call = partial(coded_linear, x, codes, scale, x_scale=torch.empty(rows), out_dtype=torch.bfloat16)
        yield f"int8 by int8, {rows}", call
    for (name, dtype), code, groups, zeros in itertools.product(
        DTYPES.items(), CODES, (1, DEPTH // GROUP), (False, True)
    ):
        if code == "fp8" and zeros:
            continue  # zero points are of integers
        codes, scale, zero, bits = weight(code, groups, zeros=zeros)
        kind = f"{code} {name}, {'many scales' if groups > 1 else 'one scale'}{', zero points' if zeros else ''}"
        x = torch.empty(8, DEPTH, dtype=dtype)
        yield f"kind {kind}", partial(coded_linear, x, codes, scale, zero, bits=bits, config=SMALL)
        if dtype == torch.bfloat16:
            yield f"numbers of {kind}", partial(dequantized, codes, scale, zero, bits, DEPTH, dtype)
