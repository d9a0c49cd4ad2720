"""Random numbers: a generator for each call from its seed and offset, so that equal states give equal numbers.

They are not the numbers that a device gives for the same seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.marshal import kernel

_STEP = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: spreads neighbouring offsets over the seeds


def _generator(seed: int, offset: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed + offset * _STEP) & 0x7FFFFFFFFFFFFFFF)


@kernel("aclnnInplaceNormal", "TFFII")
def _normal(x: Tensor, mean: float, std: float, seed: int, offset: int) -> None:
    x.copy_(torch.empty(x.shape, dtype=torch.float32).normal_(mean, std, generator=_generator(seed, offset)))


@kernel("aclnnNormalFloatFloat", "FFIIT")
def _normal_out(mean: float, std: float, seed: int, offset: int, out: Tensor) -> None:
    _normal(out, mean, std, seed, offset)


@kernel("aclnnInplaceUniform", "TDDII")
def _uniform(x: Tensor, low: float, high: float, seed: int, offset: int) -> None:
    x.copy_(torch.empty(x.shape, dtype=torch.float32).uniform_(low, high, generator=_generator(seed, offset)))


@kernel("aclnnInplaceRandom", "TIIII")
def _random(x: Tensor, low: int, high: int, seed: int, offset: int) -> None:
    x.copy_(torch.randint(low, high, x.shape, generator=_generator(seed, offset), dtype=torch.int64))


@kernel("aclnnInplaceBernoulli", "TSII")
def _bernoulli(x: Tensor, probability: float, seed: int, offset: int) -> None:
    x.copy_(torch.empty(x.shape).bernoulli_(probability, generator=_generator(seed, offset)))


@kernel("aclnnRandperm", "IIIT")
def _randperm(n: int, seed: int, offset: int, out: Tensor) -> None:
    out.copy_(torch.randperm(n, generator=_generator(seed, offset)))


@kernel("aclnnMultinomial", "TIbIIT")
def _multinomial(x: Tensor, num_samples: int, replacement: bool, seed: int, offset: int, out: Tensor) -> None:
    generator = _generator(seed, offset)
    out.copy_(torch.multinomial(x.float(), num_samples, replacement, generator=generator))
