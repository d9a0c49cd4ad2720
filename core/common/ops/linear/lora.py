"""`core::add_lora`: what low-rank adapters add to the results of linear layers, each row by an adapter of its own.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2021): an adapter adds x A^T B^T. Many adapters in one
batch: Chen et al., Punica: Multi-Tenant LoRA Serving (2023); Sheng et al., S-LoRA (2023).

Legend of shapes: T rows, K slots for adapters, R rank that each slot has room for, I and N sizes of a row of x and of
the result, P layers of one input whose results stand side by side (query, key and value; gate and up).

base (..., N) and x (..., I), whose leading sizes multiply to T; slots (T,) int64, from 1 to K, and any other number for
no adapter; a (P * K * R, I), layer by layer and slot by slot; b (N, K * R), B of each slot times its scale; sizes: the
columns of each layer, N in all. An adapter of a smaller rank has zeros behind it, an empty slot is zero, and b is
finite: a row is as if the others had other adapters, whatever these are. The result is contiguous.

All tensors but slots have one dtype. Each product is summed in at least fp32; x A^T is rounded to that dtype, as the
result of a layer is, or kept wider by a kernel, and so is what is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.arguments import Draw, check, check_floating, check_ranks
from core.common.ops.declaration import CanonicalOp, declare

OP = "add_lora"


def add_lora(
    base: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, *, rank: int, sizes: Sequence[int]
) -> Tensor:
    """Return base plus x A^T B^T of each row's adapter: (..., N); rows without one as they are.

    All slots are computed, and each row keeps what its own gives.
    """
    num_rows, width = slots.shape[0], b.shape[1]
    own = slots[:, None] == torch.arange(1, width // rank + 1, device=slots.device)
    shrunk = functional.linear(x.reshape(num_rows, x.shape[-1]), a).view(num_rows, len(sizes), width // rank, rank)
    # Not by a product with the mask: what one adapter makes infinite must not reach the rows of the others.
    shrunk = torch.where(own[:, None, :, None], shrunk, 0.0).view(num_rows, len(sizes) * width)
    parts = zip(shrunk.split(width, -1), b.split(list(sizes)), strict=True)
    return base + torch.cat([functional.linear(part, up) for part, up in parts], -1).view(base.shape)


def _fake(base: Tensor, *_: Any, **__: Any) -> Tensor:
    return base.new_empty(base.shape)


def _check(base: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, *, rank: int, sizes: Sequence[int]) -> None:
    check_floating(OP, base=base, x=x, a=a, b=b)
    check_ranks(OP, 2, a=a, b=b)
    check_ranks(OP, 1, slots=slots)
    check(slots.dtype == torch.int64, OP, f"slots must be torch.int64, not {slots.dtype}")
    dtypes = {base.dtype, x.dtype, a.dtype, b.dtype}
    check(len(dtypes) == 1, OP, f"base, x, a and b must have one dtype, not {', '.join(sorted(map(str, dtypes)))}")
    fits = x.dim() >= 1 and base.shape[:-1] == x.shape[:-1] and base.shape[-1] == b.shape[0]
    check(fits, OP, f"base {tuple(base.shape)}, x {tuple(x.shape)} and b {tuple(b.shape)} do not go together")
    rows = prod(x.shape[:-1])
    check(rows == slots.shape[0], OP, f"slots must have one number for each of {rows} rows, not {slots.shape[0]}")
    check(rank > 0 and b.shape[1] % rank == 0, OP, f"b has {b.shape[1]} columns, which are no slots of rank {rank}")
    check(sum(sizes) == b.shape[0] and min(sizes) > 0, OP, f"sizes {list(sizes)} do not make up {b.shape[0]} columns")
    shape = (len(sizes) * b.shape[1], x.shape[-1])
    check(tuple(a.shape) == shape, OP, f"a must have shape {shape}, not {tuple(a.shape)}")


def taken_slots(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return slots for timing a call: all of them in turn, and none."""
    slots, num_slots = arguments["slots"], arguments["b"].shape[1] // arguments["rank"]
    return {"slots": torch.arange(slots.shape[0], dtype=torch.int64, device=slots.device) % (num_slots + 1)}


def drawn_slots(draw: Draw, num_rows: int, num_slots: int) -> Tensor:
    """Return slots of rows, in no order, some without an adapter; int64 (num_rows,)."""
    return (draw.magnitudes(num_rows, dtype=torch.float64, scale=2.0) * 31).to(torch.int64) % (num_slots + 1)


def lora_call(
    draw: Draw, leading: tuple[int, ...], size_in: int, sizes: Sequence[int], *, num_slots: int = 3, rank: int = 4
) -> dict[str, Any]:
    """Return the arguments of a call with rows of these leading sizes, adapters in all slots."""
    width, count = num_slots * rank, prod(leading)
    return {
        "base": draw(*leading, sum(sizes)),
        "x": draw(*leading, size_in),
        "a": draw(len(sizes) * width, size_in, scale=size_in**-0.5),
        "b": draw(sum(sizes), width, scale=rank**-0.5),
        "slots": drawn_slots(draw, count, num_slots),
        "rank": rank,
        "sizes": list(sizes),
    }


def _calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return one layer and several, every form of rows, one adapter, none, and slots that hold numbers of no slot."""
    plain = lora_call(draw, (7,), 48, (40,))
    merged = lora_call(draw, (9,), 48, (32, 16, 16), num_slots=4, rank=8)
    wider = draw(7, 144)
    return {
        "one layer": plain,
        "query, key, value": merged,
        "gate and up": lora_call(draw, (5,), 48, (40, 40), num_slots=2, rank=16),
        "one row": lora_call(draw, (1,), 48, (40,)),
        "no tokens": lora_call(draw, (0,), 48, (40,)),
        "rank 3": lora_call(draw, (1, 6), 48, (24, 16)),
        "odd sizes": lora_call(draw, (3,), 33, (27,), rank=3),
        "one slot": lora_call(draw, (5,), 48, (40,), num_slots=1),
        "no row has an adapter": dict(merged, slots=-(merged["slots"] % 2)),
        "rows of one adapter": dict(merged, slots=merged["slots"].clamp(max=1) * 3),
        "numbers of no slot": dict(plain, slots=torch.tensor([-1, 0, 4, 99, 1, 2, 3], device=draw.device)),
        "slices of wider rows": dict(plain, x=wider[:, 48:96], base=wider[:, :40]),
    }


ADD_LORA = declare(
    CanonicalOp(
        schema="add_lora(Tensor base, Tensor x, Tensor a, Tensor b, Tensor slots, *, int rank, int[] sizes) -> Tensor",
        reference=add_lora,
        fake=_fake,
        check=_check,
        calls=_calls,
        seed=29,
        indices=taken_slots,
    )
)
