"""Choose the next token from logits, as a function that can be traced and captured with the model.

Legend of shapes: R rows of logits, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from core.common.graphs.inputs import InputSpec
from core.engine.config import SamplingParams

Sampling = Literal["greedy", "random"]
"""How a graph chooses tokens: always the most likely one, or each row by its own parameters."""

GREEDY_ROW = (0.0, 0.0, 1.0, 0.0)
NUM_PARAMS = len(GREEDY_ROW)


def sampling_params_input(rows: int | str) -> InputSpec:
    """Declare the input `sampling_params` of a program that samples: one `sampling_row` for each row of logits."""
    return InputSpec((rows, NUM_PARAMS), torch.float32)


def sampling_row(params: SamplingParams, uniform: float) -> tuple[float, float, float, float]:
    """Return how one token is sampled, as numbers: temperature (0 is greedy), top-k, top-p and the number drawn."""
    return GREEDY_ROW if params.greedy else (params.temperature, float(params.top_k), params.top_p, uniform)


def sampling_guard(is_random: bool, captured: tuple[Sampling, ...]) -> Sampling:
    """Return the captured way to choose tokens that serves a step, or else the one to be corrected outside."""
    if is_random and "random" in captured:
        return "random"
    return "greedy" if "greedy" in captured else "random"


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


def next_tokens(logits: Tensor, sampling_params: Tensor, sampling: Sampling) -> Tensor:
    """Return the next token of each row: int64 of shape (R,), on the device of the logits.

    logits: (R, V) in any floating dtype; a logit may be -inf. sampling_params: (R, 4) float32, a `sampling_row` each.
    Greedy rows are the argmax in the logits' dtype; sampled ones are computed in fp32. With "greedy" every row is, and
    the parameters are not looked at. A row with NaN gives some token and leaves the others alone.
    """
    most_likely = logits.argmax(dim=-1)
    if sampling == "greedy":
        return most_likely
    return torch.where(sampling_params[:, 0] > 0, _sample(logits, sampling_params), most_likely)


def _sample(logits: Tensor, sampling_params: Tensor) -> Tensor:
    """Sample every row by inverting its cumulative distribution at its own uniform number; int64 (R,).

    The order: temperature, top-k (Fan et al. 2018, Hierarchical Neural Story Generation), top-p (Holtzman et al. 2020,
    The Curious Case of Neural Text Degeneration: the smallest set of most likely tokens whose probability reaches p).
    """
    temperature, top_k, top_p, uniform = sampling_params.split(1, dim=1)
    # A stable sort, so that equal logits are cut at the same token on every device: the lower id is kept.
    ordered, token_ids = logits.float().sort(dim=-1, descending=True, stable=True)
    # The maximum goes first, because logits divided by a tiny temperature overflow. Greedy rows divide by 1.
    ordered = (ordered - ordered[:, :1]) / torch.where(temperature > 0, temperature, 1.0)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    # A token stays while those before it fall short of p, the first always; p = 1 keeps all, which rounding could deny.
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = (before < top_p) | (top_p >= 1)
    cumulative = (probabilities * kept).cumsum(dim=-1)
    # The first token whose cumulative probability exceeds the draw. A draw can round up to the total itself, which no
    # token exceeds; then it is the last one that has a probability at all.
    index = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    last = ((probabilities > 0) & kept).sum(dim=-1, keepdim=True) - 1
    # A row of NaN has no last token; its first is as good as any and, unlike an index of -1, keeps the device alive.
    return token_ids.gather(1, torch.minimum(index, last).clamp(min=0)).squeeze(1)
