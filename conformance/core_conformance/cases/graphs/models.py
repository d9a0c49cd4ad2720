"""Small subjects of capture, each with something that a faulty graph gets wrong; numbers are exact where possible.

Legend: T tokens, W width, H heads, D head size, S slots of a cache.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional

from core.device import Device
from core_conformance.cases.graphs.drive import TOKENS, WIDTH, Subject, Tensors, Values, like, normal, whole

HEADS, SLOTS = 4, 16
NUM_PRODUCTS = 10
"""Products in the chain of `slow`."""


def block(device: Device, dtype: torch.dtype, seed: int = 0) -> Subject:
    """Return a layer of attention and a gated MLP over x: [T, W].

    Outputs: hidden states [T, W]; a view of them by heads [T, H, D]; the largest entry of each row, int64 [T]; whether
    an entry is positive, bool [T, W]; the log-sum-exp of each row, fp32 [T].
    """
    like = torch.empty(0, dtype=dtype, device=device.torch_device)
    shapes = {"qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 2 * WIDTH)}
    tensors = {
        name: normal(shape, seed * 100 + index, like) / sqrt(shape[1])
        for index, (name, shape) in enumerate(shapes.items())
    }
    tensors["norm"] = torch.linspace(0.3, 1.7, WIDTH).to(like)
    tensors["x"] = normal((TOKENS, WIDTH), seed, like)
    return Subject(tensors=tensors, first=_projected, between=_attended, second=_finished)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def _projected(tensors: Values) -> Tensors:
    """Return x and its queries, keys and values [3, H, T, D]."""
    qkv = functional.linear(_normed(tensors["x"], tensors["norm"]), tensors["qkv"])
    return tensors["x"] * 1, qkv.view(len(qkv), 3, HEADS, -1).permute(1, 2, 0, 3).contiguous()


def _attended(x: Tensor, qkv: Tensor) -> Tensors:
    """Return x and the result of causal attention [T, W]."""
    query, key, value = qkv.unbind(0)
    scores = query @ key.transpose(-1, -2) / sqrt(query.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    attended = scores.masked_fill(future, float("-inf")).float().softmax(-1).to(x.dtype) @ value
    return x.clone(), attended.transpose(0, 1).reshape(x.shape)


def _finished(tensors: Values, x: Tensor, attended: Tensor) -> Tensors:
    x = x + functional.linear(attended, tensors["out"])
    gate, up = functional.linear(_normed(x, tensors["norm"]), tensors["up"]).chunk(2, -1)
    hidden = x + functional.linear(functional.silu(gate) * up, tensors["down"])
    return hidden, hidden.view(len(hidden), HEADS, -1), hidden.argmax(-1), hidden > 0, hidden.float().logsumexp(-1)


def crowded(device: Device) -> Subject:
    """Return a subject with outputs made early, before many temporaries of their shape, and late ones."""

    def second(tensors: Values, early: Tensor) -> Tensors:
        first, outputs = early * 2, []
        passing = early
        for number in range(6):
            passing = (passing + number).neg() + tensors["x"]
            if number % 3 == 0:
                outputs.append(passing + 1)
        return first, early + 3, *outputs, first[1:], passing.sign(), (passing > 0).to(torch.int32), early.flip(0)

    return Subject(
        tensors={"x": whole((TOKENS, WIDTH), 1, like(device))}, first=lambda tensors: (tensors["x"] + 1,), second=second
    )


def x_and_weight(device: Device) -> dict[str, Tensor]:
    """Return an input [T, W] and a weight [W]."""
    return {"x": whole((TOKENS, WIDTH), 1, like(device)), "weight": whole((WIDTH,), 2, like(device))}


def weighted(device: Device, constant: float = 3.0) -> Subject:
    """Return a subject of an input, a weight and a constant of the host: x · weight + constant."""
    return Subject(
        tensors=x_and_weight(device),
        first=lambda tensors: (tensors["x"] * tensors["weight"],),
        second=lambda tensors, product: (product + constant, tensors["weight"] * 2),
    )


def writer(device: Device) -> Subject:
    """Return a subject that writes a cache [S, W] at slots, adds to rows of a sum, and counts its runs: in place, and
    through views."""
    tensors = {name: like(device).new_zeros(SLOTS, WIDTH) for name in ("cache", "sums")}
    tensors["runs"] = torch.zeros(3, dtype=torch.int64, device=device.torch_device)
    tensors["x"] = whole((TOKENS, WIDTH), 1, like(device))
    tensors["slots"] = torch.arange(TOKENS, device=device.torch_device) + 1

    def first(tensors: Values) -> Tensors:
        tensors["cache"].index_copy_(0, tensors["slots"], tensors["x"])
        tensors["runs"][0].add_(1)
        tensors["sums"].view(-1)[WIDTH : 2 * WIDTH].add_(1)
        return (tensors["cache"][tensors["slots"]],)

    def second(tensors: Values, rows: Tensor) -> Tensors:
        tensors["sums"][2:].t()[:, :TOKENS].add_(rows.t())
        tensors["runs"].narrow(0, 1, 2).mul_(2).add_(1)
        return rows + 1, tensors["sums"].sum(0), tensors["runs"] * 1

    return Subject(tensors=tensors, inputs=("x", "slots"), first=first, second=second)


def slow(device: Device, width: int = 384) -> Subject:
    """Return a chain of products that takes a device long enough to be read from too early; its factors are
    permutations, so it is exact."""
    order = torch.randperm(width, generator=torch.Generator().manual_seed(5))
    tensors = {"x": whole((width, width), 1, like(device)), "shuffle": torch.eye(width)[order].to(like(device))}

    def chained(tensors: Values, x: Tensor) -> Tensors:
        for _ in range(NUM_PRODUCTS // 2):
            x = x @ tensors["shuffle"]
        return x, x[0] + 1

    return Subject(tensors=tensors, first=lambda tensors: (chained(tensors, tensors["x"])[0],), second=chained)
