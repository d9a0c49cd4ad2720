"""transformers' own static cache, fit for capture, and a model's prefill and decode on it as functions to trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from core.engine.inspect.probe import counts_from_zero, function_bound, probe_tokens, relative_difference
from core.engine.models.forward import cache_name

__all__ = ["CachedPhase", "full_mask", "static_cache", "static_phases"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedPhase:
    """One phase of a model bound to a cache, whose memory every call reads and writes.

    function: called with the inputs by name, returns logits. dynamic: for `core.compilation.trace.tracing`, the
    dimensions of each input whose size is free.
    """

    name: str
    function: Callable[..., Tensor]
    inputs: Mapping[str, Tensor]
    dynamic: Mapping[str, Sequence[int]] = field(default_factory=dict)


def static_cache(model: Any, max_len: int) -> Any:
    """Return a `transformers.StaticCache` of max_len positions, layers with a window made to hold all of them."""
    from transformers import StaticCache

    return changed(_LengthNow, _full_length(StaticCache(config=model.config, max_cache_len=max_len), max_len))


def cache_tensors(cache: Any) -> tuple[Tensor, ...]:
    """Return the tensors that the layers of a static cache have allocated, as attributes of theirs or in dicts."""
    held = [value for layer in cache.layers for value in vars(layer).values()]
    held += [each for value in held if isinstance(value, dict) for each in value.values()]
    return tuple(value for value in held if isinstance(value, Tensor))


def full_mask(input_ids: Tensor, max_len: int) -> Tensor:
    """Return an attention mask (B, max_len) that hides nothing.

    A model that is given none may make one as long as its cache is filled, a number that is data and can't be traced.
    What is not filled yet, the causal mask hides.
    """
    return torch.ones(input_ids.shape[0], max_len, dtype=torch.int64, device=input_ids.device)


def static_phases(
    model: Any, *, batch_size: int = 2, num_tokens: int = 7, max_len: int = 24, masked: bool = False
) -> tuple[CachedPhase, CachedPhase]:
    """Return prefill of num_tokens tokens per sequence and decode of one more, each ready to be traced or called.

    Both return logits (B, T, vocabulary); the token dimension of prefill is free.

    masked: give the model a `full_mask`, for one that can't be traced without. The model runs eagerly to allocate the
    caches and, for decode, to fill its own. Raises what the model or transformers raises where it has no static cache,
    and ValueError where the mask changes a result.
    """
    positions = counts_from_zero(model)
    prompts = [probe_tokens(model, num_tokens, first=3 + 5 * index) for index in range(batch_size)]
    ids = torch.tensor(prompts, device=model.device)
    prefill = {"input_ids": ids}
    decode = {"input_ids": ids[:, :1] + 1}
    if positions:
        prefill["position_ids"] = torch.arange(num_tokens, device=ids.device).repeat(batch_size, 1)
        decode["position_ids"] = torch.full((batch_size, 1), num_tokens, device=ids.device)
    functions = []
    for filled in (False, True):
        cache = static_cache(model, max_len)
        function = _bound(model, cache_name(model), cache, mask_len=max_len if masked else 0)
        with torch.no_grad():
            logits = function(**prefill)  # the layers allocate here, on first use
            if masked:
                unmasked = _bound(model, cache_name(model), static_cache(model, max_len))
                _check_mask(unmasked(**prefill), logits, function_bound(model))
        if not filled:
            cache.reset()
            _begin_anew(cache)
        functions.append(function)
    return (
        CachedPhase(name="prefill", function=functions[0], inputs=prefill, dynamic=dict.fromkeys(prefill, (1,))),
        CachedPhase(name="decode", function=functions[1], inputs=decode),
    )


class _Unset(dict[int, bool]):
    """What transformers' recurrent layers note of their states, of a layer in which no state is ever noted."""

    def __setitem__(self, key: int, value: bool) -> None: ...


def _begin_anew(cache: Any) -> None:
    """Have each call find no states of the call before, as a prompt's graph does: notes are no tensors, and a graph
    that made some would not make them again."""
    for layer in cache.layers:
        if isinstance(noted := getattr(layer, "has_previous_state", None), dict):
            layer.has_previous_state = _Unset(noted)


def _check_mask(expected: Tensor, logits: Tensor, bound: float) -> None:
    difference = relative_difference(logits, expected)
    if not difference <= bound:
        raise ValueError(f"with an attention mask that hides nothing its logits differ by {difference:.2g}")


def _bound(model: Any, name: str, cache: Any, *, mask_len: int = 0) -> Callable[..., Tensor]:
    def forward(input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        arguments: dict[str, Any] = {name: cache, "use_cache": True, "return_dict": True}
        if mask_len:
            arguments["attention_mask"] = full_mask(input_ids, mask_len)
        if position_ids is not None:
            arguments["position_ids"] = position_ids
        logits: Tensor = model(input_ids=input_ids, **arguments).logits
        return logits

    return forward


class _LengthNow:
    """The difference of our cache from transformers' own, whose layers give the tensor that they go on counting in: a
    model that asks before it writes, and computes after that, would have the length of later."""

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the length that a layer has now."""
        length = super().get_seq_length(layer_idx)  # type: ignore[misc]  # of the class that this one is put before
        return length.clone() if isinstance(length, Tensor) else length


def changed(difference: type, original: Any) -> Any:
    """Return a shallow copy of a layer or a cache that has the methods of `difference` before its own."""
    kind = _class_with(difference, cast("Any", type(original)))
    made = kind.__new__(kind)
    vars(made).update(vars(original))
    return made


@functools.cache
def _class_with(difference: type, base: type) -> Any:
    return type(base.__name__, (difference, base), {})  # messages name what the model's code knows


def _full_length(cache: Any, max_len: int) -> Any:
    """Give layers with a window room for the whole context; the model's mask keeps the window.

    transformers' own static layers with a window choose what to do by a Python number of tokens seen, which a captured
    step would repeat for ever.
    """
    from transformers.cache_utils import LinearAttentionAndStaticFullAttentionLayer, StaticLayer

    for index, layer in enumerate(cache.layers):
        if not getattr(layer, "is_sliding", False):
            continue
        states = getattr(layer, "number_of_states", 0)
        cache.layers[index] = (
            LinearAttentionAndStaticFullAttentionLayer(max_len, number_of_states=states)
            if states
            else StaticLayer(max_len)
        )
    return cache
