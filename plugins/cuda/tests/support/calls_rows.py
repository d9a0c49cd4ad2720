"""Calls of the kernels over rows at the sizes of Llama models of 1B and 8B, for compile_cuda_kernels.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from core_cuda.ops import activation, quantize
from core_cuda.ops.gather_columns import gather_columns
from core_cuda.ops.norm import norms as norm
from core_cuda.ops.norm import pair
from core_cuda.ops.norm.gated_norm import gated_norm
from core_cuda.ops.norm.normed_sum import normed_sum, normed_sum_rms_norm
from core_cuda.ops.sampling import argmax
from core_cuda.ops.sampling import sample as sampling
from core_cuda.ops.squared_relu import squared_relu

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn
CODES = {
    "token": {"scale": None, "dtype": FP8},
    "given": {"scale": torch.tensor(0.1), "dtype": FP8, "granularity": "tensor"},
    "group": {"scale": None, "dtype": FP8, "granularity": "group", "group_size": 128},
    "int8": {"scale": None, "dtype": torch.int8},
}
"""How codes are scaled, for kernels that end in codes."""
QWEN3_NEXT = ((0, 128), (128, 128), (256, 256), (512, 256))
"""Where a head's query, key, values and gates begin, and how many columns they are."""


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield every kernel with few and with many rows."""
    for tokens in (1, 64, 4096):
        for width in (2048, 4096, 8192, 16384):
            x, weight = torch.empty(1, tokens, width, dtype=BF16), torch.empty(width, dtype=BF16)
            llama = {"normed_dtype": BF16, "out_dtype": BF16}
            name = f"{tokens}x{width}"
            yield f"rms_norm {name}", partial(norm.rms_norm, x, weight, 1e-5, **llama)
            yield f"add_rms_norm {name}", partial(norm.add_rms_norm, x, x, weight, 1e-5, **llama)
            yield f"normed_sum {name}", partial(normed_sum, x, x, weight, 1e-5, **llama)
            gemma = {"offset": 1.0, "weight_dtype": torch.float32}
            both = {**gemma, **{f"next_{key}": value for key, value in gemma.items()}}
            yield f"normed_sum_rms_norm {name}", partial(normed_sum_rms_norm, x, x, weight, 1e-6, weight, 1e-6, **both)
            gated = {"normed_dtype": BF16, "middle_dtype": BF16, "out_dtype": BF16, "kind": "silu"}
            mamba = {**gated, "norm_first": False, "groups": width // 1024}
            yield f"gated_norm {name}", partial(gated_norm, x, x, weight, 1e-5, **mamba)
            narrow = torch.empty(1, tokens, 1024, dtype=BF16)
            yield f"two_rms_norms {name}", partial(pair.two_rms_norms, x, narrow, weight, narrow[0, 0], 1e-6)
            for form, codes in list(CODES.items())[: None if tokens == 1 else 1]:
                coded = partial(norm.add_rms_norm_quantize, x, x, weight, 1e-5, **codes, **llama)
                yield f"add_rms_norm_quantize {form} {name}", coded
            yield f"quantize {name}", partial(quantize.quantize, x, None, dtype=torch.float8_e4m3fn)
        states = torch.empty(tokens, 32, 128, dtype=BF16)
        by_head = partial(gated_norm, states, states, states[0, 0], 1e-6, norm_first=True, **gated)
        yield f"gated_norm of heads {tokens}", by_head
        for heads, size in ((32, 128), (32, 64)):
            merged = torch.empty(1, tokens, (heads + 16) * size, dtype=BF16)
            query = merged[..., : heads * size].unflatten(-1, (heads, size))
            weight = torch.empty(size, dtype=BF16)
            yield f"qk norm {tokens}x{heads}x{size}", partial(norm.rms_norm, query, weight, 1e-6, normed_dtype=BF16)
        for inter in (8192, 14336):
            gate_up = torch.empty(1, tokens, 2 * inter, dtype=BF16)
            yield f"gate {tokens}x{inter}", partial(activation.gated_activation_fused, gate_up, kind="silu")
            for form, codes in list(CODES.items())[: None if tokens == 1 else 1]:
                coded = partial(activation.gated_activation_quantize, gate_up, None, kind="silu", **codes)
                yield f"gate_quantize {form} {tokens}x{inter}", coded
        nemotron_h = torch.empty(1, tokens, 21504, dtype=BF16)
        yield f"squared_relu {tokens}x21504", partial(squared_relu, nemotron_h)
        qwen3_next = torch.empty(tokens, 1, 16 * 768, dtype=BF16)
        heads = [number for start, width in QWEN3_NEXT for number in (start, 16, 768, width)]
        yield f"gather_columns {tokens}x12288", partial(gather_columns, qwen3_next, heads, [3, 1])
        narrow = torch.empty(tokens, 1, 64, dtype=torch.float32)
        yield f"gather_columns {tokens}x64", partial(gather_columns, narrow, [0, 16, 4, 2, 2, 16, 4, 2], [1, 1])
        pairs = torch.empty(1, tokens, 2 * 2880, dtype=BF16)
        gpt_oss = {"kind": "quick_gelu", "limit": 7.0, "up_offset": 1.0, "interleaved": True}
        yield f"gate alternating {tokens}", partial(activation.gated_activation_fused, pairs, **gpt_oss)
    wide = torch.empty(4, 65536, dtype=BF16)
    yield "layer_norm 4x65536", partial(norm.layer_norm, wide, wide[0], wide[0], 1e-5)
    x = torch.empty(4, 32768, dtype=torch.float32)
    yield "layer_norm 4x32768 fp32", partial(norm.layer_norm, x, x[0], x[0], 1e-5)
    groups = {"dtype": torch.float8_e4m3fn, "granularity": "group", "group_size": 128}
    yield "quantize groups", partial(quantize.quantize, wide, None, **groups)
    whole = {"dtype": torch.int8, "granularity": "tensor"}
    yield "quantize whole", partial(quantize.quantize, wide, None, **whole)
    for rows in (1, 8, 64):
        logits = torch.empty(rows, 128_256, dtype=BF16)
        yield f"argmax {rows}", partial(argmax.argmax, logits)
    yield "argmax odd fp32", partial(argmax.argmax, torch.empty(8, 50_257))
    for rows in (1, 256):
        logits = torch.empty(rows, 128_256, dtype=BF16)
        yield f"sample {rows}", partial(sampling.sample, logits, torch.empty(rows, 4))
    yield "sample fp32", partial(sampling.sample, torch.empty(8, 128_256), torch.empty(8, 4))
