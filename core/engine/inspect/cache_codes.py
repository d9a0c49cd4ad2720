"""A quantised key/value cache: its dtype, its scales, and a transformers cache that rounds in the same way.

`core::attention` reads all keys and values back from the cache. So a model's own forward, every key and value rounded
to codes on its way into transformers' cache, is the same function: the engine's checks compare with that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from core.common.graphs.indexing import checked_indices
from core.common.numerics import Verdict, judge
from core.common.ops.attention.cache import read, stored
from core.engine.inspect.attention import AttentionLayer, NotPageable, inspect
from core.engine.inspect.probe import Caching
from core.engine.models.forward import cache_name
from core.errors import ModelError
from core.quantization.tensors import CACHE_SCALE_NAMES

T = TypeVar("T")
CACHE_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"fp8": torch.float8_e4m3fn})
"""Dtypes of codes by the names of `EngineConfig.kv_cache_dtype`."""

Scales = tuple[Tensor | None, Tensor | None]
"""Of keys and of values: () or (K,) fp32, None for 1."""


def spacing(dtype: torch.dtype) -> float:
    """Return the distance of two neighbouring codes over the codes themselves, at most."""
    return torch.finfo(dtype).eps


def amplification(noise: float, dtype: torch.dtype) -> float:
    """Return how many times larger rounding to codes of `dtype` makes a relative difference `noise`, in the mean.

    Of values that differ by d, a part of d / s falls on two sides of a boundary between codes s apart, and then differs
    by s: their mean square becomes d * s, their difference sqrt(d * s), which is d * sqrt(s / d). At least 1.
    """
    return math.sqrt(max(spacing(dtype) / noise, 1.0)) if noise > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Rounding:
    """A quantised cache, as checks need to imitate it."""

    #: Makes caches with which the model's own forward rounds in the same way.
    caching: Caching
    #: Of the codes.
    dtype: torch.dtype


def judge_rounded(
    results: Sequence[Tensor],
    eagers: Sequence[Tensor],
    exact: Sequence[Tensor],
    references: Sequence[Tensor],
    dtype: torch.dtype,
) -> Verdict:
    """Judge logits that were computed on a cache of codes by criterion T1; all are of the same tokens, in lists.

    eagers, exact: eager's and the fp64 ones without codes, whose difference is the yardstick; references: fp64 with
    codes. Codes amplify rounding differences; T1's bounds are multiplied by their `amplification`.
    """
    result, eager, plain, reference = (torch.cat(list(each)).cpu() for each in (results, eagers, exact, references))
    error = eager.double() - plain
    noise, yardstick = float(error.norm() / plain.norm()), (reference + error).to(eager.dtype)
    return judge(result, yardstick, reference, slack=amplification(noise, dtype))


def layer_scales(module: nn.Module, layer: AttentionLayer, device: torch.device) -> Scales:
    """Return the scales that an attention module has as `k_scale` and `v_scale`; None for one that it lacks.

    Each is a number, or a tensor of one number or of one for each key/value head, as checkpoints with a quantised cache
    have them. Raises `ModelError` for anything else.
    """
    found: list[Tensor | None] = []
    for name in CACHE_SCALE_NAMES:
        given = getattr(module, name, None)
        if given is None:
            found.append(None)
            continue
        scale = torch.as_tensor(given).detach().to(device, torch.float32)
        scale = scale.reshape(()) if scale.numel() == 1 else scale.flatten()
        if scale.numel() not in (1, layer.num_kv_heads) or not bool((scale.isfinite() & (scale > 0)).all()):
            raise ModelError(
                f"a quantised key/value cache for {layer.path}",
                found=f"its {name} has shape {tuple(torch.as_tensor(given).shape)} and values {scale.tolist()[:8]!r}"
                if scale.dim()
                else f"its {name} is {float(scale)}",
                remedy=f"give one positive number, or one for each of its {layer.num_kv_heads} key/value heads",
            )
        found.append(scale)
    return found[0], found[1]


def rounding(
    model: Any, layers: Mapping[nn.Module, AttentionLayer], scales: Mapping[nn.Module, Scales], dtype: torch.dtype
) -> Rounding:
    """Return how the model's own forward gets caches that hold what codes of `dtype` stand for.

    Raises `NotPageable` where its layers are not numbered as transformers' caches number them.
    """
    by_index = {_index(module, layer): scales[module] for module, layer in layers.items()}

    def seen(index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        rounded = []
        for new, scale in zip((key, value), _numbered(by_index, index), strict=True):
            scale = None if scale is None else scale.to(new.device)
            rows = new.transpose(1, 2)  # (B, K, T, D): the scales are of K
            wide = torch.promote_types(new.dtype, torch.float32)
            rounded.append(read(stored(rows, dtype, scale), wide, scale).to(new.dtype).transpose(1, 2))
        return rounded[0], rounded[1]

    return Rounding(lambda: _arguments(model, _changing_cache()(model.config, seen)), dtype)


@torch.no_grad()
@checked_indices()
def calibrate(model: Any, prompts: Sequence[Sequence[int]], *, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
    """Set `k_scale` and `v_scale` of each attention module so that the prompts' largest key and value just fit.

    prompts: token ids like those that the model will get. Replaces scales that are there. Raises `NotPageable` where
    the model can't run on a paged cache at all.
    """
    layers = inspect(model, max_len=max(map(len, prompts)))
    modules = {_index(module, layer): module for module, layer in layers.items()}
    largest: dict[tuple[int, int], Tensor] = {}

    def seen(index: int, *new: Tensor) -> tuple[Tensor, ...]:
        for which, values in enumerate(new):
            top = values.abs().amax().float()
            largest[index, which] = torch.maximum(largest.get((index, which), top), top)
        return new

    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
        model(input_ids=ids, return_dict=True, **_arguments(model, _changing_cache()(model.config, seen)))
    for (index, which), top in largest.items():
        scale = (top / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny)
        object.__setattr__(_numbered(modules, index), CACHE_SCALE_NAMES[which], scale)


def _arguments(model: Any, cache: Any) -> dict[str, Any]:
    return {cache_name(model): cache, "use_cache": True}


def _numbered(found: Mapping[int, T], index: int) -> T:
    """Return what was found under the number that a cache was given for a layer."""
    if index not in found:
        raise NotPageable(f"it caches keys and values as layer {index}, which no attention layer says to be")
    return found[index]


def _index(module: nn.Module, layer: AttentionLayer) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise NotPageable(f"{layer.path} has no layer_idx, and a quantised cache is checked by transformers' cache")
    return index


@functools.cache
def _changing_cache() -> Any:
    """Return the class of transformers' caches that hold keys and values changed on the way in."""
    from transformers import DynamicCache

    class ChangingCache(DynamicCache):
        """Takes `change(layer, key, value)`, which returns what is kept in their place."""

        def __init__(self, config: Any, change: Callable[..., tuple[Tensor, Tensor]]) -> None:
            super().__init__(config=config)
            self._change = change

        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            kept = self._change(layer_idx, key_states, value_states)
            return super().update(*kept, layer_idx, *args, **kwargs)

    return ChangingCache
