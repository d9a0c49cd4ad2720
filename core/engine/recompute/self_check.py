"""The check that whole sequences give what the model's own generation computes, and in which layouts they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.common.graphs.indexing import checked_indices
from core.common.graphs.torch_modes import CallsSeen, entered
from core.engine.inspect.probe import (
    LONG,
    SHORT,
    Caching,
    forward_logits,
    function_bound,
    largest_difference,
    own_logits,
    probe_tokens,
    relative_difference,
    rounding_bound,
)
from core.engine.models.forward import accepted_arguments
from core.engine.models.hf import import_transformers
from core.engine.recompute.model import Way, WholeForward, whole_inputs
from core.engine.static.self_check import told_of

_NUM_STEPS = 4
"""Tokens of the model's own generation that are compared."""
_OTHER_FUNCTION = 0.1
"""A model's generation differs by less from its forward on whole sequences, also where kernels inside of it compute in
half precision; unrelated logits differ by 1.4."""
_GROWTH = 4
"""How many times the ops of a short sequence the longest may call: attention by blocks calls fewer, a loop over tokens
more."""
_LAYOUTS = (
    Way(padded=True, masked=True, last_only=True),
    Way(padded=True, last_only=True),
    Way(padded=True, masked=True),
    Way(padded=True),
    Way(padded=False),
)
"""In the order in which they are tried."""
Batch = Sequence[Sequence[int]]
Run = Callable[[Batch], Tensor]
"""Returns the logits (B, vocabulary) behind each of these sequences."""


class Probes:
    """Sequences of known tokens, and what the model's own forward gives behind each of them alone."""

    def __init__(self, model: Any, max_model_len: int, caching: Caching | None) -> None:
        """Raise `ValueError` where the model does not give the same twice. caching: as of `forward_logits`."""
        longest = max(1, min(max_model_len - 1, LONG))
        short = min(SHORT, longest)
        sizes = (longest, short, longest, short)
        self._sequences = [probe_tokens(model, size, 3 + 8 * index) for index, size in enumerate(sizes)]
        self._expected = [self._alone(model, each, caching) for each in self._sequences]
        #: Up to which a run is the model's function and rounding.
        two = self._sequences[:2]
        self.bound = rounding_bound(model, two, own_logits(model, two, caching))
        again = relative_difference(self._alone(model, self._sequences[0], caching), self._expected[0])
        if not again <= self.bound:
            raise ValueError(f"its forward on the same tokens differs by {again:.2g} the second time")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return len(self._sequences[0])

    def why_not_alone(self, run: Run, bound: float) -> str:
        """Return how a long and a short sequence differ, each in a call of its own; "" where they don't."""
        return self._why_not(run, ([0], [1]), bound, "a sequence")

    def why_not_wide(self, run: Run, bound: float) -> str:
        """Return how a short sequence differs by a run whose padding is as long as can be; "" where it does not."""
        return self._why_not(run, ([1],), bound, "a sequence with all of its padding")

    def why_not_together(self, run: Run, bound: float, *, padded: bool) -> str:
        """Return how sequences differ that share a call, of several lengths where it is padded; "" where they don't."""
        shared = ([0, 1, 3], [2, 0]) if padded else ([0, 2], [3, 1])
        return self._why_not(run, shared, bound, "a sequence beside others")

    def _why_not(self, run: Run, batches: Sequence[list[int]], bound: float, what: str) -> str:
        try:
            for batch in batches:
                logits = run([self._sequences[index] for index in batch])
                found = largest_difference(list(logits), [self._expected[index] for index in batch])
                if not found <= bound:
                    return f"{what} differs from its own forward by {found:.2g}"
        except Exception as error:  # the model's code may raise anything
            return told_of(error)
        return ""

    @staticmethod
    def _alone(model: Any, tokens: list[int], caching: Caching | None) -> Tensor:
        return forward_logits(model, tokens, caching, first=len(tokens) - 1)[0]


