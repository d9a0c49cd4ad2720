"""What core::attention should give, computed twice by plain means: the oracle in fp64, and an eager model.

No code of the op is used: each sequence is taken apart into its logical positions first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Call = dict[str, Any]
"""The op's arguments by name."""


SCALES = {"key_cache": "k_scale", "value_cache": "v_scale"}


def write(call: Call) -> None:
    """Write key and value where slot_mapping says, one token at a time."""
    for token, slot in enumerate(call["slot_mapping"].tolist()):
        block, offset = divmod(slot, call["key_cache"].shape[1])
        for new, cache in (("key", "key_cache"), ("value", "value_cache")):
            row = call[new][token]
            if call[cache].dtype == torch.float8_e4m3fn:
                scale = scales(call, cache)
                row = torch.stack([nearest_codes(head / scale[i]) for i, head in enumerate(row.double())])
            call[cache][block, offset] = row


def scales(call: Call, cache: str) -> Tensor:
    """Return the scale of each head of a cache (K,), in fp64."""
    given = call.get(SCALES[cache])
    return (torch.ones(()) if given is None else given).double().expand(call[cache].shape[2])


def nearest_codes(values: Tensor) -> Tensor:
    """Return the fp8 code next to each value (N,), found among all of them; of two as near, the one with even bits."""
    bits = torch.arange(256, dtype=torch.uint8)
    codes = bits.view(torch.float8_e4m3fn)
    finite = ~codes.double().isnan()
    bits, codes = bits[finite], codes[finite]
    distance = (values.double()[:, None] - codes.double()).abs()
    ties = distance == distance.amin(1, keepdim=True)
    return codes[(ties * (2 - bits % 2)).argmax(1)]


def read(call: Call, cache: str, slot: tuple[int, int], head: int) -> Tensor:
    """Return what one head of a slot stands for, in fp64."""
    return call[cache][(*slot, head)].double() * scales(call, cache)[head]


def steps(call: Call) -> list[tuple[int, int, int]]:
    """Return (sequence, row in T, logical position) of every real token."""
    starts, lens = call["query_starts"].tolist(), call["seq_lens"].tolist()
    return [
        (i, starts[i] + n, lens[i] - (starts[i + 1] - starts[i]) + n)
        for i in range(len(lens))
        for n in range(starts[i + 1] - starts[i])
    ]


def slots_of(call: Call, sequence: int) -> list[tuple[int, int]]:
    page, table = call["key_cache"].shape[1], call["block_table"][sequence].tolist()
    return [(table[p // page], p % page) for p in range(int(call["seq_lens"][sequence]))]


def visible(call: Call, row: int, head: int, at: int, length: int) -> list[int]:
    seen = range(at + 1) if call.get("causal", True) else range(length)
    window, mask = call.get("window", 0), call.get("mask")
    chunk = at // window * window if call.get("chunked") else at + 1 - window
    seen = [p for p in seen if not window or p >= chunk]
    if mask is None or mask.dtype != torch.bool:
        return seen
    return [p for p in seen if mask[row, head % mask.shape[1], p]]


def oracle(call: Call) -> Tensor:
    """Return the output in fp64, one token, head and position at a time."""
    query, mask, sinks = call["query"].double(), call.get("mask"), call.get("sinks")
    num_tokens, num_heads, _ = query.shape
    group, softcap = num_heads // call["key"].shape[1], call.get("softcap", 0.0)
    out = torch.zeros(num_tokens, num_heads, call["value"].shape[2], dtype=torch.float64)
    for sequence, row, at in steps(call):
        slots = slots_of(call, sequence)
        for head in range(num_heads):
            logits, values = [], []
            for position in visible(call, row, head, at, len(slots)):
                logit = float(query[row, head] @ read(call, "key_cache", slots[position], head // group))
                logit *= call["scale"]
                logit = softcap * math.tanh(logit / softcap) if softcap else logit
                if mask is not None and mask.dtype != torch.bool:
                    logit += float(mask[row, head % mask.shape[1], position])
                logits.append(logit)
                values.append(read(call, "value_cache", slots[position], head // group))
            total = sum(map(math.exp, logits)) + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
            for logit, value in zip(logits, values, strict=True):
                out[row, head] += math.exp(logit) / total * value
    return out


def eager(call: Call, acc: torch.dtype) -> Tensor:
    """Return what a plain model would compute, sequence by sequence with dense matrices, in `acc`."""
    query, group = call["query"].to(acc), call["query"].shape[1] // call["key"].shape[1]
    out = torch.zeros(*query.shape[:2], call["value"].shape[2], dtype=acc)
    for sequence in {s for s, _, _ in steps(call)}:
        rows, at = zip(*[(row, at) for s, row, at in steps(call) if s == sequence], strict=True)
        blocks, offsets = zip(*slots_of(call, sequence), strict=True)
        keys, values = (
            (call[cache][list(blocks), list(offsets)].to(acc) * scales(call, cache)[:, None].to(acc)).repeat_interleave(
                group, 1
            )
            for cache in SCALES
        )
        scores = torch.einsum("qhd,khd->hqk", query[list(rows)], keys) * call["scale"]
        scores = call["softcap"] * torch.tanh(scores / call["softcap"]) if call.get("softcap") else scores
        if call.get("mask") is not None and call["mask"].dtype != torch.bool:
            scores = scores + call["mask"][list(rows), :, : len(blocks)].to(acc).transpose(0, 1)
        hidden = torch.ones(scores.shape, dtype=torch.bool)
        for head in range(scores.shape[0]):
            for step, row in enumerate(rows):
                hidden[head, step, visible(call, row, head, at[step], len(blocks))] = False
        scores = scores.masked_fill(hidden, -math.inf)
        if call.get("sinks") is not None:
            sink = call["sinks"].to(acc).view(-1, 1, 1).expand(-1, len(rows), 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., : len(blocks)]
        out[list(rows)] = torch.einsum("hqk,khv->qhv", weights, values)
    return out.to(call["query"].dtype)
