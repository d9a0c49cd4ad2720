"""The check that a model computes the same on the paged cache as by its own forward: before anything is compiled, and
where graphs compute in another way than the model's code, by the graphs too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.engine.config import SamplingParams
from core.engine.inspect.attention import SERVE, NotPageable, implementation, set_implementation
from core.engine.inspect.cache_codes import Rounding, amplification
from core.engine.inspect.probe import (
    SHORT,
    Chunks,
    Run,
    largest_difference,
    own_logits,
    probe_sequences,
    rounding_bound,
    shaken_bound,
    stepwise_logits,
)
from core.engine.steps.model_runner import SequenceCache
from core.engine.steps.sequence import Sequence as EngineSequence
from core.engine.steps.step import Part, Step

RunProbes = Callable[[Sequence[list[int]]], Mapping[str, list[Tensor]]]
"""Returns, by phase, the logits of each sequence's last two tokens, the last of them computed by that phase."""


@dataclass(frozen=True, slots=True)
class OwnForward:
    """What a model's own forward gives for the probes."""

    probes: list[list[int]]
    #: The logits of each one's last two tokens, (2, vocabulary).
    logits: list[Tensor]
    #: By how much logits may differ from these.
    bound: float
    #: Returns by how much they may where roundings decide, as of a router near a tie. It takes several forwards.
    shaken: Callable[[], float]

    def why_not(self, run_probes: RunProbes) -> str:
        """Return how a run of the probes differs from them; "" where it does by rounding alone."""
        bound = self.bound
        for phase, logits in run_probes(self.probes).items():
            difference = largest_difference(logits, self.logits)
            if not difference <= bound:
                bound = max(bound, self.shaken())
            if not difference <= bound:
                return (
                    f"a prefill and one {phase} step on the paged cache differ from its own forward by "
                    f"{difference:.2g}, more than rounding ({bound:.2g})"
                )
        return ""


