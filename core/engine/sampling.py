"""Choose the next token of each sequence from its logits.

Legend of shapes: S sequences of the step, R of them sampled rather than greedy, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.engine.config import SamplingParams
from core.errors import UsageError


def make_generator(params: SamplingParams) -> torch.Generator:
    """Make the random generator of one sequence; it lives on the host, whatever the device of the logits."""
    generator = torch.Generator(device="cpu")
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed)
    return generator


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """The parameters of one mix of sequences as tensors on the device; all but `rows` have shape [R, 1]."""

    rows: Tensor  # [R], int64: which sequences are sampled
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor


class Sampler:
    """Sample a batch of sequences, each by its own parameters and from its own generator.

    A sequence takes exactly one number from its generator per sampled token and none when greedy, so that its tokens do
    not depend on which other sequences share the batch. The numbers are drawn on the host: one seed gives the same
    tokens on every device, as far as the devices' logits and probabilities agree.
    """

    def __init__(self) -> None:
        self._key: tuple[tuple[SamplingParams, ...], torch.device] | None = None
        self._batch: _Batch | None = None

    def sample(
        self, logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]
    ) -> Tensor:
        """Return the next token of each sequence: int64 of shape [S], on the device of the logits.

        logits: [S, V] in any floating dtype. Greedy rows are the argmax in that dtype; sampled ones are computed in
        fp32. A logit may be -inf; what a row with NaN gives is not defined. generators: from `make_generator`, one for
        each sequence; None is accepted for a greedy one. Raises UsageError where the counts differ.
        """
        if logits.dim() != 2 or not logits.shape[0] == len(params) == len(generators):
            raise UsageError(
                "sample one token for each sequence",
                found=f"logits of shape {tuple(logits.shape)}, {len(params)} parameters, {len(generators)} generators",
                remedy="pass logits of shape [sequences, vocabulary] and one of each for every sequence",
            )
        tokens = logits.argmax(dim=-1)
        batch = self._prepare(tuple(params), logits.device)
        if batch is not None:
            uniform = _draw(params, generators).to(logits.device)
            tokens[batch.rows] = _sample_rows(logits[batch.rows], batch, uniform)
        return tokens

    def _prepare(self, params: tuple[SamplingParams, ...], device: torch.device) -> _Batch | None:
        # The mix changes only when a sequence joins or leaves; between those steps nothing is copied to the device.
        if self._key != (params, device):
            self._key, self._batch = (params, device), _make_batch(params, device)
        return self._batch


def _make_batch(params: tuple[SamplingParams, ...], device: torch.device) -> _Batch | None:
    rows = [row for row, p in enumerate(params) if not p.greedy]
    if not rows:
        return None
    sampled = [params[row] for row in rows]

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

    return _Batch(
        rows=torch.tensor(rows, device=device),
        temperature=column([p.temperature for p in sampled], torch.float32),
        top_k=column([p.top_k for p in sampled], torch.int64),
        top_p=column([p.top_p for p in sampled], torch.float32),
    )


def _draw(params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]) -> Tensor:
    """Draw one number in [0, 1) for each sampled sequence: fp32 of shape [R, 1], on the host."""
    draws = []
    for row, (p, generator) in enumerate(zip(params, generators, strict=True)):
        if p.greedy:
            continue
        if generator is None:
            raise UsageError(
                f"sample sequence {row} with temperature={p.temperature}",
                found="it has no generator",
                remedy="make one with make_generator(params) when the sequence starts",
            )
        draws.append(torch.rand(1, generator=generator))
    return torch.stack(draws)


def _sample_rows(logits: Tensor, batch: _Batch, uniform: Tensor) -> Tensor:
    """Sample rows of logits [R, V] by inverting their cumulative distribution at `uniform` [R, 1]; gives int64 [R].

    The order: temperature, top-k (Fan et al. 2018, Hierarchical Neural Story Generation), top-p (Holtzman et al. 2020,
    The Curious Case of Neural Text Degeneration: the smallest set of most likely tokens whose probability reaches p).
    """
    # A stable sort, so that equal logits are cut at the same token on every device: the lower id is kept.
    ordered, token_ids = logits.float().sort(dim=-1, descending=True, stable=True)
    # The maximum goes first, because logits divided by a tiny temperature overflow.
    ordered = (ordered - ordered[:, :1]) / batch.temperature
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    ordered = ordered.masked_fill((batch.top_k > 0) & (rank >= batch.top_k), float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    # A token stays while those before it fall short of p, the first always; p = 1 keeps all, which rounding could deny.
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = (before < batch.top_p) | (batch.top_p >= 1)
    cumulative = (probabilities * kept).cumsum(dim=-1)
    # The first token whose cumulative probability exceeds the draw. A draw can round up to the total itself, which no
    # token exceeds; then it is the last one that has a probability at all.
    index = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    last = ((probabilities > 0) & kept).sum(dim=-1, keepdim=True) - 1
    # A row of NaN has no last token; its first is as good as any and, unlike an index of -1, keeps the device alive.
    return token_ids.gather(1, torch.minimum(index, last).clamp_(min=0)).squeeze(1)
