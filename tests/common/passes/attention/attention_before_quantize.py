"""Attention before a quantisation: what the tests of `fuse_attention_quantize` are built of, and its near misses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.common.passes.rotary.rotated_attention import T, attend, heads

F32, BF16, FP8, INT8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8
ops: Any = torch.ops.core


def attended(query: Tensor, key: Tensor, value: Tensor, **given: Tensor) -> Tensor:
    """Attend without a rotation: (T, H, D)."""
    return attend(
        *(heads(x)[0] for x in (query, key, value)), {n: v for n, v in given.items() if n not in ("cos", "sin")}
    )


def values_of(rows: Tensor, scale: Tensor | None = None, **options: Any) -> Tensor:
    codes, used = ops.quantize(rows, scale, **({"dtype": FP8} | options))
    return codes.to(used.dtype) * used


def second_user(**tensors: Tensor) -> Tensor:
    out = attended(**tensors)
    return values_of(out.flatten(1)) + out.flatten(1).cos()


def second_user_of_rows(**tensors: Tensor) -> Tensor:
    rows = attended(**tensors).flatten(1)
    return values_of(rows) + values_of(rows, dtype=INT8)


def another_dtype(**tensors: Tensor) -> Tensor:
    return values_of(attended(**tensors).to(BF16).flatten(1))


def groups(**tensors: Tensor) -> Tensor:
    codes, scale = ops.quantize(attended(**tensors).flatten(1), None, dtype=FP8, granularity="group", group_size=16)
    return codes.to(F32).unflatten(1, (-1, 16)) * scale[..., None]


def scale_of_tokens(**tensors: Tensor) -> Tensor:
    return values_of(attended(**tensors).flatten(1), torch.linspace(0.01, 0.02, T)[:, None])


def heads_apart(**tensors: Tensor) -> Tensor:
    return values_of(attended(**tensors))


def heads_first_rows(**tensors: Tensor) -> Tensor:
    return values_of(attended(**tensors).transpose(0, 1).flatten(1))


def some_heads(**tensors: Tensor) -> Tensor:
    return values_of(attended(**tensors)[:, :2].flatten(1))


def other_rows(**tensors: Tensor) -> Tensor:
    return values_of(attended(**tensors)[torch.tensor([1, 0, 2, 4, 3])].flatten(1))


def gated(**tensors: Tensor) -> Tensor:
    return values_of(attended(**tensors).flatten(1) * tensors["query"][0].sigmoid())


def written_between(**tensors: Tensor) -> Tensor:
    out = attended(**tensors)
    tensors["key_cache"].mul_(2)
    return values_of(out.flatten(1))


def zero_points(**tensors: Tensor) -> Tensor:
    codes, scale, zero = ops.quantize_asymmetric(attended(**tensors).flatten(1), None, None, dtype=INT8)
    return (codes.to(scale.dtype) - zero) * scale


def results_read_twice(**tensors: Tensor) -> Any:
    both = ops.quantize(attended(**tensors).flatten(1), None, dtype=FP8)
    return both[0].float(), both[0].float() * both[1]


NEAR_MISSES: dict[Callable[..., Any], str] = {
    second_user: "reads out too",
    second_user_of_rows: "quantize_1 reads rows too",
    another_dtype: "to stands between",
    groups: "its scales are one per group, and core::attention_quantize makes one per token or tensor",
    scale_of_tokens: "each token has a scale given",
    heads_apart: "no rows of all heads of a token",
    heads_first_rows: "transpose stands between",
    some_heads: "getitem_3 stands between",
    other_rows: "stands between",
    written_between: "written in between",
    zero_points: "core::quantize_asymmetric gives other codes",
}
