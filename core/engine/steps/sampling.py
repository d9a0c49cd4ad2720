"""Choose the next token from logits, as a function that can be traced and captured with the model.

Legend of shapes: R rows of logits, V vocabulary.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from core.common.ops.sampling import ARGMAX, NUM_PARAMS, SAMPLE
from core.compilation.capture.inputs import InputSpec
from core.engine.config import Sampling, SamplingParams

Ways = Sampling | tuple[Sampling, ...]
TokensAndLogits = tuple[Tensor, Tensor] | dict[Sampling, tuple[Tensor, Tensor]]
_WAYS: tuple[Sampling, ...] = get_args(Sampling)
GREEDY_ROW = (0.0, 0.0, 1.0, 0.0)


def sampling_params_input(rows: int | str) -> InputSpec:
    """Declare the input `sampling_params` of a program that samples: one `sampling_row` for each row of logits."""
    return InputSpec((rows, NUM_PARAMS), torch.float32)


def sampling_row(params: SamplingParams, uniform: float) -> tuple[float, float, float, float]:
    """Return the sampling parameters of one token as numbers: temperature (0 is greedy), top-k, top-p and the number
    drawn."""
    return GREEDY_ROW if params.greedy else (params.temperature, float(params.top_k), params.top_p, uniform)


def sampling_guard(wanted: Sampling, captured: tuple[Sampling, ...]) -> Sampling:
    """Return the cheapest captured way to choose tokens that can do what is wanted, or else the cheapest of all, to be
    corrected outside."""
    return min([way for way in captured if serves(way, wanted)] or captured, key=_WAYS.index)


def serves(way: Sampling, wanted: Sampling) -> bool:
    """Tell whether a way to choose tokens can do what is wanted."""
    return way == wanted or _WAYS.index(way) > _WAYS.index(wanted)


def make_generator(params: SamplingParams) -> torch.Generator | None:
    """Make the random generator of one sequence, None for a greedy one.

    It lives on the host, whatever the device of the logits: one seed gives the same tokens on every device, as far as
    the devices' logits and probabilities agree.
    """
    if params.greedy:
        return None
    generator = torch.Generator(device="cpu")
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed)
    return generator


def with_tokens(logits: Tensor, sampling_params: Tensor, sampling: Ways) -> TokensAndLogits:
    """Return what a compiled step returns: its next tokens and the logits; for several ways, by way (`SharedGuard`)."""
    if isinstance(sampling, tuple):
        return {way: (next_tokens(logits, sampling_params, way), logits) for way in sampling}
    return next_tokens(logits, sampling_params, sampling), logits


def next_tokens(logits: Tensor, sampling_params: Tensor, sampling: Sampling) -> Tensor:
    """Return the next token of each row: int64 of shape (R,), on the device of the logits.

    logits: (R, V) in any floating dtype; a logit may be -inf. sampling_params: (R, 4) float32, a `sampling_row` each.
    With "greedy" it is `core::argmax` for every row, and the parameters are not looked at; else it is `core::sample`,
    greedy rows included.
    """
    greedy = sampling == "greedy"
    tokens: Tensor = ARGMAX.overload(logits) if greedy else SAMPLE.overload(logits, sampling_params)
    return tokens
