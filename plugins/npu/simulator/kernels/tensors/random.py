"""Random numbers: a generator for each call from its seed and offset, so that equal states give equal numbers.

They are not the numbers that a device gives for the same seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.formulas import in_place, stored
from simulator.marshal import kernel

_STEP = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: spreads neighbouring offsets over the seeds


def _generator(seed: int, offset: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed + offset * _STEP) & 0x7FFFFFFFFFFFFFFF)


def _normal(x: Tensor, mean: float, std: float, *state: int) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32).normal_(mean, std, generator=_generator(*state))


def _uniform(x: Tensor, low: float, high: float, *state: int) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32).uniform_(low, high, generator=_generator(*state))


in_place(
    {
        "Normal": ("TFFII", _normal),
        "Uniform": ("TDDII", _uniform),
        "Random": (
            "TIIII",
            lambda x, low, high, *state: torch.randint(low, high, x.shape, generator=_generator(*state)),
        ),
        "Bernoulli": ("TSII", lambda x, p, *state: torch.empty(x.shape).bernoulli_(p, generator=_generator(*state))),
    }
)
stored(
    {
        "Randperm": ("IIIT", lambda n, *state: torch.randperm(n, generator=_generator(*state))),
        "Multinomial": (
            "TIbIIT",
            lambda x, count, again, *state: torch.multinomial(x.float(), count, again, generator=_generator(*state)),
        ),
    }
)


@kernel("aclnnNormalFloatFloat", "FFIIT")
def _normal_out(mean: float, std: float, seed: int, offset: int, out: Tensor) -> None:
    out.copy_(_normal(out, mean, std, seed, offset))
