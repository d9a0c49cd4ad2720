"""Compares ways to run a model by their logits on a few tokens: do they agree up to rounding?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.common.graphs.indexing import checked_indices
from core.common.graphs.torch_modes import CallsSeen, entered
from core.engine.inspect.attention import implementation
from core.engine.models.architecture import max_position
from core.engine.models.forward import accepted_arguments, adds_tokens, whole_logits
from core.quantization.layers import QuantizedModule, rounds_inputs

LONG, SHORT = 96, 5
"""Tokens of the two sequences that share a prefill; far apart, so that a leak between the sequences shows."""
_SHAKES = 16
"""Runs of a model by which `shaken_bound` finds what rounding can do to it."""
_CHOOSING = ("topk", "sort", "argsort", "argmax", "kthvalue", "bucketize", "searchsorted", "round")
_BY_LONGEST = ("longrope", "dynamic")
_ORIGINAL = "original_max_position_embeddings"

Caching = Callable[[], dict[str, Any]]
"""Returns a new cache as the arguments by which a forward takes it."""
Run = Callable[[Any, Sequence[Sequence[int]]], list[Tensor]]
"""Returns a model's logits as `own_logits` does."""
Chunks = Callable[[int], list[int]]
"""Returns the lengths of the chunks in which a prompt of that many tokens is computed."""


def function_bound(model: Any) -> float:
    """Return the difference above which two runs count as different functions: far above rounding, far below lost
    state.

    Layers that quantise their inputs count as half precision, since codes have as few digits.
    """
    return 1e-3 if _dtype(model).itemsize >= 4 and not rounds_inputs(model) else 0.1


def position_difference(model: Any) -> float:
    """Return how much position ids 0, 1, 2, … change the model's own forward; infinity where it declares none.

    0 up to rounding for most; some count from another number (`core.engine.inspect.positions`).
    """
    return given_difference(model) if "position_ids" in accepted_arguments(model) else float("inf")


@checked_indices()
def given_difference(model: Any, first: int = 0) -> float:
    """Return how much position ids first, first + 1, … change the model's own forward, which may ignore them."""
    tokens = probe_tokens(model, min(8, max_position(model.config) or 8))
    ids = torch.tensor([tokens], device=next(model.parameters()).device)
    positions = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
    expected, given = (
        model(input_ids=ids, use_cache=False, return_dict=True, **arguments).logits
        for arguments in ({}, {"position_ids": positions})
    )
    return relative_difference(given, expected)


def counts_from_zero(model: Any) -> bool:
    """Tell whether position ids 0, 1, 2, … may be passed to the model; then they also may be moved and mixed."""
    return position_difference(model) <= function_bound(model)


def probe_tokens(model: Any, length: int, first: int = 3) -> list[int]:
    """Return `length` token ids for comparing two ways to run a model: no padding, which some do not count."""
    text = model.config.get_text_config()
    tokens = [(7 * i + first) % text.vocab_size for i in range(length)]
    padding = getattr(text, "pad_token_id", None)
    return [(each + 1) % text.vocab_size if each == padding else each for each in tokens]


def probe_sequences(model: Any, *, max_model_len: int, max_num_seqs: int) -> list[list[int]]:
    """Return a long and a short sequence, if two may run at once; the last token of each is for a decode step."""
    long = max(1, min(max_model_len - 2, LONG))
    lengths = (long, min(SHORT, long))[:max_num_seqs]
    return [probe_tokens(model, length + 1, 3 + 8 * index) for index, length in enumerate(lengths)]


