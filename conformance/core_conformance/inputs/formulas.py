"""Torch's operators written out in elementary terms: sums term by term, functions of Python's `math`.

They compute in the dtype of what they are given: fp64 gives the reference, fp32 the yardstick. None calls the operator
that it stands for, so a wrong operator of a device takes no part in judging it, not even where the device is the host.

Letters: B batch, M rows, N columns, K summed over, H query and G key heads, T queries, S keys, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def of_each(function: Callable[[float], float]) -> Callable[[Tensor], Tensor]:
    """Return a function of a number applied to every element, computed in fp64 and rounded once to x's dtype."""

    def apply(x: Tensor) -> Tensor:
        values = [function(value) for value in x.flatten().tolist()]
        return torch.tensor(values, dtype=torch.float64).to(x.dtype).view(x.shape)

    return apply


exp, log, tanh, erf = of_each(math.exp), of_each(math.log), of_each(math.tanh), of_each(math.erf)
sin, cos = of_each(math.sin), of_each(math.cos)
rsqrt = of_each(lambda value: 1 / math.sqrt(value))


def total(x: Tensor) -> Tensor:
    """Sum over the last dimension, term after term: of all orders of summation the one with the largest error."""
    result = torch.zeros_like(x[..., 0])
    for term in x.unbind(-1):
        result = result + term
    return result


def running_total(x: Tensor) -> Tensor:
    """Return the sums of each row's first elements."""
    result, sums = torch.zeros_like(x[..., 0]), []
    for term in x.unbind(-1):
        result = result + term
        sums.append(result)
    return torch.stack(sums, dim=-1)


def largest(x: Tensor) -> Tensor:
    """Return the largest element of each row, which is kept as a dimension."""
    result = x[..., 0]
    for each in x.unbind(-1):
        result = torch.where(each > result, each, result)
    return result[..., None]


def mean(x: Tensor) -> Tensor:
    """Average over the last dimension, which is kept."""
    return (total(x) / x.shape[-1])[..., None]


def product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply (..., M, K) by (..., K, N), term after term."""
    result = a[..., :, :1] * b[..., :1, :]
    for k in range(1, a.shape[-1]):
        result = result + a[..., :, k : k + 1] * b[..., k : k + 1, :]
    return result


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return `x @ weight.T + bias`: (M, K), (N, K), (N,) -> (M, N)."""
    return product(x, weight.mT) + bias


def powers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax's numerator and denominator."""
    numerator = exp(x - largest(x))
    return numerator, total(numerator)[..., None]


def softmax(x: Tensor) -> Tensor:
    """Return the softmax over the last dimension."""
    numerator, denominator = powers(x)
    return numerator / denominator


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x), which beyond 20 is x to torch."""
    return torch.where(x > 20, x, log(1 + exp(torch.where(x > 20, torch.zeros_like(x), x))))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return x / sqrt(mean(x²) + 1e-5) * weight."""
    return x * rsqrt(mean(x * x) + 1e-5) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return (x - mean) / sqrt(variance + 1e-5) * weight + bias, with the biased variance."""
    centred = x - mean(x)
    return centred * rsqrt(mean(centred * centred) + 1e-5) * weight + bias


def attention(query: Tensor, key: Tensor, value: Tensor, added: Tensor | None = None) -> Tensor:
    """Attend: (B, H, T, D), (B, G, S, D) twice -> (B, H, T, D); head h reads head h // (H / G).

    added: (T, S), to the scores.
    """
    repeats = query.shape[1] // key.shape[1]
    heads = [index // repeats for index in range(query.shape[1])]
    key, value = key[:, heads], value[:, heads]
    scores = product(query / math.sqrt(query.shape[-1]), key.mT)
    return product(softmax(scores if added is None else scores + added), value)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend to positions up to a token's own: T and S are equal."""
    length = query.shape[2]
    hidden = torch.tensor([[-math.inf if s > t else 0.0 for s in range(length)] for t in range(length)])
    return attention(query, key, value, hidden.to(query.dtype))