def probe_limits(
    num_blocks: int, block_size: int, *, max_model_len: int, max_num_seqs: int, num_drafts: int
) -> tuple[int, int]:
    """Return the most tokens of a probe, and the most probes at once, that an empty cache of so many blocks holds.

    A cache that barely holds the longest context gets a shorter long probe, so that a short one still shares its steps.
    Where even two of the shortest have no room, there is one probe.
    """
    short = -(-(SHORT + 1 + num_drafts) // block_size)
    longest = min(block_size * max(num_blocks - short, num_blocks // 2), max_model_len)
    # The shortest probe has a token for prefill and one for decode.
    return (longest, max_num_seqs) if longest >= 2 and max_num_seqs > 1 else (max_model_len, 1)


def check_same_function(
    model: Any,
    run_probes: RunProbes,
    *,
    max_model_len: int,
    max_num_seqs: int,
    rounding: Rounding | None,
    chunks: Chunks | None = None,
    stepwise: bool = False,
) -> OwnForward:
    """Compare a prefill and one decode step with the model's own forward, and return what that gave.

    Raises `NotPageable` if they differ.

    This finds models that keep state where none was found (in attributes or caches of their own), and models whose
    sequences see each other: a long and a short sequence share both steps, each compared with a run of its own.
    chunks: how prompts are cut, where that changes a model's arithmetic; see `rounding_bound`. stepwise: whether the
    model's code for one token computes another function than its code for prompts, so that one forward is no yardstick.
    rounding: of a quantised cache. It is compared with the forward on transformers' cache of the same codes, where
    differences may be larger by `amplification`.
    """
    probes = probe_sequences(model, max_model_len=max_model_len, max_num_seqs=max_num_seqs)
    run: Run = stepwise_logits if stepwise else own_logits
    expected = run(model, probes)
    bound = rounding_bound(model, probes, expected, chunks)
    if rounding is not None:
        plain, expected = expected, own_logits(model, probes, rounding.caching)
        if all(torch.equal(one, other) for one, other in zip(plain, expected, strict=True)):
            raise NotPageable(
                f"its forward takes keys and values past transformers' cache, so {rounding.dtype} of them "
                "can't be checked"
            )
        bound *= amplification(bound, rounding.dtype)
    # The bound of a quantised cache is one of the codes' steps, which dwarf those of rounding.
    shaken = _shaking(model, probes, expected, run) if rounding is None else float
    own = OwnForward(probes, expected, bound, shaken)
    set_implementation(model, SERVE)
    if why := own.why_not(run_probes):
        raise NotPageable(
            f"{why}: it keeps state outside attention and the layers found to keep some, or mixes sequences of a step"
        )
    return own


def _shaking(model: Any, probes: list[list[int]], expected: list[Tensor], run: Run) -> Callable[[], float]:
    """Return what computes `shaken_bound` by the attention that the model has now, once."""
    name: str = model.config._attn_implementation

    @functools.cache
    def bound() -> float:
        with implementation(model, name):
            return shaken_bound(model, probes, expected, run)

    return bound


def chunks_of(num_tokens: int, *, singly: bool) -> list[int]:
    """Return the chunks in which a probe's prompt is computed where the cache holds states, the later ones token by
    token if `singly`."""
    first = num_tokens // 2
    later = [1] * (num_tokens - first) if singly else [num_tokens - first]
    return [each for each in (first, *later) if each]


def in_pieces(step: Step, most: int, run: Callable[[Step], Tensor]) -> Tensor:
    """Return the logits (seqs, vocabulary) that a step of prompts gives, run at once, or in pieces of `most` tokens.

    run: computes a step. Sequences are advanced where they are computed in pieces.
    """
    if step.num_tokens <= most:
        return run(step)
    ends = []
    for part in step.parts:
        for first in range(0, part.num_tokens, most):
            piece = Part(part.sequence, min(most, part.num_tokens - first))
            logits = run(Step("prefill", (piece,)))
            piece.sequence.num_computed += piece.num_tokens
        ends.append(logits)
    return torch.cat(ends)


class Probes:
    """Runs the probes of the self-check on an empty cache, as the engine runs sequences."""

    def __init__(
        self, cache: SequenceCache, run: Callable[[Step], Tensor], *, num_drafts: int, in_chunks: bool
    ) -> None:
        """run: computes a step and returns the logits (seqs, vocabulary) after each sequence's pending tokens.

        in_chunks: whether the first probe's prompt is computed in two chunks, the second beside the other probe: in
        between, states may be lost, and a count of the model's own.
        """
        self._cache = cache
        self._run = run
        self._num_drafts = num_drafts
        self._in_chunks = in_chunks

    def run(self, probes: Sequence[list[int]], longest: int) -> dict[str, list[Tensor]]:
        """Return the logits (2, vocabulary) of each one's last two tokens, the last by decode and by verify.

        longest: tokens that one may come to have, drafts included; the empty cache has room for so many of each.
        """
        sequences = []
        for index, probe in enumerate(probes):
            end = min(len(probe) + self._num_drafts, longest)
            params = SamplingParams(max_new_tokens=end + 1 - len(probe))
            sequences.append(EngineSequence(index, probe[:-1], params))
            joined = self._cache.join(sequences[-1]) and self._cache.grow(sequences[-1], end)
            assert joined, "the cache has no room for a probe"
        chunk, *others = chunks_of(len(sequences[0]), singly=False)
        if others and self._in_chunks:
            self._run(Step("prefill", (Part(sequences[0], chunk),)))
            sequences[0].num_computed = chunk
        first = self._run(Step("prefill", tuple(Part(s, s.num_pending) for s in sequences)))
        for sequence, probe in zip(sequences, probes, strict=True):
            sequence.num_computed, sequence.generated = len(sequence), probe[-1:]
        parts = [Part(sequence, 1) for sequence in sequences]
        found = {"decode": self._run(Step("decode", tuple(parts)))}
        if self._num_drafts:
            # The same token once more, followed by as many other tokens as fit.
            drafts = [tuple(probe[: min(self._num_drafts, longest - len(probe))]) for probe in probes]
            parts = [Part(sequence, 1, guesses) for sequence, guesses in zip(sequences, drafts, strict=True)]
            found["verify"] = self._run(Step("verify", tuple(parts)))
        for sequence in sequences:
            self._cache.release(sequence)
        return {phase: list(torch.stack([first, second], dim=1)) for phase, second in found.items()}