@torch.no_grad()
@checked_indices()
def choose_way(model: Any, *, max_model_len: int, most: int) -> tuple[Way, str, Probes]:
    """Return how whole sequences are computed, what that means in words, and the probes that showed it.

    most: sequences at once that are asked for. Raises `ValueError` where the model gives something else each time, or
    generates something else by its own code.
    """
    caching = _generates_by(model, max_model_len)
    probes = Probes(model, max_model_len, caching)
    longest = max_model_len - 1  # a token is generated behind it
    loops = _why_a_loop(model, longest, probes.bound)
    width = min(max_model_len, probes.longest + SHORT)
    wrong, touching = list[str](), list[tuple[Way, str, str]]()
    for layout in _LAYOUTS:
        if layout.last_only and "logits_to_keep" not in accepted_arguments(model):
            continue
        way = replace(layout, as_prompt=caching is not None, loops=bool(loops))
        run = partial(_run, WholeForward(model, way), width if way.padded else None)
        wide = partial(_run, WholeForward(model, way), max_model_len if way.padded else None)
        if why := probes.why_not_alone(run, probes.bound) or probes.why_not_wide(wide, probes.bound):
            wrong.append(why)
            continue
        told = loops if way.padded else f"without padding, eagerly: with it, {_listed(wrong)}"
        if most == 1:
            return way, told, probes
        if why := probes.why_not_together(run, probes.bound, padded=way.padded):
            touching.append((way, told, why))
            continue
        return replace(way, batched=True), _joined(f"up to {most} sequences at once", told), probes
    if not touching:
        raise ValueError(_listed(wrong))
    way, told, _ = touching[0]
    return way, _joined(f"one sequence at a time: {_listed([each for *_, each in touching])}", told), probes


def _run(forward: WholeForward, width: int | None, batch: Batch) -> Tensor:
    return forward(**whole_inputs(batch, next(forward.model.parameters()).device, width=width))


def _listed(reasons: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(reasons))


def _joined(*said: str) -> str:
    return "; ".join(filter(None, said))


def _why_a_loop(model: Any, longest: int, bound: float) -> str:
    """Return how many more ops the model's forward calls for the longest sequence; "" where these are few.

    Raises `ValueError` where the forward gives something else for that sequence the second time: hashes that are drawn
    show there, where they divide the sequence.
    """
    few, _ = _calls_of(model, min(SHORT, longest))
    many, logits = _calls_of(model, longest)
    again = relative_difference(_calls_of(model, longest)[1], logits)
    if not again <= bound:
        raise ValueError(f"its forward on the same {longest} tokens differs by {again:.2g} the second time")
    if many <= _GROWTH * few:
        return ""
    return f"eagerly: its code loops over tokens, {few} calls of ops for {SHORT} and {many} for {longest}"


def _calls_of(model: Any, length: int) -> tuple[int, Tensor]:
    """Return how many ops the model's forward calls for so many tokens, and the logits behind the last one."""
    seen = list[str]()
    with entered(CallsSeen(lambda name, _args: seen.append(name))):
        logits = forward_logits(model, probe_tokens(model, length), first=length - 1)
    return len(seen), logits


def _generates_by(model: Any, max_model_len: int) -> Caching | None:
    """Return how the forward on whole sequences is called to give what `generate` of the model gives, on whatever cache
    that has: without a cache where it can be so; else as for a prompt, some of which keep states more precisely.

    Raises `ValueError` where neither gives that.
    """
    count = min(_NUM_STEPS, max_model_len - 1)
    prompt = probe_tokens(model, min(max_model_len - count, 4 * SHORT), 5)
    expected, tokens = _generated(model, prompt, count)
    ways: tuple[Caching | None, ...] = (None, lambda: {"use_cache": True})
    found = []
    for way in ways:
        logits = forward_logits(model, tokens, way, first=len(prompt) - 1)
        found.append(relative_difference(logits, expected))
        if found[-1] <= function_bound(model):
            return way
    if not min(found) <= _OTHER_FUNCTION:
        raise ValueError(f"its own generation differs from its forward on whole sequences by {min(found):.2g}")
    return ways[found.index(min(found))]


def _generated(model: Any, prompt: list[int], count: int) -> tuple[Tensor, list[int]]:
    """Return the logits of `count` tokens that the model's own code generates, and the text before the last of them."""
    ids = torch.tensor([prompt], device=next(model.parameters()).device)
    how: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "disable_compile": True, "pad_token_id": 0}
    how |= {"output_logits": True, "return_dict_in_generate": True}
    own = model.generation_config
    model.generation_config = import_transformers().GenerationConfig()  # what it says of sampling is not asked
    try:
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    except Exception as error:  # the model's code may raise anything
        raise ValueError(f"its own generation fails: {told_of(error)}") from None
    finally:
        model.generation_config = own
    return torch.cat(generated.logits), generated.sequences[0, :-1].tolist()