def relative_difference(logits: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of what is expected; tokens that neither allows are left out."""
    barred = (logits == expected) & expected.isinf()
    ours, theirs = (each.float().masked_fill(barred, 0.0) for each in (logits, expected))
    return float((ours - theirs).norm() / theirs.norm())


def largest_difference(logits: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the relative difference of the sequence that differs most; NaN if any is."""
    each = [relative_difference(ours, theirs) for ours, theirs in zip(logits, expected, strict=True)]
    return float("nan") if any(value != value for value in each) else max(each)


def own_logits(model: Any, sequences: Sequence[Sequence[int]], caching: Caching | None = None) -> list[Tensor]:
    """Return the logits (2, vocabulary) of the two last tokens of each sequence, by the model's forward.

    caching: makes the cache that the keys and values go through; without, the forward runs uncached.
    """
    return [forward_logits(model, tokens, caching, first=max(0, len(tokens) - 2)) for tokens in sequences]


def stepwise_logits(model: Any, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return what `own_logits` does, the last token of each by the model's code for one token, on its own cache."""
    return _cached_logits(model, sequences)


@checked_indices()
def forward_logits(model: Any, tokens: Sequence[int], caching: Caching | None = None, first: int = 0) -> Tensor:
    """Return the logits (len(tokens) - first, vocabulary) behind the tokens of a sequence from `first` on.

    They are of the model's forward, one call for all; of a model that `adds_tokens`, one call for each. caching: as
    `own_logits`.
    """
    ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    if caching is None and adds_tokens(model):
        return torch.cat([whole_logits(model, ids[:, : end + 1]) for end in range(first, len(tokens))])
    arguments = {"use_cache": False} if caching is None else caching()
    logits: Tensor = model(input_ids=ids, return_dict=True, **arguments).logits[0, first:]
    return logits


def rounding_bound(
    model: Any, sequences: Sequence[Sequence[int]], expected: Sequence[Tensor], chunks: Chunks | None = None
) -> float:
    """Return the difference from `expected`, its `own_logits`, up to which a run is the model's function and rounding.

    It is three times the model's difference from itself when it computes in other ways (with a cache, with eager
    attention), and at least a few units of its dtype. A run that differs by more than `function_bound` is another
    function, and no yardstick. chunks: how prompts are cut in the run that is judged, where that changes the arithmetic
    (the order in which a recurrent layer sums); the model computes them so on its own cache, too.
    """
    dtype, most = _dtype(model), function_bound(model)
    half = dtype.itemsize < 4
    cached = _difference(_cached_logits, model, sequences, expected)
    if not cached <= most:
        return 0.03 if half else most
    spelled_out = _difference(_eager_logits, model, sequences, expected)
    chunked = 0.0 if chunks is None else _difference(partial(_cached_logits, chunks=chunks), model, sequences, expected)
    noise = max(cached, *(each for each in (spelled_out, chunked) if each <= most), 0.0)
    # Hosts may repeat half precision bit by bit, so that the noise is 0, and a router may flip where it did not here.
    # In fp32 the order of thousands of terms moves more than a few units, and anything wrong is still far above.
    floor = (8 if half else 64) * torch.finfo(dtype).eps
    return min(max(3 * noise, floor), 3 * most)


def shaken_bound(model: Any, sequences: Sequence[Sequence[int]], expected: Sequence[Tensor], run: Run) -> float:
    """Return the difference that rounding makes of `expected` in a model that chooses by numbers; 0 for others.

    A router or a quantiser near a tie chooses otherwise after the least rounding, which the few ways in which
    `rounding_bound` computes may miss. So the results of embeddings and linear layers are moved by up to half a unit at
    random, some times over, and a run may differ a little more than the worst of these. Unrelated logits differ by 1.4.
    run: what gave `expected`.
    """
    if not rounds_inputs(model) and (_dtype(model).itemsize >= 4 or not _chooses(model, sequences)):
        return 0.0
    unit = torch.finfo(_dtype(model)).eps / 2
    noise = [0.0]
    for seed in range(_SHAKES):
        with _shaken(model, unit, seed):
            noise.append(_difference(run, model, sequences, expected))
    return min(1.25 * max(each for each in noise if each < float("inf")), 0.9)


def _chooses(model: Any, sequences: Sequence[Sequence[int]]) -> bool:
    """Tell whether the model's forward chooses by the size of numbers, as a router does."""
    seen: set[str] = set()
    with entered(CallsSeen(lambda name, _args: seen.add(name))):
        own_logits(model, sequences[:1])
    return not seen.isdisjoint(_CHOOSING)


@contextmanager
def _shaken(model: Any, unit: float, seed: int) -> Iterator[None]:
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)

    def shake(_module: nn.Module, _args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        signs = torch.empty(output.shape, device=output.device, dtype=torch.float32).uniform_(
            -1, 1, generator=generator
        )
        return (output.float() * (1 + unit * signs)).to(output.dtype)

    handles = [
        module.register_forward_hook(shake)
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Embedding | QuantizedModule)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def depends_on_longest(config: Any, max_model_len: int) -> str:
    """Return why a position's rotation depends on the longest sequence of its step, or "" if it does not."""
    text = config.get_text_config()
    for rope in _ropes(text):
        kind = rope.get("rope_type", rope.get("type"))
        original = rope.get(_ORIGINAL) or getattr(text, _ORIGINAL, None) or max_position(config) or max_model_len
        if kind in _BY_LONGEST and original < max_model_len:
            return (
                f"with rope type {kind!r} its position table depends on the longest sequence of the step beyond "
                f"{original} tokens, and sequences of up to {max_model_len} would share one"
            )
    return ""


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every set of rope parameters: one for all layers, or one per kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        stated = getattr(config, name, None)
        if isinstance(stated, Mapping):
            yield stated
            yield from (value for value in stated.values() if isinstance(value, Mapping))


def _dtype(model: Any) -> torch.dtype:
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype


def _difference(run: Any, model: Any, sequences: Sequence[Sequence[int]], expected: Sequence[Tensor]) -> float:
    try:
        return largest_difference(run(model, sequences), expected)
    except Exception:  # a model may raise anything, and is then no yardstick
        return float("inf")


def _eager_logits(model: Any, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    with implementation(model, "eager"):
        return own_logits(model, sequences)


def _whole(count: int) -> list[int]:
    return [count]


@checked_indices()
def _cached_logits(model: Any, sequences: Sequence[Sequence[int]], chunks: Chunks = _whole) -> list[Tensor]:
    """Run all but the last token, in these chunks, then the last, on whatever the forward returns and takes under one
    name."""
    rows = []
    counted = counts_from_zero(model)  # others go on counting by the cache's length
    for tokens in sequences:
        ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        found: list[Tensor] = []
        cache: dict[str, Any] = {}
        for each in positions.split([*chunks(ids.shape[1] - 1), 1], dim=1):
            given = {"position_ids": each, **cache} if counted else cache
            out = model(input_ids=ids[:, each[0]], use_cache=True, return_dict=True, **given)
            names = accepted_arguments(model) & out.keys()
            cache = {name: out[name] for name in names if out[name] is not None}
            if not cache:
                raise ValueError("its forward returns no cache")
            found.append(out.logits[0, -1:].clone())
        rows.append(torch.cat(found[-2:]))
    return rows
